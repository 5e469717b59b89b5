"""A store on a server, and spread over a cluster: the statements that it sends, and what a network may do to them.

That queries answer as in the embedded form is shown by the store's own tests, which run in all three forms (conftest).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drover_collector.config import StoreConfig, store_password
from drover_collector.store import Store, StoreError
from drover_collector.store.clickhouse import server
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.clickhouse.server import parse, redacted
from drover_collector.store.ha.cluster import Cluster
from drover_collector.store.ha.lease import KeeperEpochs
from drover_collector.store.schema import migrations
from drover_collector.store.schema import tables as schema
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Holding
from drover_core.settings import SettingsError
from testbed.fleets import T0, everything, gpu_row, samples
from testbed.front import Front, front

TABLES = schema.tables(30)
SHARDED = frozenset(t.name for t in TABLES if t.partition and t.columns[0].name == "entity_id")
FORM = Cluster("prod", "drover", SHARDED)


class Recorder(Clients):
    """Takes statements instead of an engine, after they have got the cluster's form."""

    def __init__(self, held: list[dict[str, str]], columns: list[dict[str, str]]) -> None:
        super().__init__(lambda: None, cluster=FORM)
        self.statements: list[str] = []
        self._held, self._columns = held, columns

    def rows(self, sql, parameters=None):
        if "compression_codec" in sql:
            return self._columns
        return self._held if "create_table_query" in sql else [{"v": 1, "n": 0}]

    def command(self, sql: str) -> None:
        self.statements += FORM.statements(sql)

    def insert(self, table, data, note="") -> None:
        """Notes of the schema's versions."""


def statements() -> list[str]:
    """Of a start on an empty cluster, and of one that brings older tables to their present form."""
    fresh = Recorder([], [])
    migrations.ensure(fresh, TABLES)
    held, columns = [], []
    for table in TABLES:
        engine = f"{table.engine}()" if "(" not in table.engine else table.engine
        ddl = f"CREATE TABLE {table.name} ... TTL toDateTime(ts) + toIntervalDay(1)"
        held.append(
            {"name": table.name, "ddl": ddl, "engine_full": f"{engine} ORDER BY x", "partition_key": table.partition,
             "sorting_key": table.order}
        )  # fmt: skip
        columns += [
            {"table": table.name, "name": c.name, "type": c.type, "comment": c.comment, "compression_codec": "NONE"}
            for c in table.columns[:-1]
        ]
    older = Recorder(held, columns)
    migrations.ensure(older, TABLES)
    lease = KeeperEpochs.ddl("drover", " ON CLUSTER `prod`")
    drops = FORM.statements("ALTER TABLE gpu_samples DROP PARTITION ID '1' SETTINGS max_partition_size_to_drop = 0")
    return [FORM.create_database(), *fresh.statements, *older.statements, lease, *drops]


def test_every_statement_of_the_cluster_form_is_one_to_the_engine(store: Store) -> None:
    found = statements()
    verbs = [sql.split()[0] for sql in found]
    assert verbs.count("CREATE") == len(TABLES) + len(SHARDED) + 2
    assert verbs.count("ALTER") >= len(TABLES)
    for sql in found:
        parsed = store.clients.rows("SELECT formatQuery({sql:String}) AS text", {"sql": sql})[0]["text"]
        replicated_by_itself = sql.startswith("ALTER TABLE") and sql.split()[2] in {t.name for t in TABLES} - SHARDED
        assert (" ON CLUSTER prod" in parsed) != replicated_by_itself, sql


def test_rows_rest_in_replicated_tables_and_samples_are_spread_by_entity(store: Store) -> None:
    created = {sql.split()[5]: sql for sql in statements() if sql.startswith("CREATE TABLE")}
    assert {"gpu_samples", "node_samples", "link_samples", "workload_samples"} <= SHARDED
    for table in TABLES:
        local = created[f"{table.name}_local" if table.name in SHARDED else table.name]
        kind = table.engine.partition("(")[0]
        where = "{shard}" if table.name in SHARDED else "all"
        assert f"ENGINE = Replicated{kind}('/clickhouse/tables/{where}/drover/{table.name}', '" in local
        if table.name in SHARDED:
            over = created[table.name]
            assert over.endswith(f"Distributed('prod', 'drover', '{table.name}_local', entity_id)")
    known = store.clients.rows("SELECT name FROM system.table_engines")
    used = {f"Replicated{t.engine.partition('(')[0]}" for t in TABLES} | {"Distributed", "KeeperMap"}
    assert used <= {row["name"] for row in known}


def test_who_takes_over_waits_for_all_that_it_reads_of_the_one_before() -> None:
    """Who holds which GPU and what cannot be read rest in tables of their own, and marks of late rows in another."""
    sent: list[str] = []
    store = SimpleNamespace(clients=SimpleNamespace(cluster=FORM, command=sent.append), retention_days=30)
    Store.catch_up(store)  # type: ignore[arg-type]  # it needs no more
    tables = {sql.rpartition(".")[2] for sql in sent}
    assert {"holders", "absent", "rollup_marks", "rollup_state", "inventory", "actions", "events"} <= tables
    assert not tables & SHARDED


def test_what_concerns_columns_goes_to_both_tables_and_partitions_to_one() -> None:
    both = FORM.statements("ALTER TABLE gpu_samples ADD COLUMN IF NOT EXISTS `x` Nullable(Int8)")
    assert [sql.split()[2] for sql in both] == ["gpu_samples_local", "gpu_samples"]
    assert [sql.split()[2] for sql in FORM.statements("ALTER TABLE gpu_samples MODIFY TTL x")] == ["gpu_samples_local"]
    assert [sql.split()[2] for sql in FORM.statements("ALTER TABLE events MODIFY TTL x")] == ["events"]
    assert FORM.statements("DESCRIBE TABLE gpu_samples") == ["DESCRIBE TABLE gpu_samples_local"]
    assert FORM.statements("SELECT 1 FROM gpu_samples") == ["SELECT 1 FROM gpu_samples"]


def test_rows_are_on_both_shards_and_a_resend_is_on_the_same(cluster_front: Front) -> None:
    store = Store.open(cluster_front.url("spread"), retention_days=3650, cluster="drover")
    try:
        store.entities.write(everything())
        batch = samples(Scope.GPU, [(gpu_row(n, g), T0, {"power_w": 300.0}) for n in range(3) for g in range(4)])
        store.samples.write(batch)
        store.samples.write(batch)
        found = store.clients.rows(
            "SELECT _shard_num AS shard, entity_id % 2 + 1 AS home, count() AS n FROM gpu_samples FINAL GROUP BY ALL"
        )
        assert {row["shard"] for row in found} == {1, 2}
        assert all(row["shard"] == row["home"] for row in found)
        assert sum(row["n"] for row in found) == 12
        assert np.array_equal(np.sort(np.unique(batch.entity_id)), np.sort(batch.entity_id))
    finally:
        store.close()


def test_a_new_metric_reaches_tables_that_are_spread(cluster_front: Front) -> None:
    url = cluster_front.url("grown")
    store = Store.open(url, cluster="drover")
    for table in ("gpu_samples_local", "gpu_samples"):
        with store.clients.use() as client:
            client.command(f"ALTER TABLE {table} DROP COLUMN power_w")
    store.close()
    store = Store.open(url, cluster="drover", retention_days=3650)
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    assert store.clients.rows("SELECT power_w AS p FROM gpu_samples")[0]["p"] is not None
    store.close()


def test_histories_are_forgotten_in_a_cluster_too(cluster_front: Front) -> None:
    store = Store.open(cluster_front.url("forgetful"), retention_days=3650, cluster="drover")
    try:
        store.jobs.write_holdings([Holding("n0", 0, job, T0 + number) for number, job in enumerate("abc")])
        store.retention.expire_histories(T0 + 401 * 86_400_000)
        assert store.clients.rows("SELECT job FROM holdings") == [{"job": "c"}]
    finally:
        store.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("clickhouse:///x", "has no host"),
        ("clickhouse://u:hush@h:no/x", "its port is not a number"),
        ("clickhouse://u:hush@h/x?sure=1", "'sure' is not known here"),
        ("clickhouse://u:hush@h/x?secure=yes", "secure must be 0 or 1"),
        ("clickhouse://u:hush@h/x?timeout_s=0", "timeout_s must be"),
        ("clickhous://u:hush@h/x", "not a store"),
        ("clickhouse://u:hush@127.0.0.1:1/x", "no ClickHouse at 127.0.0.1:1/x"),
    ],
)
def test_a_bad_url_is_one_line_without_its_password(url: str, says: str) -> None:
    with pytest.raises(StoreError, match=says.replace("(", r"\(")) as error:
        Store.open(url)
    assert "hush" not in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_url_says() -> None:
    made = parse("clickhouses://al%40x:p%2Fw@h/db?ca_cert=/ca.pem&timeout_s=9", None, "drover")
    assert (made.where, made.database, made.timeout_s) == ("h:8443/db", "db", 9.0)
    assert made.options | {"username": "al@x", "password": "p/w", "secure": True, "verify": True} == made.options
    assert parse("clickhouse://h", "given", "drover").options["password"] == "given"
    assert parse("clickhouse://[::1]:1/x?secure=1", None, "drover").where == "[::1]:1/x"
    assert redacted("clickhouse://u:p@h/x?password=y") == "clickhouse://h/x"


def test_a_password_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush\n")
    file.chmod(0o640)
    assert store_password(StoreConfig(password_file=str(file))) == "hush"
    assert store_password(StoreConfig(password_env="PW"), {"PW": "hush"}) == "hush"
    assert store_password(StoreConfig()) is None
    file.chmod(0o644)
    for bad in (
        StoreConfig(password_file=str(file)),
        StoreConfig(password_file=str(tmp_path / "none")),
        StoreConfig(password_env="PW"),
        StoreConfig(password_env="PW", password_file=str(file)),
    ):
        with pytest.raises(SettingsError) as error:
            store_password(bad, {})
        assert "hush" not in str(error.value)


def test_a_server_that_refuses_hangs_up_or_breaks_off(tmp_path: Path) -> None:
    with front(tmp_path, password="hush") as server:
        with pytest.raises(StoreError, match="Authentication failed"):
            Store.open(server.url("x"))
        with pytest.raises(StoreError, match="Authentication failed") as error:
            Store.open(server.url("x"), password="wrong-one")
        assert "wrong-one" not in str(error.value)
        store = Store.open(server.url("x"), password="hush", retention_days=3650)
        store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
        server.command("cut 0")
        with pytest.raises(StoreError):
            store.rollups.totals()
        server.command("mend 0")
        assert store.rollups.totals().samples == 1
        server.command("tear 0")  # asked again by the client, or an error: never half an answer
        try:
            assert store.clients.arrow("SELECT number FROM numbers(100000)").num_rows == 100_000
        except StoreError:
            assert store.clients.arrow("SELECT number FROM numbers(100000)").num_rows == 100_000
        store.close()


def test_a_collector_whose_server_is_away_at_the_start_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('name = "t"\n[[nodes]]\nnames = "n1"\nrack = "r1"\ngpus = 1\n')
    config = tmp_path / "collector.toml"
    config.write_text(f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "clickhouse://u:hush@127.0.0.1:1/x"\n')
    done = subprocess.run(
        [sys.executable, "-m", "drover_collector.main", "run", "--config", str(config)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "drover-collector: no ClickHouse at 127.0.0.1:1/x: Connection refused; check store.url\n"
    assert done.stderr.count("\n") == 1
    assert "hush" not in done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "Error HTTPConnectionPool(host='h', port=1): Max retries exceeded with url: /?query_id=5cb6-ab (Caused by"
            ' NewConnectionError("HTTPConnection(host=h): Failed: [Errno 111] Connection refused")) executing',
            "Connection refused",
        ),
        (
            "Error HTTPSConnectionPool(host='h', port=8443): Max retries exceeded with url: /?query_id=a1 (Caused by"
            " SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self"
            "-signed certificate (_ssl.c:1006)')))",
            "certificate verify failed: self-signed certificate",
        ),
        (
            "Error HTTPConnectionPool(host='h', port=1): Max retries exceeded with url: /?query_id=a1 (Caused by"
            " ConnectTimeoutError(<x>, 'Connection to h timed out. (connect timeout=5)'))",
            "Connection to h timed out",
        ),
        ("Error HTTPConnectionPool(host='h'): odd /?query_id=a1-b2", "Error HTTPConnectionPool(host='h'): odd /?"),
        ("Code: 60. DB::Exception: no table", "Code: 60. DB::Exception: no table"),
    ],
)
def test_why_a_server_is_away_is_short_and_the_same_each_time(text: str, why: str) -> None:
    assert server.short(text) == why

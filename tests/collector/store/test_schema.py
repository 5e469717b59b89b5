"""Opening: tables follow the catalog, and what cannot be opened says in one line what to do."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.store import Store, StoreError
from drover_collector.store.clickhouse import client as engine
from drover_collector.store.schema import codecs, migrations
from drover_collector.store.schema import tables as schema
from drover_core.metrics.catalog import (
    METRICS,
    Metric,
    Scope,
    of_scope,
)
from testbed.fleets import T0, gpu_row, samples


def columns(store: Store, table: str) -> dict[str, str]:
    rows = store.clients.rows(
        "SELECT name, type FROM system.columns WHERE database = currentDatabase() AND table = {t:String}", {"t": table}
    )
    return {row["name"]: row["type"] for row in rows}


def test_every_metric_has_its_column(store: Store) -> None:
    for scope in Scope:
        found = columns(store, f"{scope}_samples")
        for metric in of_scope(scope):
            assert found[metric.name] == f"Nullable({schema.clickhouse_type(metric.name)})"
        assert set(found) == {"entity_id", "ts", "shape", "present"} | {m.name for m in of_scope(scope)}


def catalog_with(monkeypatch: pytest.MonkeyPatch, metrics: tuple[Metric, ...]) -> None:
    monkeypatch.setattr(schema, "of_scope", lambda scope: tuple(m for m in metrics if m.scope is scope))


def test_a_new_metric_gets_its_column_and_an_old_one_keeps_it(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        catalog_with(patch, tuple(m for m in METRICS if m.name != "power_w"))
        before = Store.open(store_url, retention_days=3650)
        assert "power_w" not in columns(before, "gpu_samples")
        before.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"gpu_temp_c": 50.0})]))
        before.close()
    with_it = Store.open(store_url, retention_days=3650)
    assert columns(with_it, "gpu_samples")["power_w"] == "Nullable(UInt16)"
    with_it.entities.write([gpu_row(0, 0)])
    found = with_it.samples.latest_values("n0", T0 + 1)[Scope.GPU, 0, None]
    assert found == {"gpu_temp_c": (50.0, T0)}
    with_it.close()
    with monkeypatch.context() as patch:
        catalog_with(patch, tuple(m for m in METRICS if m.name != "power_w"))
        after = Store.open(store_url, retention_days=3650)
        assert "power_w" in columns(after, "gpu_samples")
        after.close()


@pytest.mark.parametrize("change", [{"type": "I"}, {"step": 1.0}])
def test_a_metric_that_changed_its_storage_is_refused(
    store_url: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    with monkeypatch.context() as patch:
        changed = tuple(replace(m, **change) if m.name == "power_w" else m for m in METRICS)
        catalog_with(patch, changed)
        patch.setattr(
            schema, "clickhouse_type", lambda name: "UInt32" if change.get("type") and name == "power_w" else "UInt16"
        )
        catalog_with(patch, tuple(m for m in changed if m.name == "power_w"))
        Store.open(store_url).close()
    with pytest.raises(StoreError, match=r"column power_w of gpu_samples rests as .*; a metric keeps its storage"):
        Store.open(store_url)
    # The refusal let go of the store.
    with monkeypatch.context() as patch:
        catalog_with(patch, ())
        Store.open(store_url).close()


def test_retention_follows_the_setting_but_for_a_command_next_to_a_collector(store_url: str) -> None:
    embedded = store_url.startswith("chdb:")  # no TTL: passes of the collector delete (test_expiry.py)
    for days, asked, visitor in ((30, 30, False), (7, 7, False), (7, 3650, True)):
        opened = Store.open(store_url, retention_days=asked, visitor=visitor)
        ddl = opened.clients.rows(
            "SELECT create_table_query AS q FROM system.tables WHERE name = 'gpu_samples'"
            " AND database = currentDatabase()"
        )[0]["q"]
        assert (f"toIntervalDay({days})" in ddl) == (not embedded)
        assert (opened.retention_days, opened.retention.kept_days["gpu_samples"]) == (asked, asked)
        opened.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("store", "write chdb:///PATH"),
        ("chdb://relative", "absolute path"),
        ("chdb:///", "absolute path"),
        ("chdb:///tmp/x?databse=1", "'databse' is not known here"),
        ("clickhouse://127.0.0.1:1/drover", "no ClickHouse at 127.0.0.1:1"),
    ],
)
def test_a_url_that_is_none(url: str, words: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreError) as caught:
        Store.open("clickhouse://me:secret@127.0.0.1:1/drover")
    assert "secret" not in str(caught.value)


def test_open_twice_in_one_process(store: Store, store_url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has the store open already"):
        Store.open(store_url)
    with pytest.raises(StoreError, match="can hold one embedded store at a time"):
        Store.open(f"chdb://{tmp_path}/other")


HOLDER = """
import sys
from drover_collector.store import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
store.close()  # the engine may hang or crash in an exit that finds it open
"""


def test_open_in_another_process(tmp_path: Path) -> None:
    """The line names the holder; after a kill -9 of it nothing is in the way."""
    url = f"chdb://{tmp_path}/store"
    with subprocess.Popen([sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        second = subprocess.run([sys.executable, "-c", HOLDER, url], input=b"", capture_output=True, timeout=120)
        assert second.returncode != 0
        assert f"is open in process {holder.pid};".encode() in second.stderr
        holder.kill()
    third = subprocess.run([sys.executable, "-c", HOLDER, url], input=b"", capture_output=True, timeout=120)
    assert third.stdout == b"open\n"


def test_a_stray_config_in_the_working_directory_is_not_read(tmp_path: Path) -> None:
    stray = tmp_path / "stray"
    (tmp_path / "config.xml").write_text(f"<clickhouse><path>{stray}/</path></clickhouse>")
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, f"chdb://{tmp_path}/store"],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.stdout == b"open\n"
    assert not stray.exists()
    assert (tmp_path / "store" / "store").is_dir()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"store\.url"):
        Store.open(f"chdb://{tmp_path}/file/store")


OLD = """CREATE TABLE gpu_samples (
  `entity_id` UInt64 CODEC(ZSTD(1)), `ts` DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
  `present` UInt16 COMMENT 'values in this row' CODEC(T64, ZSTD(1)),
  `power_w` Nullable(UInt16) COMMENT 'metric 9, step 0.1 W' CODEC(T64, ZSTD(1)),
  `gpu_temp_c` Nullable(Int16) COMMENT 'metric 12, step 1 degC' CODEC(T64, ZSTD(1)))
ENGINE = CoalescingMergeTree PARTITION BY toDate(ts) ORDER BY (entity_id, ts)
TTL toDateTime(ts) + toIntervalDay(3650) SETTINGS ttl_only_drop_parts = 1"""


def an_old_store(url: str) -> None:
    """A store of the first version: two days of a GPU, one moment in two parts."""
    clients = engine.connect(url, 0)
    clients.command(OLD)
    for day in (0, 1):
        ts = T0 + day * 86_400_000
        entity = gpu_row(0, 0).entity_id
        clients.command(f"INSERT INTO gpu_samples VALUES ({entity}, fromUnixTimestamp64Milli({ts}), 1, 3000, NULL)")
        clients.command(f"INSERT INTO gpu_samples VALUES ({entity}, fromUnixTimestamp64Milli({ts}), 1, NULL, 60)")
    clients.close()


def whole(store: Store) -> list[list[tuple[float, float]]]:
    store.entities.write([gpu_row(0, 0)])
    return [
        [(row["power_w"], row["gpu_temp_c"]) for row in table.to_pylist()]
        for table in store.export.tables(Scope.GPU, T0 - 1, T0 + 2 * 86_400_000)
    ]


def test_a_store_of_the_first_version_is_copied(store_url: str) -> None:
    an_old_store(store_url)
    opened = Store.open(store_url, retention_days=3650)
    assert whole(opened) == [[(300.0, 60.0)], [(300.0, 60.0)]]
    values = {"power_w": 300.0, "gpu_temp_c": 60.0}
    opened.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, values)]))  # a resend has the copied row's shape
    opened.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
    assert opened.clients.rows("SELECT count() AS n FROM gpu_samples") == [{"n": 2}]
    changes = [row["change"] for row in opened.clients.rows("SELECT change FROM schema_versions")]
    assert any(change.startswith("gpu_samples: copied, from CoalescingMergeTree") for change in changes)
    opened.close()


class PulledError(Exception):
    """The plug, pulled."""


@pytest.mark.parametrize("at", range(8))
def test_a_copy_that_was_stopped_goes_on(store_url: str, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Stopped before each of its statements in turn: the next start ends with every row once."""
    an_old_store(store_url)
    made = [table for table in schema.tables(3650) if table.name in ("gpu_samples", "schema_versions")]
    command, left = engine.Clients.command, [at]

    def counted(self: engine.Clients, sql: str) -> None:
        if "gpu_samples" in sql:
            if not left[0]:
                raise PulledError
            left[0] -= 1
        command(self, sql)

    clients = engine.connect(store_url, 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Clients, "command", counted)
        try:
            migrations.ensure(clients, made)
        except PulledError:
            assert at < 7
    clients.close()
    clients = engine.connect(store_url, 0)
    migrations.ensure(clients, made)
    held = clients.rows("SELECT power_w, gpu_temp_c FROM gpu_samples FINAL ORDER BY ts")
    copies = clients.rows(f"SELECT 1 FROM {clients.tables} WHERE name LIKE '%_copy'")
    again = migrations.ensure(clients, made)
    clients.close()
    assert held == [{"power_w": 3000, "gpu_temp_c": 60}] * 2
    assert (copies, again) == ([], [])


@pytest.mark.parametrize("at", range(1, 6))
def test_a_copy_of_a_table_without_versions_doubles_no_row(
    store_url: str, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Stopped after each of its statements in turn, as by kill -9."""
    clients = engine.connect(store_url, 0)
    made = [table for table in schema.tables(30) if table.name in ("drops", "schema_versions")]
    migrations.ensure(
        clients, [replace(table, order="(bytes, at)") if table.name == "drops" else table for table in made]
    )
    clients.command("INSERT INTO drops SELECT now64(3), 'gpu_samples', now64(3), now64(3), number FROM numbers(3)")
    command, left = engine.Clients.command, [at]

    def counted(self: engine.Clients, sql: str) -> None:
        command(self, sql)
        left[0] -= 1
        if not left[0]:
            raise PulledError

    with monkeypatch.context() as patch, contextlib.suppress(PulledError):
        patch.setattr(engine.Clients, "command", counted)
        migrations.ensure(clients, made)
    migrations.ensure(clients, made)
    held = clients.rows("SELECT bytes FROM drops ORDER BY bytes")
    order = clients.rows(f"SELECT sorting_key AS k FROM {clients.tables} WHERE name = 'drops'")
    clients.close()
    assert held == [{"bytes": 0}, {"bytes": 1}, {"bytes": 2}]
    assert order == [{"k": "at"}]


def test_a_copy_that_the_disk_did_not_take_is_no_copy(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says that all went well, and its files are empty: what was copied must still be there."""
    an_old_store(store_url)
    command = engine.Clients.command

    def unwritten(self: engine.Clients, sql: str) -> None:
        command(self, sql)
        if sql.startswith("INSERT INTO gpu_samples_copy"):
            for row in self.rows(f"SELECT path FROM {self.parts} WHERE table = 'gpu_samples_copy'"):
                for file in Path(row["path"]).glob("*.bin"):
                    file.write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(engine.Clients, "command", unwritten)
        with pytest.raises(StoreError, match="gpu_samples_copy: what was copied is not on the disk"):
            Store.open(store_url, retention_days=3650)
    opened = Store.open(store_url, retention_days=3650)
    assert whole(opened) == [[(300.0, 60.0)], [(300.0, 60.0)]]
    assert opened.integrity is not None
    assert opened.integrity.damages == ()
    opened.close()


def test_an_older_collector_leaves_a_newer_store_unchanged(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works with the columns it knows, and undoes nothing."""
    newer = Store.open(store_url, retention_days=3650)
    newer.clients.command("ALTER TABLE gpu_samples ADD COLUMN newer Nullable(UInt16)")
    newer.clients.command("ALTER TABLE gpu_samples MODIFY COLUMN power_w CODEC(ZSTD(5))")
    newer.clients.command("ALTER TABLE events MODIFY TTL toDateTime(received) + toIntervalDay(999)")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "VERSION", schema.VERSION + 1)
        migrations._note(newer.clients, ["events: TTL"])
    newer.close()
    older = Store.open(store_url, retention_days=3650)
    older.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    found = older.clients.rows("SELECT power_w, newer FROM gpu_samples")
    codec = older.clients.rows(
        "SELECT compression_codec AS c FROM system.columns WHERE database = currentDatabase()"
        " AND table = 'gpu_samples' AND name = 'power_w'"
    )
    ttl = older.clients.rows(
        "SELECT create_table_query AS q FROM system.tables WHERE database = currentDatabase() AND name = 'events'"
    )
    older.close()
    assert found == [{"power_w": 3000, "newer": None}]
    assert codec == [{"c": "CODEC(ZSTD(5))"}]
    assert "toIntervalDay(999)" in ttl[0]["q"]


def test_a_codec_that_changed_is_changed_in_the_store(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(codecs, "of_metric", lambda metric: "ZSTD(7)")
        Store.open(store_url).close()
    opened = Store.open(store_url)
    found = {row["name"]: row["codec_expression"] for row in opened.clients.rows("DESCRIBE TABLE gpu_samples")}
    opened.close()
    for metric in of_scope(Scope.GPU):
        assert found[metric.name] == codecs.of_metric(metric)


def test_smaller_blocks_come_to_a_store_from_before_and_its_rows_stay(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(codecs, "block_of", lambda metric: 0)
        older = Store.open(store_url, retention_days=3650)
    older.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0, "gpu_temp_c": 60.0})]))
    older.close()
    changes: list[str] = []
    for _ in range(2):
        opened = Store.open(store_url, retention_days=3650)
        opened.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
        rows = opened.clients.rows("SELECT power_w, gpu_temp_c FROM gpu_samples")
        ddl = opened.clients.rows(f"SELECT create_table_query AS q FROM {opened.clients.tables} WHERE name = 'gpu_10s'")
        made = opened.clients.rows("SELECT change FROM schema_versions WHERE change NOT LIKE '%: made'")
        opened.close()
        assert rows == [{"power_w": 3000, "gpu_temp_c": 60}]
        assert re.search(r"`power_w` [^`]*SETTINGS \(min_compress_block_size = 16384\)", ddl[0]["q"])
        assert not re.search(r"`nvlink_tx_bytes_per_s` [^`]*SETTINGS \(", ddl[0]["q"])
        assert "gpu_10s: power_w in blocks of 16384 bytes" in {row["change"] for row in made}
        changes.append(str(sorted(row["change"] for row in made)))
    assert changes[0] == changes[1]  # there was nothing left to change


def test_two_collectors_may_make_the_tables_at_once(store_url: str) -> None:
    clients = engine.connect(store_url, 0)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(migrations.ensure, clients, schema.tables(30)) for _ in range(2)]
        for one in made:
            one.result()
    assert migrations.ensure(clients, schema.tables(30)) == []
    clients.close()


@pytest.mark.parametrize(
    ("full", "engine_only"),
    [
        ("ReplacingMergeTree(last) ORDER BY (a, b) SETTINGS index_granularity = 8192", "ReplacingMergeTree(last)"),
        ("ReplicatedReplacingMergeTree('/p/{shard}', '{replica}', last) ORDER BY a", "ReplacingMergeTree(last)"),
        ("ReplicatedMergeTree('/p', '{replica}') PARTITION BY toDate(ts) ORDER BY a", "MergeTree"),
        ("MergeTree ORDER BY ts", "MergeTree"),
    ],
)
def test_the_engine_of_a_table(full: str, engine_only: str) -> None:
    assert migrations._engine(full) == engine_only


def test_a_store_that_is_as_it_should_be_is_left_alone(store_url: str) -> None:
    Store.open(store_url).close()
    again = Store.open(store_url)
    found = again.clients.rows("SELECT version, change FROM schema_versions")
    again.close()
    assert {row["version"] for row in found} == {schema.VERSION}
    assert all(row["change"].endswith(": made") for row in found), found

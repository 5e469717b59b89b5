"""Opening: tables follow the catalog, and what cannot be opened says in one line what to do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.store import Store, StoreError, schema
from drover_proto.catalog import METRICS, Metric, Scope, of_scope
from testbed.fleets import T0, gpu_row, samples


def columns(store: Store, table: str) -> dict[str, str]:
    rows = store._clients.rows(
        "SELECT name, type FROM system.columns WHERE database = currentDatabase() AND table = {t:String}", {"t": table}
    )
    return {row["name"]: row["type"] for row in rows}


def test_every_metric_has_its_column(store: Store) -> None:
    for scope in Scope:
        found = columns(store, f"{scope}_samples")
        for metric in of_scope(scope):
            assert found[metric.name] == f"Nullable({schema.clickhouse_type(metric.name)})"
        assert set(found) == {"entity_id", "ts", "present"} | {m.name for m in of_scope(scope)}


def catalog_with(monkeypatch: pytest.MonkeyPatch, metrics: tuple[Metric, ...]) -> None:
    monkeypatch.setattr(schema, "of_scope", lambda scope: tuple(m for m in metrics if m.scope is scope))


def test_a_new_metric_gets_its_column_and_an_old_one_keeps_it(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        catalog_with(patch, tuple(m for m in METRICS if m.name != "power_w"))
        before = Store.open(store_url, retention_days=3650)
        assert "power_w" not in columns(before, "gpu_samples")
        before.write_samples(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"gpu_temp_c": 50.0})]))
        before.close()
    with_it = Store.open(store_url, retention_days=3650)
    assert columns(with_it, "gpu_samples")["power_w"] == "Nullable(UInt16)"
    with_it.write_entities([gpu_row(0, 0)])
    found = with_it.latest_values("n0", T0 + 1)[Scope.GPU, 0, None]
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


def test_retention_follows_the_setting(store_url: str) -> None:
    for days in (30, 7):
        opened = Store.open(store_url, retention_days=days)
        ddl = opened._clients.rows(
            "SELECT create_table_query AS q FROM system.tables WHERE name = 'gpu_samples'"
            " AND database = currentDatabase()"
        )[0]["q"]
        assert f"toIntervalDay({days})" in ddl
        assert opened.retention_days == days
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


def test_a_password_is_not_told() -> None:
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
"""


def test_open_in_another_process(tmp_path: Path) -> None:
    """The line names the holder; after a kill -9 of it nothing is in the way."""
    url = f"chdb://{tmp_path}/store"
    with subprocess.Popen([sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        second = subprocess.run([sys.executable, "-c", HOLDER, url], input=b"", capture_output=True, timeout=60)
        assert second.returncode != 0
        assert f"is open in process {holder.pid};".encode() in second.stderr
        holder.kill()
    third = subprocess.run([sys.executable, "-c", HOLDER, url], input=b"", capture_output=True, timeout=60)
    assert third.stdout == b"open\n"


def test_a_stray_config_in_the_working_directory_is_not_read(tmp_path: Path) -> None:
    stray = tmp_path / "stray"
    (tmp_path / "config.xml").write_text(f"<clickhouse><path>{stray}/</path></clickhouse>")
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, f"chdb://{tmp_path}/store"],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.stdout == b"open\n"
    assert not stray.exists()
    assert (tmp_path / "store" / "store").is_dir()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"store\.url"):
        Store.open(f"chdb://{tmp_path}/file/store")

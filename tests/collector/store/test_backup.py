"""A backup of a store under load, the store destroyed, restored, and asked again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drover_cli.main import main
from drover_collector.config import StoreConfig
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.store import Store, StoreError, keep_free
from drover_collector.store.clickhouse import embedded
from drover_collector.store.durability.backup import MANIFEST
from drover_core.metrics.catalog import Scope
from drover_core.times import iso
from testbed.fleets import T0, everything, gpu_row, samples
from testbed.waiting import wait_until

DAY_MS = 86_400_000

LOAD = """
import json, sys, threading
from pathlib import Path
import numpy as np
from drover_collector.store import SampleBatch, Store, StoreError
from drover_core.metrics.catalog import Scope

store = Store.open(sys.argv[1], retention_days=3650)
folder, start = Path(sys.argv[2]), int(sys.argv[3])
written = 0
stop = threading.Event()
begun = threading.Event()

def load():
    global written
    while not stop.is_set():
        row = np.full(1, 50, np.int16), np.ones(1, bool)
        ts = np.array([start + written])
        store.samples.write(SampleBatch(Scope.GPU, np.full(1, 5, np.uint64), ts, {"gpu_temp_c": row}))
        written += 1
        store.offsets.write({("n0", "s"): {2: written}})
        if written == 20:
            begun.set()

thread = threading.Thread(target=load)
thread.start()
begun.wait(120)
low = written
store.backups.make(folder, start)
high = written
try:
    store.backups.make(folder, start)
    again = ""
except StoreError as error:
    again = str(error)
stop.set()
thread.join()
print(json.dumps({"low": low, "high": high, "again": again, "left": [p.name for p in folder.parent.iterdir()]}))
store.close()
"""
READ = """
import json, sys
import numpy as np
from drover_collector.store import SampleBatch, Store
from drover_core.metrics.catalog import Scope

store = Store.open(sys.argv[1], retention_days=3650)
count = "SELECT toUnixTimestamp64Milli(ts) AS ts_ms FROM gpu_samples FINAL ORDER BY ts"
rows = [row["ts_ms"] for row in store.clients.rows(count)]
held = store.offsets.read()[("n0", "s")][2]
store.samples.write(SampleBatch(Scope.GPU, np.full(1, 5, np.uint64), np.array([int(sys.argv[2])]),
    {"gpu_temp_c": (np.full(1, 50, np.int16), np.ones(1, bool))}))
print(json.dumps({"rows": rows, "held": held, "after": len(store.clients.rows(count))}))
store.close()
"""

Made = tuple[Path, dict[str, Any]]  # the backup, and what was known around it


def run(script: str, *words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def drover(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drover_cli.main", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A backup made while rows and positions were written, and what was known around it."""
    root = tmp_path_factory.mktemp("backup")
    report = run(LOAD, f"chdb://{root}/store", root / "backups" / "b1", T0)
    shutil.rmtree(root / "store")
    return root / "backups" / "b1", report


def test_what_was_backed_up_under_load_comes_back_unchanged(backup: Made, tmp_path: Path) -> None:
    folder, report = backup
    assert "give the backup another name" in report["again"]
    assert report["left"] == ["b1"]
    url = f"chdb://{tmp_path}/store"
    done = drover("restore", folder, "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    restored = json.loads(done.stdout)
    found = run(READ, url, T0 + 10_000_000)
    count = len(found["rows"])
    assert report["low"] <= count <= report["high"] + 1
    assert found["rows"] == [T0 + n for n in range(count)]  # each up to one moment, and once
    assert restored["rows"]["gpu_samples"] == count
    assert count - 1 <= found["held"] <= count  # never ahead of the rows
    assert found["after"] == count + 1  # it takes in again


def test_a_store_that_is_there_is_moved_aside_only_by_force(backup: Made, tmp_path: Path) -> None:
    folder, _ = backup
    store = tmp_path / "store"
    store.mkdir()
    (store / "precious").write_text("kept")
    refused = drover("restore", folder, "--url", f"chdb://{store}")
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert (store / "precious").read_text() == "kept"
    done = drover("restore", folder, "--url", f"chdb://{store}", "--force")
    assert done.returncode == 0, done.stderr
    [aside] = tmp_path.glob("store.before-*")
    assert (aside / "precious").read_text() == "kept"
    assert str(aside) in done.stderr
    assert (store / "store").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_restores_belongs_to_the_user_of_the_collector(backup: Made, tmp_path: Path) -> None:
    home, nobody = tmp_path / "lib", 65534
    home.mkdir()
    os.chown(home, nobody, nobody)
    for force in ((), ("--force",)):
        done = drover("restore", backup[0], "--url", f"chdb://{home}/store", *force)
        assert done.returncode == 0, done.stderr
        owners = {path.lstat().st_uid for path in [home / "store", *(home / "store").rglob("*")]}
        assert owners == {nobody}
        os.chown(home, 0, 0)  # then it is the store that was there whose owner counts


@pytest.mark.parametrize("kind", ["flipped", "cut", "missing", "checksums"])
def test_of_a_damaged_backup_all_that_is_whole_comes_back_when_asked_for(
    backup: Made, tmp_path: Path, kind: str
) -> None:
    """Without that it is refused, with the name and time of what is damaged, and nothing is changed."""
    folder = shutil.copytree(backup[0], tmp_path / "b1")
    file = max((folder / "data" / "drover" / "gpu_samples").glob("*/data.bin"), key=lambda f: f.stat().st_size)
    rows = int((file.parent / "count.txt").read_text())
    data = bytearray(file.read_bytes())
    data[30] ^= 255
    if kind == "missing":
        file.unlink()
    elif kind == "checksums":
        list_ = file.with_name("checksums.txt")
        list_.write_bytes(b"x" * list_.stat().st_size)
    else:
        file.write_bytes(data if kind == "flipped" else data[:40])
    url = f"chdb://{tmp_path}/store"
    done = drover("restore", folder, "--url", url)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    if kind != "checksums":  # there the engine reports what it cannot load
        assert f"table gpu_samples, rows from {iso(T0)[:13]}" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b1"]
    salvaged = drover("restore", folder, "--url", url, "--salvage", "--json")
    assert salvaged.returncode == 0, salvaged.stderr
    report = json.loads(salvaged.stdout)
    noted = Counter(json.loads((folder / "drover-backup.json").read_text())["rows"])
    noted["gpu_samples"] -= rows
    assert report["rows"] == +noted
    assert len(report["lost"]) == 1
    assert f"not restored, because it is damaged in the backup: {report['lost'][0]}" in salvaged.stderr
    assert f"table gpu_samples, rows from {iso(T0)[:13]}" in report["lost"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b1", "store"]


def test_a_store_in_use_is_not_restored_over(backup: Made, store: Store, store_root: Path) -> None:
    done = drover("restore", backup[0], "--url", f"chdb://{store_root}", "--force")
    assert done.returncode == 2
    assert "stop that collector" in done.stderr
    assert store.rollups.totals().samples == 0


def test_a_restore_that_was_stopped_leaves_no_place_for_an_empty_store(tmp_path: Path) -> None:
    """Between its last two steps the old store is aside, and the new one not yet in place."""
    half = tmp_path / "store.restoring"
    half.mkdir()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"a restore of it is under way or was stopped; .* remove .*restoring"):
            embedded.make(tmp_path / "store")
        assert not (tmp_path / "store" / "store").exists()
        (tmp_path / "store").mkdir(exist_ok=True)  # as systemd makes it
    half.rmdir()
    embedded.make(tmp_path / "store")


def test_a_folder_that_is_not_a_backup_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", str(tmp_path), "--url", f"chdb://{tmp_path}/store"]) == 2
    assert "not a backup" in capsys.readouterr().err


def test_a_disk_without_room_is_reported_and_nothing_is_left(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make room"):
        store.backups.make(tmp_path / "b", T0, keep_free_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free, total=total, used=total - free))


def test_a_backup_leaves_the_stores_reserve_free_or_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else maintenance would delete the oldest samples for the room that the copy took."""
    total = 1000 << 30
    disk_of(monkeypatch, keep_free(total, 0) - (1 << 20), total)
    with pytest.raises(StoreError, match="the store would delete its oldest samples"):
        store.backups.make(tmp_path / "b", T0)
    disk_of(monkeypatch, 3 << 30, total)
    with pytest.raises(StoreError, match="the store would delete its oldest samples"):
        store.backups.make(tmp_path / "b", T0, 4 << 30)  # the setting, store.keep_free_bytes
    assert list(tmp_path.iterdir()) == []
    store.backups.make(tmp_path / "b", T0, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_disk_of_its_own_needs_no_reserve_of_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of(monkeypatch, 3 << 30, 1000 << 30)
    monkeypatch.setattr("drover_collector.store.durability.backup._same_disk", lambda *_: False)
    store.backups.make(tmp_path / "b", T0)


def test_where_the_disk_runs_full_a_backup_ends_before_samples_go(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.entities.write(everything())
    day = T0 // DAY_MS * DAY_MS
    rng = np.random.default_rng(1)
    for hour in range(8):  # a MB that does not compress
        rows = [
            (gpu_row(0, 0), day + hour * 3_600_000 + k * 10, {"power_w": rng.random() * 700}) for k in range(40_000)
        ]
        store.samples.write(samples(Scope.GPU, rows))
    before = {part.partition: part.rows for part in store.sizes.partitions() if part.table == "gpu_samples"}
    monkeypatch.setattr("drover_collector.store.durability.backup.BYTES_PER_S", 100_000)
    ended: list[str] = []

    def copy() -> None:
        try:
            store.backups.make(tmp_path / "b", T0)
        except StoreError as error:
            ended.append(str(error))

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        wait_until(lambda: (tmp_path / "b.partial").exists() and store.backups._room_needed is not None)
        assert store.retention.make_room(day + 2 * DAY_MS, disk=lambda: (0, 1000 << 30)) == []
    finally:
        copying.join(60)
    assert ended
    assert "put store.backup_folder on another disk" in ended[0]
    assert list(tmp_path.iterdir()) == []
    assert {p.partition: p.rows for p in store.sizes.partitions() if p.table == "gpu_samples"} == before
    # The disk is still full, and no backup is there.
    assert store.retention.make_room(day + 2 * DAY_MS, disk=lambda: (0, 1000 << 30)) != []


def test_what_a_killed_collector_left_half_made_goes_at_the_start(store: Store, tmp_path: Path) -> None:
    (tmp_path / "b1.partial" / "data").mkdir(parents=True)
    (tmp_path / "b1.partial" / "data" / "x.bin").write_bytes(b"x" * 1000)
    (tmp_path / "mine").mkdir()
    (tmp_path / "whole.partial").mkdir()  # of a version that let a name end so
    (tmp_path / "whole.partial" / MANIFEST).write_text("{}")
    Maintenance(store, StoreConfig(backup_folder=str(tmp_path))).tidy_backups()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "whole.partial"]
    Maintenance(store, StoreConfig(backup_folder=str(tmp_path / "not there"))).tidy_backups()

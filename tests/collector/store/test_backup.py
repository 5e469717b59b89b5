"""A backup of a store under load, the store destroyed, restored, and asked again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drover_cli.main import main
from drover_collector.config import StoreConfig
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.store import SampleBatch, Store, StoreError, keep_free
from drover_collector.store.clickhouse import embedded
from drover_collector.store.durability.backup import MANIFEST
from drover_core.metrics.catalog import Scope
from drover_core.times import iso
from testbed.fleets import T0, everything, gpu_row
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
for number in range(1, int(sys.argv[4]) + 1):  # rows of another entity, each time in a partition of their own
    ts = start + number * 4 * 3_600_000 + np.arange(50)
    row = np.full(50, 50, np.int16), np.ones(50, bool)
    store.samples.write(SampleBatch(Scope.GPU, np.full(50, 6, np.uint64), ts, {"gpu_temp_c": row}))

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
count = "SELECT toUnixTimestamp64Milli(ts) AS ts_ms FROM gpu_samples FINAL WHERE entity_id = 5 ORDER BY ts"
rows = [row["ts_ms"] for row in store.clients.rows(count)]
held = store.offsets.read()[("n0", "s")][2]
store.samples.write(SampleBatch(Scope.GPU, np.full(1, 5, np.uint64), np.array([int(sys.argv[2])]),
    {"gpu_temp_c": (np.full(1, 50, np.int16), np.ones(1, bool))}))
print(json.dumps({"rows": rows, "held": held, "after": len(store.clients.rows(count))}))
store.close()
"""

Made = tuple[Path, dict[str, Any]]  # the backup, and what was known around it
PARTITION_MS = 4 * 3_600_000
NOBODY = 65534


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[30] ^= 255
    file.write_bytes(data)


def checksums(file: Path) -> None:
    listed = file.with_name("checksums.txt")
    listed.write_bytes(b"x" * listed.stat().st_size)


# Of a part's data; each kind is done to a part of its own.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flipped,
    "cut": lambda file: os.truncate(file, 40),
    "missing": Path.unlink,
    "checksums": checksums,
}


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
    report = run(LOAD, f"chdb://{root}/store", root / "backups" / "b1", T0, len(DAMAGE))
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
    assert restored["rows"]["gpu_samples"] == count + 50 * len(DAMAGE)
    assert count - 1 <= found["held"] <= count  # never ahead of the rows
    assert found["after"] == count + 1  # it takes in again


def test_a_store_that_is_there_is_moved_aside_only_by_force(backup: Made, tmp_path: Path) -> None:
    folder, _ = backup
    store = tmp_path / "store"
    store.mkdir()
    (store / "precious").write_text("kept")
    owner = NOBODY if os.geteuid() == 0 else os.geteuid()  # only root can give files away
    os.chown(store, owner, -1)
    refused = drover("restore", folder, "--url", f"chdb://{store}")
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert (store / "precious").read_text() == "kept"
    done = drover("restore", folder, "--url", f"chdb://{store}", "--force")
    assert done.returncode == 0, done.stderr
    [aside] = tmp_path.glob("store.before-*")
    assert (aside / "precious").read_text() == "kept"
    assert str(aside) in done.stderr
    assert (store / "store").is_dir()
    assert owners(store) == {owner}, "that of the store that was there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_restores_belongs_to_the_user_of_the_collector(backup: Made, tmp_path: Path) -> None:
    home = tmp_path / "lib"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    done = drover("restore", backup[0], "--url", f"chdb://{home}/store")
    assert done.returncode == 0, done.stderr
    assert owners(home / "store") == {NOBODY}


def owners(store: Path) -> set[int]:
    return {path.lstat().st_uid for path in [store, *store.rglob("*")]}


def damage(backup: Path, folder: Path, kinds: Iterable[str]) -> tuple[Path, list[str]]:
    """A copy of the backup with parts damaged so, and how each is named."""
    copy, named = Path(shutil.copytree(backup, folder / "b1")), []
    for kind in kinds:
        at_ms = T0 + (1 + list(DAMAGE).index(kind)) * PARTITION_MS
        partition = at_ms // PARTITION_MS * PARTITION_MS // 1000
        [part] = (copy / "data" / "drover" / "gpu_samples").glob(f"{partition}_*")
        DAMAGE[kind](part / "data.bin")
        named.append(f"table gpu_samples, rows from {iso(at_ms)[:13]}")
    return copy, named


@pytest.mark.parametrize("kinds", [("cut", "missing"), ("flipped",), ("checksums",)])  # found one before the other
def test_a_damaged_backup_is_refused_with_the_name_and_time_of_what_is_damaged(
    backup: Made, tmp_path: Path, kinds: Sequence[str]
) -> None:
    """And nothing is changed."""
    folder, named = damage(backup[0], tmp_path, kinds)
    done = drover("restore", folder, "--url", f"chdb://{tmp_path}/store")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    if kinds != ("checksums",):  # there the engine reports what it cannot load
        assert all(name in line for name in named)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b1"]


def test_of_a_damaged_backup_all_that_is_whole_comes_back_when_asked_for(backup: Made, tmp_path: Path) -> None:
    folder, named = damage(backup[0], tmp_path, DAMAGE)
    salvaged = drover("restore", folder, "--url", f"chdb://{tmp_path}/store", "--salvage", "--json")
    assert salvaged.returncode == 0, salvaged.stderr
    report = json.loads(salvaged.stdout)
    noted = Counter(json.loads((folder / "drover-backup.json").read_text())["rows"])
    noted["gpu_samples"] -= 50 * len(DAMAGE)
    assert report["rows"] == +noted
    assert noted["gpu_samples"] > 0
    assert [sum(name in lost for lost in report["lost"]) for name in named] == [1] * len(DAMAGE)
    assert len(report["lost"]) == len(DAMAGE)
    for lost in report["lost"]:
        assert f"not restored, because it is damaged in the backup: {lost}" in salvaged.stderr
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
        ids = np.full(40_000, gpu_row(0, 0).entity_id, np.uint64)
        ts = day + hour * 3_600_000 + 10 * np.arange(40_000)
        store.samples.write(SampleBatch.of_values(Scope.GPU, ids, ts, {"power_w": rng.random(40_000) * 700}))
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

"""Room on the disk: the oldest samples go first, then rollups, and never events and incidents."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from drover_collector.api import store as api_store
from drover_collector.config import StoreConfig
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.store import (
    FOREVER_DAYS,
    Part,
    Store,
    StoreError,
    days_left,
    keep_free,
    sizes_of,
)
from drover_collector.store.clickhouse import client as engine
from drover_collector.store.durability.retention import (
    HISTORY_DAYS,
    SPOOL_DAYS,
    _steps,
)
from drover_collector.store.durability.sizes import GIB
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Absence,
    Event,
    EventKind,
    Holding,
)
from drover_proto import fleet_pb2 as pb
from testbed.fleets import T0, everything, gpu_row, link_row, node_row, samples

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
START = T0 // DAY_MS * DAY_MS
NOW = START + 2 * DAY_MS
TOTAL = 1000 * GIB
PARTITIONS = 6  # of each scope, in `filled`
FILLED = 3 * PARTITIONS


def free(*levels: int):
    """A disk with so much free, level by level; the last stays."""
    left = list(levels)
    return lambda: ((left.pop(0) if len(left) > 1 else left[0]), TOTAL)


@pytest.fixture
def filled(store: Store) -> Store:
    """Two days of samples of three scopes every eight hours, one event, one finding's worth of rest."""
    store.entities.write(everything())
    times = [START + hour * HOUR_MS + 1000 for hour in range(0, 48, 48 // PARTITIONS)]
    gpu = [(gpu_row(0, 0), ts + k * 1000, {"power_w": 300.0}) for ts in times for k in range(50)]
    store.samples.write(samples(Scope.GPU, gpu))  # a part for each partition
    store.samples.write(samples(Scope.NODE, [(node_row(0), ts, {"load1": 1.0}) for ts in times]))
    store.samples.write(samples(Scope.LINK, [(link_row(0, "mlx5_0"), ts, {"link_up": 1.0}) for ts in times]))
    store.events.write([Event("e1", START, "n0", 0, EventKind.XID, "79", "off the bus", "kmsg")])
    return store


def oldest(store: Store) -> dict[str, int]:
    return {size.name: size.oldest_ms for size in sizes_of(store.sizes.partitions()) if size.name.endswith("_samples")}


def test_with_room_nothing_is_dropped(filled: Store) -> None:
    before = filled.sizes.partitions()
    assert filled.retention.make_room(NOW, disk=free(TOTAL // 2)) == []
    assert filled.retention.drops(0) == []
    assert [p for p in filled.sizes.partitions() if p.table.endswith("samples")] == [
        p for p in before if p.table.endswith("samples")
    ]


def test_the_oldest_of_all_scopes_go_together_and_no_more_than_is_lacking(filled: Store) -> None:
    first = [part for part in filled.sizes.partitions() if part.table.endswith("_samples")][:3]
    size = sum(part.bytes for part in first)
    reserve = keep_free(TOTAL, 0)
    dropped = filled.retention.make_room(NOW, disk=free(reserve - 1), keep_free_bytes=0, max_bytes=0)
    assert len(dropped) > 3  # a quarter of the reserve is far more than this store holds: see below
    assert sorted(drop.table for drop in dropped[:3]) == ["gpu_samples", "link_samples", "node_samples"]
    assert sum(drop.bytes for drop in dropped[:3]) == size
    assert {drop.from_ms // HOUR_MS * HOUR_MS for drop in dropped[:3]} == {START}
    times = [drop.from_ms // HOUR_MS for drop in dropped]
    assert times == sorted(times)


def test_a_cap_drops_only_as_far_as_it_must(filled: Store) -> None:
    held = sum(part.bytes for part in filled.sizes.partitions())
    one = sum(part.bytes for part in filled.sizes.partitions() if part.table.endswith("_samples")) // PARTITIONS
    dropped = filled.retention.make_room(NOW, disk=lambda: None, max_bytes=held - 1)
    assert 3 <= len(dropped) <= 3 * (2 + held // 20 // one)
    assert sum(part.bytes for part in filled.sizes.partitions()) <= held - 1
    assert set(oldest(filled).values()) == {max(oldest(filled).values())} != {START}
    assert filled.retention.make_room(NOW, disk=lambda: None, max_bytes=held - 1) == []


def test_what_was_dropped_is_known_after_a_restart(filled: Store, store_url: str) -> None:
    dropped = filled.retention.make_room(NOW, disk=lambda: None, max_bytes=1)
    filled.close()
    again = Store.open(store_url, retention_days=3650)
    drops = again.retention.drops(NOW - 1)
    later = again.retention.drops(NOW + 1)
    again.close()
    assert sorted(map(repr, drops)) == sorted(map(repr, dropped))
    assert later == []


def test_events_and_everything_else_stay_whatever_happens(filled: Store) -> None:
    kept = {size.name: size.rows for size in sizes_of(filled.sizes.partitions()) if not size.name.endswith("_samples")}
    filled.retention.make_room(NOW, disk=free(0))
    assert oldest(filled) == {}
    rows = {size.name: size.rows for size in sizes_of(filled.sizes.partitions())}
    assert kept
    assert {name: rows[name] for name in kept} == kept
    assert [event.id for event in filled.events.read(START - 1, NOW)] == ["e1"]
    assert filled.rollups.totals().samples == 0


def test_the_newest_hour_goes_last_and_never_the_newest_minute(filled: Store) -> None:
    filled.samples.write(samples(Scope.GPU, [(gpu_row(0, 1), NOW - 10_000, {"power_w": 1.0})]))
    filled.samples.write(samples(Scope.GPU, [(gpu_row(0, 1), NOW - 50 * 60_000, {"power_w": 2.0})]))
    old = [drop for drop in filled.retention.make_room(NOW, disk=free(0)) if drop.to_ms < NOW - HOUR_MS]
    left = filled.clients.rows("SELECT power_w FROM gpu_samples ORDER BY ts")
    assert len(old) == FILLED
    assert left == [{"power_w": 10}]


def test_however_large_a_partition_is_it_goes(filled: Store) -> None:
    """The engine's own limit is 50 GB; here it is a byte, for the one client that questions use."""
    filled.clients.command("SET max_partition_size_to_drop = 1")
    with pytest.raises(StoreError, match="greater than max"):
        first = next(part.partition for part in filled.sizes.partitions() if part.table == "gpu_samples")
        filled.clients.command(f"ALTER TABLE gpu_samples DROP PARTITION ID '{first}'")
    assert len(filled.retention.make_room(NOW, disk=lambda: None, max_bytes=1)) == FILLED
    assert oldest(filled) == {}


def test_one_partition_that_cannot_be_dropped_keeps_no_other(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = next(part for part in filled.sizes.partitions() if part.table == "gpu_samples").partition
    command = filled.clients.command

    def refuse(sql: str) -> None:
        if sql.startswith(f"ALTER TABLE gpu_samples DROP PARTITION ID '{stuck}'"):
            raise StoreError("stuck")
        command(sql)

    with monkeypatch.context() as patch:
        patch.setattr(filled.clients, "command", refuse)
        with pytest.raises(StoreError, match="stuck"):
            filled.retention.make_room(NOW, disk=lambda: None, max_bytes=1)
    left = [part for part in filled.sizes.partitions() if part.table.endswith("_samples")]
    assert [(part.table, part.partition) for part in left] in ([("gpu_samples", stuck)], [])  # or part by part, later
    assert len(filled.retention.drops(0)) >= FILLED - 1


def test_what_went_is_noted_when_there_is_room_to_note_it(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    insert = filled.clients.insert

    def full(table: str, data: object, note: str = "") -> None:
        if table == "drops":
            raise StoreError("the disk is full")
        insert(table, data, note)

    with monkeypatch.context() as patch:
        patch.setattr(filled.clients, "insert", full)
        with pytest.raises(StoreError, match="the disk is full"):
            filled.retention.make_room(NOW, disk=lambda: None, max_bytes=1)
    assert filled.retention.drops(0) == []
    assert filled.retention.make_room(NOW, disk=free(TOTAL)) == []
    assert len(filled.retention.drops(0)) == FILLED
    filled.retention.make_room(NOW, disk=free(TOTAL))
    assert len(filled.retention.drops(0)) == FILLED


def part(table: str, from_h: float, to_h: float, size: int = 100, name: str = "") -> Part:
    hours = (START + round(from_h * HOUR_MS), START + round(to_h * HOUR_MS))
    return Part(table, name or str(int(from_h)), 1, size, *hours)


def test_samples_before_the_fine_rollup_before_the_coarse_one() -> None:
    parts = [
        part("gpu_5m", 0, 20), part("gpu_10s", 1, 20), part("gpu_samples", 2, 3), part("events", 0, 40),
        part("node_10s", 0.5, 20), part("gpu_samples", 47.5, 48), part("decisions", 0, 1),
    ]  # fmt: skip
    order = [[p.table for p in step] for step in _steps(sorted(parts, key=lambda p: p.oldest_ms), NOW)]
    assert order == [["gpu_samples"], ["node_10s"], ["gpu_10s"], ["gpu_5m"]]


@pytest.mark.parametrize(
    ("total", "setting", "reserve"),
    [
        (1000 * GIB, 0, 50 * GIB),
        (20 * GIB, 0, 2 * GIB),
        (5 * GIB, 0, GIB),
        (1 * GIB, 0, 384 << 20),
        (1000 * GIB, 7 * GIB, 7 * GIB),
        (1000 * GIB, 1, 384 << 20),
    ],
)
def test_the_reserve(total: int, setting: int, reserve: int) -> None:
    assert keep_free(total, setting) == reserve
    assert reserve > engine.KEEP_FREE_BYTES


def test_days_left_follows_what_grows() -> None:
    day = [part("gpu_samples", 4 * k, 4 * k + 4, 100) for k in range(6)]  # 600 bytes a day
    kept = {"gpu_samples": 10}
    assert days_left(day, kept, 1200) == pytest.approx(2.0)
    assert days_left(day, kept, 600 * 9 + 1) == FOREVER_DAYS
    assert days_left(day, kept, 0) == 0
    assert days_left([], kept, 100) is None
    assert days_left([part("gpu_samples", 0, 0.1)], kept, 100) is None  # minutes give no rate
    full = [part("gpu_samples", 24 * k, 24 * k + 24, 600) for k in range(10)]  # its retention is there already
    both = full + [part("gpu_10s", 24 * k, 24 * k + 24, 60) for k in range(10)]
    assert days_left(full, kept, 1) == FOREVER_DAYS
    assert days_left(both, kept | {"gpu_10s": 90}, 600) == pytest.approx(10.0)


def test_sizes_add_up(filled: Store) -> None:
    sizes = {size.name: size for size in sizes_of(filled.sizes.partitions())}
    gpu = sizes["gpu_samples"]
    assert (gpu.rows, gpu.oldest_ms, gpu.newest_ms) == (50 * PARTITIONS, START + 1000, START + 40 * HOUR_MS + 50_000)
    assert sizes["events"].oldest_ms == 0
    assert [size.bytes for size in sizes_of(filled.sizes.partitions())] == sorted(
        (s.bytes for s in sizes.values()), reverse=True
    )
    assert filled.retention.kept_days["gpu_samples"] == 3650
    assert "events" not in filled.retention.kept_days


def test_superseded_states_go_and_the_newest_of_each_stays(store: Store) -> None:
    old, older = START - (HISTORY_DAYS + 2) * DAY_MS, START - (HISTORY_DAYS + 3) * DAY_MS
    store.jobs.write_holdings([Holding("n0", 0, "a", older), Holding("n0", 0, "b", old), Holding("n0", 1, "c", older)])
    store.inventories.write([("n0", older, {"driver": "1"}), ("n0", old, {"driver": "2"})])
    store.absences.write([Absence("n0", 0, "power_w", "lost", older)])
    store.clients.command("OPTIMIZE TABLE absences FINAL")  # the end comes in another part than the beginning
    store.absences.write(
        [
            Absence("n0", 0, "power_w", "lost", older, old),
            Absence("n0", 1, "power_w", "lost", older),  # since then
            Absence("n0", 2, "power_w", "lost", older, START - DAY_MS),
        ]
    )
    store.retention.expire_histories(START)
    rows = store.clients.rows
    assert rows("SELECT job FROM holdings ORDER BY job") == [{"job": "b"}, {"job": "c"}]
    assert rows("SELECT json FROM inventory") == [{"json": '{"driver": "2"}'}]
    assert rows("SELECT gpu FROM absences ORDER BY gpu") == [{"gpu": 1}, {"gpu": 2}]


def test_freed_memory_is_asked_back_and_a_refusal_ends_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maintenance, said = Maintenance(store, StoreConfig()), []
    monkeypatch.setattr(store.clients, "command", said.append)
    maintenance.give_back()
    assert said == (["SYSTEM JEMALLOC PURGE"] if store.clients.embedded else [])  # a server's memory is its own

    def refuse(error: Exception) -> None:
        raise error

    monkeypatch.setattr(store, "release_memory", lambda: refuse(StoreError("not now")))
    maintenance.give_back()
    monkeypatch.setattr(store, "release_memory", lambda: refuse(RuntimeError("a defect")))
    maintenance.give_back()
    assert caplog.messages == ["memory of the store: not now", "memory of the store"]


def test_positions_of_spools_that_are_gone_go(store: Store) -> None:
    now = time.time_ns() // 1_000_000
    long_ago = "fromUnixTimestamp64Milli(0)"
    store.clients.command(f"INSERT INTO lane_seqs VALUES ('n1', 'of a version before', 1, 5, {long_ago})")
    store.offsets.write({("n0", "s"): {1: 4, 2: 10}})
    store.retention.expire_histories(now + (SPOOL_DAYS - 1) * DAY_MS)
    assert store.offsets.read()["n0", "s"] == {1: 4, 2: 10}
    at = f"fromUnixTimestamp64Milli({now + 60 * DAY_MS})"
    store.clients.command(f"INSERT INTO lane_seqs VALUES ('n0', 't', 1, 1, now64(3)), ('n0', 't', 2, 1, {at})")
    store.retention.expire_histories(now + (SPOOL_DAYS + 1) * DAY_MS)
    # Of a spool that moved lately every lane stays; and nobody knows how old the one without a time is.
    assert store.offsets.read() == {("n1", "of a version before"): {1: 5}, ("n0", "t"): {1: 1, 2: 1}}


def test_only_the_active_collector_drops_and_a_failure_is_not_the_end(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: dict[str, str] = {}
    maintenance = Maintenance(filled, StoreConfig(max_bytes=1), now_ms=lambda: NOW, troubles=troubles)
    for number, error in enumerate((StoreError("no disk"), ZeroDivisionError("a defect")), 1):

        def refuse(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(filled.retention, "make_room", refuse)
            maintenance.once()
        assert (maintenance.passes, maintenance.failures, maintenance.dropped) == (number, number, 0)
        assert "disk may run full" in troubles["maintenance"]
    maintenance.once()
    assert (maintenance.passes, maintenance.failures, maintenance.dropped) == (3, 2, FILLED)
    assert troubles == {}


def test_old_states_go_an_hour_after_the_start_and_then_once_a_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    went, now_s, boot_s = [], [0.0], time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(store.retention, "expire_histories", went.append)
    clock = SimpleNamespace(clock_gettime=lambda _: boot_s + now_s[0], CLOCK_BOOTTIME=0)
    monkeypatch.setattr("drover_collector.pipeline.expiry.time", clock)
    maintenance = Maintenance(store, StoreConfig(), now_ms=lambda: NOW)
    for hour, times in ((0, 0), (0.9, 0), (1.1, 1), (24, 1), (25.2, 1), (26.2, 2)):
        now_s[0] = hour * 3600
        maintenance.once()
        assert len(went) == times, hour


class FactsOf:
    """As much of the facts as the store's part of the status asks for."""

    def __init__(self, store: Store, config: StoreConfig) -> None:
        self.store, self.config = store, SimpleNamespace(store=config)

    def now_ms(self) -> int:
        return NOW

    def once(self, key: object, seconds: float, make):
        return make()


def test_the_status_has_sizes_room_and_what_went(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filled.sizes, "disk", lambda: (TOTAL // 2, TOTAL))
    facts, status = FactsOf(filled, StoreConfig()), pb.Status()
    api_store.fill(status, facts)
    sizes = {table.name: table for table in status.tables}
    assert (sizes["gpu_samples"].rows, sizes["gpu_samples"].oldest_ms) == (50 * PARTITIONS, START + 1000)
    assert (status.retention_days, status.store_free_bytes) == (3650, TOTAL // 2)
    assert status.store_days_left == FOREVER_DAYS
    assert api_store.troubles(facts) == []
    size = sum(drop.bytes for drop in filled.retention.make_room(NOW, disk=lambda: None, max_bytes=1))
    monkeypatch.setattr(
        filled.sizes, "disk", lambda: (engine.KEEP_FREE_BYTES + 1, GIB)
    )  # of a small disk, before it is full
    assert any("something else fills it" in line for line in api_store.troubles(facts))
    monkeypatch.setattr(filled.sizes, "disk", lambda: (1, TOTAL))
    trouble, nothing = api_store.troubles(facts)
    assert trouble.startswith(
        f"The store ran short of room: in the last 24 h {size / 1e6:,.1f} MB of the oldest samples were deleted, up to"
    )
    assert "; none is left." in trouble
    assert "something else fills it" in nothing


def test_a_server_has_no_known_disk(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filled.sizes, "disk", lambda: None)
    facts, status = FactsOf(filled, StoreConfig()), pb.Status()
    api_store.fill(status, facts)
    assert not status.HasField("store_free_bytes")
    assert not status.HasField("store_days_left")
    assert api_store.troubles(facts) == []


SQUEEZE = """
import os, shutil, sys, time
sys.path.insert(0, sys.argv[2])
import numpy as np
from drover_collector.config import StoreConfig
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.store import SampleBatch, Store, sizes_of
from drover_core.metrics.catalog import Scope, of_scope
from drover_collector.store.clickhouse import client as engine
from testbed.fleets import T0, everything, gpu_row, random_values

engine.EMBEDDED["max_partition_size_to_drop"] = 1  # the engine's own limit, 50 GB, on a disk this small
store = Store.open(f"chdb://{sys.argv[1]}/store", retention_days=3650)
store.entities.write(everything())
metrics, rng, rows = of_scope(Scope.GPU), np.random.default_rng(0), 20_000
ids = np.full(rows, gpu_row(0, 0).entity_id, np.uint64)
hour = 3_600_000
start = T0 // (24 * hour) * 24 * hour
maintenance = Maintenance(store, StoreConfig(), now_ms=lambda: now)
lowest = 1 << 60
for k in range(60):  # five days in steps of two hours; nothing is refused, although the disk holds a fraction
    ts = start + 2 * hour * k + np.arange(rows)
    now = int(ts[-1])
    values = {m.name: rng.permutation(random_values(rng, m, rows, 0)) for m in metrics}
    for name in ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"):
        values[name] = rng.integers(0, 1 << 38, rows).astype(float)
    store.samples.write(SampleBatch.of_values(Scope.GPU, ids, ts, values))
    maintenance.once()
    lowest = min(lowest, shutil.disk_usage(sys.argv[1]).free)
assert maintenance.failures == 0
assert maintenance.dropped > 5, maintenance.dropped
sizes = {s.name: s for s in sizes_of(store.sizes.partitions())}
assert sizes["gpu_samples"].newest_ms // 1000 == now // 1000
assert sizes["gpu_samples"].oldest_ms > start + 24 * hour
assert len(store.retention.drops(0)) == maintenance.dropped
print(lowest)
store.close()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB more than is kept free of one so small."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = keep_free(GIB, 0) + (40 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.system
def test_a_small_disk_never_fills_up(small_disk: Path) -> None:
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SQUEEZE, str(small_disk), tests], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > engine.KEEP_FREE_BYTES

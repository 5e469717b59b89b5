"""Samples in a real embedded engine: what goes in comes out, once, as numpy would have it."""

from __future__ import annotations

import numpy as np
import pytest

from drover_collector.fleet import buckets
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import SampleBatch, Store, StoreError
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope
from drover_core.model.events import Absence, Holding
from drover_core.model.fleet import FleetSpec, NodeSpec
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, link_row, node_row, random_values, samples


def ids_of(rows):
    return np.array([row.entity_id for row in rows], np.uint64)


@pytest.mark.parametrize("seed", range(4))
def test_bucket_in_sql_is_the_bucket_in_numpy(store: Store, seed: int) -> None:
    """Every metric of every scope with layout, random values, gaps, resends and rows outside the bucket."""
    rng = np.random.default_rng(seed)
    index = index_of()
    store.entities.write(everything())
    targets = {
        Scope.GPU: [gpu_row(n, g) for n in range(3) for g in range(GPUS)],
        Scope.NODE: [node_row(n) for n in range(3)],
        Scope.LINK: [link_row(n, link) for n in range(3) for link in ("mlx5_0", "mlx5_1")],
    }
    expected = {}
    for scope, rows in targets.items():
        every = [(e, t) for e in range(len(rows)) for t in range(-3000, 13_000, 500) if rng.random() < 0.7]
        entity = np.array([e for e, _ in every], np.int32)
        ts = np.array([t for _, t in every], np.int64) + T0
        values = {m.name: random_values(rng, m, len(every)) for m in of_scope(scope)}
        whole = SampleBatch.of_values(scope, ids_of(rows)[entity], ts, values)
        order = rng.permutation(len(every))
        for part in (*np.array_split(order, 3), order[: len(order) // 2]):  # out of order, and half of it twice
            columns = {name: (stored[part], mask[part]) for name, (stored, mask) in whole.columns.items()}
            store.samples.write(SampleBatch(scope, whole.entity_id[part], whole.ts_ms[part], columns))
        inside = (ts >= T0) & (ts < T0 + 10_000)
        expected[scope] = {
            m.name: buckets.aggregate(m.name, entity[inside], ts[inside], decoded(whole, m.name)[inside], len(rows))
            for m in of_scope(scope)
        }
        rows_in = np.bincount(entity[inside], minlength=len(rows))
        expected[scope]["rows"] = rows_in
    bucket = store.buckets.read(index, T0)
    assert (bucket.start_ms, bucket.length_ms) == (T0, 10_000)
    for scope, found in ((Scope.GPU, bucket.gpu), (Scope.NODE, bucket.node), (Scope.LINK, bucket.link)):
        for metric in of_scope(scope):
            want = expected[scope][metric.name]
            got = found.get(metric.name, np.full(len(want), np.nan))
            assert np.array_equal(want, got, equal_nan=True), metric.name
    assert bucket.gpu_rows.tolist() == expected[Scope.GPU]["rows"].tolist()
    assert bucket.node_rows.tolist() == expected[Scope.NODE]["rows"].tolist()


def decoded(batch: SampleBatch, metric: str):
    stored, present = batch.columns[metric]
    return np.where(present, stored.astype(np.float64) * (BY_NAME[metric].step or 1), np.nan)


def test_metrics_that_nobody_reported_have_no_key(store: Store) -> None:
    store.entities.write(everything())
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    bucket = store.buckets.read(index_of(), T0)
    assert set(bucket.gpu) == {"power_w"}
    assert bucket.node == {}
    assert bucket.gpu_rows.sum() == 1


def test_every_metric_arrives_in_its_own_column(store: Store) -> None:
    for scope, row in (
        (Scope.GPU, gpu_row(1, 2)),
        (Scope.NODE, node_row(1)),
        (Scope.LINK, link_row(1, "mlx5_0")),
    ):
        store.entities.write([row])
        sent = {
            m.name: m.decode(m.encode(m.low + (m.high - m.low) * (n + 1) / 100 if m.high < 1e6 else float(n + 1)))
            for n, m in enumerate(of_scope(scope))
        }
        store.samples.write(samples(scope, [(row, T0, sent)]))
        found = store.samples.latest_values("n1", T0 + 1000)[scope, row.gpu, row.link or None]
        assert {name: value for name, (value, _) in found.items()} == pytest.approx(sent)
        assert {ts for _, ts in found.values()} == {T0}


def test_two_rows_of_one_moment_fill_each_other(store: Store) -> None:
    """Two sources of one GPU may report at the same tick: neither takes away what the other reported."""
    row = gpu_row(0, 1)
    store.entities.write([row])
    store.samples.write(samples(Scope.GPU, [(row, T0, {"power_w": 300.0})]))
    store.samples.write(samples(Scope.GPU, [(row, T0, {"gpu_temp_c": 60.0})]))
    bucket = store.buckets.read(index_of(), T0)
    assert (bucket.gpu["power_w"][1], bucket.gpu["gpu_temp_c"][1], bucket.gpu_rows[1]) == (300.0, 60.0, 1)
    store.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
    merged = store.buckets.read(index_of(), T0)
    assert (merged.gpu["power_w"][1], merged.gpu["gpu_temp_c"][1], merged.gpu_rows[1]) == (300.0, 60.0, 1)


def test_a_resend_that_is_read_otherwise_counts_once(store: Store) -> None:
    """A collector that learnt a metric takes a resent row with more columns than the first time."""
    row = gpu_row(0, 1)
    store.entities.write([row])
    rows = [(row, T0 + 1000 * t, {"power_w": power}) for t, power in enumerate((100.0, 200.0, 300.0))]
    store.samples.write(samples(Scope.GPU, rows))
    store.samples.write(samples(Scope.GPU, [(row, T0 + 2000, {"power_w": 300.0, "gpu_temp_c": 60.0})]))
    for _ in range(2):
        bucket = store.buckets.read(index_of(), T0)
        assert (bucket.gpu["power_w"][1], bucket.gpu["gpu_temp_c"][1], bucket.gpu_rows[1]) == (200.0, 60.0, 3)
        exported = [table.to_pylist() for table in store.export.tables(Scope.GPU, T0, T0 + 10_000)]
        assert [r["power_w"] for r in exported[0]] == [100.0, 200.0, 300.0]
        store.clients.command("OPTIMIZE TABLE gpu_samples FINAL")


def test_old_values_are_unknown_not_current(store: Store) -> None:
    store.entities.write(everything())
    store.samples.write(
        samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0}), (gpu_row(0, 1), T0 + 50_000, {"power_w": 310.0})])
    )
    latest = store.samples.latest_gpu(index_of(), "power_w", T0 + 61_000)
    assert np.isnan(latest[0])
    assert latest[1] == 310.0
    assert store.samples.latest_values("n0", T0 + 200_000) == {}


def test_a_value_is_unknown_as_soon_as_it_is_reported_absent(store: Store) -> None:
    """Asked before, between and after: what is kept of the absences is asked for again when more is written."""
    store.entities.write(everything())
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    found = [store.samples.latest_gpu(index_of(), "power_w", T0 + 1000)[0]]
    for to_ms in (None, T0 + 900):
        store.absences.write([Absence("n0", 0, "power_w", "unsupported", T0 + 500, to_ms)])
        found.append(store.samples.latest_gpu(index_of(), "power_w", T0 + 1000)[0])
    assert found == pytest.approx([300.0, np.nan, 300.0], nan_ok=True)


def test_gpus_that_the_fleet_does_not_list_are_no_error(store: Store) -> None:
    store.entities.write([gpu_row(0, 0)])
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    hosts = FleetIndex(FleetSpec((NodeSpec("n0", "r", "l", "p", "host", 0, ()),)))
    assert store.samples.latest_gpu(hosts, "power_w", T0 + 1000).tolist() == []


def test_last_seen_counts_anything_on_the_node(store: Store, store_url: str) -> None:
    store.entities.write(everything())
    store.samples.write(samples(Scope.NODE, [(node_row(0), T0 + 1000, {"load1": 1.0})]))
    store.samples.write(samples(Scope.LINK, [(link_row(0, "mlx5_1"), T0 + 3000, {"link_up": 1.0})]))
    store.samples.write(samples(Scope.GPU, [(gpu_row(1, 3), T0 + 2000, {"power_w": 1.0})]))
    assert (store.entities.last_seen(index_of(4)) - T0).tolist() == [
        3000,
        2000,
        0,
        -T0,
    ]  # n2 was placed at T0, n3 never
    store.close()
    again = Store.open(store_url, retention_days=3650)
    assert (again.entities.last_seen(index_of(4)) - T0).tolist() == [3000, 2000, 0, -T0]
    again.close()


def test_a_swapped_gpu_has_its_slot_and_its_own_history(store: Store, store_url: str) -> None:
    """The newer serial counts for the slot from its coming on; before that, the older."""
    old, new = gpu_row(0, 2, "OLD", T0), gpu_row(0, 2, "NEW", T0 + 60_000)
    for row, at in ((old, 0), (old, 5000), (new, 60_000), (new, 65_000)):
        store.entities.write([row])
        store.samples.write(samples(Scope.GPU, [(row, T0 + at, {"power_w": 100.0 if row is old else 200.0})]))
    moved = gpu_row(1, 0, "OLD", T0 + 90_000)
    store.entities.write([moved])
    store.samples.write(samples(Scope.GPU, [(moved, T0 + 90_000, {"power_w": 150.0})]))
    for _ in range(2):
        index = index_of()
        assert store.buckets.read(index, T0).gpu["power_w"][2] == 100.0
        assert store.buckets.read(index, T0 + 60_000).gpu["power_w"][2] == 200.0
        assert store.buckets.read(index, T0 + 90_000).gpu["power_w"][GPUS] == 150.0
        assert [row.serial for row in store.entities.gpus_of("n0")] == ["NEW"]
        _, _, found = store.series.read(
            Scope.GPU, [("n0", 2, None), ("n1", 0, None)], ["power_w"], T0, T0 + 100_000, 1000
        )
        here, there = found["n0", 2, None, "power_w"], found["n1", 0, None, "power_w"]
        assert sorted(set(here[~np.isnan(here)].tolist())) == [100.0, 200.0]
        assert there[~np.isnan(there)].tolist() == [150.0]
        rows = [row for table in store.export.tables(Scope.GPU, T0, T0 + 100_000) for row in table.to_pylist()]
        assert [(row["node"], row["gpu"], row["power_w"]) for row in rows] == [
            ("n0", 2, 100.0), ("n0", 2, 100.0), ("n0", 2, 200.0), ("n0", 2, 200.0), ("n1", 0, 150.0),
        ]  # fmt: skip
        store.close()
        store = Store.open(store_url, retention_days=3650)  # the same after a restart
    store.close()


def test_jobs_hold_gpus_until_freed(store: Store) -> None:
    store.jobs.write_holdings(
        [Holding("n0", 1, "a", T0), Holding("n1", 0, "b", T0 + 10), Holding("n0", 1, None, T0 + 5000)]
    )
    codes, names = store.jobs.at(index_of(), T0 + 100)
    assert [names[c] if c >= 0 else None for c in codes[: GPUS + 1]] == [None, "a", None, None, "b"]
    codes, names = store.jobs.at(index_of(), T0 + 5000)
    assert [names[c] if c >= 0 else None for c in codes[: GPUS + 1]] == [None, None, None, None, "b"]
    assert store.jobs.holdings(T0 + 100, T0 + 6000) == [
        Holding("n0", 1, "a", T0), Holding("n1", 0, "b", T0 + 10), Holding("n0", 1, None, T0 + 5000),
    ]  # fmt: skip


def test_totals(store: Store, store_url: str) -> None:
    assert store.rollups.totals().samples == 0
    assert store.rollups.totals().oldest_ms == 0
    store.samples.write(
        samples(
            Scope.GPU,
            [(gpu_row(0, 0), T0, {"power_w": 1.0, "gpu_temp_c": 2.0}), (gpu_row(0, 0), T0 + 1, {"power_w": 1.0})],
        )
    )
    store.samples.write(samples(Scope.NODE, [(node_row(0), T0 + 7000, {"load1": 1.0})]))
    totals = store.rollups.totals()
    assert (totals.samples, totals.oldest_ms, totals.newest_ms) == (4, T0, T0 + 7000)
    assert totals.bytes_on_disk > 0
    store.close()
    again = Store.open(store_url, retention_days=3650)
    assert again.rollups.totals() == totals
    again.close()
    with pytest.raises(StoreError, match="closed"):
        store.rollups.totals()

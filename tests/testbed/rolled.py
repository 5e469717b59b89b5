"""Random samples, and whether rollups say what they say."""

from __future__ import annotations

import numpy as np

from drover_collector.store import SampleBatch, Store
from drover_collector.store.samples import fold
from drover_collector.store.samples.fold import Folded
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope
from testbed.fleets import GPUS, gpu_row, random_values

BUCKET, CHUNK = 10_000, 300_000
METRICS = ("power_w", "energy_j", "fabric_state", "nvlink_effective_ber")


def random_batch(rng: np.random.Generator, from_ms: int, to_ms: int, count: int = 60) -> SampleBatch:
    """Rows of random GPUs at random half seconds, each with one value for ever, so that a resend is one."""
    gpus = [gpu_row(n, g) for n in range(3) for g in range(GPUS)]
    entity = rng.integers(0, len(gpus), count)
    ts = rng.integers(from_ms // 500, to_ms // 500, count) * 500
    key, first = np.unique(entity * (1 << 44) + ts, return_index=True)
    entity, ts = entity[first], ts[first]
    columns = {}
    for name in METRICS:
        noise = np.random.default_rng(0)
        table = random_values(noise, BY_NAME[name], 997)
        columns[name] = table[(key + len(name)) % 997]
    ids = np.array([gpus[e].entity_id for e in entity], np.uint64)
    return SampleBatch.of_values(Scope.GPU, ids, ts.astype(np.int64), columns)


def store_batch(store: Store, batch: SampleBatch) -> None:
    """As ingest does before it acknowledges."""
    store.samples.write(batch)
    store.dirty_ranges.mark_late(batch, 0)


def finish(store: Store) -> None:
    while store.rollups.roll_up_late(60):
        pass
    assert store.dirty_ranges.all() == []


def assert_same(found: Folded, want: Folded) -> None:
    order = np.lexsort((found.start_ms, found.ids))
    found = Folded(
        found.ids[order], found.start_ms[order], found.rows[order], found.present[order],
        {name: (stored[order], mask[order]) for name, (stored, mask) in found.columns.items()},
    )  # fmt: skip
    for name in ("ids", "start_ms", "rows", "present"):
        assert getattr(found, name).tolist() == getattr(want, name).tolist(), name
    for name in METRICS:
        values = [
            fold.units(name, *each.columns[name]) if name in each.columns else np.full(len(each.ids), np.nan)
            for each in (found, want)
        ]
        np.testing.assert_array_equal(*values, err_msg=name)


def assert_complete(store: Store, from_ms: int, to_ms: int) -> None:
    """Both levels hold what the samples of a span, cut at 5 minutes, make."""
    raw = store.rows.fold(Scope.GPU, [(from_ms, to_ms)], BUCKET)
    assert len(raw.ids)
    assert_same(store.rows.fold(Scope.GPU, [(from_ms, to_ms)], BUCKET, level="10s"), raw)
    closed = to_ms // CHUNK * CHUNK
    span = (from_ms // CHUNK * CHUNK, closed)
    whole = fold.fold_again([store.rows.fold(Scope.GPU, [span], BUCKET)], CHUNK)
    assert_same(store.rows.fold(Scope.GPU, [span], CHUNK, level="5m"), whole)


def distinct_samples(store: Store) -> int:
    metrics = ", ".join(f"max(`{m.name}`) AS `{m.name}`" for m in of_scope(Scope.GPU))
    count = " + ".join(f"count(`{m.name}`)" for m in of_scope(Scope.GPU))
    sql = f"SELECT {count} AS n FROM (SELECT {metrics} FROM gpu_samples GROUP BY entity_id, ts)"
    return int(store.clients.rows(sql)[0]["n"])

"""Folding the rows of a rollup: of a bucket that was computed again the newest version counts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from drover_collector.store.samples import fold
from testbed.fleets import T0


@pytest.mark.parametrize("seed", range(30))
def test_of_a_bucket_computed_again_the_newest_version_counts(seed: int) -> None:
    """Against a dictionary, with few and many such rows, in any order; of equal versions the last row counts."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 80))
    entities = rng.integers(0, 1 << 63, 3).astype(np.uint64) | np.uint64(1 << 63)
    ids = entities[rng.integers(0, 3, count)]
    ts = T0 + 10_000 * rng.integers(0, (10, 400)[seed % 2], count)
    version = rng.integers(0, (3, 1000)[seed % 3 == 0], count).astype(np.uint64)
    rows, power = rng.integers(1, 10, count), rng.integers(0, 9000, count)
    there = rng.random(count) < 0.7
    table = pa.table(
        {
            "entity_id": ids,
            "ts_ms": ts,
            "version": version,
            "rows": rows.astype(np.uint32),
            "present": (rows * there).astype(np.uint32),
            "power_w": pa.array(power.astype(np.uint16), mask=~there),
        }
    )
    newest: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(ids.tolist(), ts.tolist(), strict=True)):
        if key not in newest or version[row] >= version[newest[key]]:
            newest[key] = row
    expected = [newest[key] for key in sorted(newest)]

    folded = fold.fold_rollup(table, ["power_w"], 10_000)

    assert list(zip(folded.ids.tolist(), folded.start_ms.tolist(), strict=True)) == sorted(newest)
    assert folded.rows.tolist() == rows[expected].tolist()
    assert folded.present.tolist() == (rows * there)[expected].tolist()
    assert ("power_w" in folded.columns) == bool(there[expected].any())
    if "power_w" in folded.columns:
        stored, mask = folded.columns["power_w"]
        assert mask.tolist() == there[expected].tolist()
        assert stored[mask].tolist() == power[expected][mask].tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["raw", "rollup"])
def test_rows_that_come_in_runs_fold_as_shuffled_ones_do(kind: str, seed: int) -> None:
    """Parts of a table one behind the other: apart in time, in any order, overlapping, or with a moment twice."""
    rng = np.random.default_rng(seed)
    every = 1000 if kind == "raw" else 10_000
    entities = np.sort(rng.integers(0, 1 << 63, 4)).astype(np.uint64)
    parts = []
    for part in rng.permutation(3):
        first = part * 100 - (60, 0, 1)[seed % 3] * (part > 0)  # overlapping, apart, one moment twice
        moments = np.arange(first, part * 100 + 100)
        for entity in entities:
            here = moments[rng.random(len(moments)) < 0.95]
            parts.append((np.full(len(here), entity), T0 + every * here))
    ids, ts = (np.concatenate(column) for column in zip(*parts, strict=True))
    power = (ts // every * 7 % 900 + ids % np.uint64(50)).astype(np.uint16)  # the same for a moment that comes twice
    there = (ts // every) % 11 != 0
    table = pa.table(
        {
            "entity_id": ids,
            "ts_ms": ts,
            "version": np.ones(len(ids), np.uint64),
            "rows": np.ones(len(ids), np.uint32),
            "present": there.astype(np.uint16),
            "power_w": pa.array(power, mask=~there),
        }
    )

    def folded(rows: pa.Table) -> fold.Folded:
        if kind == "raw":
            return fold.fold_raw([rows], ["power_w"], 10_000)
        return fold.fold_again([fold.fold_rollup(rows, ["power_w"], 10_000)], 120_000)

    in_runs, shuffled = folded(table), folded(table.take(rng.permutation(len(ids))))
    assert_same(in_runs, shuffled)
    assert np.unique(in_runs.ids).tolist() == entities.tolist()
    for chosen in (entities[:1], entities[1:3], entities[[0, 2]], entities, np.zeros(1, np.uint64)):
        assert_same(in_runs.of(chosen), shuffled.where(np.isin(shuffled.ids, chosen)))


def test_buckets_computed_again_lack_values_of_a_counter() -> None:
    """A bucket is there in two versions, so that fewer rows count than are stored, and some have no value."""
    ts = T0 + 10_000 * np.array([0, 1, 1, 2, 3])
    table = pa.table(
        {
            "entity_id": np.full(5, 7, np.uint64),
            "ts_ms": ts,
            "version": np.array([1, 1, 2, 1, 1], np.uint64),
            "rows": np.ones(5, np.uint32),
            "present": np.ones(5, np.uint16),
            "throttle_power_us": pa.array([1, 2, 3, None, 5], pa.uint64()),
        }
    )
    stored, mask = fold.fold_rollup(table, ["throttle_power_us"], 20_000).columns["throttle_power_us"]
    assert (stored.tolist(), mask.tolist()) == ([3, 5], [True, True])


def assert_same(one: fold.Folded, other: fold.Folded) -> None:
    for name in ("ids", "start_ms", "rows", "present"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert list(one.columns) == list(other.columns)
    for name, (stored, mask) in one.columns.items():
        assert mask.tolist() == other.columns[name][1].tolist()
        assert stored[mask].tolist() == other.columns[name][0][mask].tolist()

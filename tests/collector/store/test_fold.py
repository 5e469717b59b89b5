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

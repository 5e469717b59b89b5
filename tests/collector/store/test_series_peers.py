"""A chart's line and its peers in one statement are what two statements say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drover_collector.store import Store
from drover_collector.store.samples import series as series_module
from drover_core.metrics.catalog import Scope
from testbed.fleets import GPUS, T0, everything, gpu_row, index_of, samples

METRICS = ("power_w", "energy_j")
END = T0 + 2_400_000
SPANS = ((T0, T0 + 60_000), (T0 + 500, T0 + 61_700), (END - 90_000, END), (T0, END), (T0 + 4000, END - 70_000))


def asked(
    store: Store, slot: int, span: tuple[int, int], points: int, *, at_once: bool
) -> tuple[bool, tuple[object, ...]]:
    """Whether the peers were read with the line; all that a chart shows, as bytes."""
    index = index_of()
    peers = np.array([gpu for gpu in range(index.gpu_count) if gpu != slot], np.int32)
    peer_read = store.series.with_peers(index, peers, *span) if at_once else None
    target = ("n0", slot, None)
    step, ts_ms, found = store.series.read(Scope.GPU, [target], METRICS, *span, points, peer_read)
    end_ms = min(span[1], int(ts_ms[-1]) + step)
    folds, fold = [], store.rows.fold

    def noted(*words: Any, **named: Any) -> Any:
        folds.append(words)
        return fold(*words, **named)

    store.rows.fold = noted  # type: ignore[method-assign]  # looked at, not changed
    try:
        spreads = store.series.read_peers(index, peers, METRICS, span[0], end_ms, step, peer_read)
    finally:
        store.rows.fold = fold  # type: ignore[method-assign]  # unchanged
    lines = [found[*target, metric].tobytes() for metric in METRICS]
    return not folds, (step, ts_ms.tobytes(), *lines, *(line.tobytes() for m in METRICS for line in spreads[m]))


def test_a_line_and_its_peers_are_read_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU lacks a metric, one reports seldom, one came late: samples, rollups, and both."""
    rng = np.random.default_rng(1)
    store.entities.write([*everything(), gpu_row(0, 2, "S-new", T0 + 30_000)])
    rows = []
    for n in range(3):
        for g in range(GPUS):
            every = 20_000 if (n, g) == (0, 1) else 2_000
            for at in range(T0, END, every):
                values = {"power_w": float(rng.integers(100, 700)), "energy_j": float(at - T0)}
                if (n, g) == (0, 0):
                    del values["energy_j"]
                if rng.random() < 0.9 and (T0 + 20_000 <= at < END - 20_000 or (n, g) != (1, 1)):
                    rows.append((gpu_row(n, g), at, values))
    store.samples.write(samples(Scope.GPU, rows))
    store.buckets.read_closing(index_of(), END - 40_000)
    store.rollups.roll_up()
    while store.rollups.roll_up_late(10):
        pass
    store.samples.write(samples(Scope.GPU, [(gpu_row(2, 2), T0 + 60_500, {"power_w": 900.0})]))  # late: not rolled up
    shared = set()
    for slot in range(3):
        for span in SPANS:
            for points in (10, 1000):
                apart = asked(store, slot, span, points, at_once=False)
                together = asked(store, slot, span, points, at_once=True)
                assert together[1] == apart[1]
                assert not apart[0]
                shared.add((slot, together[0]))
    assert (0, True) in shared and (1, True) in shared
    monkeypatch.setattr(series_module, "PEERS_MIN", 3)
    monkeypatch.setattr(series_module, "PEER_ROWS", 1)
    assert (
        store.series.with_peers(index_of(), np.arange(5), T0, END) is None
    )  # of very many an even selection stands for all

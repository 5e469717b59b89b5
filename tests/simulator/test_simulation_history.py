"""Outages over weeks have the published rate, repairs and repeats."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from drover_simulator.history import DAY_MS, draw_history


def test_outages_have_the_published_rate_repairs_and_repeats() -> None:
    nodes, days = 1500, 360
    outages = draw_history(1001, nodes=nodes, days=days)
    assert len(outages) * 1000 / nodes / days == pytest.approx(4.18, rel=0.15)
    repairs = np.array([o.end_ms - o.start_ms for o in outages]) / DAY_MS
    assert np.median(repairs) == pytest.approx(0.85, rel=0.15) and 4 < repairs.mean() < 7
    starts: dict[int, list[tuple[int, int]]] = {}
    for o in outages:
        starts.setdefault(o.node, []).append((o.start_ms, o.end_ms))
    gaps = [b[0] - a[1] for spans in starts.values() for a, b in itertools.pairwise(spans)]
    assert min(gaps) >= 0
    known = [o for o in outages if o.end_ms < (days - 30) * DAY_MS]
    for within_d, share in ((1, 0.22), (7, 0.31), (30, 0.43)):
        soon = sum(0 <= gap <= within_d * DAY_MS for gap in gaps)
        assert share - 0.04 < soon / len(known) < share + 0.08
    together = max(np.unique([o.start_ms for o in outages], return_counts=True)[1])
    assert 2 <= together <= 14
    assert draw_history(1001, nodes=nodes, days=days) == outages != draw_history(1002, nodes=nodes, days=days)

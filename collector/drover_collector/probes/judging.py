"""A finished order judged against what the store has of the fleet: reads, then pure functions."""

from __future__ import annotations

from collections import defaultdict

from drover_collector.probes.drift import BUDGET, Drift, drift
from drover_collector.probes.judgement import judge
from drover_collector.probes.measurements import Measurement
from drover_collector.probes.rows import CPU, measurement
from drover_collector.probes.verdicts import verdicts
from drover_collector.store import ProbeRow, Store
from drover_proto.events import ProbeOrder, ProbeResult, ProbeVerdict
from drover_proto.probes import FIGURES, Better

NODES = 512  # of the same board, those probed last: more of them tell little more, and are read for each order


def judge_order(store: Store, order: ProbeOrder, now_ms: int) -> tuple[list[ProbeVerdict], ProbeResult]:
    """Verdicts of an order whose closing result is stored, and that result.

    Raises:
        StoreError, ValueError: it has none.
    """
    rows = store.probe_results(order.id)
    end = next((row.result for row in rows if row.result.end), None)
    if end is None:
        raise ValueError(f"order {order.id} has no closing result")
    own = [m for row in rows if (m := measurement(row)) is not None]
    figures = {m.probe for m in own}
    skus = {m.key.sku for m in own}
    fleet: list[Measurement] = []
    for sku in sorted(skus):
        told = store.newest_probes(sorted(figures), sku=sku, node=order.node, nodes=NODES, now_ms=now_ms)
        fleet += [m for row in told if (m := measurement(row)) is not None and not _replaced(m, own)]
    return verdicts(order, rows, judge([*fleet, *own]), _drifts(store, rows), now_ms), end


def _replaced(m: Measurement, own: list[Measurement]) -> bool:
    """This order measured the same place: its figures count, whatever the clocks said."""
    return any((m.node, m.gpu, m.peer, m.probe) == (o.node, o.gpu, o.peer, o.probe) for o in own)


def _drifts(store: Store, rows: list[ProbeRow]) -> dict[int, list[Drift]]:
    """Of each GPU against its own earlier results; a pair's are two GPUs', and left out."""
    measured = [
        row.result
        for row in rows
        if not row.result.end and row.result.gpu is not None and row.result.peer is None and row.result.device != CPU
    ]
    judged = [
        r
        for r in measured
        if r.value is not None and r.probe in FIGURES and FIGURES[r.probe].better in (Better.HIGHER, Better.LOWER)
    ]
    found: dict[int, list[Drift]] = defaultdict(list)
    for result in judged:
        assert result.gpu is not None
        told = store.probe_history(result.node, result.gpu, result.probe)
        history = [m for row in told if (m := measurement(row)) is not None]
        found[result.gpu].append(drift(history, BUDGET / len(judged)))
    return found

"""A finished order judged against what the store has of the fleet: reads, then pure functions."""

from __future__ import annotations

from collections import defaultdict

from drover_collector.probes.judging.drift import BUDGET, Drift, drift
from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.measurements import Measurement
from drover_collector.probes.judging.rows import CPU, measurement
from drover_collector.probes.judging.verdicts import verdicts
from drover_collector.store import ProbeRow, Store
from drover_core.model.events import ProbeOrder, ProbeResult, ProbeVerdict
from drover_core.model.probe_figures import FIGURES, Better

# Of the same board, those probed last. A group's spread is known no better with more (groups.MOST_FREEDOM), and each
# order's end reads and judges all of them: of 64 nodes 8,000 figures, pairs among them.
NODES = 64


def judge_order(store: Store, order: ProbeOrder, now_ms: int) -> tuple[list[ProbeVerdict], ProbeResult]:
    """Verdicts of an order whose closing result is stored, and that result.

    Raises:
        StoreError, ValueError: it has none.
    """
    rows = store.probes.results.of_order(order.id)
    end = next((row.result for row in rows if row.result.end), None)
    if end is None:
        raise ValueError(f"order {order.id} has no closing result")
    own = [m for row in rows if (m := measurement(row)) is not None]
    figures = {m.probe for m in own}
    skus = {m.key.sku for m in own}
    mine = {_place(m) for m in own}  # measured by this order: these count, whatever the clocks said
    fleet: list[Measurement] = []
    for sku in sorted(skus):
        stored = store.probes.results.newest(sorted(figures), sku=sku, node=order.node, nodes=NODES, now_ms=now_ms)
        fleet += [m for row in stored if (m := measurement(row)) is not None and _place(m) not in mine]
    return verdicts(order, rows, judge([*fleet, *own]), _drifts(store, rows), now_ms), end


def _place(m: Measurement) -> tuple[str, int | None, int | None, str, str]:
    return m.node, m.gpu, m.peer, m.probe, m.key.form


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
    if not judged:
        return found
    stored = store.probes.results.histories(judged[0].node, sorted({r.probe for r in judged}))
    for result in judged:
        assert result.gpu is not None
        history = [m for row in stored.get((result.gpu, result.probe), ()) if (m := measurement(row)) is not None]
        found[result.gpu].append(drift(history, BUDGET / len(judged)))
    return found

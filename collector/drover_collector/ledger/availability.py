"""Availability: the share of all GPU time in which GPUs were in service, held or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.facts import PPM, Activity, Claims, Facts
from drover_collector.ledger.spans import NONE, Axis, GpuSpans, Ints, Segments
from drover_core.model.events import Health, NodeOutage

# Of a node that Drover has taken out, from when its jobs were gone: while it drains they still work.
OUT_STAGES = frozenset({Health.DRAINED, Health.VALIDATING, Health.REPAIR})
MOSTLY = PPM // 2  # a fault that takes more of a GPU than this has stopped it


class Service(IntEnum):
    """Where a millisecond of a GPU went; each is exactly one of these, the first in this order that applies."""

    OUT = 0  # drained by Drover, validating or in repair
    LOST = 1  # a fault stopped it, and it does not work
    SILENT = 2  # it did not report, while others did
    UNKNOWN = 3  # no GPU of the fleet reported: Drover itself saw nothing
    IN = 4


SERVICES = len(Service)


def find_service(index: FleetIndex, facts: Facts, stops: Claims, from_ms: int, to_ms: int) -> Ints:
    """Return int64 [G, SERVICES], GPU-milliseconds within [from_ms, to_ms); each row adds up to the span."""
    to_ms = max(from_ms, min(to_ms, facts.until_ms))
    result = np.zeros((index.gpu_count, SERVICES), np.int64)
    if to_ms == from_ms or not index.gpu_count:
        return result
    pieces, state = _states(index, facts, stops, (from_ms, to_ms), GpuSpans.of(()))
    np.add.at(result, (pieces.gpu, state), pieces.length_ms)
    return result


def find_kept(index: FleetIndex, facts: Facts, stops: Claims, from_ms: int, to_ms: int) -> Ints:
    """Return int64 [G], GPU-milliseconds in service while another GPU of the node was out alone.

    A drain of the node would have taken them: it is out from when its jobs are gone, as the GPU is.
    """
    to_ms = max(from_ms, min(to_ms, facts.until_ms))
    result = np.zeros(index.gpu_count, np.int64)
    spans = _out_alone(index, facts.gpu_outages, from_ms, to_ms)
    if to_ms == from_ms or not spans:
        return result
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    for gpu, low, high, _ in spans:
        n = int(index.gpu_node[gpu])
        others = range(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
        rows.setdefault(n, []).extend((other, low, high, 0) for other in others)
    near = GpuSpans.of([row for each in rows.values() for row in each]).apart()
    pieces, state = _states(index, facts, stops, (from_ms, to_ms), near)
    kept = (state == Service.IN) & (pieces.first(near) != NONE)
    np.add.at(result, pieces.gpu[kept], pieces.length_ms[kept])
    return result


def _states(
    index: FleetIndex, facts: Facts, stops: Claims, span: tuple[int, int], cut: GpuSpans
) -> tuple[Segments, Ints]:
    """Return all GPU time within a span in segments, and of each which `Service` it is.

    Args:
        cut: further edges.
    """
    from_ms, to_ms = span
    gpus = np.arange(index.gpu_count, dtype=np.int64)
    axis = Axis(from_ms, to_ms)
    whole = GpuSpans(gpus, *(np.full(len(gpus), number, np.int64) for number in (from_ms, to_ms, 0)))
    alone = GpuSpans.of(_out_alone(index, facts.gpu_outages, from_ms, to_ms))
    out = GpuSpans.join([_out(index, facts.outages, from_ms, to_ms), alone])
    strong = np.array([claim.ppm > MOSTLY for claim in stops.claims], np.bool_)
    lost = stops.spans.where(strong[stops.spans.value]) if len(stops.spans) else stops.spans
    lost = lost.clipped(from_ms, to_ms)
    activity = facts.activity.clipped(from_ms, to_ms)
    blind = _everywhere(gpus, fleet_gaps(activity, from_ms, to_ms))
    pieces = Segments.cut(axis, whole, out, lost, activity, blind, cut)
    seen = pieces.within(activity)
    shown = np.where(seen == NONE, NONE, activity.value[np.maximum(seen, 0)]) if len(activity) else seen
    state = np.full(len(pieces), int(Service.IN), np.int64)
    state[shown == NONE] = Service.SILENT
    state[pieces.first(blind) != NONE] = Service.UNKNOWN
    state[(pieces.first(lost) != NONE) & (shown != Activity.WORKING)] = Service.LOST
    state[pieces.first(out) != NONE] = Service.OUT
    return pieces, state


def fleet_gaps(activity: GpuSpans, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
    """Return the times within [from_ms, to_ms) in which no GPU reported."""
    order = np.argsort(activity.from_ms, kind="stable")
    low, high = activity.from_ms[order], np.maximum.accumulate(activity.to_ms[order])
    begins, ends = np.append(from_ms, high), np.append(low, to_ms)
    return [(int(a), int(b)) for a, b in zip(begins, ends, strict=True) if a < b]


def _everywhere(gpus: Ints, spans: Sequence[tuple[int, int]]) -> GpuSpans:
    return GpuSpans.join(
        [GpuSpans(gpus, *(np.full(len(gpus), number, np.int64) for number in (*span, 0))) for span in spans]
    )


def _out(index: FleetIndex, outages: Mapping[str, Sequence[NodeOutage]], from_ms: int, to_ms: int) -> GpuSpans:
    rows = []
    for node, states in outages.items():
        n = index.node_number.get(node)
        if n is None:
            continue
        ends = [*(state.ts_ms for state in states[1:]), to_ms]
        for state, end_ms in zip(states, ends, strict=True):
            low, high = max(from_ms, state.ts_ms), min(to_ms, end_ms)
            if state.stage in OUT_STAGES and low < high:
                rows += [(gpu, low, high, 0) for gpu in range(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))]
    return GpuSpans.of(rows)


def _out_alone(
    index: FleetIndex, outages: Mapping[str, Sequence[NodeOutage]], from_ms: int, to_ms: int
) -> list[tuple[int, int, int, int]]:
    """Return (GPU, from, to, 0) of single GPUs that were out while their nodes were not."""
    rows = []
    for states in outages.values():
        ends = [*(state.ts_ms for state in states[1:]), to_ms]
        for state, end_ms in zip(states, ends, strict=True):
            g = None if state.gpu is None else index.gpu(state.node, state.gpu.slot)
            low, high = max(from_ms, state.ts_ms), min(to_ms, end_ms)
            if g is not None and state.stage in OUT_STAGES and low < high:
                rows.append((g, low, high, 0))
    return rows

"""Times of rows that carry a node's own wrong clock, put right by what the node says of it.

A case's rows should have the collector's times. Where its author took the nodes' own clocks, a node whose clock
steps back by two minutes has twice as many rows for two minutes, and then none. `clock_offset_s` (node clock minus the
collector's) says by how much each row is off, and the distances between rows say whether they are.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from drover_cli.case.samples import Samples
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import BY_NAME

WRONG_S = 5.0  # as the detector's: less is no wrong clock
# Of each step of the clock, or of what is irregular: so much makes distances regular, else rows stay.
GAIN = 0.5

Times = npt.NDArray[np.int64]


def put_right(
    gpu: Samples | None, node: Samples | None, link: Samples | None, index: FleetIndex, interval_ms: int
) -> list[str]:
    """Move the rows of nodes whose rows carry a wrong clock, in place.

    Returns:
        A note for each node whose rows were moved.
    """
    metric = BY_NAME["clock_offset_s"]
    if node is None or metric.name not in node.names:
        return []
    count = len(node.ts_ms)
    offset = np.nan_to_num(node.column(metric, 0, count, Counter()))
    wrong = np.unique(node.entity[np.abs(offset) > WRONG_S])
    shifts = {}
    for n in wrong.tolist():
        mine = node.entity == n
        ts_ms, by_ms = node.ts_ms[mine], _steps_ms(offset[mine])
        steps_ms = int(np.abs(np.diff(by_ms[np.argsort(ts_ms - by_ms, kind="stable")])).sum())
        before_ms = _irregular_ms(ts_ms, interval_ms)
        gain_ms = before_ms - _irregular_ms(ts_ms - by_ms, interval_ms)
        # A clock that is off by an hour for some minutes leaves a gap of these minutes only.
        if steps_ms > interval_ms and gain_ms >= GAIN * min(steps_ms, before_ms) > 0:
            shifts[n] = ts_ms, by_ms
    if not shifts:
        return []
    if gpu is not None:
        gpu.move(_moves_ms(gpu, index.gpu_node[gpu.entity], shifts))
    if link is not None:
        nodes = np.array([port.node for port in index.ports.all()], np.int64)
        link.move(_moves_ms(link, nodes[link.entity], shifts))
    node.move(_moves_ms(node, node.entity, shifts))
    return [
        f"node {index.nodes[n].name}: rows carried its wrong clock, {by_ms[np.abs(by_ms).argmax()] / 1000:+.0f} s off;"
        " they were moved to the collector's time"
        for n, (_, by_ms) in shifts.items()
    ]


def _steps_ms(offset_s: npt.NDArray[np.float64]) -> Times:
    """Return by how much each row is to be moved back, 0 where the clock is nearly right."""
    return np.where(np.abs(offset_s) > WRONG_S, np.round(offset_s * 1000), 0).astype(np.int64)


def _irregular_ms(ts_ms: Times, interval_ms: int) -> int:
    """Return how much longer or shorter than the interval the distances between rows are, in all."""
    return int(np.abs(np.diff(np.sort(ts_ms)) - interval_ms).sum())


def _moves_ms(part: Samples, node_of: npt.NDArray[np.integer], shifts: dict[int, tuple[Times, Times]]) -> Times:
    """Return by how much each row of `part` is to be moved back: as the row of its node that was taken with it.

    `node_of`: of each row.
    """
    moves = np.zeros(len(part.ts_ms), np.int64)
    for n, (ts_ms, by_ms) in shifts.items():
        of_node = np.flatnonzero(node_of == n)
        for entity in np.unique(part.entity[of_node]).tolist():
            at = of_node[part.entity[of_node] == entity]
            together = np.arange(len(at)) if len(at) == len(ts_ms) else _next_to(part.ts_ms[at], ts_ms)
            moves[at] = by_ms[together]
    return moves


def _next_to(own_ms: Times, node_ms: Times) -> Times:
    """Return for each time the place of the next one in `node_ms`. Where a clock goes back, moments come twice there:
    of equally near ones each is taken once. Both are in order."""
    after = np.clip(np.searchsorted(node_ms, own_ms), 1, len(node_ms) - 1)
    near = after - (own_ms - node_ms[after - 1] < node_ms[after] - own_ms)
    first, end = np.searchsorted(node_ms, node_ms[near], "left"), np.searchsorted(node_ms, node_ms[near], "right")
    begins = np.flatnonzero(np.append(True, first[1:] != first[:-1])) if len(first) else first
    nth = np.arange(len(first)) - np.repeat(begins, np.diff(np.append(begins, len(first))))
    place: Times = np.minimum(first + nth, end - 1)
    return place

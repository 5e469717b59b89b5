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
GAIN = 0.5  # of each step of the clock makes distances between rows regular, else the rows stay where they are

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
        gain_ms = _irregular_ms(ts_ms, interval_ms) - _irregular_ms(ts_ms - by_ms, interval_ms)
        if steps_ms > interval_ms and gain_ms >= GAIN * steps_ms:
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
    """Return by how much each row of `part` is to be moved back: as the row of its node that is next to it in time.

    `node_of`: of each row.
    """
    moves = np.zeros(len(part.ts_ms), np.int64)
    for n, (ts_ms, by_ms) in shifts.items():
        at = np.flatnonzero(node_of == n)
        after = np.clip(np.searchsorted(ts_ms, part.ts_ms[at]), 1, len(ts_ms) - 1)
        nearer = part.ts_ms[at] - ts_ms[after - 1] < ts_ms[after] - part.ts_ms[at]
        moves[at] = by_ms[after - nearer]
    return moves

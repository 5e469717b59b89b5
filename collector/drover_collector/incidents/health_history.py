"""Health at past moments, from the stored changes. Pure.

`health.changes` leaves out GPUs that only follow their node to or from unknown, so here they follow it. Where a node
was unknown for one of its GPUs alone, all its GPUs show unknown: nothing unknown is ever shown as healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.health import HEALTHS, Codes
from drover_core.model.events import Health

CODES = {str(health): code for code, health in enumerate(HEALTHS)}
UNKNOWN, HEALTHY = CODES[str(Health.UNKNOWN)], CODES[str(Health.HEALTHY)]
PLAIN = (UNKNOWN, HEALTHY)


@dataclass(frozen=True, slots=True)
class Change:
    """`gpu` -1: the node. `ms`, `health`: its newest; `plain_ms`, `plain`: the newest to healthy or unknown."""

    node: str
    gpu: int
    ms: int
    health: str
    plain_ms: int = 0
    plain: str = ""


def standing(index: FleetIndex, changes: Iterable[Change]) -> tuple[Codes, Codes]:
    """Return codes of all nodes and GPUs, int8 [N] and [G], by each one's newest change; without one unknown."""
    node, gpu = np.full(index.node_count, UNKNOWN, np.int8), np.full(index.gpu_count, UNKNOWN, np.int8)
    plain, plain_ms = np.full(index.node_count, UNKNOWN, np.int8), np.zeros(index.node_count, np.int64)
    own_ms = np.zeros(index.gpu_count, np.int64)
    for change in changes:
        n = index.node_number.get(change.node)
        if n is None or change.health not in CODES:
            continue
        if change.gpu < 0:
            node[n] = CODES[change.health]
            if change.plain:
                plain[n], plain_ms[n] = CODES[change.plain], change.plain_ms
        elif (g := index.gpu(change.node, change.gpu)) is not None:
            gpu[g], own_ms[g] = CODES[change.health], change.ms
    follows = np.isin(gpu, PLAIN) & (plain_ms[index.gpu_node] > own_ms)
    gpu[follows] = plain[index.gpu_node][follows]
    return node, gpu


def played(
    index: FleetIndex, begin: tuple[Codes, Codes], moves: Sequence[Change], times_ms: Sequence[int]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return codes at several times, which are in order, int8 [T, N] and [T, G].

    Args:
        begin: what stood before `moves`, which are in order of time, nodes before GPUs.
    """
    node, gpu = begin[0].copy(), begin[1].copy()
    nodes = np.empty((len(times_ms), len(node)), np.int8)
    gpus = np.empty((len(times_ms), len(gpu)), np.int8)
    at = 0
    for frame, time_ms in enumerate(times_ms):
        while at < len(moves) and moves[at].ms <= time_ms:
            _apply(index, node, gpu, moves[at])
            at += 1
        nodes[frame], gpus[frame] = node, gpu
    return nodes, gpus


def _apply(index: FleetIndex, node: Codes, gpu: Codes, change: Change) -> None:
    n, code = index.node_number.get(change.node), CODES.get(change.health)
    if n is None or code is None:
        return
    if change.gpu >= 0:
        if (g := index.gpu(change.node, change.gpu)) is not None:
            gpu[g] = code
        return
    node[n] = code
    if code in PLAIN:
        own = gpu[int(index.first_gpu[n]) : int(index.first_gpu[n + 1])]
        own[np.isin(own, PLAIN)] = code


def blank(times_ms: Sequence[int], gaps: Iterable[tuple[int, int]], *codes: npt.NDArray[np.int8]) -> bool:
    """Make all unknown at the times that lie in a gap, in which nobody judged. Return whether one does."""
    times, found = np.array(times_ms), False
    for low, high in gaps:
        within = (times >= low) & (times < high)
        for each in codes:
            each[within] = UNKNOWN
        found = found or bool(within.any())
    return found

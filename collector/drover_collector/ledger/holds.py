"""Holds of GPUs, from changes as they are stored or from the jobs of a case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.spans import GpuSpans, Ints
from drover_core.model.fleet import JobSpec

NOBODY = -1


def of_changes(gpu: Ints, from_ms: Ints, job: Ints, until_ms: int) -> GpuSpans:
    """Return the holds that changes make: each lasts until the next change of its GPU, the newest until `until_ms`.

    Args:
        gpu, from_ms, job: int64 [K], in any order: since when which job holds which GPU; NOBODY frees it.
    """
    order = np.lexsort((from_ms, gpu))
    gpu, from_ms, job = gpu[order], from_ms[order], job[order]
    to_ms = np.full(len(gpu), until_ms, np.int64)
    if len(gpu):
        same = gpu[1:] == gpu[:-1]
        to_ms[:-1][same] = np.minimum(from_ms[1:][same], until_ms)
    kept = (job != NOBODY) & (from_ms < to_ms)
    return GpuSpans(gpu[kept], from_ms[kept], to_ms[kept], job[kept]).merged()


def of_jobs(index: FleetIndex, jobs: Sequence[JobSpec], until_ms: int) -> tuple[list[str], GpuSpans]:
    """Return the names of a case's jobs, and their holds. Where two hold one GPU, the one that began last counts."""
    names = list(dict.fromkeys(job.id for job in jobs))
    number = {name: at for at, name in enumerate(names)}
    rows = [
        (gpu, job.start_ms, until_ms if job.end_ms is None else min(job.end_ms, until_ms), number[job.id])
        for job in jobs
        for node, slot in job.members
        if (gpu := index.gpu(node, slot)) is not None
    ]
    return names, GpuSpans.of(rows).apart()


def steps_of_jobs(
    index: FleetIndex, holds: GpuSpans, reports: Sequence[tuple[str, int, int]]
) -> list[tuple[int, int, int]]:
    """Return (job, from_ms, to_ms) of reports of steps, which come from nodes.

    A node that several jobs share at that time says of none of them that it steps.
    """
    found: dict[tuple[int, int, int], None] = {}
    ordered = holds.by_time()
    for node, low, high in reports:
        n = index.node_number.get(node)
        if n is None:
            continue
        first, last = np.searchsorted(ordered.gpu, [index.first_gpu[n], index.first_gpu[n + 1]])
        there = (ordered.from_ms[first:last] < high) & (ordered.to_ms[first:last] > low)
        jobs = np.unique(ordered.value[first:last][there])
        if len(jobs) == 1:
            found[int(jobs[0]), low, high] = None
    return sorted(found)

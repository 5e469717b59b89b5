"""Which training loops report, which job each belongs to, and what one step of it costs in each bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import middle
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Bucket, Floats
from drover_collector.fleet.index import FleetIndex

NO_JOB = 2**31  # above all numbers of jobs
APART = 0.25  # steps of one synchronous job differ less than this from node to node, log; more: several loops
ALIKE = 0.03  # tokens and operations of a step that differ less than this are one shape, log


@dataclass(frozen=True, slots=True)
class Shape:
    """The work of one step: tokens and operations, NaN where not reported."""

    tokens: float
    flops: float

    def matches(self, other: Shape, within: float = ALIKE) -> bool:
        return _near(self.tokens, other.tokens, within) and _near(self.flops, other.flops, within)


def _near(a: float, b: float, within: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return abs(math.log(max(a, 1e-9) / max(b, 1e-9))) <= within


@dataclass(frozen=True, slots=True)
class Steps:
    """One loop in one bucket.

    Attributes:
        name: of the workload. job: that holds its GPUs, "" where nobody names one.
        nodes: numbers of the nodes that report it, ascending. gpus: the job's, int64 [K]; without a job its nodes'.
        step_s: of one step, the median over its nodes. shape: of that step.
    """

    name: str
    job: str
    nodes: tuple[int, ...]
    gpus: Ints
    step_s: float
    shape: Shape

    @property
    def label(self) -> str:
        """The name by which people know the job."""
        return self.job or self.name

    @property
    def key(self) -> tuple[str, str, int]:
        """What its past is kept by: a job with another number of GPUs is another series."""
        return self.job, self.name, len(self.gpus) if self.job else 0

    @property
    def cost(self) -> float:
        """Log of the time for one operation, else one token, else one step."""
        work = self.shape.flops if self.shape.flops > 0 else self.shape.tokens
        return math.log(self.step_s / work if work > 0 else self.step_s)


class JobsOfNodes:
    """Which jobs hold GPUs of each node in a bucket, and all GPUs of each job."""

    def __init__(self, index: FleetIndex, bucket: Bucket) -> None:
        self._index, self._jobs, self._names = index, bucket.jobs, bucket.job_names
        held = bucket.jobs >= 0
        nodes, jobs = index.gpu_node[held], bucket.jobs[held]
        self._low, self._high = np.full(index.node_count, NO_JOB, np.int64), np.full(index.node_count, -1, np.int64)
        np.minimum.at(self._low, nodes, jobs)
        np.maximum.at(self._high, nodes, jobs)
        self._order = np.argsort(bucket.jobs, kind="stable")
        self._sorted = bucket.jobs[self._order]

    def on(self, node: int) -> set[int]:
        """Return the jobs that hold GPUs of a node."""
        if self._high[node] < 0:
            return set()
        if self._low[node] == self._high[node]:
            return {int(self._high[node])}
        here = self._jobs[int(self._index.first_gpu[node]) : int(self._index.first_gpu[node + 1])]
        return set(here[here >= 0].tolist())

    def nodes(self, job: int) -> frozenset[int]:
        return frozenset(self._index.gpu_node[self.gpus(job)].tolist())

    def gpus(self, job: int) -> Ints:
        low, high = np.searchsorted(self._sorted, [job, job + 1])
        return self._order[low:high]

    def name(self, job: int) -> str:
        return self._names[job]


def steps_of(window: Window) -> Iterator[Steps]:
    """Yield the training loops of the newest bucket, by job and name."""
    bucket, work = window.newest, window.newest.work
    times = work.values.get("step_time_s")
    if times is None:
        return
    jobs = JobsOfNodes(window.index, bucket)
    rows = np.flatnonzero(times > 0)
    by_name: dict[str, list[int]] = {}
    for row in rows.tolist():
        by_name.setdefault(work.name[row], []).append(row)
    for name, mine in sorted(by_name.items()):
        for job, some in sorted(_by_job(jobs, work.node, mine).items()):
            found = _steps(window, name, job, jobs, some)
            if found is not None:
                yield found


def _by_job(jobs: JobsOfNodes, node: npt.NDArray[np.int32], rows: Sequence[int]) -> Mapping[int, list[int]]:
    """Return job -> rows of one name; -1: nobody says whose they are.

    On a node that jobs share, it is the job whose nodes are most like those of the name.
    """
    of_name = {int(node[row]) for row in rows}
    found: dict[int, list[int]] = {}
    for row in rows:
        here = jobs.on(int(node[row]))
        job = next(iter(here)) if len(here) == 1 else -1
        if len(here) > 1:
            likeness = sorted(
                ((len(jobs.nodes(j) & of_name) / len(jobs.nodes(j) | of_name), j) for j in here), reverse=True
            )
            job = likeness[0][1] if likeness[0][0] > likeness[1][0] else -1
        found.setdefault(job, []).append(row)
    return found


def _steps(window: Window, name: str, job: int, jobs: JobsOfNodes, rows: Sequence[int]) -> Steps | None:
    work, index = window.newest.work, window.index
    times = work.values["step_time_s"][list(rows)]
    if len(times) > 2:
        low, high = np.quantile(times, [0.1, 0.9])
        if math.log(high / low) > APART and high < window.newest.length_ms / 2000:
            return None  # loops of one name that do not step together
    nodes = tuple(sorted({int(work.node[row]) for row in rows}))
    gpus = jobs.gpus(job) if job >= 0 else np.flatnonzero(np.isin(index.gpu_node, nodes))
    tokens, flops = (_middle(work.values.get(metric), rows) for metric in ("tokens_per_step", "flops_per_step"))
    step_s = float(np.sort(times)[(len(times) - 1) // 2])
    return Steps(name, jobs.name(job) if job >= 0 else "", nodes, gpus, step_s, Shape(tokens, flops))


def _middle(values: Floats | None, rows: Sequence[int]) -> float:
    if values is None:
        return math.nan
    held = values[list(rows)]
    held = held[~np.isnan(held)]
    return middle(held) if len(held) else math.nan

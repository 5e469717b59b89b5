"""Read columns of the newest bucket, and group the GPUs that may be compared: by board, by job, at steady work."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import (
    Bools,
    Grouping,
    Groups,
    group_medians,
)
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats

BUSY_UTIL = 0.5  # of time with a kernel: below it a job is loading, saving or idle, and cannot be judged
IDLE_UTIL = 0.2  # below it a GPU is idle, not slow, and its links sleep
COUNTER_SLACK = 2.1  # samples are 1 to 2 intervals apart; a counter that grows faster has another unit
BOARD_STEP = 1.1  # memory clocks of different boards differ by more
MARGIN_FALSE_C = -30.0  # hardware is off long before: H100 at a T.Limit of -8 (`nvidia-smi -q -d TEMPERATURE`)
POWER_STEADY = 0.12  # a larger change of the group's power since the last bucket is a start, stop or save

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]


@dataclass(slots=True)
class JobAges:
    """Number of buckets for which each GPU has been held by the same job, int64 [G]."""

    job_names: tuple[str, ...] = ()
    jobs: Codes = field(default_factory=lambda: np.zeros(0, np.int32))  # of the last bucket, numbers of `job_names`
    buckets: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def advance(self, window: Window) -> None:
        bucket = window.newest
        if len(self.buckets) != len(bucket.jobs):
            self.buckets = np.zeros(len(bucket.jobs), np.int64)
            self.job_names, self.jobs = (), np.full(len(bucket.jobs), -1, np.int32)
        same: Bools | bool = True
        if not np.array_equal(bucket.jobs, self.jobs) or bucket.job_names != self.job_names:
            before, now = (np.array([*names, None], object) for names in (self.job_names, bucket.job_names))
            same = np.asarray(before[self.jobs] == now[bucket.jobs], bool)  # -1 takes the None at the end
        self.buckets = np.where(same, self.buckets + 1, 0)
        self.job_names, self.jobs = bucket.job_names, bucket.jobs


def jobs_of_nodes(window: Window) -> Ints:
    """Return the number of the job that holds each node's first GPU, int64 [N]; -1: none, or nobody says."""
    index, jobs = window.index, window.newest.jobs
    if not index.gpu_count:
        return np.full(index.node_count, -1, np.int64)
    first = np.minimum(index.first_gpu[:-1], index.gpu_count - 1)
    return np.where(np.diff(index.first_gpu) > 0, jobs[first], -1).astype(np.int64)


def boards(window: Window) -> Groups:
    """Return the kind of board of each node, int64 [N]; -1: unknown.

    It is the node's SKU; where fleet.toml names none, a number for each memory clock (median of the node's GPUs), which
    is a constant of the board.
    """
    index = window.index
    unnamed = np.array([name == "" for name in index.skus], bool)[index.sku]
    sku = index.sku.astype(np.int64)
    if not unnamed.any():
        return sku
    clocks, _ = group_medians(column(window, "memory_clock_mhz"), index.gpu_node.astype(np.int64), index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.round(np.log(clocks) / np.log(BOARD_STEP))
    by_clock = np.where(np.isfinite(steps), len(index.skus) + np.nan_to_num(steps, posinf=0, neginf=0), -1)
    return np.where(unnamed, by_clock.astype(np.int64), sku)


def job_groups(window: Window) -> Groups:
    """Return the group of each GPU, its job and board, int64 [G]; -1 without a job."""
    jobs = window.newest.jobs.astype(np.int64)
    of_node = boards(window) + 1
    return np.where(jobs >= 0, jobs * (int(of_node.max(initial=0)) + 1) + of_node[window.index.gpu_node], -1)


def working(window: Window, grouping: Grouping) -> Bools:
    """Return the GPUs at work in a steady group, bool [G]: most of it is busy, and its power has hardly changed."""
    groups, util = grouping.groups, window.newest.gpu.get("gpu_util_ratio")
    nothing, count = np.full(len(groups), np.nan), grouping.count
    if not count:
        return np.zeros(len(groups), bool)
    powers = [bucket.gpu.get("power_w") for bucket in window.buckets[-2:]]
    columns = [nothing if values is None else values for values in (util, powers[-1], powers[0])]
    (of_util, now, before), _ = grouping.medians(np.array(columns))
    good = ~(of_util < BUSY_UTIL)  # NaN: unknown, judged by power alone
    with np.errstate(invalid="ignore", divide="ignore"):
        good &= ~(np.abs(now / before - 1) > POWER_STEADY)
    idle = np.zeros(len(groups), bool) if util is None else util < IDLE_UTIL
    return np.asarray((groups >= 0) & ~idle & good[groups])


def counter_share(window: Window, metric: str) -> Floats:
    """Return the growth of a counter of microseconds as a share of the newest bucket, float64 [G]; NaN: unknown."""
    last = window.buckets[-2:]
    before, now = (bucket.gpu.get(metric) for bucket in last) if len(last) == 2 else (None, None)
    if before is None or now is None:
        return np.full(window.index.gpu_count, np.nan)
    elapsed_us = (last[-1].end_ms - last[0].end_ms) * 1000
    grown = now - before
    # Negative: the driver was loaded again. More than time allows: the counter is not in microseconds.
    grown[(grown < 0) | (grown > COUNTER_SLACK * elapsed_us)] = np.nan
    return np.asarray(np.clip(grown / elapsed_us, 0, 1))


def column(window: Window, metric: str) -> Floats:
    """Return the newest bucket's values, float64 [G]; all NaN if the metric was not reported."""
    found = window.newest.gpu.get(metric)
    return np.full(window.index.gpu_count, np.nan) if found is None else found


def margin_c(window: Window) -> Floats:
    """Return the degrees left to slowdown, float64 [G]; NaN where unknown or implausible."""
    found = column(window, "thermal_margin_c")
    return np.where(found < MARGIN_FALSE_C, np.nan, found)


def reasons_of(window: Window) -> Ints:
    """Return the clock event reasons that each GPU reports, as bits, int64 [G]; 0 if absent."""
    return np.asarray(np.nan_to_num(column(window, "clock_event_reasons")).astype(np.int64))

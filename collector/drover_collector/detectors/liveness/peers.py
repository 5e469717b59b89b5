"""Judge by the other nodes of a silent node's job whether that job goes on.

A synchronous job waits for each of its ranks. When a node dies, its peers stop computing within a step: they wait in
NCCL and draw much less power, or their processes end. While they draw what they drew before, the node most likely runs,
and only its agent or its way to the collector is cut.

What they drew before is not learnt again while the node is away: they may wait for it for ten minutes, until NCCL's
watchdog ends the job. A scheduler may start the job again, under its name and without the node. So GPUs that join the
job meanwhile say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Bucket, Floats, Ints

WEIGHT = 0.05  # of the newest bucket in the usual power: some minutes at 10 s
STOPPED_SHARE = 0.7  # of the usual power: a GPU that waits in NCCL draws about half of what it draws in training
GOES_ON_SHARE = 0.85
# A job that rests shows nothing. A GPU works that usually draws so many times the least power seen of it, or this share
# of its limit.
WORKING, WORKING_SHARE = 1.3, 0.4
NAMES_KEPT = 65_536  # names of jobs, until those that have ended are forgotten


class Progress(Enum):
    """What a silent node's job does on its other nodes."""

    STOPPED = "stopped"
    GOES_ON = "goes_on"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class PeersOfSilent:
    """What each GPU drew, and the job it was in, while it reported.

    Attributes:
        usual_w: float64 [G], a moving average of its power. least_w: float64 [G], the least seen. NaN: not seen.
        job: int32 [G], a number from `numbers` (-1: none). That of a silent GPU is the one it had before.
        joined: bool [G], the GPU came to its job when a node of that was away already.
    """

    usual_w: Floats
    least_w: Floats
    job: Ints
    joined: Bools
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, gpu_count: int) -> PeersOfSilent:
        """Return the state before the first bucket."""
        none = np.full(gpu_count, np.nan)
        return cls(none, none, np.full(gpu_count, -1, np.int32), np.zeros(gpu_count, bool))

    def resume(self, gpus: slice, job: str) -> None:
        """Take over from a former run which job GPUs were in that have been silent since."""
        self.job[gpus] = self.numbers.setdefault(job, max(self.numbers.values(), default=-1) + 1)

    def add_bucket(self, bucket: Bucket, away: Bools) -> None:
        """Learn from the next bucket. `away`: bool [G], GPUs of nodes that count as silent."""
        reporting, before = bucket.gpu_rows > 0, self.job.copy()
        self.job[reporting] = self._numbered(bucket)[reporting]
        waits = np.isin(self.job, np.unique(self.job[away & (self.job >= 0)])) & (self.job >= 0)
        came = (self.job != before) & ~np.isnan(self.usual_w)  # not one that is seen for the first time
        self.joined = waits & (self.joined | came)
        power = bucket.gpu.get("power_w")
        if power is None:
            return
        known = ~np.isnan(power)
        usual = np.where(np.isnan(self.usual_w), power, self.usual_w)
        self.usual_w = np.where(known, usual + np.where(waits, 0.0, WEIGHT) * (power - usual), self.usual_w)
        self.least_w = np.where(waits & ~np.isnan(self.least_w), self.least_w, np.fmin(self.least_w, power))

    def shares(self, window: Window) -> Floats:
        """Return what each job draws now as a share of its usual power, by number of the job; NaN: unknown."""
        power = window.newest.gpu.get("power_w")
        jobs = max(self.numbers.values(), default=-1) + 1
        if power is None or not jobs:
            return np.full(jobs, np.nan)
        usual, limit = self.usual_w, window.newest.gpu.get("power_limit_w")
        works = usual > WORKING * self.least_w
        if limit is not None:
            works |= usual > WORKING_SHARE * limit
        share = np.where(works & ~self.joined, power / usual, np.nan)  # NaN: of silent nodes too
        return group_medians(share, self.job.astype(np.int64), jobs)[0]

    def progress(self, window: Window, n: int, shares: Floats) -> Progress:
        """Return what the jobs of silent node number `n` do on other nodes. `shares`: of all jobs, now."""
        mine = self.job[window.index.first_gpu[n] : window.index.first_gpu[n + 1]]
        known = shares[np.unique(mine[mine >= 0])]
        known = known[~np.isnan(known)]
        if not len(known):
            return Progress.UNKNOWN
        share = float(np.median(known))
        if share < STOPPED_SHARE:
            return Progress.STOPPED
        return Progress.GOES_ON if share > GOES_ON_SHARE else Progress.UNKNOWN

    def _numbered(self, bucket: Bucket) -> Ints:
        """Return the job of each GPU, int32 [G], as numbers that stay the same from bucket to bucket."""
        if len(self.numbers) > NAMES_KEPT:
            kept = set(np.unique(self.job).tolist())
            self.numbers = {name: number for name, number in self.numbers.items() if number in kept}
        following = max(self.numbers.values(), default=-1) + 1
        codes = np.full(len(bucket.job_names) + 1, -1, np.int32)  # the last stands for "none", number -1
        for at, name in enumerate(bucket.job_names):
            codes[at] = number = self.numbers.setdefault(name, following)
            following = max(following, number + 1)
        return codes[bucket.jobs]

"""Guess which GPUs work in one job, where nobody says: no scheduler is connected, or a recording names few jobs.

GPUs of one kind that begin to work in the same seconds, all of their nodes' working GPUs together, are taken as one
job. A guess only gets finer: when some GPUs of a group pause and begin again together, on two nodes at least, they were
a job of their own. A GPU that pauses by itself works by itself, as a replica of a service does, and leaves its group.

Until such a sign is seen, the GPUs of one node that have worked alike for a while are compared with each other where
that is enough: a slow GPU among those that wait needs no other node. For hangs see detectors/hang/stops.py.

What is found by a guess says so, and asks for a probe at most: another grouping could explain it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from drover_collector.detectors._lib.metrics import Codes, Ints
from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.fleet.buckets import GUESSED, Bucket, Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    WANTED_ORDER,
    Evidence,
    Finding,
    RecommendedAction,
)

USERS = frozenset({"straggler", "hang"})  # detectors that see the guesses
OF_NODES = frozenset({"straggler"})  # those that see the GPUs of a node as a job, too
WORKS, RESTS = 0.5, 0.2  # utilisation from which a GPU works, below which it pauses
WORKS_POWER, RESTS_POWER = 0.4, 0.3  # of the power limit, where utilisation is not read
TOGETHER_MS = 20_000  # within which GPUs of a job begin
OVER_MS = 300_000  # a longer pause ends a job
NODE_SHARE = 0.75  # of a node's working GPUs that must begin together
LEAST = 4  # GPUs
ALONE_MOST = 2  # pauses by itself until a GPU leaves its group
ALIKE_BUCKETS = 9  # for which GPUs of a node must have worked, and worked alike at the end
ALIKE_UTIL = 0.04  # difference to the node's median utilisation; ranks of one job differ by a percent
# Differences of power, of SM activity and of HBM traffic, as shares of the median.
ALIKE = {"power_w": 0.12, "sm_active_ratio": 0.06, "dram_active_ratio": 0.06, "memory_util_ratio": 0.10}
SMOOTH = 0.2  # of the means that are compared
CONFIDENCE = 0.8  # of what a known job would give


class GuessedJobs:
    """State of a fleet's guesses. `add_bucket` with each bucket in order of time.

    Attributes:
        group: int64 [G], number of each GPU's guessed job; 0: none.
    """

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self.group: Ints = np.zeros(index.gpu_count, np.int64)
        self._works: Bools = np.zeros(index.gpu_count, bool)
        self._rested_ms: Ints = np.zeros(index.gpu_count, np.int64)  # in the pause that has ended, or goes on
        self._alone: Ints = np.zeros(index.gpu_count, np.int64)  # pauses by itself
        self._began: Bools = np.zeros(index.gpu_count, bool)  # in the beginning that is being gathered
        self._began_ms = 0  # its first bucket; 0: none
        self._next = 1
        self._worked: Ints = np.zeros(index.gpu_count, np.int64)  # buckets in a row
        self._alike: Bools = np.zeros(index.gpu_count, bool)  # with others of its node, since it has worked
        self._means: dict[str, Floats] = {}

    def add_bucket(self, bucket: Bucket) -> None:
        working, resting = self._state(bucket)
        working &= bucket.jobs < 0
        held = bucket.jobs >= 0
        self.group[held], self._rested_ms[held], self._began[held], self._alone[held] = 0, 0, False, 0
        begins = working & ~self._works & (self._rested_ms > 0)  # else it worked before it was watched
        self._works = (self._works | working) & ~resting
        self._rested_ms = np.where(resting, self._rested_ms + bucket.length_ms, self._rested_ms)
        self.group[resting & (self._rested_ms >= OVER_MS)] = 0
        if begins.any() and not self._began_ms:
            self._began_ms = bucket.start_ms
        self._began |= begins
        if self._began_ms and bucket.end_ms - self._began_ms >= max(TOGETHER_MS, 2 * bucket.length_ms):
            self._gather()
        self._rested_ms = np.where(self._works & ~self._began, 0, self._rested_ms)
        self._compare(bucket)

    def filled(self, bucket: Bucket, of_nodes: bool = False) -> Bucket:
        """Return the bucket with guesses for GPUs without a job; itself where nothing is guessed.

        `of_nodes`: the working GPUs of a node are a job where nothing more is known.
        """
        group = self.group
        if of_nodes:
            rest = self._alike & (group == 0) & (bucket.jobs < 0) & (self._alone < ALONE_MOST)
            group = np.where(rest, self._next + self._index.gpu_node, group)
        if not group.any():
            return bucket
        groups, jobs, counts = np.unique(group, return_inverse=True, return_counts=True)
        good = (groups > 0) & (counts >= LEAST)
        guessed = np.where(good[jobs], len(bucket.job_names) + jobs, -1)
        codes: Codes = np.where(bucket.jobs >= 0, bucket.jobs, guessed).astype(np.int32)
        nodes = self._index.nodes
        of_groups = (nodes[n - self._next].name if n >= self._next else str(n) for n in groups.tolist())
        names = (*bucket.job_names, *(f"{GUESSED}{name}" for name in of_groups))
        return replace(bucket, jobs=codes, job_names=names)

    def _state(self, bucket: Bucket) -> tuple[Bools, Bools]:
        """Return which GPUs work and which pause, [G]; in between, or without values, nothing changes."""

        def values(metric: str) -> Floats:
            return bucket.gpu.get(metric, np.full(self._index.gpu_count, np.nan))

        util, power, limit = values("gpu_util_ratio"), values("power_w"), values("power_limit_w")
        with np.errstate(invalid="ignore", divide="ignore"):
            share = power / limit
            unread = np.isnan(util)
            working = np.where(unread, share >= WORKS_POWER, util >= WORKS)
            resting = np.where(unread, share < RESTS_POWER, util < RESTS)
        return np.asarray(working, bool), np.asarray(resting, bool)

    def _compare(self, bucket: Bucket) -> None:
        """Find the GPUs of each node that work alike. They stay together: a slow one among them differs later."""
        self._worked = np.where(self._works, self._worked + 1, 0)
        self._alike &= self._works
        for metric in ("gpu_util_ratio", *ALIKE):
            values = bucket.gpu.get(metric)
            if values is not None:
                before = self._means.get(metric, np.full(len(values), np.nan))
                after = np.where(np.isnan(before), values, before + SMOOTH * (values - before))
                self._means[metric] = np.where(np.isnan(values), before, after)
        new = (self._worked >= ALIKE_BUCKETS) & (self.group == 0) & ~self._alike & (bucket.jobs < 0)
        if not new.any() or "gpu_util_ratio" not in self._means:
            return
        node, count = self._index.gpu_node.astype(np.int64), self._index.node_count
        working = np.where(self._worked >= ALIKE_BUCKETS, node, -1)
        alike = new.copy()
        for metric, values in self._means.items():
            median = group_medians(values, working, count)[0][node]
            most = ALIKE_UTIL if metric == "gpu_util_ratio" else ALIKE[metric] * median
            alike &= ~(np.abs(values - median) > most)
        enough = np.bincount(node[alike | (self._alike & (working >= 0))], minlength=count) >= LEAST
        self._alike |= alike & enough[node]

    def _gather(self) -> None:
        """Group the GPUs that have begun together."""
        began, self._began, self._began_ms = self._began, np.zeros(len(self._began), bool), 0
        index = self._index
        kind = index.sku[index.gpu_node].astype(np.int64)
        shorter = began & (self._rested_ms < OVER_MS) & (self.group > 0)
        for group in np.unique(self.group[shorter]).tolist():
            inside = self.group == group
            mine = inside & shorter
            if mine.sum() == inside.sum():
                continue
            if len(np.unique(index.gpu_node[mine])) > 1 and mine.sum() >= LEAST:
                self.group[mine] = self._take()
            elif 2 * mine.sum() < inside.sum():
                self._alone[mine] += 1
        leaves = self._alone >= ALONE_MOST
        self.group[leaves] = 0
        fresh = began & ((self.group == 0) | (self._rested_ms >= OVER_MS)) & self._whole(began)
        self._alone[began & (self._rested_ms >= OVER_MS)] = 0
        fresh &= self._alone < ALONE_MOST
        for board in np.unique(kind[fresh]).tolist():
            mine = fresh & (kind == board)
            if mine.sum() >= LEAST:
                self.group[mine] = self._take()

    def _whole(self, began: Bools) -> Bools:
        """Return the GPUs of nodes most of whose working GPUs have begun, bool [G]."""
        node, count = self._index.gpu_node, self._index.node_count
        working, mine = (np.bincount(node[which], minlength=count) for which in (self._works, began))
        return np.asarray((mine >= NODE_SHARE * working)[node])

    def _take(self) -> int:
        self._next += 1
        return self._next - 1


def doubted(finding: Finding) -> Finding:
    """Return a finding of a guessed job with the doubt said, and with a probe as the most it asks for."""
    if finding.job is None or not finding.job.startswith(GUESSED):
        return finding
    probe = WANTED_ORDER.index(RecommendedAction.PROBE)
    action = finding.action if WANTED_ORDER.index(finding.action) <= probe else RecommendedAction.PROBE
    doubt = Evidence(
        "No scheduler names this job: GPUs that begin, pause or stop together are taken as one job.", key="guessed job"
    )
    return replace(
        finding, job=None, action=action, confidence=round(CONFIDENCE * finding.confidence, 2),
        evidence=(*finding.evidence, doubt),
    )  # fmt: skip

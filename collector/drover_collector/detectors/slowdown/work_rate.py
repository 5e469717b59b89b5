"""How much the GPUs and ports of each job do in a second, from telemetry alone, for jobs whose loops report nothing.

A training step exchanges as many bytes however long it takes, so steps that take longer send fewer bytes in a second.
What a port has sent is a counter, exact for any time; activities of GPUs are samples of single seconds whose median
says little of a long step. Other work sends fewer bytes, too: longer sequences or a larger batch (GPUs draw as much
power as before, or more), an evaluation (nearly none). So a job is slower only if its GPUs draw less power meanwhile,
and tensor work and memory traffic fell alike, as far as samples show it. Only jobs on two nodes at least that have been
steady are judged: a server with fewer requests looks slower, too.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown.change import LEARN, Change, Limits, Observation, means
from drover_collector.detectors.slowdown.telemetry import (
    DRAM,
    METRICS,
    SM,
    TENSOR,
    TRAFFIC,
    Reading,
    compute_fell,
    fell,
)
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import Incident

POWER = TRAFFIC + 1  # column of the figures, after those of `telemetry`
EVERY = 6  # buckets in one observation: a minute, as steps of many seconds begin in one bucket and not in the next
LEAST_NODES = 2
# Thresholds are ours, set by the jobs of `tuning` in tests/testbed/job_telemetry.py (docs/evidence/slowdown.md).
WORKS = 0.75  # of the power of the highest bucket of an observation: less is a pause, as a checkpoint is
LEAST_TRAFFIC = 1e8  # bytes/s that a node sends: less than gradients take
WARM_MS = 600_000  # of a run
GAP_MS = 150_000  # without work: the run was interrupted
STEADY = 0.06  # long-run deviation of a job's observations, log: a job that varies more is not judged
LARGEST = 0.6  # log: what sends so much less does other work
OTHER_MS = 60_000  # after other work: the observation in which it ended is of both
POWER_FELL = 0.12, 3.0  # of the effect: waiting takes half the power of computing; a cap takes more power than speed
ROSE = 0.015  # log: an activity that grew by so much is other work
SAME_MIX = 0.25  # of the effect, by which tensor work and memory traffic may differ: other kernels differ by more
MAX_JOBS = 2_000  # with most GPUs: more are not judged
FORGET_MS = 86_400_000


def is_slower(usual: Floats, now: Floats, effect: float) -> bool:
    """Return whether GPUs do less as well when traffic fell by the effect (log): less power, no activity that rose."""
    if len(usual) <= POWER or len(now) <= POWER or effect > LARGEST or not usual[TRAFFIC] >= LEAST_TRAFFIC:
        return False
    least, most = POWER_FELL
    if not least * effect <= fell(usual, now, POWER) <= most * effect:
        return False
    compute, memory = compute_fell(usual, now), fell(usual, now, DRAM)
    if abs(compute - memory) > min(max(SAME_MIX * effect, ROSE), 2 * ROSE):
        return False
    return all(-ROSE <= each <= 2 * effect for each in (compute, memory, fell(usual, now, SM)))


ALONE = Limits(0.045, 0.04, 300_000, is_slower, must_stretch=True, figures=means, steady=STEADY)
AFTER_RESTART = replace(ALONE, least=0.08, delta=0.06, least_ms=600_000)


class Work(NamedTuple):
    """What one job did in a bucket. `figures`: means of METRICS, bytes/s of a node and power of a GPU, float64 [7]."""

    nodes: int
    gpus: int
    figures: Floats


@dataclass(slots=True)
class Track:
    """One job on so many GPUs. Times in ms; `change`: the test of its work for each second.

    Attributes:
        settled_ms: before this, its work does not count. since_restart: observations; None: there was no restart.
        why: what explains the change that is open. shown: its GPUs report their activity: without it less is known.
    """

    begun_ms: int
    seen_ms: int
    settled_ms: int
    change: Change = field(default_factory=Change)
    since_restart: int | None = None
    why: Reading | None = None
    shown: bool = False

    def resume(self, key: tuple[str, int], reopened: list[Incident]) -> None:
        """Go on with the incident that was open before the collector was started again."""
        for incident in reopened:
            held = incident.snapshot_of("slowdown")
            if held.get("work_rate") == list(key):
                reopened.remove(incident)
                numbers = float(held["usual"]), float(held["sigma"]), int(held["since"]), float(held["effect"])
                self.change.resume(*numbers)
                self.why = Reading(incident.cause, str(held.get("why", "")), ())
                self.begun_ms, self.settled_ms = incident.since_ms, 0
                return

    def add(self, figures: Floats, ts_ms: int) -> bool:
        """Add what the job did in EVERY buckets; return whether it is slower from now on."""
        if ts_ms - self.seen_ms > GAP_MS:
            self.begun_ms, self.settled_ms, self.since_restart = ts_ms, ts_ms + WARM_MS, 0
            self.change.interrupt()
        self.seen_ms, self.shown = ts_ms, figures[TENSOR] > 0 and figures[DRAM] > 0
        if ts_ms < self.settled_ms:
            return False
        change = self.change
        was_open = change.open_since_ms is not None
        cost = -math.log(figures[TRAFFIC])
        if cost - change.usual > LARGEST:
            self.settled_ms = ts_ms + OTHER_MS + 1
            return False
        change.add(Observation(ts_ms, cost, figures), ALONE if self.since_restart is None else AFTER_RESTART)
        if change.open_since_ms is None:
            self.why = None
            if self.since_restart is not None and not change.pending:
                self.since_restart += 1
                self.since_restart = None if self.since_restart >= LEARN else self.since_restart
            return False
        return not was_open


@dataclass(slots=True)
class WorkRates:
    """All jobs without a loop that reports.

    Attributes:
        tracks: (job, its GPUs) -> Track. recent: of the newest EVERY buckets, job -> what it did.
        sent, port_node: bytes that each port had sent at the end of the last bucket, and its node.
        energy: of each GPU at the end of the last bucket.
    """

    tracks: dict[tuple[str, int], Track] = field(default_factory=dict)
    recent: deque[Mapping[str, Work]] = field(default_factory=lambda: deque(maxlen=EVERY))
    sent: Floats = field(default_factory=lambda: np.zeros(0))
    energy: Floats = field(default_factory=lambda: np.zeros(0))
    port_node: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def advance(self, window: Window, reopened: list[Incident]) -> Iterator[tuple[str, Ints, Track]]:
        """Add the newest bucket; yield the jobs that are slower from now on: name, GPUs, track.

        Args:
            reopened: incidents that were open when the collector started; those that go on here are removed.
        """
        bucket = window.newest
        ts_ms = bucket.end_ms
        self.recent.append(self._work(window))
        if len(self.recent) < EVERY:
            return
        turn = ts_ms // bucket.length_ms % EVERY
        for job, newest in self.recent[-1].items():
            if zlib.crc32(job.encode()) % EVERY != turn:  # so that each bucket has its share of the jobs
                continue
            figures = together([work for each in self.recent if (work := each.get(job)) and work[:2] == newest[:2]])
            if figures is None:
                continue
            key = job, newest.gpus
            track = self.tracks.get(key)
            if track is None:
                track = self.tracks[key] = Track(ts_ms, ts_ms, ts_ms + WARM_MS)
                track.resume(key, reopened)
            if track.add(figures, ts_ms):
                yield job, np.flatnonzero(bucket.jobs == bucket.job_names.index(job)), track
        if len(self.tracks) > 2 * MAX_JOBS or ts_ms % 600_000 == 0:
            kept = sorted(self.tracks.items(), key=lambda entry: (-entry[1].seen_ms, entry[0]))[:MAX_JOBS]
            self.tracks = {key: track for key, track in kept if ts_ms - track.seen_ms <= FORGET_MS}

    def _work(self, window: Window) -> dict[str, Work]:
        """Return what each job did that can be judged: on whole nodes, with known traffic and power."""
        bucket, index = window.newest, window.index
        sent, power = self._sent(window), self._power(window)
        if sent is None or power is None or not bucket.job_names:
            return {}
        count = len(bucket.job_names)
        whole = self._whole_nodes(window)
        nodes = np.bincount(whole[whole >= 0], minlength=count)
        gpu_job = np.where(whole[index.gpu_node] >= 0, bucket.jobs, -1)
        gpus = np.bincount(bucket.jobs[bucket.jobs >= 0], minlength=count)
        inside = np.bincount(gpu_job[gpu_job >= 0], minlength=count)
        figures = np.full((count, POWER + 1), np.nan)
        for at, metric in enumerate(METRICS):
            column = bucket.gpu.get(metric)
            if column is not None:
                figures[:, at] = _means(column, gpu_job, count)
        figures[:, TRAFFIC], figures[:, POWER] = _means(sent, whole, count), _means(power, gpu_job, count)
        known = ~np.isnan(figures[:, TRAFFIC]) & (figures[:, POWER] > 0)
        judged = np.flatnonzero((nodes >= LEAST_NODES) & (inside == gpus) & known)
        if len(judged) > MAX_JOBS:
            judged = judged[np.argsort(-gpus[judged], kind="stable")[:MAX_JOBS]]
        return {bucket.job_names[j]: Work(int(nodes[j]), int(gpus[j]), figures[j]) for j in judged.tolist()}

    def _power(self, window: Window) -> Floats | None:
        """Return the mean power of each GPU in the newest bucket, float64 [G], from its energy where that is read."""
        energy, power = window.newest.gpu.get("energy_j"), window.newest.gpu.get("power_w")
        before, self.energy = self.energy, np.zeros(0) if energy is None else energy
        if energy is None or len(before) != len(energy):
            return power
        grown = (energy - before) / (window.newest.length_ms / 1000)
        exact = np.where(grown > 0, grown, np.nan)
        return exact if power is None else np.where(np.isnan(exact), power, exact)

    def _sent(self, window: Window) -> Floats | None:
        """Return bytes/s that the ports of each node sent in the newest bucket, float64 [N], NaN where not known."""
        now = window.newest.link.get("tx_bytes")
        if now is None:
            return None
        before, self.sent = self.sent, now
        if len(before) != len(now):
            self.port_node = np.array([port.node for port in window.index.ports.all()], np.int64)
            return None
        grown = now - before
        there = grown >= 0  # a restarted counter says nothing
        number = np.bincount(self.port_node, minlength=window.index.node_count)
        known = np.bincount(self.port_node[there], minlength=window.index.node_count)
        total = np.bincount(self.port_node[there], grown[there], window.index.node_count)
        return np.where((number > 0) & (known == number), total / (window.newest.length_ms / 1000), np.nan)

    @staticmethod
    def _whole_nodes(window: Window) -> Ints:
        """Return the job of each node whose GPUs one job alone holds, int64 [N]; -1 elsewhere.

        Nodes on which a loop or a server reports are left out: their jobs are judged by that.
        """
        bucket, index = window.newest, window.index
        jobs = bucket.jobs.astype(np.int64)
        first = index.first_gpu[:-1]
        empty = index.first_gpu[1:] == first
        high = np.full(index.node_count, -1, np.int64)
        low = high.copy()
        some = np.flatnonzero(~empty)
        if len(some):
            high[some] = np.maximum.reduceat(jobs, first[some])
            low[some] = np.minimum.reduceat(np.where(jobs < 0, len(bucket.job_names), jobs), first[some])
        whole = np.where((high >= 0) & (low == high), high, -1)
        whole[np.unique(bucket.work.node)] = -1
        return whole


def together(seen: Sequence[Work]) -> Floats | None:
    """Return the mean of what a job did in EVERY buckets, without pauses; None: too little of it is known."""
    if len(seen) < EVERY:
        return None
    figures = np.array([work.figures for work in seen])
    power = figures[:, POWER]
    works = power >= WORKS * power.max()
    found = means(figures[works])
    return found if works.sum() > EVERY / 2 and found[TRAFFIC] > 0 else None


def _means(values: Floats, code: Ints, count: int) -> Floats:
    """Return the mean of values that are known by code, float64 [count]; NaN where none is."""
    there = ~np.isnan(values) & (code >= 0)
    number = np.bincount(code[there], minlength=count)
    total = np.bincount(code[there], values[there], count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)

"""Test for small lasting changes with a CUSUM for each metric of each GPU, against its peers and its own offset.

x = log of a GPU's value over the median of its peers in the same bucket: changes of the whole job cancel out.
r = x - mean(x), where the mean is the GPU's own offset in this job (natural spread, its pipeline stage), learnt over
LEARN buckets and forgotten over FORGET; z = r / sigma in the direction of a fault, clipped at CLIP; sigma is the
largest of the GPU's own past deviation, its group's in this bucket, and the metric's resolution. Varying work (uneven
sequences) biases r for minutes: its own past deviation is multiplied by sqrt((1 + a) / (1 - a)), by which the mean of a
first-order process with autocorrelation a varies more than noise (Johnson and Bagshaw 1974).
S = max(0, S + z - K) shows a lasting change as soon as S > h (Page 1954). Siegmund's formula gives how often S passes h
by chance (Sequential Analysis, 1985): buckets between two false alarms = (exp(2Kb) - 2Kb - 1) / 2 / K^2, b = h + 1.166.
So h follows from a budget of false alarms per 1,000 GPU-days, for any size of fleet. Real deviations are neither normal
nor independent: the floors of sigma and the second sign that every cause needs (peers wait) are the margin.
docs/evidence/detection.md has the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import MAD_TO_SIGMA, Bools
from drover_collector.detectors.straggler.observation import LONE_SHARE, Observation, zeroed
from drover_collector.fleet.buckets import Floats

CHANNELS = ("clock", "duty", "dram", "late", "busy", "nvlink", "pause")
METRICS = (("sm_clock_mhz",), ("tensor_active_ratio", "sm_active_ratio"), ("dram_active_ratio",), ("gpu_util_ratio",))
SIGNS = np.array([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0])[:, None]  # the direction of a fault
# Resolution of each metric, in shares: clocks are in steps of 15 MHz, utilisation in whole percent.
FLOORS = np.array([0.006, 0.006, 0.008, 0.004, 0.010, 0.020, 0.004])[:, None]
CLOCK, DUTY, DRAM, LATE, BUSY_TIME, NVLINK, PAUSE = range(7)
OF_NODES = (LATE, PAUSE)  # means of a node

# False alarms of one metric alone, before the second sign. HBM traffic and busy time have a fifth of the others', as
# noise often shows their second signs too: the work did not get less, the peers are less active.
BUDGETS_PER_1000_GPU_DAYS = (0.25, 0.25, 0.05, 0.25, 0.05, 0.05, 0.05)
K = 1.0  # half of the smallest change to be found, in sigmas
# A late host rests by a hundredth or two, near the noise of a node's mean: half of K finds it in more buckets.
KS = np.array([K, K, K, K, K, K, K / 2])[:, None]
CLIP = 4.0  # makes a detection take at least three buckets
KEEP = 6.0  # over h: the number of quiet buckets until a detection ends
LEARN = 12  # buckets of a job until its offsets are known: 2 min at 10 s
YOUNG = 6.0  # doubt about a new offset, in buckets: sigma grows by sqrt(1 + YOUNG / count)
MOST_ALIKE = 0.95  # autocorrelation
PERCENT = 0.01  # step of sensors in whole percents
SOME = 256  # GPUs to check first for a finer sensor
ROUNDING = 0.6  # of that step: it may round the same way for hours
FORGET = 720  # buckets over which an offset is forgotten: 2 h at 10 s
NO_WORK = 0.01  # of the peers' value, and less
LEAST_WORK = 0.05  # tensor duty or HBM traffic of a group: a hanging one shows 0 to 2 %, where ratios are only rounding
LEAST_NVLINK = 2e8  # bytes per second of a group's median GPU: with less its NVLinks delay nobody
SMOOTH = 0.15  # of `recent`: about 6 buckets
SPIKE = 0.04  # most that one bucket may change it


def threshold(bucket_ms: int, budget: float = BUDGETS_PER_1000_GPU_DAYS[0], k: float = K) -> float:
    """Return h for a budget of false alarms per 1,000 GPU-days, by Siegmund's formula without its small terms."""
    apart = 1000 * 86_400_000 / bucket_ms / budget
    return math.log(2 * k * k * apart) / (2 * k) - 1.166


@dataclass(slots=True)
class Drifts:
    """State of the tests, float64 [channels, G]. Where no duty is read, it is that of memory (`Observation.traffic`).

    Attributes:
        mean, var, count: the learnt offset, its spread, and its number of buckets. score: S.
        last, alike: r of the last bucket, and the mean product of two in a row.
        work: mean duty over the buckets in which a channel's offset was learnt. A GPU with less work than at that time
            also moves less data and has more gaps (replicas of a service do not share their load).
        recent: x, smoothed. since_ms: when S last left 0, int64. h: the thresholds of the newest bucket.
        duty: x of the duty in the newest bucket, float64 [G].
        pace: rows of float64 [3, G]: log of each GPU's own busy time (of its SMs, else its memory) over the buckets in
            which it was learnt; by how much the median GPU of its group is below that lately, a log ratio from 0; the
            share of the last buckets in which it was the SMs', NaN: not known.
        usual, usual_work: mean and work of the last bucket in which the GPU was healthy, NaN while unknown; a lasting
            fault does not change them.
        late: number of buckets for which the test of LATE has been over its threshold, int64 [G].
    """

    mean: Floats
    var: Floats
    count: Floats
    score: Floats
    recent: Floats
    last: Floats
    alike: Floats
    work: Floats
    since_ms: npt.NDArray[np.int64]
    late: Ints
    duty: Floats
    pace: Floats
    usual: Floats
    usual_work: Floats
    h: tuple[float, ...] = (10.0,) * len(CHANNELS)

    @classmethod
    def of(cls, gpus: int) -> Drifts:
        shape = len(CHANNELS), gpus
        mean, var, count, score, recent, last, alike, work = np.zeros((8, *shape))
        usual, usual_work = np.full((2, *shape), np.nan)
        pace = np.concatenate([np.zeros((2, gpus)), np.full((1, gpus), np.nan)])
        return cls(
            mean, var, count, score, recent, last, alike, work, np.zeros(shape, np.int64), np.zeros(gpus, np.int64),
            np.zeros(gpus), pace, usual, usual_work,
        )  # fmt: skip

    def forget(self, which: Bools) -> None:
        """Forget what was learnt of GPUs that another job took."""
        for array in (self.mean, self.var, self.count, self.score, self.recent, self.last, self.alike, self.work):
            array[:, which] = 0.0
        self.usual[:, which] = self.usual_work[:, which] = np.nan
        self.late[which] = 0
        self.pace[:2, which], self.pace[2, which] = 0.0, np.nan

    def advance(self, now: Observation, slow: Bools) -> None:
        """Add one bucket. `slow`: GPUs with a large effect, whose offsets are not learnt."""
        x = _inputs(now)
        self._change_source(now, x)
        newest = now.window.newest
        self.h = tuple(
            threshold(newest.length_ms, budget, k)
            for budget, k in zip(BUDGETS_PER_1000_GPU_DAYS, KS[:, 0].tolist(), strict=True)
        )
        h = np.array(self.h)[:, None]
        known = ~np.isnan(x) & now.judged
        x = np.where(known, x, 0.0)
        self.duty = x[DUTY]
        rest = np.where(known, x - self.mean, np.nan)
        away, _ = now.grouping.medians(np.abs(rest))
        alike = np.clip(self.alike / np.maximum(self.var, 1e-12), 0.0, MOST_ALIKE)
        own = np.sqrt(self.var * (1 + alike) / (1 - alike))
        sigma = np.fmax(np.fmax(_floors(now), own), now.grouping.spread(away) * MAD_TO_SIGMA)
        sigma *= np.sqrt(1 + YOUNG / np.maximum(self.count, 1))
        rest = zeroed(rest)
        z = np.clip(SIGNS * rest / sigma, -CLIP, CLIP)
        tested = known & (self.count >= LEARN)
        before = self.score
        self.score = np.where(tested, np.clip(before + z - KS, 0.0, h + KEEP), before)
        self.since_ms[(before == 0) & (self.score > 0)] = newest.start_ms
        first = known & (self.count == 0)
        step = SMOOTH * np.clip(x - self.recent, -SPIKE, SPIKE)
        self.recent = np.where(first, x, np.where(known, self.recent + step, self.recent))
        calm = (self.score < h / 4) & ~slow
        calm[BUSY_TIME] &= calm[PAUSE]
        rate = np.where(known & calm, np.maximum(1 / (self.count + 1), 1 / FORGET), 0.0)
        self.mean = self.mean + rate * rest
        self.work = self.work + rate * np.where(known[DUTY], x[DUTY] - self.work, 0.0)
        self.var = self.var + rate * ((1 - rate) * rest * rest - self.var)
        self.alike = self.alike + rate * ((1 - rate) * rest * self.last - self.alike)
        self.last = np.where(known, rest, self.last)
        self._follow_pace(now, rate[BUSY_TIME])
        self.count = self.count + (rate > 0)
        self._relearn(now)
        self.late = np.where(self.passed(LATE), self.late + known[LATE], 0)

    @property
    def fell(self) -> Floats:
        """By how much the median GPU of each group is below its own SM activity lately, float64 [G], a log ratio."""
        return np.asarray(self.pace[1])

    def _change_source(self, now: Observation, x: Floats) -> None:
        """Forget the busy time of GPUs whose profiling metrics come or go for long: it is of the SMs, or of the memory.

        A bucket in which it is of the other one is unknown, in `x` too.
        """
        before = self.pace[2]
        after = np.where(np.isnan(before), now.has_duty, before + SMOOTH * (now.has_duty - before))
        self.pace[2] = np.where(now.judged, after, before)
        other = now.judged & (now.has_duty != (after > 0.5))
        x[BUSY_TIME, other] = x[PAUSE, other] = np.nan
        changed = now.judged & ~np.isnan(before) & ((before > 0.5) != (after > 0.5))
        if changed.any():
            for array in (self.mean, self.var, self.count, self.score, self.recent, self.last, self.alike, self.work):
                array[BUSY_TIME, changed] = array[PAUSE, changed] = 0.0
            self.pace[:2, changed] = 0.0

    def _follow_pace(self, now: Observation, rate: Floats) -> None:
        """Learn each GPU's busy time at `rate`, and by how much its group has fallen below: peers that wait do."""
        with np.errstate(invalid="ignore", divide="ignore"):
            active = np.log(np.maximum(now.busy, NO_WORK))
        level = self.pace[0]
        away = np.where(self.count[BUSY_TIME] >= LEARN, level - active, np.nan)
        fell = zeroed(now.grouping.spread(now.grouping.medians(away[None])[0][0]))
        self.pace[1] += SMOOTH * (np.clip(fell, -1.0, 1.0) - self.pace[1])
        suspect = np.any([self.score[of] > self.h[of] / 4 for of in (BUSY_TIME, NVLINK, PAUSE)], axis=0)
        suspects = np.flatnonzero(now.judged & suspect)
        waiting = np.isin(now.groups, now.groups[suspects])  # for one of them, perhaps: that is not their level
        learns = (rate > 0) & ~waiting
        self.pace[0] = np.where(learns, level + rate * (active - level), level)

    def remember(self, now: Observation, slow: Bools) -> None:
        """Keep the usual values of GPUs that are healthy in this bucket. `slow`: GPUs with a large effect."""
        well = now.judged & ~slow & (self.score == 0).all(axis=0) & (self.count >= LEARN)
        self.usual = np.where(well, self.mean, self.usual)
        self.usual_work = np.where(well, self.work, self.usual_work)

    def passed(self, channel: int, share: float = 1.0) -> Bools:
        """Return the GPUs whose test has passed `share` of its threshold, bool [G]."""
        return np.asarray(self.score[channel] > share * self.h[channel])

    def moved(self, channel: int) -> Floats:
        """Return how far each GPU is from its own offset lately, float64 [G], a log ratio."""
        return np.asarray(self.recent[channel] - self.mean[channel])

    def less_work(self, channel: int, newest: bool = False) -> Floats:
        """Return by how much each GPU's duty is below that while the channel's offset was learnt, float64 [G].

        It is a log ratio, of the smoothed or of the newest duty.
        """
        return np.asarray(self.work[channel] - (self.duty if newest else self.recent[DUTY]))

    def _relearn(self, now: Observation) -> None:
        """Learn offsets again where many GPUs of a group have changed at once: the work has changed."""
        for channel in range(len(CHANNELS)):
            high = self.passed(channel, 0.5) & now.judged
            if not high.any():
                continue
            gpus = np.flatnonzero(high)
            # A host is late for all its GPUs.
            most = 0.5 if channel in OF_NODES else np.maximum(LONE_SHARE, 2 / now.size[now.groups[gpus]])
            many = gpus[(now.share(gpus) > most) & ~now.one_node(gpus)]
            if not len(many):
                continue
            for array in (self.mean, self.var, self.count, self.score, self.last, self.alike, self.work):
                array[channel, many] = 0.0
            self.usual[channel, many] = self.usual_work[channel, many] = np.nan


def _inputs(now: Observation) -> Floats:
    """Return x of each channel, float64 [channels, G]; NaN where unknown."""
    # 0 is a value too, and must not become unknown by the logarithm.
    with np.errstate(invalid="ignore", divide="ignore"):
        clock, dram, tensor, sm, traffic = (
            np.log(np.maximum(values, NO_WORK))
            for values in (
                now.ratio("sm_clock_mhz"), now.ratio("dram_active_ratio"), now.tensor, now.sm, now.traffic
            )
        )  # fmt: skip
        dram[now.medians["dram_active_ratio"] < LEAST_WORK] = np.nan
    duty = np.where(np.isnan(tensor), sm, np.where(np.isnan(sm), tensor, (tensor + sm) / 2))
    duty = np.where(now.has_duty, duty, traffic)
    gap = now.medians["gpu_util_ratio"] - now.values["gpu_util_ratio"]
    busy = _busy(now, sm, tensor, dram, traffic)
    pause = of_node(now, busy)
    pause = pause - now.grouping.spread(now.grouping.medians(pause[None])[0][0])  # a late node moves the GPUs' median
    x = np.array([clock, duty, dram, of_node(now, gap), busy, _nvlink(now), pause])
    x[~np.isfinite(x)] = np.nan
    return x


def _busy(now: Observation, sm: Floats, tensor: Floats, dram: Floats, traffic: Floats) -> Floats:
    """Return the time for which SMs are active, over the peers', less what more work explains: a log ratio [G].

    Work is tensor duty, or HBM traffic in a job without any. GPUs with the same share of a job make the same products
    in each step, however long they take. HBM traffic says less: a slow kernel may read the same bytes twice. A GPU that
    spins in a collective does no work: unknown. Where no duty is read, the time in which memory was used stands for it.
    """
    used = np.where(now.medians["tensor_active_ratio"] >= LEAST_WORK, tensor, np.nan)
    waits = np.fmax(now.values["tensor_active_ratio"], now.values["dram_active_ratio"]) < NO_WORK
    of_memory = now.medians.get("memory_util_ratio", traffic)
    busy = np.where(now.has_duty, sm - np.where(np.isnan(used), dram, used), traffic)
    return np.asarray(np.where(waits | (~now.has_duty & ~(of_memory >= LEAST_WORK)), np.nan, busy))


def _nvlink(now: Observation) -> Floats:
    """Return what each GPU's NVLinks carry, over the peers': a log ratio [G]; NaN where its job hardly uses them."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = np.fmin(now.ratio("nvlink_tx_bytes_per_s"), now.ratio("nvlink_rx_bytes_per_s"))
        used = np.fmax(now.medians["nvlink_tx_bytes_per_s"], now.medians["nvlink_rx_bytes_per_s"])
        return np.asarray(np.where(used >= LEAST_NVLINK, np.log(np.maximum(rates, NO_WORK)), np.nan))


def _floors(now: Observation) -> Floats:
    """Return the resolution of each channel, float64 [channels, G]; coarser with sensors in whole percents."""
    floors = np.repeat(FLOORS, len(now.groups), axis=1)
    for channel in (DUTY, DRAM):
        for metric in METRICS[channel]:
            values = now.values[metric][now.judged]
            if _in_percents(values[:SOME]) and _in_percents(values):
                with np.errstate(invalid="ignore", divide="ignore"):
                    step = ROUNDING * PERCENT / np.maximum(now.medians[metric], PERCENT)
                floors[channel] = np.fmax(floors[channel], step)
    used = now.medians.get("memory_util_ratio")  # in whole percents on every board
    if used is not None:
        step = ROUNDING * PERCENT / np.maximum(used, PERCENT)
        for channel in (DUTY, BUSY_TIME):
            floors[channel] = np.where(now.has_duty, floors[channel], np.fmax(floors[channel], step))
    return floors


def _in_percents(values: Floats) -> bool:
    """Return True if all known values are whole percents."""
    with np.errstate(invalid="ignore"):
        off = np.abs(values / PERCENT - np.round(values / PERCENT))
    return not (off > 1e-4).any()  # a recording may have 32-bit values


def of_node(now: Observation, values: Floats) -> Floats:
    """Return the mean over the judged GPUs of each node, for each of its GPUs, float64 [G]."""
    node: Ints = now.window.index.gpu_node.astype(np.int64)
    use = now.judged & ~np.isnan(values)
    count = np.bincount(node[use], minlength=now.window.index.node_count)
    total = np.bincount(node[use], values[use], now.window.index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(use, (total / count)[node], np.nan))

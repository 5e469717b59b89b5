"""Stragglers: the GPU that a synchronous job waits for, and why it is slow.

In a synchronous job the slow GPU is the busy one: it computes while its peers wait in a collective, at full utilisation
but with less tensor work and power. So a straggler needs two signs at once, against peers of the same job and SKU in
the same bucket: something of it is slower (clock, memory, a link, its host), and the others wait for it. A heavier
share of the work shows the second sign only; natural spread of units the first one only, in small, and is learnt.

Each cause is judged by its own metrics, never by a pooled score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.robust import Bools, Grouping, grouped
from drover_collector.detectors._lib.steady import (
    Ints,
    JobAges,
    job_groups,
    working,
)
from drover_collector.detectors._lib.window import Window, onset_ms
from drover_collector.detectors.straggler.causes import (
    NODE_SHARE,
    PERSIST_UNEXPLAINED,
    large_effects,
    limits_of,
    small_effects,
)
from drover_collector.detectors.straggler.cusum import (
    CHANNELS,
    CLOCK,
    DRAM,
    DUTY,
    FORGET,
    LATE,
    Drifts,
    of_node,
)
from drover_collector.detectors.straggler.nics import Nics, slow_nics
from drover_collector.detectors.straggler.observation import Observation, UsualLimit
from drover_collector.detectors.straggler.texts import (
    CAUSES,
    Slow,
    finding,
    node_finding,
)
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import Finding, Incident

NAME = "straggler"
VERSION = 2
QUIET_MS = 180_000  # hysteresis: a cause that comes and goes within three minutes is one incident

SETTLE_BUCKETS = 3  # after a job took a GPU: it loads its data and compiles
PERSIST = 2  # buckets with a cause that the GPU itself reports
MISSED = 0.34  # what a bucket without it takes away: faults come and go, and two of four buckets are no chance either
MOST_STREAK = 3.0  # before that
LONG_BUCKET_MS = 60_000  # a bucket longer than this is a median over long enough by itself


@dataclass(slots=True)
class StragglerState:
    ages: JobAges = field(default_factory=JobAges)
    held: Grouping | None = None  # GPUs by job and board, of the last bucket
    judged: Grouping | None = None  # of these, those that were judged
    drifts: Drifts = field(default_factory=lambda: Drifts.of(0))
    streaks: dict[str, Floats] = field(default_factory=dict)  # cause -> buckets in a row, less MISSED for others, [G]
    free: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets since its power limit held it, [G]
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    nics: Nics = field(default_factory=Nics)
    limits: UsualLimit = field(default_factory=UsualLimit)
    left: Sequence[Incident] = ()  # open at the start


def restored(incidents: Sequence[Incident]) -> StragglerState:
    """State that still knows what was usual of those that a former run of the collector told of: learnt anew, their
    slowness would be it."""
    return StragglerState(
        left=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.node is not None]
    )


def _take_over(window: Window, s: StragglerState) -> None:
    index = window.index
    for incident in s.left:
        n = index.node_number.get(incident.node or "")
        gpus = [] if n is None else range(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
        usuals: Mapping[str, float] = incident.snapshot_of(NAME).get("usual", {})
        for name, value in usuals.items():
            channel = CHANNELS.index(name)
            mine = [g for g in gpus if incident.gpu in (None, int(index.gpu_slot[g])) or channel == LATE]
            mine = [g for g in mine if window.job_of(g) == incident.job]
            usual = value if channel == LATE else float(np.log(max(value, 1e-3)))
            if channel == DUTY:
                s.drifts.work[:, mine] = s.drifts.usual_work[:, mine] = usual
                if incident.cause == "host":  # of the whole node
                    continue
            s.drifts.mean[channel, mine] = s.drifts.usual[channel, mine] = usual
            s.drifts.count[channel, mine] = FORGET
    s.left = ()


def detect(window: Window, state: StragglerState | None, now_ms: int) -> tuple[list[Finding], StragglerState]:
    s = state if state is not None else StragglerState()
    count = window.index.gpu_count
    if s.drifts.score.shape[1] != count:
        s = StragglerState(drifts=Drifts.of(count), streaks={cause: np.zeros(count) for cause in CAUSES}, left=s.left)
        s.free = np.zeros(count, np.int64)
    if not window.fresh:
        return [], s
    s.ages.advance(window)
    another = s.ages.buckets == 0  # another job: what was seen in the last one is no beginning
    if another.any():
        s.drifts.forget(another)
        for streak in s.streaks.values():
            streak[another] = 0
    if s.left:
        _take_over(window, s)
    s.held = grouped(job_groups(window), s.held)
    settle = SETTLE_BUCKETS if window.newest.length_ms <= LONG_BUCKET_MS else 1
    judged = working(window, s.held) & (s.ages.buckets >= settle)
    s.judged = grouped(np.where(judged, s.held.groups, -1), s.judged)
    found = list(slow_nics(window, s.nics, now_ms))
    if not judged.any():
        return found, s
    look = Observation(window, s.judged)
    s.drifts.advance(look, _flagged(s, count))
    limits = limits_of(look, s.limits)
    s.free = np.where(limits.pressed, 0, s.free + 1)
    large, small = large_effects(look, limits, s.drifts, s.free), small_effects(look, limits, s.drifts, s.free)
    for cause, flags in large.items():
        # A bucket that could not be judged neither adds to a streak nor ends it.
        less = np.maximum(np.minimum(s.streaks[cause], MOST_STREAK) - MISSED, 0)
        s.streaks[cause] = np.where(flags, s.streaks[cause] + 1, np.where(judged, less, s.streaks[cause]))
    s.drifts.remember(look, _flagged(s, count))
    found += _findings(look, s, large, small, now_ms)
    return found, s


def _flagged(s: StragglerState, count: int) -> Bools:
    """GPUs on which a large effect was seen lately, bool [G]."""
    flagged = np.zeros(count, bool)
    for streak in s.streaks.values():
        flagged |= streak > 0
    return flagged


def could_not_judge(window: Window) -> list[str]:
    have, result = window.newest.gpu, []
    if not (window.newest.jobs >= 0).any():
        return ["any straggler: it is not known which job holds which GPU"]
    if "sm_clock_mhz" not in have:
        result.append("slow clocks: needs sm_clock_mhz")
    if "sm_active_ratio" not in have and "tensor_active_ratio" not in have:
        result.append("who waits for whom: needs sm_active_ratio or tensor_active_ratio; only reported causes are told")
    if "gpu_util_ratio" not in have:
        result.append("slow hosts and PCIe: needs gpu_util_ratio")
    if "rate_gbps" not in window.newest.link:
        result.append("slow NICs: needs rate_gbps of links")
    return result


_TESTED = {"thermal": CLOCK, "power_cap": CLOCK, "clock": CLOCK, "hbm": DRAM, "host": LATE}


def _findings(
    look: Observation, s: StragglerState, large: dict[str, Bools], small: dict[str, Bools], now_ms: int
) -> Iterator[Finding]:
    window, past = look.window, _Past(look)
    standing: set[tuple[str, int]] = set()
    for cause in CAUSES:
        need = PERSIST_UNEXPLAINED if cause in ("clock", "host") else PERSIST
        if window.newest.length_ms > LONG_BUCKET_MS:
            need = 1
        fast = (s.streaks[cause] >= need) & look.judged & large[cause]
        flagged: list[int] = np.flatnonzero(fast | small[cause] if cause in small else fast).tolist()
        nodes = window.index.gpu_node[flagged].tolist() if flagged else []
        for g in flagged:
            standing.add((cause, g))
            if fast[g] and (cause, g) not in s.since_ms:
                run = min(int(s.streaks[cause][g]), len(window.buckets))
                since_ms = past.onset_ms(cause, g, len(window.buckets) - run, s.drifts)
                s.since_ms[cause, g] = since_ms
            elif not fast[g]:
                since_ms = int(s.drifts.since_ms[_TESTED[cause], g]) or window.newest.start_ms
                s.since_ms.setdefault((cause, g), since_ms)
        for n in sorted(set(nodes)):
            gpus = [g for g, node in zip(flagged, nodes, strict=True) if node == n]
            if cause == "host" or len(gpus) > max(1, NODE_SHARE * window.index.nodes[n].gpus):
                yield node_finding(window, n, gpus, _slow(look, s, cause, gpus[0]), now_ms)
                continue
            for g in gpus:
                yield finding(window, g, _slow(look, s, cause, g), now_ms)
    for key in [key for key in s.since_ms if key not in standing and look.judged[key[1]]]:
        del s.since_ms[key]


class _Past:
    """The buckets before, looked at for those that are slow for the first time; columns are read once."""

    def __init__(self, look: Observation) -> None:
        self._look = look
        self._columns: dict[str, Floats] = {}
        self._medians: dict[tuple[str, int], Floats] = {}

    def onset_ms(self, cause: str, g: int, first: int, drifts: Drifts) -> int:
        """Return when a GPU began to be slow: bucket number `first` is the first that was judged so, and those before
        it, in which the job's power moved too much to judge, may show it as well."""
        for metric in CAUSES[cause][2]:
            ratios = self._ratios(metric, g) if metric in self._look.window.newest.gpu else np.zeros(0)
            if len(ratios) and ratios[-1] < 1:
                channel = {"sm_clock_mhz": CLOCK, "dram_active_ratio": DRAM}.get(metric)
                usual = np.nan if channel is None else drifts.usual[channel, g]
                return onset_ms(self._look.window, first, ratios, 1.0 if np.isnan(usual) else float(np.exp(usual)))
        return self._look.window.buckets[first].start_ms

    def _ratios(self, metric: str, g: int) -> Floats:
        """Of the median of its group in each bucket, float64 [T]."""
        if metric not in self._columns:
            self._columns[metric] = self._look.window.gpu(metric)
        column, group = self._columns[metric], int(self._look.groups[g])
        if (metric, group) not in self._medians:
            inside = column[:, self._look.grouping.of(group)]
            known = ~np.isnan(inside).all(axis=1)
            medians = np.full(len(column), np.nan)
            medians[known] = np.nanmedian(inside[known], axis=1)
            self._medians[metric, group] = medians
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(column[:, g] / self._medians[metric, group])


def _slow(look: Observation, s: StragglerState, cause: str, g: int) -> Slow:
    duty = look.tensor[g] if not np.isnan(look.tensor[g]) else look.sm[g]
    if cause in ("hbm", "nvlink"):
        duty = look.sm[g]
    util = "gpu_util_ratio"
    waiting = float(look.medians[util][g] - look.values[util][g] if cause in ("host", "pcie") else 1 - 1 / duty)
    return Slow(
        cause, s.since_ms[cause, g], look.grouping, int(look.size[look.groups[g]]),
        min(max(waiting, 0.0), 1.0) if waiting == waiting else 0.0,
        _usual(look, s.drifts, cause, g),
    )  # fmt: skip


def _usual(look: Observation, drifts: Drifts, cause: str, g: int) -> dict[str, float]:
    """What the sequential tests of a cause have learnt of a GPU, and how it worked then."""
    channel = _TESTED.get(cause)
    if channel is None or np.isnan(drifts.usual[channel, g]):
        return {}
    mean = float(drifts.usual[channel, g])
    usual = {CHANNELS[channel]: mean if channel == LATE else float(np.exp(mean))}
    work = drifts.usual[DUTY] if channel == CLOCK else drifts.usual_work[channel]
    work = of_node(look, work) if channel == LATE else work
    return usual | ({} if np.isnan(work[g]) else {CHANNELS[DUTY]: float(np.exp(work[g]))})


def _set_cap(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number < 4:
        return
    slow = 1.25
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        others = np.arange(len(gpu[metric])) != 13
        gpu[metric][others] /= slow
    gpu["power_w"] *= 0.9
    gpu["sm_clock_mhz"][13] /= slow
    gpu["power_limit_w"][13] = gpu["power_w"][13] = 450
    gpu["clock_event_reasons"][13] = 0x4


def _uneven(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    """A quarter of the ranks holds a heavier pipeline stage: busier, warmer, a little slower by design."""
    if number >= 4:
        gpu["tensor_active_ratio"][:16] *= 1.3
        gpu["sm_active_ratio"][:16] *= 1.2
        gpu["sm_clock_mhz"][:16] *= 0.93


EXAMPLES = (
    Example("a job whose first pipeline stage is heavier", lambda: play(small_fleet(), 9, _uneven), frozenset()),
    Example(
        "someone left a power cap on one GPU",
        lambda: play(small_fleet(), 9, _set_cap),
        frozenset({("straggler", "power_cap", "gpu", "warning")}),
    ),
)

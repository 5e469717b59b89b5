"""Detect stragglers: the GPU that a synchronous job waits for, and why it is slow.

In a synchronous job the slow GPU is the busy one: it computes while its peers wait in a collective, at full utilisation
but with less tensor work and power. So a straggler shows two signs at once, compared with peers of the same job and SKU
in the same bucket: a part of it is slower (clock, memory, a link, its host), and the others wait for it. A heavier
share of the work shows the second sign only. Natural spread of units shows the first only; it is small and is learnt.

Each cause is judged by its own metrics, never by a combined score.

Stages of a pipeline differ by design: the first has the embedding, the last the loss, and all wait for the longest.
Where the ranks say their places, a GPU is compared with those of its own stage, which do the same work; an interleaved
schedule changes nothing, as all GPUs of a stage have the same layers. A stage on few nodes is compared with the job as
without places, but what half of such a stage shows on several nodes is what the stage is, unless its GPUs report why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.metrics import (
    Codes,
    Ints,
    JobAges,
    job_groups,
    working,
)
from drover_collector.detectors._lib.parallel import Stages, by_stage
from drover_collector.detectors._lib.robust import Bools, Grouping, Groups, grouped
from drover_collector.detectors._lib.window import Window, onset_ms
from drover_collector.detectors.straggler.causes import (
    MIN_PEERS,
    NODE_SHARE,
    PERSIST_UNEXPLAINED,
    large_effects,
    limits_of,
    small_effects,
)
from drover_collector.detectors.straggler.cusum import (
    BUSY_TIME,
    CHANNELS,
    CLOCK,
    DRAM,
    DUTY,
    FORGET,
    LATE,
    LEARN,
    NVLINK,
    OF_NODES,
    PAUSE,
    Drifts,
    of_node,
)
from drover_collector.detectors.straggler.nics import Nics, slow_nics
from drover_collector.detectors.straggler.observation import LONE_OF_NODES, Observation, UsualLimit
from drover_collector.detectors.straggler.texts import (
    CAUSES,
    Slow,
    finding,
    node_finding,
)
from drover_collector.detectors.straggler.waits import Waits
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, Incident

NAME = "straggler"
VERSION = 2
QUIET_MS = 180_000  # hysteresis: a cause that returns within three minutes is one incident

SETTLE_BUCKETS = 3  # after a job took a GPU: it loads its data and compiles
PERSIST = 2  # buckets with a cause that the GPU itself reports
MISSED = 0.34  # subtracted from a streak for a bucket without the cause: faults can be intermittent
MOST_STREAK = 3.0  # before that
LONG_BUCKET_MS = 60_000  # one bucket longer than this is enough
OF_STAGES = ("clock", "hbm", "host", "unexplained")  # small effects that the work of a pipeline stage may show
STAGE_SHARE = 0.5  # of a stage's GPUs


@dataclass(slots=True)
class StragglerState:
    ages: JobAges = field(default_factory=JobAges)
    held: Grouping | None = None  # GPUs by job and board, in the last bucket
    judged: Grouping | None = None  # these GPUs, if they were judged
    drifts: Drifts = field(default_factory=lambda: Drifts.of(0))
    streaks: dict[str, Floats] = field(default_factory=dict)  # cause -> buckets in a row, less MISSED for others, [G]
    free: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets since its power limit held it, [G]
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    nics: Nics = field(default_factory=Nics)
    limits: UsualLimit = field(default_factory=UsualLimit)
    reopened: Sequence[Incident] = ()  # open when the collector started
    stages: Stages = field(default_factory=Stages)
    # The pipeline stage with which alone each GPU is compared, [G]; -1: with its whole job.
    split: Codes = field(default_factory=lambda: np.zeros(0, np.int32))
    waits: Waits = field(default_factory=Waits)


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> StragglerState:
    """Return state with the usual values of GPUs with open incidents: their slowness must not be learnt as usual."""
    return StragglerState(
        reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.node is not None]
    )


def _resume(window: Window, s: StragglerState) -> None:
    index = window.index
    for incident in s.reopened:
        n = index.node_number.get(incident.node or "")
        gpus = [] if n is None else range(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
        usuals: Mapping[str, float] = incident.snapshot_of(NAME).get("usual", {})
        for name, value in usuals.items():
            channel = CHANNELS.index(name)
            mine = [g for g in gpus if incident.gpu in (None, int(index.gpu_slot[g])) or channel in OF_NODES]
            mine = [g for g in mine if window.job_of(g) == incident.job]
            usual = value if channel == LATE else float(np.log(max(value, 1e-3)))
            if channel == DUTY:
                s.drifts.work[:, mine] = s.drifts.usual_work[:, mine] = usual
                if incident.cause == "host":  # about the whole node
                    continue
            s.drifts.mean[channel, mine] = s.drifts.usual[channel, mine] = usual
            s.drifts.count[channel, mine] = FORGET
            if channel == PAUSE:  # each GPU's part of it: nearly learnt, for the others have no pace yet
                s.drifts.mean[BUSY_TIME, mine], s.drifts.count[BUSY_TIME, mine] = usual, LEARN - 3
            s.waits.resume(channel, np.array(mine, np.int64), index.gpu_count)
    s.reopened = ()


def detect(window: Window, state: StragglerState | None, now_ms: int) -> tuple[list[Finding], StragglerState]:
    s = state if state is not None else StragglerState()
    count = window.index.gpu_count
    if s.drifts.score.shape[1] != count:
        s = StragglerState(
            drifts=Drifts.of(count), streaks={cause: np.zeros(count) for cause in CAUSES}, reopened=s.reopened
        )
        s.free = np.zeros(count, np.int64)
    if not window.fresh:
        return [], s
    s.ages.advance(window)
    groups, regrouped = _peers(window, s)
    another = (s.ages.buckets == 0) | regrouped  # another job or other peers: streaks of the last ones do not count
    if another.any():
        s.drifts.forget(another)
        for streak in s.streaks.values():
            streak[another] = 0
    if s.reopened:
        _resume(window, s)
    s.held = grouped(groups, s.held)
    settle = SETTLE_BUCKETS if window.newest.length_ms <= LONG_BUCKET_MS else 1
    judged = working(window, s.held) & (s.ages.buckets >= settle)
    s.judged = grouped(np.where(judged, s.held.groups, -1), s.judged)
    found = list(slow_nics(window, s.nics, now_ms))
    if not judged.any():
        return found, s
    now = Observation(window, s.judged)
    s.drifts.advance(now, _flagged(s, count))
    limits = limits_of(now, s.limits)
    s.free = np.where(limits.pressed, 0, s.free + 1)
    large, small = large_effects(now, limits, s.drifts, s.free), small_effects(now, limits, s.drifts, s.free)
    small["nvlink"] = s.waits.slow_nvlinks(now, s.drifts)
    small["host"] = small["host"] | s.waits.late_hosts(now, s.drifts)
    _leave_stages_out(now, s, large, small)
    for cause, flags in large.items():
        # A bucket that cannot be judged neither adds to a streak nor ends it.
        less = np.maximum(np.minimum(s.streaks[cause], MOST_STREAK) - MISSED, 0)
        s.streaks[cause] = np.where(flags, s.streaks[cause] + 1, np.where(judged, less, s.streaks[cause]))
    s.drifts.remember(now, _flagged(s, count))
    found += _findings(now, s, large, small, now_ms)
    return found, s


def _peers(window: Window, s: StragglerState) -> tuple[Groups, Bools]:
    """Return the group of each GPU, int64 [G], and the GPUs that have other peers than in the last bucket, bool [G]."""
    s.stages.update(window)
    groups = job_groups(window)
    found = by_stage(groups, s.stages.stage, window.index.gpu_node, MIN_PEERS, LONE_OF_NODES)
    split = np.where(found != groups, s.stages.stage, -1).astype(np.int32)
    before = s.split if len(s.split) == len(split) else np.full(len(split), -1, np.int32)
    s.split = split
    return found, split != before


def _leave_stages_out(now: Observation, s: StragglerState, large: dict[str, Bools], small: dict[str, Bools]) -> None:
    """Drop causes that no GPU reports where half of a pipeline stage shows them on several nodes, in place."""
    stage = np.where((s.split >= 0) | ~now.judged, -1, s.stages.stage)
    if not (stage >= 0).any():
        return
    jobs, nodes = now.window.newest.jobs, now.window.index.gpu_node
    for flags in (large["clock"], large["host"], *(small[cause] for cause in OF_STAGES)):
        for g in np.flatnonzero(flags & (stage >= 0)).tolist():
            if not flags[g]:
                continue
            mates = (stage == stage[g]) & (jobs == jobs[g])
            shows = mates & flags
            if np.count_nonzero(shows) >= STAGE_SHARE * np.count_nonzero(mates) and len(np.unique(nodes[shows])) > 1:
                flags[shows] = False


def _flagged(s: StragglerState, count: int) -> Bools:
    """Return the GPUs with a recent large effect, bool [G]."""
    flagged = np.zeros(count, bool)
    for streak in s.streaks.values():
        flagged |= streak > 0
    return flagged


def could_not_judge(window: Window) -> list[str]:
    have, result = window.newest.gpu, []
    if not (window.newest.jobs >= 0).any():
        return ["stragglers: no data on which job holds which GPU; jobs are guessed"]
    if "sm_clock_mhz" not in have:
        result.append("slow clocks: the data lacks sm_clock_mhz")
    if "sm_active_ratio" not in have and "tensor_active_ratio" not in have:
        result.append(
            "stragglers without a cause that the GPU reports: the data lacks sm_active_ratio and tensor_active_ratio"
        )
    if "gpu_util_ratio" not in have:
        result.append("slow hosts and PCIe: the data lacks gpu_util_ratio")
    if "rate_gbps" not in window.newest.link:
        result.append("slow NICs: the data lacks rate_gbps")
    return result


_TESTED = {
    "thermal": CLOCK, "power_cap": CLOCK, "clock": CLOCK, "hbm": DRAM, "host": LATE, "nvlink": NVLINK,
    "unexplained": BUSY_TIME,
}  # fmt: skip


def _channel(s: StragglerState, cause: str, g: int) -> int | None:
    """Return the channel that a cause was found by; None: it has none."""
    return PAUSE if cause == "host" and s.waits.host[g] else _TESTED.get(cause)


def _findings(
    now: Observation, s: StragglerState, large: dict[str, Bools], small: dict[str, Bools], now_ms: int
) -> Iterator[Finding]:
    window, past = now.window, _Past(now)
    standing: set[tuple[str, int]] = set()
    explained = np.zeros(len(now.judged), bool)
    for cause in CAUSES:
        need = PERSIST_UNEXPLAINED if cause in ("clock", "host") else PERSIST
        if window.newest.length_ms > LONG_BUCKET_MS:
            need = 1
        fast = (s.streaks[cause] >= need) & now.judged & large[cause]
        slow = fast | small[cause] if cause in small else fast
        if cause == "unexplained":
            slow &= ~explained
        explained |= slow
        flagged: list[int] = np.flatnonzero(slow).tolist()
        nodes = window.index.gpu_node[flagged].tolist() if flagged else []
        for g in flagged:
            standing.add((cause, g))
            if fast[g] and (cause, g) not in s.since_ms:
                run = min(int(s.streaks[cause][g]), len(window.buckets))
                since_ms = past.onset_ms(cause, g, len(window.buckets) - run, s.drifts)
                s.since_ms[cause, g] = since_ms
            elif not fast[g]:
                since_ms = int(s.drifts.since_ms[_channel(s, cause, g), g]) or window.newest.start_ms
                s.since_ms.setdefault((cause, g), since_ms)
        for n in sorted(set(nodes)):
            gpus = [g for g, node in zip(flagged, nodes, strict=True) if node == n]
            if cause == "host" or len(gpus) > max(1, NODE_SHARE * window.index.nodes[n].gpus):
                slow_node = replace(_slow(now, s, cause, gpus[0]), where=s.stages.words(gpus))
                yield node_finding(window, n, gpus, slow_node, now_ms)
                continue
            for g in gpus:
                yield finding(window, g, _slow(now, s, cause, g), now_ms)
    for key in [key for key in s.since_ms if key not in standing and now.judged[key[1]]]:
        del s.since_ms[key]


class _Past:
    """Earlier buckets of the window, to find onsets. Columns are read once."""

    def __init__(self, now: Observation) -> None:
        self._now = now
        self._columns: dict[str, Floats] = {}
        self._medians: dict[tuple[str, int], Floats] = {}

    def onset_ms(self, cause: str, g: int, first: int, drifts: Drifts) -> int:
        """Return when a GPU began to be slow.

        Bucket number `first` was the first judged slow; earlier ones, with too much change of the job's power to judge,
        may show it too.
        """
        for metric in CAUSES[cause][2]:
            ratios = self._ratios(metric, g) if metric in self._now.window.newest.gpu else np.zeros(0)
            if len(ratios) and ratios[-1] < 1:
                channel = {"sm_clock_mhz": CLOCK, "dram_active_ratio": DRAM}.get(metric)
                usual = np.nan if channel is None else drifts.usual[channel, g]
                return onset_ms(self._now.window, first, ratios, 1.0 if np.isnan(usual) else float(np.exp(usual)))
        return self._now.window.buckets[first].start_ms

    def _ratios(self, metric: str, g: int) -> Floats:
        """Return a GPU's value over the median of its group in each bucket, float64 [T]."""
        if metric not in self._columns:
            self._columns[metric] = self._now.window.gpu(metric)
        column, group = self._columns[metric], int(self._now.groups[g])
        if (metric, group) not in self._medians:
            inside = column[:, self._now.grouping.of(group)]
            known = ~np.isnan(inside).all(axis=1)
            medians = np.full(len(column), np.nan)
            medians[known] = np.nanmedian(inside[known], axis=1)
            self._medians[metric, group] = medians
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(column[:, g] / self._medians[metric, group])


def _slow(now: Observation, s: StragglerState, cause: str, g: int) -> Slow:
    duty = now.tensor[g] if not np.isnan(now.tensor[g]) else now.sm[g]
    if cause in ("hbm", "nvlink", "unexplained"):
        duty = now.sm[g]
    util = "gpu_util_ratio"
    gap = float(now.medians[util][g] - now.values[util][g])
    waiting = gap if cause in ("host", "pcie") else 1 - 1 / float(duty) if duty > 0 else 0.0
    jobs, size = now.window.newest.jobs, int(now.size[now.groups[g]])
    if s.split[g] >= 0:  # the whole pipeline waits
        size = int(np.count_nonzero(now.judged & (jobs == jobs[g])))
    if cause in ("host", "nvlink") and _channel(s, cause, g) in (PAUSE, NVLINK):
        waiting = max(waiting, 1 - float(np.exp(-s.drifts.fell[g])))
    return Slow(
        cause, s.since_ms[cause, g], now.grouping, size, min(max(waiting, 0.0), 1.0) if waiting == waiting else 0.0,
        _usual(now, s, cause, g), s.stages.words([g]), bool(s.split[g] >= 0),
    )  # fmt: skip


def _usual(now: Observation, s: StragglerState, cause: str, g: int) -> dict[str, float]:
    """Return the usual value that the test of a cause has learnt of a GPU, and its duty at that time."""
    channel, drifts = _channel(s, cause, g), s.drifts
    if channel is None or np.isnan(drifts.usual[channel, g]):
        return {}
    mean = float(drifts.usual[channel, g])
    usual = {CHANNELS[channel]: mean if channel == LATE else float(np.exp(mean))}
    work = drifts.usual[DUTY] if channel == CLOCK else drifts.usual_work[channel]
    work = of_node(now, work) if channel in OF_NODES else work
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
    """Give a quarter of the ranks a heavier pipeline stage: busier, warmer, a little slower by design."""
    if number >= 4:
        gpu["tensor_active_ratio"][:16] *= 1.3
        gpu["sm_active_ratio"][:16] *= 1.2
        gpu["sm_clock_mhz"][:16] *= 0.93


EXAMPLES = (
    Example("a job whose first pipeline stage is heavier", lambda: play(small_fleet(), 9, _uneven), frozenset()),
    Example(
        "a power cap was left on one GPU",
        lambda: play(small_fleet(), 9, _set_cap),
        frozenset({("straggler", "power_cap", "gpu", "warning")}),
    ),
)

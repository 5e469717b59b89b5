"""Detect jobs that became slower as a whole, by what their training loops report, and objectives that are not met.

A bad switch, a slow file system, a wrong image or a capped rack slows all GPUs of a job alike: no GPU stands out among
its peers. So a job is compared with its own past, and with earlier runs of the same name: the time for one operation,
else one token, else one step, for steps of the same shape on as many GPUs (`series`, `change`). What its GPUs and ports
show says what may be behind it (`telemetry`). Inference services are judged at like load (`services`). Of a job on
several nodes whose loop reports nothing, what its GPUs and ports do in a second is compared (`work_rate`).

Nothing here asks for an action: a slow job is no proof against any node. If a straggler, a hot rack or a bad port on
the job's nodes explains it, the incident book adds this to that incident.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np

from drover_collector.detectors._lib.texts import job_named
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown.change import LEARN, Change, Limits, Observation, means, medians
from drover_collector.detectors.slowdown.examples import EXAMPLES as EXAMPLES
from drover_collector.detectors.slowdown.series import Shape, Steps, steps_of
from drover_collector.detectors.slowdown.services import SPEED, Service, Services
from drover_collector.detectors.slowdown.telemetry import (
    PART,
    TENSOR,
    PortNodes,
    Reading,
    compute_fell,
    extras,
    reading,
    stretched,
)
from drover_collector.detectors.slowdown.work_rate import WARM_MS as RATE_WARM_MS
from drover_collector.detectors.slowdown.work_rate import Track as RateTrack
from drover_collector.detectors.slowdown.work_rate import WorkRates
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Evidence, Finding, Incident, IncidentKind, RecommendedAction, Severity
from drover_core.model.fleet import ObjectiveSpec
from drover_core.times import iso

NAME = "slowdown"
VERSION = 1
QUIET_MS = 180_000  # three minutes at the old pace, or without the job

WARM_MS = 180_000  # of a run: compilation, caches that fill
SETTLE_MS = 60_000  # after the shape of a step changed
GAP_MS = 120_000  # without a step, and GAP_STEPS of its steps: the run was interrupted
GAP_STEPS = 4.0
SHAPES = 8  # of one job that are kept
LATE_MS, LATE_STEPS = 60_000, 3.0  # a loop that has not reported for so long is not slow now
SAME_STEP = 0.7  # of a step after a report: what comes sooner, from another node, is the same step
# Another run may have other nodes, further apart, so that less is no slowdown: ours.
AFTER_RESTART = Limits(0.05, 0.05, 300_000, stretched)
USUAL = Limits(stretched=stretched)
MAX_TRACKS = 4_000
FORGET_MS = 86_400_000
SAME_WORK = 0.005  # log: tokens and operations of two runs of one model
ADOPT_MS = 1_800_000  # more work in a step is the new normal after so long
MORE_WORK = "more_work"
OF_PLACE = frozenset({"waits_alike", "waits_for_host", "slower"})
BEGIN_MS = 120_000  # after the first minutes of a run: what is slow by then was so from its begin


@dataclass(slots=True)
class Track:
    """One series: a loop of a job on so many GPUs.

    Attributes:
        steps: as they were seen last. shapes: those of its steps, with the test of each, the present one last.
        begun_ms: of this run. seen_ms: of the last report. counted_ms: of the last that counted.
        settled_ms: before this, steps do not count. since_restart: observations; None: there was no restart.
        why: what explains the change that is open. earlier: the past is that of an earlier run of this name.
    """

    steps: Steps
    begun_ms: int
    seen_ms: int
    counted_ms: int = 0
    settled_ms: int = 0
    since_restart: int | None = None
    shapes: list[tuple[Shape, Change]] = field(default_factory=list)
    why: Reading | None = None
    earlier: str = ""

    @property
    def change(self) -> Change:
        return self.shapes[-1][1]


@dataclass(slots=True)
class SlowdownState:
    """
    Attributes:
        tracks: by `Steps.key`. services: of inference. rates: of jobs whose loops report nothing.
        above_ms: (objective, whose) -> since when it is not met, and the last time it was looked at.
        reopened: incidents that were open when the collector started.
    """

    tracks: dict[tuple[str, str, int], Track] = field(default_factory=dict)
    services: Services = field(default_factory=Services)
    rates: WorkRates = field(default_factory=WorkRates)
    ports: PortNodes = field(default_factory=lambda: PortNodes(np.zeros(0, np.int64)))
    above_ms: dict[tuple[ObjectiveSpec, str], tuple[int, int]] = field(default_factory=dict)
    reopened: list[Incident] = field(default_factory=list)


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> SlowdownState:
    """Return state that knows how fast the jobs with open incidents were before."""
    return SlowdownState(reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def could_not_judge(window: Window) -> list[str]:
    """Return what this detector lacks, a sentence each."""
    if len(window.newest.work):
        return []
    lacks = ["slower jobs: no training loop or inference server reports its work (docs/how-to/workloads.md)"]
    if not {"energy_j", "power_w"} & set(window.newest.gpu) or "tx_bytes" not in window.newest.link:
        lacks.append("slower jobs whose loops report nothing: the data lacks power or what ports send")
    return lacks


def detect(window: Window, state: SlowdownState | None, now_ms: int) -> tuple[list[Finding], SlowdownState]:
    """Return a finding for each job and service that is slower than it was, or misses its objective."""
    s = state if state is not None else SlowdownState()
    if not window.fresh:
        return [], s
    work, ts_ms = window.newest.work, window.newest.end_ms
    _advance_rates(window, s)
    findings = [f for key, track in s.rates.tracks.items() if (f := _does_less(window, key, track, now_ms)) is not None]
    if not len(work) and not s.tracks and not s.services.named:
        return findings, s
    found = list(steps_of(window))
    for steps, extra in zip(found, extras(window, found, s.ports), strict=True):
        _advance(window, s, steps, extra)
    s.services.advance(work, ts_ms)
    if len(s.tracks) > MAX_TRACKS or ts_ms % 600_000 == 0:
        _forget(s, ts_ms)
    findings += [f for track in s.tracks.values() if (f := _slower(window, track, now_ms)) is not None]
    findings += [f for name, service in s.services.named.items() for f in _services(window, name, service, now_ms)]
    return [*findings, *_objectives(window, s, found, now_ms)], s


def _advance(window: Window, s: SlowdownState, steps: Steps, extra: Floats) -> None:
    """Add what one loop reported in the newest bucket."""
    track = advance(s, steps, extra, window.newest.end_ms)
    if track is not None:
        change = track.change
        now = np.array([one.extra for one in change.recent])
        why = reading(window, steps.gpus, change.past.usual_extra(), medians(now), change.effect)
        track.why = _of_run(why, track, change, WARM_MS)


def _advance_rates(window: Window, s: SlowdownState) -> None:
    """Add what jobs whose loops report nothing did in the newest bucket."""
    for _, gpus, track in s.rates.advance(window, s.reopened):
        change = track.change
        usual, now = change.past.usual_extra(means), means(np.array([one.extra for one in change.recent]))
        if compute_fell(usual, now) < PART * change.effect:
            now[TENSOR] = math.nan  # samples of long steps do not show it, which is no sign of more work
        why = reading(window, gpus, usual, now, change.effect)
        track.why = _of_run(why, track, change, RATE_WARM_MS)


def _of_run(why: Reading, track: Track | RateTrack, change: Change, warm_ms: int) -> Reading:
    """Return what explains a slower job; of a run that was slow from its begin its image, settings or nodes may be.

    Where ranks wait is no proof of a fault there: an image without a library's plugin makes them wait, too.
    """
    since_ms = change.open_since_ms
    early = since_ms is not None and since_ms - track.begun_ms <= warm_ms + SETTLE_MS + BEGIN_MS
    if track.since_restart is None or not early or why.cause not in OF_PLACE:
        return why
    return replace(why, cause="slow_from_start")


def advance(s: SlowdownState, steps: Steps, extra: Floats, ts_ms: int) -> Track | None:
    """Add what one loop reported in the bucket that ended at `ts_ms`; return its track if it is slower from now on."""
    track = s.tracks.get(steps.key)
    if track is None:
        track = s.tracks[steps.key] = Track(steps, ts_ms, ts_ms, settled_ms=ts_ms + WARM_MS)
    elif ts_ms - track.seen_ms > max(GAP_MS, GAP_STEPS * 1000 * steps.step_s):
        track.begun_ms, track.settled_ms = ts_ms, ts_ms + WARM_MS
        track.since_restart = 0
        for _, change in track.shapes:
            change.interrupt()
    track.steps, track.seen_ms = steps, ts_ms
    if not track.shapes or not track.shapes[-1][0].matches(steps.shape):
        _change_shape(s, track, ts_ms)
    if ts_ms < track.settled_ms or ts_ms - track.counted_ms < SAME_STEP * 1000 * steps.step_s:
        return None
    track.counted_ms = ts_ms
    change = track.change
    was_open = change.open_since_ms is not None
    change.add(Observation(ts_ms, steps.cost, extra), USUAL if track.since_restart is None else AFTER_RESTART)
    if change.open_since_ms is None:
        track.why = None
        if track.since_restart is not None and not change.pending:
            track.since_restart += 1
            track.since_restart = None if track.since_restart >= LEARN else track.since_restart
    elif not was_open:
        return track
    elif _is_other_work(track) and ts_ms - change.open_since_ms >= ADOPT_MS:
        change.adopt()
        track.why = None
    return None


def _is_other_work(track: Track) -> bool:
    """Return whether a step does more, not the same more slowly. After a restart it may be another image."""
    return track.why is not None and track.why.cause == MORE_WORK and track.since_restart is None


def _change_shape(s: SlowdownState, track: Track, ts_ms: int) -> None:
    """Go on with the past of steps of this shape, if there is one."""
    shape = track.steps.shape
    for _, change in track.shapes[-1:]:
        change.interrupt()
    at = next((n for n, (known, _) in enumerate(track.shapes) if known.matches(shape)), None)
    if at is not None:
        track.shapes.append(track.shapes.pop(at))
    else:
        change = Change()
        track.shapes = [*track.shapes, (shape, change)][-SHAPES:]
        if _resume(s, track, change):
            return
        _seed(s, track, change, ts_ms)
    track.settled_ms = max(track.settled_ms, ts_ms + SETTLE_MS)


def _resume(s: SlowdownState, track: Track, change: Change) -> bool:
    """Go on with a change that was open before the collector was started again."""
    for incident in s.reopened:
        held = incident.snapshot_of(NAME)
        mine = held.get("series") == list(track.steps.key)
        if incident.job == track.steps.label and mine and track.steps.shape.matches(_shape_of(held)):
            s.reopened.remove(incident)
            change.resume(float(held["usual"]), float(held["sigma"]), int(held["since"]), float(held["effect"]))
            track.why = Reading(incident.cause, str(held.get("why", "")), ())
            track.begun_ms, track.settled_ms = incident.since_ms, 0
            return True
    return False


def _shape_of(held: object) -> Shape:
    values = held if isinstance(held, dict) else {}
    numbers = [values.get(key) for key in ("tokens", "flops")]
    return Shape(*(math.nan if number is None else float(number) for number in numbers))


def _seed(s: SlowdownState, track: Track, change: Change, ts_ms: int) -> None:
    """Take over the past of the newest run of this name and shape that has ended, if its operations are known."""
    steps = track.steps
    if not steps.shape.flops > 0:
        return
    best: tuple[int, Track, Change] | None = None
    for other in s.tracks.values():
        if other is track or other.steps.name != steps.name or len(other.steps.gpus) != len(steps.gpus):
            continue
        if ts_ms - other.seen_ms < GAP_MS or (best is not None and other.seen_ms <= best[0]):
            continue
        for shape, past in other.shapes:
            if past.known and shape.matches(steps.shape, SAME_WORK):
                best = other.seen_ms, other, past
    if best is not None:
        change.seed(best[2].past)
        track.since_restart, track.earlier = 0, best[1].steps.label


def _forget(s: SlowdownState, ts_ms: int) -> None:
    kept = sorted(s.tracks.items(), key=lambda entry: (-entry[1].seen_ms, entry[0]))[:MAX_TRACKS]
    s.tracks = {key: track for key, track in kept if ts_ms - track.seen_ms <= FORGET_MS}
    s.above_ms = {key: (since, seen) for key, (since, seen) in s.above_ms.items() if ts_ms - seen <= FORGET_MS}


def _slower(window: Window, track: Track, now_ms: int) -> Finding | None:
    """Return the finding of a job that is slower now."""
    change, steps = track.change, track.steps
    since_ms = change.open_since_ms
    late_ms = max(LATE_MS, LATE_STEPS * 1000 * steps.step_s)
    if since_ms is None or window.newest.end_ms - track.seen_ms > late_ms or not change.recent:
        return None
    now = float(np.median([one.cost for one in change.recent]))
    share = math.exp(now - change.usual) - 1
    before_s = steps.step_s / math.exp(steps.cost - change.usual)
    why = track.why or Reading("slower", "", ())
    job = job_named(steps.label)
    than = f", than job {track.earlier} was" if track.earlier and track.since_restart is not None else ""
    return Finding(
        detector=NAME,
        kind=IncidentKind.SLOWDOWN,
        cause=why.cause,
        scope="job",
        node=None,
        gpu=None,
        members=_members(window, steps),
        ts_ms=now_ms,
        since_ms=min(since_ms - window.newest.length_ms, now_ms),
        severity=Severity.INFO if _is_other_work(track) else Severity.WARNING,
        confidence=0.7 if steps.shape.flops > 0 or steps.shape.tokens > 0 else 0.6,
        action=RecommendedAction.NONE,  # a slow job is no proof against any node
        summary=f"{job[0].upper()}{job[1:]} is {share:.0%} slower since {_clock(since_ms)}{than}:"
        f" a step takes {seconds(before_s * (1 + share))}, before {seconds(before_s)}.",
        advice=ADVICE[why.cause],
        evidence=(
            Evidence(
                f"{_of_what(steps)} takes {share:.1%} longer than usual, in the median over {len(steps.nodes)} nodes.",
                "step_time_s", before_s * (1 + share), before_s, change.sigma * before_s, key="slowdown",
            ),
            *((Evidence(why.text, key="slowdown why"),) if why.text else ()),
            *why.facts,
        ),
        job=steps.label,
        lost_gpus=len(steps.gpus) * (1 - math.exp(change.usual - now)),
        snapshot={
            "series": list(steps.key), "usual": change.usual, "sigma": change.sigma, "effect": change.effect,
            "since": since_ms, "why": why.text, "tokens": _known(steps.shape.tokens),
            "flops": _known(steps.shape.flops),
        },
    )  # fmt: skip


def _does_less(window: Window, key: tuple[str, int], track: RateTrack, now_ms: int) -> Finding | None:
    """Return the finding of a job whose loop reports nothing and that does less in a second than before."""
    change, (name, gpus) = track.change, key
    since_ms = change.open_since_ms
    if since_ms is None or window.newest.end_ms - track.seen_ms > LATE_MS or not change.recent:
        return None
    if name not in window.newest.job_names:  # it has ended
        return None
    share = math.exp(float(np.median([one.cost for one in change.recent])) - change.usual) - 1
    why = track.why or Reading("slower", "", ())
    mine = np.flatnonzero(window.newest.jobs == window.newest.job_names.index(name))
    nodes = np.unique(window.index.gpu_node[mine]).tolist()
    job = job_named(name)
    less = share / (1 + share)
    return Finding(
        NAME, IncidentKind.SLOWDOWN, why.cause, "job", None, None,
        tuple((window.index.nodes[n].name, None) for n in nodes), now_ms,
        min(since_ms - window.newest.length_ms, now_ms), Severity.WARNING if track.shown else Severity.INFO, 0.5,
        RecommendedAction.NONE,
        f"{job[0].upper()}{job[1:]} is probably {share:.0%} slower since {_clock(since_ms)}: its ports send"
        f" {less:.0%} less in a second, and its GPUs do less, too.",
        ADVICE[why.cause],
        (
            Evidence(
                f"The ports of its nodes send {less:.1%} less than in its past, and its GPUs draw less power: the same"
                " work in more time. No training loop of the job reports its steps.", key="slowdown rate",
            ),
            *((Evidence(why.text, key="slowdown why"),) if why.text else ()),
            *why.facts,
        ),
        name,
        lost_gpus=gpus * less,
        snapshot={
            "work_rate": [name, gpus], "usual": change.usual, "sigma": change.sigma, "effect": change.effect,
            "since": since_ms, "why": why.text,
        },
    )  # fmt: skip


ADVICE = {
    "rack_capped": "Look at the rack's power budget and the power limits of its nodes (drover explain has the values).",
    "clocks": "Look for what changed for the whole job: a power cap, the room's temperature, application clocks.",
    "waits_for_host": "Look at the file system, the data loaders and the CPUs of the job's nodes.",
    "waits_alike": "Look at the switches between the job's nodes, and at what else uses them.",
    MORE_WORK: "Ask its owner whether sequences or batches became longer, or whether the image changed.",
    "slow_from_start": "Compare the run's image, settings and nodes with those of the run before.",
    "slower": "Compare what changed at that time: image, file system, switches, other jobs on the same leaf.",
    "tokens_slower": "Look at the server's GPUs and its newest configuration.",
    "ttft_slower": "Look at the lengths of the prompts, then at the server's GPUs.",
    "step_time_objective": "Ask whether the job is slower than it was, or the objective too tight.",
    "ttft_objective": "Look at the queue: more replicas help against load, not against a slow server.",
}


def _members(window: Window, steps: Steps) -> tuple[tuple[str, None], ...]:
    nodes = np.unique(window.index.gpu_node[steps.gpus]) if len(steps.gpus) else np.array(steps.nodes, np.int64)
    return tuple((window.index.nodes[n].name, None) for n in nodes.tolist())


def _of_what(steps: Steps) -> str:
    if steps.shape.flops > 0:
        return "An operation of the model"
    return "A token" if steps.shape.tokens > 0 else "A step"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _clock(ts_ms: int) -> str:
    return f"{iso(ts_ms)[11:16]} UTC"


def seconds(value: float) -> str:
    """Return `2.14 s` or `840 ms`."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _services(window: Window, name: str, service: Service, now_ms: int) -> Iterator[Finding]:
    """Yield the findings of a service that is slower at like load."""
    for cause, change in service.changes.items():
        since_ms = change.open_since_ms
        if since_ms is None or window.newest.end_ms - service.seen_ms > LATE_MS or not change.recent:
            continue
        share = math.exp(float(np.median([one.cost for one in change.recent])) - change.usual) - 1
        before, now = service.before.get(cause, math.nan), service.now.get(cause, math.nan)
        if cause == SPEED:
            text = f"makes tokens {share / (1 + share):.0%} slower since {_clock(since_ms)} at like load"
            fact = Evidence(
                f"A running request gets {1 / now:.3g} tokens/s, before {1 / before:.3g} with as many requests.",
                "tokens_per_s", 1 / now, 1 / before, key=cause,
            )  # fmt: skip
        else:
            text = f"takes {share:.0%} longer to the first token since {_clock(since_ms)} at like load"
            fact = Evidence(
                f"The time to the first token is {seconds(now)}, before {seconds(before)} with as many requests.",
                "ttft_p50_s", now, before, key=cause,
            )  # fmt: skip
        yield _of_service(window, name, service, _Said(cause, f"Service {name} {text}.", fact, since_ms), now_ms)


@dataclass(frozen=True, slots=True)
class _Said:
    """What is found of a service."""

    cause: str
    summary: str
    fact: Evidence
    since_ms: int


def _of_service(window: Window, name: str, service: Service, said: _Said, now_ms: int) -> Finding:
    info = said.cause == "ttft_slower"  # longer prompts look the same
    return Finding(
        NAME, IncidentKind.SLOWDOWN, said.cause, "job", None, None,
        tuple((window.index.nodes[n].name, None) for n in service.nodes), now_ms, min(said.since_ms, now_ms),
        Severity.INFO if info else Severity.WARNING, 0.6, RecommendedAction.NONE, said.summary, ADVICE[said.cause],
        (said.fact,), name,
    )  # fmt: skip


def _objectives(window: Window, s: SlowdownState, found: Sequence[Steps], now_ms: int) -> Iterator[Finding]:
    """Yield a finding for each objective of the fleet file that has not been met for its minutes."""
    for objective in window.index.spec.objectives:
        if objective.job:
            for steps in found:
                if fnmatchcase(steps.label, objective.job) or fnmatchcase(steps.name, objective.job):
                    yield from _job_objective(window, s, objective, steps, now_ms)
            continue
        column = window.newest.work.values.get(objective.metric)
        for name, service in s.services.named.items() if column is not None else ():
            if not fnmatchcase(name, objective.service) or service.seen_ms != window.newest.end_ms:
                continue
            rows = [row for row, each in enumerate(window.newest.work.name) if each == name]
            held = [float(v) for v in column[rows] if not math.isnan(v)] if column is not None else []
            if held and (since_ms := _above(window, s, objective, name, float(np.median(held)))) is not None:
                value = float(np.median(held))
                summary = (
                    f"Service {name} misses its objective since {_clock(since_ms)}: the time to the first token is"
                    f" {seconds(value)} (95th percentile), the objective {seconds(objective.limit)}."
                )
                fact = Evidence(
                    f"Above the objective for {(now_ms - since_ms) / 60_000:.0f} minutes, in the median over"
                    f" {len(held)} servers.", objective.metric, value, objective.limit, key="ttft_objective",
                )  # fmt: skip
                yield _of_service(window, name, service, _Said("ttft_objective", summary, fact, since_ms), now_ms)


def _job_objective(
    window: Window, s: SlowdownState, objective: ObjectiveSpec, steps: Steps, now_ms: int
) -> Iterator[Finding]:
    since_ms = _above(window, s, objective, "/".join(map(str, steps.key)), steps.step_s)
    if since_ms is None:
        return
    job = job_named(steps.label)
    yield Finding(
        NAME, IncidentKind.SLOWDOWN, "step_time_objective", "job", None, None, _members(window, steps), now_ms,
        min(since_ms, now_ms), Severity.WARNING, 0.9, RecommendedAction.NONE,
        f"{job[0].upper()}{job[1:]} misses its objective since {_clock(since_ms)}: a step takes"
        f" {seconds(steps.step_s)}, the objective is {seconds(objective.limit)}.",
        ADVICE["step_time_objective"],
        (
            Evidence(
                f"Above the objective for {(now_ms - since_ms) / 60_000:.0f} minutes.", "step_time_s", steps.step_s,
                objective.limit, key="step_time_objective",
            ),
        ),
        steps.label,
    )  # fmt: skip


def _above(window: Window, s: SlowdownState, objective: ObjectiveSpec, whose: str, value: float) -> int | None:
    """Return since when a value is above its objective, if that is longer than its minutes."""
    key, ts_ms = (objective, whose), window.newest.end_ms
    if value <= objective.limit:
        s.above_ms.pop(key, None)
        return None
    since_ms, seen_ms = s.above_ms.get(key, (0, 0))
    if not seen_ms or ts_ms - seen_ms > GAP_MS:
        since_ms = window.newest.start_ms  # what was between is not known
    s.above_ms[key] = since_ms, ts_ms
    return since_ms if ts_ms - since_ms >= objective.minutes * 60_000 else None

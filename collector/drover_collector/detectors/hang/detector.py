"""Detect hung jobs, whose GPUs all seem busy while none works, and the GPU that the others wait for.

When a rank of a synchronous job stops, the others wait for it in a collective, a kernel that spins. Utilisation stays
at 100 %, while tensor work, memory traffic and links fall to 0 and power to a fraction of its former level. In a job
that waits for data no kernel runs, and one that saves a checkpoint has traffic.

Every level is compared with the job's own past, so that no kind of job or board needs its own limit.

Ranks that leave flight recorder dumps name the one that stopped themselves (`ranks`), also where telemetry shows no
hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.metrics import Codes, Ints, column
from drover_collector.detectors._lib.robust import Bools, Grouping
from drover_collector.detectors._lib.texts import duration, listing, place
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.hang.rank_finding import rank_finding
from drover_collector.detectors.hang.ranks import RankReports, is_report, job_goes_on
from drover_collector.detectors.hang.stops import (
    CHANNELS,
    FEW_SHARE,
    LEARN_BUCKETS,
    LEARN_RATE,
    LEVELS,
    RESTING,
    RESTS,
    SPINS,
    WAITING_POWER,
    WAITING_POWER_ALONE,
    Stops,
    is_pcie,
    still_share,
)
from drover_collector.fleet.buckets import BUCKET_MS, GUESSED, Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    Member,
    RecommendedAction,
    Severity,
)

NAME = "hang"
VERSION = 1
QUIET_MS = 60_000  # a job that works again or has ended

SPINNING_SHARE = 0.5  # of the job's GPUs at least
# Barriers around an evaluation or a save seldom last longer than a minute; NCCL's watchdog ends a job after ten.
REPORT_MS = 90_000
REPORT_ALONE_MS = 180_000  # where power is the only metric
REPORT_STOP_MS = 300_000  # where the GPUs' stop is all that shows the job: it may be a save of one rank
WAITING_POWER_MOST = 0.95  # of the job's own, where a rank rests: a T4 spins at 93 % of its power
GUESSED_MS = 900_000  # where nobody names the job, and no rank stands out: longer than NCCL's watchdog waits
CRITICAL_MS = 600_000
FORGET_MS = 600_000  # after a job has left all its GPUs
REPORTING_SHARE = 0.9  # of a job's GPUs that must report: the others may be working


@dataclass(slots=True)
class Job:
    """Levels and state of one job."""

    level: dict[str, float] = field(default_factory=dict)  # median over its GPUs while it works
    worked: int = 0  # buckets
    still_ms: int | None = None  # start of its standstill
    seen_ms: int = 0
    named: tuple[list[int], str] | None = None  # the GPUs first reported as the culprits, and what they did
    by_its_stop: bool = False  # nobody names this job: its GPUs stopped together
    gpus: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # numbers of its GPUs, as last seen
    reported: Finding | None = None  # by telemetry, of the newest bucket

    @property
    def channels(self) -> list[str]:
        """Metrics in which this job has shown work."""
        return [metric for metric in CHANNELS if self.shows(metric)]

    def shows(self, channel: str) -> bool:
        return self.level.get(channel, 0.0) >= CHANNELS[channel]

    def learn(self, medians: Mapping[str, float]) -> None:
        self.worked += 1
        rate = max(LEARN_RATE, 1.0 / self.worked)
        for metric, value in medians.items():
            if value == value:  # not NaN
                self.level[metric] = self.level.get(metric, value) * (1 - rate) + rate * value


@dataclass(slots=True)
class HangState:
    jobs: dict[str, Job] = field(default_factory=dict)
    reopened: list[Incident] = field(default_factory=list)  # open when the collector started
    stops: Stops = field(default_factory=Stops)
    active_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # end of each GPU's last bucket with work
    worked_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # the same, without those of unknown work
    seen_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # end of each GPU's last bucket with a row
    ranks: RankReports = field(default_factory=RankReports)
    members: list[Ints] = field(default_factory=list)  # numbers of the GPUs of each job of `running`
    held: Codes = field(default_factory=lambda: np.zeros(0, np.int32))  # the job of each GPU in the last bucket, [G]
    running: Codes = field(default_factory=lambda: np.zeros(0, np.int32))  # these jobs, in the order of their groups
    grouping: Grouping | None = None


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> HangState:
    """Return state that knows how the jobs with open incidents worked before they hung."""
    return HangState(
        reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.job is not None]
    )


def _resume(index: FleetIndex, s: HangState) -> None:
    for incident in s.reopened:
        level = {e.metric: e.expected for e in incident.evidence if e.metric in LEVELS and e.expected is not None}
        n = None if incident.node is None else index.node_number.get(incident.node)
        gpus: list[int] = [] if n is None else list(range(int(index.first_gpu[n]), int(index.first_gpu[n + 1])))
        gpus = [g for g in gpus if incident.gpu in (None, int(index.gpu_slot[g]))]
        why = str(incident.snapshot_of(NAME).get("why", "stopped")) if gpus else ""
        s.jobs[incident.job or ""] = Job(level, LEARN_BUCKETS, incident.since_ms, 0, (gpus, why))
    s.reopened = []


def detect(window: Window, state: HangState | None, now_ms: int) -> tuple[list[Finding], HangState]:
    s = state if state is not None else HangState()
    if len(s.active_ms) != window.index.gpu_count:
        s.active_ms, s.worked_ms, s.seen_ms = np.zeros((3, window.index.gpu_count), np.int64)
    if not window.fresh:
        return list(_of_ranks(window, s, now_ms)) if any(map(is_report, window.events)) else [], s
    _resume(window.index, s)
    bucket = window.newest
    held, all_names, stops = s.stops.jobs(window)
    for name, (level, since_ms) in stops.items():
        s.jobs.setdefault(name, Job(level, LEARN_BUCKETS, since_ms, by_its_stop=True))
    if s.grouping is None or not np.array_equal(held, s.held):
        s.running = np.unique(held[held >= 0])  # a recorded case names all jobs of its days
        groups = np.where(held >= 0, np.searchsorted(s.running, held), -1).astype(np.int64)
        s.grouping, s.held = Grouping(groups), held
        s.members = _members(groups, len(s.running))
    names = [all_names[number] for number in s.running.tolist()]
    jobs = [s.jobs.setdefault(name, Job()) for name in names]
    for job, gpus in zip(jobs, s.members, strict=True):
        job.gpus = gpus
    activity = JobActivity(window, names, jobs, s.grouping)
    s.active_ms[activity.active | ~activity.known] = bucket.end_ms
    s.worked_ms[activity.active] = bucket.end_ms
    s.seen_ms[bucket.gpu_rows > 0] = bucket.end_ms
    _advance(window, s, jobs, activity)
    for name in [name for name, job in s.jobs.items() if bucket.end_ms - job.seen_ms > FORGET_MS]:
        del s.jobs[name]
    found = list(_findings(window, activity, s, now_ms))
    for finding in found:
        s.jobs[finding.job or ""].reported = finding
    named = {finding.job: finding for finding in _of_ranks(window, s, now_ms)}
    return [*(finding for finding in found if finding.job not in named), *named.values()], s


def _advance(window: Window, s: HangState, jobs: Sequence[Job], activity: JobActivity) -> None:
    """Note which jobs stand still, and learn how the others work."""
    bucket = window.newest
    levels = np.array([activity.medians[metric] for metric in LEVELS]).T.tolist()
    for number, job in enumerate(jobs):
        job.seen_ms, job.reported = bucket.end_ms, None
        if not activity.enough(number):
            continue
        if job.worked >= LEARN_BUCKETS and activity.stands_still(number, s.active_ms):
            if job.still_ms is None:  # a long bucket shows what held for most of it, not for how long
                job.still_ms = max(bucket.start_ms, bucket.end_ms - BUCKET_MS)
            continue
        job.still_ms = job.named = None
        if activity.util[number] >= RESTS:
            job.learn(dict(zip(LEVELS, levels[number], strict=True)))


def _members(groups: npt.NDArray[np.int64], count: int) -> list[Ints]:
    """Return the numbers of each job's GPUs, int64. `groups`: job of each GPU, -1: none."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(count + 1))
    return [order[low:high] for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def _of_ranks(window: Window, s: HangState, now_ms: int) -> Iterator[Finding]:
    """Yield the hangs whose ranks name what stopped them."""
    s.ranks.take(window, {name: job.gpus for name, job in s.jobs.items() if len(job.gpus)}, now_ms)
    newest_ms = window.newest.end_ms if window.buckets else 0
    for name, found in s.ranks.judge(window.index, now_ms):
        job = s.jobs.get(name)
        base = job.reported if job is not None else None
        if base is not None and found.sent_ms < base.since_ms:
            s.ranks.jobs[name].began_hang = False
            continue  # of an earlier hang
        if job is not None and base is None and job_goes_on(found, job.gpus, s.worked_ms):
            s.ranks.jobs[name].named, s.ranks.jobs[name].began_hang = None, False
            continue
        over = job is None or job.seen_ms < newest_ms
        if over and now_ms - found.sent_ms > QUIET_MS:
            continue
        ranks = s.ranks.jobs[name]
        ranks.began_hang = base is None or ranks.began_hang
        yield rank_finding(window, name, ranks, found, base, now_ms)


def could_not_judge(window: Window) -> list[str]:
    have, result = window.newest.gpu, []
    if not (window.newest.jobs >= 0).any():
        result.append("hung jobs: no data on which job holds which GPU; jobs are guessed")
    elif "gpu_util_ratio" not in have:
        result.append("hung jobs: the data lacks gpu_util_ratio")
    elif not any(metric in have for metric in LEVELS):
        result.append("hung jobs: the data lacks power_w, " + ", ".join(CHANNELS) + "; one of them is needed")
    return result


class JobActivity:
    """What the GPUs of each job do in the newest bucket.

    Attributes:
        names: of the J jobs, in the order of all arrays [J].
        active: bool [G], the GPU shows work. known: bool [G], its work can be judged.
        sizes, reporting: number of each job's GPUs, and of those that report, int [J].
        util: median utilisation of each job, float64 [J], NaN where unknown.
        medians: metric -> float64 [J] over each job's GPUs.
    """

    def __init__(self, window: Window, names: Sequence[str], jobs: Sequence[Job], grouping: Grouping) -> None:
        self._window, self.names, self._jobs = window, names, jobs
        self.groups = grouping.groups
        self.held: Bools = self.groups >= 0
        self.gpu_util = column(window, "gpu_util_ratio")
        self.sizes = self._number(self.held)
        self.silent: Bools = window.newest.gpu_rows == 0
        self.reporting = self._number(~np.isnan(self.gpu_util))
        self._spinning = self._number(self.gpu_util >= SPINS)
        values = {metric: column(window, metric) for metric in LEVELS}
        self.util, *medians = grouping.medians(np.array([self.gpu_util, *values.values()]))[0]
        self.medians = dict(zip(values, medians, strict=True))
        self.active, self.known = np.zeros(len(self.groups), bool), np.zeros(len(self.groups), bool)
        levels = np.full((len(CHANNELS), len(jobs) + 1), np.nan)  # last column: GPUs without a job
        for number, job in enumerate(jobs):
            levels[:, number] = [job.level[metric] if job.shows(metric) else np.nan for metric in CHANNELS]
        alone = np.ones(len(self.groups), bool)
        for metric, level in zip(CHANNELS, levels[:, self.groups], strict=True):  # PCIe comes last
            limits = level * still_share(metric, alone)
            self.active |= values[metric] > limits
            known = ~np.isnan(values[metric] + limits)
            self.known |= known
            alone &= ~known | is_pcie(metric)
        self._working = self._number(self.active)

    def enough(self, number: int) -> bool:
        """Return True if enough of a job's GPUs report to judge it."""
        return bool(self.reporting[number] >= max(2, REPORTING_SHARE * self.sizes[number]))

    def _number(self, flags: Bools) -> npt.NDArray[np.intp]:
        return np.bincount(self.groups[flags & self.held], minlength=len(self._jobs))

    def highest(self, metric: str, number: int) -> float:
        """Return the highest value of a job's GPUs, NaN if none is known."""
        return float(np.fmax.reduce(column(self._window, metric)[self.groups == number], initial=np.nan))

    def stands_still(self, number: int, active_ms: Ints) -> bool:
        """Return True if no GPU of a job works, most of them still run a kernel, and power has fallen.

        `active_ms`: end of each GPU's last bucket with work, int64 [G].
        """
        if self._working[number] or self._spinning[number] < SPINNING_SHARE * self.sizes[number]:
            return False
        job = self._jobs[number]
        power, usual = self.medians["power_w"][number], job.level.get("power_w", np.nan)
        if np.isnan(power) or np.isnan(usual):
            return bool(job.channels)
        rests = self._one_rests(number, active_ms)
        most = WAITING_POWER if job.channels or rests else WAITING_POWER_ALONE
        if job.channels and rests:
            most = WAITING_POWER_MOST
        return bool(power <= most * usual)

    def _one_rests(self, number: int, active_ms: Ints) -> bool:
        """Return True if few GPUs of a job run nothing since it stands still, while all others spin.

        A GPU that the job holds and never used has not stopped it.
        """
        bucket, since_ms = self._window.newest, self._jobs[number].still_ms
        from_ms = (bucket.start_ms if since_ms is None else since_ms) - 2 * max(BUCKET_MS, bucket.length_ms)
        mine = (self.groups == number) & (active_ms >= from_ms)
        resting = int(np.count_nonzero(self.gpu_util[mine] <= RESTING))
        few = max(1, int(FEW_SHARE * self.sizes[number]))
        return bool(0 < resting <= few and self._spinning[number] >= self.sizes[number] - few)


def _report_ms(job: Job) -> int:
    return REPORT_STOP_MS if job.by_its_stop else REPORT_MS if job.channels else REPORT_ALONE_MS


def _findings(window: Window, activity: JobActivity, s: HangState, now_ms: int) -> Iterator[Finding]:
    bucket = window.newest
    for number, name in enumerate(activity.names):
        job = s.jobs.get(name)
        if job is None or job.still_ms is None or job.seen_ms != bucket.end_ms:
            continue
        if not activity.enough(number) and (job.named is None or not activity.reporting[number]):
            continue  # a reported hang stays until it ends, but none begins while too few GPUs report
        if bucket.end_ms - job.still_ms < _report_ms(job):
            continue
        found = _finding(window, activity, s, number, job, now_ms)
        if name.startswith(GUESSED) and bucket.end_ms - job.still_ms < GUESSED_MS and found.cause == "standstill":
            job.named = None
            continue  # ranks of several jobs may wait at the same time: a rank that stands out shows the job
        yield found


def _finding(window: Window, activity: JobActivity, s: HangState, number: int, job: Job, now_ms: int) -> Finding:
    assert job.still_ms is not None
    end_ms, index, name = window.newest.end_ms, window.index, activity.names[number]
    since = job.still_ms
    members = np.flatnonzero(activity.groups == number)
    guessed = name.startswith(GUESSED)
    job.named = job.named or _culprits(activity, s, members, since + 2 * window.newest.length_ms, guessed)
    culprits, why = job.named
    nodes = {int(index.gpu_node[g]) for g in culprits}
    node = index.nodes[next(iter(nodes))].name if len(nodes) == 1 else None
    gpu = int(index.gpu_slot[culprits[0]]) if len(culprits) == 1 else None
    named: tuple[Member, ...] = ((node, gpu),) if node is not None else tuple(
        (index.nodes[int(index.gpu_node[g])].name, int(index.gpu_slot[g])) for g in members
    )  # fmt: skip
    waiting = len(members) - len(culprits)
    subject = "A job that nobody names" if guessed else f"Job {name}"
    text = f"{subject} has made no progress for {duration(end_ms - since)}: {waiting} of its GPUs wait"
    if node is not None:
        text += f" for {place(node, gpu)}, which {why}."
    elif culprits:
        text += f" for {len(culprits)} GPUs on {listing({index.nodes[n].name for n in nodes})}; each {why}."
    else:
        text += ", and no GPU stands out as the one that stopped."
    advice = (
        "Dump the stack of that rank's process (py-spy, the framework's flight recorder) before you end the job. Then"
        " test the GPU; replace it if it stops another job."
        if node is not None
        else "Dump the stacks of all ranks (py-spy, the framework's flight recorder) before you end the job."
    )
    return Finding(
        NAME, IncidentKind.HANG, "rank_stopped" if node is not None else "standstill",
        "job" if node is None else "node" if gpu is None else "gpu", node, gpu, named, now_ms, since,
        Severity.CRITICAL if end_ms - since >= CRITICAL_MS else Severity.WARNING,
        0.85 if node is not None else 0.7,
        RecommendedAction.PROBE if node is not None else RecommendedAction.WATCH, text, advice,
        _evidence(activity, number, job, end_ms), name, lost_gpus=float(len(culprits)), waiting_gpus=float(waiting),
        snapshot={"why": why} if why else {},
    )  # fmt: skip


def _culprits(
    activity: JobActivity, s: HangState, members: npt.NDArray[np.intp], until_ms: int, guessed: bool
) -> tuple[list[int], str]:
    """Return the few GPUs that differ from the others, and what they do; no GPUs if none stands out.

    Args:
        until_ms: a GPU that has reported since is not silent: one that loses a row now has not stopped the job.
        guessed: nobody names the job: a GPU that is silent may be another job's.
    """
    few = max(1, int(FEW_SHARE * len(members)))
    util, stopped_ms = activity.gpu_util[members], s.active_ms[members]
    gone = activity.silent[members] & (s.seen_ms[members] <= until_ms) & (not guessed)
    resting, silent = members[util < RESTS], members[gone]
    for gpus, what in ((resting, "runs no kernel"), (silent, "does not report")):
        if len(gpus):
            return (gpus.tolist(), what) if len(gpus) <= few else ([], "")
    first = members[stopped_ms < stopped_ms.max()]
    if 0 < len(first) <= few:
        return first.tolist(), f"stopped {duration(float(stopped_ms.max() - s.active_ms[first].max()))} before them"
    return [], ""


def _evidence(activity: JobActivity, number: int, job: Job, to_ms: int) -> tuple[Evidence, ...]:
    util = float(activity.util[number])
    facts = [
        Evidence(f"utilisation of its GPUs: {util:.0%}", "gpu_util_ratio", util, from_ms=job.still_ms, to_ms=to_ms)
    ]
    power, usual = float(activity.medians["power_w"][number]), job.level.get("power_w")
    if usual is not None and not np.isnan(power):
        text = f"power: {power:.0f} W; {usual:.0f} W while the job worked"
        facts.append(Evidence(text, "power_w", power, usual, from_ms=job.still_ms, to_ms=to_ms))
    for metric in job.channels:
        most = activity.highest(metric, number)
        if not np.isnan(most):
            share = most / job.level[metric]
            text = (
                f"{BY_NAME[metric].label}: at most {share:.1%} of its level while the job worked, on any GPU of the job"
            )
            facts.append(Evidence(text, metric, most, job.level[metric], from_ms=job.still_ms, to_ms=to_ms))
    return tuple(facts)


def _stop(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number >= 5:
        gpu["tensor_active_ratio"][:], gpu["dram_active_ratio"][:] = 0.0, 0.01
        gpu["power_w"][:] = 210.0
        gpu["gpu_util_ratio"][:] = 1.0
        gpu["gpu_util_ratio"][21] = 0.0
        gpu["power_w"][21] = 110.0


def _starve(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    """Stop the loader: no kernel runs on any GPU."""
    if number >= 5:
        for metric in ("tensor_active_ratio", "dram_active_ratio", "gpu_util_ratio"):
            gpu[metric][:] = 0.0
        gpu["power_w"][:] = 110.0


EXAMPLES = (
    Example("a job without data: its GPUs are idle, not hung", lambda: play(small_fleet(), 18, _starve), frozenset()),
    Example(
        "one rank stops, and the others spin in a collective",
        lambda: play(small_fleet(), 18, _stop),
        frozenset({("hang", "rank_stopped", "gpu", "warning")}),
    ),
)

"""Claims: how much time incidents take from which GPUs, and when a job restarts after one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.facts import PPM, Activity, Claim, Claims, Facts, LedgerIncident, Share
from drover_collector.ledger.partition import Layers
from drover_collector.ledger.spans import GpuSpans, Ints
from drover_core.model.events import IncidentKind, Severity

Span = tuple[int, int]

# A scheduler gives a dead node's job up within minutes; NCCL's watchdog ends a job after ten (its default timeout).
DEATH_MS = 600_000
DEATH_EARLY_MS = 30_000  # holds are read more often than some sources of faults
# Schedulers and launchers append a number to the name of a job that they start again: `job-2001r1`.
RESTARTED = re.compile(
    r"(.+?)(?:[-_.](?:r|retry|restart|attempt|try)?|r|retry|restart|attempt|try)[-_.]?[0-9]+", re.IGNORECASE
)
RESTART_MS = 1_800_000  # what has not worked by then is idle: the limit of the detector `idle`
NO_FAULT = frozenset({IncidentKind.IDLE, IncidentKind.RISK, IncidentKind.DRIFT})
# What keeps telemetry away. The job may be healthy, so this alone says nothing of its work.
BLIND = frozenset(
    {
        "silent", "never_came", "late", "no_telemetry", "agent_stopped", "maintenance", "pages_silent",
        "pages_silent_common", "pages_without_gpus", "gpu_page_silent", "gpu_page_silent_common",
    }
)  # fmt: skip
MEASURED = frozenset({IncidentKind.HANG, IncidentKind.STRAGGLER, IncidentKind.THERMAL})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job on its GPUs, from the first hold to the last. `ended`: False: it still runs.

    Attributes:
        job: its number; gpus: int64 [K].
        incident: number of the incident that ended it; -1: none is known.
    """

    job: int
    from_ms: int
    to_ms: int
    ended: bool
    gpus: Ints
    incident: int = -1


@dataclass(frozen=True, slots=True)
class Restart:
    """A job begins again after a fault. `former`: the attempt that the fault ended; None: it went on in its place."""

    attempt: Attempt
    incident: int
    begin_ms: int
    former: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Repeated:
    """The work that one attempt repeats after a fault. `spans`: when; None: the last checkpoint is not known."""

    attempt: Attempt
    incident: int
    spans: Sequence[Span] | None


def open_spans(incident: LedgerIncident, until_ms: int) -> list[Span]:
    return [(low, until_ms if high is None else high) for low, high in incident.spans if high is None or high > low]


def is_fault(incident: LedgerIncident) -> bool:
    return incident.severity != Severity.INFO and incident.kind not in NO_FAULT


class JobHistory:
    """Who held what, by job. Built once for all claims."""

    def __init__(self, index: FleetIndex, facts: Facts) -> None:
        self._index, self._facts = index, facts
        self._holds = facts.holds.by_time()
        working = facts.activity.where(facts.activity.value == Activity.WORKING).by_time()
        self._working = working
        self._members: dict[str, Ints] = {}
        self._first = np.searchsorted(working.gpu, np.arange(index.gpu_count + 1))
        self.attempts = self._attempts()

    def members(self, incident: LedgerIncident) -> Ints:
        """Return the GPUs that an incident names; of a node all of them."""
        known = self._members.get(incident.id)
        if known is not None:
            return known
        found: list[int] = []
        for node, slot in incident.members:
            if slot is not None:
                gpu = self._index.gpu(node, slot)
                found += [] if gpu is None else [gpu]
            elif (n := self._index.node_number.get(node)) is not None:
                found += range(int(self._index.first_gpu[n]), int(self._index.first_gpu[n + 1]))
        self._members[incident.id] = np.unique(np.array(found, np.int64))
        return self._members[incident.id]

    def works_from(self, gpus: Ints, from_ms: int, to_ms: int) -> int | None:
        """Return when the first of some GPUs is seen at work within [from_ms, to_ms); None: none is."""
        found: list[int] = []
        for gpu in gpus.tolist():
            low, high = int(self._first[gpu]), int(self._first[gpu + 1])
            at = low + int(np.searchsorted(self._working.to_ms[low:high], from_ms, side="right"))
            if at < high and self._working.from_ms[at] < to_ms:
                found.append(max(from_ms, int(self._working.from_ms[at])))
        return min(found, default=None)

    def _attempts(self) -> list[Attempt]:
        """Return the attempts of all jobs by job and time: holds of one job without a pause between them."""
        held = self._holds.where(np.lexsort((self._holds.from_ms, self._holds.value)))
        if not len(held):
            return []
        # Jobs lie behind each other on one line, so the furthest end so far is that of the job's own holds.
        low = int(held.from_ms.min())
        line = held.value * (int(held.to_ms.max()) - low + 1)
        furthest = np.maximum.accumulate(line + held.to_ms - low)
        begins = np.append(
            True, (held.value[1:] != held.value[:-1]) | ((line + held.from_ms - low)[1:] > furthest[:-1])
        )
        first = np.flatnonzero(begins)
        ends = np.append(first[1:], len(held)).tolist()
        found = []
        for begin, end in zip(first.tolist(), ends, strict=True):
            last_ms = int(furthest[end - 1] - line[begin]) + low
            gpus = np.array(sorted(set(held.gpu[begin:end].tolist())), np.int64)
            found.append(
                Attempt(int(held.value[begin]), int(held.from_ms[begin]), last_ms, last_ms < self._facts.until_ms, gpus)
            )
        return found


def find_ends(facts: Facts, history: JobHistory) -> list[Attempt]:
    """Return the attempts with the fault that ended each, if one did.

    Ended by a fault: it names the job or a GPU of it, and the job ended within minutes of its begin. Of several the
    critical one counts, then the one that began last.
    """
    by_gpu: dict[int, list[int]] = defaultdict(list)
    by_job: dict[str, list[int]] = defaultdict(list)
    for number, incident in enumerate(facts.incidents):
        if not is_fault(incident) or incident.severity != Severity.CRITICAL:
            continue
        for gpu in history.members(incident).tolist():
            by_gpu[gpu].append(number)
        if incident.job:
            by_job[incident.job].append(number)
    hit = np.zeros(max([-1, *by_gpu, *(int(each.gpus[-1]) for each in history.attempts)]) + 1, np.bool_)
    hit[list(by_gpu)] = True
    found = []
    for attempt in history.attempts:
        killer = -1
        if attempt.ended and (by_gpu or by_job):
            near = {n for gpu in attempt.gpus[hit[attempt.gpus]].tolist() for n in by_gpu[gpu]}
            near |= set(by_job.get(facts.jobs[attempt.job], ()))
            fits = [
                (facts.incidents[n].since_ms, n)
                for n in near
                if facts.incidents[n].since_ms > attempt.from_ms and _explains_end(facts.incidents[n], attempt.to_ms)
            ]
            killer = max(fits, default=(0, -1))[1]
        found.append(replace(attempt, incident=killer))
    return found


def _explains_end(incident: LedgerIncident, end_ms: int) -> bool:
    soon = -DEATH_EARLY_MS <= end_ms - incident.since_ms <= DEATH_MS
    hung = incident.kind == IncidentKind.HANG and incident.since_ms < end_ms <= (incident.closed_ms or end_ms)
    return soon or hung


def stepping(facts: Facts) -> dict[int, list[Span]]:
    """Return the times in which each job reported steps, those that touch as one."""
    found: dict[int, list[Span]] = defaultdict(list)
    for job, low, high in sorted(facts.steps):
        if found[job] and low <= found[job][-1][1]:
            found[job][-1] = found[job][-1][0], max(found[job][-1][1], high)
        else:
            found[job].append((low, high))
    return found


class _Layer:
    """Claims of one layer while they are collected. `key`: what orders them."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[int, ...], Claim, Ints, Span]] = []

    def add(self, key: tuple[int, ...], claim: Claim, gpus: Ints, span: Span) -> None:
        if len(gpus) and claim.ppm > 0 and span[0] < span[1]:
            self._rows.append((key, claim, gpus, span))

    def made(self) -> Claims:
        rows = sorted(self._rows, key=lambda row: row[0])
        parts = [
            GpuSpans(gpus, *(np.full(len(gpus), number, np.int64) for number in (*span, at)))
            for at, (_, _, gpus, span) in enumerate(rows)
        ]
        return Claims([claim for _, claim, _, _ in rows], GpuSpans.join(parts))


def make_layers(
    facts: Facts, history: JobHistory, attempts: Sequence[Attempt], repeats: Sequence[Repeated] = ()
) -> Layers:
    """Return all claims, by precedence. `repeats`: of `find_repeated`."""
    ended, restarting, repeated = _Layer(), _Layer(), _Layer()
    for attempt in attempts:
        if attempt.incident >= 0:
            _claim_end(ended, facts.incidents[attempt.incident], attempt, history)
    for restart in restarts(facts, attempts):
        attempt, begin_ms, incident = restart.attempt, restart.begin_ms, restart.incident
        end_ms = min(attempt.to_ms, begin_ms + RESTART_MS)
        works = works_after(facts, history, attempt, begin_ms)
        span = begin_ms, end_ms if works is None else min(end_ms, works)
        restarting.add((begin_ms, incident), Claim(Share.RESTARTING, PPM, begin_ms, incident), attempt.gpus, span)
    by_job: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_job[attempt.job].append(attempt)
    for again in repeats:
        for low, high in again.spans or ():
            repeated.add(
                (low, again.attempt.job),
                Claim(Share.REPEATED, PPM, low, again.incident),
                again.attempt.gpus,
                (low, high),
            )
    measured, stops = _of_incidents(facts, history, by_job)
    return Layers(
        repeated.made(), ended.made(), measured.made(), stops.made(), restarting.made(), _stalls(facts, by_job)
    )


def _claim_end(layer: _Layer, incident: LedgerIncident, attempt: Attempt, history: JobHistory) -> None:
    number, low = attempt.incident, max(incident.since_ms, attempt.from_ms)
    named = np.isin(attempt.gpus, history.members(incident))
    if incident.kind == IncidentKind.HANG and named.all():
        named[:] = False  # no GPU stands out as the one that stopped: all waited
    for gpus, share in ((attempt.gpus[named], Share.LOST), (attempt.gpus[~named], Share.WAITING)):
        layer.add((incident.since_ms, number, int(share)), Claim(share, PPM, low, number), gpus, (low, attempt.to_ms))


def restarts(facts: Facts, attempts: Sequence[Attempt]) -> list[Restart]:
    """Return the restarts after faults: attempts that follow one that a fault ended, and the end of each hang."""
    found: list[Restart] = []
    last: dict[str, Attempt] = {}
    for attempt in sorted(attempts, key=lambda each: (each.from_ms, each.job)):
        name = facts.jobs[attempt.job]
        former = last.get(name) or _former(name, last)
        if former is not None and former.incident >= 0 and attempt.from_ms >= former.to_ms - DEATH_EARLY_MS:
            found.append(Restart(attempt, former.incident, attempt.from_ms, former))
        last[name] = attempt
        whole = RESTARTED.fullmatch(name)
        if whole and whole[1] in last and attempt.from_ms >= last[whole[1]].to_ms - DEATH_EARLY_MS:
            last[whole[1]] = attempt  # the next number goes on with this one
    by_name: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_name[facts.jobs[attempt.job]].append(attempt)
    for number, incident in enumerate(facts.incidents):
        if is_fault(incident) and incident.kind == IncidentKind.HANG and incident.job:
            for _, high in open_spans(incident, facts.until_ms):
                for attempt in by_name.get(incident.job, ()):
                    if attempt.from_ms < high < attempt.to_ms:
                        found.append(Restart(attempt, number, high))
    return found


def _former(name: str, last: Mapping[str, Attempt]) -> Attempt | None:
    """Return the last attempt of the job that one of this name goes on with; None: it is no restart."""
    whole = RESTARTED.fullmatch(name)
    return last.get(whole[1]) if whole else None


def works_after(facts: Facts, history: JobHistory, attempt: Attempt, begin_ms: int) -> int | None:
    steps = [max(low, begin_ms) for job, low, high in facts.steps if job == attempt.job and high > begin_ms]
    later = [at for at in steps if at < attempt.to_ms]
    return min(later) if later else history.works_from(attempt.gpus, begin_ms, attempt.to_ms)


def _of_incidents(facts: Facts, history: JobHistory, by_job: Mapping[int, Sequence[Attempt]]) -> tuple[_Layer, _Layer]:
    """Return claims of what detectors counted: lost on what an incident names, waiting on the job's other GPUs."""
    measured, stops = _Layer(), _Layer()
    number_of = {name: number for number, name in enumerate(facts.jobs)}
    for number, incident in enumerate(facts.incidents):
        counted = sum(
            max(0, min(incident.counted_ms, high) - low) for low, high in open_spans(incident, facts.until_ms)
        )
        if not is_fault(incident) or incident.cause in BLIND or counted <= 0:
            continue
        of_job = by_job.get(number_of.get(incident.job or "", -1), ())
        if incident.kind == IncidentKind.SLOWDOWN:
            for span in open_spans(incident, facts.until_ms):
                _claim_slowdown(measured, (incident, number, counted), of_job, span)
            continue
        layer = measured if incident.kind in MEASURED else stops
        named = history.members(incident)
        for low, high in open_spans(incident, facts.until_ms):
            anchor = incident.since_ms
            claim = Claim(Share.LOST, part_ppm(incident.lost_ms, len(named) * counted), anchor, number)
            layer.add((-claim.ppm, anchor, number, 0), claim, named, (low, high))
            for attempt in of_job:
                span = max(low, attempt.from_ms), min(high, attempt.to_ms)
                others = attempt.gpus[~np.isin(attempt.gpus, named)]
                others = others if len(others) else attempt.gpus
                claim = Claim(Share.WAITING, part_ppm(incident.waited_ms, len(others) * counted), anchor, number)
                measured.add((-claim.ppm, anchor, number, 1), claim, others, span)
    return measured, stops


def _claim_slowdown(
    layer: _Layer, slow: tuple[LedgerIncident, int, int], of_job: Sequence[Attempt], span: Span
) -> None:
    """Claim of a job's work the part by which it was slower than before, on all of its GPUs and no other job's.

    Args:
        slow: the incident, its number, and for how long its hours are counted, in ms.
    """
    incident, number, counted = slow
    for attempt in of_job:
        ppm = part_ppm(incident.lost_ms, len(attempt.gpus) * counted)
        claim = Claim(Share.LOST, ppm, incident.since_ms, number, working=True)
        layer.add(
            (-ppm, incident.since_ms, number, 0), claim, attempt.gpus,
            (max(span[0], attempt.from_ms), min(span[1], attempt.to_ms)),
        )  # fmt: skip


def part_ppm(part_ms: int | None, whole_ms: int) -> int:
    return 0 if not part_ms or whole_ms <= 0 else min(PPM, max(0, part_ms) * PPM // whole_ms)


def _stalls(facts: Facts, by_job: Mapping[int, Sequence[Attempt]]) -> GpuSpans:
    """Return, for GPUs of jobs that report steps, the time of an attempt without a report of a step."""
    stepped, parts = stepping(facts), []
    for job, attempts in by_job.items():
        for attempt in attempts if job in stepped else ():
            steps = [(low, high) for low, high in stepped[job] if high > attempt.from_ms and low < attempt.to_ms]
            if not steps:
                continue
            edges = [attempt.from_ms, *(at for step in steps for at in step), attempt.to_ms]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                if high > low:
                    row = (np.full(len(attempt.gpus), number, np.int64) for number in (low, high, 0))
                    parts.append(GpuSpans(attempt.gpus, *row))
    return GpuSpans.join(parts)

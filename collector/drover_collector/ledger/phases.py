"""The time line of a job: its runs, the time in which it reported steps, slow phases, faults, restarts, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.claims import (
    RESTART_MS,
    JobHistory,
    find_ends,
    is_fault,
    open_spans,
    restarts,
    stepping,
    works_after,
)
from drover_collector.ledger.facts import Facts, LedgerIncident
from drover_collector.ledger.spans import NONE
from drover_core.model.events import IncidentKind

SLOW = frozenset({IncidentKind.STRAGGLER, IncidentKind.SLOWDOWN, IncidentKind.THERMAL})
MOST = 200  # of a lane, the newest


class Lane(StrEnum):
    RUN = "run"
    STEPS = "steps"
    SLOW = "slow"
    FAULT = "fault"
    RESTART = "restart"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a job's time. `incident`: number of what explains it, NONE: nothing; `gpus`: of a run."""

    lane: Lane
    from_ms: int
    to_ms: int
    incident: int = NONE
    gpus: int = 0


def job_phases(index: FleetIndex, facts: Facts, job: int, from_ms: int, to_ms: int) -> list[Phase]:
    """Return a job's phases within [from_ms, to_ms), by lane and time. `job`: its number in `facts`."""
    found = sorted(_phases(index, facts, job), key=lambda each: (each.lane, each.from_ms))
    kept = [
        Phase(each.lane, max(each.from_ms, from_ms), min(each.to_ms, to_ms), each.incident, each.gpus)
        for each in found
        if max(each.from_ms, from_ms) < min(each.to_ms, to_ms)
    ]
    return [each for lane in Lane for each in [one for one in kept if one.lane is lane][-MOST:]]


def _phases(index: FleetIndex, facts: Facts, job: int) -> Iterator[Phase]:
    history = JobHistory(index, facts)
    attempts = find_ends(facts, history)
    mine = [attempt for attempt in attempts if attempt.job == job]
    for attempt in mine:
        yield Phase(Lane.RUN, attempt.from_ms, attempt.to_ms, attempt.incident, len(attempt.gpus))
    for low, high in stepping(facts).get(job, ()):
        yield Phase(Lane.STEPS, low, high)
    for number, at_ms in facts.checkpoints:
        if number == job:
            yield Phase(Lane.CHECKPOINT, at_ms, at_ms + 1)
    for restart in restarts(facts, attempts):
        if restart.attempt.job == job:
            end_ms = min(restart.attempt.to_ms, restart.begin_ms + RESTART_MS)
            works_ms = works_after(facts, history, restart.attempt, restart.begin_ms)
            upto_ms = end_ms if works_ms is None else min(end_ms, works_ms)
            yield Phase(Lane.RESTART, restart.begin_ms, max(upto_ms, restart.begin_ms + 1), restart.incident)
    for number, incident in enumerate(facts.incidents):
        if not is_fault(incident) or not _concerns(facts, history, incident, job):
            continue
        lane = Lane.SLOW if incident.kind in SLOW else Lane.FAULT
        for low, high in open_spans(incident, facts.until_ms):
            for attempt in mine:
                yield Phase(lane, max(low, attempt.from_ms), min(high, attempt.to_ms), number)


def _concerns(facts: Facts, history: JobHistory, incident: LedgerIncident, job: int) -> bool:
    """Return True if an incident names the job, or a GPU of it and no other job."""
    if incident.job:
        return incident.job == facts.jobs[job]
    named = history.members(incident)
    return any(bool(np.isin(attempt.gpus, named).any()) for attempt in history.attempts if attempt.job == job)

"""What people note on an incident: acknowledged, assigned, a comment, a ticket, its outcome. Pure.

A note is a line of the audit about the incident, so it is stored, dated and signed like every act of a person, and is
never changed. `state` of the line holds its value: the severity that was acknowledged, an assignee, a ticket, an
outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from drover_core.model.events import SEVERITY_ORDER, Audit, Incident, NoteKind, Severity


class NoteAct(StrEnum):
    ACKNOWLEDGE = "acknowledge"
    UNACKNOWLEDGE = "unacknowledge"
    ASSIGN = "assign"
    COMMENT = "comment"
    TICKET = "ticket"
    OUTCOME = "outcome"


class IncidentOutcome(StrEnum):
    """What an incident turned out to be."""

    FAULT = "fault"
    FALSE_ALARM = "false_alarm"


ACTS = tuple(NoteAct)
OUTCOME_WORDS = {IncidentOutcome.FAULT: "a real fault", IncidentOutcome.FALSE_ALARM: "a false alarm"}


@dataclass(frozen=True, slots=True)
class Handling:
    """How people handle an incident, by their notes. Empty: nobody has.

    Attributes:
        acknowledged_ms: 0: nobody has acknowledged it, or somebody took that back.
        acknowledged_as: its severity then; None: not known.
        assignee: "": nobody is assigned.
        updated_ms: time of the newest note.
    """

    acknowledged_by: str = ""
    acknowledged_ms: int = 0
    acknowledged_as: Severity | None = None
    assignee: str = ""
    tickets: tuple[str, ...] = ()
    outcome: str = ""
    outcome_by: str = ""
    updated_ms: int = 0

    def holds(self, incident: Incident) -> bool:
        """Return True if somebody has acknowledged it, and it has neither come back nor got worse since."""
        if not self.acknowledged_ms:
            return False
        back_ms = max((note.ts_ms for note in incident.timeline if note.kind is NoteKind.CAME_BACK), default=0)
        known = SEVERITY_ORDER.index(self.acknowledged_as or incident.severity)
        return self.acknowledged_ms >= back_ms and known >= SEVERITY_ORDER.index(incident.severity)


NOBODY = Handling()


def is_note(line: Audit) -> bool:
    return line.what in ACTS


def noted(before: Handling, line: Audit) -> Handling:
    """Return the state after one more note. A line of before the newest changes nothing."""
    if not is_note(line) or line.ts_ms < before.updated_ms:
        return before
    after = replace(before, updated_ms=line.ts_ms)
    act = NoteAct(line.what)
    if act is NoteAct.ACKNOWLEDGE:
        severity = Severity(line.state) if line.state in list(Severity) else None
        return replace(after, acknowledged_by=line.by, acknowledged_ms=line.ts_ms, acknowledged_as=severity)
    if act is NoteAct.UNACKNOWLEDGE:
        return replace(after, acknowledged_by="", acknowledged_ms=0, acknowledged_as=None)
    if act is NoteAct.ASSIGN:
        return replace(after, assignee=line.state)
    if act is NoteAct.TICKET:
        return replace(after, tickets=tuple(dict.fromkeys((*after.tickets, line.state))))
    if act is NoteAct.OUTCOME:
        return replace(after, outcome=line.state, outcome_by=line.by)
    return after


def handling_of(lines: Iterable[Audit]) -> Handling:
    """Return how an incident is handled, from the lines of the audit about it, in any order."""
    found = NOBODY
    for line in sorted(lines, key=lambda line: line.ts_ms):
        found = noted(found, line)
    return found


def describe_note(line: Audit) -> str:
    """Return a note as a sentence without a full stop: `assigned to bo by alex: knows this rack`."""
    words = {
        NoteAct.ACKNOWLEDGE: f"acknowledged by {line.by}",
        NoteAct.UNACKNOWLEDGE: f"acknowledgement taken back by {line.by}",
        NoteAct.ASSIGN: f"assigned to {line.state} by {line.by}" if line.state else f"assigned to nobody by {line.by}",
        NoteAct.COMMENT: f"comment by {line.by}",
        NoteAct.TICKET: f"ticket {line.state} linked by {line.by}",
        NoteAct.OUTCOME: f"{_outcome(line.state)}, by {line.by}",
    }[NoteAct(line.what)]
    return f"{words}: {line.why}" if line.why else words


def _outcome(word: str) -> str:
    return f"it was {OUTCOME_WORDS[IncidentOutcome(word)]}" if word in list(IncidentOutcome) else f"outcome {word}"

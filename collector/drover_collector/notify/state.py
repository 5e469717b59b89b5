"""What a receiver is to be told of an incident, given what it was told before. Pure.

    incident.opened     the first that it hears
    incident.changed    worse than what it heard
    incident.repeated   still open
    incident.closed     over, and it was told of the opening

A silenced incident is told of nothing but its end; when the silence is over, what it heard and how it stands then are
compared again, so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from drover_collector.notify.routes import Target
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.store import OutboxRow
from drover_core.model.events import (
    SEVERITY_ORDER,
    WANTED_ORDER,
    Incident,
    RecommendedAction,
    Severity,
    stronger,
    worse,
)
from drover_core.times import iso

OPENED, CHANGED, REPEATED, CLOSED = (f"incident.{word}" for word in ("opened", "changed", "repeated", "closed"))
ASKS, UNANSWERED, ACTION_FAILED, REPAIR = (
    f"incident.{word}" for word in ("asks", "unanswered", "action_failed", "repair")
)
UPDATES = frozenset({ASKS, UNANSWERED, ACTION_FAILED, REPAIR})  # of an open incident: they change no state
GROUPED = "grouped"  # state of a message that is not sent
DEFERRED = "deferred"  # state of one that is not sent while a gap in telemetry lasts
FAILED = "failed"  # state of one that was given up
NOT_SENT = "not sent, as its opening was not"
AGAIN_MS = 2 * 3_600_000  # what was given up is told again after so long, while the incident is open


@dataclass(frozen=True, slots=True)
class NotificationState:
    """What a receiver has been told of an incident, the strongest of each, and whether it was told of the end."""

    severity: Severity
    action: RecommendedAction
    closed: bool
    members: int = 0
    unsent: str = ""  # its opening did not arrive: GROUPED (a mass event's message stands for it), DEFERRED or FAILED
    missed: bool = False  # the newest message was given up
    at_ms: int = 0  # when that was made


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """What a message says, as far as it matters to the next one."""

    kind: str
    severity: Severity
    action: RecommendedAction
    members: int


def transition(
    incident: Incident,
    told: NotificationState | None,
    target: Target | None,
    *,
    now_ms: int = 0,
    owed: frozenset[str] = frozenset(),
) -> str | None:
    """Which message, if any, `incident` calls for.

    Args:
        told: what this receiver was told; None: nothing.
        target: how it is to be told; None: it is not, by the routes or for a silence.
        owed: kinds of `unsent` that are told now, as what stood for it is over and nobody has answered that.
    """
    if incident.closed_ms is not None:
        return CLOSED if told is not None and not told.closed else None
    if target is None:
        return None
    if told is None or told.closed:
        return OPENED
    if told.unsent in owed:
        return OPENED
    raised = SEVERITY_ORDER.index(incident.severity) > SEVERITY_ORDER.index(told.severity) or WANTED_ORDER.index(
        incident.action
    ) > WANTED_ORDER.index(told.action)
    grown = of_guard(incident) and len(incident.members) >= 2 * max(1, told.members)
    if raised or grown:
        return OPENED if told.unsent else CHANGED
    if told.missed:
        again = OPENED if told.unsent else CHANGED
        return again if now_ms - told.at_ms >= AGAIN_MS else None
    if target.repeat_ms is not None and not told.unsent and now_ms - told.at_ms >= target.repeat_ms:
        return REPEATED
    return None


def after(told: NotificationState | None, said: IncidentFacts, state: str, at_ms: int) -> NotificationState:
    """What is told when a message is on its way: `state` is that of its row."""
    kept_back = state if state in (GROUPED, DEFERRED, FAILED) else ""
    closed, missed = said.kind == CLOSED, state == FAILED
    if told is None or said.kind == OPENED:
        return NotificationState(said.severity, said.action, closed, said.members, kept_back, missed, at_ms)
    arrives = not kept_back and not closed
    return NotificationState(
        worse(told.severity, said.severity), stronger(told.action, said.action), closed,
        max(told.members, said.members), "" if arrives else told.unsent, missed, at_ms,
    )  # fmt: skip


def given_up(told: NotificationState, kind: str) -> NotificationState:
    """What is told when the newest message, of that kind, is given up."""
    unsent = FAILED if kind == OPENED else told.unsent
    return replace(told, unsent=unsent, missed=True)


def facts(kind: str, incident: Incident) -> IncidentFacts:
    return IncidentFacts(kind, incident.severity, incident.action, len(incident.members))


def kind_of(row: OutboxRow) -> str:
    """`incident.opened`, ..."""
    return str(json.loads(row.payload_json)["type"])


def said_by(row: OutboxRow) -> IncidentFacts:
    body: dict[str, Any] = json.loads(row.payload_json)
    data = body["data"]
    return IncidentFacts(
        body["type"], Severity(data["severity"]), RecommendedAction(data["action"]), len(data["members"])
    )


def told_by(rows: Iterable[OutboxRow]) -> dict[tuple[str, str], NotificationState]:
    """(incident, receiver) -> what it was told, out of the stored messages in any order."""
    told: dict[tuple[str, str], NotificationState] = {}
    for row in sorted(rows, key=lambda r: (r.created_ms, r.id)):
        key, said = (row.incident_id, row.notifier), said_by(row)
        if said.kind not in UPDATES:
            told[key] = after(told.get(key), said, row.state, row.created_ms)
    return told


def tell(row: OutboxRow) -> str:
    """One line about a message for the operator: `ops: incident.opened delivered 2026-11-21T06:17:00.000Z`."""
    line = f"{row.notifier}: {kind_of(row)} {row.detail or 'waits for its first try'}"
    if row.state == "pending" and row.attempts:
        line += f"; try {row.attempts + 1} at {iso(row.next_ms)}"
    return line

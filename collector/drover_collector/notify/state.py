"""Decide which message an incident calls for, given what the receiver knows of it. Pure.

    incident.opened     the receiver does not know it
    incident.changed    worse than the receiver knows
    incident.repeated   still open
    incident.closed     closed, and the receiver got the opening

A silenced incident sends only its end. When the silence is over, its state is compared again with what the receiver
knows, so nothing is lost.
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
GROUPED = "grouped"  # state of a message that another replaces
DEFERRED = "deferred"  # state of one that waits for the end of a gap in telemetry
FAILED = "failed"  # state of one that was given up
NOT_SENT = "not sent, because the opening was not"
AGAIN_MS = 2 * 3_600_000  # a message that was given up is sent again after this, while the incident is open


@dataclass(frozen=True, slots=True)
class NotificationState:
    """What a receiver knows of an incident.

    Attributes:
        severity, action, members: the greatest that it got.
        closed: it got the end.
        unsent: why the opening did not reach it: GROUPED, DEFERRED or FAILED; "": it did.
        missed: the newest message was given up.
        at_ms: when the newest message was made.
    """

    severity: Severity
    action: RecommendedAction
    closed: bool
    members: int = 0
    unsent: str = ""
    missed: bool = False
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """The content of a message that decides about the next one."""

    kind: str
    severity: Severity
    action: RecommendedAction
    members: int


def transition(
    incident: Incident,
    before: NotificationState | None,
    target: Target | None,
    *,
    now_ms: int = 0,
    released: frozenset[str] = frozenset(),
) -> str | None:
    """Return the kind of message that `incident` calls for; None: none.

    Args:
        before: what this receiver knows; None: nothing.
        target: how routes notify it; None: they do not, or a silence covers the incident.
        released: values of `unsent` to send now, because the message that replaced them is over and unanswered.
    """
    if incident.closed_ms is not None:
        return CLOSED if before is not None and not before.closed else None
    if target is None:
        return None
    if before is None or before.closed:
        return OPENED
    if before.unsent in released:
        return OPENED
    raised = SEVERITY_ORDER.index(incident.severity) > SEVERITY_ORDER.index(before.severity) or WANTED_ORDER.index(
        incident.action
    ) > WANTED_ORDER.index(before.action)
    grown = of_guard(incident) and len(incident.members) >= 2 * max(1, before.members)
    if raised or grown:
        return OPENED if before.unsent else CHANGED
    if before.missed:
        again = OPENED if before.unsent else CHANGED
        return again if now_ms - before.at_ms >= AGAIN_MS else None
    if target.repeat_ms is not None and not before.unsent and now_ms - before.at_ms >= target.repeat_ms:
        return REPEATED
    return None


def after(before: NotificationState | None, sent: IncidentFacts, state: str, at_ms: int) -> NotificationState:
    """Return what a receiver knows after a message. `state`: of the message's row."""
    kept_back = state if state in (GROUPED, DEFERRED, FAILED) else ""
    closed, missed = sent.kind == CLOSED, state == FAILED
    if before is None or sent.kind == OPENED:
        return NotificationState(sent.severity, sent.action, closed, sent.members, kept_back, missed, at_ms)
    arrives = not kept_back and not closed
    return NotificationState(
        worse(before.severity, sent.severity), stronger(before.action, sent.action), closed,
        max(before.members, sent.members), "" if arrives else before.unsent, missed, at_ms,
    )  # fmt: skip


def given_up(before: NotificationState, kind: str) -> NotificationState:
    """Return what a receiver knows after its newest message, of that kind, was given up."""
    unsent = FAILED if kind == OPENED else before.unsent
    return replace(before, unsent=unsent, missed=True)


def facts(kind: str, incident: Incident) -> IncidentFacts:
    return IncidentFacts(kind, incident.severity, incident.action, len(incident.members))


def kind_of(row: OutboxRow) -> str:
    """Return a message's kind, such as `incident.opened`."""
    return str(json.loads(row.payload_json)["type"])


def facts_of(row: OutboxRow) -> IncidentFacts:
    body: dict[str, Any] = json.loads(row.payload_json)
    data = body["data"]
    return IncidentFacts(
        body["type"], Severity(data["severity"]), RecommendedAction(data["action"]), len(data["members"])
    )


def states_of(rows: Iterable[OutboxRow]) -> dict[tuple[str, str], NotificationState]:
    """Return (incident, receiver) -> what it knows, from stored messages in any order."""
    states: dict[tuple[str, str], NotificationState] = {}
    for row in sorted(rows, key=lambda r: (r.created_ms, r.id)):
        key, sent = (row.incident_id, row.notifier), facts_of(row)
        if sent.kind not in UPDATES:
            states[key] = after(states.get(key), sent, row.state, row.created_ms)
    return states


def describe(row: OutboxRow) -> str:
    """Return one line about a message: `ops: incident.opened delivered 2026-11-21T06:17:00.000Z`."""
    line = f"{row.notifier}: {kind_of(row)} {row.detail or 'waits for its first try'}"
    if row.state == "pending" and row.attempts:
        line += f"; try {row.attempts + 1} at {iso(row.next_ms)}"
    return line

"""Write messages about incidents as rows of the outbox."""

from __future__ import annotations

from dataclasses import dataclass

from drover_collector.notify.grouping import instead_of
from drover_collector.notify.message_queue import MAX_PENDING
from drover_collector.notify.receivers.webhook import message
from drover_collector.notify.routes import Target
from drover_collector.notify.state import (
    CLOSED,
    FAILED,
    GROUPED,
    NOT_SENT,
    OPENED,
    REPEATED,
    NotificationState,
    after,
    facts,
    transition,
)
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.store import OutboxRow
from drover_core.model.events import Incident

Key = tuple[str, str]  # (incident id, receiver)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that is due, and what it was made of.

    Attributes:
        released: as for `transition`.
        target: None: the end goes to a receiver that routes no longer name.
    """

    row: OutboxRow
    incident: Incident
    kind: str
    released: frozenset[str]
    target: Target | None

    @property
    def key(self) -> Key:
        return self.incident.id, self.row.notifier

    def state_after(self, before: NotificationState | None) -> NotificationState:
        return after(before, facts(self.kind, self.incident), self.row.state, self.row.created_ms)

    def is_due(self, before: NotificationState | None) -> bool:
        """Whether `before` still calls for this message."""
        kind = transition(self.incident, before, self.target, now_ms=self.row.created_ms, released=self.released)
        return kind == self.kind


@dataclass(frozen=True, slots=True)
class Recipient:
    """A receiver, and what it knows of the incident.

    Attributes:
        full: too many messages wait for it.
        before: None: it got nothing.
        target: how routes notify it; None: they do not.
    """

    name: str
    full: bool
    before: NotificationState | None
    target: Target | None


class MessageWriter:
    """Writes rows. The JSON is made once for all receivers of the same message."""

    def __init__(self, console_url: str) -> None:
        self._console_url = console_url
        self._newest: tuple[tuple[str, str, int, int], str] = (("", "", 0, 0), "")

    def row(
        self, recipient: Recipient, kind: str, incident: Incident, event: Incident | None, now_ms: int
    ) -> OutboxRow:
        """Return the row of a message about an incident's own state.

        Args:
            event: the open mass event that contains the incident. Its message replaces this one where routes group.
        """
        before, target, name = recipient.before, recipient.target, recipient.name
        wait_ms = target.wait_ms if target is not None and kind == OPENED and not of_guard(incident) else 0
        created_ms = now_ms if before is None else max(now_ms, before.at_ms + 1)  # rows are read back in this order
        state, detail = "pending", ""
        if kind == CLOSED and before is not None and before.unsent:
            state, detail = GROUPED, NOT_SENT
        elif event is not None and target is not None and target.group and kind != CLOSED:
            state, detail = instead_of(event)
        elif recipient.full:
            state, detail = FAILED, f"given up: {MAX_PENDING} older messages wait for this receiver"
        repeat = f"_r{before.at_ms}" if before is not None and kind == REPEATED else ""
        return OutboxRow(
            id=f"msg_{incident.id}_{incident.version}_{name}{repeat}",  # the same when a given-up message is due again
            incident_id=incident.id,
            notifier=name,
            payload_json=self.body(kind, incident, now_ms),
            created_ms=created_ms,
            state=state,
            next_ms=now_ms + wait_ms,
            detail=detail,
        )

    def body(self, kind: str, incident: Incident, now_ms: int, update: str = "") -> str:
        """Return a message's JSON. `update`: the sentence of an update."""
        if update:
            return message(kind, incident, now_ms, self._console_url, update)
        key, text = self._newest
        if key != (kind, incident.id, incident.version, now_ms):
            text = message(kind, incident, now_ms, self._console_url)
            self._newest = (kind, incident.id, incident.version, now_ms), text
        return text

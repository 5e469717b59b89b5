"""A message as it is stored: its row in the outbox."""

from __future__ import annotations

from drover_collector.notify.delivery_recorder import MAX_PENDING
from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.grouping import instead_of
from drover_collector.notify.receivers.webhook import message
from drover_collector.notify.state import (
    CLOSED,
    FAILED,
    GROUPED,
    NOT_SENT,
    REPEATED,
    NotificationState,
)
from drover_collector.store import OutboxRow
from drover_core.model.events import Incident


class Rows:
    """Of messages about incidents; part of the outbox."""

    _console_url: str
    _written: tuple[tuple[str, str, int, int], str]  # what was written last, and for what

    def _row(
        self,
        courier: DeliveryWorker,
        kind: str,
        incident: Incident,
        event: Incident | None,
        told: NotificationState | None,
        now_ms: int,
        wait_ms: int,
    ) -> OutboxRow:
        """
        Args:
            event: the mass event that stands for it.
        """
        made_ms = now_ms if told is None else max(now_ms, told.at_ms + 1)  # the order in which they are read again
        closes, name = kind == CLOSED, courier.notifier.name
        state, detail = "pending", ""
        if closes and told is not None and told.unsent:
            state, detail = GROUPED, NOT_SENT
        elif event is not None and not closes:
            state, detail = instead_of(event)
        elif courier.full:
            state, detail = FAILED, f"given up: {MAX_PENDING} older messages wait for this receiver"
        repeats = f"_r{told.at_ms}" if told is not None and kind == REPEATED else ""
        return OutboxRow(
            id=f"msg_{incident.id}_{incident.version}_{name}{repeats}",  # the same if it was given up, and is due again
            incident_id=incident.id,
            notifier=name,
            payload_json=self._body(kind, incident, now_ms),
            created_ms=made_ms,
            state=state,
            next_ms=now_ms + wait_ms,
            detail=detail,
        )

    def _body(self, kind: str, incident: Incident, now_ms: int) -> str:
        """The message: written once for all receivers that are told the same at one moment."""
        key, text = self._written
        if key != (kind, incident.id, incident.version, now_ms):
            text = message(kind, incident, now_ms, self._console_url)
            self._written = (kind, incident.id, incident.version, now_ms), text
        return text

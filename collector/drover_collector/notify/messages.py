"""A message that is due: its row in the outbox, and what it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.routes import Target
from drover_collector.notify.state import (
    NotificationState,
    after,
    facts,
    transition,
)
from drover_collector.store import OutboxRow
from drover_core.model.events import Incident

Key = tuple[str, str]  # (incident id, receiver)


@dataclass(frozen=True, slots=True)
class Message:
    row: OutboxRow
    incident: Incident
    courier: DeliveryWorker
    kind: str
    owed: frozenset[str]  # see `transition`
    target: Target | None  # None: told of the end though the routes would not name it any more

    @property
    def key(self) -> Key:
        return self.incident.id, self.row.notifier

    def after(self, told: NotificationState | None) -> NotificationState:
        return after(told, facts(self.kind, self.incident), self.row.state, self.row.created_ms)

    def due(self, told: NotificationState | None) -> bool:
        """Whether it still is what `told` calls for."""
        return transition(self.incident, told, self.target, now_ms=self.row.created_ms, owed=self.owed) == self.kind

"""Send updates of open incidents (`incident_updates.py`), stored before their first attempt like every message."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from drover_collector.notify.delivery_pool import DeliveryPool
from drover_collector.notify.incident_updates import IncidentUpdate
from drover_collector.notify.messages import MessageWriter
from drover_collector.notify.notification_states import NotificationStates
from drover_collector.notify.routes import Recipients
from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.model.events import Incident

MAX_KNOWN = 20_000  # ids of messages in memory; the store knows the others


class UpdateMessages:
    """Sends each update once to each receiver that knows the incident."""

    def __init__(
        self,
        store: Store,
        delivery: DeliveryPool,
        states: NotificationStates,
        writer: MessageWriter,
        recipients: Recipients,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._delivery = delivery
        self._states = states
        self._writer = writer
        self._recipients = recipients
        self._now_ms = now_ms
        self._made: OrderedDict[str, None] = OrderedDict()  # ids of messages
        self._lock = threading.Lock()  # of `_made`

    def send(self, updates: Sequence[IncidentUpdate], incidents: Mapping[str, Incident], from_memory: bool) -> int:
        """As `Outbox.send_updates`."""
        if not updates or not self._delivery.receivers:
            return 0
        due = self._due(updates, incidents, from_memory)
        if due and not from_memory:
            stored = {row.id for row in self._store.outbox.of_incidents(*{row.incident_id for row in due})}
            due = [row for row in due if row.id not in stored]
        with self._lock:  # another call may have sent some from memory while the store was asked
            due = [row for row in due if row.id not in self._made]
            self._made.update((row.id, None) for row in due)
            while len(self._made) > MAX_KNOWN:
                self._made.popitem(last=False)
        if from_memory:
            self._delivery.keep_for_store(due)
        elif due:
            self._write(due)
        for row in due:
            self._delivery.add(row)
        return len(due)

    def _write(self, due: Sequence[OutboxRow]) -> None:
        try:
            self._store.outbox.write(due)
        except StoreError:
            with self._lock:
                for row in due:
                    self._made.pop(row.id, None)
            raise

    def _due(
        self, updates: Sequence[IncidentUpdate], incidents: Mapping[str, Incident], from_memory: bool
    ) -> list[OutboxRow]:
        """Return the messages for receivers that know the incident and that routes still name."""
        now_ms = self._now_ms()
        states = self._states.recall({u.incident_id for u in updates}, self._delivery.workers, from_memory)
        due = []
        for update in updates:
            incident = incidents.get(update.incident_id)
            if incident is None or incident.closed_ms is not None or self._recipients.silenced(incident, now_ms):
                continue
            body = self._writer.body(update.kind, incident, now_ms, update.text)
            for name in self._recipients.routes.receivers(incident):
                before = states.get((incident.id, name))
                if before is None or before.closed or before.unsent:
                    continue
                id_ = f"msg_{incident.id}_{update.kind.rpartition('.')[2]}_{update.key}_{name}"
                created_ms = max(now_ms, before.at_ms + 1)  # rows are read back in this order
                due.append(OutboxRow(id_, incident.id, name, body, created_ms, next_ms=now_ms))
        return due

"""Messages for news of open incidents (`news.py`): part of the outbox, stored before their first try like all of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from drover_collector.notify.delivery_recorder import DeliveryRecorder
from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.fallback_file import Unstored
from drover_collector.notify.incident_updates import News
from drover_collector.notify.messages import Key
from drover_collector.notify.receivers.webhook import message
from drover_collector.notify.routes import Routes
from drover_collector.notify.silences import Silences
from drover_collector.notify.state import NotificationState
from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.model.events import Incident

KNOWN = 20_000  # messages of this process that are remembered; others are looked up in the store


class IncidentUpdates:
    """What an outbox is beside its messages of incidents' openings, changes and ends."""

    _store: Store
    _unstored: Unstored
    _clerk: DeliveryRecorder
    _couriers: Mapping[str, DeliveryWorker]
    _console_url: str
    _now_ms: Callable[[], int]
    routes: Routes
    silences: Silences

    def __init__(self) -> None:
        self._made: OrderedDict[str, None] = OrderedDict()  # ids of messages
        self._made_lock = threading.Lock()

    def _recall(self, incidents: set[str], blind: bool) -> dict[Key, NotificationState | None]:
        raise NotImplementedError  # the outbox has it

    def tell(self, news: Sequence[News], incidents: Mapping[str, Incident], blind: bool = False) -> int:
        """Messages for news of open incidents, after theirs; safe to call again with the same news.

        Args:
            blind: the store fails or hangs: told from memory, and stored when it works again.
        Returns:
            How many messages were made.
        Raises:
            StoreError: nothing is lost; call again with the same news.
        """
        if not news or not self._couriers:
            return 0
        due = self._due(news, incidents, blind)
        if due and not blind:
            there = {row.id for row in self._store.outbox.of_incidents(*{row.incident_id for row in due})}
            due = [row for row in due if row.id not in there]
        with self._made_lock:  # what was told from memory while the store was asked is not told again
            due = [row for row in due if row.id not in self._made]
            self._made.update((row.id, None) for row in due)
            while len(self._made) > KNOWN:
                self._made.popitem(last=False)
        if blind:
            self._unstored.note(due)
            for row in due:
                self._clerk.note(row)
        elif due:
            self._store_all(due)
        for row in due:
            self._couriers[row.notifier].add(row)
        return len(due)

    def _store_all(self, due: Sequence[OutboxRow]) -> None:
        try:
            self._store.outbox.write(due)
        except StoreError:
            with self._made_lock:
                for row in due:
                    self._made.pop(row.id, None)
            raise

    def _due(self, news: Sequence[News], incidents: Mapping[str, Incident], blind: bool) -> list[OutboxRow]:
        """For those who know of the incident, and would be told of it now."""
        now_ms = self._now_ms()
        told = self._recall({piece.incident_id for piece in news}, blind)
        due = []
        for piece in news:
            incident = incidents.get(piece.incident_id)
            if incident is None or incident.closed_ms is not None or self.silences.of(incident, now_ms) is not None:
                continue
            body = message(piece.kind, incident, now_ms, self._console_url, piece.text)
            for name in self.routes.receivers(incident):
                before = told.get((incident.id, name))
                id_ = f"msg_{incident.id}_{piece.kind.rpartition('.')[2]}_{piece.key}_{name}"
                if before is None or before.closed or before.unsent:
                    continue
                created_ms = max(now_ms, before.at_ms + 1)  # the order in which they are read again
                due.append(OutboxRow(id_, incident.id, name, body, created_ms, next_ms=now_ms))
        return due

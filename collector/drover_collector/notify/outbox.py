"""Store every message before its first attempt, and have it delivered or given up.

A restart loses no message and repeats none: what each receiver knows is read back from the outbox's rows. `state.py`
says which message an incident calls for, `routes.py` who gets it, `silences.py` what is held back.

While a mass event is open, its message replaces those of its incidents (`grouping.py`): they are stored as grouped and
not sent. The mass event's message is sent again each time its nodes have doubled. When a gap in telemetry, or a mass
event that nobody answered, is over, the incidents that are left get their own messages. Where a route holds openings
back (`group_wait_s`), an incident that ends in that time, most often as part of a wider one, is never sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drover_collector.notify.base import Notifier
from drover_collector.notify.delivery_pool import DeliveryPool
from drover_collector.notify.fallback_file import FallbackFile
from drover_collector.notify.grouping import Grouping, instead_of
from drover_collector.notify.incident_notes import IncidentNotes
from drover_collector.notify.incident_updates import IncidentUpdate
from drover_collector.notify.messages import Key, Message, MessageWriter, Recipient
from drover_collector.notify.notification_states import NotificationStates
from drover_collector.notify.routes import Recipients, Routes
from drover_collector.notify.silences import Silences
from drover_collector.notify.state import FAILED, REPEATED, transition
from drover_collector.notify.update_messages import UpdateMessages
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.store import OutboxRow, Store
from drover_core.model.events import Incident

# Waits between attempts: eight over 56 minutes, which outlasts a restart or a failover of a receiver.
DELAYS_S: tuple[float, ...] = (5, 15, 60, 180, 420, 900, 1800)


@dataclass(frozen=True, slots=True)
class OutboxOptions:
    """
    Attributes:
        routes: None: each receiver gets incidents from its `min_severity` on.
        silences: None: nothing is held back.
        delays_s: waits between attempts.
        fallback_file: keeps messages while the store fails; None: a crash then forgets them.
    """

    routes: Routes | None = None
    silences: Silences | None = None
    delays_s: Sequence[float] = DELAYS_S
    fallback_file: Path | None = None


class Outbox:
    """Writes messages for changed incidents and has them delivered. `enqueue` and `sweep` may block on the store."""

    def __init__(
        self,
        store: Store,
        notifiers: Sequence[Notifier],
        console_url: str,
        options: OutboxOptions = OutboxOptions(),  # frozen
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._recipients = Recipients(options.routes or Routes(notifiers), options.silences or Silences())
        self._states = NotificationStates(store)
        fallback = FallbackFile(store, options.fallback_file)
        self.delivery = DeliveryPool(store, notifiers, options.delays_s, fallback, now_ms, self._states.give_up)
        self._writer = MessageWriter(console_url)
        self._updates = UpdateMessages(store, self.delivery, self._states, self._writer, self._recipients, now_ms)
        self._lock = threading.Lock()  # of the next three
        self._groups = Grouping()
        self._silenced: set[str] = set()  # incidents that a silence held back
        self._ahead: dict[str, int] = {}  # incident -> version that was sent before older ones were stored
        self._repeated_ms: dict[Key, int] = {}  # when a receiver with `repeat_s` last got the incident
        self._held: dict[Key, tuple[str, Incident]] = {}  # openings that a route holds back: message id and incident

    @property
    def silences(self) -> Silences:
        return self._recipients.silences

    @property
    def notes(self) -> IncidentNotes:
        return self._recipients.notes

    def start(self) -> None:
        """Load what an earlier run left and begin to deliver; also after a stop.

        Raises:
            StoreError: the store cannot be read.
        """
        self.load()
        self.delivery.start()

    def load(self) -> None:
        """Load pending messages without delivering any.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()  # a start that failed later has threads
        self.delivery.renew()
        self._states.clear()
        with self._lock:
            self._silenced.clear()
            self._ahead.clear()
            self._groups = Grouping()
        self._repeated_ms = {}
        self._held.clear()
        self.delivery.fallback.load(self._now_ms())
        removed: list[OutboxRow] = []
        for row in self._store.outbox.pending():
            if row.notifier in self.delivery.workers:
                self.delivery.add(row)
            else:
                detail = f"given up: receiver {row.notifier!r} is no longer configured"
                removed.append(replace(row, state=FAILED, detail=detail))
        if removed:
            self._store.outbox.write(removed)

    def stop(self) -> None:
        """End delivery. Pending messages stay pending in the store."""
        self.delivery.stop()

    def enqueue(self, incidents: Iterable[Incident]) -> int:
        """Write messages for what has changed since the last ones. A second call with the same incidents writes none.

        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again with the same incidents.
        """
        messages = self._states.still_due(self._messages(incidents))
        if messages:
            self._store.outbox.write([message.row for message in messages])
        self.delivery.recorder.retry_now()
        return self._send(messages)

    def enqueue_unstored(self, incidents: Iterable[Incident]) -> int:
        """Send messages from memory while the store fails or hangs: an alarm must not wait for a disk. Never block.

        The fallback file keeps them until the store accepts them.

        Returns:
            How many messages were made.
        """
        messages = self._messages(incidents, from_memory=True)
        self.delivery.keep_for_store(message.row for message in messages)
        return self._send(messages)

    def send_updates(
        self, updates: Sequence[IncidentUpdate], incidents: Mapping[str, Incident], from_memory: bool = False
    ) -> int:
        """Send updates of open incidents, after the messages about their state. A second call sends none again.

        Args:
            from_memory: the store fails or hangs: send from memory, store later.
        Returns:
            How many messages were made.
        Raises:
            StoreError: nothing is lost; call again with the same updates.
        """
        return self._updates.send(updates, incidents, from_memory)

    def sweep(self, incidents: Mapping[str, Incident]) -> int:
        """Send what only time makes due: after a silence, a route's repeat, or a message given up long ago.

        Args:
            incidents: all open ones, by id. Call this now and then, when all is stored.
        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again.
        """
        if not self.delivery.receivers:
            return 0
        with self._lock:
            self._ahead.clear()
        self._end_forgotten(incidents)
        open_ = [i for i in incidents.values() if i.closed_ms is None]
        self.repeat(open_)
        repeat_ms = self._recipients.routes.least_repeat_ms
        before_ms = None if repeat_ms is None else self._now_ms() - repeat_ms
        with self._lock:
            self._silenced &= incidents.keys()
            check = set(self._silenced)
        check |= self._states.to_check([i.id for i in open_], self.delivery.workers, incidents, before_ms)
        return self.enqueue([i for i in open_ if i.id in check])

    def repeat(self, incidents: Iterable[Incident]) -> None:
        """Send open incidents again to receivers that end what is not repeated. Never block; any thread.

        Repeats are not stored. They are sent under a silence and while the store fails too, as the receiver would
        otherwise report the end of the incident.
        """
        workers = [w for w in self.delivery.workers.values() if w.notifier.repeat_s is not None]
        if not workers:
            return
        now_ms = self._now_ms()
        kept: dict[Key, int] = {}
        repeated_ms = self._repeated_ms
        for incident in incidents:
            if incident.closed_ms is not None:
                continue
            for worker in workers:
                key = (incident.id, worker.notifier.name)
                state = self._states.get(key)
                if state is None or state.closed or state.unsent:
                    continue
                kept[key] = max(repeated_ms.get(key, 0), state.at_ms)
                if now_ms - kept[key] < 1000 * (worker.notifier.repeat_s or 0):
                    continue
                kept[key] = now_ms
                body = self._writer.body(REPEATED, incident, now_ms)
                id_ = f"msg_{incident.id}_{now_ms}_{key[1]}"
                worker.add_repeat(OutboxRow(id_, incident.id, key[1], body, now_ms, next_ms=now_ms))
        self._repeated_ms = kept

    def _end_forgotten(self, incidents: Mapping[str, Incident]) -> None:
        """Send the ends of incidents that a crash forgot. Raises StoreError."""
        ends = self.delivery.fallback.ends(incidents, self._now_ms())
        if ends:
            self._store.outbox.write(ends)
        self.delivery.fallback.finish_ends(self._now_ms())
        for row in ends:
            self.delivery.add(row)

    def _messages(self, incidents: Iterable[Incident], from_memory: bool = False) -> list[Message]:
        """Return each message that is due.

        Args:
            from_memory: do not ask the store; what is not in memory counts as not notified.
        """
        incidents = list(incidents)
        if not incidents or not self.delivery.receivers:
            return []
        now_ms = self._now_ms()
        with self._lock:
            if from_memory:
                self._ahead.update((i.id, i.version) for i in incidents)
            else:  # an older version that the store takes late would open again what was closed meanwhile
                incidents = [i for i in incidents if i.version >= self._ahead.get(i.id, 0)]
            self._groups.add(incidents)
            events = [(self._groups.event_of(i), self._groups.released(i)) for i in incidents]
        states = self._states.recall({i.id for i in incidents}, self.delivery.workers, from_memory)
        messages: list[Message] = []
        for incident, (event, released) in zip(incidents, events, strict=True):
            silenced = self._recipients.silenced(incident, now_ms)
            with self._lock:
                (self._silenced.add if silenced else self._silenced.discard)(incident.id)
            targets = {} if silenced else self._recipients.targets(incident)
            for name, worker in self.delivery.workers.items():
                target, before = targets.get(name), states.get((incident.id, name))
                kind = transition(incident, before, target, now_ms=now_ms, released=released)
                if kind is not None:
                    recipient = Recipient(name, worker.full, before, target)
                    row = self._writer.row(recipient, kind, incident, event, now_ms)
                    messages.append(Message(row, incident, kind, released, target))
                    states[messages[-1].key] = messages[-1].state_after(before)
        return messages

    def _send(self, messages: Iterable[Message]) -> int:
        """Hand messages to their workers, without those that another call has sent meanwhile."""
        messages = list(messages)
        count = 0
        for message in messages:
            if not self._states.accept(message):
                continue
            count += 1
            if message.row.state == "pending":
                self.delivery.add(message.row)
            if message.row.next_ms > message.row.created_ms:
                self._held[message.key] = message.row.id, message.incident
            else:
                self._held.pop(message.key, None)
        if any(of_guard(message.incident) for message in messages):
            self._withdraw_held()
        return count

    def _withdraw_held(self) -> None:
        """Remove openings that a route holds back and that a mass event's message replaces now."""
        for key, (id_, incident) in list(self._held.items()):
            with self._lock:
                event = self._groups.event_of(incident)
            if event is None:
                continue
            state, detail = instead_of(event)
            if self.delivery.workers[key[1]].withdraw(id_, state, detail):
                self._states.keep_back(key, state)
                self._held.pop(key, None)

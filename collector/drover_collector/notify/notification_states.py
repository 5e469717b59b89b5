"""Keep what each receiver knows of each incident: in memory, else read back from the outbox."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from drover_collector.notify.messages import Key, Message
from drover_collector.notify.state import UPDATES, NotificationState, given_up, states_of
from drover_collector.store import OutboxRow, Store
from drover_core.model.events import RecommendedAction, Severity

MAX_KNOWN = 100_000  # (incident, receiver) pairs in memory
_CLOSED = NotificationState(Severity.INFO, RecommendedAction.NONE, True)


class NotificationStates:
    """The state of each (incident, receiver). Any thread; the lock is never held while the store is asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, NotificationState | None] = OrderedDict()  # None: it got nothing
        self._missed: set[str] = set()  # incidents with a message that was given up or kept back

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._missed.clear()

    def recall(
        self, incidents: Collection[str], receivers: Iterable[str], from_memory: bool
    ) -> dict[Key, NotificationState | None]:
        """Return the states of these incidents.

        Args:
            from_memory: do not ask the store; what is not in memory counts as not notified.
        Raises:
            StoreError: the store cannot be read.
        """
        keys = [(id_, name) for id_ in incidents for name in receivers]
        with self._lock:
            unknown = {key[0] for key in keys if key not in self._known}
        stored = states_of(self._store.outbox.of_incidents(*unknown)) if unknown and not from_memory else {}
        found: dict[Key, NotificationState | None] = {}
        with self._lock:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
                elif not from_memory:
                    self._remember(key, stored.get(key))
                found[key] = state = self._known.get(key)
                if state is not None and (state.missed or state.unsent):
                    self._missed.add(key[0])
        return found

    def still_due(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages that no other call has sent from memory since they were made."""
        due: list[Message] = []
        later: dict[Key, NotificationState] = {}
        with self._lock:
            for message in messages:
                before = later.get(message.key) or self._known.get(message.key)
                if message.key not in self._known or message.is_due(before):
                    later[message.key] = message.state_after(before)
                    due.append(message)
        return due

    def accept(self, message: Message) -> bool:
        """Remember the state after a message. Return False if another call has sent it meanwhile."""
        with self._lock:
            before = self._known.get(message.key)
            if message.key in self._known and not message.is_due(before):
                return False
            self._remember(message.key, message.state_after(before))
            if message.row.state != "pending":
                self._missed.add(message.incident.id)
        return True

    def get(self, key: Key) -> NotificationState | None:
        """Return the state in memory, and keep it there longer than those that nobody reads."""
        with self._lock:
            state = self._known.get(key)
            if state is not None:
                self._known.move_to_end(key)
        return state

    def keep_back(self, key: Key, reason: str) -> None:
        """Note that the opening in `key` was not sent: GROUPED or DEFERRED."""
        with self._lock:
            if (state := self._known.get(key)) is not None:
                self._known[key] = replace(state, unsent=reason)
            self._missed.add(key[0])

    def give_up(self, row: OutboxRow, kind: str) -> None:
        """Note that a message was given up."""
        if kind in UPDATES:
            return
        key = (row.incident_id, row.notifier)
        with self._lock:
            if (state := self._known.get(key)) is not None:
                self._known[key] = given_up(state, kind)
            self._missed.add(row.incident_id)

    def to_check(
        self, incidents: Sequence[str], receivers: Collection[str], open_ids: Collection[str], before_ms: int | None
    ) -> set[str]:
        """Return the incidents that may need a message though they have not changed.

        Args:
            open_ids: others are forgotten. before_ms: also those last notified before; None: no route repeats.
        """
        with self._lock:
            self._missed.intersection_update(open_ids)
            return {
                id_
                for id_ in incidents
                if id_ in self._missed
                or (before_ms is not None and any(self._notified_before(id_, name, before_ms) for name in receivers))
            }

    def _notified_before(self, incident: str, receiver: str, ts_ms: int) -> bool:
        state = self._known.get((incident, receiver), _CLOSED)
        return state is not None and state.at_ms <= ts_ms

    def _remember(self, key: Key, state: NotificationState | None) -> None:
        self._known[key] = state
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

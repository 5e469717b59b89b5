"""The outbox: every message is in the store before its first try and leaves it delivered or given up.

A restart loses none and sends none anew: what was told of an incident is read back from the outbox itself. Each
receiver has a thread of its own (`courier.py`), so that a slow one delays nobody else; and what becomes of messages is
stored by another (`clerk.py`), so that a store that hangs delays none. Who is told is said by `routes.py`, what by
`telling.py`, what is held back by `silences.py`. What a mass event's message stands for (`grouping.py`) is stored as
grouped, and not sent; such a message is sent again each time that its nodes have doubled. What is still wrong when a
gap in telemetry, or a mass event that nobody has answered, is over is told then. Where a route has an opening
wait (`group_wait_s`), what ends meanwhile, most often as part of a wider incident, is not sent either.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from drover_collector.notify.base import Notifier
from drover_collector.notify.delivery_recorder import STOP_S, DeliveryRecorder
from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.fallback_file import Unstored
from drover_collector.notify.figures import Figures
from drover_collector.notify.grouping import Grouping, instead_of
from drover_collector.notify.messages import Key, Message
from drover_collector.notify.routes import Routes
from drover_collector.notify.rows import Rows
from drover_collector.notify.silences import Silences
from drover_collector.notify.state import (
    FAILED,
    NEWS,
    OPENED,
    REPEATED,
    NotificationState,
    given_up,
    told_by,
    transition,
)
from drover_collector.notify.update_messages import IncidentUpdates
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.store import OutboxRow, Store
from drover_core.model.events import Incident, RecommendedAction, Severity

# Waits between tries: eight tries over 56 minutes, which outlasts a restart or a failover of a receiver.
DELAYS_S: tuple[float, ...] = (5, 15, 60, 180, 420, 900, 1800)
REMEMBERED = 100_000  # (incident, receiver) pairs whose last message is kept in memory; others are read from the store

NEVER = NotificationState(Severity.INFO, RecommendedAction.NONE, True)


class Outbox(IncidentUpdates, Rows, Figures):
    """Writes messages for changed incidents and has them delivered. `enqueue` and `sweep` may block on the store.

    Args:
        routes: None: each receiver is told from its `min_severity` on.
        silences: None: nothing is ever held back.
        unstored: file for what is told while the store fails; None: a crash then forgets it.
    """

    def __init__(
        self,
        store: Store,
        notifiers: Sequence[Notifier],
        console_url: str,
        *,
        routes: Routes | None = None,
        silences: Silences | None = None,
        delays_s: Sequence[float] = DELAYS_S,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        unstored: Path | None = None,
    ) -> None:
        super().__init__()
        self._store = store
        self._unstored = Unstored(store, unstored)
        self._console_url = console_url
        self._now_ms = now_ms
        self._delays_s = tuple(delays_s)
        self._notifiers = tuple(notifiers)
        self.routes = routes or Routes(self._notifiers)
        self.silences = silences or Silences()
        self._clerk = DeliveryRecorder(store, len(self._notifiers), self._unstored.saved)
        self._couriers = self._fresh()
        self._lock = threading.Lock()  # of what was told; held for moments
        self._told: OrderedDict[Key, NotificationState | None] = OrderedDict()
        self._missed: set[str] = set()  # incidents of which a message was given up, or something else stood for it
        self._muted: set[str] = set()  # those that a silence held back
        self._refreshed: dict[Key, int] = {}  # when a receiver that forgets was told again
        self._waiting: dict[Key, tuple[str, Incident]] = {}  # openings that wait for what explains them, by message
        self._groups = Grouping()
        self._written: tuple[tuple[str, str, int, int], str] = (("", "", 0, 0), "")

    def start(self) -> None:
        """Takes up what a previous run left, and begins to deliver; also after a stop.

        Raises:
            StoreError: the store cannot be read.
        """
        self.load()
        self._clerk.start()
        for courier in self._couriers.values():
            courier.start()

    def load(self) -> None:
        """The first half of a start: nothing is delivered yet.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()  # those of a start that something else then made fail
        self._clerk = DeliveryRecorder(self._store, len(self._notifiers), self._unstored.saved)  # a thread starts once
        self._couriers = self._fresh()
        with self._lock:
            self._told.clear()
            self._missed.clear()
            self._muted.clear()
            self._refreshed.clear()
            self._waiting.clear()
            self._groups = Grouping()
        self._unstored.load(self._now_ms())
        gone: list[OutboxRow] = []
        for row in self._store.outbox.pending():
            courier = self._couriers.get(row.notifier)
            if courier is None:
                detail = f"given up: no receiver {row.notifier!r} is configured any more"
                gone.append(replace(row, state=FAILED, detail=detail))
            else:
                courier.add(row)
        if gone:
            self._store.outbox.write(gone)

    def stop(self) -> None:
        """Ends delivery; what is pending stays so in the store."""
        for courier in self._couriers.values():
            courier.ask_to_stop()
        until_s = time.monotonic() + STOP_S  # for all of them: those that hang do so at the same time
        for courier in self._couriers.values():
            courier.join_and_close(until_s)
        self._clerk.end()

    def step(self) -> bool:
        """Delivers what is due now in the caller's thread, for one that has not begun by `start`; stores how far all
        is. False: nothing was due."""
        stepped = [courier.step() for courier in self._couriers.values()]
        self._clerk.flush()
        return any(stepped)

    def enqueue(self, incidents: Iterable[Incident]) -> int:
        """Messages for what has changed since the last ones; safe to call again with the same incidents.

        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again with the same incidents.
        """
        made = self._untold(self._messages(incidents))
        if made:
            self._store.outbox.write([each.row for each in made])
        self._clerk.look()
        return self._hand_over(made)

    def enqueue_unstored(self, incidents: Iterable[Incident]) -> int:
        """The same while the store fails or hangs: an alarm must not wait for a disk. Told from memory, and stored when
        the store works again; until then a file keeps it (`unstored.py`). Never blocks.

        Returns:
            How many messages were made.
        """
        made = self._messages(incidents, blind=True)
        self._unstored.note(each.row for each in made)
        for each in made:
            self._clerk.note(each.row)
        return self._hand_over(made)

    def sweep(self, incidents: Mapping[str, Incident]) -> int:
        """What time alone calls for: incidents whose silence is over, that are told again, or whose message was given
        up long ago. To be called now and then, with all that are open.

        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again.
        """
        if not self._couriers:
            return 0
        self._end_unknown(incidents)
        open_ = [i for i in incidents.values() if i.closed_ms is None]
        self.refresh(open_)
        least_ms = self.routes.least_repeat_ms
        due_ms = None if least_ms is None else self._now_ms() - least_ms
        with self._lock:
            self._muted &= incidents.keys()
            self._missed &= incidents.keys()
            looked_at = self._muted | self._missed
            due = [i for i in open_ if i.id in looked_at or (due_ms is not None and self._told_before(i.id, due_ms))]
        return self.enqueue(due)

    def _end_unknown(self, incidents: Mapping[str, Incident]) -> None:
        """Raises StoreError."""
        ends = self._unstored.ends(incidents, self._now_ms())
        if ends:
            self._store.outbox.write(ends)
        self._unstored.ended(self._now_ms())
        for row in ends:
            if (courier := self._couriers.get(row.notifier)) is not None:
                courier.add(row)

    def _told_before(self, incident: str, ts_ms: int) -> bool:
        """Whether a receiver was told last so long ago, or it is not known; with the lock held."""
        for name in self._couriers:
            told = self._told.get((incident, name), NEVER)
            if told is not None and told.at_ms <= ts_ms:
                return True
        return False

    def refresh(self, incidents: Iterable[Incident]) -> None:
        """Tells those again that forget what they do not hear of; nothing of it is stored, as each says the same. Under
        a silence too, and while the store fails: else they would say that it is over. Never blocks; from any thread."""
        forgetful = [c for c in self._couriers.values() if c.notifier.repeat_s is not None]
        if not forgetful:
            return
        now_ms = self._now_ms()
        kept: dict[Key, int] = {}
        refreshed = self._refreshed
        for incident in incidents:
            if incident.closed_ms is not None:
                continue
            for courier in forgetful:
                key = (incident.id, courier.notifier.name)
                with self._lock:
                    told = self._told.get(key)
                    if told is not None:
                        self._told.move_to_end(key)  # or newer ones push it out, and it is refreshed no more
                if told is None or told.closed or told.unsent:
                    continue
                kept[key] = max(refreshed.get(key, 0), told.at_ms)
                if now_ms - kept[key] < 1000 * (courier.notifier.repeat_s or 0):
                    continue
                kept[key] = now_ms
                courier.refresh(
                    OutboxRow(
                        f"msg_{incident.id}_{now_ms}_{key[1]}", incident.id, key[1],
                        self._body(REPEATED, incident, now_ms), now_ms, next_ms=now_ms,
                    )
                )  # fmt: skip
        self._refreshed = kept

    def _messages(self, incidents: Iterable[Incident], blind: bool = False) -> list[Message]:
        """Each message that is due.

        Args:
            blind: the store is not asked; what is not in memory is taken not to have been told.
        """
        incidents = list(incidents)
        if not incidents or not self._couriers:
            return []
        now_ms = self._now_ms()
        with self._lock:
            self._groups.take(incidents)
            events = [(self._groups.of(incident), self._groups.owed(incident)) for incident in incidents]
        known = self._recall({i.id for i in incidents}, blind)
        made: list[Message] = []
        for incident, (event, owed) in zip(incidents, events, strict=True):
            muted = incident.closed_ms is None and self.silences.of(incident, now_ms) is not None
            targets = {} if muted else self.routes.targets(incident)
            with self._lock:
                (self._muted.add if muted else self._muted.discard)(incident.id)
            for name, courier in self._couriers.items():
                key, target = (incident.id, name), targets.get(name)
                told = known.get(key)
                stands_for = event if target is not None and target.group else None
                kind = transition(incident, told, target, now_ms=now_ms, owed=owed)
                if kind is not None:
                    wait_ms = target.wait_ms if target is not None and kind == OPENED and not of_guard(incident) else 0
                    row = self._row(courier, kind, incident, stands_for, told, now_ms, wait_ms)
                    made.append(Message(row, incident, courier, kind, owed, target))
                    known[key] = made[-1].after(told)
        return made

    def _untold(self, made: Iterable[Message]) -> list[Message]:
        """Without what was told from memory while the store was asked: delivered, it would wait there again."""
        kept: list[Message] = []
        later: dict[Key, NotificationState] = {}
        with self._lock:
            for each in made:
                told = later.get(each.key) or self._told.get(each.key)
                if each.key not in self._told or each.due(told):
                    later[each.key] = each.after(told)
                    kept.append(each)
        return kept

    def _hand_over(self, made: Iterable[Message]) -> int:
        """To those that deliver, but what was told from memory while the store kept us waiting."""
        count = 0
        for each in made:
            with self._lock:
                told = self._told.get(each.key)
                if each.key in self._told and not each.due(told):
                    continue
                self._remember(each.key, each.after(told))
                if each.row.state != "pending":
                    self._missed.add(each.incident.id)
            count += 1
            if each.row.state == "pending":
                each.courier.add(each.row)
            if each.row.next_ms > each.row.created_ms:
                self._waiting[each.key] = each.row.id, each.incident
            else:
                self._waiting.pop(each.key, None)
        if any(of_guard(each.incident) for each in made):
            self._withdraw()
        return count

    def _withdraw(self) -> None:
        """Openings that still wait, and that a mass event stands for now, are not sent."""
        for key, (id_, incident) in list(self._waiting.items()):
            with self._lock:
                event = self._groups.of(incident)
            if event is None:
                continue
            state, detail = instead_of(event)
            if self._couriers[key[1]].withdraw(id_, state, detail):
                with self._lock:
                    if (told := self._told.get(key)) is not None:
                        self._told[key] = replace(told, unsent=state)
                    self._missed.add(incident.id)
                self._waiting.pop(key, None)

    @property
    def receivers(self) -> int:
        """How many receivers there are; 0: nobody is notified."""
        return len(self._notifiers)

    def _fresh(self) -> dict[str, DeliveryWorker]:
        return {
            n.name: DeliveryWorker(self._store, n, self._delays_s, self._now_ms, self._clerk, self._note_given_up)
            for n in self._notifiers
        }

    def _note_given_up(self, row: OutboxRow, kind: str) -> None:
        if kind in NEWS:
            return
        key = (row.incident_id, row.notifier)
        with self._lock:
            told = self._told.get(key)
            if told is not None:
                self._told[key] = given_up(told, kind)
            self._missed.add(row.incident_id)

    def _recall(self, incidents: set[str], blind: bool) -> dict[Key, NotificationState | None]:
        """What each receiver was told of these incidents."""
        keys = [(id_, name) for id_ in incidents for name in self._couriers]
        with self._lock:
            unknown = {key[0] for key in keys if key not in self._told}
        stored = told_by(self._store.outbox.of_incidents(*unknown)) if unknown and not blind else {}
        known: dict[Key, NotificationState | None] = {}
        with self._lock:
            for key in keys:
                if key in self._told:  # else it was told of meanwhile
                    self._told.move_to_end(key)
                elif not blind:
                    self._remember(key, stored.get(key))
                known[key] = told = self._told.get(key)
                if told is not None and (told.missed or told.unsent):
                    self._missed.add(key[0])
        return known

    def _remember(self, key: Key, told: NotificationState | None) -> None:
        self._told[key] = told
        self._told.move_to_end(key)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

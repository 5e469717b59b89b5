"""The outbox: every message is in the store before its first try and leaves it delivered or given up.

A restart loses none and sends none anew: what was told of an incident is read back from the outbox itself. Each
receiver has a thread of its own, so that a slow one delays nobody else; and what becomes of messages is stored by
another, so that a store that hangs delays none. What a mass event's message stands for (`grouping.py`) is stored as
grouped, and not sent; such a message is sent again each time that its nodes have doubled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drover_collector.guard_breaker import of_guard
from drover_collector.notify.courier import MAX_PENDING, Clerk, Courier
from drover_collector.notify.grouping import Grouping
from drover_collector.notify.webhook import Webhook, message
from drover_collector.store import OutboxRow, Store
from drover_proto.events import SEVERITY_ORDER, WANTED_ORDER, Incident, Severity, Wanted, stronger, worse
from drover_proto.times import iso

log = logging.getLogger(__name__)

# Waits between tries: eight tries over 56 minutes, which outlasts a restart or a failover of a receiver.
DELAYS_S: tuple[float, ...] = (5, 15, 60, 180, 420, 900, 1800)
GROUPED = "grouped"  # state of a message that is not sent
REMEMBERED = 20_000  # (incident, receiver) pairs whose last message is kept in memory; others are read from the store


@dataclass(frozen=True, slots=True)
class Told:
    """What a receiver has been told of an incident, the strongest of each, and whether it was told of the end."""

    severity: Severity
    action: Wanted
    closed: bool
    members: int = 0
    grouped: bool = False  # its opening was not sent: a mass event's message stands for it


def transition(incident: Incident, told: Told | None, webhook: Webhook) -> str | None:
    """Which message, if any, `incident` calls for, given what this receiver was `told`."""
    if incident.closed_ms is not None:
        return "incident.closed" if told is not None and not told.closed else None
    if told is None or told.closed:
        return "incident.opened" if webhook.wants(incident.severity) else None
    raised = SEVERITY_ORDER.index(incident.severity) > SEVERITY_ORDER.index(told.severity) or WANTED_ORDER.index(
        incident.action
    ) > WANTED_ORDER.index(told.action)
    grown = of_guard(incident) and len(incident.members) >= 2 * max(1, told.members)
    if not raised and not grown:
        return None
    return "incident.opened" if told.grouped else "incident.changed"


@dataclass(frozen=True, slots=True)
class _Message:
    row: OutboxRow
    incident: Incident
    courier: Courier
    kind: str

    def after(self, told: Told | None) -> Told:
        one = self.incident
        return _after(told, self.kind, one.severity, one.action, len(one.members), self.row.state == GROUPED)


def tell(row: OutboxRow) -> str:
    """One line about a message for the operator: `webhook ops: incident.opened delivered 2026-11-21T06:17:00.000Z`."""
    kind = json.loads(row.payload_json)["type"]
    line = f"webhook {row.notifier}: {kind} {row.detail or 'waits for its first try'}"
    if row.state == "pending" and row.attempts:
        line += f"; try {row.attempts + 1} at {iso(row.next_ms)}"
    return line


class Outbox:
    """Writes messages for changed incidents and has them delivered. `enqueue` may block on the store."""

    def __init__(
        self,
        store: Store,
        webhooks: Sequence[Webhook],
        console_url: str,
        *,
        delays_s: Sequence[float] = DELAYS_S,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._console_url = console_url
        self._now_ms = now_ms
        self._delays_s = tuple(delays_s)
        self._webhooks = tuple(webhooks)
        self._clerk = Clerk(store, len(self._webhooks))
        self._couriers = self._fresh()
        self._lock = threading.Lock()  # of what was told; held for moments
        self._told: OrderedDict[tuple[str, str], Told | None] = OrderedDict()
        self._groups = Grouping()

    def start(self) -> None:
        """Takes up what a previous run left, and begins to deliver; also after a stop.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()  # those of a start that something else then made fail
        self._clerk = Clerk(self._store, len(self._webhooks))  # a thread starts once
        self._couriers = self._fresh()
        with self._lock:
            self._told.clear()
            self._groups = Grouping()
        for row in self._store.pending_outbox():
            courier = self._couriers.get(row.notifier)
            if courier is None:
                gone = f"given up: no webhook {row.notifier!r} is configured any more"
                self._store.write_outbox(dataclasses.replace(row, state="failed", detail=gone))
            else:
                courier.add(row)
        self._clerk.start()
        for courier in self._couriers.values():
            courier.start()

    def stop(self) -> None:
        """Ends delivery; what is pending stays so in the store."""
        for courier in self._couriers.values():
            courier.ask_to_stop()
        for courier in self._couriers.values():
            courier.join_and_close()
        self._clerk.end()

    def enqueue(self, incidents: Iterable[Incident]) -> int:
        """Messages for what has changed since the last ones; safe to call again with the same incidents.

        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again with the same incidents.
        """
        made = self._untold(self._messages(incidents))
        if made:
            self._store.write_outbox([each.row for each in made])
        self._clerk.look()
        return self._hand_over(made)

    def enqueue_unstored(self, incidents: Iterable[Incident]) -> int:
        """The same while the store fails or hangs: an alarm must not wait for a disk. Told from memory, and stored when
        the store works again. After a crash its incident may be told again, under the same id. Never blocks.

        Returns:
            How many messages were made.
        """
        made = self._messages(incidents, blind=True)
        for each in made:
            self._clerk.note(each.row)
        return self._hand_over(made)

    def _messages(self, incidents: Iterable[Incident], blind: bool = False) -> list[_Message]:
        """Each message that is due.

        Args:
            blind: the store is not asked; what is not in memory is taken not to have been told.
        """
        made: list[_Message] = []
        after: dict[tuple[str, str], Told] = {}
        incidents = list(incidents)
        with self._lock:
            self._groups.take(incidents)
            events = [self._groups.of(incident) for incident in incidents]
        for incident, event in zip(incidents, events, strict=True):
            for name, courier in self._couriers.items():
                key = (incident.id, name)
                told = after.get(key) or self._recall(key, blind)
                kind = transition(incident, told, courier.webhook)
                if kind is not None:
                    made.append(_Message(self._row(courier, kind, incident, event, told), incident, courier, kind))
                    after[key] = made[-1].after(told)
        return made

    def _untold(self, made: Iterable[_Message]) -> list[_Message]:
        """Without what was told from memory while the store was asked: delivered, it would wait there again."""
        kept: list[_Message] = []
        after: dict[tuple[str, str], Told] = {}
        with self._lock:
            for each in made:
                key = (each.incident.id, each.courier.webhook.name)
                told = after.get(key) or self._told.get(key)
                if key not in self._told or transition(each.incident, told, each.courier.webhook) == each.kind:
                    after[key] = each.after(told)
                    kept.append(each)
        return kept

    def _hand_over(self, made: Iterable[_Message]) -> int:
        """To those that deliver, but what was told from memory while the store kept us waiting."""
        count = 0
        for each in made:
            incident, courier = each.incident, each.courier
            key = (incident.id, courier.webhook.name)
            with self._lock:
                told = self._told.get(key)
                if transition(incident, told, courier.webhook) != each.kind:
                    continue
                self._remember(key, each.after(told))
            count += 1
            if each.row.state == "pending":
                courier.add(each.row)
        return count

    def _fresh(self) -> dict[str, Courier]:
        return {w.name: Courier(self._store, w, self._delays_s, self._now_ms, self._clerk) for w in self._webhooks}

    def _row(
        self, courier: Courier, kind: str, incident: Incident, event: Incident | None, told: Told | None
    ) -> OutboxRow:
        """
        Args:
            event: the mass event that stands for it.
        """
        now_ms = self._now_ms()
        closes = kind == "incident.closed"
        state, detail = "pending", ""
        if closes and told is not None and told.grouped:
            state, detail = GROUPED, "not sent, as its opening was not"
        elif event is not None and not closes:
            state, detail = GROUPED, f"not sent: mass event {event.id} was told instead"
        elif courier.full:
            state, detail = "failed", f"given up: {MAX_PENDING} older messages wait for this webhook"
        return OutboxRow(
            id=f"msg_{incident.id}_{incident.version}_{courier.webhook.name}",
            incident_id=incident.id,
            notifier=courier.webhook.name,
            payload_json=message(kind, incident, now_ms, self._console_url),
            created_ms=now_ms,
            state=state,
            next_ms=now_ms,
            detail=detail,
        )

    @property
    def pending(self) -> dict[str, int]:
        """Messages that wait, by webhook."""
        return {name: courier.waiting for name, courier in self._couriers.items()}

    @property
    def oldest_s(self) -> dict[str, float]:
        """Age of the oldest message that waits, by webhook; 0: none waits."""
        now_ms = self._now_ms()
        return {name: max(0, now_ms - courier.oldest_ms(now_ms)) / 1000 for name, courier in self._couriers.items()}

    @property
    def delivered(self) -> dict[str, float]:
        """Since the start, by webhook; likewise those below."""
        return {name: courier.delivered for name, courier in self._couriers.items()}

    @property
    def tries_failed(self) -> dict[str, float]:
        return {name: courier.tries_failed for name, courier in self._couriers.items()}

    @property
    def given_up(self) -> dict[str, float]:
        return {name: courier.given_up for name, courier in self._couriers.items()}

    @property
    def troubles(self) -> list[str]:
        """A sentence for every webhook that does not take messages now."""
        return [c.trouble for c in self._couriers.values() if c.trouble]

    def _recall(self, key: tuple[str, str], blind: bool) -> Told | None:
        with self._lock:
            if key in self._told:
                self._told.move_to_end(key)
                return self._told[key]
        if blind:
            return None
        told: Told | None = None
        for row in sorted(self._store.outbox_of(key[0]), key=lambda r: r.created_ms):
            if row.notifier == key[1]:
                body = json.loads(row.payload_json)
                data = body["data"]
                told = _after(
                    told, body["type"], Severity(data["severity"]), Wanted(data["action"]), len(data["members"]),
                    row.state == GROUPED,
                )  # fmt: skip
        with self._lock:
            if key not in self._told:  # else it was told of meanwhile
                self._remember(key, told)
            return self._told[key]

    def _remember(self, key: tuple[str, str], told: Told | None) -> None:
        self._told[key] = told
        self._told.move_to_end(key)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)


def _after(told: Told | None, kind: str, severity: Severity, action: Wanted, members: int, grouped: bool) -> Told:
    if told is None or kind == "incident.opened":
        return Told(severity, action, kind == "incident.closed", members, grouped)
    worst, most = worse(told.severity, severity), stronger(told.action, action)
    return Told(worst, most, kind == "incident.closed", max(told.members, members), told.grouped)

"""The outbox: every message is in the store before its first try and leaves it delivered or given up.

A restart loses none and sends none anew: what was told of an incident is read back from the outbox itself. Each
receiver has a thread of its own, so that a slow one delays nobody else.
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

from drover_collector.notify.webhook import Webhook, message
from drover_collector.store import OutboxRow, Store, StoreError
from drover_proto.events import SEVERITY_ORDER, WANTED_ORDER, Incident, Severity, Wanted, stronger, worse
from drover_proto.times import iso

log = logging.getLogger(__name__)

# Waits between tries: eight tries over 56 minutes, which outlasts a restart or a failover of a receiver.
DELAYS_S: tuple[float, ...] = (5, 15, 60, 180, 420, 900, 1800)
MAX_PENDING = 10_000  # per receiver, in memory
REMEMBERED = 20_000  # (incident, receiver) pairs whose last message is kept in memory; others are read from the store
FENCED_S = 1.0  # how often one that may not deliver looks whether it may
STOP_S = 2.0  # how long a stop waits for a try under way


@dataclass(frozen=True, slots=True)
class Told:
    """What a receiver has been told of an incident, the strongest of each, and whether it was told of the end."""

    severity: Severity
    action: Wanted
    closed: bool


def transition(incident: Incident, told: Told | None, webhook: Webhook) -> str | None:
    """Which message, if any, `incident` calls for, given what this receiver was `told`."""
    if incident.closed_ms is not None:
        return "incident.closed" if told is not None and not told.closed else None
    if told is None or told.closed:
        return "incident.opened" if webhook.wants(incident.severity) else None
    raised = SEVERITY_ORDER.index(incident.severity) > SEVERITY_ORDER.index(told.severity) or WANTED_ORDER.index(
        incident.action
    ) > WANTED_ORDER.index(told.action)
    return "incident.changed" if raised else None


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
        self._couriers = self._fresh()
        self._told: OrderedDict[tuple[str, str], Told | None] = OrderedDict()

    def start(self) -> None:
        """Takes up what a previous run left, and begins to deliver; also after a stop.

        Raises:
            StoreError: the store cannot be read.
        """
        self.stop()  # those of a start that something else then made fail
        self._couriers = self._fresh()  # a thread starts once
        self._told.clear()
        for row in self._store.pending_outbox():
            courier = self._couriers.get(row.notifier)
            if courier is None:
                gone = f"given up: no webhook {row.notifier!r} is configured any more"
                self._store.write_outbox(dataclasses.replace(row, state="failed", detail=gone))
            else:
                courier.add(row)
        for courier in self._couriers.values():
            courier.start()

    def stop(self) -> None:
        """Ends delivery; what is pending stays so in the store."""
        for courier in self._couriers.values():
            courier.ask_to_stop()
        for courier in self._couriers.values():
            courier.join_and_close()

    def enqueue(self, incidents: Iterable[Incident]) -> int:
        """Messages for what has changed since the last ones; safe to call again with the same incidents.

        Returns:
            How many messages were written.
        Raises:
            StoreError: nothing is lost; call again with the same incidents.
        """
        for courier in self._couriers.values():
            courier.store_unstored()
        made = self._messages(incidents)
        if made:
            self._store.write_outbox([row for row, _, _ in made])
        self._hand_over(made)
        return len(made)

    def enqueue_unstored(self, incidents: Iterable[Incident]) -> int:
        """The same while the store fails: an alarm must not wait for a disk. Told from memory; stored by a later
        `enqueue`. After a crash its incident may be told again, under the same id.

        Returns:
            How many messages were made.
        """
        made = self._messages(incidents, blind=True)
        for row, _, _ in made:
            self._couriers[row.notifier].note_unstored(row)
        self._hand_over(made)
        return len(made)

    def _messages(
        self, incidents: Iterable[Incident], blind: bool = False
    ) -> list[tuple[OutboxRow, tuple[str, str], Told]]:
        """Each message that is due: with its incident and receiver, and what the receiver has been told after it.

        Args:
            blind: where the store cannot be read, nothing is taken to have been told.
        """
        made: list[tuple[OutboxRow, tuple[str, str], Told]] = []
        after: dict[tuple[str, str], Told] = {}
        for incident in incidents:
            for name, courier in self._couriers.items():
                key = (incident.id, name)
                try:
                    told = after.get(key) or self._recall(key)
                except StoreError:
                    if not blind:
                        raise
                    told = None
                kind = transition(incident, told, courier.webhook)
                if kind is not None:
                    after[key] = _after(told, kind, incident.severity, incident.action)
                    made.append((self._row(courier, kind, incident), key, after[key]))
        return made

    def _hand_over(self, made: Iterable[tuple[OutboxRow, tuple[str, str], Told]]) -> None:
        for row, key, told in made:
            self._remember(key, told)
            if row.state == "pending":
                self._couriers[row.notifier].add(row)

    def _fresh(self) -> dict[str, _Courier]:
        return {w.name: _Courier(self._store, w, self._delays_s, self._now_ms) for w in self._webhooks}

    def _row(self, courier: _Courier, kind: str, incident: Incident) -> OutboxRow:
        now_ms = self._now_ms()
        full = f"given up: {MAX_PENDING} older messages wait for this webhook" if courier.full else ""
        return OutboxRow(
            id=f"msg_{incident.id}_{incident.version}_{courier.webhook.name}",
            incident_id=incident.id,
            notifier=courier.webhook.name,
            payload_json=message(kind, incident, now_ms, self._console_url),
            created_ms=now_ms,
            state="failed" if full else "pending",
            next_ms=now_ms,
            detail=full,
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

    def _recall(self, key: tuple[str, str]) -> Told | None:
        if key in self._told:
            self._told.move_to_end(key)
            return self._told[key]
        told: Told | None = None
        for row in sorted(self._store.outbox_of(key[0]), key=lambda r: r.created_ms):
            if row.notifier == key[1]:
                body = json.loads(row.payload_json)
                data = body["data"]
                told = _after(told, body["type"], Severity(data["severity"]), Wanted(data["action"]))
        self._remember(key, told)
        return told

    def _remember(self, key: tuple[str, str], told: Told | None) -> None:
        self._told[key] = told
        self._told.move_to_end(key)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)


def _after(told: Told | None, kind: str, severity: Severity, action: Wanted) -> Told:
    if told is None or kind == "incident.opened":
        return Told(severity, action, kind == "incident.closed")
    return Told(worse(told.severity, severity), stronger(told.action, action), kind == "incident.closed")


class _Courier(threading.Thread):
    """Delivers the messages of one webhook, those of one incident in their order."""

    def __init__(self, store: Store, webhook: Webhook, delays_s: Sequence[float], now_ms: Callable[[], int]) -> None:
        super().__init__(name=f"webhook-{webhook.name}", daemon=True)
        self.webhook = webhook
        self.trouble = ""
        self.delivered = self.tries_failed = self.given_up = 0
        self._store = store
        self._delays_s = tuple(delays_s)
        self._now_ms = now_ms
        self._rows: dict[str, OutboxRow] = {}  # pending ones, oldest first
        self._changed = threading.Condition()
        self._unstored: dict[str, OutboxRow] = {}  # newest states that the store does not have
        self._stopping = False
        self._abandoned = False  # the store may be closed by now

    @property
    def full(self) -> bool:
        return len(self._rows) >= MAX_PENDING

    @property
    def waiting(self) -> int:
        return len(self._rows)

    def oldest_ms(self, none_ms: int) -> int:
        """When the oldest message that waits was made."""
        rows = list(self._rows.values())  # without the lock, which is held while an outcome is stored
        return min((row.created_ms for row in rows), default=none_ms)

    def add(self, row: OutboxRow) -> None:
        with self._changed:
            self._rows[row.id] = row
            self._changed.notify()

    def note_unstored(self, row: OutboxRow) -> None:
        """The store does not take this state of a message: it gets it from `store_unstored`."""
        with self._changed:
            self._unstored[row.id] = row
            if len(self._unstored) > MAX_PENDING:
                del self._unstored[next(iter(self._unstored))]

    def store_unstored(self) -> None:
        """
        Raises:
            StoreError: again the next time.
        """
        with self._changed:
            if self._unstored:
                self._store.write_outbox(list(self._unstored.values()))
                self._unstored.clear()

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join_and_close(self) -> None:
        """A try still under way after STOP_S is left behind: its message stays pending and goes again, same id."""
        if self.is_alive():
            self.join(STOP_S)
        with self._changed:
            self._abandoned = True
        if not self.is_alive():
            self.webhook.close()

    def run(self) -> None:
        while (row := self._next()) is not None:
            try:
                self._store.fence()
            except StoreError:  # another collector delivers it, unless the lease comes back
                self._rest(FENCED_S)
                continue
            try:
                result = self.webhook.deliver(row.id, row.payload_json.encode(), self._now_ms())
                self._settle(row, result.delivered, result.detail)
            except Exception as error:  # whatever one message does, the thread must serve the next
                log.exception("webhook %s: message %s", self.webhook.name, row.id)
                self._settle(row, False, f"failed ({type(error).__name__})")

    def _next(self) -> OutboxRow | None:
        """Waits for a message that is due; None when asked to stop."""
        with self._changed:
            while not self._stopping:
                first_of_incident: dict[str, OutboxRow] = {}
                for row in self._rows.values():
                    first_of_incident.setdefault(row.incident_id, row)
                row_due = min(first_of_incident.values(), key=lambda r: (r.next_ms, r.created_ms), default=None)
                if row_due is None:
                    self._changed.wait()
                    continue
                wait_ms = row_due.next_ms - self._now_ms()
                if wait_ms <= 0:
                    return row_due
                self._changed.wait(wait_ms / 1000)
        return None

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait(seconds)

    def _settle(self, row: OutboxRow, delivered: bool, detail: str) -> None:
        now_ms, attempts = self._now_ms(), row.attempts + 1
        if delivered:
            row = dataclasses.replace(row, state="delivered", attempts=attempts, detail=f"delivered {iso(now_ms)}")
            self.trouble = ""
            self.delivered += 1
        elif attempts > len(self._delays_s):
            row = dataclasses.replace(row, state="failed", attempts=attempts, detail=f"given up: {detail}")
            self.given_up += 1
        else:
            next_ms = now_ms + round(self._delays_s[attempts - 1] * 1000)
            row = dataclasses.replace(row, attempts=attempts, next_ms=next_ms, detail=f"failed: {detail}")
        if not delivered:
            self.tries_failed += 1
            self.trouble = f"Webhook {self.webhook.name} does not take messages: {detail.rstrip('?.')}."
            log.warning("webhook %s: message %s, try %d: %s", self.webhook.name, row.id, attempts, detail)
        with self._changed:
            if self._abandoned:
                return
            if row.state == "pending":
                self._rows[row.id] = row
            else:
                self._rows.pop(row.id, None)
            try:
                self._store.write_outbox(row)
                self._unstored.pop(row.id, None)
            except Exception as error:  # noqa: BLE001  # again after a restart, by the id that receivers know
                self.note_unstored(row)
                log.warning("webhook %s: message %s: outcome not stored: %s", self.webhook.name, row.id, error)

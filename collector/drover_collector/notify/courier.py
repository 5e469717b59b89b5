"""Delivery of messages: a thread for each webhook, and one that stores how far they are."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from drover_collector.notify.webhook import Webhook
from drover_collector.store import OutboxRow, Store, StoreError
from drover_proto.times import iso

log = logging.getLogger(__name__)

MAX_PENDING = 10_000  # per receiver, in memory
FENCED_S = 1.0  # how often one that may not deliver looks whether it may
STOP_S = 2.0  # how long a stop waits for a try under way
RETRY_S = 5.0  # after the store has failed


class Clerk(threading.Thread):
    """Stores how far messages are, tried until the store takes it."""

    def __init__(self, store: Store, webhooks: int) -> None:
        super().__init__(name="outbox", daemon=True)
        self._store = store
        self._room = MAX_PENDING * max(1, webhooks)
        self._rows: dict[str, OutboxRow] = {}  # newest states that the store does not have
        self._changed = threading.Condition()
        self._due = self._stopping = False

    def note(self, row: OutboxRow) -> None:
        with self._changed:
            self._rows[row.id] = row
            if len(self._rows) > self._room:
                del self._rows[next(iter(self._rows))]
            self._due = True
            self._changed.notify()

    def look(self) -> None:
        """The store takes data now."""
        with self._changed:
            self._due = bool(self._rows)
            self._changed.notify()

    def end(self) -> None:
        """Stores what is left, if the store takes it now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self.is_alive():
            self.join(STOP_S)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._stopping, RETRY_S if self._rows else None)
                self._due, stopping = False, self._stopping
                rows = dict(self._rows)
            if rows:
                self._write(rows)
            if stopping:
                return

    def _write(self, rows: Mapping[str, OutboxRow]) -> None:
        try:
            self._store.write_outbox(list(rows.values()))
        except Exception as error:  # noqa: BLE001  # again later; after a restart by the ids that receivers know
            log.warning("how far %d messages are is not stored: %s", len(rows), error)
            return
        with self._changed:
            for id_, row in rows.items():
                if self._rows.get(id_) is row:
                    del self._rows[id_]


class Courier(threading.Thread):
    """Delivers the messages of one webhook, those of one incident in their order."""

    def __init__(
        self, store: Store, webhook: Webhook, delays_s: Sequence[float], now_ms: Callable[[], int], clerk: Clerk
    ) -> None:
        super().__init__(name=f"webhook-{webhook.name}", daemon=True)
        self.webhook = webhook
        self.trouble = ""
        self.delivered = self.tries_failed = self.given_up = 0
        self._store = store
        self._delays_s = tuple(delays_s)
        self._now_ms = now_ms
        self._rows: dict[str, OutboxRow] = {}  # pending ones, oldest first
        self._changed = threading.Condition()
        self._clerk = clerk
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
        rows = list(self._rows.values())
        return min((row.created_ms for row in rows), default=none_ms)

    def add(self, row: OutboxRow) -> None:
        with self._changed:
            self._rows[row.id] = row
            self._changed.notify()

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
            self._clerk.note(row)

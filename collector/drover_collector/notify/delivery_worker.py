"""Deliver the messages of one receiver in a thread of its own, so that a slow receiver delays no other."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drover_collector.notify.base import Delivery, Notifier
from drover_collector.notify.delivery_recorder import DeliveryRecorder
from drover_collector.notify.message_queue import MAX_PENDING, MessageQueue
from drover_collector.notify.state import (
    AGAIN_MS,
    CHANGED,
    CLOSED,
    FAILED,
    GROUPED,
    NOT_SENT,
    OPENED,
    UPDATES,
    kind_of,
)
from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.times import iso

log = logging.getLogger(__name__)

CLOCK_S = 1.0  # between looks at the clock while a message waits: it may be set
FENCED_S = 1.0  # between checks whether this collector may deliver again
ENDS_MS = 7 * 86_400_000  # how long an end is tried: without it a receiver shows the fault for ever
MAX_WAIT_S = 900.0  # the longest wait that a receiver can ask for (429); a later alarm is of no use


@dataclass(slots=True)
class DeliveryStats:
    """Counts since the start. `trouble`: why the receiver does not accept messages now; "": it does."""

    delivered: int = 0
    tries_failed: int = 0
    given_up: int = 0
    trouble: str = ""


class DeliveryWorker(threading.Thread):
    """Delivers the messages of one receiver, those of one incident in their order.

    Args:
        delays_s: waits between attempts; after the last the message is given up.
        on_given_up: called with each message that is given up, and its kind.
    """

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        delays_s: Sequence[float],
        now_ms: Callable[[], int],
        recorder: DeliveryRecorder,
        on_given_up: Callable[[OutboxRow, str], None] = lambda _row, _kind: None,
    ) -> None:
        super().__init__(name=f"{notifier.kind}-{notifier.name}", daemon=True)
        self.notifier = notifier
        self.stats = DeliveryStats()
        self._store = store
        self._delays_s = tuple(delays_s)
        self._now_ms = now_ms
        self._queue = MessageQueue(len(self._delays_s) + 1)
        self._unopened: dict[str, None] = {}  # incidents whose opening was given up, the oldest first
        self._paused_until_ms = 0  # the receiver asked to wait
        self._changed = threading.Condition()
        self._recorder = recorder
        self._on_given_up = on_given_up
        self._stopping = False
        self._abandoned = False  # after a stop the store may be closed

    @property
    def full(self) -> bool:
        return self.waiting >= MAX_PENDING

    @property
    def waiting(self) -> int:
        return len(self._queue.rows)

    def oldest_ms(self, default_ms: int) -> int:
        """Return when the oldest waiting message was made, or was due first if it waited for a wider incident."""
        rows = list(self._queue.rows.values())
        made_ms = (row.created_ms if row.attempts else max(row.created_ms, row.next_ms) for row in rows)
        return min(made_ms, default=default_ms)

    def add(self, row: OutboxRow) -> None:
        """Append a message behind those of the same incident.

        An opening that a route holds back (`group_wait_s`) is sent at once when the incident gets worse, and never when
        it ends. An end that keeps failing does not hold up what follows it.
        """
        with self._changed:
            now_ms = self._now_ms()
            for old in self._queue.of_incident(row.incident_id):
                if old.id in self._queue.late_ends:
                    self._skip(old, f"{old.detail}; given up: the incident has opened again", FAILED)
            held = next((r for r in self._queue.of_incident(row.incident_id) if _is_held(r, now_ms)), None)
            kind = kind_of(row)
            if held is not None and kind == CLOSED:
                self._skip_updates(row.incident_id)
                self._skip(held, "not sent: the incident ended, or became part of another, within the route's wait")
                self._skip(row, NOT_SENT)
            else:
                if held is not None and kind not in UPDATES:
                    self._queue.add(dataclasses.replace(held, next_ms=now_ms))
                self._queue.add(row)
            self._changed.notify()

    def add_repeat(self, row: OutboxRow) -> None:
        """Add a message that only repeats what the receiver knows: one attempt, not stored, dropped if others wait."""
        with self._changed:
            if not self._queue.of_incident(row.incident_id) and not self.full:
                self._queue.once.add(row.id)
                self._queue.add(row)
                self._changed.notify()

    def withdraw(self, id_: str, state: str, detail: str) -> bool:
        """Remove a message that a route holds back. Return False if it is no longer held back."""
        with self._changed:
            row = self._queue.rows.get(id_)
            if row is None or not _is_held(row, self._now_ms()):
                return False
            self._skip_updates(row.incident_id)
            self._skip(row, detail, state)
            return True

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join_and_close(self, until_s: float) -> None:
        """Wait until `until_s` (time.monotonic). A message still under way then stays pending and is sent later."""
        if self.is_alive():
            self.join(max(0.0, until_s - time.monotonic()))
        with self._changed:
            self._abandoned = True
        if not self.is_alive():
            self.notifier.close()

    def run(self) -> None:
        while (row := self._next()) is not None:
            try:
                self._store.fence()
            except StoreError:  # another collector delivers, unless the lease comes back
                self._rest(FENCED_S)
                continue
            self._try(row)

    def step(self) -> bool:
        """Deliver one message that is due, in the caller's thread. Return False if none is."""
        with self._changed:
            row = self._queue.first(self._now_ms())
        if row is None or self._due_ms(row) > self._now_ms():
            return False
        self._try(row)
        return True

    def _skip_updates(self, incident: str) -> None:
        for row in self._queue.of_incident(incident):
            if kind_of(row) in UPDATES:
                self._skip(row, NOT_SENT)

    def _skip(self, row: OutboxRow, detail: str, state: str = GROUPED) -> None:
        self._queue.remove(row.id)
        self._recorder.record(dataclasses.replace(row, state=state, detail=detail))

    def _try(self, row: OutboxRow) -> None:
        try:
            kind = kind_of(row)
            if (kind == CLOSED or kind in UPDATES) and row.incident_id in self._unopened:
                self._settle(row, kind, dataclasses.replace(row, state=GROUPED, detail=NOT_SENT))
            else:
                result = self.notifier.deliver(row.id, row.payload_json.encode(), self._now_ms())
                self._settle(row, kind, self._after(row, kind, result))
        except Exception as error:  # noqa: BLE001  # one message must not stop the thread
            frames = "".join(traceback.format_tb(error.__traceback__))  # not its text, which may hold an address or key
            log.error("%s: message %s: %s\n%s", self._who, row.id, type(error).__name__, frames)
            self._settle(row, "", self._after(row, "", Delivery(False, f"failed ({type(error).__name__})")))

    @property
    def _who(self) -> str:
        return f"{self.notifier.kind} {self.notifier.name}"

    def _due_ms(self, row: OutboxRow) -> int:
        return max(row.next_ms, self._paused_until_ms)

    def _next(self) -> OutboxRow | None:
        """Wait for a message that is due. Return None when asked to stop."""
        with self._changed:
            while not self._stopping:
                row = self._queue.first(self._now_ms())
                if row is None:
                    self._changed.wait()
                    continue
                wait_ms = self._due_ms(row) - self._now_ms()
                if wait_ms <= 0:
                    return row
                self._changed.wait(min(wait_ms / 1000, CLOCK_S))
        return None

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait(seconds)

    def _after(self, row: OutboxRow, kind: str, result: Delivery) -> OutboxRow:
        """Return the row's state after an attempt, and count the attempt."""
        now_ms, attempts = self._now_ms(), row.attempts + 1
        if result.delivered:
            self.stats.trouble = ""
            self.stats.delivered += 1
            return dataclasses.replace(row, state="delivered", attempts=attempts, detail=f"delivered {iso(now_ms)}")
        wait_s = _requested_wait_s(result)
        self._paused_until_ms = max(self._paused_until_ms, now_ms + round(wait_s * 1000))
        self.stats.tries_failed += 1
        who = f"{self._who[:1].upper()}{self._who[1:]}"
        self.stats.trouble = f"{who} does not accept messages: {result.detail.rstrip('?.')}."
        log.warning("%s: message %s, try %d: %s", self._who, row.id, attempts, result.detail)
        if self._is_tried_on(row, kind, result, attempts):
            detail = f"failed: {result.detail}; an end is tried for a week"
            return dataclasses.replace(row, attempts=attempts, next_ms=now_ms + AGAIN_MS, detail=detail)
        if row.id in self._queue.once or result.permanent or attempts > len(self._delays_s):
            return dataclasses.replace(row, state=FAILED, attempts=attempts, detail=f"given up: {result.detail}")
        next_ms = now_ms + round(max(self._delays_s[attempts - 1], wait_s) * 1000)
        return dataclasses.replace(row, attempts=attempts, next_ms=next_ms, detail=f"failed: {result.detail}")

    def _settle(self, before: OutboxRow, kind: str, row: OutboxRow) -> None:
        """Queue or remove the message according to its new state `row`, and have that stored."""
        repeat = before.id in self._queue.once
        lost = row.state == FAILED and not repeat
        self.stats.given_up += lost
        with self._changed:
            if self._abandoned:
                return
            self._queue.once.discard(row.id)
            if repeat and row.state == FAILED:  # each of the others would wait as long for this receiver
                self._queue.remove_repeats()
            if row.state == "pending":
                self._queue.add(row)
            else:
                self._queue.remove(row.id)
                self._note_opening(row, kind, lost)
                if row.state == "delivered":
                    self._retry_late_ends()
            if not repeat:
                self._recorder.record(row)
        if lost:
            self._on_given_up(row, kind)

    def _is_tried_on(self, row: OutboxRow, kind: str, result: Delivery, attempts: int) -> bool:
        """Whether this is an end that is tried for a week, while the queue has room for news."""
        failed = kind == CLOSED and attempts > len(self._delays_s) and not result.permanent
        return failed and self._now_ms() - row.created_ms < ENDS_MS and self.waiting < MAX_PENDING // 2

    def _retry_late_ends(self) -> None:
        """Send at once the ends that failed before: the receiver accepts messages again."""
        now_ms = self._now_ms()
        for row in [self._queue.rows[id_] for id_ in self._queue.late_ends]:
            if row.next_ms > now_ms:
                self._queue.add(dataclasses.replace(row, next_ms=now_ms))

    def _note_opening(self, row: OutboxRow, kind: str, lost: bool) -> None:
        """Remember incidents whose opening was given up: the receiver does not know them."""
        if lost and kind == OPENED:
            self._unopened[row.incident_id] = None
            if len(self._unopened) > MAX_PENDING:
                del self._unopened[next(iter(self._unopened))]
        elif kind == CLOSED or (not lost and kind in (OPENED, CHANGED)):
            self._unopened.pop(row.incident_id, None)


def _is_held(row: OutboxRow, now_ms: int) -> bool:
    """Whether a route holds the message back: it waits, and not after a failed attempt."""
    return not row.attempts and row.next_ms > now_ms


def _requested_wait_s(result: Delivery) -> float:
    wait_s = result.retry_after_s
    return 0.0 if wait_s is None or not math.isfinite(wait_s) else min(max(wait_s, 0.0), MAX_WAIT_S)

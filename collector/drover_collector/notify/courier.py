"""Delivery of messages: a thread for each receiver, so that a slow one delays nobody else."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Sequence

from drover_collector.notify.base import Delivery, Notifier
from drover_collector.notify.clerk import MAX_PENDING, STOP_S, Clerk
from drover_collector.notify.telling import CHANGED, CLOSED, FAILED, GROUPED, NOT_SENT, OPENED, kind_of
from drover_collector.store import OutboxRow, Store, StoreError
from drover_proto.times import iso

log = logging.getLogger(__name__)

FENCED_S = 1.0  # how often one that may not deliver looks whether it may
MOST_ASKED_S = 900.0  # a receiver may ask us to wait (429), but not for longer: alarms would be of no use any more


class Courier(threading.Thread):
    """Delivers the messages of one receiver, those of one incident in their order.

    Args:
        on_given_up: told of each message that is given up, with its kind.
    """

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        delays_s: Sequence[float],
        now_ms: Callable[[], int],
        clerk: Clerk,
        on_given_up: Callable[[OutboxRow, str], None] = lambda _row, _kind: None,
    ) -> None:
        super().__init__(name=f"{notifier.kind}-{notifier.name}", daemon=True)
        self.notifier = notifier
        self.trouble = ""
        self.delivered = self.tries_failed = self.given_up = 0
        self._store = store
        self._delays_s = tuple(delays_s)
        self._now_ms = now_ms
        self._rows: dict[str, OutboxRow] = {}  # pending ones, oldest first
        self._fleeting: set[str] = set()  # ids of those that are not stored, and tried once: see `refresh`
        self._unopened: dict[str, None] = {}  # incidents whose opening was given up, the oldest first
        self._pause_ms = 0  # nothing is sent before: the receiver asked for it
        self._changed = threading.Condition()
        self._clerk = clerk
        self._on_given_up = on_given_up
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
        """Behind what waits of the same incident. An opening that waits for what explains it (`group_wait_s`) goes at
        once when there is more to tell, and not at all when it is over."""
        with self._changed:
            now_ms = self._now_ms()
            waits = next(
                (r for r in self._rows.values() if r.incident_id == row.incident_id and _held(r, now_ms)), None
            )
            if waits is not None and kind_of(row) == CLOSED:
                self._not_sent(waits, "not sent: over, or part of another, before its time to wait was")
                self._not_sent(row, NOT_SENT)
            else:
                if waits is not None:
                    self._rows[waits.id] = dataclasses.replace(waits, next_ms=now_ms)
                self._rows[row.id] = row
            self._changed.notify()

    def withdraw(self, id_: str, detail: str) -> bool:
        """Whether a message was still waiting for what explains it: then it is not sent."""
        with self._changed:
            row = self._rows.get(id_)
            if row is None or not _held(row, self._now_ms()):
                return False
            self._not_sent(row, detail)
            return True

    def _not_sent(self, row: OutboxRow, detail: str) -> None:
        self._rows.pop(row.id, None)
        self._clerk.note(dataclasses.replace(row, state=GROUPED, detail=detail))

    def refresh(self, row: OutboxRow) -> None:
        """A message that only says that what was told holds still: nothing where others wait, nor while the receiver is
        away; tried once, as the next one says the same."""
        with self._changed:
            waits = any(held.incident_id == row.incident_id for held in self._rows.values())
            if not waits and not self.full:
                self._rows[row.id] = row
                self._fleeting.add(row.id)
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
            self.notifier.close()

    def run(self) -> None:
        while (row := self._next()) is not None:
            try:
                self._store.fence()
            except StoreError:  # another collector delivers it, unless the lease comes back
                self._rest(FENCED_S)
                continue
            self._try(row)

    def step(self) -> bool:
        """Delivers one message that is due, in the caller's thread; False: there is none."""
        with self._changed:
            row = self._first()
        if row is None or self._due_ms(row) > self._now_ms():
            return False
        self._try(row)
        return True

    def _try(self, row: OutboxRow) -> None:
        try:
            kind = kind_of(row)
            if kind == CLOSED and row.incident_id in self._unopened:
                self._settle(row, kind, None)
            else:
                self._settle(row, kind, self.notifier.deliver(row.id, row.payload_json.encode(), self._now_ms()))
        except Exception as error:  # whatever one message does, the thread must serve the next
            log.exception("%s: message %s", self._who, row.id)
            self._settle(row, "", Delivery(False, f"failed ({type(error).__name__})"))

    @property
    def _who(self) -> str:
        return f"{self.notifier.kind} {self.notifier.name}"

    def _first(self) -> OutboxRow | None:
        """What is due, news before what only says that all holds still; else what is due first."""
        first_of_incident: dict[str, OutboxRow] = {}
        for row in self._rows.values():
            first_of_incident.setdefault(row.incident_id, row)
        now_ms = self._now_ms()
        return min(
            first_of_incident.values(),
            key=lambda r: (r.next_ms > now_ms, r.id in self._fleeting, r.next_ms, r.created_ms),
            default=None,
        )

    def _due_ms(self, row: OutboxRow) -> int:
        return max(row.next_ms, self._pause_ms)

    def _next(self) -> OutboxRow | None:
        """Waits for a message that is due; None when asked to stop."""
        with self._changed:
            while not self._stopping:
                row = self._first()
                if row is None:
                    self._changed.wait()
                    continue
                wait_ms = self._due_ms(row) - self._now_ms()
                if wait_ms <= 0:
                    return row
                self._changed.wait(wait_ms / 1000)
        return None

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait(seconds)

    def _settle(self, row: OutboxRow, kind: str, result: Delivery | None) -> None:
        """`result`: None: it was not sent, as its opening was not."""
        now_ms, attempts = self._now_ms(), row.attempts + 1
        fleeting = row.id in self._fleeting
        lost = False
        if result is None:
            row = dataclasses.replace(row, state=GROUPED, detail=NOT_SENT)
        elif result.delivered:
            row = dataclasses.replace(row, state="delivered", attempts=attempts, detail=f"delivered {iso(now_ms)}")
            self.trouble = ""
            self.delivered += 1
        elif fleeting or result.permanent or attempts > len(self._delays_s):
            row = dataclasses.replace(row, state=FAILED, attempts=attempts, detail=f"given up: {result.detail}")
            lost = not fleeting
            self.given_up += lost
        else:
            wait_s = max(self._delays_s[attempts - 1], _asked(result))
            row = dataclasses.replace(
                row, attempts=attempts, next_ms=now_ms + round(wait_s * 1000), detail=f"failed: {result.detail}"
            )
        if result is not None and not result.delivered:
            self._pause_ms = max(self._pause_ms, now_ms + round(_asked(result) * 1000))
            self.tries_failed += 1
            self.trouble = (
                f"{self._who[:1].upper()}{self._who[1:]} does not take messages: {result.detail.rstrip('?.')}."
            )
            log.warning("%s: message %s, try %d: %s", self._who, row.id, attempts, result.detail)
        with self._changed:
            if self._abandoned:
                return
            self._fleeting.discard(row.id)
            if fleeting and row.state == FAILED:  # each would wait as long for a receiver that is away
                for id_ in self._fleeting:
                    self._rows.pop(id_, None)
                self._fleeting.clear()
            if row.state == "pending":
                self._rows[row.id] = row
            else:
                self._rows.pop(row.id, None)
                self._note_opening(row, kind, lost)
            if not fleeting:
                self._clerk.note(row)
        if lost:
            self._on_given_up(row, kind)

    def _note_opening(self, row: OutboxRow, kind: str, lost: bool) -> None:
        """What waits behind an opening that was given up does not know of it yet."""
        if lost and kind == OPENED:
            self._unopened[row.incident_id] = None
            if len(self._unopened) > MAX_PENDING:
                del self._unopened[next(iter(self._unopened))]
        elif kind == CLOSED or (not lost and kind in (OPENED, CHANGED)):
            self._unopened.pop(row.incident_id, None)


def _held(row: OutboxRow, now_ms: int) -> bool:
    """Whether it waits for its first try, and not because that failed."""
    return not row.attempts and row.next_ms > now_ms


def _asked(result: Delivery) -> float:
    """Seconds that the receiver asks us to wait, within bounds."""
    asked = result.retry_after_s
    return 0.0 if asked is None or not math.isfinite(asked) else min(max(asked, 0.0), MOST_ASKED_S)

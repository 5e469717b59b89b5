"""Delivery of messages: a thread for each receiver, so that a slow one delays nobody else."""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from drover_collector.notify.base import Delivery, Notifier
from drover_collector.notify.delivery_recorder import MAX_PENDING, DeliveryRecorder
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
    said_by,
)
from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.model.events import SEVERITY_ORDER
from drover_core.times import iso

log = logging.getLogger(__name__)

FENCED_S = 1.0  # how often one that may not deliver looks whether it may
ENDS_MS = 7 * 86_400_000  # an end is tried for so long: who was told of a fault must not take it for open for ever
MOST_ASKED_S = 900.0  # a receiver may ask us to wait (429), but not for longer: alarms would be of no use any more


class DeliveryWorker(threading.Thread):
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
        clerk: DeliveryRecorder,
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
        self._queues: dict[str, dict[str, None]] = {}  # incident -> ids, in their order
        self._later: list[tuple[int, int, str]] = []  # heap of (next_ms, created_ms, id)
        self._ready: list[tuple[bool, int, int, int, str]] = []  # heap of what is due, the most urgent first
        self._fleeting: set[str] = set()  # ids of those that are not stored, and tried once: see `refresh`
        self._tired: dict[str, None] = {}  # ids of ends that have failed as often as others are tried
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
        """When the oldest message that waits was made, or was to go first where it waits for what explains it."""
        rows = list(self._rows.values())
        made_ms = (row.created_ms if row.attempts else max(row.created_ms, row.next_ms) for row in rows)
        return min(made_ms, default=none_ms)

    def add(self, row: OutboxRow) -> None:
        """Behind what waits of the same incident. An opening that waits for what explains it (`group_wait_s`) goes at
        once when there is more to tell, and not at all when it is over. An end that was tried in vain for long does not
        hold up what comes after it."""
        with self._changed:
            now_ms = self._now_ms()
            for id_ in [id_ for id_ in self._queues.get(row.incident_id, ()) if id_ in self._tired]:
                self._not_sent(self._rows[id_], f"{self._rows[id_].detail}; given up: it has come back", FAILED)
            of_incident = (self._rows[id_] for id_ in self._queues.get(row.incident_id, ()))
            waits = next((r for r in of_incident if _held(r, now_ms)), None)
            kind = kind_of(row)
            if waits is not None and kind == CLOSED:
                self._drop_news(row.incident_id)
                self._not_sent(waits, "not sent: over, or part of another, before its time to wait was")
                self._not_sent(row, NOT_SENT)
            else:
                if waits is not None and kind not in UPDATES:
                    self._keep(dataclasses.replace(waits, next_ms=now_ms))
                self._keep(row)
            self._changed.notify()

    def withdraw(self, id_: str, state: str, detail: str) -> bool:
        """Whether a message was still waiting for what explains it: then it is not sent."""
        with self._changed:
            row = self._rows.get(id_)
            if row is None or not _held(row, self._now_ms()):
                return False
            self._drop_news(row.incident_id)
            self._not_sent(row, detail, state)
            return True

    def _drop_news(self, incident: str) -> None:
        """Of an opening that is not sent."""
        for row in [self._rows[id_] for id_ in self._queues.get(incident, ())]:
            if kind_of(row) in UPDATES:
                self._not_sent(row, NOT_SENT)

    def _not_sent(self, row: OutboxRow, detail: str, state: str = GROUPED) -> None:
        self._drop(row.id)
        self._clerk.note(dataclasses.replace(row, state=state, detail=detail))

    def refresh(self, row: OutboxRow) -> None:
        """A message that only says that what was told holds still: nothing where others wait, nor while the receiver is
        away; tried once, as the next one says the same."""
        with self._changed:
            if row.incident_id not in self._queues and not self.full:
                self._fleeting.add(row.id)
                self._keep(row)
                self._changed.notify()

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join_and_close(self, until_s: float) -> None:
        """A try still under way at `until_s` (time.monotonic) is left behind: its message stays pending and goes
        again, same id."""
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
            if (kind == CLOSED or kind in UPDATES) and row.incident_id in self._unopened:
                self._settle(row, kind, None)
            else:
                self._settle(row, kind, self.notifier.deliver(row.id, row.payload_json.encode(), self._now_ms()))
        except Exception as error:  # noqa: BLE001  # whatever one message does, the thread must serve the next
            frames = "".join(traceback.format_tb(error.__traceback__))  # its words may hold an address or a key
            log.error("%s: message %s: %s\n%s", self._who, row.id, type(error).__name__, frames)
            self._settle(row, "", Delivery(False, f"failed ({type(error).__name__})"))

    @property
    def _who(self) -> str:
        return f"{self.notifier.kind} {self.notifier.name}"

    def _first(self) -> OutboxRow | None:
        """What is due: news before what only says that all holds still, the worst first, as a storm of warnings may
        take an hour; else what is due first."""
        now_ms = self._now_ms()
        while self._later and self._later[0][0] <= now_ms:
            next_ms, created_ms, id_ = heapq.heappop(self._later)
            if (row := self._standing(id_, next_ms)) is not None:
                urgency = -SEVERITY_ORDER.index(said_by(row).severity)
                heapq.heappush(self._ready, (id_ in self._fleeting, urgency, next_ms, created_ms, id_))
        while self._ready:
            if (row := self._standing(self._ready[0][4], self._ready[0][2])) is not None:
                return row
            heapq.heappop(self._ready)
        while self._later:
            if (row := self._standing(self._later[0][2], self._later[0][0])) is not None:
                return row
            heapq.heappop(self._later)
        return None

    def _standing(self, id_: str, next_ms: int) -> OutboxRow | None:
        """The message, if it still waits until then, and none of the same incident is before it."""
        row = self._rows.get(id_)
        good = row is not None and row.next_ms == next_ms and next(iter(self._queues[row.incident_id])) == id_
        return row if good else None

    def _keep(self, row: OutboxRow) -> None:
        """A new message, or a new state of one in its place."""
        self._rows[row.id] = row
        if row.attempts > len(self._delays_s):
            self._tired[row.id] = None
        self._queues.setdefault(row.incident_id, {})[row.id] = None
        self._line_up(row.incident_id)

    def _drop(self, id_: str) -> None:
        row = self._rows.pop(id_, None)
        self._tired.pop(id_, None)
        if row is not None:
            queue = self._queues[row.incident_id]
            del queue[id_]
            if queue:
                self._line_up(row.incident_id)
            else:
                del self._queues[row.incident_id]

    def _line_up(self, incident: str) -> None:
        """The first of an incident; what it was before is passed over when its turn comes."""
        row = self._rows[next(iter(self._queues[incident]))]
        heapq.heappush(self._later, (row.next_ms, row.created_ms, row.id))

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
        elif self._goes_on(row, kind, result, attempts):
            detail = f"failed: {result.detail}; an end is tried for a week"
            row = dataclasses.replace(row, attempts=attempts, next_ms=now_ms + AGAIN_MS, detail=detail)
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
                f"{self._who[:1].upper()}{self._who[1:]} does not accept messages: {result.detail.rstrip('?.')}."
            )
            log.warning("%s: message %s, try %d: %s", self._who, row.id, attempts, result.detail)
        with self._changed:
            if self._abandoned:
                return
            self._fleeting.discard(row.id)
            if fleeting and row.state == FAILED:  # each would wait as long for a receiver that is away
                for id_ in self._fleeting:
                    self._drop(id_)
                self._fleeting.clear()
            if row.state == "pending":
                self._keep(row)
            else:
                self._drop(row.id)
                self._note_opening(row, kind, lost)
                if row.state == "delivered":
                    self._wake_tired(now_ms)
            if not fleeting:
                self._clerk.note(row)
        if lost:
            self._on_given_up(row, kind)

    def _goes_on(self, row: OutboxRow, kind: str, result: Delivery, attempts: int) -> bool:
        """Whether this is an end that is tried on and on, as long as there is room for news."""
        last = kind == CLOSED and attempts > len(self._delays_s) and not result.permanent
        return last and self._now_ms() - row.created_ms < ENDS_MS and len(self._rows) < MAX_PENDING // 2

    def _wake_tired(self, now_ms: int) -> None:
        """The receiver takes messages again."""
        for row in [self._rows[id_] for id_ in self._tired]:
            if row.next_ms > now_ms:
                self._keep(dataclasses.replace(row, next_ms=now_ms))

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

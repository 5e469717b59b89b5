"""A bounded queue and the thread that empties it into one receiver. A receiver that fails or hangs slows nothing else.

What does not fit drops the oldest, counted and logged. A failure is tried again after a pause that doubles; a receiver
that asks for longer (Retry-After) gets it, up to a limit: a year would be the end of the export.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from drover_collector.exporters.http_post import Answer

log = logging.getLogger(__name__)

FIRST_S, MOST_S = 0.5, 60.0  # pauses after failures
RETRY_AFTER_MOST_S = 300.0
STOP_S = 3.0  # for a request under way at a stop


class Sized(Protocol):
    """What waits. `size`: bytes it holds in memory; `count`: samples or lines in it; `ts_ms`: what time it is of."""

    @property
    def size(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def ts_ms(self) -> int: ...


T = TypeVar("T", bound=Sized)


@dataclass(slots=True)
class SendStatus:
    """Since the start, for metrics and logs.

    Attributes:
        sent: samples or lines that the receiver took. dropped: for want of room. refused: by the receiver, for good.
        failures: requests that failed and are tried again. trouble: why the newest request failed; "": it did not.
        waiting, waiting_bytes: not sent yet. oldest_ms: time of the oldest of these; 0: none waits.
        taken_ms: time of the newest item that the receiver took; 0: none. latency_s: how late it was taken.
    """

    kind: str = ""

    sent: int = 0
    dropped: int = 0
    refused: int = 0
    failures: int = 0
    trouble: str = ""
    waiting: int = 0
    waiting_bytes: int = 0
    oldest_ms: int = 0
    taken_ms: int = 0
    latency_s: float | None = None


class Sender(Generic[T]):
    """Sends items in their order, from a thread of its own between `start` and `close`.

    Args:
        send: sends the next request of the first items that wait. Returns (its outcome, samples or lines in it, how
            many items are done with it). An item that takes several requests is done with its last. After a trouble
            that is not permanent it is called with the same first item.
        most_bytes: of what waits. most_items: that `send` gets at once. kind: of the exporter, for its status.
    """

    def __init__(
        self, name: str, most_bytes: int, send: Callable[[Sequence[T]], tuple[Answer, int, int]], most_items: int = 1,
        kind: str = "",
    ) -> None:  # fmt: skip
        self.name, self.status = name, SendStatus(kind)
        self._most_bytes, self._most_items, self._send = most_bytes, most_items, send
        self._waiting: deque[T] = deque()  # the first may be under way
        self._part = 0  # of the first item: samples that are done
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._pause_s = FIRST_S
        self._logged_drop = False

    def put(self, item: T) -> None:
        """Add an item. Returns at once, from any thread."""
        with self._changed:
            self._waiting.append(item)
            status = self.status
            status.waiting += item.count
            status.waiting_bytes += item.size
            # The newest stays, also where it alone is larger: else a small bound would be an export of nothing.
            while status.waiting_bytes > self._most_bytes and len(self._waiting) > 1:
                self._drop(self._waiting.popleft())
            status.oldest_ms = self._waiting[0].ts_ms
            self._changed.notify_all()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"export-{self.name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Begin no further request."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread; what waits is lost, and said."""
        self.end()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if self.status.waiting:
            log.warning("export %s: stopped with %d not sent", self.name, self.status.waiting)

    def _drop(self, item: T) -> None:
        rest, self._part = item.count - self._part, 0
        self.status.waiting -= rest
        self.status.waiting_bytes -= item.size
        self.status.dropped += rest
        if not self._logged_drop:
            self._logged_drop = True
            log.error(
                "export %s: its queue of %d bytes is full; the oldest are dropped (%s)",
                self.name, self._most_bytes, self.status.trouble or "the receiver is too slow",
            )  # fmt: skip

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping.is_set())
                if self._stopping.is_set():
                    return
                items = list(islice(self._waiting, self._most_items))
            self._step(items)

    def _step(self, items: list[T]) -> None:
        answer, count, done = self._tried(items)
        status = self.status
        if answer.trouble and not answer.permanent:
            status.failures += 1
            self._note(answer.trouble)
            asked_s = min(answer.retry_after_s or 0.0, RETRY_AFTER_MOST_S)
            self._stopping.wait(max(asked_s, self._pause_s * random.uniform(0.8, 1.2)))
            self._pause_s = min(self._pause_s * 2, MOST_S)
            return
        self._pause_s = FIRST_S
        refused = 0 if not answer.trouble else min(answer.refused or count, count)
        status.refused += refused
        status.sent += count - refused
        if not answer.trouble and done:
            status.taken_ms = items[done - 1].ts_ms
            status.latency_s = max(0.0, time.time() - status.taken_ms / 1000)
        self._settle(items, count, done)
        self._note(answer.trouble)

    def _tried(self, items: list[T]) -> tuple[Answer, int, int]:
        try:
            return self._send(items)
        except Exception as error:  # a defect: the same item would fail for ever, and keep back all after it
            if len(items) > 1:  # one of them: those before it are sent one by one, and it is the only one lost
                return self._tried(items[:1])
            log.exception("export %s: an item could not be sent", self.name)
            rest = max(0, items[0].count - self._part)
            return Answer(f"a defect ({type(error).__name__})", permanent=True), rest, 1

    def _settle(self, items: list[T], count: int, done: int) -> None:
        """Take what is done out of the queue, from which some of it may have been dropped meanwhile."""
        with self._changed:
            if not done:
                if self._waiting and self._waiting[0] is items[0]:
                    self._part += count
                    self.status.waiting -= count
                return
            for item in items[:done]:
                if self._waiting and self._waiting[0] is item:
                    self.status.waiting -= item.count - self._part
                    self.status.waiting_bytes -= item.size
                    self._part = 0
                    self._waiting.popleft()
            self.status.oldest_ms = self._waiting[0].ts_ms if self._waiting else 0

    def _note(self, trouble: str) -> None:
        """Log a trouble when it begins, changes and ends."""
        if trouble != self.status.trouble:
            if trouble:
                log.warning("export %s: %s", self.name, trouble)
            else:
                log.warning("export %s: it works again; %d wait, %d were dropped", self.name, self.status.waiting,
                            self.status.dropped)  # fmt: skip
                self._logged_drop = False
        self.status.trouble = trouble

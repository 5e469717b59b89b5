"""Read sources in threads that can be abandoned: a call into a driver may block for ever in the kernel.

One thread reads many sources, one after another: with a thread each, the process would wake ten times as often. If one
takes too long, the rest is taken from that thread (`Round.take_rest`) and read by others. The thread is left behind and
ends when its read returns. A source is never read again while its last read has not returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drover_agent.sources.base import Reading, Source

T = TypeVar("T")
_Work = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


@dataclass(slots=True, eq=False, repr=False)
class ReadOutcome:
    """How a read went."""

    seconds: float
    reading: Reading | None  # None: it raised, see `error`
    error: Exception | None = None


def measured(read: Callable[[], Reading]) -> ReadOutcome:
    """Read now, in this thread. Never raises: see `ReadOutcome.error`."""
    began = time.perf_counter()
    try:
        reading = read()
    except Exception as error:  # noqa: BLE001  # what a source raises is its outcome; the sampler reports it
        return ReadOutcome(time.perf_counter() - began, None, error)
    return ReadOutcome(time.perf_counter() - began, reading)


class Worker:
    """One daemon thread that runs one job at a time. The process does not wait for it at exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, read: Callable[[], Reading]) -> asyncio.Future[ReadOutcome]:
        """Run `read`. For the event loop's thread. An exception of `read` is in the outcome, not in the future."""
        return self.start(lambda: measured(read))

    def start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work`, which does not raise. For the event loop's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((work, loop, future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future = job
            result = work()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent ends
                loop.call_soon_threadsafe(_settle, future, result)

    def close(self) -> None:
        """End the thread when it is free."""
        self._jobs.put(None)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


class Read(Generic[T]):
    """One read of one source for `owner`.

    A source may have `ask(now_ms)`: it is called first, and returns a function that makes the Reading without waiting.
    """

    __slots__ = ("_asked_s", "_finish", "_now_ms", "_source", "outcome", "owner")

    def __init__(self, owner: T, source: Source, now_ms: int) -> None:
        self.owner, self._source, self._now_ms = owner, source, now_ms
        self.outcome: ReadOutcome | None = None  # set once
        self._finish: Callable[[], Reading] | None = None
        self._asked_s = 0.0

    def run(self) -> bool:
        """Read, or ask. Return whether `finish` must follow."""
        if ask := getattr(self._source, "ask", None):
            began = time.perf_counter()
            try:
                self._finish = ask(self._now_ms)
            except Exception:  # noqa: BLE001  # `read` fails the same way
                self._finish = None
            self._asked_s = time.perf_counter() - began
        if self._finish is None:
            self.outcome = measured(lambda: self._source.read(self._now_ms))
        return self._finish is not None

    def finish(self) -> None:
        assert self._finish is not None
        outcome = measured(self._finish)
        outcome.seconds += self._asked_s
        self.outcome = outcome


class Round(Generic[T]):
    """Reads in order, in one thread. `done` is set when all that were not taken away have returned."""

    def __init__(self, worker: Worker, reads: Sequence[Read[T]]) -> None:
        self._worker = worker
        self._left = deque(reads)  # `popleft` is atomic: a read is begun here or taken away, never both
        self._asked: deque[Read[T]] = deque()  # the same: a read is finished here or by `take_rest`
        self._begun = list(reads)
        self.done: asyncio.Future[None] = worker.start(self._run)

    def _run(self) -> None:
        while True:
            try:
                read = self._left.popleft()
            except IndexError:
                return self._finish()
            if read.run():
                self._asked.append(read)

    def _finish(self) -> None:
        """Finish the reads that were asked, together after the last one."""
        with contextlib.suppress(IndexError):
            while True:
                self._asked.popleft().finish()

    @property
    def begun(self) -> Sequence[Read[T]]:
        """Reads that were not taken away, in order."""
        return self._begun

    def take_rest(self) -> list[Read[T]]:
        """Take away the reads that were not begun. The thread ends when its present read returns."""
        rest: list[Read[T]] = []
        with contextlib.suppress(IndexError):
            while True:
                rest.insert(
                    0, self._left.pop()
                )  # from the other end than `_run`, so that the begun reads stay together
        self._begun = self._begun[: len(self._begun) - len(rest)]
        self._finish()  # the thread may hang before it does
        self._worker.close()
        return rest


class Guard:
    """A source with its own thread, for a caller without a schedule."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._worker = Worker(source.name)
        self._running: asyncio.Future[ReadOutcome] | None = None

    @property
    def busy(self) -> bool:
        """Whether an earlier read has not returned."""
        return self._running is not None and not self._running.done()

    async def read(self, now_ms: int, limit_s: float) -> ReadOutcome | None:
        """Read the source; None if it did not return within `limit_s`. Call it only if not `busy`."""
        self._running = self._worker.submit(lambda: self.source.read(now_ms))
        done, _ = await asyncio.wait([self._running], timeout=limit_s)
        return self._running.result() if done else None

    def close(self) -> None:
        """Close the source in its thread, and do not wait for it."""
        if not self.busy:
            self._worker.submit(self._close_source)
        self._worker.close()

    def _close_source(self) -> Reading:
        self.source.close()
        return Reading()

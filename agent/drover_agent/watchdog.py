"""Runs a source's reads where they can be abandoned: a call into a driver may block for ever in the kernel.

Each source has one thread of its own. While a read has not returned, no other is started for that source, so a hung
device costs one thread and its own values, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from drover_agent.sources.base import Reading, Source


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a read went, as seen from outside."""

    seconds: float
    reading: Reading | None  # None: it raised, see `error`
    error: Exception | None = None


class Worker:
    """One daemon thread that runs one thing at a time; at exit the process does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Reading], Future[Outcome]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, read: Callable[[], Reading]) -> asyncio.Future[Outcome]:
        """Run `read`; for the event loop's thread. The future never carries an exception of `read`: see Outcome."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Outcome] = Future()
        self._jobs.put((read, future))
        return asyncio.wrap_future(future)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            read, future = job
            began = time.perf_counter()
            try:
                outcome = Outcome(0.0, read())
            except Exception as error:  # noqa: BLE001  # whatever a source raises is its outcome, told by the sampler
                outcome = Outcome(0.0, None, error)
            if not future.cancelled():
                future.set_result(Outcome(time.perf_counter() - began, outcome.reading, outcome.error))

    def close(self) -> None:
        """Let the thread end when it is free."""
        self._jobs.put(None)


class Guard:
    """A source behind its worker."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._worker = Worker(source.name)
        self._running: asyncio.Future[Outcome] | None = None

    @property
    def busy(self) -> bool:
        """Whether an earlier read has not returned."""
        return self._running is not None and not self._running.done()

    async def read(self, now_ms: int, limit_s: float) -> Outcome | None:
        """Read the source; None when it did not return within `limit_s`. Call it only when not `busy`."""
        self._running = self._worker.submit(lambda: self.source.read(now_ms))
        done, _ = await asyncio.wait([self._running], timeout=limit_s)
        return self._running.result() if done else None

    async def returned(self) -> None:
        """Wait, however long, until the abandoned read has returned; its result is stale and dropped."""
        if self._running is not None:
            await asyncio.wait([self._running])

    def close(self) -> None:
        """Close the source where it may block, and do not wait for it."""
        if not self.busy:
            self._worker.submit(self._close_source)
        self._worker.close()

    def _close_source(self) -> Reading:
        self.source.close()
        return Reading()

"""Run work that may wait for a disk in a thread, so that the event loop goes on while a write or sync takes long.

A disk that hangs (NFS without its server, a dying drive) keeps the thread in the kernel. It is a daemon thread, so the
process can end without it. The caller bounds how many jobs wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DiskThread:
    """Runs jobs in the order in which they were submitted. The thread starts with the first one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` and set its result or exception on the future. For the event loop's thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # raised where the future is awaited
                settle, outcome = _fail, error
            else:
                settle, outcome = _finish, result  # type: ignore[assignment]  # each function with its argument
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, future, outcome)

        self._put(job)
        return future

    def run_last(self, work: Callable[[], None], limit_s: float) -> bool:
        """Run `work` after all others and wait for it.

        Returns:
            False if it took longer than `limit_s`. It goes on if the disk answers before the process ends.
        """
        done = threading.Event()

        def job() -> None:
            try:
                work()
            finally:
                done.set()

        self._put(job)
        return done.wait(limit_s)

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when its jobs are done."""
        if self._thread is not None:
            self._jobs.put(_end)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not _end:
            job()


def _end() -> None: ...


def _finish(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

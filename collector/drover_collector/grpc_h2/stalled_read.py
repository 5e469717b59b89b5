"""Ends a read that would not end.

OpenSSL takes key updates of TLS 1.3 within one call as long as they come, 26 us each, where others stop at 32, and
Python cannot tell it to. Meanwhile the event loop stands still, so a thread looks: by the loop's own CPU, as a machine
that is too busy, or was stopped, makes any read long.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

LOOK_S = 0.2
ENDLESS_S = 0.1  # of CPU in one read; one that brings data takes some 20 us, and one key update comes in 2**24 records
# What is in the kernel is read to its end even then. HTTP/2's window lets no more than 64 KiB be under way.
QUEUE_BYTES = 131_072


class Cut(Protocol):
    def cut(self) -> None:
        """End its connection, from another thread."""


class StalledReadWatchdog:
    """
    Attributes:
        reading: who reads, in a tuple of its own for each read; None: nobody.
    """

    def __init__(self) -> None:
        self.reading: tuple[Cut] | None = None
        self._before: tuple[Cut] | None = None
        self._used_s = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """In the thread of the event loop."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.Thread(target=self._run, args=(clock,), name="endless-reads", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def look(self, used_s: float) -> None:
        """`used_s`: CPU of the event loop so far."""
        reading = self.reading
        if reading is None or reading is not self._before:
            self._before, self._used_s = reading, used_s
        elif used_s - self._used_s >= ENDLESS_S:
            reading[0].cut()

    def _run(self, clock: int) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look(time.clock_gettime(clock))

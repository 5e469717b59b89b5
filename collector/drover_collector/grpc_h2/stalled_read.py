"""End a TLS read that does not return.

OpenSSL processes key updates of TLS 1.3 within one call as long as they arrive, 26 us each; other libraries stop at
32, and Python cannot set a limit. The event loop stands still meanwhile, so a thread watches it. It measures the
loop's own CPU time, as a busy or suspended machine makes any read long.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

CHECK_S = 0.2
STALLED_S = 0.1  # of CPU in one read; one with data takes some 20 us, and honest peers update keys every 2**24 records
# What the kernel holds is still read. HTTP/2's window lets at most 64 KiB be under way.
QUEUE_BYTES = 131_072


class Closable(Protocol):
    def shut_down(self) -> None:
        """End the connection, from another thread."""


class StalledReadWatchdog:
    """
    Attributes:
        reading: the connection being read, in a new tuple for each read; None between reads.
    """

    def __init__(self) -> None:
        self.reading: tuple[Closable] | None = None
        self._before: tuple[Closable] | None = None
        self._cpu_s = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the calling thread, which runs the event loop."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.Thread(target=self._run, args=(clock,), name="stalled-reads", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def check(self, cpu_s: float) -> None:
        """End the connection whose read has used STALLED_S. `cpu_s`: CPU time of the event loop so far."""
        reading = self.reading
        if reading is None or reading is not self._before:
            self._before, self._cpu_s = reading, cpu_s
        elif cpu_s - self._cpu_s >= STALLED_S:
            reading[0].shut_down()

    def _run(self, clock: int) -> None:
        while not self._stopping.wait(CHECK_S):
            self.check(time.clock_gettime(clock))

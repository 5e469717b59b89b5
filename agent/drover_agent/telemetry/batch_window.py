"""When one batch ends and the next begins."""

from __future__ import annotations

import logging
import zlib
from typing import NamedTuple

from drover_agent.clock import Clock

log = logging.getLogger(__name__)

LATE_WINDOWS = 2  # rows older than this many batches come from a clock that was set back, not from a slow source
SET_BACK_MS = 500  # a wall clock that falls this far behind the steady one was set back


class Boundary(NamedTuple):
    """What a reading's time says about the batch before it."""

    set_back: bool  # the wall clock was set back since the last reading
    ended: bool  # the reading belongs to another batch


class BatchWindow:
    """Windows of `batch_s` seconds. Each node's begin at another phase, so that not all agents send at once."""

    def __init__(self, node: str, batch_s: float, clock: Clock) -> None:
        self._clock = clock
        self._length_ms = max(int(batch_s * 1000), 1)
        self._phase_ms = stable_hash(node) % self._length_ms
        self._last_ms = -1  # of the newest reading
        self._ahead_ms = self._wall_ahead_ms()
        self.number: int | None = None  # of the window that readings belong to now

    def advance(self, ts_ms: int) -> Boundary:
        """Take the time of a reading and return what ends before it."""
        ahead_ms = self._wall_ahead_ms()
        set_back = ahead_ms < self._ahead_ms - SET_BACK_MS
        if ts_ms == self._last_ms and not set_back:  # of the same tick
            return Boundary(set_back=False, ended=False)
        self._last_ms = ts_ms
        if set_back:
            log.warning("The clock was set back by %.1f s.", (self._ahead_ms - ahead_ms) / 1000)
        self._ahead_ms = ahead_ms
        number = (ts_ms + self._phase_ms) // self._length_ms
        ended = self.number is None or not self.number - LATE_WINDOWS <= number <= self.number
        if ended:
            self.number = number
        return Boundary(set_back, ended)

    def _wall_ahead_ms(self) -> float:
        """Return by how much the wall clock leads the steady one: it jumps only if it is set, or after a sleep."""
        return self._clock.now_ms() - self._clock.monotonic() * 1000


def stable_hash(text: str) -> int:
    """Return a number that is the same in every run, unlike `hash`."""
    return zlib.crc32(text.encode())

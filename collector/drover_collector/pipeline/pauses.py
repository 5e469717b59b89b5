"""Times in which this process stood still: it heard nobody then, and that is no silence of the nodes."""

from __future__ import annotations

import logging

from drover_collector.fleet.buckets import BUCKET_MS
from drover_core.times import iso

log = logging.getLogger(__name__)

PAUSE_MS = 5_000  # a loop that wakes every second and was away for this long: the process stood still
SETTLE_MS = 30_000  # after that, agents need this long to be back: their reconnect backoff


class Pauses:
    """The newest time this process stood still. `notice` every second."""

    def __init__(self, now_ms: int) -> None:
        self.awake_ms = now_ms
        self.newest: tuple[int, int] | None = None  # from, to

    def notice(self, now_ms: int) -> None:
        """A process that was stopped, or a machine that slept, heard nobody: that is no silence of the nodes."""
        if now_ms - self.awake_ms > PAUSE_MS:
            self.newest = (self.awake_ms, now_ms)
            log.warning("this process stood still from %s to %s", iso(self.awake_ms), iso(now_ms))
        self.awake_ms = now_ms

    def stood_still(self, start_ms: int) -> bool:
        """Whether silence in a bucket may be this process's own: it was paused, or agents were still coming back."""
        if self.newest is None:
            return False
        paused_ms, resumed_ms = self.newest
        return start_ms + BUCKET_MS > paused_ms and start_ms < resumed_ms + SETTLE_MS

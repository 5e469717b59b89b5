"""Records of one lane, read from the disk before they are asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from drover_agent.spool.disk_jobs import Sendable
from drover_agent.spool.memory_tail import MemoryTail
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)


class ReadAhead:
    """For the event loop's thread. At most one read of a lane waits for the disk's."""

    def __init__(
        self,
        lane: int,
        tail: MemoryTail,
        read: Callable[[int], asyncio.Future[list[Sendable]]],
        ready: Callable[[], None],
    ) -> None:
        """`read`: of what follows a sequence; `ready` is called when it came."""
        self._lane, self._tail, self._read, self._ready = lane, tail, read, ready
        self._after = -1  # the first of `_found` follows it
        self._found: deque[Sendable] = deque()
        self._asked = self._closed = False
        self._end: int | None = None  # nothing follows this one, until the next Welcome

    def next(self, after: int) -> Sendable | None:
        """The first record above `after`. None: there is none, or it is being read."""
        if self._after != after:
            self._after = after
            self._found.clear()
        if self._found:
            found = self._found.popleft()
            self._after = found[0]
            return found
        if not self._asked and not self._closed and (self._end is None or after < self._end):
            self._asked = True
            before = self._tail.nothing_from
            self._read(after).add_done_callback(lambda job: self._was_read(after, before, job))
        return None

    def _was_read(self, after: int, before: int, job: asyncio.Future[list[Sendable]]) -> None:
        self._asked = False
        if job.cancelled() or self._closed:
            return
        if error := job.exception():  # a fault in Drover; asked for again when something else wakes the stream
            log.error("spool: what waits cannot be read: %s", error, exc_info=error)
            return
        found = job.result()
        if self._after == after:
            if self._lane != pb.BACKFILL:
                found = [one for one in found if one[0] <= before]
                if not found and before == self._tail.nothing_from:
                    self._tail.nothing_from = after
            elif not found:  # what the plan names may be gone (dropped, damaged)
                self._end = after
            self._found.extend(found)
        self._ready()

    def again(self) -> None:
        """What is to be sent has changed."""
        self._after, self._end = -1, None

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed = True

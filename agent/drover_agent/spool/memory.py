"""Records of the spool in memory: the newest of each log, and those read from the disk ahead of their sending."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from drover_agent.spool.messages import Outgoing
from drover_agent.spool.record_format import Stored
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class MemoryTail:
    """The newest records of one log: all from sequence `first` on, without gaps.

    Attributes:
        submitted: records up to this one were given to the disk thread.
        written: the disk thread is done with records up to this one.
        released: records up to this one may be sent.
        nothing_from: no record between this one and `first` waits for a collector.
        write_failed: the last job raised, so the next one begins after `written`.
    """

    next_seq: int
    first: int
    submitted: int
    written: int
    released: int
    nothing_from: int
    write_failed: bool = False
    records: deque[Stored] = field(default_factory=deque)
    size: int = 0

    @classmethod
    def behind(cls, seq: int) -> MemoryTail:
        """Return the empty tail of a log whose records below `seq` are all on the disk."""
        last = seq - 1
        return cls(seq, seq, last, last, last, last)

    @property
    def last(self) -> int:
        return self.next_seq - 1

    def add(self, ts_ms: int, payload: bytes) -> None:
        self.records.append(Stored(self.next_seq, ts_ms, payload))
        self.size += len(payload)
        self.next_seq += 1

    def first_above(self, seq: int) -> Stored | None:
        at = max(seq + 1 - self.first, 0)
        return self.records[at] if at < len(self.records) else None

    def submit(self) -> list[Stored]:
        """Return the records that the disk thread has not yet, and count them as submitted."""
        if self.write_failed:
            self.write_failed, self.submitted = False, self.written
        begin = max(len(self.records) - (self.last - self.submitted), 0)
        self.submitted = self.last
        return [self.records[at] for at in range(begin, len(self.records))]

    def pop(self) -> Stored:
        """Remove the oldest record from memory and return it."""
        record = self.records.popleft()
        self.size -= len(record.payload)
        self.first = record.seq + 1
        return record


class ReadAhead:
    """Records of one lane that were read from the disk before a stream asked for them.

    For the event loop's thread. At most one read of a lane waits for the disk thread.
    """

    def __init__(
        self,
        lane: int,
        tail: MemoryTail,
        read: Callable[[int], asyncio.Future[list[Outgoing]]],
        on_ready: Callable[[], None],
    ) -> None:
        """`read` starts to read what follows a sequence; `on_ready` is called when something was read."""
        self._lane = lane
        self._tail = tail
        self._read = read
        self._on_ready = on_ready
        self._after = -1  # the first of `_found` follows this sequence
        self._found: deque[Outgoing] = deque()
        self._reading = self._closed = False
        self._end: int | None = None  # nothing follows this sequence until the next Welcome

    def next(self, after: int) -> Outgoing | None:
        """Return the first record above `after`. None: there is none, or it is being read."""
        if self._after != after:
            self._after = after
            self._found.clear()
        if self._found:
            found = self._found.popleft()
            self._after = found.seq
            return found
        if not self._reading and not self._closed and (self._end is None or after < self._end):
            self._reading = True
            limit = self._tail.nothing_from
            self._read(after).add_done_callback(lambda job: self._finish_read(after, limit, job))
        return None

    def _finish_read(self, after: int, limit: int, job: asyncio.Future[list[Outgoing]]) -> None:
        self._reading = False
        if job.cancelled() or self._closed:
            return
        if error := job.exception():  # a defect in Drover; the next wake-up of the stream reads again
            log.error("Reading the spool failed: %s", error, exc_info=error)
            return
        found = job.result()
        if self._after == after:
            if self._lane != pb.BACKFILL:
                found = [item for item in found if item.seq <= limit]
                if not found and limit == self._tail.nothing_from:
                    self._tail.nothing_from = after
            elif not found:  # the records that the plan names may have been dropped or damaged
                self._end = after
            self._found.extend(found)
        self._on_ready()

    def restart(self) -> None:
        """Forget what was read: the order of what is sent has changed."""
        self._after, self._end = -1, None

    def close(self) -> None:
        self._closed = True

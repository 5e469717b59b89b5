"""The newest records of a log in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from drover_agent.spool.record_format import Stored


@dataclass(slots=True, eq=False, repr=False)
class MemoryTail:
    """The newest records of one log: all from `first` on are in memory, without gaps."""

    next_seq: int
    first: int
    records: deque[Stored] = field(default_factory=deque)
    size: int = 0
    given: int = 0  # up to here the thread was given them
    released: int = 0  # up to here they may be sent
    written: int = 0  # up to here the thread is done with them
    nothing_from: int = 0  # no record that waits lies above this and below `first`

    @classmethod
    def behind(cls, seq: int) -> MemoryTail:
        """Of a log whose records below `seq` are all on the disk."""
        return cls(seq, seq, given=seq - 1, released=seq - 1, written=seq - 1, nothing_from=seq - 1)

    def add(self, ts_ms: int, payload: bytes) -> None:
        self.records.append(Stored(self.next_seq, ts_ms, payload))
        self.size += len(payload)
        self.next_seq += 1

    def above(self, seq: int) -> Stored | None:
        at = max(seq + 1 - self.first, 0)
        return self.records[at] if at < len(self.records) else None

    def new(self) -> list[Stored]:
        """What the thread was not given yet."""
        count = min(self.next_seq - 1 - self.given, len(self.records))
        return [self.records[at] for at in range(len(self.records) - count, len(self.records))]

    def pop(self) -> Stored:
        record = self.records.popleft()
        self.size -= len(record.payload)
        self.first = record.seq + 1
        return record

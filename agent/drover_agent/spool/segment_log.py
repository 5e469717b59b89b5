"""An append-only log in segment files. The spool has two: events and telemetry.

A file is named PREFIX-FIRST.seg and holds frames (`record_format.py`).

Creating a file reserves RESERVED sequences for it, and every start begins a new file. So a sequence is never used
twice, not even if a power cut lost the frames that carried it.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from drover_agent.atomic_file import sync_folder
from drover_agent.spool.record_format import (
    FRAME,
    Segment,
    Stored,
    frame,
    frame_end,
    scan,
)

log = logging.getLogger(__name__)

RESERVED = 2**20  # sequences of a file, far more than it can hold
CACHED_INDEXES = 4


class RefusedRecords:
    """Records in memory that the disk has refused, oldest first. Above `limit_bytes` the oldest are dropped."""

    def __init__(self, limit_bytes: int, is_held: Callable[[int], bool]) -> None:
        self._limit_bytes = limit_bytes
        self._is_held = is_held
        self.records: deque[Stored] = deque()
        self._size = 0
        self.lost = 0  # dropped so far that no collector held

    def add(self, record: Stored) -> None:
        self.records.append(record)
        self._size += len(record.payload)
        while self._size > self._limit_bytes and len(self.records) > 1:
            self.lost += not self._is_held(self.pop().seq)

    def pop(self) -> Stored:
        """Remove the oldest record and return it."""
        record = self.records.popleft()
        self._size -= len(record.payload)
        return record


class SegmentLog:
    """The files of one prefix in a folder. Not thread-safe.

    While the disk refuses data (full, read-only, failing), records stay in memory up to `memory_bytes`. The oldest are
    dropped first. The rest is written as soon as the disk takes it.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        segment_bytes: int,
        memory_bytes: int,
        is_held: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`is_held`: returns whether a collector holds a sequence, so that dropping it loses nothing."""
        self._folder, self._prefix, self._segment_bytes = folder, prefix, segment_bytes
        self.segments: list[Segment] = []  # ascending; the last one is open for appending when `_fd` is set
        self.damaged: list[str] = []  # damage found and not yet reported
        self._known_damage: set[tuple[Path, int]] = set()  # records reported as damaged
        self.refused = RefusedRecords(memory_bytes, is_held)
        self.trouble: str | None = None  # why the disk refuses data, None if it takes it
        self.barred: str | None = None  # why nothing may be written, although the disk takes data
        self.unreadable = False  # at the start a file could not be read
        self._unsynced = False  # the last sync failed
        self._fd: int | None = None
        self._cached: deque[Segment] = deque()
        unreadable = 0
        for path in sorted(folder.glob(f"{prefix}-*.seg")):
            number = path.stem.removeprefix(f"{prefix}-")
            if not number.isdigit():
                continue
            try:
                segment, damaged = scan(path, int(number))
            except OSError as error:
                # Keep it: it may be readable later. Its name says which sequences were used.
                self.damaged.append(f"{path.name}: cannot be read: {error.strerror}")
                unreadable, self.unreadable = int(number), True
                continue
            if damaged:
                self.damaged.append(f"{path.name}: {damaged} damaged bytes skipped")
            segment.seqs, segment.offsets = None, []
            segment.closed_ms = segment.newest_ms
            self.segments.append(segment)
        newest = self.segments[-1] if self.segments else None
        self.was_empty = newest is None
        self.next_seq = max(newest.first + RESERVED, newest.last + 1) if newest else 1
        if unreadable:
            self.next_seq = max(self.next_seq, unreadable + RESERVED)
        if self._start_file():  # else only their names say which sequences were used
            for segment in [s for s in self.segments if not s.count and s.first != self.next_seq]:
                self.drop(segment)

    def _start_file(self) -> bool:
        """Begin a new file. Return False and set `trouble` if the disk refuses."""
        self._seal()
        path = self._folder / f"{self._prefix}-{self.next_seq:020d}.seg"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._set_trouble(error)
            return False
        try:
            sync_folder(self._folder)
        except OSError as error:
            self._set_trouble(error)
            with contextlib.suppress(OSError):  # the next attempt may use the same name
                path.unlink()
            self._close(descriptor)
            return False
        self._fd = descriptor
        self.segments.append(Segment(path, self.next_seq, seqs=[]))
        return True

    def _seal(self) -> None:
        if self._fd is None:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._set_trouble(error)
        descriptor, self._fd = self._fd, None
        self._close(descriptor)
        self.segments[-1].seqs, self.segments[-1].offsets = None, []

    def _close(self, descriptor: int) -> None:
        """Close a file. NFS and quotas may refuse only here; the descriptor is closed anyway."""
        try:
            os.close(descriptor)
        except OSError as error:
            self._set_trouble(error)

    def _set_trouble(self, why: OSError | str) -> None:
        text = why if isinstance(why, str) else f"{self._folder}: {why.strerror}"
        if self.trouble != text:
            log.error("The spool cannot be written: %s. Data is kept in memory.", text)
        self.trouble = text

    @property
    def is_open(self) -> bool:
        """Whether a file is open for appending."""
        return self._fd is not None

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(s.bytes for s in self.segments)

    def append(self, ts_ms: int, payload: bytes, seq: int | None = None) -> int:
        """Store one record under the next sequence, or under `seq`, which is not lower. Return its sequence.

        A disk that refuses raises nothing here: see `trouble`.
        """
        seq = self.next_seq if seq is None else seq
        self.next_seq = seq + 1
        record = Stored(seq, ts_ms, payload)
        if self.refused.records or not self._write(record):
            self.refused.add(record)
        return seq

    def retry(self) -> None:
        """Write what waits in memory if the disk takes it now."""
        while self.refused.records and self._write(self.refused.records[0]):
            self.refused.pop()
        if self._fd is None and not self.refused.records:
            self._start_file()
        if self._unsynced:
            with contextlib.suppress(OSError):  # `trouble` says why
                self.sync()
        if self.is_open and self.trouble and not (self.refused.records or self.barred or self._unsynced):
            log.warning("The spool can be written again: %s", self._folder)
            self.trouble = None

    def _write(self, record: Stored) -> bool:
        if self.barred:
            self._set_trouble(self.barred)
            return False
        data = frame(record.seq, record.ts_ms, record.payload)
        full = self._fd is not None and self.segments[-1].bytes + len(data) > self._segment_bytes
        if self._fd is None or (full and self.segments[-1].count):
            following, self.next_seq = self.next_seq, record.seq  # a file is named after its first sequence
            started = self._start_file()
            self.next_seq = following
            if not started:
                return False
        segment = self.segments[-1]
        assert self._fd is not None
        offset = segment.bytes
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._set_trouble(error)
            self._undo(segment)
            return False
        segment.add(record.seq, record.ts_ms, offset, len(data))
        return True

    def _undo(self, segment: Segment) -> None:
        """Cut off half a frame. If that fails too, the reader skips it."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, segment.bytes)
        except OSError:
            log.debug("Half a record could not be cut off in %s.", segment.path)
            segment.bytes = os.fstat(self._fd).st_size

    def rotate(self) -> None:
        """Begin the next file, unless the current one is empty."""
        if self._fd is not None and self.segments[-1].count:
            self._start_file()

    def sync(self) -> None:
        """Sync what was appended to the disk.

        Raises:
            OSError: the disk refuses.
        """
        if self._fd is None:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._unsynced = True
            self._set_trouble(error)
            raise
        self._unsynced = False

    def after(self, seq: int) -> Stored | None:
        """Return the record with the lowest sequence above `seq`."""
        for segment in self.segments:
            if segment.last > seq:
                seqs = self._index(segment)
                for at in range(bisect.bisect_right(seqs, seq), len(seqs)):
                    if found := self._read(segment, at):
                        return found
                seq = max(seq, segment.last)
        return next((record for record in self.refused.records if record.seq > seq), None)

    def at_or_before(self, seq: int) -> Stored | None:
        """Return the record with the highest sequence not above `seq`."""
        for record in reversed(self.refused.records):
            if record.seq <= seq:
                return record
        for segment in reversed(self.segments):
            if segment.count and segment.first <= seq:
                at = bisect.bisect_right(self._index(segment), seq) - 1
                while at >= 0:
                    if found := self._read(segment, at):
                        return found
                    at -= 1
        return None

    def size_between(self, low: int, high: int) -> tuple[int, int]:
        """Return (records, bytes) with low < sequence <= high."""
        records = size = 0
        for segment in self.segments:
            if not segment.count or segment.last <= low or segment.first > high:
                continue
            if segment.first > low and segment.last <= high:
                records += segment.count
                size += segment.bytes
                continue
            seqs = self._index(segment)
            begin, end = bisect.bisect_right(seqs, low), bisect.bisect_right(seqs, high)
            ends = [*segment.offsets, segment.bytes]
            records += end - begin
            size += ends[end] - ends[begin]
        waiting = [len(r.payload) for r in self.refused.records if low < r.seq <= high]
        return records + len(waiting), size + sum(waiting)

    def _index(self, segment: Segment) -> list[int]:
        if segment.seqs is not None:
            return segment.seqs
        try:
            loaded, _ = scan(segment.path, segment.first)
        except OSError as error:
            log.error("%s cannot be read: %s. Its records are lost.", segment.path, error.strerror)
            loaded = Segment(segment.path, segment.first, seqs=[])
        if loaded.count < segment.count:
            self._damaged(segment, -1, f"{segment.count - loaded.count} records can no longer be read")
            segment.count = loaded.count
        segment.seqs, segment.offsets = loaded.seqs, loaded.offsets
        self._cached.append(segment)
        if len(self._cached) > CACHED_INDEXES:
            oldest = self._cached.popleft()
            oldest.seqs, oldest.offsets = None, []
        return segment.seqs or []

    def _read(self, segment: Segment, at: int) -> Stored | None:
        ends = segment.offsets[at + 1] if at + 1 < len(segment.offsets) else segment.bytes
        begin = segment.offsets[at]
        if (segment.path, begin) in self._known_damage:
            return None
        try:
            with segment.path.open("rb") as file:
                file.seek(begin)
                data = file.read(ends - begin)
        except OSError as error:
            self._damaged(segment, begin, f"a record at byte {begin} cannot be read: {error.strerror}")
            return None
        end = frame_end(data, 0)
        if not end:
            self._damaged(segment, begin, f"a record at byte {begin} is damaged and skipped")
            return None
        _, length, _, seq, ts_ms = FRAME.unpack_from(data)
        return Stored(seq, ts_ms, data[FRAME.size : FRAME.size + length])

    def _damaged(self, segment: Segment, at: int, what: str) -> None:
        """Report once what became unreadable after the start."""
        if (segment.path, at) not in self._known_damage:
            self._known_damage.add((segment.path, at))
            log.error("%s: %s", segment.path, what)
            self.damaged.append(f"{segment.path.name}: {what}")

    def drop(self, segment: Segment) -> None:
        """Remove a closed file with its records."""
        assert self._fd is None or segment is not self.segments[-1]
        self.segments.remove(segment)
        self._known_damage = {known for known in self._known_damage if known[0] != segment.path}
        if segment in self._cached:
            self._cached.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be removed: %s", segment.path, error.strerror)

    def closed(self) -> list[Segment]:
        """Return all files but the one open for appending."""
        return self.segments[:-1] if self._fd is not None else list(self.segments)

    def close(self) -> None:
        """Write and sync what the disk takes."""
        self.retry()
        if self.refused.records:
            log.error("%s: %d records were never written: %s", self._folder, len(self.refused.records), self.trouble)
        self._seal()

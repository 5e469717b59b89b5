"""The files of a log: frames of magic, payload length, CRC32, sequence, time and payload.

An incomplete or damaged frame is skipped: the reader searches for the next magic whose checksum fits.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

MAGIC = b"\xd7DRV"
FRAME = struct.Struct("<4sIIQq")  # magic, payload length, CRC32 of what follows, sequence, ts_ms
BODY_AT = 12  # the checksum covers the frame from here on
MAX_PAYLOAD = 8 * 2**20


class Stored(NamedTuple):
    """One record of a log."""

    seq: int
    ts_ms: int
    payload: bytes


@dataclass(slots=True)
class Segment:
    """What is known of a file without reading it."""

    path: Path
    first: int  # first reserved sequence
    seqs: list[int] | None = None  # index: sequence and offset of every frame; None: not loaded
    offsets: list[int] = field(default_factory=list)
    count: int = 0
    last: int = 0  # highest sequence in it, 0 when empty
    bytes: int = 0
    oldest_ms: int = 0
    newest_ms: int = 0
    closed_ms: int = 0  # its age counts from then; 0: not closed yet

    def add(self, seq: int, ts_ms: int, offset: int, size: int) -> None:
        assert self.seqs is not None
        self.seqs.append(seq)
        self.offsets.append(offset)
        self.oldest_ms = min(self.oldest_ms, ts_ms) if self.count else ts_ms
        self.newest_ms = max(self.newest_ms, ts_ms)
        self.count += 1
        self.last = max(self.last, seq)
        self.bytes = max(self.bytes, offset + size)


def frame(seq: int, ts_ms: int, payload: bytes) -> bytes:
    body = struct.pack("<Qq", seq, ts_ms) + payload
    return MAGIC + struct.pack("<II", len(payload), zlib.crc32(body)) + body


def scan(path: Path, first: int) -> tuple[Segment, int]:
    """Index every intact frame of a file; return also the number of bytes outside of them."""
    data = path.read_bytes()
    segment = Segment(path, first, seqs=[])
    at = damaged = 0
    while at < len(data):
        end = frame_end(data, at)
        if end:
            _, _, _, seq, ts_ms = FRAME.unpack_from(data, at)
            segment.add(seq, ts_ms, at, end - at)
            at = end
        else:
            following = data.find(MAGIC, at + 1)
            following = following if following >= 0 else len(data)
            damaged += following - at
            at = following
    segment.bytes = len(data)
    return segment, damaged


def frame_end(data: bytes, at: int) -> int:
    """Return where the frame at `at` ends, 0 if there is no intact one."""
    if at + FRAME.size > len(data):
        return 0
    magic, length, crc, _, _ = FRAME.unpack_from(data, at)
    end = at + FRAME.size + length
    if magic != MAGIC or length > MAX_PAYLOAD or end > len(data) or zlib.crc32(data[at + BODY_AT : end]) != crc:
        return 0
    return int(end)

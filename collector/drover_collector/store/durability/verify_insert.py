"""Verify that an insert is on the disk, before it is acknowledged.

The embedded engine (chDB 26.9) ignores errors of `write`: on a disk that is full, over its quota or broken, an INSERT
succeeds and leaves a part whose files are empty or cut off (seen with ENOSPC and EFBIG, under strace). So after each
insert the file sizes of new parts are compared with those in each part's `checksums.txt`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

_INSERTED = re.compile(r"[0-9a-z-]+_\d+_\d+_0")  # a part's folder: partition, first and last insert, level 0: no merge
_HEAD = b"checksums format version: 4\n"  # ClickHouse's MergeTreeDataPartChecksums.cpp
_FRAME_AT, _FRAME_HEAD = len(_HEAD) + 16, 9  # behind a hash: method, size with this head, size of what is in it
_CODECS = {0x82: "lz4_raw", 0x90: "zstd"}


@dataclass(slots=True)
class _Table:
    folder: Path | None  # None: the table has none
    seen: set[str] = field(default_factory=set)  # parts that were checked
    broken: set[str] = field(default_factory=set)  # which hold nothing that was acknowledged
    found: int = 0  # how many broken parts were found


class InsertVerifier:
    """Verifies inserts into one embedded store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[str, _Table] = {}

    def before(self, table: str, folder_of: Callable[[], Path | None]) -> int:
        """Return what `after` needs when the insert is done. `folder_of`: returns the folder of the table's parts."""
        with self._lock:
            known = self._tables.get(table)
            if known is None or (known.folder is not None and not known.folder.exists()):
                folder = folder_of()
                known = self._tables[table] = _Table(folder, set(_inserted(folder)))
            return known.found

    def after(self, table: str, before: int) -> bool:
        """Return whether all parts written since `before` are complete. If not, repeat all inserts since then."""
        with self._lock:
            known = self._tables[table]
            names = set(_inserted(known.folder))
            for name in names - known.seen:
                if known.folder is not None and not whole(known.folder / name):
                    known.broken.add(name)
                    known.found += 1
            known.seen = names
            return known.found == before

    def take_broken(self, table: str) -> set[str]:
        """Return the broken parts to drop, each once."""
        with self._lock:
            known = self._tables[table]
            broken, known.broken = known.broken, set()
            return broken


def whole(part: Path) -> bool:
    """Return whether a part's files have the sizes in its list. A part that was merged away counts as complete."""
    try:
        sizes = {file.name: file.stat().st_size for file in part.iterdir()}
        if not sizes.get("checksums.txt") or not sizes.get("columns.txt"):
            return False
        sizes_listed = listed((part / "checksums.txt").read_bytes())
    except FileNotFoundError:
        return not part.exists()
    except (ValueError, IndexError, pa.ArrowException):
        return False
    return all(sizes.get(name) == size for name, size in sizes_listed.items())


def listed(data: bytes) -> dict[str, int]:
    """Return the sizes of a part's files, by name, from its `checksums.txt`; empty if its format is unknown.

    Raises:
        ValueError, IndexError, pa.ArrowException: it is cut off.
    """
    if not data.startswith(_HEAD) or data[_FRAME_AT] not in _CODECS:
        return {}
    size, inside = (int.from_bytes(data[_FRAME_AT + at : _FRAME_AT + at + 4], "little") for at in (1, 5))
    packed = data[_FRAME_AT + _FRAME_HEAD : _FRAME_AT + size]
    if len(packed) != size - _FRAME_HEAD:
        raise ValueError("cut off")
    text = pa.Codec(_CODECS[data[_FRAME_AT]]).decompress(packed, inside, asbytes=True)
    count, at = _number(text, 0)
    found = {}
    for _ in range(count):
        length, at = _number(text, at)
        name = text[at : at + length].decode()
        found[name], at = _number(text, at + length)
        at += 16  # its hash
        at += 1
        if text[at - 1]:  # compressed: size and hash of what is in it
            _, at = _number(text, at)
            at += 16
    return found


def _number(text: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and where the next one begins."""
    value = shift = 0
    while True:
        value |= (text[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if text[at - 1] < 128:
            return value, at


def _inserted(folder: Path | None) -> list[str]:
    if folder is None:
        return []
    try:
        return [name.name for name in folder.iterdir() if _INSERTED.fullmatch(name.name)]
    except FileNotFoundError:
        return []

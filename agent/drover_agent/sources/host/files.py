"""Files of procfs and sysfs that are read again and again: kept open, read with pread from their beginning.

procfs and sysfs make the text again for each read at offset 0 (kernel: fs/seq_file.c), so that a read is one system
call instead of three. Measured on Linux 6.18: 3 us against 17 us.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CHUNK = 16_384
WHOLE = 2_048  # a piece that is shorter is the last: the kernel fills a page but for a record that does not fit


class KeptFile:
    """One file, opened at its first reading and again after an error."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._fd = -1

    def head(self, size: int) -> str:
        """The first `size` bytes or less.

        Raises:
            OSError: it is not there, not any more, or cannot be read.
        """
        return self._read(0, size).decode("ascii", "replace")

    def text(self, *, long_records: bool = False) -> str:
        """All of it: a long file of procfs comes in pieces. `long_records`: what the kernel writes at once may be
        longer than WHOLE, so that a piece of any length may have another after it.

        Raises:
            OSError: see `head`.
        """
        pieces: list[bytes] = []
        size = 0
        while data := self._read(size, CHUNK):
            pieces.append(data)
            size += len(data)
            if len(data) < WHOLE and not long_records:  # a read at its end would have the kernel make all of it again
                break
        return b"".join(pieces).decode("ascii", "replace")

    def _read(self, offset: int, size: int) -> bytes:
        if self._fd >= 0:
            try:
                return os.pread(self._fd, size, offset)
            except OSError:  # the device behind it went; perhaps there is another one
                self.close()
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, size, offset)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KeptFiles:
    """Files whose set changes now and then: those that stay are kept open, the others are closed."""

    def __init__(self) -> None:
        self._files: dict[str, KeptFile] = {}

    def keep(self, paths: Iterable[Path]) -> None:
        """These from now on."""
        wanted = {str(path): path for path in paths}
        for path in self._files.keys() - wanted.keys():
            self._files.pop(path).close()
        for path in wanted.keys() - self._files.keys():
            self._files[path] = KeptFile(wanted[path])

    def all(self) -> list[KeptFile]:
        return list(self._files.values())

    def close(self) -> None:
        self.keep(())


def text_of(path: Path) -> str:
    """What is read once, stripped.

    Raises:
        OSError: it is not there or cannot be read.
    """
    return path.read_text("ascii", "replace").strip()

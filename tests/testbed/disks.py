"""A disk under the agent's spool that hangs or refuses on demand; everything else is the real file system's."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from drover_agent import atomic_file as files
from drover_agent.spool import segment_log as segments
from drover_agent.spool.segment_log import SegmentLog


class BadDisk:
    """Stands for `os` in the modules that write the spool. Reads of records hang too, as they do on NFS."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self._error: OSError | None = None
        self.waiting = 0  # calls that hang now
        patch.setattr(segments, "os", self)
        patch.setattr(files, "os", self)
        read = SegmentLog._read

        def reading(log: SegmentLog, *where: Any) -> Any:
            self._wait()
            return read(log, *where)

        patch.setattr(SegmentLog, "_read", reading)

    def hang(self) -> None:
        self._answers.clear()

    def refuse(self, number: int, text: str) -> None:
        """Data and new files are refused with this errno."""
        self._error = OSError(number, text)

    def mend(self) -> None:
        self._error = None
        self._answers.set()

    def _wait(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._answers.is_set():
            raise AssertionError("the event loop waits for a disk that hangs")
        self.waiting += 1
        self._answers.wait(120)
        self.waiting -= 1

    def _write(self) -> None:
        self._wait()
        if self._error is not None:
            raise self._error

    def write(self, descriptor: int, data: bytes) -> int:
        self._write()
        return os.write(descriptor, data)

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._write()
        return os.open(path, flags, mode)

    def fdatasync(self, descriptor: int) -> None:
        self._wait()
        os.fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        self._wait()
        os.fsync(descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

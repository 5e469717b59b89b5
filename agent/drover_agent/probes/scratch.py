"""A folder for a probe's process, gone when the process is, however that ended.

The process itself cannot see to it: it is killed when it must give way, and a file of a disk's probe has gigabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "drover-probe-"


@contextlib.contextmanager
def scratch(parent: str = "") -> Iterator[Path]:
    """A new folder under `parent` ("": the temporary folder), and what runs that were killed had left there is removed.

    Raises:
        OSError: none can be made there.
    """
    root = Path(parent or tempfile.gettempdir())
    _clear_up(root)
    made, descriptor = _made(root)
    try:
        try:
            yield made
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if made.exists():  # a process that the kernel does not let die may write still
            log.warning("%s could not be removed; the next run tries again", made)


def _made(root: Path) -> tuple[Path, int]:
    """A new folder and what holds its lock, the sign that somebody is still at it."""
    for last in (False, False, True):
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another run cleared up between the two: it had no lock yet
            if last:
                raise
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if made.exists() or last:
            return made, descriptor
        os.close(descriptor)
    raise AssertionError


def _clear_up(root: Path) -> None:
    """Remove our folders in which no process works any longer."""
    for left in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, a file, or gone meanwhile
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                    log.info("%s was left behind by a run that was killed; removed", left)
            finally:
                os.close(descriptor)

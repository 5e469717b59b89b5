"""Write small state files that are complete or absent, also after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o600) -> None:
    """Replace `path` by `data` in one step. `sync=False`: a power cut may lose the newest version.

    Args:
        mode: of the file, whatever the process' umask is.

    Raises:
        OSError: the old content is still there.
    """
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if mode != 0o600:
            os.fchmod(descriptor, mode)
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make created, renamed and removed names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

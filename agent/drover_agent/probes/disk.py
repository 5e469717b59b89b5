"""The local disk: sequential reads and writes in GB/s, random reads of 4 KiB in operations per second.

The amount written depends on the probe's length, so that a slow disk does not look like a hang.
Past the page cache: written with fsync, read with O_DIRECT; where a file system has none, its pages are dropped first.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from drover_agent.probes.base import Context, Result
from drover_agent.probes.timing import variation

BLOCK = 4 << 20
PAGE = 4096
BYTES = 4 << 30
CPU_BYTES = 64 << 20
SPARE_SHARE = 0.1  # of the free space, at most
LOOK, LOOK_AT_RANDOM = 4, 64  # reads between two looks at the clock
SYNC_BLOCKS = 32  # between two syncs: no gigabytes in the page cache that one at the end would wait for


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: disk_write, disk_read or disk_random, or storage_write or storage_read of the shared folder.

    Each writes its own file. In the shared folder its name has the host's: what a killed run leaves there, the node's
    next one writes over.
    """
    unit = "operations/s" if name == "disk_random" else "GB/s"
    shared = name.startswith("storage")
    if shared and not context.shared:
        yield Result(name, None, None, unit, "no folder of shared storage is set: `--shared` in drover-probe.service")
        return
    folder = Path((context.shared if shared else context.folder) or ".")
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield Result(name, None, None, unit, f"{folder}: {error.strerror}")
        return
    room = int(found.f_bavail * found.f_frsize * SPARE_SHARE)
    wanted = BYTES if any(device.is_cuda for device in context.devices) else CPU_BYTES
    size = min(wanted, room) // BLOCK * BLOCK
    if size < BLOCK:
        yield Result(name, None, None, unit, f"too little free space in {folder}")
        return
    path = folder / (f".drover-{name}-{socket.gethostname()}.bin" if shared else f"drover-{name}.bin")
    context.show_progress(f"{name}: {size >> 20} MiB in {folder}")
    try:
        size, written_s, parts = _write(context, path, size)
        value, how = size / written_s / 1e9, "with fsync"
        if not name.endswith("_write"):
            value, how, parts = _read(context, path, size, at_random=name == "disk_random")
        yield Result(
            name, None, value, unit, f"{size >> 20} MiB, {how}", spread=variation(parts) if len(parts) > 1 else None,
            repeats=max(1, len(parts)),
        )  # fmt: skip
    except InterruptedError:  # an OSError too
        raise
    except OSError as error:
        yield Result(name, None, None, unit, f"{path}: {error.strerror}")
    finally:
        path.unlink(missing_ok=True)


def _write(context: Context, path: Path, size: int) -> tuple[int, float, list[float]]:
    """(bytes written, seconds, of each part): `size`, or what fits into the context's seconds. Random: some disks
    compress."""
    block = os.urandom(BLOCK)
    began, count = time.perf_counter(), 0
    marks, sync = [began], max(1, min(SYNC_BLOCKS, size // BLOCK // 4))
    # In a shared folder another user may have put a link there: what it points to must not be written over.
    found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    with os.fdopen(found, "wb", buffering=0) as file:
        # Three parts at least, however slow the disk is: one says nothing of the spread, and reading has one less.
        while count < size // BLOCK and (count < 3 * sync or time.perf_counter() - began < context.seconds):
            _raise_if_stopping(context)
            file.write(block)
            count += 1
            if count % sync == 0:
                os.fdatasync(file.fileno())
                marks.append(time.perf_counter())
                context.show_progress(f"{count * BLOCK >> 20} MiB written")
        os.fsync(file.fileno())
    return count * BLOCK, time.perf_counter() - began, _parts(marks)


def _parts(marks: list[float]) -> list[float]:
    """Seconds between marks."""
    return [after - before for before, after in pairwise(marks)]


def _read(context: Context, path: Path, size: int, *, at_random: bool) -> tuple[float, str, list[float]]:
    """(GB/s or operations per second, how, seconds of each part) for about the context's seconds, or the file once."""
    file, how = _open(path)
    try:
        chunk = PAGE if at_random else BLOCK
        buffer = mmap.mmap(-1, chunk)  # aligned, as O_DIRECT wants it
        numbers = random.Random(context.seed)
        began, count = time.perf_counter(), 0
        marks = [began]
        for turn in range(size // chunk):
            if turn % (LOOK_AT_RANDOM if at_random else LOOK) == 0:
                if turn:
                    marks.append(time.perf_counter())
                _raise_if_stopping(context)
                if len(marks) > 2 and time.perf_counter() - began > context.seconds:  # two parts
                    break
            os.preadv(file, [buffer], (numbers.randrange(size // chunk) if at_random else turn) * chunk)
            count += 1
        took = time.perf_counter() - began
        return (count / took if at_random else count * chunk / took / 1e9), how, _parts(marks)
    finally:
        os.close(file)


def _open(path: Path) -> tuple[int, str]:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW), "direct"
    except OSError:  # tmpfs and some network file systems
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return file, "pages dropped before"


def _raise_if_stopping(context: Context) -> None:
    if context.stopping():
        raise InterruptedError("asked to stop")

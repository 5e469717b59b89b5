"""What keeps a running agent small: memory that only its start needed is given back."""

from __future__ import annotations

import ctypes
import gc
import logging
from pathlib import Path

log = logging.getLogger(__name__)

SETTLED_S = 10.0  # after the start: sources have been read, a collector is connected
AGAIN_S = 600.0  # and now and then, for what was needed once since
YOUNG = 5_000  # new objects until the garbage collector looks at them: what a tick makes dies by itself
MADV_DONTNEED = 4  # <asm-generic/mman-common.h>


def settle(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Give back memory that only the start needed; the bytes of program text that were unmapped.

    What was made so far lives as long as the process: the garbage collector need not look at it again, and what it
    freed goes back to the system. Code that ran once (imports, TLS handshakes) would stay mapped for ever; what is
    needed again comes back from the page cache. That makes the agent smaller, not the page cache: docs/sources.md has
    the figures of both.
    """
    gc.collect()
    if not gc.get_freeze_count():  # once: rings of what lives now are freed no more when they die
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    libc = ctypes.CDLL(None)
    if trim := getattr(libc, "malloc_trim", None):  # glibc's
        trim(0)
    unmapped = 0
    try:
        for start, size in _texts(smaps):
            # Refused for memory that is locked (mlockall), which is as good.
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED) == 0:
                unmapped += size
    except (OSError, ValueError) as error:
        log.debug("%s: %s; program text stays mapped", smaps, error)
    return unmapped


def _texts(smaps: Path) -> list[tuple[int, int]]:
    """(start, size) of mapped program text that is in its file as it is in memory: proc_pid_smaps(5).

    Not text with pages of its own (relocated in place, or with a debugger's or uprobe's breakpoints), nor that of a
    file that was replaced or is none: there might be no way back.
    """
    found = []
    place: tuple[int, int] | None = None
    for line in smaps.read_text("utf-8", "replace").splitlines():
        key, *rest = line.split(None, 5)
        if not key.endswith(":"):  # the first line of a mapping
            place = None
            if len(rest) == 5 and rest[0] == "r-xp" and rest[4].startswith("/"):
                start, end = (int(address, 16) for address in key.split("-"))
                if not rest[4].startswith("/dev/") and not rest[4].endswith(" (deleted)"):
                    place = start, end - start
        elif place and key == "Anonymous:" and rest[0] == "0":
            found.append(place)
    return found

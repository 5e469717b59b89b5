"""Program text that is mapped and was needed once: it can be unmapped, and comes back from the page cache.

Code that only a start runs (imports, the making of tables, TLS handshakes) would count as the process' memory for ever.
That makes the process smaller, not the page cache.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

log = logging.getLogger(__name__)

MADV_DONTNEED = 4  # <asm-generic/mman-common.h>


def unmap(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Unmap the text of all files; what is needed again is mapped again, some 64 KiB at a time.

    Returns:
        The bytes that were unmapped, resident or not; 0 where there is no such list of mappings.
    """
    libc = ctypes.CDLL(None)
    unmapped = 0
    try:
        for start, size in texts(smaps):
            # Refused for memory that is locked (mlockall), which is as good.
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED) == 0:
                unmapped += size
    except (OSError, ValueError) as error:
        log.debug("%s: %s; program text stays mapped", smaps, error)
    return unmapped


def texts(smaps: Path) -> list[tuple[int, int]]:
    """(start, size) of mapped program text that is in its file as it is in memory: proc_pid_smaps(5).

    Not text with pages of its own (relocated in place, or with a debugger's or uprobe's breakpoints), nor that of a
    file that was replaced or is none: there might be no way back.

    Raises:
        OSError, ValueError: there is no such file, or it is none.
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

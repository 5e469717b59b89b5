"""What keeps a running agent small: memory that only its start needed is given back."""

from __future__ import annotations

import ctypes
import gc
import logging
from pathlib import Path

log = logging.getLogger(__name__)

SETTLED_S = 10.0  # after the start: sources have been read, a collector is connected
AGAIN_S = 600.0  # and now and then, for what was needed once since
MADV_DONTNEED = 4  # <asm-generic/mman-common.h>


def settle(maps: Path = Path("/proc/self/maps")) -> int:
    """Give back memory that only the start needed; the bytes of program text that were unmapped.

    What was made so far lives as long as the process: the garbage collector need not look at it again. Code that ran
    once (imports, TLS handshakes) stays mapped for ever; pages that are needed again come back from the page cache.
    Only mappings that execute are unmapped: nothing ever writes to them, while constants may be relocated.
    """
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if trim := getattr(libc, "malloc_trim", None):  # glibc's
        trim(0)
    unmapped = 0
    try:
        for line in maps.read_text("utf-8", "replace").splitlines():
            span, rights, _, _, inode = line.split(None, 5)[:5]
            if rights == "r-xp" and inode != "0":
                start, end = (int(address, 16) for address in span.split("-"))
                if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED) == 0:
                    unmapped += end - start
    except OSError as error:
        log.debug("%s: %s; program text stays mapped", maps, error.strerror)
    return unmapped

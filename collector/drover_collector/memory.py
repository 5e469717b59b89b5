"""Memory that was freed goes back to the system: a collector that took in much at once must not keep it for ever.

What glibc would else do: an arena for each of dozens of threads, each keeping the large arrays that were made there.
By calls, not through the environment, so that it holds however the collector is started.
"""

from __future__ import annotations

import contextlib
import ctypes

ARENAS = 2  # of small things, for all threads
MAPPED_BYTES = 512 << 10  # arrays from this size on are the system's own pages, and go back when they are freed
KEPT_BYTES = 4 << 20  # at the end of an arena, when all behind it is free

# glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def settle() -> None:
    """At the start. Does nothing where the C library has no such settings."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for setting, value in ((_ARENA_MAX, ARENAS), (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES)):
        mallopt(setting, value)


def give_back() -> None:
    """What was freed between things that are in use goes back too; the rest of the process goes on meanwhile."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

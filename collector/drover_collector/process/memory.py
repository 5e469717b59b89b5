"""Memory that was freed goes back to the system: a collector that took in much at once must not keep it for ever.

What glibc would else do: an arena for each of dozens of threads, each keeping the large arrays that were made there.
By calls, not through the environment, so that it holds however the collector is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

ARENAS = 2  # of small things, for all threads
MAPPED_BYTES = 512 << 10  # arrays from this size on are the system's own pages, and go back when they are freed
KEPT_BYTES = 4 << 20  # at the end of an arena, when all behind it is free

# Python looks for rings of dead objects after every 700 new ones, and through all objects whenever there are a quarter
# more: with thousands of streams that open at once a sixth of the event loop's time. Here all are looked through by
# `give_back` only.
YOUNG, MIDDLE, NEVER = 10_000, 20, 1_000_000

# glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def settle() -> None:
    """At the start. Leaves the C library alone where it has no such settings."""
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for setting, value in ((_ARENA_MAX, ARENAS), (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES)):
        mallopt(setting, value)


def settled() -> None:
    """What lives now lives to the end: it is not looked through any more."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Now and then: what nothing leads to is freed, and what was freed goes back. All Python stands still for the
    first, some tenths of a second for a million objects."""
    gc.collect()
    trim()


def trim() -> None:
    """What was freed between things that are in use goes back too: columns of a tick between thousands of streams."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

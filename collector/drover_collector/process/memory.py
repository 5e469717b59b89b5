"""Return freed memory to the system, so that a collector that received much at once does not keep it.

Otherwise glibc has an arena for each of dozens of threads, and each keeps the large arrays made there. Set by calls,
not by environment, so that it holds however the collector is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

ARENAS = 2  # of small things, for all threads
MAPPED_BYTES = 512 << 10  # larger arrays are mapped pages, which go back when they are freed
KEPT_BYTES = 4 << 20  # free bytes kept at the end of an arena

# Python's collector runs after every 700 new objects, and over all objects whenever there are a quarter more: with
# thousands of streams that open at once it takes a sixth of the event loop's time. Here only `give_back` runs it fully.
YOUNG, MIDDLE, NEVER = 10_000, 20, 1_000_000

# glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def settle() -> None:
    """Set the limits, at the start. A C library without such settings is left alone."""
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for setting, value in ((_ARENA_MAX, ARENAS), (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES)):
        mallopt(setting, value)


def settled() -> None:
    """Exclude all present objects from later collections: they live to the end."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Collect unreachable objects and return freed memory, now and then. The collection stops all Python threads for
    some tenths of a second with a million objects."""
    gc.collect()
    trim()


def trim() -> None:
    """Return also what was freed between objects in use, such as a tick's columns between thousands of streams."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

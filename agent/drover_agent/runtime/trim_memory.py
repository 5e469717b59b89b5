"""What keeps a running agent small: memory that only its start needed is given back."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from drover_core import program_text

SETTLED_S = 10.0  # after the start: sources have been read, a collector is connected
AGAIN_S = 600.0  # and now and then, for what was needed once since
YOUNG = 5_000  # new objects until the garbage collector looks at them: what a tick makes dies by itself


def settle(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Give back memory that only the start needed; the bytes of program text that were unmapped.

    What was made so far lives as long as the process: the garbage collector need not look at it again, and what it
    freed goes back to the system. Code that ran once is unmapped: docs/evidence/agent.md has figures with and
    without.
    """
    gc.collect()
    if not gc.get_freeze_count():  # once: rings of what lives now are freed no more when they die
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
    return program_text.unmap(smaps)

"""Waiting for a condition with a deadline, instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 300.0  # only a test that fails takes so long: a machine may be ten times slower than usual
# Between looks, from the first to those after a second. Many conditions ask a collector or its store, which takes 5 ms
# of CPU a time: to look again after a tenth of what was waited is soon enough.
FIRST_S, LAST_S = 0.01, 0.1


def _pause_s(waited_s: float) -> float:
    return min(LAST_S, FIRST_S + waited_s / 10)


async def until(condition: Callable[[], object], what: str = "", limit_s: float = LIMIT_S) -> None:
    """Return when `condition()` is true; fail after `limit_s`."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > limit_s:
            raise AssertionError(f"did not happen within {limit_s:g} s: {what or condition}")
        await asyncio.sleep(_pause_s(waited))


def wait_until(condition: Callable[[], object], what: str = "", limit_s: float = LIMIT_S, pause_s: float = 0.0) -> None:
    """The same outside an event loop. `pause_s`: at least so long between looks that cost much, such as a command."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > limit_s:
            raise AssertionError(f"did not happen within {limit_s:g} s: {what or condition}")
        time.sleep(max(pause_s, _pause_s(waited)))

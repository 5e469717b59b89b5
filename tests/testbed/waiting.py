"""Waiting for a condition with a deadline, instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 20.0


async def until(condition: Callable[[], object], what: str = "", limit_s: float = LIMIT_S) -> None:
    """Return when `condition()` is true; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {limit_s:g} s: {what or condition}")
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], what: str = "", limit_s: float = LIMIT_S) -> None:
    """The same outside an event loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {limit_s:g} s: {what or condition}")
        time.sleep(0.01)

"""Time as a parameter, so that tests need not wait for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol


class Clock(Protocol):
    """The wall clock (it may jump), a steady one, and waiting on the latter."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether it is done within this time; it goes on if it is not."""


class SystemClock:
    """The machine's own."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        await asyncio.wait((future,), timeout=seconds)  # cheaper than a task that sleeps beside it
        return future.done()


async def next_second(clock: Clock) -> None:
    """Until the wall clock's next whole second. Who looks at something once a second looks when the sources are read:
    a process that wakes once for all of them costs less than one that wakes for each."""
    await clock.sleep(1.0 - clock.now_ms() % 1000 / 1000)

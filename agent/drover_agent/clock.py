"""Time as a parameter, so that tests need not wait for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

EARLY_S = 0.0005  # a timer that is early by the difference of the two clocks would make a second of no length


class Clock(Protocol):
    """The wall clock (it may jump), a steady one, and waiting on the latter."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    def up_ms(self) -> int:
        """Since the machine booted, the time it slept too."""

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether it is done within this time; it goes on if it is not."""

    async def second(self) -> None:
        """Until the wall clock's next whole second. Who looks at something once a second looks when the sources are
        read: a process that wakes once for all of them costs less than one that wakes for each."""


class SystemClock:
    """The machine's own."""

    def __init__(self) -> None:
        self._await_second: list[asyncio.Future[None]] = []

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def up_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        if not future.done():  # by hand: `asyncio.wait` costs twice as much, and this is once for each tick
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def wake(_: object = None) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            timer = loop.call_later(seconds, wake)
            future.add_done_callback(wake)
            try:
                await waiter
            finally:
                timer.cancel()
                future.remove_done_callback(wake)
        return future.done()

    async def second(self) -> None:
        """One timer for all who wait for it."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        if not self._await_second:
            loop.call_later(1.0 - time.time() % 1.0 + EARLY_S, self._tell_second)
        self._await_second.append(waiter)
        await waiter

    def _tell_second(self) -> None:
        waiting, self._await_second = self._await_second, []
        for waiter in waiting:
            if not waiter.done():  # cancelled
                waiter.set_result(None)

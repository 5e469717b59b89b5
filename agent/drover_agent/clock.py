"""Clocks as a parameter, so that tests need not wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

EARLY_S = 0.0005  # a timer may fire early by the difference of the two clocks, which would repeat a second


class Clock(Protocol):
    """A wall clock, which may jump, a steady clock, and waiting by the steady one."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    def up_ms(self) -> int:
        """Return ms since the machine booted, including time asleep."""

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for `future` and return whether it was done in time. It is not cancelled if it was not."""

    async def second(self) -> None:
        """Wait until the wall clock's next whole second.

        Everything that runs once a second waits here: a process that wakes once for all costs less.
        """


class SystemClock:
    """The machine's clocks."""

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
        if not future.done():  # `asyncio.wait` costs twice as much, and this runs each tick
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
        """Wait with one timer for all callers."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        if not self._await_second:
            loop.call_later(1.0 - time.time() % 1.0 + EARLY_S, self._wake_all)
        self._await_second.append(waiter)
        await waiter

    def _wake_all(self) -> None:
        waiting, self._await_second = self._await_second, []
        for waiter in waiting:
            if not waiter.done():  # cancelled
                waiter.set_result(None)

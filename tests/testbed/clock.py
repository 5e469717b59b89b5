"""A clock that tests turn by hand."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import Any

from drover_agent.clock import SystemClock


class ManualClock:
    """Wall and steady time move only by `advance`; `jump` moves the wall clock alone."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms
        self._steady_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._steady_s

    def up_ms(self) -> int:
        return round(self._steady_s * 1000)

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._steady_s + seconds, next(self._order), future))
        await future

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        return await _within(self, future, seconds)

    async def second(self) -> None:
        await self.sleep(1.0 - self._now_ms % 1000 / 1000)

    def jump(self, ms: int) -> None:
        self._now_ms += ms

    async def advance(self, seconds: float) -> None:
        """Let time pass, waking each sleeper at its moment and letting it run until it waits again."""
        until = self._steady_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until + 1e-9:
            at, _, future = heapq.heappop(self._sleepers)
            self._move(at)
            if not future.done():
                future.set_result(None)
            await settle()
        self._move(until)

    def _move(self, to_s: float) -> None:
        passed = max(to_s - self._steady_s, 0.0)
        self._steady_s += passed
        self._now_ms += round(passed * 1000)


class MovableClock(SystemClock):
    """The machine's clock for real streams and threads, that tests move on: `pass_time` as time does, `jump` the wall
    clock alone, as a wrong or corrected clock does, and as a suspended machine finds it."""

    def __init__(self) -> None:
        super().__init__()
        self._wall_ms, self._steady_s = 0, 0.0

    def now_ms(self) -> int:
        return super().now_ms() + self._wall_ms

    def monotonic(self) -> float:
        return super().monotonic() + self._steady_s

    async def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0:  # noqa: ASYNC110  # the clock is moved from anywhere
            await asyncio.sleep(min(left, 0.01))

    async def within(self, future: asyncio.Future[Any], seconds: float) -> bool:
        return await _within(self, future, seconds)

    def jump(self, seconds: float) -> None:
        self._wall_ms += round(seconds * 1000)

    def pass_time(self, seconds: float) -> None:
        self._steady_s += seconds
        self.jump(seconds)


async def _within(clock: ManualClock | MovableClock, future: asyncio.Future[Any], seconds: float) -> bool:
    """By the time of a clock that is turned."""
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((future, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return future.done()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)

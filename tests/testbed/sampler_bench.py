"""A sampler with sources and a clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from drover_agent.sampling.scheduler import PATIENCE_S, READ_LIMIT_S, Sampler
from drover_agent.sources.base import Entity, Reading
from drover_core.metrics.catalog import Scope
from testbed.clock import ManualClock, settle
from testbed.waiting import until

T = 1_800_000_000_000


class Part:
    """A source whose reads a test holds, fails or counts."""

    def __init__(self, name: str, interval_s: float = 1.0) -> None:
        self.name, self.interval_s = name, interval_s
        self.entity = Entity(Scope.GPU, name, int(name[5:])) if name.startswith("nvml:") else Entity(Scope.NODE, "n1")
        self.free = threading.Event()
        self.free.set()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.threads: list[threading.Thread] = []
        self.closed = threading.Event()

    def read(self, now_ms: int) -> Reading:
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.free.wait(120)
        if self.error:
            raise self.error
        return Reading(rows=[(self.entity, {"power_w" if self.entity.gpu is not None else "load1": 1.0})])

    def close(self) -> None:
        self.closed.set()


class Bench:
    """A sampler on a clock that the test turns."""

    def __init__(self, *parts: Part, node: str | None = None) -> None:
        self.clock = ManualClock(T)
        self.received: list[tuple[int, Reading]] = []
        self.sampler = Sampler(lambda ts, reading: self.received.append((ts, reading)), 1.0, self.clock, node=node)
        self.parts = parts
        for part in parts:
            self.sampler.add(part)

    async def tick(self, second: int) -> None:
        """One that all sources answer."""
        async with asyncio.timeout(120):
            await self.sampler.tick(T + second * 1000)

    def have(self, name: str) -> list[int]:
        """Seconds at which this source gave values."""
        return [(ts - T) // 1000 for ts, r in self.received for e, _ in r.rows if e.key == name]

    def events(self) -> list[tuple[str, int | None]]:
        return [(event.code, event.gpu) for _, r in self.received for event in r.events]


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def hang(bench: Bench, part: Part, second: int) -> asyncio.Task[None]:
    """A tick in which this source's read does not return; gives the tick, which waits for it."""
    part.free.clear()
    part.begun.clear()
    tick = asyncio.create_task(bench.sampler.tick(T + second * 1000))
    await until(part.begun.is_set, f"{part.name} is read")
    await settle()
    return tick


async def overrun(bench: Bench, tick: asyncio.Task[None]) -> None:
    """Let the limit of a tick pass, with time for those that answer to do so when its patience ends."""
    await bench.clock.advance(PATIENCE_S)
    answering = [part for part in bench.parts if part.free.is_set()]
    ticks = max(len(part.threads) for part in bench.parts)
    stats = bench.sampler.stats
    await until(lambda: all(stats[part.name].reads == ticks for part in answering), "all others answer")
    await bench.clock.advance(READ_LIMIT_S - PATIENCE_S)
    await until(tick.done)

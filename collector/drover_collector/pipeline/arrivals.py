"""Events on their way to the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from drover_collector.pipeline.stats import Ticks
from drover_core.model.events import Event

MAX_EVENTS = 100_000  # waiting for the engine; they are in the store already


class Arrivals:
    """`put` from any thread; `take` in the thread that judges. `arrived` is set in `loop`, once there is one."""

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._events: deque[Event] = deque()
        self.arrived = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, events: Sequence[Event]) -> None:
        room = MAX_EVENTS - len(self._events)
        if room < len(events):
            self._ticks.lost_events += len(events) - max(room, 0)
            self._ticks.troubles["events"] = (
                f"{self._ticks.lost_events} events came faster than they could be judged; they are stored, not judged."
            )
        self._events.extend(events[: max(room, 0)])
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.arrived.set)

    def resume(self, events: Sequence[Event]) -> None:
        """What a crash left unjudged; the caller wakes who judges."""
        self._events.extend(events)

    def take(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def forget(self) -> None:
        self._events.clear()

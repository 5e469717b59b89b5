"""One schedule for all sources: every tick is a multiple of the interval on the wall clock, on every node the same.

The sampler measures each source (duration, failures, timeouts); sources do not measure themselves. A tick that was
missed, because the machine slept or its clock jumped, is not made up for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drover_agent.clock import Clock
from drover_agent.sources.base import Entity, NodeEvent, Reading, Source
from drover_agent.watchdog import Guard
from drover_proto.catalog import Absent, Scope
from drover_proto.events import EventKind

log = logging.getLogger(__name__)

# A hang that begins right after a read is seen by the next one: interval + limit stay within the 5 s in which a hung
# driver is to be reported, at intervals up to 2 s.
READ_LIMIT_S = 3.0

Deliver = Callable[[int, Reading], None]


@dataclass(slots=True)
class SourceStats:
    """What the sampler knows of a source."""

    reads: int = 0
    failures: int = 0
    timeouts: int = 0
    skipped: int = 0  # ticks at which the last read had not returned
    last_s: float = 0.0
    total_s: float = 0.0


class Sampler:
    """Reads its sources and hands what they give to `deliver(ts_ms, reading)`, in the event loop's thread."""

    def __init__(self, deliver: Deliver, interval_s: float, clock: Clock, limit_s: float = READ_LIMIT_S) -> None:
        self._deliver, self._interval_s, self._clock, self._limit_s = deliver, interval_s, clock, limit_s
        self._sampled: dict[str, _Sampled] = {}
        self.missed_ticks = 0
        self.ticks = 0  # made by `run`: a schedule that stands still shows here

    @property
    def stats(self) -> dict[str, SourceStats]:
        return {name: one.stats for name, one in self._sampled.items()}

    def add(self, source: Source) -> None:
        """Read this one too, from the next tick on."""
        self._sampled[source.name] = _Sampled(source, self._deliver, self._limit_s, self._clock)

    async def tick(self, ts_ms: int) -> None:
        """Read all sources that are due; returns when each has answered or overrun its limit."""
        await asyncio.gather(*(one.read(ts_ms) for one in self._sampled.values() if one.due(ts_ms, self._interval_s)))

    async def run(self) -> None:
        """Tick until cancelled. A tick does not wait for the slow sources of the one before."""
        interval_ms = max(int(self._interval_s * 1000), 1)
        open_ticks: set[asyncio.Task[None]] = set()
        last: int | None = None
        try:
            while True:
                now_ms = self._clock.now_ms()
                await self._clock.sleep((interval_ms - now_ms % interval_ms) / 1000)
                now_ms = self._clock.now_ms()
                number = (now_ms + interval_ms // 2) // interval_ms
                if last is not None and number != last + 1:
                    if number == last:  # woken a little early
                        continue
                    self.missed_ticks += max(number - last - 1, 0)
                    if abs(number - last) * self._interval_s > max(5 * self._interval_s, 5):
                        log.warning("the clock moved by %g s since the last tick", (number - last) * self._interval_s)
                last = number
                self.ticks += 1
                task = asyncio.create_task(self.tick(number * interval_ms))
                open_ticks.add(task)
                task.add_done_callback(open_ticks.discard)
        finally:
            for task in open_ticks:
                task.cancel()

    def close(self) -> None:
        for one in self._sampled.values():
            one.close()


class _Sampled:
    """One source on the schedule: what it gave so far, and whether it hangs."""

    def __init__(self, source: Source, deliver: Deliver, limit_s: float, clock: Clock) -> None:
        self._source, self._deliver, self._limit_s, self._clock = source, deliver, limit_s, clock
        self._guard = Guard(source)
        self._known: dict[Entity, set[str]] = {}  # everything it ever told of, present or absent
        self._last_ms: int | None = None
        self._hung = False
        self._error = ""
        self._waiting: asyncio.Task[None] | None = None
        self.stats = SourceStats()

    def due(self, ts_ms: int, interval_s: float) -> bool:
        """Sources slower than the schedule sit out ticks."""
        every_ms = max(self._source.interval_s, interval_s) * 1000
        return self._last_ms is None or not 0 <= ts_ms - self._last_ms < every_ms - interval_s * 500

    async def read(self, ts_ms: int) -> None:
        if self._guard.busy:
            self.stats.skipped += 1
            if self._hung:
                self._deliver(ts_ms, self._absent(Absent.TIMEOUT))
            return
        self._last_ms = ts_ms
        outcome = await self._guard.read(ts_ms, self._limit_s)
        if outcome is None:
            self._begin_hang(ts_ms)
            return
        self.stats.reads += 1
        self.stats.last_s = outcome.seconds
        self.stats.total_s += outcome.seconds
        if outcome.reading is not None:
            self._error = ""
            self._remember(outcome.reading)
            self._deliver(ts_ms, outcome.reading)
            return
        self.stats.failures += 1
        if str(outcome.error) != self._error:
            self._error = str(outcome.error)
            log.error("source %s failed", self._source.name, exc_info=outcome.error)
        self._deliver(ts_ms, self._absent(Absent.ERROR))

    def _remember(self, reading: Reading) -> None:
        for entity, values in reading.rows:
            self._known.setdefault(entity, set()).update(values)
        for entity, metric, _ in reading.absent:
            self._known.setdefault(entity, set()).add(metric)
        # A device whose identity became known replaces its nameless self.
        for gone in self._known.keys() - {e for e, _ in reading.rows} - {e for e, _, _ in reading.absent}:
            if any(gone.scope is e.scope and gone.gpu == e.gpu and gone.link == e.link for e, _ in reading.rows):
                del self._known[gone]

    def _absent(self, reason: Absent) -> Reading:
        return Reading(absent=[(entity, name, reason) for entity, names in self._known.items() for name in names])

    def _begin_hang(self, ts_ms: int) -> None:
        self.stats.timeouts += 1
        self._hung = True
        log.error("source %s did not answer for %g s; going on without it", self._source.name, self._limit_s)
        reading = self._absent(Absent.TIMEOUT)
        text = f"a read of {self._source.name} did not return within {self._limit_s:g} s"
        reading.events = list(self._events("driver_hung", text))
        self._deliver(ts_ms, reading)
        self._waiting = asyncio.create_task(self._await_return())

    async def _await_return(self) -> None:
        await self._guard.returned()
        self._hung = False
        log.warning("source %s answers again", self._source.name)
        reading = Reading(events=list(self._events("driver_back", f"the read of {self._source.name} returned")))
        self._deliver(self._clock.now_ms(), reading)

    def _events(self, code: str, message: str) -> Iterable[NodeEvent]:
        """One event per GPU that this source reads, or one for the node; for the driver's sources only."""
        slot = getattr(self._source, "slot", None)
        gpus = {e.gpu for e in self._known if e.scope is Scope.GPU} or ({slot} if slot is not None else set())
        if not gpus and not self._source.name.startswith("nvml"):
            return
        for gpu in sorted(gpus, key=lambda g: -1 if g is None else g) or [None]:
            yield NodeEvent(self._clock.now_ms(), gpu, EventKind.LIFECYCLE, code, message, "agent")

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._guard.close()

"""One schedule for all sources: every tick is a multiple of the interval on the wall clock, on every node the same.

All sources that are due are read one after another in one thread. When they have not all answered within PATIENCE_S,
each that was not begun gets a thread of its own, so that a source that hangs costs the others no more than that delay.
One that was slow is read apart from then on, until it is quick again.

The sampler measures each source (duration, failures, timeouts); sources do not measure themselves. A tick that was
missed, because the machine slept or its clock jumped, is not made up for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from drover_agent.clock import Clock
from drover_agent.sampling.abandonable_worker import Read, Round, Worker
from drover_agent.sampling.scheduled_source import (
    ANSWERED,
    ScheduledSource,
    SourceStats,
    Totals,
)
from drover_agent.sources.base import Entity, Reading, Source
from drover_core.metrics.catalog import Absent, Scope, of_scope

log = logging.getLogger(__name__)

# A hang that begins right after a read is seen by the next one: interval + limit stay within the 5 s in which a hung
# driver is to be reported, at intervals up to 2 s.
READ_LIMIT_S = 3.0  # from the tick on
PATIENCE_S = 1.0  # 8 healthy GPUs whose calls take 140 us take 0.02 s, and 0.4 s with their process lists
THREAD = "sources"
OWN_VALUES_MS = 10_000  # what the sampler tells of itself: once in each of these, one value per detector bucket

Deliver = Callable[[int, Reading], None]


def _rows(ending: str) -> dict[str, str]:
    """Source -> its row of the catalog with this ending."""
    names = [metric.name for metric in of_scope(Scope.NODE) if metric.name.startswith("source_")]
    return {name.removeprefix("source_").removesuffix(ending): name for name in names if name.endswith(ending)}


READ_ROWS, OUTCOME_ROWS = _rows("_read_s"), _rows("_outcome")

__all__ = ["READ_LIMIT_S", "Sampler", "SourceStats"]


class Sampler:
    """Reads its sources and hands what they give to `deliver(ts_ms, reading)`, in the event loop's thread.

    With the name of the `node` it also delivers how its own work goes, as values of that node.
    """

    def __init__(
        self, deliver: Deliver, interval_s: float, clock: Clock, limit_s: float = READ_LIMIT_S, node: str | None = None
    ) -> None:
        self._deliver, self._interval_s, self._clock, self._limit_s = deliver, interval_s, clock, limit_s
        self._patience_s = min(PATIENCE_S, limit_s / 2)
        self._sampled: dict[str, ScheduledSource] = {}
        self._worker = Worker(THREAD)
        self._entity = Entity(Scope.NODE, node) if node else None
        self._told_own = -1  # number of the OWN_VALUES_MS in which it last told of itself
        self._totals = Totals()
        self.beside: dict[str, Callable[[], int | None]] = {}  # outcome now of what is read without this schedule
        self.missed_ticks = 0
        self.ticks = 0  # made by `run`: a schedule that stands still shows here

    @property
    def stats(self) -> dict[str, SourceStats]:
        return {name: one.stats for name, one in self._sampled.items()}

    def add(self, source: Source) -> None:
        """Read this one too, from the next tick on. Those that are read often come first: they are the quick ones."""
        if old := self._sampled.get(source.name):
            old.drop()
        self._sampled[source.name] = ScheduledSource(source, self._deliver, self._clock, self._totals)
        self._sampled = dict(sorted(self._sampled.items(), key=lambda item: item[1].source.interval_s))

    async def tick(self, ts_ms: int) -> None:
        """Read all sources that are due; returns when each has answered or overrun its limit."""
        self._tell_own(ts_ms)
        began_s = self._clock.monotonic()
        together: list[Read[ScheduledSource]] = []
        apart: list[Read[ScheduledSource]] = []
        for one in self._sampled.values():
            if one.due(ts_ms, self._interval_s) and (read := one.begin(ts_ms)):
                (apart if one.slow else together).append(read)
        if apart:
            await asyncio.gather(
                self._read_together(together, ts_ms), *(self._read_apart(read, ts_ms, self._limit_s) for read in apart)
            )
        else:
            await self._read_together(together, ts_ms)
        self._totals.tick_s = max(self._totals.tick_s, self._clock.monotonic() - began_s)

    async def _read_together(self, reads: Sequence[Read[ScheduledSource]], ts_ms: int) -> None:
        if not reads:
            return
        whole = Round(self._worker, reads)
        if await self._clock.within(whole.done, self._patience_s):
            for read in reads:
                read.owner.take(ts_ms)
            return
        rest = whole.take_rest()
        self._worker = Worker(THREAD)
        late = []
        for read in whole.begun:
            if read.outcome is None:
                late.append(read)  # that which the thread is in
            else:
                read.owner.take(ts_ms)
        left_s = self._limit_s - self._patience_s
        await asyncio.gather(
            *(self._await(whole, read, ts_ms, left_s) for read in late),
            *(self._read_apart(read, ts_ms, left_s) for read in rest),
        )

    async def _read_apart(self, read: Read[ScheduledSource], ts_ms: int, limit_s: float) -> None:
        worker = Worker(read.owner.source.name)
        whole = Round(worker, [read])
        worker.close()  # after this one
        await self._await(whole, read, ts_ms, limit_s)

    async def _await(
        self, whole: Round[ScheduledSource], read: Read[ScheduledSource], ts_ms: int, limit_s: float
    ) -> None:
        if await self._clock.within(whole.done, limit_s):
            read.owner.take(ts_ms)
        else:
            read.owner.hang(ts_ms, self._limit_s)
            whole.done.add_done_callback(lambda _: read.owner.returned())

    def _tell_own(self, ts_ms: int) -> None:
        """How the ticks before this one went."""
        if self._entity is None or ts_ms // OWN_VALUES_MS == self._told_own:
            return
        first, self._told_own = self._told_own == -1, ts_ms // OWN_VALUES_MS
        if first:
            return
        totals = self._totals
        reads, outcomes = self._told_by_source()
        values = {
            "agent_tick_s": totals.tick_s,
            "agent_slowest_read_s": max(reads.values(), default=0.0),
            "agent_sources_failing": float(sum(one.fails for one in self._sampled.values())),
            "agent_sources_hung": float(sum(one.hung for one in self._sampled.values())),
            "agent_read_failures": float(totals.failures),
            "agent_missed_ticks": float(self.missed_ticks),
        }
        totals.tick_s = 0.0
        values |= {READ_ROWS[source]: read_s for source, read_s in reads.items() if source in READ_ROWS}
        values |= {OUTCOME_ROWS[source]: float(how) for source, how in outcomes.items() if source in OUTCOME_ROWS}
        on = {_row_name(one.source.name) for one in self._on()} | self.beside.keys()
        off = [row for rows in (READ_ROWS, OUTCOME_ROWS) for source, row in rows.items() if source not in on]
        absent = [(self._entity, row, Absent.UNSUPPORTED) for row in off]
        self._deliver(ts_ms, Reading(rows=[(self._entity, values)], absent=absent))

    def _on(self) -> list[ScheduledSource]:
        """Those that the settings do not turn off."""
        return [one for one in self._sampled.values() if not getattr(one.source, "off", False)]

    def _told_by_source(self) -> tuple[dict[str, float], dict[str, int]]:
        """Source -> its longest read in seconds, and its worst outcome; those of all GPUs are one. Nothing of a source
        that was not read."""
        reads: dict[str, float] = {}
        outcomes = {source: outcome for source, state in self.beside.items() if (outcome := state()) is not None}
        for one in self._on():
            source, (longest_s, worst) = _row_name(one.source.name), one.told()
            if longest_s is not None:
                reads[source] = max(reads.get(source, 0.0), longest_s)
                outcomes[source] = max(outcomes.get(source, ANSWERED), worst)
        return reads, outcomes

    async def run(self) -> None:
        """Tick until cancelled. A tick does not wait for the slow sources of the one before."""
        interval_ms = max(int(self._interval_s * 1000), 1)
        open_ticks: set[asyncio.Task[None]] = set()
        last: int | None = None
        try:
            while True:
                if interval_ms == 1000:
                    await self._clock.second()
                else:
                    await self._clock.sleep((interval_ms - self._clock.now_ms() % interval_ms) / 1000)
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
        """Close the sources in a thread, for it may block, and do not wait for it."""
        worker = Worker("closing")
        for one in self._sampled.values():
            one.drop()
            if not one.busy:
                worker.submit(one.closed)
        worker.close()
        self._worker.close()


def _row_name(source: str) -> str:
    """As the catalog calls it: that of a GPU ("nvml:3") as all of them."""
    return source.partition(":")[0]

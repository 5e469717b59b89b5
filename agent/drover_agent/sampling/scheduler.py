"""Read all sources on one schedule: ticks are multiples of the interval on the wall clock, the same on every node.

All sources that are due are read one after another in one thread. If they have not all answered within PATIENCE_S, each
that was not begun gets its own thread, so a source that hangs delays the others by no more than that. A slow source is
read in its own thread from then on, until it is fast again.

The sampler measures each source (duration, failures, timeouts). A tick that was missed, because the machine slept or
its clock jumped, is not made up for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

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
READ_LIMIT_S = 3.0  # from the tick
PATIENCE_S = 1.0  # 8 healthy GPUs whose calls take 140 us take 0.02 s, and 0.4 s with their process lists
THREAD = "sources"
OWN_VALUES_MS = 10_000  # between values about the sampler itself: one for each bucket of the detectors

Deliver = Callable[[int, Reading], None]


def _rows(ending: str) -> dict[str, str]:
    """Return source -> its row of the catalog with this ending."""
    names = [metric.name for metric in of_scope(Scope.NODE) if metric.name.startswith("source_")]
    return {name.removeprefix("source_").removesuffix(ending): name for name in names if name.endswith(ending)}


READ_ROWS, OUTCOME_ROWS = _rows("_read_s"), _rows("_outcome")

__all__ = ["READ_LIMIT_S", "Sampler", "SourceStats"]


class Sampler:
    """Reads sources and passes each reading to `deliver(ts_ms, reading)`, in the event loop's thread."""

    def __init__(
        self,
        deliver: Deliver,
        interval_s: float,
        clock: Clock,
        limit_s: float = READ_LIMIT_S,
        node: str | None = None,
        unscheduled: Mapping[str, Callable[[], int | None]] | None = None,
    ) -> None:
        """
        Args:
            node: deliver values about the sampler too, as values of this node; None: do not.
            unscheduled: name -> outcome now of what is read without this schedule; None: not read yet.
        """
        self._deliver, self._interval_s, self._clock, self._limit_s = deliver, interval_s, clock, limit_s
        self._patience_s = min(PATIENCE_S, limit_s / 2)
        self._scheduled: dict[str, ScheduledSource] = {}
        self._worker = Worker(THREAD)
        self._entity = Entity(Scope.NODE, node) if node else None
        self._own_period = -1  # number of the OWN_VALUES_MS in which it last delivered its own values
        self._totals = Totals()
        self.unscheduled = dict(unscheduled or {})
        self.missed_ticks = 0
        self.ticks = 0  # of `run`

    @property
    def stats(self) -> dict[str, SourceStats]:
        return {name: one.stats for name, one in self._scheduled.items()}

    def add(self, source: Source) -> None:
        """Read this source too, from the next tick. Frequent sources are read first, because they are fast."""
        if old := self._scheduled.get(source.name):
            old.drop()
        self._scheduled[source.name] = ScheduledSource(source, self._deliver, self._clock, self._totals)
        self._scheduled = dict(sorted(self._scheduled.items(), key=lambda item: item[1].source.interval_s))

    async def tick(self, ts_ms: int) -> None:
        """Read all sources that are due. Return when each has answered or overrun its limit."""
        self._deliver_own_values(ts_ms)
        began_s = self._clock.monotonic()
        together: list[Read[ScheduledSource]] = []
        apart: list[Read[ScheduledSource]] = []
        for one in self._scheduled.values():
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
                read.owner.finish(ts_ms)
            return
        rest = whole.take_rest()
        self._worker = Worker(THREAD)
        late = []
        for read in whole.begun:
            if read.outcome is None:
                late.append(read)  # the thread is in this one
            else:
                read.owner.finish(ts_ms)
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
            read.owner.finish(ts_ms)
        else:
            read.owner.mark_hung(ts_ms, self._limit_s)
            whole.done.add_done_callback(lambda _: read.owner.mark_returned())

    def _deliver_own_values(self, ts_ms: int) -> None:
        """Deliver how the ticks before this one went."""
        if self._entity is None or ts_ms // OWN_VALUES_MS == self._own_period:
            return
        first, self._own_period = self._own_period == -1, ts_ms // OWN_VALUES_MS
        if first:
            return
        totals = self._totals
        reads, outcomes = self._summaries()
        values = {
            "agent_tick_s": totals.tick_s,
            "agent_slowest_read_s": max(reads.values(), default=0.0),
            "agent_sources_failing": float(sum(one.fails for one in self._scheduled.values())),
            "agent_sources_hung": float(sum(one.hung for one in self._scheduled.values())),
            "agent_read_failures": float(totals.failures),
            "agent_missed_ticks": float(self.missed_ticks),
        }
        totals.tick_s = 0.0
        values |= {READ_ROWS[source]: read_s for source, read_s in reads.items() if source in READ_ROWS}
        values |= {OUTCOME_ROWS[source]: float(how) for source, how in outcomes.items() if source in OUTCOME_ROWS}
        on = {_row_name(one.source.name) for one in self._on()} | self.unscheduled.keys()
        off = [row for rows in (READ_ROWS, OUTCOME_ROWS) for source, row in rows.items() if source not in on]
        absent = [(self._entity, row, Absent.UNSUPPORTED) for row in off]
        self._deliver(ts_ms, Reading(rows=[(self._entity, values)], absent=absent))

    def _on(self) -> list[ScheduledSource]:
        """Return the sources that the settings do not turn off."""
        return [one for one in self._scheduled.values() if not getattr(one.source, "off", False)]

    def _summaries(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return source -> its longest read in seconds, and source -> its worst outcome.

        All GPUs count as one source. A source that was not read is left out.
        """
        reads: dict[str, float] = {}
        outcomes = {source: outcome for source, state in self.unscheduled.items() if (outcome := state()) is not None}
        for one in self._on():
            source, (longest_s, worst) = _row_name(one.source.name), one.take_summary()
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
                    if number == last:  # the timer fired a little early
                        continue
                    self.missed_ticks += max(number - last - 1, 0)
                    if abs(number - last) * self._interval_s > max(5 * self._interval_s, 5):
                        log.warning("The clock moved by %g s since the last tick.", (number - last) * self._interval_s)
                last = number
                self.ticks += 1
                task = asyncio.create_task(self.tick(number * interval_ms))
                open_ticks.add(task)
                task.add_done_callback(open_ticks.discard)
        finally:
            for task in open_ticks:
                task.cancel()

    def close(self) -> None:
        """Close the sources in a thread, because that may block, and do not wait for it."""
        worker = Worker("closing")
        for one in self._scheduled.values():
            one.drop()
            if not one.busy:
                worker.submit(one.close)
        worker.close()
        self._worker.close()


def _row_name(source: str) -> str:
    """Return the catalog's name of a source: "nvml" for each GPU's ("nvml:3")."""
    return source.partition(":")[0]

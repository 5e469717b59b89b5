"""One source on the sampler's schedule: its entities, how its reads went, and the events about that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drover_agent.clock import Clock
from drover_agent.sampling.abandonable_worker import Read
from drover_agent.sources.base import Entity, NodeEvent, Reading, Source
from drover_core.metrics.catalog import Absent, Scope
from drover_core.model.kinds import EventKind

log = logging.getLogger(__name__)

SLOW_S = 0.25  # a source whose last read took longer is read in a thread of its own
FAILING_READS = 3  # in a row, until an event reports it
STABLE_S = 60.0  # of good reads, until an event reports that a source is back: an unstable one is not reported again
LOG_S = 60.0  # failures of one source are logged at most this often
ANSWERED, FAILED, OVERRAN = range(3)  # as in catalog.READ_OUTCOMES


@dataclass(slots=True, eq=False, repr=False)
class SourceStats:
    """Reads of one source so far."""

    reads: int = 0  # that returned within their limit
    failures: int = 0  # of these, those that raised
    timeouts: int = 0
    skipped: int = 0  # ticks at which the last read had not returned
    last_s: float = 0.0
    total_s: float = 0.0
    max_s: float = 0.0
    last_error: str = ""  # of the last read; "" if it succeeded
    hung: bool = False
    longest_s: float | None = None  # of the reads since the last report; None: there was none
    worst: int = ANSWERED  # of their outcomes


@dataclass(slots=True, eq=False, repr=False)
class Totals:
    """Sums over all sources."""

    tick_s: float = 0.0  # longest tick since the last report
    failures: int = 0  # reads that raised or overran their limit


class ScheduledSource:
    """A source and its reads. For the event loop's thread."""

    def __init__(self, source: Source, deliver: Callable[[int, Reading], None], clock: Clock, totals: Totals) -> None:
        self.source, self.stats, self.slow = source, SourceStats(), False
        self._deliver, self._clock, self._totals = deliver, clock, totals
        self._known: dict[Entity, set[str]] = {}  # every metric it has given, present or absent
        self._last_ms: int | None = None
        self._began_s = 0.0  # its last read
        self._read: Read[ScheduledSource] | None = None
        self._dropped = False
        self._failed_reads = 0  # in a row
        self._failing = False  # an event has reported it
        self._good_since_s: float | None = None  # while it is failing
        self._next_log_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether its last read has not returned."""
        return self._read is not None and self._read.outcome is None

    @property
    def hung(self) -> bool:
        return self.stats.hung

    @property
    def fails(self) -> bool:
        """Whether its last read raised an error."""
        return bool(self.stats.last_error) and not self.hung

    def take_summary(self) -> tuple[float | None, int]:
        """Return the longest read in seconds (None: no read) and the worst outcome since the last call.

        A read that hangs counts with its time so far.
        """
        stats = self.stats
        longest_s, worst = stats.longest_s, stats.worst
        stats.longest_s, stats.worst = None, ANSWERED
        if self.hung:
            longest_s, worst = max(longest_s or 0.0, self._clock.monotonic() - self._began_s), OVERRAN
        return longest_s, worst

    def due(self, ts_ms: int, interval_s: float) -> bool:
        """Return whether to read at this tick; slow sources skip ticks."""
        every_ms = max(self.source.interval_s, interval_s) * 1000
        return self._last_ms is None or not 0 <= ts_ms - self._last_ms < every_ms - interval_s * 500

    def begin(self, ts_ms: int) -> Read[ScheduledSource] | None:
        """Return the read of this tick, None while an earlier one has not returned."""
        if self.busy:
            self.stats.skipped += 1
            if self.hung:
                self._mark_failed(ts_ms, Absent.TIMEOUT)
            return None
        self._last_ms, self._began_s = ts_ms, self._clock.monotonic()
        self._read = Read(self, self.source, ts_ms)
        return self._read

    def finish(self, ts_ms: int) -> None:
        """Deliver the outcome of a read that returned within its limit."""
        outcome = self._read.outcome if self._read else None
        if outcome is None or self._dropped:
            return
        stats = self.stats
        stats.reads += 1
        stats.last_s = outcome.seconds
        stats.total_s += outcome.seconds
        stats.max_s = max(stats.max_s, outcome.seconds)
        stats.longest_s = max(stats.longest_s or 0.0, outcome.seconds)
        self.slow = outcome.seconds > SLOW_S
        if outcome.reading is not None:
            stats.last_error, self._failed_reads = "", 0
            self._remember(outcome.reading)
            if self._failing:
                self._check_recovery(outcome.reading)
            self._deliver(ts_ms, outcome.reading)
            return
        stats.failures += 1
        stats.worst = max(stats.worst, FAILED)
        self._totals.failures += 1
        stats.last_error = f"{type(outcome.error).__name__}: {outcome.error}"
        if self._may_log():
            log.error("Reading source %s failed.", self.source.name, exc_info=outcome.error)
        self._mark_failed(ts_ms, Absent.ERROR)

    def mark_hung(self, ts_ms: int, limit_s: float) -> None:
        """Report a read that has not returned within its limit, and go on without it."""
        if self._dropped:
            return
        text = f"a read of {self.source.name} did not return within {limit_s:g} s"
        self.stats.timeouts += 1
        self.stats.longest_s, self.stats.worst = max(self.stats.longest_s or 0.0, limit_s), OVERRAN
        self.stats.hung, self.stats.last_error, self.slow = True, text, True
        self._totals.failures += 1
        if self._may_log():
            log.error("%s. The agent goes on without it.", text)
        self._mark_failed(ts_ms, Absent.TIMEOUT, self._driver_events("driver_hung", text))

    def mark_returned(self) -> None:
        """Report that a hung read has returned. Its values are old and dropped."""
        self.stats.hung = False
        if self._dropped:
            return
        took_s = self._clock.monotonic() - self._began_s
        self.stats.longest_s, self.stats.worst = max(self.stats.longest_s or 0.0, took_s), OVERRAN
        if reset := getattr(self.source, "again", None):
            reset()
        text = f"the read of {self.source.name} returned"
        if events := list(self._driver_events("driver_back", text)):
            self._deliver(self._clock.now_ms(), Reading(events=events))
        log.warning("Source %s answers again.", self.source.name)

    def drop(self) -> None:
        """Deliver nothing of it any longer."""
        self._dropped = True

    def close(self) -> Reading:
        """Close the source. This may block."""
        self.source.close()
        return Reading()

    def _mark_failed(self, ts_ms: int, why: Absent, events: Iterable[NodeEvent] = ()) -> None:
        self._failed_reads += 1
        self._good_since_s = None
        absent = [(entity, name, why) for entity, names in self._known.items() for name in names]
        reading = Reading(absent=absent, events=list(events))
        # A driver that hangs has been reported at once, as driver_hung.
        if self._failed_reads >= FAILING_READS and not self._failing and not (self.hung and self._reads_driver()):
            self._failing = True
            text = f"{self._failed_reads} reads of {self.source.name} in a row gave nothing: {self.stats.last_error}"
            reading.events.append(self._event("source_failing", text, self._slot))
        self._deliver(ts_ms, reading)

    def _check_recovery(self, reading: Reading) -> None:
        now_s = self._clock.monotonic()
        if self._good_since_s is None:
            self._good_since_s = now_s
        if now_s - self._good_since_s >= STABLE_S:
            self._failing, self._good_since_s = False, None
            text = f"{self.source.name} has answered for {STABLE_S:g} s"
            reading.events.append(self._event("source_back", text, self._slot))

    def _remember(self, reading: Reading) -> None:
        known = self._known
        fresh = False
        for entity, values in reading.rows:
            names = known.get(entity)
            if names is None:
                names, fresh = known.setdefault(entity, set()), True
            names.update(values)
        for entity, metric, _ in reading.absent:
            if entity not in known:
                known[entity], fresh = set(), True
            known[entity].add(metric)
        if not fresh:
            return
        # A device whose serial number became known replaces the entity without one.
        present = {entity for entity, _ in reading.rows} | {entity for entity, _, _ in reading.absent}
        for gone in known.keys() - present:
            if any(
                gone.scope is e.scope and (gone.gpu, gone.mig, gone.link) == (e.gpu, e.mig, e.link) for e in present
            ):
                del known[gone]

    @property
    def _slot(self) -> int | None:
        """The GPU that this source reads, if it reads one."""
        slot: int | None = getattr(self.source, "slot", None)
        return slot

    def _reads_driver(self) -> bool:
        return self.source.name.startswith("nvml")

    def _driver_events(self, code: str, message: str) -> Iterable[NodeEvent]:
        """Yield an event for each GPU that this source reads, or one for the node; only for sources of the driver."""
        if self._reads_driver():
            slots = {e.gpu for e in self._known if e.scope is Scope.GPU and e.gpu is not None} | {self._slot}
            found: list[int | None] = [*sorted(slot for slot in slots if slot is not None)]
            for gpu in found or [None]:
                yield self._event(code, message, gpu)

    def _event(self, code: str, message: str, gpu: int | None) -> NodeEvent:
        return NodeEvent(self._clock.now_ms(), gpu, EventKind.LIFECYCLE, code, message, "agent")

    def _may_log(self) -> bool:
        now_s = self._clock.monotonic()
        if self._next_log_s and now_s < self._next_log_s:
            return False
        self._next_log_s = now_s + LOG_S
        return True

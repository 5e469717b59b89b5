"""Decide whose clock is wrong: an agent's or the collector's.

Telemetry with an impossible time is refused, and its agent drops it. Where most agents report another day, the
collector's own clock is more likely wrong, as on a machine that starts before its time service: then telemetry stays
with the agents until the clock is set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

from drover_collector.ingest.decode import FUTURE_MS
from drover_collector.ingest.session import Session
from drover_collector.ingest.stats import IngestStats

log = logging.getLogger(__name__)

AGREEMENT_MS = 3_600_000  # agents whose clocks are this close confirm ours: data is deleted by its age
REPORT_AGAIN_S = 600.0  # an agent whose clock differs reconnects after this: its clock may have been set
REPORT_AGAIN = 5  # agents at a time
STEP_MS = 10_000  # a difference between wall clock and steady clock, between two ticks: the wall clock was set


class ClockMonitor:
    """The clocks of all agents compared with ours. Event loop only."""

    def __init__(
        self,
        stats: IngestStats,
        now_ms: Callable[[], int],
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._stats, self._now_ms, self._boot_s = stats, now_ms, boot_s
        self._reported: dict[Session, None] = {}
        self._another_day: dict[Session, None] = {}
        self._differing: dict[Session, float] = {}  # beyond AGREEMENT_MS -> since when, `boot_s`
        self._before = now_ms(), boot_s()

    @property
    def doubt(self) -> str:
        """Why no telemetry is accepted; "" while it is."""
        return self._stats.clock_doubt

    def add(self, session: Session) -> None:
        """Note the time that the agent's Hello reported."""
        self._reported[session] = None
        self._compare(session)
        self._update_doubt()

    def remove(self, session: Session) -> None:
        self._reported.pop(session, None)
        self._another_day.pop(session, None)
        self._differing.pop(session, None)
        self._update_doubt()

    def outdated(self) -> list[Session]:
        """Return a few streams to close, so that agents whose clock differed long ago report their time again."""
        before_s = self._boot_s() - REPORT_AGAIN_S
        return [session for session, at_s in islice(self._differing.items(), REPORT_AGAIN) if at_s <= before_s]

    def tick(self) -> None:
        """Correct the offsets of open streams if our clock was set. Call twice a second or so."""
        before, self._before = self._before, (self._now_ms(), self._boot_s())
        step_ms = self._before[0] - before[0] - round(1000 * (self._before[1] - before[1]))
        if abs(step_ms) < STEP_MS:
            return
        log.warning("the clock of this machine was set by %+.0f s", step_ms / 1000)
        for session in self._reported:
            session.clock.offset_ms += step_ms
            self._compare(session)
        self._update_doubt()

    def _compare(self, session: Session) -> None:
        offset_ms = abs(session.clock.offset_ms)
        self._another_day.pop(session, None)
        self._differing.pop(session, None)
        if offset_ms > FUTURE_MS:
            self._another_day[session] = None
        if offset_ms > AGREEMENT_MS:
            self._differing[session] = self._boot_s()  # newest last

    def _update_doubt(self) -> None:
        doubt, reported = "", len(self._reported)
        if 2 * len(self._another_day) > reported:
            doubt = (
                f"{len(self._another_day)} of {reported} agents report another day: this collector's clock may be"
                " wrong. Set it (timedatectl). Their telemetry waits in their spools; events are judged"
            )
            if not self._stats.clock_doubt:
                log.error("%s", doubt)
        self._stats.clock_doubt = doubt
        self._stats.clock_votes = reported, reported - len(self._differing)

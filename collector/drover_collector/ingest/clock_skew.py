"""Whose clock is wrong, an agent's or the collector's.

Telemetry of a time that cannot be is refused, and its agent drops it. Where most agents say that it is another day the
collector's own clock is likelier wrong, as of a machine that starts before its time service: then telemetry stays with
the agents until it is set.
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

AGREE_MS = 3_600_000  # agents whose clocks are this near vouch for ours: what is deleted by age goes by it
ANEW_S = 600.0  # one that differs tells its time anew after so long: it may have been set meanwhile
ANEW = 5  # at a time
STEP_MS = 10_000  # between two looks the wall clock went so much more, or less, than the time since boot: it was set


class Clocks:
    """Used in the event loop."""

    def __init__(
        self,
        stats: IngestStats,
        now_ms: Callable[[], int],
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._stats, self._now_ms, self._boot_s = stats, now_ms, boot_s
        self._told: dict[Session, None] = {}  # streams with a Hello
        self._far: dict[Session, None] = {}  # of them, those of another day
        self._apart: dict[Session, float] = {}  # those beyond AGREE_MS -> since when, `boot_s`
        self._before = now_ms(), boot_s()

    @property
    def doubted(self) -> str:
        """Why no telemetry is taken in; "": it is."""
        return self._stats.clock_doubt

    def note(self, session: Session) -> None:
        """It has told the time of its node."""
        self._told[session] = None
        self._judge(session)
        self._tell()

    def forget(self, session: Session) -> None:
        self._told.pop(session, None)
        self._far.pop(session, None)
        self._apart.pop(session, None)
        self._tell()

    def differing(self) -> list[Session]:
        """A few streams to end, so that their agents tell their time anew: those that differ and told it long ago."""
        before_s = self._boot_s() - ANEW_S
        return [session for session, at_s in islice(self._apart.items(), ANEW) if at_s <= before_s]

    def tick(self) -> None:
        """Now and then: a clock that was set is another one, also for streams that are open."""
        before, self._before = self._before, (self._now_ms(), self._boot_s())
        step_ms = self._before[0] - before[0] - round(1000 * (self._before[1] - before[1]))
        if abs(step_ms) < STEP_MS:
            return
        log.warning("the clock of this machine was set by %+.0f s", step_ms / 1000)
        for session in self._told:
            session.clock_offset_ms += step_ms
            self._judge(session)
        self._tell()

    def _judge(self, session: Session) -> None:
        offset_ms = abs(session.clock_offset_ms)
        self._far.pop(session, None)
        self._apart.pop(session, None)
        if offset_ms > FUTURE_MS:
            self._far[session] = None
        if offset_ms > AGREE_MS:
            self._apart[session] = self._boot_s()  # the newest at the end

    def _tell(self) -> None:
        doubt = ""
        if 2 * len(self._far) > len(self._told):
            doubt = (
                f"{len(self._far)} of {len(self._told)} agents say that it is another day: this collector's clock may"
                " be wrong; set it (timedatectl). Their telemetry waits with them; events are judged"
            )
            if not self._stats.clock_doubt:
                log.error("%s", doubt)
        self._stats.clock_doubt = doubt
        self._stats.clock_votes = len(self._told), len(self._told) - len(self._apart)

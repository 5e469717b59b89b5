"""Events of the agent about itself: lost data, refused messages, a disk or a clock that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable

from drover_agent.clock import Clock
from drover_agent.spool.async_spool import AsyncSpool
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

REPORT_S = 10.0  # losses and refusals are reported at most this often
QUIET_S = 60.0  # a disk that worked for so long is reported again when it fails
MAX_DAMAGE = 20  # damaged places of the spool that are named one by one
MAX_REASONS = 20  # of refusals that are counted apart
CLOCK_WRONG_S, CLOCK_RIGHT_S = 5.0, 2.5  # from the collector's clock: reported above one, forgotten below the other


class SelfReports:
    """What one agent has reported of itself, and what it has not yet."""

    def __init__(self, spool: AsyncSpool, clock: Clock, report: Callable[[str, str, int], None]) -> None:
        """`report` stores an event: its code, its message, and how many occurrences it stands for."""
        self._spool = spool
        self._clock = clock
        self._report = report
        self._refused: dict[str, int] = {}  # reason -> messages since the last report
        self._next_report_s = 0.0
        self._trouble: str | None = None  # of the disk, as reported
        self._works_since_s = 0.0
        self.clock_wrong = False

    def count_rejection(self, lane: int, seq: int, reason: str) -> None:
        known = reason if reason in self._refused or len(self._refused) < MAX_REASONS else "other reasons"
        if known not in self._refused:  # once a report, or a refused backlog fills the log
            log.warning("The collector refused %s %d: %s", pb.Lane.Name(pb.Lane.ValueType(lane)), seq, reason)
        self._refused[known] = self._refused.get(known, 0) + 1

    def report(self, clock_offset_s: float | None) -> None:
        """Report what has changed since the last report; at most every REPORT_S."""
        now_s = self._clock.monotonic()
        if now_s < self._next_report_s:
            return
        self._report_losses(now_s)
        refused, self._refused = self._refused, {}
        for reason, count in refused.items():
            self._next_report_s = now_s + REPORT_S
            self._report("batch_rejected", f"the collector refused {count} messages: {reason}", count)
        self._report_disk(now_s)
        offset_s = clock_offset_s or 0.0
        if abs(offset_s) > CLOCK_WRONG_S and not self.clock_wrong:
            self.clock_wrong = True
            self._report("clock_wrong", f"this node's clock is {offset_s:+.1f} s from the collector's", 1)
        elif abs(offset_s) < CLOCK_RIGHT_S:
            self.clock_wrong = False

    def _report_losses(self, now_s: float) -> None:
        losses = self._spool.take_losses()
        if losses is None:
            return
        self._next_report_s = now_s + REPORT_S
        parts = list(losses.damage[:MAX_DAMAGE])
        if (more := len(losses.damage) - MAX_DAMAGE) > 0:
            parts.append(f"{more} more like these")
        if losses.telemetry or losses.events:
            parts.append(f"{losses.telemetry} batches and {losses.events} events dropped: {losses.reason}")
        self._report("spool_dropped", "; ".join(parts), max(losses.telemetry + losses.events, 1))

    def _report_disk(self, now_s: float) -> None:
        """Report a disk that fails and recovers again and again as one trouble."""
        if trouble := self._spool.status.trouble:
            self._works_since_s = now_s
            if trouble != self._trouble:
                self._trouble = trouble
                self._report("spool_unwritable", f"data is kept in memory: {trouble}", 1)
        elif now_s - self._works_since_s > QUIET_S:
            self._trouble = None

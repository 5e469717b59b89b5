"""Delete stored data by age, while this machine's clock can be trusted.

An empty battery, a wrong time server or a restored machine can set a clock years ahead, and then everything is old. So
nothing is deleted for its age unless agents on other machines have the same time and the store has days of samples up
to it; and only what was found too old twice, an hour apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping

from drover_collector.ingest.clock_skew import AGREEMENT_MS
from drover_collector.store import Part, Store
from drover_core.times import iso

log = logging.getLogger(__name__)

AGREED = 3  # agents that must have our time; in a fleet of fewer than six nodes half of them
APART_S = 3600.0  # between the two passes that find the same data too old
ROWS_S = 86_400.0  # between two passes over tables without partitions
REPORT_ROWS_S = 2 * ROWS_S  # after so long it is reported that rows wait, even if no partition does


class ClockGuardedExpiry:
    """
    Args:
        votes: how many connected agents sent their time, and how many of them have ours. None: trust the clock.
        nodes: of the fleet.
        troubles: has a sentence under "expiry" while something is held back.
        boot_s: a clock that nobody sets.
    Attributes:
        dropped: expired partitions that were deleted since the start.
        held_s: how long expired data has been held back; 0: nothing is held back.
    """

    def __init__(
        self,
        store: Store,
        votes: Callable[[], tuple[int, int]] | None,
        nodes: int,
        troubles: MutableMapping[str, str],
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._store, self._votes, self._nodes, self._troubles, self._boot_s = store, votes, nodes, troubles, boot_s
        self._found: dict[tuple[str, str], float] = {}  # table, partition -> when it was first found too old
        self._rows_at = boot_s() - ROWS_S
        self._rows_found: tuple[float, int] | None = None  # when they were first due, by both clocks
        self._held_since: float | None = None
        self.dropped = 0
        self.held_s = 0.0

    def doubt(self, now_ms: int) -> str:
        """Return why the clock cannot be trusted; "": it can.

        Raises:
            StoreError
        """
        if self._votes is None:
            return ""
        sent, agree = self._votes()
        needed = min(AGREED, (self._nodes + 1) // 2)
        if not sent:
            return "no agent is connected that could say whether this machine's clock is right"
        if 2 * agree < sent:  # with this machine's own, most clocks are against it
            return (
                f"{sent - agree} of {sent} connected agents have a time that differs from this machine's by more than"
                f" {AGREEMENT_MS // 60_000} min; set the clocks that are wrong (timedatectl)"
            )
        if agree < needed:
            return (
                f"only {agree} connected {'agent has' if agree == 1 else 'agents have'} the time of this machine's"
                f" clock, {needed} are needed"
            )
        days, of = self._store.retention.days_lived(now_ms)
        if days < of:
            return (
                f"the store has samples of {days} of the last {2 * of} days, {of} are needed: if it is not as new as"
                " that, this machine's clock and its agents' were set wrong (timedatectl)"
            )
        return ""

    def once(self, now_ms: int, doubt: str) -> None:
        """Make one pass.

        Args:
            doubt: as of now.
        Raises:
            StoreError
        """
        expired, now_s = self._store.retention.expired(now_ms), self._boot_s()
        if doubt:
            self._found, self._rows_found = {}, None
            self._hold(expired, now_ms, now_s, doubt)
            return
        if self._held_since is not None:
            log.info("what is older than its retention is deleted again")
        self._held_since, self.held_s = None, 0.0
        self._troubles.pop("expiry", None)
        self._found = {(p.table, p.partition): self._found.get((p.table, p.partition), now_s) for p in expired}
        self.dropped += self._store.retention.expire(
            part for part in expired if now_s - self._found[part.table, part.partition] >= APART_S
        )
        self._rows(now_ms, now_s)

    def _rows(self, now_ms: int, now_s: float) -> None:
        if now_s - self._rows_at < ROWS_S:
            return
        if self._rows_found is None:
            self._rows_found = now_s, now_ms
        since_s, since_ms = self._rows_found
        if now_s - since_s >= APART_S:
            self._rows_at, self._rows_found = now_s, None
            self._store.retention.expire_histories(min(since_ms, now_ms))
            self._store.retention.expire_rows(min(since_ms, now_ms))

    def _hold(self, expired: list[Part], now_ms: int, now_s: float, doubt: str) -> None:
        if not expired and now_s - self._rows_at < REPORT_ROWS_S:
            self._held_since, self.held_s = None, 0.0
            self._troubles.pop("expiry", None)
            return
        if self._held_since is None:
            self._held_since = now_s
            log.warning("nothing is deleted for its age: %s", doubt)
        self.held_s = now_s - self._held_since
        since = iso(now_ms - round(self.held_s * 1000))  # by the clock of now: it may have been set meanwhile
        self._troubles["expiry"] = f"Nothing is deleted for its age since {since}: {doubt}."

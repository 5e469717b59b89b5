"""What is older than its retention goes.

On a server by the tables' TTL. The embedded store has none: its engine would ask this machine's clock alone, at any
merge, and years ahead, as after an empty battery, delete everything. Here the collector drops what has expired, when it
has grounds to believe the clock (`expiring`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

from drover_collector.store.durability.retention import REFUSALS, Retention
from drover_collector.store.durability.sizes import DAY_MS, Part
from drover_collector.store.errors import StoreError
from drover_core.times import iso

log = logging.getLogger(__name__)

LIVED_DAYS = 7  # so many days up to now the store must have samples of before anything is deleted for its age


class Expiry(Retention):
    expires: Mapping[str, str] = {}  # unpartitioned table -> when a row of it expires; a server's: none

    def expired(self, now_ms: int) -> list[Part]:
        """Partitions of which every row is older than the retention of its table, the oldest first. A server: none."""
        if not self._clients.embedded:
            return []
        days = self.kept_days
        return [
            part for part in self.partitions()
            if part.table in days and 0 < part.newest_ms + 1000 <= now_ms - days[part.table] * DAY_MS
        ]  # fmt: skip

    def expire(self, parts: Iterable[Part]) -> int:
        """Drop these partitions, as `expired` found them.

        Returns:
            How many went.
        Raises:
            StoreError: one cannot be dropped; it keeps none that comes after it.
        """
        refused: list[StoreError] = []
        count = 0
        wanted = list(parts)
        if wanted:
            # With a part the engine removes all that the table's newest ones were merged from, which would be taken
            # after a power cut instead of what the kernel had not written yet (see `sources`).
            os.sync()
        for part in wanted:
            self.fence()
            if self._drop(f"{part.table} DROP PARTITION ID '{part.partition}'", refused):
                count += 1
                log.info("%s of %s to %s: expired", part.table, iso(part.oldest_ms), iso(part.newest_ms))
            if len(refused) >= REFUSALS:
                break
        if refused:
            raise refused[0]
        return count

    def expire_rows(self, now_ms: int) -> None:
        """Forget what has expired of the tables without partitions: events, findings, results of probes, old marks.

        Raises:
            StoreError
        """
        for table, ends in self.expires.items():
            gone = f"{ends} < fromUnixTimestamp({int(now_ms) // 1000})"
            if self._clients.rows(f"SELECT 1 FROM {table} WHERE {gone} LIMIT 1"):
                self.fence()
                self._clients.command(f"ALTER TABLE {table} DELETE WHERE {gone}")

    def days_lived(self, now_ms: int) -> tuple[int, int]:
        """(on how many of the last days there are samples; how many are needed to believe the clock).

        A clock that was set years ahead, and the clocks of all agents with it, has no days behind it. Looks twice as
        far back as is needed, so that a weekend without the collector is no doubt.
        """
        kept = {name: days for name, days in self.kept_days.items() if not name.endswith("_5m")}
        needed = max(1, min(LIVED_DAYS, max(kept.values(), default=1)))
        first = now_ms // DAY_MS - 2 * needed + 1
        days: set[int] = set()
        for part in self.partitions():
            if part.table in kept and part.oldest_ms:
                since, until = max(first, part.oldest_ms // DAY_MS), min(now_ms, part.newest_ms) // DAY_MS
                days.update(range(since, until + 1))
        return len(days), needed

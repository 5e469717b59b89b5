"""Retention: delete what has expired, and make room before the disk is full.

By age: on a server by the tables' TTL. The embedded store has none: its engine would trust this machine's clock at any
merge, and if that is years ahead, as after an empty battery, delete everything. There the collector drops what has
expired, when it has reasons to trust the clock (`pipeline.expiry`).

For room: the active collector calls `make_room` every half minute. It drops the oldest samples, then rollups.
Events, incidents and decisions are deleted only by their age.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability.backup import Backups
from drover_collector.store.durability.sizes import DAY_MS, Part, StoreSizes, keep_free
from drover_collector.store.errors import StoreError
from drover_collector.store.schema.tables import Table
from drover_collector.store.sql import millis
from drover_collector.store.table_writer import WriteFence
from drover_core.times import iso

log = logging.getLogger(__name__)

# Dropped in this order: a suffix of the tables' names. No other table is ever touched.
DROPPED = ("_samples", "_10s", "_5m")
LIVED_DAYS = 7  # the store needs samples of so many recent days before anything is deleted for its age
REFUSALS = 20  # failed drops after which a pass gives up: a server may be away, and slow to fail
RECENT_MS = 3_600_000  # the newest hour is dropped last, and part by part
HISTORY_DAYS = 400  # superseded states are kept as long as events
HISTORY_CHECK_MS = 86_400_000
VERSION_DAYS = 1  # an open incident gets a version every 5 minutes; the newest has the whole timeline
SPOOL_DAYS = 90  # a spool that was silent for so long is gone; if it returns, its data is sent again


@dataclass(frozen=True, slots=True)
class Dropped:
    """A partition that was dropped to make room."""

    table: str
    from_ms: int
    to_ms: int
    bytes: int


def kept_days(tables: Iterable[Table]) -> dict[str, int]:
    """Return the days that each table of samples or rollups is kept, from its TTL."""
    found = {table.name: re.search(r"toIntervalDay\((\d+)\)", table.ttl) for table in tables}
    return {name: int(days.group(1)) for name, days in found.items() if days and name.endswith(DROPPED)}


class Retention:
    """Deletes for age, and for room on the disk.

    Attributes:
        kept_days: days that each table of samples or rollups is kept.
        expires: table without partitions -> when a row expires, as SQL; empty on a server.
    """

    def __init__(
        self,
        clients: Clients,
        fence: WriteFence,
        sizes: StoreSizes,
        backups: Backups,
        kept_days: dict[str, int],
        expires: Mapping[str, str],
    ) -> None:
        self._clients = clients
        self._fence = fence
        self._sizes = sizes
        self._backups = backups
        self._unnoted: Sequence[Dropped] = ()
        self.kept_days = kept_days
        self.expires = expires

    def make_room(
        self,
        now_ms: int,
        keep_free_bytes: int = 0,
        max_bytes: int = 0,
        disk: Callable[[], tuple[int, int] | None] | None = None,
        *,
        trusted: bool = True,
    ) -> list[Dropped]:
        """Drop the oldest partitions while less than the reserve is free, or more than `max_bytes` are held.

        A backup that is being made on the same disk is ended first, and nothing is dropped in this pass. Dropping goes
        on until there is a quarter of the reserve, or a twentieth of the cap, more room than needed, so that it does
        not start again at once.

        Args:
            keep_free_bytes: the reserve; 0: by the size of the disk. max_bytes: 0: no cap.
            trusted: False: `now_ms` may come from a wrong clock. If it is more than a day from the newest rows, these
                decide which hour is dropped last: a clock years ahead would drop it with all others, one years behind
                would drop nothing.
        Raises:
            StoreError: a partition cannot be dropped, or this collector is not the active one.
        """
        parts = self._sizes.partitions()
        lacking = self._lacking(parts, keep_free_bytes, max_bytes, disk or self._sizes.disk)
        if lacking <= 0 or self._backups.end_for_room():
            self._note_drops(now_ms, [])
            return []
        newest_ms = max((part.newest_ms for part in parts if part.table.endswith(DROPPED)), default=0)
        at_ms = now_ms if trusted or abs(newest_ms - now_ms) <= DAY_MS else newest_ms
        self._fence()
        dropped: list[Dropped] = []
        refused: list[StoreError] = []
        try:
            for step in _steps(parts, at_ms):
                if lacking <= 0 or len(refused) >= REFUSALS:
                    break
                for part in step:
                    self._fence()
                    if self._drop(f"{part.table} DROP PARTITION ID '{part.partition}'", refused):
                        lacking -= part.bytes
                        dropped.append(Dropped(part.table, part.oldest_ms, part.newest_ms, part.bytes))
            if lacking > 0 and self._clients.cluster is None:  # in a cluster parts of two shards may have one name
                self._drop_recent(at_ms, lacking, dropped)
        finally:  # whatever stopped it, what was dropped is logged and stored
            self._note_drops(now_ms, dropped)
        if refused:
            raise refused[0]
        return dropped

    def _drop(self, what: str, refused: list[StoreError]) -> bool:
        """Drop a partition. If that fails, add the error to `refused` and return False, so that others are tried."""
        try:
            # Else the engine refuses partitions above 50 GB, about what 100,000 GPUs fill in four hours.
            self._clients.command(f"ALTER TABLE {what} SETTINGS max_partition_size_to_drop = 0")
        except StoreError as error:
            refused.append(error)
            return False
        return True

    def drops(self, since_ms: int) -> list[Dropped]:
        """Return what was dropped for room since then, in order."""
        found = self._clients.rows(
            "SELECT table, toUnixTimestamp64Milli(`from`) AS from_ms, toUnixTimestamp64Milli(to) AS to_ms, bytes"
            f" FROM drops WHERE at >= fromUnixTimestamp64Milli({int(since_ms)}) ORDER BY at, from_ms, table"
        )
        return [Dropped(**row) for row in found]

    def expire_histories(self, now_ms: int) -> None:
        """Delete states superseded more than HISTORY_DAYS ago (incidents: VERSION_DAYS), and offsets of gone spools.

        The newest state of everything else stays for ever. Not by TTL: the row that ends an interval could be deleted
        before the row that begins it, which would then seem open.
        """
        before, spools, versions = (
            f"fromUnixTimestamp64Milli({int(now_ms) - days * 86_400_000})"
            for days in (HISTORY_DAYS, SPOOL_DAYS, VERSION_DAYS)
        )
        for table, gone in _superseded(before, spools, versions).items():
            if self._clients.rows(f"SELECT 1 FROM {table} WHERE {gone} LIMIT 1"):
                self._clients.command(f"ALTER TABLE {table} DELETE WHERE {gone}")

    def expired(self, now_ms: int) -> list[Part]:
        """Return the partitions whose rows have all expired, the oldest first; none on a server."""
        if not self._clients.embedded:
            return []
        days = self.kept_days
        return [
            part for part in self._sizes.partitions()
            if part.table in days and 0 < part.newest_ms + 1000 <= now_ms - days[part.table] * DAY_MS
        ]  # fmt: skip

    def expire(self, parts: Iterable[Part]) -> int:
        """Drop these partitions, as `expired` found them.

        Returns:
            How many were dropped.
        Raises:
            StoreError: one cannot be dropped; the others are.
        """
        refused: list[StoreError] = []
        count = 0
        wanted = list(parts)
        if wanted:
            # With a part the engine removes what the table's newest parts were merged from. After a power cut it would
            # need those instead of parts that the kernel had not written yet (see `damaged_parts`).
            os.sync()
        for part in wanted:
            self._fence()
            if self._drop(f"{part.table} DROP PARTITION ID '{part.partition}'", refused):
                count += 1
                log.info("%s of %s to %s: expired", part.table, iso(part.oldest_ms), iso(part.newest_ms))
            if len(refused) >= REFUSALS:
                break
        if refused:
            raise refused[0]
        return count

    def expire_rows(self, now_ms: int) -> None:
        """Delete expired rows of the tables without partitions: events, findings, results of probes, dirty ranges.

        Raises:
            StoreError
        """
        for table, ends in self.expires.items():
            gone = f"{ends} < fromUnixTimestamp({int(now_ms) // 1000})"
            if self._clients.rows(f"SELECT 1 FROM {table} WHERE {gone} LIMIT 1"):
                self._fence()
                self._clients.command(f"ALTER TABLE {table} DELETE WHERE {gone}")

    def days_lived(self, now_ms: int) -> tuple[int, int]:
        """Return on how many of the last days there are samples, and how many are needed to trust the clock.

        Behind a clock that was set years ahead, with those of all agents, there are no days with samples. Twice the
        needed days are searched, so that a weekend without the collector raises no doubt.
        """
        kept = {name: days for name, days in self.kept_days.items() if not name.endswith("_5m")}
        needed = max(1, min(LIVED_DAYS, max(kept.values(), default=1)))
        first = now_ms // DAY_MS - 2 * needed + 1
        days: set[int] = set()
        for part in self._sizes.partitions():
            if part.table in kept and part.oldest_ms:
                since, until = max(first, part.oldest_ms // DAY_MS), min(now_ms, part.newest_ms) // DAY_MS
                days.update(range(since, until + 1))
        return len(days), needed

    def _lacking(
        self, parts: list[Part], keep_free_bytes: int, max_bytes: int, disk: Callable[[], tuple[int, int] | None]
    ) -> float:
        """Return how many bytes to drop; 0 while neither limit is reached."""
        lacking = 0.0
        found = disk()
        if found is not None:
            free, total = found
            reserve = keep_free(total, keep_free_bytes)
            if free < reserve:
                lacking = reserve * 1.25 - free
        held = sum(part.bytes for part in parts)
        if max_bytes and held > max_bytes:
            lacking = max(lacking, held - max_bytes * 0.95)
        return lacking

    def _drop_recent(self, now_ms: int, lacking: float, dropped: list[Dropped]) -> None:
        """Drop the oldest parts of the newest hour, up to a minute ago: nothing else is left."""
        for suffix in DROPPED:
            found = self._clients.rows(
                "SELECT table, name, toInt64(bytes_on_disk) AS bytes,"
                " toInt64(toUnixTimestamp(min_time)) * 1000 AS from_ms,"
                f" toInt64(toUnixTimestamp(max_time)) * 1000 AS to_ms FROM {self._clients.parts}"
                f" WHERE endsWith(table, '{suffix}') AND toUnixTimestamp(max_time) BETWEEN 1 AND {now_ms // 1000 - 60}"
                " ORDER BY max_time, table"
            )
            for row in found:
                if lacking <= 0:
                    return
                try:
                    self._clients.command(f"ALTER TABLE {row['table']} DROP PART '{row['name']}'")
                except StoreError as error:  # merged just now: the next pass finds the new part
                    log.info("a part was not dropped: %s", error)
                    continue
                lacking -= row["bytes"]
                dropped.append(Dropped(row["table"], row["from_ms"], row["to_ms"], row["bytes"]))

    def _note_drops(self, now_ms: int, dropped: list[Dropped]) -> None:
        """Log what was dropped, and store it."""
        for drop in dropped:
            log.warning(
                "the disk is nearly full: dropped %s of %s to %s, %d MB",
                drop.table, iso(drop.from_ms), iso(drop.to_ms), drop.bytes >> 20,
            )  # fmt: skip
        dropped = [*self._unnoted, *dropped]
        if not dropped:
            return
        self._unnoted = dropped  # until it is written: if the disk has no room for it yet, with the next pass
        self._clients.insert(
            "drops",
            pa.table(
                {
                    "at": millis([now_ms] * len(dropped)),
                    "table": pa.array([drop.table for drop in dropped]),
                    "from": millis([drop.from_ms for drop in dropped]),
                    "to": millis([drop.to_ms for drop in dropped]),
                    "bytes": pa.array(np.array([drop.bytes for drop in dropped], np.uint64)),
                }
            ),
        )
        self._unnoted = []


def _steps(parts: list[Part], now_ms: int) -> list[list[Part]]:
    """Return the partitions to drop, in order: those of one step cover the same time and are dropped together."""
    steps: list[list[Part]] = []
    for suffix in DROPPED:
        old = [p for p in parts if p.table.endswith(suffix) and 0 < p.newest_ms < now_ms - RECENT_MS]
        by_partition: dict[str, list[Part]] = {}
        for part in sorted(old, key=lambda part: part.oldest_ms):
            by_partition.setdefault(part.partition, []).append(part)
        steps += by_partition.values()
    return steps


def _superseded(before: str, spools: str, versions: str) -> dict[str, str]:
    """Return table -> condition for the rows that no longer mean anything."""

    def not_newest(table: str, key: str, time: str) -> str:
        newest = f"SELECT {key}, max(`{time}`) FROM {table} GROUP BY {key}"
        return f"`{time}` < {before} AND ({key}, `{time}`) NOT IN ({newest})"

    ended = f"SELECT node, gpu, link, metric, `from` FROM absences WHERE closed = 1 AND `to` < {before}"
    sent = (
        f"SELECT id FROM outbox GROUP BY id HAVING argMax(state, written_ns) != 'pending' AND max(created) < {before}"
    )
    newest = "SELECT id, last.1, last.2 FROM (SELECT id, max((version, updated)) AS last FROM incidents GROUP BY id)"
    return {
        "incidents": f"updated < {versions} AND (id, version, updated) NOT IN ({newest})",
        "absences": f"(node, gpu, link, metric, `from`) IN ({ended})",
        "holdings": not_newest("holdings", "node, gpu", "from"),
        "inventory": not_newest("inventory", "node", "ts"),
        "health": not_newest("health", "node, gpu", "ts"),
        "outbox": f"id IN ({sent})",
        # Rows from before the column `at` existed have the year 1970.
        "lane_seqs": f"at < {spools} AND (node, spool) NOT IN (SELECT node, spool FROM lane_seqs"
        f" WHERE at >= {spools} OR toUnixTimestamp(at) = 0)",
    }

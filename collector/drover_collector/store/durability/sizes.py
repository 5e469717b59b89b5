"""How much the store holds, since when, and for how long its disk is large enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drover_collector.store.clickhouse.client import KEEP_FREE_BYTES, Clients

DAY_MS = 86_400_000
GIB = 1 << 30
RATE_MS = DAY_MS  # the growth of a table is measured over its newest day
SHORTEST_MS = 600_000  # a rate needs at least so much data
FOREVER_DAYS = 36_500.0  # the disk is large enough for the retention


@dataclass(frozen=True, slots=True)
class Part:
    """One partition of a table. Times are those of its rows; 0: the table is not partitioned by time."""

    table: str
    partition: str
    rows: int
    bytes: int
    oldest_ms: int
    newest_ms: int


@dataclass(frozen=True, slots=True)
class TableSize:
    """What a table holds. Times are 0 if it is empty or not partitioned by time."""

    name: str
    rows: int
    bytes: int
    oldest_ms: int
    newest_ms: int


class StoreSizes:
    """What the tables hold, and what room there is."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def partitions(self) -> list[Part]:
        """Return what each table holds, oldest partitions first. Cheap: the engine has it in memory."""
        found = self._clients.rows(
            "SELECT table, partition_id, toInt64(sum(rows)) AS rows, toInt64(sum(bytes_on_disk)) AS bytes,"
            " toInt64(toUnixTimestamp(min(min_time))) * 1000 AS oldest_ms,"
            " toInt64(toUnixTimestamp(max(max_time))) * 1000 AS newest_ms"
            f" FROM {self._clients.parts} GROUP BY table, partition_id ORDER BY oldest_ms, table, partition_id"
        )
        return [
            Part(r["table"], r["partition_id"], r["rows"], r["bytes"], r["oldest_ms"], r["newest_ms"]) for r in found
        ]

    def disk(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of an embedded store's disk; None: a server's, which is not known here."""
        return self._clients.disk()


def keep_free(total: int, setting: int) -> int:
    """Return how many bytes of a disk to keep free: the setting, or by its size; always above the engine's limit."""
    least = KEEP_FREE_BYTES + KEEP_FREE_BYTES // 2
    return max(least, setting or min(max(2 * GIB, total // 20), total // 5))


def sizes_of(parts: Iterable[Part]) -> list[TableSize]:
    """Return what each table holds, the largest first."""
    held: dict[str, list[Part]] = {}
    for part in parts:
        held.setdefault(part.table, []).append(part)
    sizes = [
        TableSize(
            name,
            sum(part.rows for part in mine),
            sum(part.bytes for part in mine),
            min((part.oldest_ms for part in mine if part.oldest_ms), default=0),
            max(part.newest_ms for part in mine),
        )
        for name, mine in held.items()
    ]
    return sorted(sizes, key=lambda size: (-size.bytes, size.name))


def bytes_per_day(parts: Sequence[Part]) -> float | None:
    """Return how fast the table of these parts grows; None: too little data."""
    newest = max((part.newest_ms for part in parts), default=0)
    recent = [part for part in parts if part.oldest_ms and part.newest_ms > newest - RATE_MS]
    span = newest - min((part.oldest_ms for part in recent), default=newest)
    return sum(part.bytes for part in recent) / span * DAY_MS if span >= SHORTEST_MS else None


def days_left(parts: Sequence[Part], retention_days: dict[str, int], room: float) -> float | None:
    """Return the days until `room` bytes are used up. Each table grows at its rate until it holds its retention.

    Args:
        retention_days: of the tables that grow with time; others are small.
    Returns:
        FOREVER_DAYS if that never happens; None if no rate is known.
    """
    growing: list[tuple[float, float]] = []  # (days until it is full, bytes a day)
    for table, days in retention_days.items():
        mine = [part for part in parts if part.table == table and part.oldest_ms]
        rate = bytes_per_day(mine)
        if rate:
            span = (max(part.newest_ms for part in mine) - min(part.oldest_ms for part in mine)) / DAY_MS
            growing.append((max(0.0, days - span), rate))
    if not growing:
        return None
    passed = 0.0
    for full in sorted({until for until, _ in growing}):
        rate = sum(each for until, each in growing if until >= full)
        if rate * (full - passed) >= room:
            return passed + max(0.0, room) / rate
        room -= rate * (full - passed)
        passed = full
    return FOREVER_DAYS

"""What the status tells of the store: sizes, how long its disk will do, and what had to go for room."""

from __future__ import annotations

from drover_collector.api.snapshot import DAY_MS, LONG_S, ApiSnapshot
from drover_collector.store import FOREVER_DAYS, KEEP_FREE_BYTES, Part, days_left, keep_free, sizes_of
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

SOON_BYTES = KEEP_FREE_BYTES + KEEP_FREE_BYTES // 4


def fill(status: pb.Status, facts: ApiSnapshot) -> None:
    """The fields about the store."""
    parts = _parts(facts)
    for size in sizes_of(parts):
        status.tables.add(
            name=size.name, rows=size.rows, bytes=size.bytes, oldest_ms=size.oldest_ms, newest_ms=size.newest_ms
        )
    status.retention_days = facts.store.retention_days
    disk = facts.store.sizes.disk()
    if disk is None:
        return
    status.store_free_bytes = disk[0]
    left = days_left(parts, facts.store.retention.kept_days, room(facts, parts, disk))
    if left is not None:
        status.store_days_left = min(left, FOREVER_DAYS)


def troubles(facts: ApiSnapshot) -> list[str]:
    """Sentences about room."""
    store, found = facts.store, []
    drops = facts.once("drops", LONG_S, lambda: store.retention.drops(facts.now_ms() - DAY_MS))
    if drops:
        size = sum(drop.bytes for drop in drops)
        kinds = "samples and rollups" if any(not drop.table.endswith("_samples") for drop in drops) else "samples"
        raw = [part for part in _parts(facts) if part.table.endswith("_samples") and part.oldest_ms]
        held = (
            _span(max(p.newest_ms for p in raw) - min(p.oldest_ms for p in raw)) + " of samples are"
            if raw
            else "none is"
        )
        found.append(
            f"The store ran short of room: in the last 24 h {_size(size)} of the oldest {kinds} were deleted,"
            f" up to {iso(max(drop.to_ms for drop in drops))}; {held} left. Give it a"
            " larger disk, or set store.retention_days to what this one holds."
        )
    disk = store.sizes.disk()
    # Half of the reserve is gone; of a small disk's, so much that the store soon takes nothing.
    if disk is not None and disk[0] < max(keep_free(disk[1], facts.config.store.keep_free_bytes) // 2, SOON_BYTES):
        found.append(
            f"The disk of the store has {_size(disk[0])} left and deleting old samples does not help: something"
            " else fills it."
        )
    return found


def _parts(facts: ApiSnapshot) -> list[Part]:
    return facts.once("parts", LONG_S, facts.store.sizes.partitions)


def room(facts: ApiSnapshot, parts: list[Part], disk: tuple[int, int]) -> float:
    """Bytes that may be added before old samples go."""
    config = facts.config.store
    left = float(disk[0] - keep_free(disk[1], config.keep_free_bytes))
    if config.max_bytes:
        left = min(left, config.max_bytes - sum(part.bytes for part in parts))
    return max(0.0, left)


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _span(ms: int) -> str:
    if ms >= 2 * DAY_MS:
        return f"{ms / DAY_MS:.1f} days"
    return f"{ms / 3_600_000:.1f} h" if ms >= 7_200_000 else f"{ms / 60_000:.0f} min"

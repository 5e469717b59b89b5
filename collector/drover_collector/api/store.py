"""The store in status, System page and metrics: sizes, how long its disk lasts, deletions for room. And backups."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from drover_collector.api.snapshot import DAY_MS, LONG_S, ApiSnapshot, RefusalError, bad_argument
from drover_collector.store import (
    FOREVER_DAYS,
    KEEP_FREE_BYTES,
    Part,
    StoreError,
    TableSize,
    days_left,
    keep_free,
    sizes_of,
)
from drover_collector.store.durability.backup import PARTIAL
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

SOON_BYTES = KEEP_FREE_BYTES + KEEP_FREE_BYTES // 4
EVERY_S = 10.0  # how often the store is asked, while somebody scrapes
WAIT_S = 2.0  # how long a scrape waits for the first answer
OLD_S = 60.0  # figures older than this are not shown: they are not how it is now
DAY_S = 86_400


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


log = logging.getLogger(__name__)


def backup(facts: ApiSnapshot, request: pb.BackupRequest) -> pb.BackupReply:
    """Make it; returns when it is whole.

    Raises:
        RefusalError: a name that is none, or what the store says.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", request.name) or request.name.endswith(PARTIAL):
        raise bad_argument(f"{request.name!r} is no name for a backup; use letters, digits, '-', '_' and '.'")
    folder = Path(facts.config.store.backup_folder) / request.name
    started = time.monotonic()
    try:
        copied = facts.store.backups.make(folder, facts.now_ms(), facts.config.store.keep_free_bytes)
    except StoreError as error:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, f"no backup was made: {error}") from None
    seconds = time.monotonic() - started
    log.info("backup %s: %d bytes in %.1f s", folder, copied.bytes, seconds)
    return pb.BackupReply(path=str(folder), bytes=copied.bytes, seconds=seconds)


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """One answer of the store. A count that is missing is not known."""

    at_s: float  # monotonic
    bytes: dict[str, float] = field(default_factory=dict)  # by table
    rows: dict[str, float] = field(default_factory=dict)
    partitions: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    free_bytes: int | None = None
    disk_bytes: int | None = None
    held_s: float | None = None
    left_s: float | None = None
    dropped_bytes: int | None = None  # for room, in the last 24 h
    sizes: tuple[TableSize, ...] = ()  # the largest first


class StoreWatch:
    """The newest figures. `look` starts a reading when the newest is old; at most one runs at a time."""

    def __init__(self, facts: ApiSnapshot) -> None:
        self._facts = facts
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._reading = False
        self._figures: StoreFigures | None = None
        self._failed = False

    def look(self) -> StoreFigures | None:
        """The figures, or None while the store does not answer."""
        now = time.monotonic()
        with self._lock:
            due = not self._reading and (self._figures is None or now - self._figures.at_s >= EVERY_S)
            if due:
                self._reading = True
                self._answered.clear()
                threading.Thread(target=self._read, name="metrics-store", daemon=True).start()
        if self._figures is None or now - self._figures.at_s >= OLD_S:
            self._answered.wait(WAIT_S)
        with self._lock:
            figures, failed = self._figures, self._failed
        fresh = figures is not None and time.monotonic() - figures.at_s < OLD_S
        return figures if fresh and not failed else None

    def _read(self) -> None:
        try:
            figures = read(self._facts)
            with self._lock:
                self._figures, self._failed = figures, False
        except Exception as error:  # noqa: BLE001  # shown on the page; a defect in one figure must not end them all
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                log.warning(
                    "metrics: the store does not say how it stands: %s",
                    error if isinstance(error, StoreError) else repr(error),
                )
        finally:
            with self._lock:
                self._reading = False
            self._answered.set()


def read(facts: ApiSnapshot) -> StoreFigures:
    """Ask the store. Cheap: it answers from the names of its parts.

    Raises:
        StoreError: it does not answer.
    """
    store = facts.store
    parts = store.sizes.partitions()
    sizes = sizes_of(parts)
    disk = store.sizes.disk()
    raw = [part for part in parts if part.table.endswith("_samples") and part.oldest_ms]
    left = None if disk is None else days_left(parts, store.retention.kept_days, room(facts, parts, disk))
    return StoreFigures(
        time.monotonic(),
        {size.name: size.bytes for size in sizes},
        {size.name: size.rows for size in sizes},
        dict(Counter(part.table for part in parts)),
        facts.totals().samples,
        None if disk is None else disk[0],
        None if disk is None else disk[1],
        (max(p.newest_ms for p in raw) - min(p.oldest_ms for p in raw)) / 1000 if raw else None,
        None if left is None else min(left, FOREVER_DAYS) * DAY_S,
        sum(drop.bytes for drop in store.retention.drops(facts.now_ms() - DAY_S * 1000)),
        tuple(sizes),
    )

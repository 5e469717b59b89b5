"""The store's figures for the metrics page and Status.

A thread of its own reads them, so that a store that hangs blocks neither.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.api.store import room
from drover_collector.store import FOREVER_DAYS, StoreError, TableSize, days_left, sizes_of

log = logging.getLogger(__name__)

EVERY_S = 10.0  # how often the store is asked, while somebody scrapes
WAIT_S = 2.0  # how long a scrape waits for the first answer
OLD_S = 60.0  # figures older than this are not shown: they are not how it is now
DAY_S = 86_400


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
        except Exception as error:  # noqa: BLE001  # told on the page; a defect in one figure must not end them all
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

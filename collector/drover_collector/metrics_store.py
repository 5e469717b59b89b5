"""What the metrics page says of the store: read by a thread of its own, so that one that hangs holds up no scrape."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from drover_collector import api_store
from drover_collector.api_facts import Facts
from drover_collector.exposition import Page
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

    def __init__(self, facts: Facts) -> None:
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


def read(facts: Facts) -> StoreFigures:
    """Ask the store. Cheap: it answers from the names of its parts.

    Raises:
        StoreError: it does not answer.
    """
    store = facts.store
    parts = store.partitions()
    sizes = sizes_of(parts)
    disk = store.disk()
    raw = [part for part in parts if part.table.endswith("_samples") and part.oldest_ms]
    left = None if disk is None else days_left(parts, store.kept_days, api_store.room(facts, parts, disk))
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
        sum(drop.bytes for drop in store.drops(facts.now_ms() - DAY_S * 1000)),
        tuple(sizes),
    )


def add(page: Page, facts: Facts, figures: StoreFigures | None) -> None:
    """The families about the store. Figures that it does not tell are left out, never 0."""
    page.gauge("drover_store_answers", "1 while the store says how it stands, else 0", int(figures is not None))
    page.gauge(
        "drover_store_retention_seconds", "raw samples older than this are deleted", facts.store.retention_days * DAY_S
    )
    if facts.expiring is not None:
        page.gauge(
            "drover_store_expiry_held_seconds",
            "for how long what is too old has been kept, because the clock is doubted; 0: it is deleted",
            facts.expiring.held_s,
        )
    integrity = facts.store.integrity
    if integrity is not None:
        page.gauge(
            "drover_store_damaged_parts", "damaged parts set aside in the store's folder", len(integrity.damages)
        )
    marks, oldest_ms = facts.store.lag(facts.now_ms())
    page.gauge("drover_rollup_marks", "spans of rollups that wait to be made again, for late data", marks)
    page.gauge("drover_rollup_oldest_mark_seconds", "age of the oldest of them; 0: none waits", oldest_ms / 1000)
    if figures is None:
        return
    page.gauge("drover_store_bytes", "size of the store, by table", figures.bytes, "table")
    page.gauge(
        "drover_store_rows", "rows of the store, by table; a resend may count twice for a while", figures.rows, "table"
    )
    page.gauge("drover_store_partitions", "partitions of the store, by table", figures.partitions, "table")
    page.gauge("drover_store_samples", "samples in the store", figures.samples)
    page.gauge("drover_store_free_bytes", "free bytes of an embedded store's disk", figures.free_bytes)
    page.gauge("drover_store_disk_bytes", "size of an embedded store's disk", figures.disk_bytes)
    page.gauge("drover_store_held_seconds", "time from the oldest raw sample to the newest", figures.held_s)
    page.gauge(
        "drover_store_left_seconds",
        "until the oldest samples must go for room, at the present rate; a hundred years: never",
        figures.left_s,
    )
    page.gauge("drover_store_dropped_bytes", "bytes deleted for room in the last 24 hours", figures.dropped_bytes)

"""The metrics page's families about the store."""

from __future__ import annotations

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.api.store import DAY_S, StoreFigures
from drover_collector.observability.page import Page


def add(page: Page, facts: ApiSnapshot, figures: StoreFigures | None) -> None:
    """Add the families. Figures that the store does not give are left out, never 0."""
    page.gauge("drover_store_answers", "1 while the store says how it stands, else 0", int(figures is not None))
    page.gauge(
        "drover_store_retention_seconds", "raw samples older than this are deleted", facts.store.retention_days * DAY_S
    )
    if facts.parts.expiry is not None:
        page.gauge(
            "drover_store_expiry_held_seconds",
            "for how long what is too old has been kept, because the clock is doubted; 0: it is deleted",
            facts.parts.expiry.held_s,
        )
    integrity = facts.store.integrity
    if integrity is not None:
        page.gauge(
            "drover_store_damaged_parts", "damaged parts set aside in the store's folder", len(integrity.damages)
        )
    marks, oldest_ms = facts.store.dirty_ranges.lag(facts.now_ms())
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

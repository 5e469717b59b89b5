"""What the pages about jobs, fabric and heat are made of: the newest closed buckets, and what counters grew by since.

They are the buckets that the detectors judged; a collector that does not detect reads two of the store instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from drover_collector.api.moment import Moment
from drover_collector.api.snapshot import LONG_S, ApiSnapshot
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Floats
from drover_collector.fleet.ports import fitted
from drover_collector.store.schema.tables import samples_table
from drover_core.metrics.catalog import Scope
from drover_core.model.events import SEVERITY_ORDER, Incident, Severity

SILENT_MS = 60_000  # values older than this are not what a GPU does now
COUNTED_MS = 3_600_000  # errors are counted over the last hour
COUNTED_S = 30.0  # so long the counters of an hour ago are kept
MINUTE_MS = 60_000  # some counters are read each 30 s only
NOW = 3  # buckets whose newest value stands for now: agents may read each 10 s, and be late
APART = 5  # buckets between the two that a standby reads: rates need two


def recent(facts: ApiSnapshot) -> tuple[Bucket, ...]:
    """The newest closed buckets, oldest first; none where nothing was stored lately."""
    if isinstance(facts, Moment):
        return facts.buckets()
    now_ms = facts.now_ms()
    held = facts.pipeline.engine.buckets
    if held and held[-1].end_ms > now_ms - SILENT_MS:
        return held
    if facts.pipeline.leading:
        return ()
    newest_ms = (now_ms - facts.pipeline.lag_ms) // BUCKET_MS * BUCKET_MS - BUCKET_MS

    def read() -> tuple[Bucket, ...]:
        starts = (newest_ms - APART * BUCKET_MS, newest_ms)
        return tuple(facts.store.buckets.read(facts.index, start_ms) for start_ms in starts)

    found = facts.once("buckets of the store", LONG_S, read)
    return found if found and found[-1].gpu_rows.any() | found[-1].node_rows.any() else ()


def columns(buckets: Sequence[Bucket], scope: Scope) -> list[tuple[int, Mapping[str, Floats]]]:
    """(end, columns) of each bucket."""
    return [(b.end_ms, {Scope.GPU: b.gpu, Scope.NODE: b.node, Scope.LINK: b.link}[scope]) for b in buckets]


def _sized(values: Floats | None, scope: Scope, size: int) -> Floats | None:
    """A column of `size` entities: ports may have come since it was laid out. None for a column of another fleet."""
    if values is None or len(values) == size:
        return values
    return fitted(values, size) if scope is Scope.LINK else None


def last_known(buckets: Sequence[Bucket], scope: Scope, metric: str, size: int) -> Floats:
    """The newest value of each entity within the buckets, float64 [size]; NaN where none came."""
    found = np.full(size, np.nan)
    for _, column in columns(buckets, scope):
        if (values := _sized(column.get(metric), scope, size)) is not None:
            found = np.where(np.isnan(values), found, values)
    return found


def per_second(buckets: Sequence[Bucket], scope: Scope, metric: str, size: int) -> Floats:
    """Growth of a counter from its first to its last value within the buckets, float64 [size]; NaN where fewer than two
    values arrived or it was reset."""
    before, now, since_ms, at_ms = (np.full(size, np.nan) for _ in range(4))
    for end_ms, column in columns(buckets, scope):
        if (values := _sized(column.get(metric), scope, size)) is None:
            continue
        known = ~np.isnan(values)
        fresh = known & np.isnan(before)
        before[fresh], since_ms[fresh] = values[fresh], end_ms
        now[known], at_ms[known] = values[known], end_ms
    elapsed_s, grown = (at_ms - since_ms) / 1000, now - before
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((elapsed_s > 0) & (grown >= 0), grown / elapsed_s, np.nan)


def counted(
    facts: ApiSnapshot, buckets: Sequence[Bucket], scope: Scope, metrics: Sequence[str], size: int
) -> tuple[int, dict[str, Floats]]:
    """(since when, metric -> how much its counter grew since, float64 [size]); NaN where either end is not known.

    A counter that is lower than before was reset with its driver: its value is the growth since.
    """
    if not buckets:
        return 0, {}
    oldest_ms = facts.store.rows.oldest_ms(samples_table(scope))
    if oldest_ms is None:
        return 0, {}
    from_ms = max((buckets[-1].end_ms - COUNTED_MS) // MINUTE_MS, -(-oldest_ms // MINUTE_MS)) * MINUTE_MS

    def read() -> tuple[int, dict[str, Floats]]:
        return from_ms, facts.store.buckets.values_at(facts.index, scope, from_ms, MINUTE_MS, metrics)

    since_ms, before = facts.once(("counters", scope), COUNTED_S, read)
    found = {}
    for metric in metrics:
        now, then = last_known(buckets, scope, metric, size), _sized(before.get(metric), scope, size)
        if then is not None:
            with np.errstate(invalid="ignore"):
                found[metric] = np.where(now >= then, now - then, np.where(np.isnan(now) | np.isnan(then), np.nan, now))
    return since_ms, found


def total(found: Mapping[str, Floats], metrics: Iterable[str], size: int) -> Floats:
    """Sum over the metrics that are known, NaN where none is."""
    rows = [found[metric] for metric in metrics if metric in found]
    if not rows:
        return np.full(size, np.nan)
    table = np.array(rows)
    return np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(table, axis=0))


def known(value: float) -> float | None:
    """For an optional field of an answer: None where it is not known."""
    return float(value) if np.isfinite(value) else None


def is_warning(incident: Incident) -> bool:
    """Return True if the incident is open and not only informational."""
    return incident.closed_ms is None and SEVERITY_ORDER.index(incident.severity) >= SEVERITY_ORDER.index(
        Severity.WARNING
    )

"""Buckets read from the store: the newest for the detectors, past ones for a start or a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.buckets import BUCKET_MS, NO_WORKLOADS, Bucket, Ints, LazyColumns, Workloads
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import Mask, Stored, storage_dtype
from drover_collector.store.repositories.jobs import JobTable
from drover_collector.store.rollups.rollups import Rollups
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.fold import Folded, join, units
from drover_collector.store.samples.rows import SampleRows
from drover_collector.store.samples.spans import Span, merged
from drover_collector.store.schema.tables import samples_table
from drover_collector.store.sql import Floats, numbers, sql_time_range
from drover_core.metrics.catalog import Scope


@dataclass(slots=True)
class _Laid:
    """One bucket of a scope, filled piece by piece.

    Attributes:
        rows: int32 [E]; columns: metric -> (stored form [E], present bool [E]).
    """

    rows: Ints
    columns: dict[str, tuple[Stored, Mask]] = field(default_factory=dict)

    def values(self) -> Mapping[str, Floats]:
        made: dict[str, Callable[[], Floats]] = {}
        for name, (stored, present) in self.columns.items():
            if present.any():
                made[name] = packed(name, stored, present)
        return LazyColumns(made)


class BucketReader:
    """Reads buckets of all scopes. Thread-safe."""

    def __init__(
        self, clients: Clients, registry: EntityRegistry, rows: SampleRows, rollups: Rollups, jobs: JobTable
    ) -> None:
        self._clients = clients
        self._registry = registry
        self._rows = rows
        self._rollups = rollups
        self._jobs = jobs

    def read(self, index: FleetIndex, start_ms: int, length_ms: int = BUCKET_MS) -> Bucket:
        """Return one value per entity and metric of [start_ms, start_ms + length_ms), as `buckets.aggregate` does."""
        span = (start_ms, start_ms + length_ms)
        folds = {}
        for scope in Scope:
            even = length_ms == BUCKET_MS and start_ms % BUCKET_MS == 0
            level = self._rollups.level_of(scope, span) if even else None
            if self._registry.count(scope):
                folds[scope] = self._rows.fold(scope, [span], length_ms, level=level)
        return self._bucket(index, start_ms, length_ms, folds)

    def read_closing(self, index: FleetIndex, start_ms: int) -> Bucket:
        """Return the bucket that is just over. For the active collector, which then calls `Rollups.roll_up`."""
        return self._bucket(index, start_ms, BUCKET_MS, self._rollups.closing_folds(start_ms))

    def read_past(self, index: FleetIndex, start_ms: int, count: int, *, values: bool = True) -> list[Bucket]:
        """Return the `count` buckets of 10 s from `start_ms` on, as `read` does; several at once take less time.

        Args:
            values: False: only which entities reported, and which job held each GPU.
        """
        starts = [start_ms + n * BUCKET_MS for n in range(count)]
        gpu = self._laid(index, Scope.GPU, starts, values)
        node = self._laid(index, Scope.NODE, starts, values)
        link = self._laid(index, Scope.LINK, starts, values)
        work = self._past_workloads(index, starts) if values else [NO_WORKLOADS] * count
        held = self._jobs.at_times(index, [at + BUCKET_MS for at in starts])
        return [
            Bucket(
                at,
                BUCKET_MS,
                gpu[n].values(),
                node[n].values(),
                gpu[n].rows,
                node[n].rows,
                *held[n],
                link[n].values(),
                work=work[n],
            )
            for n, at in enumerate(starts)
        ]

    def past_jobs(self, index: FleetIndex, start_ms: int, count: int) -> list[Bucket]:
        """Return the same buckets without values and rows: only which job held each GPU."""
        starts = [start_ms + n * BUCKET_MS for n in range(count)]
        gpus, nodes = np.zeros(index.gpu_count, np.int32), np.zeros(index.node_count, np.int32)
        held = self._jobs.at_times(index, [at + BUCKET_MS for at in starts])
        return [Bucket(at, BUCKET_MS, {}, {}, gpus, nodes, *held[n]) for n, at in enumerate(starts)]

    def values_at(
        self, index: FleetIndex, scope: Scope, start_ms: int, length_ms: int, metrics: Sequence[str]
    ) -> dict[str, Floats]:
        """Return metric -> value of each entity in [start_ms, start_ms + length_ms), laid out as in a Bucket.

        The length is a multiple of 10 s, the start one of the length. NaN: absent; no key: nothing reported it.
        """
        span = (start_ms, start_ms + length_ms)
        level = self._rollups.level_of(scope, span)
        folds = {scope: self._rows.fold(scope, [span], length_ms, level=level, metrics=metrics, counts=False)}
        return dict(self._laid_out(index, scope, folds, span[1])[0])

    def row_counts(self, index: FleetIndex, start_ms: int, length_ms: int) -> Bucket:
        """Return a bucket without values: only how many rows of each GPU and node are stored."""
        gpu_rows = self._row_counts(index, Scope.GPU, start_ms, length_ms)
        node_rows = self._row_counts(index, Scope.NODE, start_ms, length_ms)
        self._row_counts(index, Scope.LINK, start_ms, length_ms)
        jobs = np.full(index.gpu_count, -1, np.int32)
        return Bucket(start_ms, length_ms, {}, {}, gpu_rows, node_rows, jobs, (), {})

    def _row_counts(self, index: FleetIndex, scope: Scope, start_ms: int, length_ms: int) -> Ints:
        table = self._clients.arrow(
            "SELECT entity_id, count() AS n, toUnixTimestamp64Milli(max(ts)) AS newest"
            f" FROM {samples_table(scope)} WHERE {sql_time_range(start_ms, start_ms + length_ms)} GROUP BY entity_id"
        )
        ids = numbers(table, "entity_id")
        self._registry.note_seen(ids, numbers(table, "newest"))
        rows, target = self._registry.map(index, scope, start_ms + length_ms).find(ids)
        counts = np.zeros(size_of(index, scope), np.int32)
        counts[target] = numbers(table, "n")[rows]
        return counts

    def _bucket(self, index: FleetIndex, start_ms: int, length_ms: int, folds: Mapping[Scope, Folded]) -> Bucket:
        end_ms = start_ms + length_ms
        gpu, gpu_rows = self._laid_out(index, Scope.GPU, folds, end_ms)
        node, node_rows = self._laid_out(index, Scope.NODE, folds, end_ms)
        link, _ = self._laid_out(index, Scope.LINK, folds, end_ms)
        jobs, names = self._jobs.at(index, end_ms)
        folded = folds.get(Scope.WORKLOAD)
        work = NO_WORKLOADS if folded is None else self._workloads(index, folded)
        return Bucket(start_ms, length_ms, gpu, node, gpu_rows, node_rows, jobs, names, link, work=work)

    def _workloads(self, index: FleetIndex, folded: Folded) -> Workloads:
        if not len(folded.ids):
            return NO_WORKLOADS
        places = self._registry.workloads(index)
        rows, at = places.find(folded.ids)
        columns = {name: units(name, stored, mask)[rows] for name, (stored, mask) in folded.columns.items()}
        return Workloads.of(places.node[at], [places.names[n] for n in at.tolist()], columns)

    def _past_workloads(self, index: FleetIndex, starts: list[int]) -> list[Workloads]:
        if not self._registry.count(Scope.WORKLOAD):
            return [NO_WORKLOADS] * len(starts)
        parts: list[list[Folded]] = [[] for _ in starts]
        for level, spans in self._by_level(Scope.WORKLOAD, starts).items():
            for folded in self._rows.folds(Scope.WORKLOAD, merged(spans), BUCKET_MS, level=level):
                for n, at in enumerate(starts):
                    parts[n].append(folded.where(folded.start_ms == at))
        return [self._workloads(index, join(part)) for part in parts]

    def _by_level(self, scope: Scope, starts: Sequence[int]) -> dict[str | None, list[Span]]:
        """Return which buckets are read from which rollup; None: from the samples."""
        by_level: dict[str | None, list[Span]] = {}
        for at in starts:
            by_level.setdefault(self._rollups.level_of(scope, (at, at + BUCKET_MS)), []).append((at, at + BUCKET_MS))
        return by_level

    def _laid_out(
        self, index: FleetIndex, scope: Scope, folds: Mapping[Scope, Folded], at_ms: int
    ) -> tuple[Mapping[str, Floats], Ints]:
        folded = folds.get(scope)
        places = None if folded is None else self._registry.map(index, scope, at_ms)
        count = size_of(index, scope)  # after the map, which may add ports
        counts = np.zeros(count, np.int32)
        if folded is None or places is None or not count:
            return {}, counts
        rows, target = places.find(folded.ids)
        counts[target] = folded.rows[rows]
        columns: dict[str, Callable[[], Floats]] = {}
        for name, (stored, mask) in folded.columns.items():
            there = mask[rows]
            if there.any():
                laid, present = np.zeros(count, stored.dtype), np.zeros(count, np.bool_)
                laid[target], present[target] = stored[rows], there
                columns[name] = packed(name, laid, present)
        return LazyColumns(columns), counts

    def _laid(self, index: FleetIndex, scope: Scope, starts: list[int], values: bool) -> list[_Laid]:
        places = [self._registry.map(index, scope, at + BUCKET_MS) for at in starts]
        size = size_of(index, scope)  # after the maps, which may add ports
        laid = [_Laid(np.zeros(size, np.int32)) for _ in starts]
        if not size or not self._registry.count(scope):
            return laid
        for level, spans in self._by_level(scope, starts).items():
            for folded in self._rows.folds(
                scope, merged(spans), BUCKET_MS, level=level, metrics=None if values else ()
            ):
                for n, at in enumerate(starts):
                    mine = np.flatnonzero(folded.start_ms == at)
                    rows, target = places[n].find(folded.ids[mine])
                    _fill(laid[n], folded, mine[rows], target)
        return laid


def _fill(laid: _Laid, folded: Folded, rows: npt.NDArray[np.intp], target: npt.NDArray[np.int32]) -> None:
    laid.rows[target] = folded.rows[rows]
    for name, (stored, mask) in folded.columns.items():
        there = mask[rows]
        if not there.any():
            continue
        if name not in laid.columns:
            size = len(laid.rows)
            laid.columns[name] = np.zeros(size, storage_dtype(name)), np.zeros(size, np.bool_)
        values, present = laid.columns[name]
        values[target], present[target] = stored[rows], there


def size_of(index: FleetIndex, scope: Scope) -> int:
    """Return how many entities a column of a bucket has."""
    return {Scope.GPU: index.gpu_count, Scope.NODE: index.node_count, Scope.LINK: len(index.ports)}[scope]


def packed(metric: str, stored: Stored, present: Mask) -> Callable[[], Floats]:
    """Return a function that returns the column, and keeps it in few bytes.

    Most columns are counts and limits that are equal all over the fleet, or need fewer bytes than their type has.
    """
    if stored.dtype.kind in "iu":
        low, high = stored.min(), stored.max()
        least = np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high))
        if low == high:
            stored = np.broadcast_to(low, stored.shape)
        elif least.itemsize < stored.itemsize:
            stored = stored.astype(least)
    return partial(unpacked, metric, stored, None if present.all() else np.packbits(present))


def unpacked(metric: str, stored: Stored, present: npt.NDArray[np.uint8] | None) -> Floats:
    mask = (
        np.ones(len(stored), np.bool_) if present is None else np.unpackbits(present, count=len(stored)).view(np.bool_)
    )
    return units(metric, stored, mask)

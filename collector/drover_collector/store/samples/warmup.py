"""Several past buckets read at once, for a start: the store lies by entity, so that one costs a third of nine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from drover_collector.fleet.buckets import (
    BUCKET_MS,
    Bucket,
    Ints,
    Lazy,
)
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.base import Floats, numbers, sql_string, sql_timestamp
from drover_collector.store.records import Mask, Millis, Stored, storage_dtype
from drover_collector.store.samples.fold import Folded
from drover_collector.store.samples.read import (
    Reads,
    coded,
    packed,
    size_of,
)
from drover_collector.store.samples.rows import IDS_MAX, Span, merged
from drover_core.metrics.catalog import Scope

Jobs = tuple[Ints, tuple[str, ...]]


@dataclass(slots=True)
class _Laid:
    """One bucket of a scope, filled from the pieces in which it is read.

    Attributes:
        rows: int32 [E]; columns: metric -> (stored form [E], present bool [E]).
    """

    rows: Ints
    columns: dict[str, tuple[Stored, Mask]] = field(default_factory=dict)

    def values(self) -> Mapping[str, Floats]:
        made: dict[str, Callable[[], Floats]] = {}
        for name, (stored, told) in self.columns.items():
            if told.any():
                made[name] = packed(name, stored, told)
        return Lazy(made)


class PastBuckets(Reads):
    def past_buckets(self, index: FleetIndex, start_ms: int, count: int, *, values: bool = True) -> list[Bucket]:
        """The `count` buckets of 10 s from `start_ms` on, each as `bucket` gives it.

        Args:
            values: False: without them, who was heard and who held which GPU.
        """
        starts = [start_ms + n * BUCKET_MS for n in range(count)]
        gpu = self._laid(index, Scope.GPU, starts, values)
        node = self._laid(index, Scope.NODE, starts, values)
        link = self._laid(index, Scope.LINK, starts, values)
        held = self.jobs_over(index, [at + BUCKET_MS for at in starts])
        return [
            Bucket(
                at, BUCKET_MS, gpu[n].values(), node[n].values(), gpu[n].rows, node[n].rows, *held[n], link[n].values()
            )
            for n, at in enumerate(starts)
        ]

    def past_holders(self, index: FleetIndex, start_ms: int, count: int) -> list[Bucket]:
        """The same buckets without values and rows: who held which GPU."""
        starts = [start_ms + n * BUCKET_MS for n in range(count)]
        gpus, nodes = np.zeros(index.gpu_count, np.int32), np.zeros(index.node_count, np.int32)
        held = self.jobs_over(index, [at + BUCKET_MS for at in starts])
        return [Bucket(at, BUCKET_MS, {}, {}, gpus, nodes, *held[n]) for n, at in enumerate(starts)]

    def _laid(self, index: FleetIndex, scope: Scope, starts: list[int], values: bool) -> list[_Laid]:
        places = [self._placements.map(index, scope, at + BUCKET_MS) for at in starts]
        size = size_of(index, scope)  # after the maps, which bring ports that are new
        laid = [_Laid(np.zeros(size, np.int32)) for _ in starts]
        if not size or not self._placements.count(scope):
            return laid
        by_level: dict[str | None, list[Span]] = {}
        for at in starts:
            by_level.setdefault(self.level_of(scope, (at, at + BUCKET_MS)), []).append((at, at + BUCKET_MS))
        for level, spans in by_level.items():
            for folded in self.folds(scope, merged(spans), BUCKET_MS, level=level, metrics=None if values else ()):
                for n, at in enumerate(starts):
                    mine = np.flatnonzero(folded.start_ms == at)
                    rows, target = places[n].find(folded.ids[mine])
                    _fill(laid[n], folded, mine[rows], target)
        return laid

    def jobs_over(self, index: FleetIndex, moments: list[int]) -> list[Jobs]:
        """`jobs_at` of several moments, in order of time."""
        newest = self._clients.arrow(
            "SELECT node, gpu, job, toUnixTimestamp64Milli(`from`) AS from_ms FROM holders FINAL ORDER BY node, gpu"
        )
        later = newest.filter(pc.greater(newest["from_ms"], moments[0])).select(["node", "gpu"]).to_pylist()
        told = [newest]
        for at in range(0, len(later), IDS_MAX):  # what changed meanwhile: its history tells
            which = ", ".join(f"({sql_string(row['node'])}, {int(row['gpu'])})" for row in later[at : at + IDS_MAX])
            of = f"FROM holdings WHERE (node, gpu) IN ({which}) AND `from`"
            queries = (  # who held it at the first moment, and who since: a GPU has thousands of holders in a year
                "SELECT node, gpu, argMax(job, `from`) AS job, toUnixTimestamp64Milli(max(`from`)) AS from_ms"
                f" {of} <= {sql_timestamp(moments[0])} GROUP BY node, gpu",
                f"SELECT node, gpu, job, toUnixTimestamp64Milli(`from`) AS from_ms"
                f" {of} > {sql_timestamp(moments[0])} AND `from` <= {sql_timestamp(moments[-1])}",
            )
            told += [found.cast(newest.schema) for found in map(self._clients.arrow, queries) if found.num_rows]
        every = pa.concat_tables(told)
        place = self._places_of(index, every)
        there = np.flatnonzero(place >= 0)
        from_ms: Millis = numbers(every, "from_ms").astype(np.int64)[there]
        order = np.argsort(from_ms, kind="stable")
        place, from_ms = place[there][order], from_ms[order]
        names, job = coded(every["job"])
        job = job[there][order]
        return [_held_at(index, place, from_ms, np.array(names), job, at) for at in moments]

    def _places_of(self, index: FleetIndex, told: pa.Table) -> npt.NDArray[np.intp]:
        """GPU of each row of (node, gpu), -1 for one that the fleet does not have."""
        nodes, node = coded(told["node"])
        if not nodes:
            return np.zeros(0, np.intp)
        number = np.array([index.node_number.get(name, -1) for name in nodes], np.intp)[node]
        slot = numbers(told, "gpu").astype(np.intp)
        there = (number >= 0) & (slot >= 0) & (slot < np.diff(index.first_gpu)[number])
        return np.where(there, index.first_gpu[number] + slot, -1)


def _fill(laid: _Laid, folded: Folded, rows: npt.NDArray[np.intp], target: npt.NDArray[np.int32]) -> None:
    laid.rows[target] = folded.rows[rows]
    for name, (stored, mask) in folded.columns.items():
        there = mask[rows]
        if not there.any():
            continue
        if name not in laid.columns:
            size = len(laid.rows)
            laid.columns[name] = np.zeros(size, storage_dtype(name)), np.zeros(size, np.bool_)
        values, told = laid.columns[name]
        values[target], told[target] = stored[rows], there


def _held_at(
    index: FleetIndex,
    place: npt.NDArray[np.intp],
    from_ms: Millis,
    names: npt.NDArray[np.str_],
    job: npt.NDArray[np.intp],
    at_ms: int,
) -> Jobs:
    """Who holds each GPU at a moment, out of all that is told, in order of time."""
    upto = int(np.searchsorted(from_ms, at_ms, side="right"))
    newest = np.full(index.gpu_count, -1, np.intp)
    newest[place[:upto]] = job[:upto]  # the last of each GPU stays
    if "" in names:
        newest[newest == names.tolist().index("")] = -1
    jobs = np.full(index.gpu_count, -1, np.int32)
    held = newest >= 0
    if not held.any():
        return jobs, ()
    used, codes = np.unique(names[newest[held]], return_inverse=True)
    jobs[held] = codes
    return jobs, tuple(map(str, used))

"""Reads of samples: buckets for the detectors, newest values for the console, totals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

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
from drover_collector.store.base import Floats, in_units, numbers, sql_string, sql_time_range, sql_timestamp, values
from drover_collector.store.records import EntityRow, Ids, Mask, Millis, Stored, Totals
from drover_collector.store.rollups.rollups import Rollups
from drover_collector.store.samples.entities import Map
from drover_collector.store.samples.fold import Folded, units
from drover_collector.store.samples.rows import IDS_MAX, LEAN, Span
from drover_collector.store.schema.tables import rollup_table, samples_table
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope

NEWEST_MS = 8_000  # batches of 5 s, and a while on the way
ABSENT_S, ABSENT_MAX = 30.0, 1_000  # where a metric is absent is known for so long, if so few
ValueKey = tuple[Scope, int | None, str | None]  # scope, gpu, link


class Reads(Rollups):
    _absent: Mapping[str, tuple[int, float, Sequence[Mapping[str, Any]]]] = MappingProxyType({})  # see _absent_now

    def bucket(self, index: FleetIndex, start_ms: int, length_ms: int = BUCKET_MS) -> Bucket:
        """One value per entity and metric of [start_ms, start_ms + length_ms), as `buckets.aggregate` makes it."""
        span = (start_ms, start_ms + length_ms)
        folds = {}
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            even = length_ms == BUCKET_MS and start_ms % BUCKET_MS == 0
            level = self.level_of(scope, span) if even else None
            if self._placements.count(scope):
                folds[scope] = self.fold(scope, [span], length_ms, level=level)
        return self._bucket(index, start_ms, length_ms, folds)

    def level_of(self, scope: Scope, span: Span) -> str | None:
        """Where whole buckets of 10 s are read: from their rollup if it holds all, else from the samples."""
        upto_ms, holes = self.rolled_up(scope, "10s", span)
        return "10s" if upto_ms >= span[1] and not holes else None

    def closing_bucket(self, index: FleetIndex, start_ms: int) -> Bucket:
        """The same of a bucket that is just over, by the active collector, which then calls `roll_up`."""
        return self._bucket(index, start_ms, BUCKET_MS, self.closing_folds(start_ms))

    def _bucket(self, index: FleetIndex, start_ms: int, length_ms: int, folds: Mapping[Scope, Folded]) -> Bucket:
        end_ms = start_ms + length_ms
        gpu, gpu_rows = self._laid_out(index, Scope.GPU, folds, end_ms)
        node, node_rows = self._laid_out(index, Scope.NODE, folds, end_ms)
        link, _ = self._laid_out(index, Scope.LINK, folds, end_ms)
        jobs, names = self.jobs_at(index, end_ms)
        return Bucket(start_ms, length_ms, gpu, node, gpu_rows, node_rows, jobs, names, link)

    def jobs_at(self, index: FleetIndex, ts_ms: int) -> tuple[Ints, tuple[str, ...]]:
        """(int32 [G]: number of the job that holds each GPU at a moment or -1, names by number)."""
        newest = self._clients.arrow(
            f"SELECT node, gpu, job, `from` > {sql_timestamp(ts_ms)} AS later FROM holders FINAL ORDER BY node, gpu"
        )
        later = newest.filter(pc.equal(newest["later"], 1)).select(["node", "gpu"]).to_pylist()
        found = [newest.filter(pc.equal(newest["later"], 0)).drop(["later"])]
        for at in range(0, len(later), IDS_MAX):  # few change in the seconds after a bucket: their history tells
            which = ", ".join(f"({sql_string(row['node'])}, {int(row['gpu'])})" for row in later[at : at + IDS_MAX])
            before = self._clients.arrow(
                "SELECT node, gpu, argMax(job, `from`) AS job FROM holdings"
                f" WHERE (node, gpu) IN ({which}) AND `from` <= {sql_timestamp(ts_ms)} GROUP BY node, gpu"
            )
            found += [before] if before.num_rows else []
        held = pa.concat_tables(found)
        held = held.filter(pc.not_equal(held["job"], ""))
        jobs = np.full(index.gpu_count, -1, np.int32)
        if not held.num_rows:
            return jobs, ()
        nodes, node = coded(held["node"])
        number = np.array([index.node_number.get(name, -1) for name in nodes], np.intp)[node]
        slot = numbers(held, "gpu").astype(np.intp)
        there = (number >= 0) & (slot >= 0) & (slot < np.diff(index.first_gpu)[number])
        names, job = coded(held["job"])
        used, codes = np.unique(np.array(names)[job[there]], return_inverse=True)
        jobs[index.first_gpu[number[there]] + slot[there]] = codes
        return jobs, tuple(map(str, used))

    def values_at(
        self, index: FleetIndex, scope: Scope, start_ms: int, length_ms: int, metrics: Sequence[str]
    ) -> dict[str, Floats]:
        """Metric -> value of each entity in [start_ms, start_ms + length_ms), laid out as in a Bucket, NaN if absent.
        The length is a multiple of 10 s, the start one of the length. No key for what none reported."""
        span = (start_ms, start_ms + length_ms)
        level = self.level_of(scope, span)
        folds = {scope: self.fold(scope, [span], length_ms, level=level, metrics=metrics, counts=False)}
        return dict(self._laid_out(index, scope, folds, span[1])[0])

    def latest_gpu(self, index: FleetIndex, metric: str, now_ms: int, within_ms: int = 60_000) -> Floats:
        """float64 [G]: the newest value of each GPU, NaN where it is older than `within_ms` or became absent since."""
        self.note_asked()
        result = np.full(index.gpu_count, np.nan)
        newest = np.zeros(index.gpu_count, np.int64)
        places = self._placements.map(index, Scope.GPU, now_ms)
        # Most have a value of the last seconds; only the others are worth a longer look.
        since_ms = max(now_ms - within_ms, now_ms - NEWEST_MS)
        self._newest(places, metric, (since_ms, now_ms + 1), None, result, newest)
        there = np.flatnonzero(places.target >= 0)  # a fleet may list none of those that were ever seen
        lacking = places.ids[there[np.isnan(result[places.target[there]])]]
        if len(lacking) and since_ms > now_ms - within_ms:
            self._newest(places, metric, (now_ms - within_ms, since_ms), lacking, result, newest)
        for row in self._absent_now(metric):
            gpu = index.gpu(row["node"], row["gpu"])
            if gpu is not None and newest[gpu] <= row["from_ms"]:
                result[gpu] = np.nan
        return result

    def _absent_now(self, metric: str) -> Sequence[Mapping[str, Any]]:
        """node, gpu and from_ms of where a metric is absent. A few are kept until more is written: by this process
        alone, where the store is embedded."""
        written, now_s = self.absences_written, time.monotonic()
        kept = self._absent.get(metric)
        if kept is not None and kept[0] == written and now_s < kept[1] + ABSENT_S:
            return kept[2]
        found = self._clients.rows(
            "SELECT node, gpu, toUnixTimestamp64Milli(`from`) AS from_ms FROM absent FINAL"
            " WHERE closed = 0 AND gpu >= 0 AND link = '' AND metric = {metric:String}",
            {"metric": metric},
        )
        if self._clients.embedded and len(found) <= ABSENT_MAX:
            self._absent = {**self._absent, metric: (written, now_s, found)}
        return found

    def _newest(
        self, places: Map, metric: str, span: Span, lacking: Ids | None, result: Floats, newest: Millis
    ) -> None:
        """Fill in the newest values within a span: of all, or of those that have none."""
        held = self._recent.newest(metric, places.ids if lacking is None else lacking, span)
        if held is None:
            few = lacking is not None and len(lacking) <= IDS_MAX
            which = f" AND entity_id IN ({_ids(lacking.tolist())})" if lacking is not None and few else ""
            table = self._clients.arrow(
                f"SELECT entity_id, argMax(`{_known(metric)}`, ts) AS `{metric}`,"
                f" toUnixTimestamp64Milli(maxIf(ts, isNotNull(`{metric}`))) AS newest FROM {samples_table(Scope.GPU)}"
                f" PREWHERE {sql_time_range(*span)}{which} GROUP BY entity_id{LEAN}"
            )
            ids, found, moments = numbers(table, "entity_id"), values(table, metric), numbers(table, "newest")
        else:
            ids, found, moments = held[0], in_units(metric, held[1]), held[2]
        rows, target = places.find(ids)
        if lacking is not None:
            still = np.isnan(result[target])
            rows, target = rows[still], target[still]
        result[target] = found[rows]
        newest[target] = moments[rows]

    def latest_values(
        self, node: str, now_ms: int, within_ms: int = 60_000
    ) -> dict[ValueKey, dict[str, tuple[float, int]]]:
        """(scope, gpu, link) -> metric -> (newest value, its time), none older than `within_ms`. Absent: no entry."""
        self.note_asked()
        found: dict[ValueKey, dict[str, tuple[float, int]]] = {}
        entities = self.entities_of(node)
        for scope in Scope:
            rows = {row.entity_id: row for row in entities if row.scope is scope and not row.mig}
            if not rows:
                continue
            metrics = [metric.name for metric in of_scope(scope)]
            table = self._clients.arrow(
                f"SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, {', '.join(f'`{name}`' for name in metrics)}"
                f" FROM {samples_table(scope)} WHERE entity_id IN ({_ids(list(rows))})"
                f" AND {sql_time_range(now_ms - within_ms, now_ms + 1)} ORDER BY ts"
            )
            ids, ts = numbers(table, "entity_id"), numbers(table, "ts_ms")
            for name in metrics:
                decoded = values(table, name)
                held = np.flatnonzero(~np.isnan(decoded))
                newest = dict(zip(ids[held].tolist(), held.tolist(), strict=True))  # the last of each stays
                for entity, row in newest.items():
                    key = (scope, rows[entity].gpu, rows[entity].link or None)
                    found.setdefault(key, {})[name] = (float(decoded[row]), int(ts[row]))
        return found

    def last_seen(self, index: FleetIndex) -> Millis:
        """int64 [N]: the newest sample of each node or of anything on it, 0 for never."""
        result = np.zeros(index.node_count, np.int64)
        ids, seen = self._placements.seen()
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            places = self._placements.map(index, scope, _NOW)
            rows, target = places.find(ids)
            if scope is Scope.GPU:
                target = index.gpu_node[target]
            elif scope is Scope.LINK:
                target = np.array([port.node for port in index.ports.all()], np.int32)[target]
            np.maximum.at(result, target, seen[rows])
        return result

    def entities_of(self, node: str) -> list[EntityRow]:
        """Everything whose newest place is on this node."""
        return self._placements.of_node(node)

    def gpus_of(self, node: str) -> list[EntityRow]:
        """The whole GPUs now in this node, by slot; of two that were in one slot, the newer."""
        rows = [row for row in self.entities_of(node) if row.scope is Scope.GPU and not row.mig]
        by_slot = {row.gpu: row for row in sorted(rows, key=lambda row: row.first_ms)}
        return sorted(by_slot.values(), key=lambda row: row.gpu or 0)

    def totals(self) -> Totals:
        """What the samples tables hold; a resend counts once."""
        size = self._clients.rows(f"SELECT sum(bytes_on_disk) AS n FROM {self._clients.parts}")
        times = [
            self._clients.rows(
                "SELECT count() AS n, toUnixTimestamp64Milli(min(ts)) AS oldest,"
                f" toUnixTimestamp64Milli(max(ts)) AS newest FROM {samples_table(scope)}"
            )[0]
            for scope in Scope
        ]
        held = [row for row in times if row["n"]]
        return Totals(
            self.samples(),
            int(size[0]["n"]),
            min((row["oldest"] for row in held), default=0),
            max((row["newest"] for row in held), default=0),
        )

    def load_seen(self) -> None:
        """After opening: the newest samples of each entity, of the newest minutes; before, to 10 s, of an hour."""
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            for name, minutes in ((samples_table(scope), 2), (rollup_table(scope, "10s"), 60)):
                table = self._clients.arrow(
                    f"SELECT entity_id, toUnixTimestamp64Milli(max(ts)) AS newest FROM {name}"
                    f" WHERE ts > (SELECT max(ts) FROM {name}) - toIntervalMinute({minutes}) GROUP BY entity_id"
                )
                self._placements.note_seen(numbers(table, "entity_id"), numbers(table, "newest"))
                if scope is Scope.GPU:
                    self._placements.note_nameless(numbers(table, "entity_id"))
        if self._clients.embedded:  # what others write would not be known here
            held = {scope: self.parts_of(samples_table(scope)) for scope in Scope}
            self._recent.begin({scope: max((high for *_, high in parts), default=0) for scope, parts in held.items()})
        rows = self._placements.rows()
        self._placements.note_seen(
            np.array([row.entity_id for row in rows], np.uint64), np.array([row.last_ms for row in rows], np.int64)
        )

    def _laid_out(
        self, index: FleetIndex, scope: Scope, folds: Mapping[Scope, Folded], at_ms: int
    ) -> tuple[Mapping[str, Floats], Ints]:
        folded = folds.get(scope)
        places = None if folded is None else self._placements.map(index, scope, at_ms)
        count = size_of(index, scope)  # after the map, which brings ports that are new
        counts = np.zeros(count, np.int32)
        if folded is None or places is None or not count:
            return {}, counts
        rows, target = places.find(folded.ids)
        counts[target] = folded.rows[rows]
        columns: dict[str, Callable[[], Floats]] = {}
        for name, (stored, mask) in folded.columns.items():
            there = mask[rows]
            if there.any():
                laid, told = np.zeros(count, stored.dtype), np.zeros(count, np.bool_)
                laid[target], told[target] = stored[rows], there
                columns[name] = packed(name, laid, told)
        return Lazy(columns), counts


_NOW = 2**62


def size_of(index: FleetIndex, scope: Scope) -> int:
    """How many entities a column of a bucket has."""
    return {Scope.GPU: index.gpu_count, Scope.NODE: index.node_count, Scope.LINK: len(index.ports)}[scope]


def packed(metric: str, stored: Stored, told: Mask) -> Callable[[], Floats]:
    """What gives a column back, and holds it as small as it can be meanwhile: most are counts and limits that are alike
    all over the fleet, or need fewer bytes than their type has."""
    if stored.dtype.kind in "iu":
        low, high = stored.min(), stored.max()
        least = np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high))
        if low == high:
            stored = np.broadcast_to(low, stored.shape)
        elif least.itemsize < stored.itemsize:
            stored = stored.astype(least)
    return partial(unpacked, metric, stored, None if told.all() else np.packbits(told))


def unpacked(metric: str, stored: Stored, told: npt.NDArray[np.uint8] | None) -> Floats:
    mask = np.ones(len(stored), np.bool_) if told is None else np.unpackbits(told, count=len(stored)).view(np.bool_)
    return units(metric, stored, mask)


def coded(words: pa.ChunkedArray) -> tuple[list[str], npt.NDArray[np.intp]]:
    """(distinct words, number of each row's)."""
    coded = words.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.intp)


def _known(metric: str) -> str:
    """The name, for SQL; KeyError for what the catalog does not have."""
    return BY_NAME[metric].name


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids))

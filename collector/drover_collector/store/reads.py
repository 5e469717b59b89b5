"""Reads of samples: buckets for the detectors, newest values for the console, totals."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from drover_collector.buckets import BUCKET_MS, Bucket, Ints
from drover_collector.fleet_index import FleetIndex
from drover_collector.store.base import Base, Floats, aggregate_sql, during, moment, numbers, values, whole_rows
from drover_collector.store.placements import link_numbers
from drover_collector.store.records import EntityRow, Millis, Totals
from drover_collector.store.schema import samples_table
from drover_proto.catalog import BY_NAME, Scope, of_scope

ValueKey = tuple[Scope, int | None, str | None]  # scope, gpu, link


class Reads(Base):
    def bucket(self, index: FleetIndex, start_ms: int, length_ms: int = BUCKET_MS) -> Bucket:
        """One value per entity and metric of [start_ms, start_ms + length_ms), as `buckets.aggregate` makes it."""
        gpu, gpu_rows = self._scope_bucket(index, Scope.GPU, start_ms, length_ms, index.gpu_count)
        node, node_rows = self._scope_bucket(index, Scope.NODE, start_ms, length_ms, index.node_count)
        link: dict[str, Floats] = {}
        links = len(link_numbers(index))
        if links:
            link, _ = self._scope_bucket(index, Scope.LINK, start_ms, length_ms, links)
        jobs, names = self.jobs_at(index, start_ms + length_ms)
        return Bucket(start_ms, length_ms, gpu, node, gpu_rows, node_rows, jobs, names, link)

    def jobs_at(self, index: FleetIndex, ts_ms: int) -> tuple[Ints, tuple[str, ...]]:
        """(int32 [G]: number of the job that holds each GPU at a moment or -1, names by number)."""
        jobs = np.full(index.gpu_count, -1, np.int32)
        found = self._clients.rows(
            f"SELECT node, gpu, argMax(job, `from`) AS holder FROM holdings WHERE `from` <= {moment(ts_ms)}"
            " GROUP BY node, gpu HAVING holder != '' ORDER BY holder"
        )
        known: dict[str, int] = {}
        for row in found:
            gpu = index.gpu(row["node"], row["gpu"])
            if gpu is not None:
                jobs[gpu] = known.setdefault(row["holder"], len(known))
        return jobs, tuple(known)

    def latest_gpu(self, index: FleetIndex, metric: str, now_ms: int, within_ms: int = 60_000) -> Floats:
        """float64 [G]: the newest value of each GPU, NaN where it is older than `within_ms` or became absent since."""
        result = np.full(index.gpu_count, np.nan)
        table = self._clients.arrow(
            f"SELECT entity_id, argMax(`{_known(metric)}`, ts) AS `{metric}`,"
            f" toUnixTimestamp64Milli(maxIf(ts, isNotNull(`{metric}`))) AS newest FROM {samples_table(Scope.GPU)}"
            f" WHERE {during(now_ms - within_ms, now_ms + 1)} GROUP BY entity_id"
        )
        rows, target = self._placements.map(index, Scope.GPU, now_ms).find(numbers(table, "entity_id"))
        result[target] = values(table, metric)[rows]
        newest = np.zeros(index.gpu_count, np.int64)
        newest[target] = numbers(table, "newest")[rows]
        absent = self._clients.rows(
            "SELECT node, gpu, toUnixTimestamp64Milli(max(`from`)) AS from_ms FROM absences FINAL"
            " WHERE closed = 0 AND gpu >= 0 AND link = '' AND metric = {metric:String} GROUP BY node, gpu",
            {"metric": metric},
        )
        for row in absent:
            gpu = index.gpu(row["node"], row["gpu"])
            if gpu is not None and newest[gpu] <= row["from_ms"]:
                result[gpu] = np.nan
        return result

    def latest_values(
        self, node: str, now_ms: int, within_ms: int = 60_000
    ) -> dict[ValueKey, dict[str, tuple[float, int]]]:
        """(scope, gpu, link) -> metric -> (newest value, its time), none older than `within_ms`. Absent: no entry."""
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
                f" AND {during(now_ms - within_ms, now_ms + 1)} ORDER BY ts"
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
                nodes = [n for n, node in enumerate(index.nodes) for _ in node.links]
                target = np.array(nodes, np.int32)[target]
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
        """What the samples tables hold."""
        with self._count_lock:
            if self._counted is None:
                parts = [f"SELECT sum(present) AS n FROM {samples_table(scope)}" for scope in Scope]
                found = self._clients.rows(f"SELECT toUInt64(sum(n)) AS n FROM ({' UNION ALL '.join(parts)})")
                self._counted = int(found[0]["n"])
            counted = self._counted
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
            counted,
            int(size[0]["n"]),
            min((row["oldest"] for row in held), default=0),
            max((row["newest"] for row in held), default=0),
        )

    def load_seen(self) -> None:
        """After opening: the newest samples of each entity, looked for in the newest hour of each table."""
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            name = samples_table(scope)
            table = self._clients.arrow(
                f"SELECT entity_id, toUnixTimestamp64Milli(max(ts)) AS newest FROM {name}"
                f" WHERE ts > (SELECT max(ts) FROM {name}) - toIntervalHour(1) GROUP BY entity_id"
            )
            self._placements.note_seen(numbers(table, "entity_id"), numbers(table, "newest"))
        rows = self._placements.rows()
        self._placements.note_seen(
            np.array([row.entity_id for row in rows], np.uint64), np.array([row.last_ms for row in rows], np.int64)
        )

    def _scope_bucket(
        self, index: FleetIndex, scope: Scope, start_ms: int, length_ms: int, count: int
    ) -> tuple[dict[str, Floats], Ints]:
        metrics = [metric.name for metric in of_scope(scope)]
        name, when = samples_table(scope), during(start_ms, start_ms + length_ms)
        columns = f"entity_id, uniqExact(ts) AS n, {', '.join(map(aggregate_sql, metrics))}"
        table = self._clients.arrow(
            f"SELECT {columns}, count() AS held FROM {name} FINAL WHERE {when} GROUP BY entity_id"
        )
        ids, several = numbers(table, "entity_id"), numbers(table, "held") > numbers(table, "n")
        if several.any():  # moments told in parts: these entities again, with one row a moment
            whole = whole_rows(scope, metrics, f"{when} AND entity_id IN ({_ids(ids[several].tolist())})")
            again = self._clients.arrow(f"SELECT {columns}, count() AS held FROM {whole} GROUP BY entity_id")
            table = pa.concat_tables([table.filter(pa.array(~several)), again])
        places = self._placements.map(index, scope, start_ms + length_ms)
        rows, target = places.find(numbers(table, "entity_id"))
        counts = np.zeros(count, np.int32)
        counts[target] = numbers(table, "n")[rows]
        result: dict[str, Floats] = {}
        for name in metrics:
            if table[name].null_count == table.num_rows:
                continue
            column = np.full(count, np.nan)
            column[target] = values(table, name)[rows]
            if not np.isnan(column).all():
                result[name] = column
        return result, counts


_NOW = 2**62


def _known(metric: str) -> str:
    """The name, for SQL; KeyError for what the catalog does not have."""
    return BY_NAME[metric].name


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids))

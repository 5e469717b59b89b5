"""The samples: insert them, and read the newest values."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from drover_collector.fleet.index import FleetIndex
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import Ids, Millis, SampleBatch
from drover_collector.store.repositories.absences import AbsenceTable
from drover_collector.store.samples.entities import EntityRegistry, PlaceMap
from drover_collector.store.samples.packed import Packed
from drover_collector.store.samples.recent import Recent
from drover_collector.store.samples.rows import IDS_MAX, LEAN, SampleRows, comma
from drover_collector.store.samples.spans import Span
from drover_collector.store.schema.tables import rollup_table, samples_table, shape_code
from drover_collector.store.sql import Floats, in_units, millis, numbers, sql_time_range, values
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope

NEWEST_MS = 8_000  # batches of 5 s, and some seconds on the way
ValueKey = tuple[Scope, int | None, str | None]  # scope, gpu, link


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """The newest values of a workload on a node, in catalog units. Absent: no key."""

    node: str
    name: str
    ts_ms: int
    values: dict[str, float]


class LastQuery:
    """When a person last looked at values: while someone looks, samples are stored sooner."""

    def __init__(self) -> None:
        self.at_s = -math.inf  # monotonic

    def note(self) -> None:
        """Note that a person looks at values now."""
        self.at_s = time.monotonic()


class SampleTable:
    """Samples of all scopes. Thread-safe."""

    def __init__(
        self,
        clients: Clients,
        registry: EntityRegistry,
        rows: SampleRows,
        recent: Recent,
        absences: AbsenceTable,
        last_query: LastQuery,
    ) -> None:
        self._clients = clients
        self._registry = registry
        self._rows = rows
        self._recent = recent
        self._absences = absences
        self._last_query = last_query

    def write(self, batch: SampleBatch) -> None:
        """Insert samples. Rows that are stored already (same entity and ts) count once in all reads."""
        if not batch.rows:
            return
        present, shape = np.zeros(batch.rows, np.uint16), np.zeros(batch.rows, np.uint32)
        columns: dict[str, pa.Array] = {"entity_id": pa.array(batch.entity_id), "ts": millis(batch.ts_ms)}
        for name, (stored, mask) in batch.columns.items():
            code = np.uint32(shape_code(name))
            if mask.all():  # most columns are whole or empty, which needs no work on rows
                present += 1
                shape += code
                columns[name] = pa.array(np.ascontiguousarray(stored))
            elif mask.any():
                present += mask
                shape += mask * code
                columns[name] = pa.array(np.ascontiguousarray(stored), mask=~mask)
        columns["shape"] = pa.array(shape)
        columns["present"] = pa.array(present)
        table = pa.table(columns)
        try:
            self._clients.insert(samples_table(batch.scope), table)
        except BaseException:
            self._recent.unsure(batch.scope, batch.ts_ms)
            raise
        if self._clients.embedded:
            self._recent.add(batch.scope, Packed(batch, present))
        self._registry.note_seen(batch.entity_id, batch.ts_ms)

    def latest_gpu(self, index: FleetIndex, metric: str, now_ms: int, within_ms: int = 60_000) -> Floats:
        """Return float64 [G]: the newest value of each GPU, NaN where it is older than `within_ms` or absent since."""
        self._last_query.note()
        result = np.full(index.gpu_count, np.nan)
        newest = np.zeros(index.gpu_count, np.int64)
        places = self._registry.map(index, Scope.GPU, now_ms)
        # Most have a value of the last seconds; read further back only for the others.
        since_ms = max(now_ms - within_ms, now_ms - NEWEST_MS)
        self._newest(places, metric, (since_ms, now_ms + 1), None, result, newest)
        there = np.flatnonzero(places.target >= 0)  # the fleet may list none of the known entities
        lacking = places.ids[there[np.isnan(result[places.target[there]])]]
        if len(lacking) and since_ms > now_ms - within_ms:
            self._newest(places, metric, (now_ms - within_ms, since_ms), lacking, result, newest)
        for row in self._absences.of_metric(metric):
            gpu = index.gpu(row["node"], row["gpu"])
            if gpu is not None and newest[gpu] <= row["from_ms"]:
                result[gpu] = np.nan
        return result

    def _newest(
        self, places: PlaceMap, metric: str, span: Span, lacking: Ids | None, result: Floats, newest: Millis
    ) -> None:
        """Fill in the newest values within a span: of all, or of the entities in `lacking`."""
        held = self._recent.newest(metric, places.ids if lacking is None else lacking, span)
        if held is None:
            few = lacking is not None and len(lacking) <= IDS_MAX
            which = f" AND entity_id IN ({comma(lacking.tolist())})" if lacking is not None and few else ""
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
        """Return (scope, gpu, link) -> metric -> (newest value, its time), none older than `within_ms`."""
        self._last_query.note()
        found: dict[ValueKey, dict[str, tuple[float, int]]] = {}
        entities = self._registry.of_node(node)
        for scope in Scope:
            rows = {row.entity_id: row for row in entities if row.scope is scope and not row.mig}
            if not rows:
                continue
            metrics = [metric.name for metric in of_scope(scope)]
            table = self._clients.arrow(
                f"SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, {', '.join(f'`{name}`' for name in metrics)}"
                f" FROM {samples_table(scope)} WHERE entity_id IN ({comma(list(rows))})"
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

    def workloads(self, now_ms: int, within_ms: int) -> list[WorkloadRow]:
        """Return the workloads that reported within `within_ms`, by node and name."""
        metrics = [metric.name for metric in of_scope(Scope.WORKLOAD)]
        newest = ", ".join(f"argMax(`{name}`, ts) AS `{name}`" for name in metrics)  # skips NULL
        table = self._clients.arrow(
            f"SELECT entity_id, toUnixTimestamp64Milli(max(ts)) AS ts_ms, {newest}"
            f" FROM {samples_table(Scope.WORKLOAD)} WHERE {sql_time_range(now_ms - within_ms, now_ms + 1)}"
            " GROUP BY entity_id"
        )
        ids, ts = numbers(table, "entity_id"), numbers(table, "ts_ms")
        nodes, links = self._registry.names(Scope.WORKLOAD, ids, ts)
        columns = {name: values(table, name) for name in metrics}
        rows = [
            WorkloadRow(
                str(nodes[at]),
                str(links[at]),
                int(ts[at]),
                {name: float(column[at]) for name, column in columns.items() if not np.isnan(column[at])},
            )
            for at in np.flatnonzero(nodes != "").tolist()
        ]
        return sorted(rows, key=lambda row: (row.node, row.name))

    def load(self) -> None:
        """Read when each entity was seen last, from samples of the newest 2 minutes and 10 s rollups of an hour."""
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            for name, minutes in ((samples_table(scope), 2), (rollup_table(scope, "10s"), 60)):
                if not self._rows.parts_of(name):
                    continue
                table = self._clients.arrow(
                    f"SELECT entity_id, toUnixTimestamp64Milli(max(ts)) AS newest FROM {name}"
                    f" WHERE ts > (SELECT max(ts) FROM {name}) - toIntervalMinute({minutes}) GROUP BY entity_id"
                )
                self._registry.note_seen(numbers(table, "entity_id"), numbers(table, "newest"))
                if scope is Scope.GPU:
                    self._registry.note_nameless(numbers(table, "entity_id"))
        if self._clients.embedded:  # with other writers, memory would not be complete
            held = {scope: self._rows.parts_of(samples_table(scope)) for scope in Scope}
            self._recent.begin({scope: max((high for *_, high in parts), default=0) for scope, parts in held.items()})
        else:
            self._rows.forget_parts()
        rows = self._registry.rows()
        self._registry.note_seen(
            np.array([row.entity_id for row in rows], np.uint64), np.array([row.last_ms for row in rows], np.int64)
        )


def _known(metric: str) -> str:
    """Return the name of a metric of the catalog, for SQL.

    Raises:
        KeyError: the catalog does not have it.
    """
    return BY_NAME[metric].name

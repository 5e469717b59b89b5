"""Samples as tables of a case: with names of nodes and GPUs, values in units, each row once, in order of time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.rows import IDS_MAX, comma
from drover_collector.store.schema.tables import samples_table
from drover_collector.store.sql import millis, numbers, sql_time_range, values, whole_rows
from drover_core.metrics.catalog import Scope, of_scope

ROWS = 500_000  # of one table: bounds the memory of an export to a few hundred MB
HOUR_MS = 3_600_000


class SampleExport:
    """Exports samples as Arrow tables."""

    def __init__(self, clients: Clients, registry: EntityRegistry) -> None:
        self._clients = clients
        self._registry = registry

    def tables(self, scope: Scope, from_ms: int, to_ms: int) -> Iterator[pa.Table]:
        """Yield tables of at most an hour, ordered by ts, node, gpu, link or workload.

        Columns: ts (timestamp ms UTC), node, gpu (uint8) or link or workload (string), then the catalog's columns as
        float64, null where absent.
        """
        return self._export(scope, from_ms, to_ms, "1", instances=False)

    def instance_tables(self, from_ms: int, to_ms: int) -> Iterator[pa.Table]:
        """Yield the same of MIG instances, with the column `instance` ("SLOT/NAME") instead of `gpu`."""
        ids = sorted({row.entity_id for row in self._registry.rows() if row.mig})
        if ids:
            which = f"entity_id IN ({comma(ids)})" if len(ids) <= IDS_MAX else "1"
            yield from self._export(Scope.GPU, from_ms, to_ms, which, instances=True)

    def _export(self, scope: Scope, from_ms: int, to_ms: int, which: str, *, instances: bool) -> Iterator[pa.Table]:
        metrics = [metric.name for metric in of_scope(scope)]
        columns = ", ".join(f"`{name}`" for name in metrics)
        for low, high in self._slices(scope, from_ms, to_ms, which):
            table = self._clients.arrow(
                f"SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, {columns}"
                f" FROM {whole_rows(scope, metrics, f'{which} AND {sql_time_range(low, high)}')}"
            )
            if table.num_rows:
                named = self._named(scope, table, metrics, instances=instances)
                if named.num_rows:
                    yield named

    def _slices(self, scope: Scope, from_ms: int, to_ms: int, which: str) -> Iterator[tuple[int, int]]:
        name = samples_table(scope)
        found = self._clients.rows(
            f"SELECT intDiv(toUnixTimestamp64Milli(ts), {HOUR_MS}) AS hour, count() AS n FROM {name}"
            f" WHERE {which} AND {sql_time_range(from_ms, to_ms)} GROUP BY hour ORDER BY hour"
        )
        for row in found:
            start = row["hour"] * HOUR_MS
            step = max(1, HOUR_MS // -(-row["n"] // ROWS))
            for low in range(start, start + HOUR_MS, step):
                span = max(low, from_ms), min(low + step, start + HOUR_MS, to_ms)
                if span[0] < span[1]:
                    yield span

    def _named(self, scope: Scope, table: pa.Table, metrics: list[str], *, instances: bool) -> pa.Table:
        ids, ts = numbers(table, "entity_id"), numbers(table, "ts_ms")
        nodes, places = self._registry.names(scope, ids, ts, instances=instances)
        kept = np.flatnonzero(nodes != "")
        order = kept[np.lexsort((places[kept], nodes[kept], ts[kept]))]
        arrays: dict[str, pa.Array] = {"ts": millis(ts[order]), "node": pa.array(nodes[order], pa.string())}
        if instances:
            arrays["instance"] = pa.array(places[order], pa.string())
        elif scope is Scope.GPU:
            arrays["gpu"] = pa.array(places[order].astype(np.uint8))
        elif scope is not Scope.NODE:
            arrays["link" if scope is Scope.LINK else "workload"] = pa.array(places[order], pa.string())
        for name in metrics:
            column = values(table, name)[order]
            arrays[name] = pa.array(column, mask=np.isnan(column))
        return pa.table(arrays)

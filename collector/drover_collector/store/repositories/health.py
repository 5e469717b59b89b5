"""Changes of health of nodes and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import numbers, sql_ms, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter

PLAYED_MAX = 200_000  # changes of the fleet's health in one answer
CHUNK_MS = 300_000  # of `rollup_counts`
CHANGES_MAX = 1_000  # changes of a node's and its GPUs' health in one answer


class HealthTable:
    """When the health of a node or GPU changed, to what, and why."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Write changes: dicts of ts_ms, node, gpu (None: the node), health, reason, incident_id (may be None)."""
        self._writer.insert(
            "health",
            changes,
            {
                "node": lambda c: c["node"],
                "gpu": lambda c: -1 if c["gpu"] is None else c["gpu"],
                "ts": lambda c: Ms(c["ts_ms"]),
                "health": lambda c: str(c["health"]),
                "reason": lambda c: c["reason"],
                "incident_id": lambda c: c["incident_id"] or "",
            },
        )

    def history(self, node: str, gpu: int | None, from_ms: int, to_ms: int) -> list[dict[str, Any]]:
        """Return the changes of a GPU (None: the node itself), oldest first, in the form that `write` takes."""
        return self._clients.rows(
            f"SELECT {sql_ms('ts')} AS ts_ms, node, nullIf(gpu, -1) AS gpu, health, reason,"
            " nullIf(incident_id, '') AS incident_id"
            f" FROM health FINAL WHERE node = {{node:String}} AND gpu = {-1 if gpu is None else int(gpu)}"
            f" AND {sql_time_range(from_ms, to_ms)} ORDER BY ts",
            {"node": node},
        )

    def of_node(self, node: str, from_ms: int, to_ms: int) -> list[dict[str, Any]]:
        """Return the changes of a node and its GPUs, oldest first: the newest CHANGES_MAX of them."""
        found = self._clients.rows(
            f"SELECT {sql_ms('ts')} AS ts_ms, node, nullIf(gpu, -1) AS gpu, health, reason,"
            " nullIf(incident_id, '') AS incident_id FROM health FINAL"
            f" WHERE node = {{node:String}} AND {sql_time_range(from_ms, to_ms)} ORDER BY ts DESC LIMIT {CHANGES_MAX}",
            {"node": node},
        )
        return sorted(found, key=lambda change: (change["ts_ms"], -1 if change["gpu"] is None else change["gpu"]))

    def standing(self, at_ms: int) -> pa.Table:
        """Return what each node (gpu -1) and GPU was at a time, of those that had changed by then.

        Columns: node, gpu, ms and health of its newest change; plain_ms and plain of the newest to healthy or unknown
        (0 and "" where there was none).
        """
        plain = "health IN ('healthy', 'unknown')"
        return self._clients.arrow(
            "SELECT node, gpu, toUnixTimestamp64Milli(max(ts)) AS ms, argMax(toString(health), ts) AS health,"
            f" toUnixTimestamp64Milli(maxIf(ts, {plain})) AS plain_ms,"
            f" argMaxIf(toString(health), ts, {plain}) AS plain"
            f" FROM (SELECT node, gpu, ts, health FROM health WHERE ts <= {sql_timestamp(at_ms)})"
            " GROUP BY node, gpu ORDER BY node, gpu"
        )

    def moves(self, after_ms: int, to_ms: int) -> tuple[pa.Table, bool]:
        """Return changes of (after_ms, to_ms] by time, nodes first: node, gpu, ms, health; and if there are more."""
        table = self._clients.arrow(
            "SELECT node, gpu, toUnixTimestamp64Milli(ts) AS ms, toString(health) AS health FROM health FINAL"
            f" WHERE {sql_time_range(after_ms + 1, to_ms + 1)} ORDER BY ts, gpu, node LIMIT {PLAYED_MAX + 1}"
        )
        return table.slice(0, PLAYED_MAX), table.num_rows > PLAYED_MAX

    def reasons(self, at_ms: int, nodes: Sequence[str]) -> dict[tuple[str, int | None], str]:
        """Return (node, slot or None) -> why it was what it was at a time."""
        rows = self._clients.rows(
            f"SELECT node, nullIf(gpu, -1) AS gpu, argMax(reason, ts) AS reason FROM health"
            f" WHERE node IN {{nodes:Array(String)}} AND ts <= {sql_timestamp(at_ms)} GROUP BY node, gpu",
            {"nodes": list(nodes)},
        )
        return {(row["node"], row["gpu"]): row["reason"] for row in rows}

    def unreported(self, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
        """Return the 5 minutes of a time without a stored sample of a GPU; none where that is not counted."""
        first_ms, last_ms = from_ms // CHUNK_MS * CHUNK_MS, to_ms // CHUNK_MS * CHUNK_MS
        counted = "SELECT toUnixTimestamp64Milli(ts) AS ms FROM rollup_counts FINAL WHERE scope = 'gpu'"
        ends = self._clients.rows(
            "SELECT toUnixTimestamp64Milli(min(ts)) AS low, toUnixTimestamp64Milli(max(ts)) AS high, count() AS n"
            " FROM rollup_counts WHERE scope = 'gpu'"
        )[0]
        if not ends["n"]:
            return []
        some = self._clients.arrow(
            f"{counted} AND {sql_time_range(first_ms, last_ms + 1)} GROUP BY ts HAVING sum(samples) > 0"
        )
        held = set(numbers(some, "ms").tolist()) if some.num_rows else set()
        chunks = range(max(first_ms, ends["low"]), min(last_ms, ends["high"]) + 1, CHUNK_MS)
        return [(ms, ms + CHUNK_MS) for ms in chunks if ms not in held]

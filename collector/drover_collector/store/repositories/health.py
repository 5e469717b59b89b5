"""Changes of health of nodes and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_ms, sql_time_range
from drover_collector.store.table_writer import Ms, TableWriter

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

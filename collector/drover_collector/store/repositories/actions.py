"""Actions on nodes, and the outages that they cause. Append-only; the newest version counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_string, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Act, Action, GpuRef, NodeOutage, from_json, to_json


class ActionTable:
    """Actions that were intended or carried out.

    Attributes:
        takers: called with actions when they are stored. Each returns at once.
    """

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self.takers: list[Callable[[Sequence[Action]], None]] = []
        self._clients = clients
        self._writer = writer

    def write(self, actions: Sequence[Action]) -> None:
        """Write new versions. Only the active collector may."""
        self._writer.insert(
            "actions",
            list(zip(actions, self._writer.next_numbers(len(actions)), strict=True)),
            {
                "id": lambda r: r[0].id,
                "ts": lambda r: Ms(r[0].ts_ms),
                "node": lambda r: r[0].node,
                "decision_id": lambda r: r[0].decision_id,
                "incident_id": lambda r: r[0].incident_id,
                "state": lambda r: str(r[0].state),
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )
        for take in self.takers:
            take(actions)

    def newest(
        self, *, node: str = "", incident: str = "", acts: Sequence[Act] = (), since_ms: int = 0, limit: int = 10_000
    ) -> list[Action]:
        """Return the newest version of each action, oldest action first; the last `limit` of them.

        Args:
            node, incident, acts: only actions of these. since_ms: only those that changed since.
        """
        where = f"ts >= {sql_timestamp(since_ms)}"
        if acts:
            where += f" AND JSONExtractString(json, 'action') IN ({', '.join(sql_string(act) for act in acts)})"
        parameters = {}
        if node:
            where += " AND node = {node:String}"
            parameters["node"] = node
        if incident:
            where += " AND incident_id = {incident:String}"
            parameters["incident"] = incident
        return self._newest(where, "1", limit, parameters)

    def intended(self, limit: int = 100_000) -> list[Action]:
        """Return the actions whose outcome is not stored, oldest first."""
        return self._newest("1", "state = 'intended'", limit, {})

    def history(self, action: str) -> list[Action]:
        """Return all versions of an action, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM actions FINAL WHERE id = {id:String} ORDER BY written_ns", {"id": action}
        )
        return [from_json(Action, row["json"]) for row in found]

    def _newest(self, where: str, having: str, limit: int, parameters: dict[str, str]) -> list[Action]:
        found = self._clients.rows(
            f"SELECT json FROM (SELECT id, argMax(json, written_ns) AS json, argMax(state, written_ns) AS state,"
            f" min(ts) AS first, min(written_ns) AS begun FROM (SELECT * FROM actions WHERE {where}) GROUP BY id)"
            f" WHERE {having} ORDER BY first DESC, begun DESC LIMIT {int(limit)}",
            parameters,
        )
        return [from_json(Action, row["json"]) for row in reversed(found)]


class OutageTable:
    """How each node went out of service and came back.

    Attributes:
        gpus: the same of single GPUs whose nodes stayed.
    """

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer
        self.gpus = GpuOutageTable(clients, writer)

    def write(self, outages: Sequence[NodeOutage]) -> None:
        self._writer.insert(
            "duties",
            list(zip(outages, self._writer.next_numbers(len(outages)), strict=True)),
            {
                "node": lambda r: r[0].node,
                "ts": lambda r: Ms(r[0].ts_ms),
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )

    def current(self) -> dict[str, NodeOutage]:
        """Return node -> its newest state."""
        found = self._clients.rows("SELECT node, argMax(json, written_ns) AS newest FROM duties GROUP BY node")
        return {row["node"]: from_json(NodeOutage, row["newest"]) for row in found}

    def history(self, node: str, since_ms: int = 0) -> list[NodeOutage]:
        """Return the states of a node since `since_ms`, oldest first."""
        found = self._clients.rows(
            f"SELECT json FROM duties FINAL WHERE node = {{node:String}} AND ts >= {sql_timestamp(since_ms)}"
            " ORDER BY written_ns",
            {"node": node},
        )
        return [from_json(NodeOutage, row["json"]) for row in found]

    def histories(self, since_ms: int) -> dict[str, list[NodeOutage]]:
        """Return node -> its state at `since_ms`, if it had one, and its states since then, oldest first."""
        found = self._clients.rows(
            f"SELECT node, json FROM duties FINAL WHERE ts >= {sql_timestamp(since_ms)} OR (node, written_ns) IN"
            f" (SELECT node, max(written_ns) FROM duties WHERE ts < {sql_timestamp(since_ms)} GROUP BY node)"
            " ORDER BY node, written_ns"
        )
        histories: dict[str, list[NodeOutage]] = {}
        for row in found:
            histories.setdefault(row["node"], []).append(from_json(NodeOutage, row["json"]))
        return histories


class GpuOutageTable:
    """How single GPUs went out of service and came back, by UUID."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, outages: Sequence[NodeOutage]) -> None:
        """Write new stages of GPUs. Only the active collector may."""
        self._writer.insert(
            "gpu_outages",
            list(zip(outages, self._writer.next_numbers(len(outages)), strict=True)),
            {
                "uuid": lambda r: gpu_of(r[0]).uuid,
                "node": lambda r: r[0].node,
                "ts": lambda r: Ms(r[0].ts_ms),
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )

    def current(self) -> dict[str, NodeOutage]:
        """Return UUID -> its newest stage."""
        found = self._clients.rows("SELECT uuid, argMax(json, written_ns) AS newest FROM gpu_outages GROUP BY uuid")
        return {row["uuid"]: from_json(NodeOutage, row["newest"]) for row in found}

    def history(self, uuid: str) -> list[NodeOutage]:
        """Return the stages of a GPU, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM gpu_outages FINAL WHERE uuid = {uuid:String} ORDER BY written_ns", {"uuid": uuid}
        )
        return [from_json(NodeOutage, row["json"]) for row in found]

    def histories(self, since_ms: int) -> dict[str, list[NodeOutage]]:
        """Return UUID -> its stage at `since_ms`, if it had one, and its stages since then, oldest first."""
        found = self._clients.rows(
            f"SELECT uuid, json FROM gpu_outages FINAL WHERE ts >= {sql_timestamp(since_ms)} OR (uuid, written_ns) IN"
            f" (SELECT uuid, max(written_ns) FROM gpu_outages WHERE ts < {sql_timestamp(since_ms)} GROUP BY uuid)"
            " ORDER BY uuid, written_ns"
        )
        histories: dict[str, list[NodeOutage]] = {}
        for row in found:
            histories.setdefault(row["uuid"], []).append(from_json(NodeOutage, row["json"]))
        return histories


def gpu_of(outage: NodeOutage) -> GpuRef:
    """Return the GPU of a GPU's outage."""
    assert outage.gpu is not None, "this is a node's outage"
    return outage.gpu

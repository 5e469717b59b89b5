"""What was done to nodes, and how far those are that are out of service. Append-only; the newest version counts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from drover_collector.store.base import sql_string, sql_timestamp
from drover_collector.store.samples.write import Ms, Writes
from drover_core.model.events import (
    Act,
    Action,
    Decision,
    NodeOutage,
    from_json,
    to_json,
)


class Actions(Writes):
    def write_actions(self, actions: Sequence[Action]) -> None:
        """New versions. Fenced: only the active collector acts."""
        self._insert(
            "actions",
            list(zip(actions, self._order(len(actions)), strict=True)),
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

    def write_duties(self, duties: Sequence[NodeOutage]) -> None:
        self._insert(
            "duties",
            list(zip(duties, self._order(len(duties)), strict=True)),
            {
                "node": lambda r: r[0].node,
                "ts": lambda r: Ms(r[0].ts_ms),
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )

    def actions(
        self, *, node: str = "", incident: str = "", acts: Sequence[Act] = (), since_ms: int = 0, limit: int = 10_000
    ) -> list[Action]:
        """Newest versions, oldest action first: of a node, of an incident, of these kinds, since then; the newest
        where there are more than `limit`."""
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
        return self._newest_actions(where, "1", limit, parameters)

    def intended_actions(self, limit: int = 100_000) -> list[Action]:
        """Those whose outcome is not stored, oldest first."""
        return self._newest_actions("1", "state = 'intended'", limit, {})

    def action_history(self, action: str) -> list[Action]:
        """All versions of one, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM actions FINAL WHERE id = {id:String} ORDER BY written_ns", {"id": action}
        )
        return [from_json(Action, row["json"]) for row in found]

    def unbegun_decisions(self, since_ms: int, limit: int = 10_000) -> list[Decision]:
        """Decisions to act of [since_ms, now) that have no action: their collector was stopped in between."""
        found = self._clients.rows(
            f"SELECT json FROM decisions FINAL WHERE ts >= {sql_timestamp(since_ms)}"
            " AND JSONExtractString(json, 'outcome') = 'act' AND JSONExtractString(json, 'wanted') != 'probe'"
            " AND id NOT IN (SELECT decision_id FROM actions WHERE decision_id != '')"
            f" ORDER BY ts, id LIMIT {int(limit)}"
        )
        return [from_json(Decision, row["json"]) for row in found]

    def duties(self) -> dict[str, NodeOutage]:
        """Node -> its newest duty."""
        found = self._clients.rows("SELECT node, argMax(json, written_ns) AS newest FROM duties GROUP BY node")
        return {row["node"]: from_json(NodeOutage, row["newest"]) for row in found}

    def duty_history(self, node: str, since_ms: int = 0) -> list[NodeOutage]:
        """Oldest first."""
        found = self._clients.rows(
            f"SELECT json FROM duties FINAL WHERE node = {{node:String}} AND ts >= {sql_timestamp(since_ms)}"
            " ORDER BY written_ns",
            {"node": node},
        )
        return [from_json(NodeOutage, row["json"]) for row in found]

    def duty_histories(self, since_ms: int) -> dict[str, list[NodeOutage]]:
        """Node -> how it stood at `since_ms`, if it had a duty then, and what has changed since; oldest first."""
        found = self._clients.rows(
            f"SELECT node, json FROM duties FINAL WHERE ts >= {sql_timestamp(since_ms)} OR (node, written_ns) IN"
            f" (SELECT node, max(written_ns) FROM duties WHERE ts < {sql_timestamp(since_ms)} GROUP BY node)"
            " ORDER BY node, written_ns"
        )
        told: dict[str, list[NodeOutage]] = {}
        for row in found:
            told.setdefault(row["node"], []).append(from_json(NodeOutage, row["json"]))
        return told

    def _newest_actions(self, where: str, having: str, limit: int, parameters: dict[str, str]) -> list[Action]:
        found = self._clients.rows(
            f"SELECT json FROM (SELECT id, argMax(json, written_ns) AS json, argMax(state, written_ns) AS state,"
            f" min(ts) AS first, min(written_ns) AS begun FROM (SELECT * FROM actions WHERE {where}) GROUP BY id)"
            f" WHERE {having} ORDER BY first DESC, begun DESC LIMIT {int(limit)}",
            parameters,
        )
        return [from_json(Action, row["json"]) for row in reversed(found)]

    def _order(self, count: int) -> range:
        """Numbers that grow with each write, also over restarts."""
        with self._count_lock:
            first = max(time.time_ns(), self._last_ns + 1)
            self._last_ns = first + count
        return range(first, first + count)

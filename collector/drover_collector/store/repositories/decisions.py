"""Decisions, a row for each version, and what people answered to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_string, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Approval, Decision, from_json, to_json


class DecisionTable:
    """Decisions and the approvals of people."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, decisions: Sequence[Decision]) -> None:
        self._writer.insert(
            "decisions",
            decisions,
            {
                "id": lambda d: d.id,
                "incident_id": lambda d: d.incident_id,
                "ts": lambda d: Ms(d.ts_ms),
                "json": to_json,
            },
        )

    def of_incident(self, incident: str) -> list[Decision]:
        """Return all versions of the decisions of an incident, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM decisions FINAL WHERE incident_id = {id:String} ORDER BY ts, id", {"id": incident}
        )
        return [from_json(Decision, row["json"]) for row in found]

    def of_incidents(self, incidents: Iterable[str], since_ms: int) -> list[Decision]:
        """Return all versions of the decisions of these incidents, and of all decisions since then."""
        which = ", ".join(sql_string(id_) for id_ in incidents)
        of_these = f" OR incident_id IN ({which})" if which else ""
        found = self._clients.rows(
            f"SELECT json FROM decisions FINAL WHERE ts >= {sql_timestamp(since_ms)}{of_these} ORDER BY ts, id"
        )
        return [from_json(Decision, row["json"]) for row in found]

    def newest(self, since_ms: int = 0, outcome: str = "", limit: int = 1_000) -> list[Decision]:
        """Return the newest version of each decision, newest first. `outcome`: only those with this outcome."""
        having = "HAVING JSONExtractString(newest, 'outcome') = {outcome:String}" if outcome else ""
        found = self._clients.rows(
            "SELECT argMax(json, ts) AS newest, max(ts) AS last FROM decisions"
            f" WHERE ts >= {sql_timestamp(since_ms)} GROUP BY id {having} ORDER BY last DESC, id LIMIT {int(limit)}",
            {"outcome": outcome} if outcome else {},
        )
        return [from_json(Decision, row["newest"]) for row in found]

    def versions(self, since_ms: int, subject: str = "", limit: int = 1_000) -> list[Decision]:
        """Return all versions since then, newest first. `subject`: only those of this incident, node or decision."""
        about = (
            " AND (incident_id = {subject:String} OR id = {subject:String}"
            " OR JSONExtractString(json, 'node') = {subject:String})"
        )
        found = self._clients.rows(
            f"SELECT json FROM decisions FINAL WHERE ts >= {sql_timestamp(since_ms)}{about if subject else ''}"
            f" ORDER BY ts DESC, id LIMIT {int(limit)}",
            {"subject": subject} if subject else {},
        )
        return [from_json(Decision, row["json"]) for row in found]

    def without_action(self, since_ms: int, limit: int = 10_000) -> list[Decision]:
        """Return decisions to act since then that have no action, because their collector stopped in between."""
        found = self._clients.rows(
            f"SELECT json FROM decisions FINAL WHERE ts >= {sql_timestamp(since_ms)}"
            " AND JSONExtractString(json, 'outcome') = 'act' AND JSONExtractString(json, 'wanted') != 'probe'"
            " AND id NOT IN (SELECT decision_id FROM actions WHERE decision_id != '')"
            f" ORDER BY ts, id LIMIT {int(limit)}"
        )
        return [from_json(Decision, row["json"]) for row in found]

    def write_approvals(self, approvals: Sequence[Approval]) -> None:
        self._writer.insert(
            "approvals",
            approvals,
            {"decision_id": lambda a: a.decision_id, "ts": lambda a: Ms(a.ts_ms), "json": to_json},
        )

    def approvals(self, since_ms: int = 0, limit: int = 1_000) -> list[Approval]:
        """Return the last `limit` answers since then, oldest first."""
        found = self._clients.rows(
            f"SELECT json FROM approvals FINAL WHERE ts >= {sql_timestamp(since_ms)}"
            f" ORDER BY ts DESC LIMIT {int(limit)}"
        )
        return [from_json(Approval, row["json"]) for row in reversed(found)]

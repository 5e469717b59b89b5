"""Who did what, when and why: answers to decisions, and every other thing that a person has changed. Append-only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drover_collector.store.base import sql_string, sql_timestamp
from drover_collector.store.samples.write import Ms, Writes
from drover_core.model.events import (
    Approval,
    Audit,
    Decision,
    from_json,
    to_json,
)


class Audits(Writes):
    def write_approvals(self, approvals: Sequence[Approval]) -> None:
        self._insert(
            "approvals",
            approvals,
            {"decision_id": lambda a: a.decision_id, "ts": lambda a: Ms(a.ts_ms), "json": to_json},
        )

    def approvals(self, since_ms: int = 0, limit: int = 1_000) -> list[Approval]:
        """Oldest first; the newest where there are more than `limit`."""
        found = self._clients.rows(
            f"SELECT json FROM approvals FINAL WHERE ts >= {sql_timestamp(since_ms)}"
            f" ORDER BY ts DESC LIMIT {int(limit)}"
        )
        return [from_json(Approval, row["json"]) for row in reversed(found)]

    def write_audit(self, lines: Sequence[Audit]) -> None:
        """A line that is written again is there once."""
        self._insert(
            "audit",
            lines,
            {
                "id": lambda a: a.id,
                "ts": lambda a: Ms(a.ts_ms),
                "what": lambda a: a.what,
                "subject": lambda a: a.subject,
                "json": to_json,
            },
        )

    def audit(self, since_ms: int = 0, subject: str = "", limit: int = 1_000, what: str = "") -> list[Audit]:
        """Newest first; of all, or of one incident, node or decision. `what`: only these lines."""
        where, parameters = f"ts >= {sql_timestamp(since_ms)}", {}
        if what:
            where += " AND what = {what:String}"
            parameters["what"] = what
        if subject:
            where += " AND subject = {subject:String}"
            parameters["subject"] = subject
        found = self._clients.rows(
            f"SELECT json FROM audit FINAL WHERE {where} ORDER BY ts DESC, id LIMIT {int(limit)}", parameters
        )
        return [from_json(Audit, row["json"]) for row in found]

    def newest_decisions(self, since_ms: int = 0, outcome: str = "", limit: int = 1_000) -> list[Decision]:
        """How each decision stands, newest first. `outcome`: only those that stand so."""
        having = "HAVING JSONExtractString(newest, 'outcome') = {outcome:String}" if outcome else ""
        found = self._clients.rows(
            "SELECT argMax(json, ts) AS newest, max(ts) AS last FROM decisions"
            f" WHERE ts >= {sql_timestamp(since_ms)} GROUP BY id {having} ORDER BY last DESC, id LIMIT {int(limit)}",
            {"outcome": outcome} if outcome else {},
        )
        return [from_json(Decision, row["newest"]) for row in found]

    def decided(self, since_ms: int, subject: str = "", limit: int = 1_000) -> list[Decision]:
        """All versions, newest first; of all, or of one incident, node or decision."""
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

    def decisions_of(self, incidents: Iterable[str], since_ms: int) -> list[Decision]:
        """All versions of the decisions of these incidents, and of all incidents since then."""
        which = ", ".join(sql_string(id_) for id_ in incidents)
        of_these = f" OR incident_id IN ({which})" if which else ""
        found = self._clients.rows(
            f"SELECT json FROM decisions FINAL WHERE ts >= {sql_timestamp(since_ms)}{of_these} ORDER BY ts, id"
        )
        return [from_json(Decision, row["json"]) for row in found]

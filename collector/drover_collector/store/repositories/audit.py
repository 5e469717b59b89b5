"""The audit log: who changed what, when and why. Append-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Audit, from_json, to_json
from drover_core.model.incident_notes import ACTS


class AuditTable:
    """Lines of the audit log.

    Attributes:
        takers: called with lines when they are stored; some come again. Each returns at once.
    """

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self.takers: list[Callable[[Sequence[Audit]], None]] = []
        self._clients = clients
        self._writer = writer

    def write(self, lines: Sequence[Audit]) -> None:
        """Write lines. A line that is written twice is stored once."""
        self._writer.insert(
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
        for take in self.takers:
            take(lines)

    def read(self, since_ms: int = 0, subject: str = "", limit: int = 1_000, what: str = "") -> list[Audit]:
        """Return lines since then, newest first. `subject`: of this incident, decision, or node with its GPUs."""
        where, parameters = f"ts >= {sql_timestamp(since_ms)}", {}
        if what:
            where += " AND what = {what:String}"
            parameters["what"] = what
        if subject:
            where += " AND (subject = {subject:String} OR startsWith(subject, concat({subject:String}, ' GPU ')))"
            parameters["subject"] = subject
        found = self._clients.rows(
            f"SELECT json FROM audit FINAL WHERE {where} ORDER BY ts DESC, id LIMIT {int(limit)}", parameters
        )
        return [from_json(Audit, row["json"]) for row in found]

    def notes(self, limit: int = 10_000) -> list[Audit]:
        """Return what people noted on incidents, the newest first."""
        found = self._clients.rows(
            "SELECT json FROM audit FINAL WHERE what IN {acts:Array(String)}"
            f" ORDER BY ts DESC, id LIMIT {int(limit)}",
            {"acts": list(ACTS)},
        )
        return [from_json(Audit, row["json"]) for row in found]

"""Incidents, a row for each version, and the findings that they are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import (
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    from_json,
    to_json,
)

AS_OF_MAX = 10_000  # incidents of one moment


class IncidentTable:
    """Incidents: the newest version of an id is its state."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, incidents: Sequence[Incident]) -> None:
        """Write a new version of each."""
        self._writer.insert(
            "incidents",
            incidents,
            {
                "id": lambda i: i.id,
                "version": lambda i: i.version,
                "opened": lambda i: Ms(i.opened_ms),
                "closed": lambda i: Ms(i.closed_ms),
                "updated": lambda i: Ms(i.updated_ms),
                "json": to_json,
            },
        )

    def newest(self, state: str = "all", since_ms: int = 0) -> list[Incident]:
        """Return the newest version of each incident, newest incident first.

        Args:
            state: open, closed or all. since_ms: only those that are open, or were closed after it.
        """
        if state not in ("open", "closed", "all"):
            raise ValueError(f"{state!r} is not a state; use open, closed or all")
        having = {"open": "NOT shut", "closed": "shut", "all": "1"}[state]
        if since_ms:
            having += f" AND (NOT shut OR closed_at >= {sql_timestamp(since_ms)})"
        newest = "(version, updated)"
        # Only the chosen versions are read whole: an incident has many, and they are long.
        chosen = (
            f"SELECT id, max({newest}) AS last, argMax(isNotNull(closed), {newest}) AS shut,"
            f" argMax(ifNull(closed, {sql_timestamp(0)}), {newest}) AS closed_at FROM incidents"
            f" GROUP BY id HAVING {having}"
        )
        found = self._clients.rows(
            "SELECT json FROM incidents WHERE (id, version, updated) IN"
            f" (SELECT id, last.1, last.2 FROM ({chosen})) ORDER BY opened DESC, id LIMIT 1 BY id"
        )
        return [from_json(Incident, row["json"]) for row in found]

    def as_of(self, at_ms: int, since_ms: int) -> list[Incident]:
        """Return each incident's version of a time, newest first: those open then, or closed in [since_ms, at_ms]."""
        newest = "(version, updated)"
        chosen = (
            f"SELECT id, max({newest}) AS last, argMax(isNotNull(closed), {newest}) AS shut,"
            f" argMax(ifNull(closed, {sql_timestamp(0)}), {newest}) AS closed_at FROM incidents"
            f" WHERE opened <= {sql_timestamp(at_ms)} AND updated <= {sql_timestamp(at_ms)}"
            f" GROUP BY id HAVING NOT shut OR closed_at >= {sql_timestamp(since_ms)}"
        )
        found = self._clients.rows(
            "SELECT json FROM incidents WHERE (id, version, updated) IN"
            f" (SELECT id, last.1, last.2 FROM ({chosen})) ORDER BY opened DESC, id LIMIT 1 BY id LIMIT {AS_OF_MAX}"
        )
        return [from_json(Incident, row["json"]) for row in found]

    def history(self, incident: str) -> list[Incident]:
        """Return all versions of an incident, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM incidents FINAL WHERE id = {id:String} ORDER BY version, updated", {"id": incident}
        )
        return [from_json(Incident, row["json"]) for row in found]

    def for_risk(self, since_ms: int, most: int = 100_000) -> list[Incident]:
        """Return what risk needs of the newest incidents, open or closed after `since_ms`, without severity info."""
        return self._brief(since_ms, most, " AND severity != 'info'")

    def for_cost(self, since_ms: int, most: int = 100_000) -> list[Incident]:
        """Return what costs are computed from: the newest incidents of all severities, in the same form."""
        return self._brief(since_ms, most, "")

    def for_ledger(self, since_ms: int, most: int = 100_000) -> list[dict[str, Any]]:
        """Return what the ledger needs of incidents that are open, or were closed after `since_ms`, the newest first.

        Each has id, kind, cause, scope, severity, node, job, summary, members, since_ms, closed_ms, updated_ms, lost
        and waited (GPU-hours), and its timeline if it was reopened.
        """
        newest = "(version, updated)"
        chosen = (
            f"SELECT id, max({newest}) AS last FROM incidents GROUP BY id"
            f" HAVING argMax(isNull(closed) OR closed >= {sql_timestamp(since_ms)}, {newest})"
        )
        keys = ("kind", "cause", "severity", "summary")
        text = ", ".join(f"JSONExtractString(json, '{key}') AS {key}" for key in keys)
        maybe = ", ".join(f"JSONExtract(json, '{key}', 'Nullable(String)') AS {key}" for key in ("node", "job"))
        found = self._clients.rows(
            f"SELECT id, {text}, {maybe}, JSONExtractInt(json, 'since_ms') AS since_ms,"
            " JSONExtractInt(json, 'updated_ms') AS updated_ms, JSONExtractRaw(json, 'members') AS members,"
            " JSONExtract(json, 'closed_ms', 'Nullable(Int64)') AS closed_ms,"
            " JSONExtract(json, 'gpu_hours_lost', 'Nullable(Float64)') AS lost,"
            " JSONExtract(json, 'gpu_hours_waited', 'Nullable(Float64)') AS waited,"
            " if(position(json, 'came_back') > 0, JSONExtractRaw(json, 'timeline'), '[]') AS timeline"
            f" FROM incidents WHERE (id, version, updated) IN (SELECT id, last.1, last.2 FROM ({chosen}))"
            f" ORDER BY opened DESC, id LIMIT 1 BY id LIMIT {int(most)}"
        )
        return [
            row | {"members": json.loads(row["members"]), "timeline": json.loads(row["timeline"])} for row in found
        ]  # fmt: skip

    def _brief(self, since_ms: int, most: int, where: str) -> list[Incident]:
        """Return incidents without evidence, timeline and texts: whole, 100,000 of them would take half a minute."""
        newest = "(version, updated)"
        chosen = (
            f"SELECT id, max({newest}) AS last FROM incidents GROUP BY id"
            f" HAVING argMax(ifNull(closed, now64(3)), {newest}) >= {sql_timestamp(since_ms)}"
        )
        text = ", ".join(f"JSONExtractString(json, '{key}') AS {key}" for key in ("kind", "cause", "scope", "severity"))
        found = self._clients.rows(
            f"SELECT id, {text}, JSONExtractInt(json, 'opened_ms') AS opened_ms,"
            " JSONExtractInt(json, 'since_ms') AS since_ms, JSONExtractRaw(json, 'members') AS members,"
            " JSONExtract(json, 'closed_ms', 'Nullable(Int64)') AS closed_ms,"
            " JSONExtract(json, 'gpu_hours_lost', 'Nullable(Float64)') AS lost,"
            " JSONExtract(json, 'gpu_hours_waited', 'Nullable(Float64)') AS waited"
            f" FROM incidents WHERE (id, version, updated) IN (SELECT id, last.1, last.2 FROM ({chosen}))"
            f"{where} ORDER BY opened DESC, id LIMIT 1 BY id LIMIT {int(most)}"
        )
        return [
            Incident(
                row["id"], IncidentKind(row["kind"]), row["cause"], row["scope"], None, None,
                tuple((str(node), gpu) for node, gpu in json.loads(row["members"])), row["opened_ms"], row["since_ms"],
                row["closed_ms"], Severity(row["severity"]), 0.0, RecommendedAction.NONE, "", "",
                gpu_hours_lost=row["lost"], gpu_hours_waited=row["waited"],
            )
            for row in found
        ]  # fmt: skip


class FindingTable:
    """Findings of detectors."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, findings: Sequence[Finding]) -> None:
        self._writer.insert(
            "findings",
            findings,
            {
                "ts": lambda f: Ms(f.ts_ms),
                "detector": lambda f: f.detector,
                "kind": lambda f: str(f.kind),
                "node": lambda f: f.node or "",
                "json": to_json,
            },
        )

    def between(self, from_ms: int, to_ms: int, limit: int = 10_000, node: str | None = None) -> list[Finding]:
        """Return findings of [from_ms, to_ms), oldest first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if node is not None:
            where, parameters = f"{where} AND node = {{node:String}}", {"node": node}
        which = f"WHERE {where} ORDER BY ts LIMIT {int(limit)}"
        found = self._clients.rows(f"SELECT json FROM findings {which}", parameters)
        return [from_json(Finding, row["json"]) for row in found]

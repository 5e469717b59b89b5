"""Events: XIDs, kernel lines and changes of state, and which of them the engine has judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.schema.tables import UNJUDGED_DAYS
from drover_collector.store.sql import sql_ms, sql_string, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Event, from_dict


class EventTable:
    """Events by their id: one that is written twice is stored once."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, events: Sequence[Event]) -> None:
        """Write events."""
        self._writer.insert(
            "events",
            events,
            {
                "id": lambda e: e.id,
                "ts": lambda e: Ms(e.ts_ms),
                "node": lambda e: e.node,
                "gpu": lambda e: e.gpu,
                "kind": lambda e: str(e.kind),
                "code": lambda e: e.code,
                "message": lambda e: e.message,
                "source": lambda e: e.source,
                "backlog": lambda e: e.backlog,
                "count": lambda e: e.count,
                "received": _received,
                "clock_suspect": lambda e: e.clock_suspect,
                "forgeable": lambda e: e.forgeable,
                "boot": lambda e: e.boot,
            },
        )

    def write_judged(self, events: Sequence[Event]) -> None:
        """Note that what the engine made of these events is stored."""
        self._writer.insert("judged_events", events, {"id": lambda e: e.id, "received": _received})

    def read(
        self, from_ms: int, to_ms: int, node: str | None = None, gpu: int | None = None, limit: int = 500
    ) -> list[Event]:
        """Return events of [from_ms, to_ms) by the node's clock, newest first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if node is not None:
            where += " AND node = {node:String}"
            parameters["node"] = node
        if gpu is not None:
            where += f" AND gpu = {int(gpu)}"
        return self._events(where, "ts DESC, id DESC", limit, parameters)

    def read_after(self, from_ms: int, to_ms: int, last: Event | None, limit: int) -> list[Event]:
        """Return events of [from_ms, to_ms) by the node's clock after `last` (None: all), oldest first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if last is not None:
            where += f" AND (ts, id) > ({sql_timestamp(last.ts_ms)}, {{id:String}})"
            parameters["id"] = last.id
        return self._events(where, "ts, id", limit, parameters)

    def of_code(self, kind: str, code: str, since_ms: int, containing: str = "", limit: int = 10_000) -> list[Event]:
        """Return the last `limit` events with this code received since then, in order of receipt.

        Args:
            containing: only those whose message has this text.
        """
        where = f"received >= {sql_timestamp(since_ms)} AND kind = {{kind:String}} AND code = {{code:String}}"
        parameters = {"kind": str(kind), "code": code}
        if containing:
            where += " AND position(message, {text:String}) > 0"
            parameters["text"] = containing
        return self._events(where, "received DESC, id DESC", limit, parameters)[::-1]

    def messages_of_code(
        self, kind: str, code: str, since_ms: int, limit: int, jobs: Sequence[str] | None = None
    ) -> list[str]:
        """Return the distinct messages with this code received since then, the one that came last at the end.

        Args:
            limit: of more those that came last. jobs: only JSON messages about these; None: all.
        """
        about = (
            "" if jobs is None else f" AND JSONExtractString(message, 'job') IN ({', '.join(map(sql_string, jobs))})"
        )
        rows = self._clients.rows(
            f"SELECT message FROM events WHERE received >= {sql_timestamp(since_ms)} AND kind = {{kind:String}}"
            f" AND code = {{code:String}}{about} GROUP BY message"
            f" ORDER BY max(received) DESC, message LIMIT {int(limit)}",
            {"kind": str(kind), "code": code},
        )
        return [row["message"] for row in rows][::-1]

    def received(self, node: str, since_ms: int, limit: int = 10_000) -> list[Event]:
        """Return events of a node received since then by this collector's clock, in order of receipt."""
        where = f"node = {{node:String}} AND received >= {sql_timestamp(since_ms)}"
        return self._events(where, "received, id", limit, {"node": node})

    def unjudged(self, now_ms: int, limit: int) -> list[Event]:
        """Return events of the last UNJUDGED_DAYS whose outcome is not stored, in order of receipt."""
        since = f"received >= {sql_timestamp(now_ms - UNJUDGED_DAYS * 86_400_000)}"
        judged = f"SELECT id FROM judged_events WHERE {since}"
        return self._events(f"{since} AND id NOT IN ({judged})", "received, id", limit, {})

    def _events(self, where: str, order: str, limit: int, parameters: dict[str, Any]) -> list[Event]:
        # Not FINAL, which would read the ids of all events.
        found = self._clients.rows(
            f"SELECT id, {sql_ms('ts')} AS ts_ms, node, gpu, kind, code, message, source, backlog, count,"
            f" {sql_ms('received')} AS received_ms, clock_suspect, forgeable, boot FROM events WHERE {where}"
            f" ORDER BY {order} LIMIT 1 BY id LIMIT {int(limit)}",
            parameters,
        )
        return [from_dict(Event, row) for row in found]


def _received(event: Event) -> Ms:
    return Ms(event.ts_ms if event.received_ms is None else event.received_ms)

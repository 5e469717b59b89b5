"""The outbox: notifications and how their delivery goes. The newest row of an id is its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_ms, sql_string
from drover_collector.store.table_writer import Ms, TableWriter

IDS_MAX = 1_000  # ids in one query: the engine takes at most 256 kB of text


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A notification and how its delivery goes."""

    id: str
    incident_id: str
    notifier: str
    payload_json: str
    created_ms: int
    state: str = (
        "pending"  # pending, delivered, failed, grouped or deferred (replaced by one about a mass event or a gap)
    )
    attempts: int = 0
    next_ms: int = 0  # not tried again before this
    detail: str = ""


class OutboxTable:
    """Rows of the outbox."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, rows: OutboxRow | Sequence[OutboxRow]) -> None:
        """Write the new state of notifications."""
        listed = [rows] if isinstance(rows, OutboxRow) else rows
        written = self._writer.next_numbers(1)[0]
        self._writer.insert(
            "outbox",
            listed,
            {
                "id": lambda r: r.id,
                "incident_id": lambda r: r.incident_id,
                "notifier": lambda r: r.notifier,
                "payload_json": lambda r: r.payload_json,
                "created": lambda r: Ms(r.created_ms),
                "state": lambda r: r.state,
                "attempts": lambda r: r.attempts,
                "next": lambda r: Ms(r.next_ms),
                "detail": lambda r: r.detail,
                "written_ns": lambda _: written,
            },
        )

    def pending(self) -> list[OutboxRow]:
        """Return the notifications that wait for delivery, oldest first."""
        waiting = "SELECT id FROM outbox GROUP BY id HAVING argMax(state, written_ns) = 'pending'"
        return self._read(f"id IN ({waiting})", {})

    def of_incidents(self, *incidents: str) -> list[OutboxRow]:
        """Return the notifications of these incidents, oldest first."""
        found = []
        for at in range(0, len(incidents), IDS_MAX):
            which = ", ".join(sql_string(id_) for id_ in incidents[at : at + IDS_MAX])
            found += self._read(f"incident_id IN ({which})", {})
        return sorted(found, key=lambda row: (row.created_ms, row.id))

    def _read(self, where: str, parameters: dict[str, str]) -> list[OutboxRow]:
        found = self._clients.rows(
            "SELECT id, incident_id, notifier, payload_json, created_ms, state, attempts, next_ms, detail FROM ("
            f"SELECT *, {sql_ms('created')} AS created_ms, {sql_ms('next')} AS next_ms FROM outbox"
            f" WHERE {where} ORDER BY written_ns DESC LIMIT 1 BY id) ORDER BY created_ms, id",
            parameters,
        )
        return [OutboxRow(**row) for row in found]

"""Silences. Append-only; the newest version of an id counts."""

from __future__ import annotations

from collections.abc import Sequence

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Silence, from_json, to_json


class SilenceTable:
    """Silences that people made, changed or ended."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, silences: Sequence[Silence]) -> None:
        """Write new silences, and new versions."""
        self._writer.insert(
            "silences",
            list(zip(silences, self._writer.next_numbers(len(silences)), strict=True)),
            {
                "id": lambda r: r[0].id,
                "until": lambda r: Ms(r[0].until_ms),
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )

    def newest(self, since_ms: int = 0, limit: int = 10_000) -> list[Silence]:
        """Return the newest version of each silence that ends after `since_ms`, the last made first."""
        found = self._clients.rows(
            "SELECT argMax(json, written_ns) AS newest, max(until) AS last, min(written_ns) AS begun FROM silences"
            f" GROUP BY id HAVING last >= {sql_timestamp(since_ms)} ORDER BY begun DESC, id LIMIT {int(limit)}"
        )
        return [from_json(Silence, row["newest"]) for row in found]

"""Collectors of one store: with which settings each runs, so that they can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter


class CollectorTable:
    """One row for each collector, which the collector writes again and again while it runs."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, name: str, ts_ms: int, settings: Mapping[str, str]) -> None:
        """Write with which settings a collector runs; none is a secret."""
        self._writer.insert(
            "collectors",
            [settings],
            {
                "name": lambda _: name,
                "ts": lambda _: Ms(ts_ms),
                "json": lambda s: json.dumps(dict(s), sort_keys=True),
            },
        )

    def newest(self, since_ms: int) -> dict[str, dict[str, str]]:
        """Return collector -> its settings, of those that wrote since then."""
        found = self._clients.rows(
            "SELECT name, argMax(json, ts) AS newest FROM collectors"
            f" WHERE ts >= {sql_timestamp(since_ms)} GROUP BY name ORDER BY name"
        )
        return {row["name"]: dict(json.loads(row["newest"])) for row in found}

    def written_ms(self) -> dict[str, int]:
        """Return collector -> the time of what it wrote last, by its own clock."""
        found = self._clients.rows("SELECT name, toUnixTimestamp64Milli(max(ts)) AS at FROM collectors GROUP BY name")
        return {row["name"]: row["at"] for row in found}

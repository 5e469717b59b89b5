"""Inventories: what each node reported about its hardware and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_ms, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.kinds import BOOT_ID


class InventoryTable:
    """Inventories: a dict of texts for each node and time."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write_one(self, node: str, ts_ms: int, inventory: Mapping[str, str]) -> None:
        """Write what a node is made of from `ts_ms` on."""
        self.write([(node, ts_ms, inventory)])

    def write(self, inventories: Sequence[tuple[str, int, Mapping[str, str]]]) -> None:
        """Write (node, from when on, what it is made of) of several nodes."""
        self._writer.insert(
            "inventory",
            inventories,
            {
                "node": lambda i: i[0],
                "ts": lambda i: Ms(i[1]),
                "json": lambda i: json.dumps(dict(i[2]), sort_keys=True),
            },
        )

    def newest(self, node: str) -> dict[str, str]:
        """Return the newest inventory of a node; empty if it never reported one."""
        found = self._clients.rows(
            "SELECT argMax(json, ts) AS newest FROM inventory WHERE node = {node:String} HAVING count() > 0",
            {"node": node},
        )
        return dict(json.loads(found[0]["newest"])) if found else {}

    def at(self, node: str, ts_ms: int) -> dict[str, str]:
        """Return what a node was made of at a time; empty if it had reported nothing by then."""
        found = self._clients.rows(
            f"SELECT argMax(json, ts) AS newest FROM inventory WHERE node = {{node:String}}"
            f" AND ts <= {sql_timestamp(ts_ms)}"
            " HAVING count() > 0",
            {"node": node},
        )
        return dict(json.loads(found[0]["newest"])) if found else {}

    def boots(self, node: str, since_ms: int) -> list[tuple[int, str]]:
        """Return (time, boot id) of each inventory since then and of the newest one before, oldest first.

        The boot id is "" where the agent reported none.
        """
        found = self._clients.rows(
            f"SELECT {sql_ms('ts')} AS ts_ms, JSONExtractString(json, '{BOOT_ID}') AS boot FROM inventory FINAL"
            f" WHERE node = {{node:String}} AND (ts >= {sql_timestamp(since_ms)} OR ts ="
            f" (SELECT max(ts) FROM inventory WHERE node = {{node:String}} AND ts < {sql_timestamp(since_ms)}))"
            " ORDER BY ts",
            {"node": node},
        )
        return [(row["ts_ms"], row["boot"]) for row in found]

    def newest_between(
        self, from_ms: int, to_ms: int, number: int = 0, slices: int = 1
    ) -> list[tuple[int, str, dict[str, str]]]:
        """Return (time, node, inventory): the newest of each node within [from_ms, to_ms).

        Args:
            number, slices: only the nodes of this slice, of so many.
        """
        found = self._clients.rows(
            f"SELECT node, {sql_ms('reported')} AS ts_ms, json FROM (SELECT node, max(ts) AS reported,"
            f" argMax(json, ts) AS json FROM inventory WHERE {sql_time_range(max(0, from_ms), to_ms)}"
            f" AND cityHash64(node) % {int(slices)} = {int(number)} GROUP BY node) ORDER BY reported, node"
        )
        return [(row["ts_ms"], row["node"], dict(json.loads(row["json"]))) for row in found]

    def between(
        self, from_ms: int, to_ms: int, number: int = 0, slices: int = 1
    ) -> list[tuple[int, str, dict[str, str]]]:
        """Return (time, node, inventory) of all within [from_ms, to_ms), after the newest of each node before that."""
        found = self._clients.rows(
            f"SELECT {sql_ms('ts')} AS ts_ms, node, json FROM inventory FINAL WHERE {sql_time_range(from_ms, to_ms)}"
            f" AND cityHash64(node) % {int(slices)} = {int(number)} ORDER BY ts, node"
        )
        before = self.newest_between(0, from_ms, number, slices)
        return before + [(row["ts_ms"], row["node"], dict(json.loads(row["json"]))) for row in found]

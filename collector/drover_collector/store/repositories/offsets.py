"""Offsets: how far each lane of each agent is stored."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_string
from drover_collector.store.table_writer import Ms, TableWriter

Offsets = dict[tuple[str, str], dict[int, int]]  # (node, spool id) -> lane -> the last sequence that is stored


class OffsetTable:
    """`resend`: the newest data is damaged, so agents are asked for all that they still have."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer
        self.resend = False

    def forget(self) -> None:
        """Forget all offsets, so that agents send again what they still have."""
        self.resend = True
        self._clients.command("TRUNCATE TABLE lane_seqs")

    def write(self, offsets: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
        """Note how far lanes are stored."""
        rows = [(node, spool, lane, seq) for (node, spool), held in offsets.items() for lane, seq in held.items()]
        now = Ms(time.time_ns() // 1_000_000)
        self._writer.insert(
            "lane_seqs",
            rows,
            {
                "node": lambda r: r[0],
                "spool": lambda r: r[1],
                "lane": lambda r: r[2],
                "seq": lambda r: r[3],
                "at": lambda _: now,
            },
        )

    def read(self, node: str | None = None, spool: str | None = None) -> Offsets:
        """Return the offsets of one node and spool, or of all.

        The events lane is as far as its rows are, which may be ahead of what `write` noted.
        """
        where, parameters = "1", {}
        if node is not None:
            where += " AND node = {node:String}"
            parameters["node"] = node
        if spool is not None:
            where += " AND spool = {spool:String}"
            parameters["spool"] = spool
        ids = "splitByChar('/', id)"
        found = self._clients.rows(
            "SELECT node, spool, lane, max(seq) AS last FROM ("
            "SELECT node, spool, lane, seq FROM lane_seqs UNION ALL"
            f" SELECT node, {ids}[-2] AS spool, toUInt8(1) AS lane, toUInt64OrZero({ids}[-1]) AS seq FROM events"
            f" WHERE length({ids}) = 3 AND {int(not self.resend)}) WHERE {where} GROUP BY node, spool, lane",
            parameters,
        )
        result: Offsets = {}
        for row in found:
            result.setdefault((row["node"], row["spool"]), {})[row["lane"]] = row["last"]
        return result

    def newest_notes(self, but_of: str) -> dict[str, tuple[int, int]]:
        """Return node -> the sum of its lanes' offsets, and when one was noted last by the clock of who noted it, ms.

        Spools with the name `but_of` do not count.
        """
        found = self._clients.rows(
            "SELECT node, sum(last) AS reached, toUnixTimestamp64Milli(max(noted)) AS at FROM ("
            "SELECT node, max(seq) AS last, max(at) AS noted FROM lane_seqs WHERE spool != {spool:String}"
            " GROUP BY node, spool, lane) GROUP BY node",
            {"spool": but_of},
        )
        return {row["node"]: (row["reached"], row["at"]) for row in found}

    def noted(self, keys: Iterable[tuple[str, str]]) -> Offsets:
        """Return the offsets of these (node, spool id) as last noted: an agent may come from another collector."""
        which = ", ".join(f"({sql_string(node)}, {sql_string(spool)})" for node, spool in keys)
        if not which:
            return {}
        found = self._clients.rows(
            "SELECT node, spool, lane, max(seq) AS last FROM lane_seqs"
            f" WHERE (node, spool) IN ({which}) GROUP BY node, spool, lane"
        )
        result: Offsets = {}
        for row in found:
            result.setdefault((row["node"], row["spool"]), {})[row["lane"]] = row["last"]
        return result

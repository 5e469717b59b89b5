"""Absences: which metrics an agent cannot read, from when to when, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_ms, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import Absence, from_dict

CACHE_S, CACHED_MAX = 30.0, 1_000  # open absences of a metric are cached for so long, if there are so few


class AbsenceTable:
    """Metrics that could not be read. `written`: how many times this process wrote absences."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer
        self.written = 0
        # metric -> (`written` at that time, monotonic seconds, rows)
        self._open: Mapping[str, tuple[int, float, Sequence[Mapping[str, Any]]]] = {}

    def write(self, absences: Sequence[Absence]) -> None:
        columns: dict[str, Callable[[Absence], Any]] = {
            "node": lambda a: a.node,
            "gpu": lambda a: -1 if a.gpu is None else a.gpu,
            "link": lambda a: a.link or "",
            "metric": lambda a: a.metric,
            "reason": lambda a: a.reason,
            "from": lambda a: Ms(a.from_ms),
            "to": lambda a: Ms(a.to_ms),
            "closed": lambda a: int(a.to_ms is not None),
        }
        self._writer.insert("absences", absences, columns)
        newest = columns | {"version": lambda a: max(0, 2 * a.from_ms) + (a.to_ms is not None)}
        self._writer.insert("absent", absences, newest)
        self.written += 1

    def current(self, node: str | None = None) -> list[Absence]:
        """Return the open absences of one node or of all."""
        return self._absences("closed = 0", node, "absent")

    def between(self, from_ms: int, to_ms: int) -> list[Absence]:
        """Return the absences that overlap [from_ms, to_ms), open or closed."""
        return self._absences(
            f"`from` < {sql_timestamp(to_ms)} AND (closed = 0 OR `to` > {sql_timestamp(from_ms)})", None, "absences"
        )

    def of_metric(self, metric: str) -> Sequence[Mapping[str, Any]]:
        """Return node, gpu and from_ms of each GPU where a metric is absent.

        An embedded store, to which only this process writes, answers from memory until it writes absences.
        """
        written, now_s = self.written, time.monotonic()
        kept = self._open.get(metric)
        if kept is not None and kept[0] == written and now_s < kept[1] + CACHE_S:
            return kept[2]
        found = self._clients.rows(
            "SELECT node, gpu, toUnixTimestamp64Milli(`from`) AS from_ms FROM absent FINAL"
            " WHERE closed = 0 AND gpu >= 0 AND link = '' AND metric = {metric:String}",
            {"metric": metric},
        )
        if self._clients.embedded and len(found) <= CACHED_MAX:
            self._open = {**self._open, metric: (written, now_s, found)}
        return found

    def load_newest(self) -> None:
        """Fill the table of newest absences in a store from before there was one."""
        some, filled = (self._clients.rows(f"SELECT 1 FROM {name} LIMIT 1") for name in ("absences", "absent"))
        if some and not filled:
            self._clients.command(
                "INSERT INTO absent SELECT node, gpu, link, metric, reason, `from`, `to`, closed,"
                f" toUInt64(greatest(0, 2 * {sql_ms('from')})) + closed AS version"
                " FROM absences ORDER BY version DESC LIMIT 1 BY metric, node, gpu, link"
            )

    def _absences(self, where: str, node: str | None, table: str) -> list[Absence]:
        parameters = {}
        if node is not None:
            where += " AND node = {node:String}"
            parameters["node"] = node
        found = self._clients.rows(
            f"SELECT node, nullIf(gpu, -1) AS gpu, nullIf(link, '') AS link, metric, reason,"
            f" {sql_ms('from')} AS from_ms, {sql_ms('to')} AS to_ms FROM {table} FINAL WHERE {where}"
            f" ORDER BY node, {table}.gpu, metric, from_ms",
            parameters,
        )
        return [from_dict(Absence, row) for row in found]

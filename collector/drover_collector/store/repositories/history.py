"""Reads of everything that is not a sample: events, absences, incidents, decisions, health, the outbox."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from drover_collector.store.base import Base, sql_string, sql_time_range, sql_timestamp
from drover_collector.store.records import OutboxRow
from drover_collector.store.schema.tables import UNJUDGED_DAYS
from drover_core.model.events import (
    Absence,
    Decision,
    Event,
    Finding,
    Holding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    from_dict,
    from_json,
)
from drover_core.model.kinds import BOOT_ID

MOST_HEALTH = 1_000  # changes of a node's and its GPUs' health in one answer
TOGETHER = 1_000  # ids in one question: the engine reads no longer ones than 256 kB


def _ms(column: str) -> str:
    return f"toUnixTimestamp64Milli(`{column}`)"


class History(Base):
    def events(
        self, from_ms: int, to_ms: int, node: str | None = None, gpu: int | None = None, limit: int = 500
    ) -> list[Event]:
        """Events of [from_ms, to_ms) by the node's clock, newest first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if node is not None:
            where += " AND node = {node:String}"
            parameters["node"] = node
        if gpu is not None:
            where += f" AND gpu = {int(gpu)}"
        return self._events(where, "ts DESC, id DESC", limit, parameters)

    def events_from(self, from_ms: int, to_ms: int, last: Event | None, limit: int) -> list[Event]:
        """Events of [from_ms, to_ms) by the node's clock, oldest first: those after `last`; None: the first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if last is not None:
            where += f" AND (ts, id) > ({sql_timestamp(last.ts_ms)}, {{id:String}})"
            parameters["id"] = last.id
        return self._events(where, "ts, id", limit, parameters)

    def events_received(self, node: str, since_ms: int, limit: int = 10_000) -> list[Event]:
        """Events of a node that came since, by this collector's clock, in order of receipt."""
        where = f"node = {{node:String}} AND received >= {sql_timestamp(since_ms)}"
        return self._events(where, "received, id", limit, {"node": node})

    def unjudged_events(self, now_ms: int, limit: int) -> list[Event]:
        """Events of the last days that are stored, but whose outcome is not; in order of receipt."""
        since = f"received >= {sql_timestamp(now_ms - UNJUDGED_DAYS * 86_400_000)}"
        judged = f"SELECT id FROM judged_events WHERE {since}"
        return self._events(f"{since} AND id NOT IN ({judged})", "received, id", limit, {})

    def _events(self, where: str, order: str, limit: int, parameters: dict[str, Any]) -> list[Event]:
        # Not FINAL, which would read the ids of all events: what has the same id is the same event.
        found = self._clients.rows(
            f"SELECT id, {_ms('ts')} AS ts_ms, node, gpu, kind, code, message, source, backlog, count,"
            f" {_ms('received')} AS received_ms, clock_suspect, forgeable, boot FROM events WHERE {where}"
            f" ORDER BY {order} LIMIT 1 BY id LIMIT {int(limit)}",
            parameters,
        )
        return [from_dict(Event, row) for row in found]

    def load_newest(self) -> None:
        """Fills the tables of newest states in a store from before there were any."""
        of_absences = "node, gpu, link, metric, reason, `from`, `to`, closed"
        newest = {
            (
                "holdings",
                "holders",
            ): "SELECT node, gpu, max(`from`), argMax(job, `from`) FROM holdings GROUP BY node, gpu",
            (
                "absences",
                "absent",
            ): f"SELECT {of_absences}, toUInt64(greatest(0, 2 * {_ms('from')})) + closed AS version"
            " FROM absences ORDER BY version DESC LIMIT 1 BY metric, node, gpu, link",
        }
        for (source, table), select in newest.items():
            some, filled = (self._clients.rows(f"SELECT 1 FROM {name} LIMIT 1") for name in (source, table))
            if some and not filled:
                self._clients.command(f"INSERT INTO {table} {select}")

    def absences(self, node: str | None = None) -> list[Absence]:
        """What cannot be read now, of one node or of all."""
        return self._absences("closed = 0", node, "absent")

    def absences_between(self, from_ms: int, to_ms: int) -> list[Absence]:
        """Absences that touch [from_ms, to_ms), open ones and closed."""
        return self._absences(
            f"`from` < {sql_timestamp(to_ms)} AND (closed = 0 OR `to` > {sql_timestamp(from_ms)})", None, "absences"
        )

    def inventory(self, node: str) -> dict[str, str]:
        """The newest inventory; empty when the node never told one."""
        found = self._clients.rows(
            "SELECT argMax(json, ts) AS newest FROM inventory WHERE node = {node:String} HAVING count() > 0",
            {"node": node},
        )
        return dict(json.loads(found[0]["newest"])) if found else {}

    def boots(self, node: str, since_ms: int) -> list[tuple[int, str]]:
        """(when, boot id) of each inventory since then and of the newest one before, oldest first; "" where the agent
        reported none."""
        found = self._clients.rows(
            f"SELECT {_ms('ts')} AS ts_ms, JSONExtractString(json, '{BOOT_ID}') AS boot FROM inventory FINAL"
            f" WHERE node = {{node:String}} AND (ts >= {sql_timestamp(since_ms)} OR ts ="
            f" (SELECT max(ts) FROM inventory WHERE node = {{node:String}} AND ts < {sql_timestamp(since_ms)}))"
            " ORDER BY ts",
            {"node": node},
        )
        return [(row["ts_ms"], row["boot"]) for row in found]

    def inventories(
        self, from_ms: int, to_ms: int, number: int = 0, slices: int = 1
    ) -> list[tuple[int, str, dict[str, str]]]:
        """(time, node, all that it told): the newest of each node that was told in [from_ms, to_ms). Of a part of the
        nodes where there are `slices`."""
        found = self._clients.rows(
            f"SELECT node, {_ms('told')} AS ts_ms, json FROM (SELECT node, max(ts) AS told, argMax(json, ts) AS json"
            f" FROM inventory WHERE {sql_time_range(max(0, from_ms), to_ms)}"
            f" AND cityHash64(node) % {int(slices)} = {int(number)} GROUP BY node) ORDER BY told, node"
        )
        return [(row["ts_ms"], row["node"], dict(json.loads(row["json"]))) for row in found]

    def inventories_told(
        self, from_ms: int, to_ms: int, number: int = 0, slices: int = 1
    ) -> list[tuple[int, str, dict[str, str]]]:
        """Likewise each time that a node told, and before these what it had told last before `from_ms`."""
        found = self._clients.rows(
            f"SELECT {_ms('ts')} AS ts_ms, node, json FROM inventory FINAL WHERE {sql_time_range(from_ms, to_ms)}"
            f" AND cityHash64(node) % {int(slices)} = {int(number)} ORDER BY ts, node"
        )
        before = self.inventories(0, from_ms, number, slices)
        return before + [(row["ts_ms"], row["node"], dict(json.loads(row["json"]))) for row in found]

    def incidents(self, state: str = "all", since_ms: int = 0) -> list[Incident]:
        """Newest versions, newest first. `since_ms`: those still open, or closed after it."""
        if state not in ("open", "closed", "all"):
            raise ValueError(f"{state!r} is not a state; open, closed or all")
        having = {"open": "NOT shut", "closed": "shut", "all": "1"}[state]
        if since_ms:
            having += f" AND (NOT shut OR closed_at >= {sql_timestamp(since_ms)})"
        newest = "(version, updated)"
        # The text of the chosen versions only: there are many of each incident, and they are long.
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

    def troubles(self, since_ms: int, most: int = 100_000) -> list[Incident]:
        """What `risk` remembers of the newest incidents, open or closed after `since_ms`; nothing of severity info."""
        return self._brief(since_ms, most, " AND severity != 'info'")

    def costs(self, since_ms: int, most: int = 100_000) -> list[Incident]:
        """The same of all severities: what incidents cost, and where."""
        return self._brief(since_ms, most, "")

    def _brief(self, since_ms: int, most: int, where: str) -> list[Incident]:
        """The newest incidents, open or closed after `since_ms`: members, times and hours without evidence, timeline
        and words, of which 100,000 would take half a minute.
        """
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

    def incident_history(self, incident: str) -> list[Incident]:
        """All versions of one incident, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM incidents FINAL WHERE id = {id:String} ORDER BY version, updated", {"id": incident}
        )
        return [from_json(Incident, row["json"]) for row in found]

    def findings(self, from_ms: int, to_ms: int, limit: int = 10_000, node: str | None = None) -> list[Finding]:
        """Findings of [from_ms, to_ms), oldest first."""
        where, parameters = sql_time_range(from_ms, to_ms), {}
        if node is not None:
            where, parameters = f"{where} AND node = {{node:String}}", {"node": node}
        which = f"WHERE {where} ORDER BY ts LIMIT {int(limit)}"
        found = self._clients.rows(f"SELECT json FROM findings {which}", parameters)
        return [from_json(Finding, row["json"]) for row in found]

    def decisions(self, incident: str) -> list[Decision]:
        """Of one incident, oldest first."""
        found = self._clients.rows(
            "SELECT json FROM decisions FINAL WHERE incident_id = {id:String} ORDER BY ts, id", {"id": incident}
        )
        return [from_json(Decision, row["json"]) for row in found]

    def health_history(self, node: str, gpu: int | None, from_ms: int, to_ms: int) -> list[dict[str, Any]]:
        """Health changes of a GPU (None: the node itself), oldest first, as `write_health` took them."""
        return self._clients.rows(
            f"SELECT {_ms('ts')} AS ts_ms, node, nullIf(gpu, -1) AS gpu, health, reason,"
            " nullIf(incident_id, '') AS incident_id"
            f" FROM health FINAL WHERE node = {{node:String}} AND gpu = {-1 if gpu is None else int(gpu)}"
            f" AND {sql_time_range(from_ms, to_ms)} ORDER BY ts",
            {"node": node},
        )

    def health_of_node(self, node: str, from_ms: int, to_ms: int) -> list[dict[str, Any]]:
        """The same of a node and all of its GPUs; the newest where there are more than MOST_HEALTH."""
        found = self._clients.rows(
            f"SELECT {_ms('ts')} AS ts_ms, node, nullIf(gpu, -1) AS gpu, health, reason,"
            " nullIf(incident_id, '') AS incident_id FROM health FINAL"
            f" WHERE node = {{node:String}} AND {sql_time_range(from_ms, to_ms)} ORDER BY ts DESC LIMIT {MOST_HEALTH}",
            {"node": node},
        )
        return sorted(found, key=lambda change: (change["ts_ms"], -1 if change["gpu"] is None else change["gpu"]))

    def holdings(self, from_ms: int, to_ms: int) -> list[Holding]:
        """Changes of who holds what in [from_ms, to_ms), and what was held when it began; oldest first."""
        columns = f"SELECT node, gpu, nullIf(job, '') AS job, {_ms('from')} AS from_ms"
        before = self._clients.rows(
            f"{columns} FROM (SELECT node, gpu, argMax(job, `from`) AS job, max(`from`) AS `from` FROM holdings"
            f" WHERE `from` < {sql_timestamp(from_ms)} GROUP BY node, gpu) WHERE job != '' ORDER BY `from`, node, gpu"
        )
        during_it = self._clients.rows(
            f"{columns} FROM holdings FINAL WHERE {sql_time_range(from_ms, to_ms, 'from')} ORDER BY `from`, node, gpu"
        )
        return [from_dict(Holding, row) for row in (*before, *during_it)]

    def pending_outbox(self) -> list[OutboxRow]:
        """Notifications that wait for delivery, oldest first."""
        waiting = "SELECT id FROM outbox GROUP BY id HAVING argMax(state, written_ns) = 'pending'"
        return self._outbox(f"id IN ({waiting})", {})

    def outbox_of(self, *incidents: str) -> list[OutboxRow]:
        """Notifications of these incidents, oldest first."""
        found = []
        for at in range(0, len(incidents), TOGETHER):
            which = ", ".join(sql_string(id_) for id_ in incidents[at : at + TOGETHER])
            found += self._outbox(f"incident_id IN ({which})", {})
        return sorted(found, key=lambda row: (row.created_ms, row.id))

    def read_lane_seqs(
        self, node: str | None = None, spool: str | None = None
    ) -> dict[tuple[str, str], dict[int, int]]:
        """(node, spool id) -> lane -> the last sequence that is stored; of one node and spool, or of all.

        Events count as stored with their rows: those of the last hour may be ahead of what `write_lane_seqs` noted.
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
        result: dict[tuple[str, str], dict[int, int]] = {}
        for row in found:
            result.setdefault((row["node"], row["spool"]), {})[row["lane"]] = row["last"]
        return result

    def noted_lane_seqs(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], dict[int, int]]:
        """Likewise of these (node, spool id), as they were noted last: an agent may come from another collector."""
        which = ", ".join(f"({sql_string(node)}, {sql_string(spool)})" for node, spool in keys)
        if not which:
            return {}
        found = self._clients.rows(
            "SELECT node, spool, lane, max(seq) AS last FROM lane_seqs"
            f" WHERE (node, spool) IN ({which}) GROUP BY node, spool, lane"
        )
        result: dict[tuple[str, str], dict[int, int]] = {}
        for row in found:
            result.setdefault((row["node"], row["spool"]), {})[row["lane"]] = row["last"]
        return result

    def _absences(self, where: str, node: str | None, table: str) -> list[Absence]:
        parameters = {}
        if node is not None:
            where += " AND node = {node:String}"
            parameters["node"] = node
        found = self._clients.rows(
            f"SELECT node, nullIf(gpu, -1) AS gpu, nullIf(link, '') AS link, metric, reason, {_ms('from')} AS from_ms,"
            f" {_ms('to')} AS to_ms FROM {table} FINAL WHERE {where} ORDER BY node, {table}.gpu, metric, from_ms",
            parameters,
        )
        return [from_dict(Absence, row) for row in found]

    def _outbox(self, where: str, parameters: dict[str, str]) -> list[OutboxRow]:
        found = self._clients.rows(
            "SELECT id, incident_id, notifier, payload_json, created_ms, state, attempts, next_ms, detail FROM ("
            f"SELECT *, {_ms('created')} AS created_ms, {_ms('next')} AS next_ms FROM outbox"
            f" WHERE {where} ORDER BY written_ns DESC LIMIT 1 BY id) ORDER BY created_ms, id",
            parameters,
        )
        return [OutboxRow(**row) for row in found]

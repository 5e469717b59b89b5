"""Probes: their results, the orders that asked for them, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.sql import sql_string, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.model.events import (
    ProbeOrder,
    ProbeResult,
    ProbeVerdict,
    from_json,
    to_json,
)

NEWEST_DAYS = 90  # an older figure says little about what a GPU does now
CPU = "cpu"  # ProbeResult.device where there was no NVIDIA driver
# Results that say something about hardware: a figure has no end; of the closing results, those that blame the hardware
# they name. The others (gave way, refused, ...) must not hide an earlier figure.
_ON_HARDWARE = "probe != '' AND device != 'cpu' AND end IN ('', 'hung', 'crashed', 'lost', 'timeout')"
_PLACE = "node, gpu, peer, probe"
_QUICK = "JSONExtractString(json, 'level') = 'quick'"  # a short measurement and a long one differ by design
_ENDED = "state NOT IN ('asked', 'sent')"


@dataclass(frozen=True, slots=True)
class Key:
    """The configuration of a GPU: results are compared only within one. None: not known.

    Attributes:
        sku: the model, as NVML names it. power_limit_w: as enforced, W. ecc: on or off.
        pcie_gen, pcie_width: what the board and its slot can do at most, not what the link negotiated.
        nvlinks: links by design. mig: on or off. host: model of the host, for figures of the host and of PCIe.
        form: how long, and over what, it was measured (`rows.form_of`): in one second a board stays cool.
    """

    sku: str = ""
    driver: str = ""
    power_limit_w: float | None = None
    ecc: bool | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    nvlinks: int | None = None
    mig: bool | None = None
    host: str = ""
    form: str = ""


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """A result with its GPU's serial, uuid ("": not known) and configuration when it was measured, and its receipt."""

    result: ProbeResult
    key: Key = field(default_factory=Key)
    serial: str = ""
    uuid: str = ""
    received_ms: int = 0


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """An order that has not ended: its newest version, when it was asked for, and first sent (None: not yet)."""

    order: ProbeOrder
    asked_ms: int
    sent_ms: int | None


class ProbeResultTable:
    """Results of probes. One that is written twice is stored once."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, rows: Sequence[ProbeRow]) -> None:
        self._writer.insert(
            "probes",
            rows,
            {
                "id": lambda r: r.result.id,
                "ts": lambda r: Ms(r.result.ts_ms),
                "received": lambda r: Ms(r.received_ms),
                "node": lambda r: r.result.node,
                "gpu": lambda r: _slot(r.result.gpu),
                "peer": lambda r: _slot(r.result.peer),
                "probe": lambda r: r.result.probe,
                "request": lambda r: r.result.request,
                "end": lambda r: r.result.end,
                "device": lambda r: r.result.device,
                "serial": lambda r: r.serial,
                "uuid": lambda r: r.uuid,
                "value": lambda r: r.result.value,
                "sku": lambda r: r.key.sku,
                "driver": lambda r: r.key.driver,
                "key": lambda r: to_json(r.key),
                "json": lambda r: to_json(r.result),
            },
        )

    def of_order(self, request: str) -> list[ProbeRow]:
        """Return the results of an order, in the order in which they were reported; the closing one last."""
        rows = self._select("request = {request:String}", "ts, id", 100_000, request=request)
        return sorted(rows, key=lambda r: (r.result.end != "", _number(r.result.id)))

    def of_orders(self, requests: Sequence[str]) -> list[ProbeRow]:
        """Return the results of these orders."""
        if not requests:
            return []
        return self._select(f"request IN ({', '.join(map(sql_string, requests))})", "ts, id", 100_000)

    def ended(self, requests: Sequence[str]) -> list[str]:
        """Return those of these orders that have a closing result."""
        if not requests:
            return []
        which = ", ".join(sql_string(request) for request in requests)
        found = self._clients.rows(f"SELECT DISTINCT request FROM probes WHERE end != '' AND request IN ({which})")
        return [row["request"] for row in found]

    def newest(
        self, probes: Iterable[str] = (), *, sku: str | None = None, node: str = "", nodes: int = 512, now_ms: int
    ) -> list[ProbeRow]:
        """Return the newest result of each GPU, pair or node and figure, for judging; none that a CPU computed.

        Level quick and longer levels count as different figures.

        Args:
            probes: only these figures; none: all. sku: only nodes with this board; None: all.
            node: always included. nodes: at most so many others, those that were probed last.
        """
        where = f"{_ON_HARDWARE} AND received >= {sql_timestamp(now_ms - NEWEST_DAYS * 86_400_000)}"
        if listed := list(probes):
            where += f" AND probe IN ({', '.join(sql_string(name) for name in listed)})"
        if sku is not None:
            where += f" AND sku = {sql_string(sku)}"
        last = f"SELECT node FROM probes WHERE {where} GROUP BY node ORDER BY max(ts) DESC LIMIT {int(nodes)}"
        where += f" AND (node = {{node:String}} OR node IN ({last}))"
        return self._rows(
            f"SELECT key, serial, uuid, received, json FROM probes WHERE {where} ORDER BY ts DESC, id DESC"
            f" LIMIT 1 BY {_PLACE}, {_QUICK}",
            node=node,
        )

    def history(
        self, node: str, gpu: int | None, probe: str, peer: int | None = None, limit: int = 64
    ) -> list[ProbeRow]:
        """Return figures of the board that is in this place now, newest first."""
        where = (
            f"node = {{node:String}} AND gpu = {_slot(gpu)} AND peer = {_slot(peer)} AND probe = {sql_string(probe)}"
            " AND end = '' AND device != 'cpu'"
        )
        rows = self._select(where, "ts DESC, id DESC", limit, node=node)
        return [row for row in rows if row.serial == rows[0].serial]

    def histories(self, node: str, probes: Iterable[str], limit: int = 64) -> dict[tuple[int, str], list[ProbeRow]]:
        """Return (slot, figure) -> `history` of each GPU of a node, in one query; none of pairs."""
        if not (listed := list(probes)):
            return {}
        found = self._rows(
            "SELECT key, serial, uuid, received, json FROM (SELECT * FROM probes WHERE node = {node:String}"
            f" AND gpu >= 0 AND peer = -1 AND probe IN ({', '.join(sql_string(name) for name in listed)})"
            " AND end = '' AND device != 'cpu'"
            f" ORDER BY ts DESC, id DESC LIMIT 1 BY id) ORDER BY ts DESC, id DESC LIMIT {int(limit)} BY gpu, probe",
            node=node,
        )
        histories: dict[tuple[int, str], list[ProbeRow]] = {}
        for row in found:
            if row.result.gpu is not None:
                history = histories.setdefault((row.result.gpu, row.result.probe), [])
                if not history or row.serial == history[0].serial:
                    history.append(row)
        return histories

    def of_node(self, node: str, since_ms: int = 0, limit: int = 1000) -> list[ProbeRow]:
        """Return all results of a node, newest first."""
        return self._select(
            f"node = {{node:String}} AND ts >= {sql_timestamp(since_ms)}", "ts DESC, id DESC", limit, node=node
        )

    def between(self, from_ms: int, to_ms: int) -> list[ProbeRow]:
        """Return results of [from_ms, to_ms), oldest first."""
        return self._select(sql_time_range(from_ms, to_ms), "ts, id", 10_000_000)

    def last_probed(self) -> dict[str, int]:
        """Return node -> when the newest figure of one of its GPUs was measured."""
        found = self._clients.rows(
            "SELECT node, toUnixTimestamp64Milli(max(ts)) AS ts_ms FROM probes"
            f" WHERE {_ON_HARDWARE} AND gpu >= 0 AND isNotNull(value) GROUP BY node"
        )
        return {row["node"]: row["ts_ms"] for row in found}

    def _select(self, where: str, order: str, limit: int, **parameters: str) -> list[ProbeRow]:
        return self._rows(
            f"SELECT key, serial, uuid, received, json FROM probes WHERE {where} ORDER BY {order}"
            f" LIMIT 1 BY id LIMIT {int(limit)}",
            **parameters,
        )

    def _rows(self, select: str, **parameters: str) -> list[ProbeRow]:
        found = self._clients.rows(
            f"SELECT key, serial, uuid, toUnixTimestamp64Milli(received) AS received_ms, json FROM ({select})",
            parameters,
        )
        return [
            ProbeRow(
                from_json(ProbeResult, row["json"]), from_json(Key, row["key"]), row["serial"], row["uuid"],
                row["received_ms"],
            )
            for row in found
        ]  # fmt: skip


class ProbeOrderTable:
    """Orders for probes, a row for each version. An order that has ended stays ended."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, orders: Sequence[ProbeOrder]) -> None:
        """Write new versions; the last one written counts."""
        self._writer.insert(
            "probe_orders",
            list(zip(orders, self._writer.next_numbers(len(orders)), strict=True)),
            {
                "id": lambda r: r[0].id,
                "ts": lambda r: Ms(r[0].ts_ms),
                "node": lambda r: r[0].node,
                "state": lambda r: r[0].state,
                "written_ns": lambda r: r[1],
                "json": lambda r: to_json(r[0]),
            },
        )

    def versions(self, id_: str) -> list[ProbeOrder]:
        """Return all versions of an order, oldest first."""
        found = self._clients.rows(
            f"SELECT json FROM probe_orders WHERE id = {{id:String}} ORDER BY {_ENDED}, written_ns LIMIT 1 BY json",
            {"id": id_},
        )
        return [from_json(ProbeOrder, row["json"]) for row in found]

    def newest(self, node: str | None = None, since_ms: int = 0, limit: int = 500) -> list[ProbeOrder]:
        """Return newest versions, the last asked for first. `since_ms`: only those that changed since."""
        where, parameters = "1", {}
        if node is not None:
            where, parameters = "node = {node:String}", {"node": node}
        found = self._clients.rows(
            f"SELECT argMax(json, ({_ENDED}, written_ns)) AS newest FROM probe_orders WHERE {where} GROUP BY id"
            f" HAVING max(ts) >= {sql_timestamp(since_ms)} ORDER BY min(written_ns) DESC LIMIT {int(limit)}",
            parameters,
        )
        return [from_json(ProbeOrder, row["newest"]) for row in found]

    def of_groups(self, since_ms: int, limit: int) -> list[ProbeOrder]:
        """Return the newest version of each order of a group that changed since, the last asked for first."""
        found = self._clients.rows(
            f"SELECT argMax(json, ({_ENDED}, written_ns)) AS newest FROM probe_orders"
            f" WHERE JSONExtractString(json, 'group') != '' AND ts >= {sql_timestamp(since_ms)}"
            f" GROUP BY id ORDER BY max(written_ns) DESC LIMIT {int(limit)}"
        )
        return [from_json(ProbeOrder, row["newest"]) for row in found]

    def open(self) -> list[OpenOrder]:
        """Return the orders that have not ended, the first asked for first.

        One that has ended is never open again, even if another collector noted a state with a later clock.
        """
        sent = "state = 'sent'"
        found = self._clients.rows(
            "SELECT argMax(json, written_ns) AS newest, toUnixTimestamp64Milli(min(ts)) AS asked_ms,"
            f" if(countIf({sent}) > 0, toUnixTimestamp64Milli(minIf(ts, {sent})), NULL) AS sent_ms FROM probe_orders"
            f" GROUP BY id HAVING countIf({_ENDED}) = 0 ORDER BY min(written_ns)"
        )
        return [OpenOrder(from_json(ProbeOrder, r["newest"]), r["asked_ms"], r["sent_ms"]) for r in found]

    def between(self, from_ms: int, to_ms: int) -> list[ProbeOrder]:
        """Return all versions of [from_ms, to_ms), in the order in which they were written."""
        found = self._clients.rows(
            f"SELECT json FROM probe_orders WHERE {sql_time_range(from_ms, to_ms)}"
            " ORDER BY written_ns LIMIT 1 BY written_ns"
        )
        return [from_json(ProbeOrder, row["json"]) for row in found]


class ProbeVerdictTable:
    """Verdicts on probed hardware. One that is written twice is stored once."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer

    def write(self, verdicts: Sequence[ProbeVerdict]) -> None:
        self._writer.insert(
            "probe_verdicts",
            verdicts,
            {
                "request": lambda v: v.request,
                "node": lambda v: v.node,
                "gpu": lambda v: _slot(v.gpu),
                "ts": lambda v: Ms(v.ts_ms),
                "json": to_json,
            },
        )

    def read(
        self,
        node: str | None = None,
        request: str | None = None,
        from_ms: int = 0,
        to_ms: int | None = None,
        limit: int = 100_000,
    ) -> list[ProbeVerdict]:
        """Return verdicts of [from_ms, to_ms), oldest first; the newest of each GPU and order."""
        where, parameters = f"ts >= {sql_timestamp(from_ms)}", {}
        if to_ms is not None:
            where += f" AND ts < {sql_timestamp(to_ms)}"
        if node is not None:
            where, parameters["node"] = f"{where} AND node = {{node:String}}", node
        if request is not None:
            where, parameters["request"] = f"{where} AND request = {{request:String}}", request
        found = self._clients.rows(
            "SELECT json FROM (SELECT * FROM probe_verdicts"
            f" WHERE {where} ORDER BY ts DESC LIMIT 1 BY request, node, gpu) ORDER BY ts DESC, request, gpu DESC"
            f" LIMIT {int(limit)}",
            parameters,
        )
        return [from_json(ProbeVerdict, row["json"]) for row in reversed(found)]


class ProbeTables:
    """What the store holds about probes."""

    def __init__(self, clients: Clients, writer: TableWriter) -> None:
        self.results = ProbeResultTable(clients, writer)
        self.orders = ProbeOrderTable(clients, writer)
        self.verdicts = ProbeVerdictTable(clients, writer)


def _slot(gpu: int | None) -> int:
    return -1 if gpu is None else gpu


def _number(id_: str) -> int:
    """Return the number of a result within its order: ids end in /NUMBER."""
    tail = id_.rpartition("/")[2]
    return int(tail) if tail.isdigit() else 0

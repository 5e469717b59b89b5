"""The fabric on the screen: leafs as tiles with their nodes, ports, NVLinks of a node. All but `show_*` are pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.components import component
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

TILE_PX = 190
CELLS = [["ok", "node without trouble"], ["trouble", "trouble on its ports"], ["unknown", "its ports are not known"]]
STATES = {"up": "healthy", "down": "critical", "unused": "plain", "unknown": "unknown"}
BUSY = 0.9  # of a port's rate: it is what the work waits for

PORT_COLUMNS = (
    Column("Port"), Column("State"), Column("Trouble", wrap=True),
    Column("In use", "right", help="busier direction over rate"), Column("Sent / received", "right"),
    Column("Rate", "right"), Column("Errors", "right"), Column("Downs", "right"),
)  # fmt: skip
NVLINK_COLUMNS = (
    Column("GPU"), Column("NVLinks up", "right"), Column("CRC errors", "right"), Column("Replays", "right"),
    Column("Recoveries", "right"), Column("Sent / received", "right"),
)  # fmt: skip
ABSENT = Cell("absent", kind="absent", title="not reported")


def leaf_tiles(reply: pb.Fabric, chosen: str, who: view.Viewer, node: str = "") -> dict[str, Any]:
    """What assets/tiles.js draws: the worst leaf first and equals by name, so that none moves while nothing changes;
    each node a cell, `node` marked."""
    empty = ""
    if not reply.leafs:
        empty = next(iter(reply.absent), "No port is known.")
    leafs = sorted(
        reply.leafs, key=lambda row: (not row.switch, -row.nodes_troubled, row.severity != "critical", row.name)
    )
    tiles = [_leaf(row, who, node) for row in leafs]
    return {
        "groups": [{"label": "", "tiles": tiles}], "selected": chosen, "wide": TILE_PX, "empty": empty,
        "legend": {"low": "", "high": "", "cells": CELLS},
    }  # fmt: skip


def _leaf(row: pb.LeafRow, who: view.Viewer, chosen: str) -> dict[str, Any]:
    count = len(row.nodes)
    tone = "bad" if row.switch or row.severity == "critical" else "warn" if row.nodes_troubled else ""
    mark = "THE SWITCH" if row.switch else f"{row.nodes_troubled} of {count} nodes" if row.nodes_troubled else ""
    ports = [f"{fmt.number(row.ports)} ports"]
    ports += [f"{row.ports_down} down"] if row.ports_down else []
    ports += [f"{row.ports_unused} unused"] if row.ports_unused else []
    ports += [f"{row.ports_unknown} unknown"] if row.ports_unknown else []
    errors = f"errors {fmt.number(row.errors)}" if row.HasField("errors") else "errors not known"
    downs = f"downs {fmt.number(row.downs)}" if row.HasField("downs") else "downs not known"
    busy = f"in use: median {_share(row.saturation_median)}, busiest {_share(row.saturation_max)}"
    use = busy if row.HasField("saturation_max") else "use not known"
    cells = [
        [
            node.state,
            f"{node.node}: {who.localize(node.why) or 'no trouble'}",
            *(["chosen"] if node.node == chosen else []),
        ]
        for node in row.nodes
    ]
    return {
        "id": row.name, "name": row.name, "mark": mark, "tone": tone, "value": "", "share": None, "cells": cells,
        "subs": [", ".join(ports), f"{errors}, {downs}", use], "href": view.href(view.FABRIC, leaf=row.name),
        "title": who.localize(row.verdict) or f"{row.name}: no trouble",
    }  # fmt: skip


def _share(value: float) -> str:
    return f"{value * 100:.0f} %"


def verdict(reply: pb.Fabric, who: view.Viewer) -> tuple[str, str]:
    """(kind of notice, sentence): is it one node or the switch?"""
    bad = [row for row in reply.leafs if row.nodes_troubled]
    if not bad:
        states = [node.state for row in reply.leafs for node in row.nodes]
        unknown = states.count("unknown")
        if unknown == len(states):
            return "remark", ""
        return "remark", "No leaf has trouble." if not unknown else (
            f"No leaf is known to have trouble; of {fmt.several(unknown, 'node')} the ports are not known."
        )
    switches = [row for row in bad if row.switch]
    if switches:
        return "summary", who.localize(switches[0].verdict)
    worst = bad[0]
    others = (
        f" {len(bad) - 1} more {'leafs have' if len(bad) > 2 else 'leaf has'} trouble on nodes." if len(bad) > 1 else ""
    )
    return "summary", f"{worst.name}: {who.localize(worst.verdict)}{others}"


def port_rows(ports: Iterable[pb.PortRow], who: view.Viewer) -> list[Row]:
    rows = []
    for port in ports:
        serves = f"serves GPU {port.gpu}" if port.HasField("gpu") else "serves the node"
        busy = ABSENT
        if port.HasField("saturation"):
            mark = Mark(_share(port.saturation), "warn") if port.saturation >= BUSY else None
            busy = Cell("" if mark else _share(port.saturation), mark=mark)
        trouble = who.localize(port.trouble)
        rows.append(
            Row(
                (
                    Cell(f"{port.node} {port.link}", sub=f"{port.leaf or 'no leaf'} · {serves}", kind="strong"),
                    Cell(port.state, badge=STATES.get(port.state, "unknown")),
                    Cell(trouble or "none", kind="" if trouble else "faint"),
                    busy,
                    _flow(port),
                    Cell(f"{port.rate_gbps:g} Gb/s") if port.HasField("rate_gbps") else ABSENT,
                    _count(view.given(port, "errors")),
                    _count(view.given(port, "downs")),
                ),
                id=f"{port.node}//{port.incident}",
                href=view.href(view.INCIDENTS, id=port.incident)
                if port.incident
                else view.href(view.FABRIC, node=port.node),
            )
        )
    return rows


def _link(incident: str, place: str) -> str:
    return view.href(view.INCIDENTS, id=incident) if incident else place


def _flow(found: pb.PortRow | pb.NvlinkRow) -> Cell:
    if not found.HasField("tx_bytes_per_s") and not found.HasField("rx_bytes_per_s"):
        return ABSENT
    sent = bytes_per_s(found.tx_bytes_per_s) if found.HasField("tx_bytes_per_s") else "absent"
    got = bytes_per_s(found.rx_bytes_per_s) if found.HasField("rx_bytes_per_s") else "absent"
    return Cell(f"{sent} / {got}")


def bytes_per_s(value: float) -> str:
    """`12.3 GB/s`."""
    for step, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= step:
            return f"{value / step:.1f} {prefix}B/s"
    return f"{value:.0f} B/s"


def _count(value: float | None) -> Cell:
    if value is None:
        return Cell("absent", kind="absent", title="not known: counted from one value to the next, and one is missing")
    return Cell("", mark=Mark(fmt.number(value), "warn")) if value > 0 else Cell("0", kind="faint")


def nvlink_rows(reply: pb.Fabric, node: str) -> list[Row]:
    rows = []
    for gpu in reply.nvlinks:
        up = ABSENT
        if gpu.HasField("links_up"):
            fewer = gpu.HasField("links_usual") and gpu.links_up < gpu.links_usual
            mark = Mark(f"of {gpu.links_usual:.0f}", "bad") if fewer else None
            up = Cell(f"{gpu.links_up:.0f}", mark=mark, title=f"boards of its kind: {gpu.links_usual:.0f}")
        counts = [
            gpu.crc_errors if gpu.HasField("crc_errors") else None,
            gpu.replays if gpu.HasField("replays") else None,
        ]
        counts.append(gpu.recoveries if gpu.HasField("recoveries") else None)
        rows.append(
            Row(
                (Cell(f"GPU {gpu.gpu}", kind="strong"), up, *map(_count, counts), _flow(gpu)),
                id=f"{node}/{gpu.gpu}/{gpu.incident}",
                href=view.href(view.INCIDENTS, id=gpu.incident)
                if gpu.incident
                else view.href(view.NODE, node=node, gpu=gpu.gpu),
            )
        )
    return rows


def show_tiles(key: str, data: dict[str, Any]) -> str | None:
    """The id of the tile just clicked."""
    opened: str | None = component("tiles")(key=key, data=data, on_open_change=lambda: None).open
    return opened


def show_ports(key: str, reply: pb.Fabric, who: view.Viewer, empty: str) -> str | None:
    lines = port_rows(reply.ports, who)
    return table(key, PORT_COLUMNS, lines, empty=empty, link_column=0, height=430 if len(lines) > 8 else None)


def show_nvlinks(key: str, reply: pb.Fabric, node: str) -> str | None:
    return table(key, NVLINK_COLUMNS, nvlink_rows(reply, node), empty=f"{node} has no GPU.", link_column=0)

"""Heat on the screen: racks as tiles as they stand, GPUs that run hot, nodes of a rack. All but `show_*` are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drover_dashboard.pages.job_parts import share
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

TILE_PX, SMALL_PX = 132, 84
SMALL_FROM = 48  # racks from which on a tile has its name and number only


@dataclass(frozen=True, slots=True)
class Measure:
    """What racks are coloured by: a field of pb.RackHeat, and the least span of the colours."""

    label: str
    field: str
    unit: str
    least: float


MEASURES = {
    "inlet": Measure("Inlet", "inlet_c", "°C", 15.0),
    "hottest": Measure("Hottest GPU", "gpu_max_c", "°C", 10.0),
    "median": Measure("Median GPU", "gpu_median_c", "°C", 10.0),
    "power": Measure("GPU power", "power_w", "kW", 5000.0),
}
USUAL = "inlet"

HOT_COLUMNS = (
    Column("GPU", wrap=True), Column("Core", "right"), Column("Margin", "right", help="degrees left before slowdown"),
    Column("Held by heat", "right", help="share of the last 10 s"),
    Column("Resistance", "right", help="(core - inlet) / power at steady load, against GPUs in the same place"),
    Column("Power", "right"),
)  # fmt: skip
NODE_COLUMNS = (
    Column("Node"), Column("Inlet", "right"), Column("Median GPU", "right"), Column("Hottest GPU", "right"),
    Column("GPU power", "right"), Column("Slowest fan", "right"), Column("Held by heat", "right"),
)  # fmt: skip
ABSENT = Cell("absent", kind="absent", title="not reported")
CAUSES = {"inlet": "hot air", "cooling": "poor cooling", "fan": "fan or coolant"}
NOTHING = ("absent", "none reports it")


def text(measure: Measure, value: float) -> str:
    return f"{value / 1000:.1f} kW" if measure.unit == "kW" else f"{value:.1f} °C"


def rack_tiles(reply: pb.Thermals, measure: Measure, chosen: str) -> dict[str, Any]:
    """What assets/tiles.js draws: by row of the room where the fleet file says it, else in its order."""
    known = [value for rack in reply.racks if (value := view.given(rack, measure.field)) is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if (lacking := measure.least - (high - low)) > 0:
        low, high = low - lacking / 2, high + lacking / 2
    small = len(reply.racks) > SMALL_FROM
    groups: dict[str, list[dict[str, Any]]] = {}
    for rack in reply.racks:
        tile = _tile(rack, measure, (low, high), small)
        groups.setdefault(f"Row {rack.row}" if rack.row else "", []).append(tile)
    return {
        "groups": [{"label": label, "tiles": tiles} for label, tiles in groups.items()], "selected": chosen,
        "wide": SMALL_PX if small else TILE_PX, "empty": "" if reply.racks else "The fleet file names no node.",
        "legend": {"low": text(measure, low), "high": text(measure, high), "cells": []} if known else None,
    }  # fmt: skip


def _tile(rack: pb.RackHeat, measure: Measure, span: tuple[float, float], small: bool) -> dict[str, Any]:
    value = view.given(rack, measure.field)
    subs = (
        [] if small else _subs(rack)[1 if measure.field == "inlet_c" and value is not None else 0 :]
    )  # the number says it
    marks = [f"{rack.throttled} held" if rack.throttled else "", f"{rack.poor} poor" if rack.poor else ""]
    mark = ", ".join(filter(None, marks)) or CAUSES.get(rack.cause, rack.cause)
    tone = "bad" if rack.throttled or rack.severity == "critical" else "warn" if rack.incident else ""
    return {
        "id": rack.name, "name": rack.name, "mark": mark, "tone": tone, "cells": [], "subs": subs,
        "value": "absent" if value is None else text(measure, value),
        "share": None if value is None else (value - span[0]) / (span[1] - span[0]),
        "href": view.href(view.THERMALS, rack=rack.name),
        "title": f"{rack.name}: {'; '.join(_subs(rack))}" + (f"; {mark} (heat)" if mark else ""),
    }  # fmt: skip


def _subs(rack: pb.RackHeat) -> list[str]:
    inlet = f"inlet {rack.inlet_c:.1f} °C" if rack.HasField("inlet_c") else "inlet absent"
    heat = "GPUs absent"
    if rack.HasField("gpu_max_c"):
        heat = f"GPU median {rack.gpu_median_c:.0f}, max {rack.gpu_max_c:.0f} °C"
    return [inlet, heat, power(rack)]


def power(rack: pb.RackHeat) -> str:
    """Against the rack's budget, where the fleet file gives one."""
    if not rack.HasField("power_w"):
        return "power absent"
    drawn = f"{rack.power_w / 1000:.1f}"
    known = f" ({rack.power_known} of {rack.gpus} GPUs)" if rack.power_known < rack.gpus else ""
    if rack.HasField("budget_w"):
        over = "OVER: " if rack.power_w > rack.budget_w else ""
        return f"{over}{drawn} of {rack.budget_w / 1000:.1f} kW{known}"
    return f"{drawn} kW{known}"


def held_known(reply: pb.Thermals) -> bool:
    """Return True if any GPU reports whether heat holds it down; otherwise a count of none says nothing."""
    return bool(reply.ts_ms) and (reply.held_known > 0 or not reply.HasField("held_known"))


def numbers(reply: pb.Thermals) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the numbers on top."""

    def most(field: str, sign: int = 1) -> pb.RackHeat | None:
        there = [rack for rack in reply.racks if view.given(rack, field) is not None]
        return max(there, key=lambda rack: sign * getattr(rack, field), default=None)

    warmest, core, least = most("inlet_c"), most("gpu_max_c"), most("margin_min_c", -1)
    powered = [rack for rack in reply.racks if rack.HasField("power_w")]
    watts = sum(rack.power_w for rack in powered)
    limits = sum(rack.limit_w for rack in powered) if all(rack.HasField("limit_w") for rack in powered) else 0.0
    held, poor = sum(rack.throttled for rack in reply.racks), sum(rack.poor for rack in reply.racks)
    return [
        ("Warmest inlet", *((f"{warmest.inlet_c:.1f} °C", f"rack {warmest.name}") if warmest else NOTHING)),
        ("Hottest GPU", *((f"{core.gpu_max_c:.0f} °C", core.gpu_max_at) if core else NOTHING)),
        ("Least margin", *((f"{least.margin_min_c:.0f} °C", f"rack {least.name}") if least else NOTHING)),
        ("Held by heat", *((fmt.number(held), "GPUs, now") if held_known(reply) else NOTHING)),
        ("Poorly cooled", fmt.number(poor), "open incidents"),
        (
            "GPU power",
            f"{watts / 1000:,.1f} kW" if powered else "absent",
            f"{share(watts / limits)} of GPU limits" if limits else "limits not known",
        ),
    ]


def verdict(reply: pb.Thermals, who: view.Viewer) -> str:
    """What is wrong with a rack, or else which is the warmest."""
    rooms = [rack for rack in reply.racks if rack.cause == "inlet"]
    others = [rack for rack in reply.racks if rack.incident and rack.cause != "inlet"]
    if rooms:
        more = (
            f" Other racks with an incident of heat: {len(rooms) + len(others) - 1}."
            if len(rooms) + len(others) > 1
            else ""
        )
        return who.localize(rooms[0].summary) + more
    if others:
        where = f"poor cooling in {fmt.members([(rack.name, None) for rack in others])}."
        known = any(rack.HasField("inlet_c") for rack in reply.racks)
        return f"No incident of hot air; {where}" if known else f"{fmt.capital(where)} Inlets are not known."
    return "No open incident of heat." if any(rack.HasField("gpu_max_c") for rack in reply.racks) else ""


def hot_rows(found: Sequence[pb.HotGpu], who: view.Viewer) -> list[Row]:
    rows = []
    for gpu in found:
        held = ABSENT
        if gpu.HasField("held_share"):
            mark = Mark(share(gpu.held_share), "bad") if gpu.held_share >= 0.05 else None
            held = Cell("" if mark else share(gpu.held_share), mark=mark)
        where = f"rack {gpu.rack}" + f" · {fmt.job(gpu.job) if gpu.job else 'no job'}"
        link = (
            view.href(view.INCIDENTS, id=gpu.incident)
            if gpu.incident
            else view.href(view.NODE, node=gpu.node, gpu=gpu.gpu)
        )
        cells = (
            Cell(f"{gpu.node} GPU {gpu.gpu}", sub=f"{where}. {who.localize(gpu.summary)}", kind="strong"),
            Cell(f"{gpu.temp_c:.0f} °C") if gpu.HasField("temp_c") else ABSENT,
            Cell(f"{gpu.margin_c:.0f} °C") if gpu.HasField("margin_c") else ABSENT,
            held,
            _resistance(gpu),
            Cell(f"{gpu.power_w:.0f} W") if gpu.HasField("power_w") else ABSENT,
        )
        rows.append(Row(cells, id=f"{gpu.node}/{gpu.gpu}/{gpu.incident}", href=link))
    return rows


def _resistance(gpu: pb.HotGpu) -> Cell:
    if not gpu.HasField("resistance"):
        return Cell("absent", kind="absent", title="reported at a steady load above half of the power limit")
    own = f"{gpu.resistance:.3f} °C/W"
    if not gpu.HasField("expected") or not gpu.expected:
        return Cell(own)
    over = gpu.resistance / gpu.expected - 1
    tone = "bad" if over >= 0.35 else "warn" if over >= 0.12 else None
    mark = Mark(f"{over * 100:+.0f} %", tone) if tone else None
    return Cell(
        own, mark=mark, sub="" if mark else f"{over * 100:+.0f} %", title=f"in the same place: {gpu.expected:.3f}"
    )


def node_rows(found: Sequence[pb.NodeHeat], held_known: bool = True) -> list[Row]:
    rows = []
    for node in found:
        silent = not (node.HasField("gpu_median_c") or node.HasField("power_w"))
        held = ABSENT if silent or not held_known else Cell("0", kind="faint")
        if node.throttled:
            held = Cell("", mark=Mark(fmt.several(node.throttled, "GPU"), "bad"))
        cells = (
            Cell(node.node, kind="strong", mark=Mark("incident", "warn") if node.incident else None),
            Cell(f"{node.inlet_c:.1f} °C") if node.HasField("inlet_c") else ABSENT,
            Cell(f"{node.gpu_median_c:.0f} °C") if node.HasField("gpu_median_c") else ABSENT,
            Cell(f"{node.gpu_max_c:.0f} °C") if node.HasField("gpu_max_c") else ABSENT,
            Cell(f"{node.power_w / 1000:.2f} kW") if node.HasField("power_w") else ABSENT,
            Cell(f"{node.fan_min_rpm:,.0f} rpm") if node.HasField("fan_min_rpm") else ABSENT,
            held,
        )
        link = view.href(view.INCIDENTS, id=node.incident) if node.incident else view.href(view.NODE, node=node.node)
        rows.append(Row(cells, id=f"{node.node}//{node.incident}", href=link))
    return rows


def show_hot(key: str, reply: pb.Thermals, who: view.Viewer) -> str | None:
    lines = hot_rows(reply.hot, who)
    empty = "No GPU is held down by heat, and no incident is about poor cooling."
    if not held_known(reply):
        empty = "No incident is about heat. Which GPUs heat holds down is not known."
    return table(key, HOT_COLUMNS, lines, empty=empty, link_column=0, height=380 if len(lines) > 7 else None)


def show_nodes(key: str, reply: pb.Thermals) -> str | None:
    return table(key, NODE_COLUMNS, node_rows(reply.nodes, held_known(reply)), empty="", link_column=0)

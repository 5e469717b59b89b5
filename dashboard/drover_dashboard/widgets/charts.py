"""Lines over time: bytes for the uPlot component. An absent value stays NaN and is drawn as a gap."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import streamlit as st

from drover_core.metrics.catalog import Kind, Metric
from drover_dashboard.widgets import address, theme
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.components import component
from drover_proto import fleet_pb2 as pb

Floats = npt.NDArray[np.float32]

PEER_LABELS = {"peers_p10": "peers p10", "peers_p90": "peers p90", "peers_median": "peers' median"}
BYTE_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
DASH = (8, 4)
OPEN = "open"  # in the URL
CLOSED = {OPEN: None}  # the page shows something else
LEAST_S = 10
BACK = "double-click: all of it again"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: `role` is value, peers_p10, peers_p90 or peers_median; `slot` chooses its colour and dash."""

    label: str
    role: str
    values: Floats
    slot: int = 0
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`marks` are moments (ms, text). `absent` says why nothing is there, where nothing is."""

    metric: Metric
    times_ms: npt.NDArray[np.int64]
    lines: Sequence[Line]
    from_ms: int
    to_ms: int
    marks: Sequence[tuple[int, str]] = field(default_factory=tuple)
    note: str = ""
    absent: str = ""
    height: int = 150


def lines_of(reply: pb.SeriesReply, metric: str, strong: frozenset[int] = frozenset()) -> list[Line]:
    """The lines of one metric in a reply: its targets first, then the peers' band. `strong` slots are drawn thick."""
    found: list[Line] = []
    for series in reply.series:
        if series.metric != metric:
            continue
        role = series.role or "value"
        slot = series.gpu if series.HasField("gpu") else 0
        name = f"GPU {slot}" if series.HasField("gpu") else series.link or series.node
        found.append(
            Line(
                PEER_LABELS.get(role, name),
                role,
                np.frombuffer(series.values, "<f4"),
                slot,
                role == "value" and slot in strong,
            )
        )
    order = {"value": 0, "peers_p10": 1, "peers_p90": 2, "peers_median": 3}  # the band is drawn between neighbours
    return sorted((line for line in found if line.role in order), key=lambda line: (order[line.role], line.slot))


def times_of(reply: pb.SeriesReply) -> npt.NDArray[np.int64]:
    return np.frombuffer(reply.ts_ms, "<i8")


def nothing_there(lines: Sequence[Line]) -> bool:
    return not any(bool(np.isfinite(line.values).any()) for line in lines if line.role == "value")


def encode(chart: Chart, loads: bool = False) -> bytes:
    """Header and columns as assets/chart.js reads them; values are scaled to the unit that is shown."""
    scale, unit = _unit(chart)
    if counts_time(chart.metric):
        chart, scale, unit = _shares(chart), 1.0, "% of the time"
    lines = [line for line in chart.lines if len(line.values) == len(chart.times_ms)]
    opened = loads and drawn_open() is not None
    several = sum(line.role == "value" for line in lines) > 1
    head = {
        "title": f"{fmt.capital(chart.metric.label)}{f', {unit}' if unit else ''}",
        "note": " · ".join(part for part in (chart.note, BACK if opened else "") if part),
        "unit": unit,
        "absent": chart.absent,
        "height": chart.height,
        "points": len(chart.times_ms),
        "from_s": chart.from_ms / 1000,
        "to_s": chart.to_ms / 1000,
        "loads": loads,
        "open": opened,
        "range": [0, 100]
        if unit == "% of the time" or (unit == "%" and chart.metric.name.endswith(("util_ratio", "active_ratio")))
        else None,
        "marks": [{"at_s": at_ms / 1000, "text": text} for at_ms, text in chart.marks],
        "lines": [
            {
                "label": line.label,
                "role": line.role,
                "strong": line.strong,
                "light": theme.line(line.slot).light,
                "dark": theme.line(line.slot).dark,
                "dash": DASH if several and theme.line(line.slot).dashed else None,
            }
            for line in lines
        ],
    }
    text = json.dumps(head).encode()
    start = struct.pack("<I", len(text)) + text
    columns = [(chart.times_ms / 1000).astype("<f8").tobytes()]
    columns += [(line.values * np.float32(scale)).astype("<f4").tobytes() for line in lines]
    return start + bytes(-len(start) % 8) + b"".join(columns)


def counts_time(metric: Metric) -> bool:
    """Whether it adds up time in a state since the driver was loaded: only the slope of that ramp means anything."""
    return metric.kind is Kind.COUNTER and metric.unit == "us"


def _shares(chart: Chart) -> Chart:
    """The same with each value as a share of the time since the one before, in percent. Without peers: a band of their
    sums has no slope."""
    spans_us = np.diff(chart.times_ms) * 1000.0
    lines = []
    for line in chart.lines:
        if line.role == "value" and len(line.values) == len(chart.times_ms) > 0:
            grown = np.diff(line.values.astype("f8"))
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(
                    (grown >= 0) & (spans_us > 0), 100 * grown / spans_us, np.nan
                )  # less: the counter restarted
            values = np.concatenate(([np.nan], np.minimum(share, 100.0))).astype("f4")
            lines.append(replace(line, values=values))
    return replace(chart, lines=lines)


def _unit(chart: Chart) -> tuple[float, str]:
    """The factor and the unit of the axis: percent for ratios; bytes get the prefix that fits the largest."""
    unit = fmt.unit(chart.metric)
    if unit == "%":
        return 100.0, unit
    present = [line.values[np.isfinite(line.values)] for line in chart.lines]
    largest = max((float(np.abs(values).max()) for values in present if len(values)), default=0.0)
    steps = {"B": BYTE_STEPS, "B/s": BYTE_STEPS}.get(unit, ())
    for step, prefix in steps:
        if largest >= step:
            return 1 / step, prefix + unit
    return 1.0, unit


def drawn_open() -> tuple[int, int] | None:
    """The time that was drawn open in one of the page's charts, (from, to) ms: it is in the URL, as seconds."""
    found = re.fullmatch(r"(\d{1,12})-(\d{1,12})", st.query_params.get(OPEN, ""))
    if found is None or int(found[1]) >= int(found[2]):
        return None
    return int(found[1]) * 1000, int(found[2]) * 1000


def window(from_ms: int, to_ms: int) -> tuple[int, int]:
    """What to ask for: the time that was drawn open, else all of it."""
    return drawn_open() or (from_ms, to_ms)


def _open(key: str) -> None:
    """In place of the coarser data of before the next run asks for this time alone; a double click ends it."""
    zoom = st.session_state[key].zoom
    from_s, to_s = math.floor(zoom["from_s"]), math.ceil(zoom["to_s"])
    address.write(**{OPEN: f"{from_s}-{max(to_s, from_s + LEAST_S)}" if to_s else None})


def show(key: str, chart: Chart, loads: bool = False) -> None:
    """Draw a chart; it keeps its zoom while its data is refreshed. `loads`: its data is of `window`, so that all charts
    of the page are drawn open together; without, the chart only magnifies what it has."""
    more = {"on_zoom_change": partial(_open, key)} if loads else {}
    component("chart", "uplot/uPlot.min.css")(key=key, data=encode(chart, loads), **more)

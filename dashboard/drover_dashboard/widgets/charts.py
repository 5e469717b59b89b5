"""Lines over time: bytes for the uPlot component. An absent value stays NaN and is drawn as a gap."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
ORDER = {"value": 0, "peers_p10": 1, "peers_p90": 2, "peers_median": 3}  # the band is drawn between neighbours
BYTE_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
DASH = (8, 4)
OPEN = "open"  # the URL's parameter for the time that all charts of a page are zoomed to
SPAN = "span"  # its parameter for a span up to now
CLOSED = {OPEN: None, SPAN: None}  # for `address.write`: the page shows something else, with its own time
LEAST_S = 10  # a zoom is at least this long,
MOST_S = 400 * 86_400  # and at most this long: the collector answers no longer span
BACK = "double-click: the whole time again"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        role: value, peers_p10, peers_p90 or peers_median.
        values: float32, one for each of the chart's times; NaN: absent.
        slot: chooses the colour and the dash.
        strong: it is drawn thick.
    """

    label: str
    role: str
    values: Floats
    slot: int = 0
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines of one metric over time.

    Attributes:
        marks: ms of moments that get a faint line behind the values; `strip` above the charts says what they are.
        note: a remark after the title.
        absent: what an empty chart says instead of lines.
        height: in pixels.
    """

    metric: Metric
    times_ms: npt.NDArray[np.int64]
    lines: Sequence[Line]
    from_ms: int
    to_ms: int
    marks: Sequence[int] = field(default_factory=tuple)
    note: str = ""
    absent: str = ""
    height: int = 150


def lines_of(reply: pb.SeriesReply, metric: str, strong: frozenset[int] = frozenset()) -> list[Line]:
    """Return the lines of one metric in a reply: its targets first, then the peers' band.

    Args:
        strong: slots whose lines are drawn thick.
    """
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
    return sorted((line for line in found if line.role in ORDER), key=lambda line: (ORDER[line.role], line.slot))


def line_of(series: pb.Series) -> Line:
    """Return the line of one series, as `value`."""
    return Line(series.node, "value", np.frombuffer(series.values, "<f4"))


def times_of(reply: pb.SeriesReply) -> npt.NDArray[np.int64]:
    return np.frombuffer(reply.ts_ms, "<i8")


def nothing_there(lines: Sequence[Line]) -> bool:
    return not any(bool(np.isfinite(line.values).any()) for line in lines if line.role == "value")


def encode(chart: Chart, loads: bool = False) -> bytes:
    """Return the bytes that assets/chart.js reads: a header, the times, and the values in the unit that is shown.

    Args:
        loads: see `show`.
    """
    if chart.metric.sums_time:
        chart, scale, unit = _shares(chart), 1.0, "% of the time"
    elif chart.metric.kind is Kind.COUNTER:
        chart, scale, unit = _growth(chart)
    else:
        scale, unit = _unit(chart, fmt.unit(chart.metric))
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
        "least": 1 if unit.startswith("new ") else 0,
        "marks": [at_ms / 1000 for at_ms in chart.marks],
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


def banded(metric: Metric) -> bool:
    """Return whether a chart of it has the peers' band: a percentile of counters has no meaningful growth."""
    return metric.kind is not Kind.COUNTER


def _shares(chart: Chart) -> Chart:
    """Return the chart with each value as its growth since the one before, in percent of the time between them."""
    return _grown(chart, lambda grown, ms: np.minimum(100 * grown / (1000 * ms), 100))


def _growth(chart: Chart) -> tuple[Chart, float, str]:
    """Return a counter's chart as what it grew by, with the factor and unit of its axis: a sum since the driver was
    loaded only climbs. Joules become watts, bytes bytes a second; errors are counted from one point to the next."""
    rates = {"J": "W", "B": "B/s"}
    if (unit := rates.get(fmt.unit(chart.metric))) is not None:
        grown = _grown(chart, lambda values, ms: 1000 * values / ms)
        return grown, *_unit(grown, unit)
    steps = np.diff(chart.times_ms)
    each = f" in each {fmt.duration(int(np.median(steps)))}" if len(steps) else ""
    return _grown(chart, lambda values, _: values), 1.0, f"new{each or ' ones'}"


def _grown(chart: Chart, of: Callable[[Any, Any], Any]) -> Chart:
    """Return the chart with each value replaced by `of` its growth since the one before and the ms between them.

    The peers' lines are dropped: a percentile of sums has no meaningful growth.
    """
    lines = []
    step = np.median(np.diff(chart.times_ms)) if len(chart.times_ms) > 1 else 0
    for line in chart.lines:
        if line.role == "value" and len(line.values) == len(chart.times_ms):
            known = np.flatnonzero(np.isfinite(line.values))
            grown = np.diff(line.values[known].astype("f8"))
            with np.errstate(divide="ignore", invalid="ignore"):
                changed = of(grown, np.diff(chart.times_ms[known]))
            values = np.full(len(line.values), np.nan, "f4")
            values[known[1:]] = np.where(grown >= 0, changed, np.nan)  # less than before: the counter restarted
            values[chart.times_ms + step > chart.to_ms] = np.nan  # a point that is not over yet has grown by a part
            lines.append(replace(line, values=values))
    absent = chart.absent or ("fewer than two values in this time" if nothing_there(lines) else "")
    return replace(chart, lines=lines, absent=absent)


def _unit(chart: Chart, unit: str) -> tuple[float, str]:
    """Return the factor and the unit of the axis: percent for ratios; bytes get the prefix that fits the largest."""
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
    """Return the time (from, to) in ms that the viewer zoomed one of the page's charts to; None: not zoomed.

    The URL has it in seconds; ten digits reach the year 2286.
    """
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})", st.query_params.get(OPEN, ""))
    if found is None or not 0 < int(found[2]) - int(found[1]) <= MOST_S:
        return None
    return int(found[1]) * 1000, int(found[2]) * 1000


def window(from_ms: int, to_ms: int) -> tuple[int, int]:
    """Return the time (from, to) in ms to ask for: the zoomed time, else all of it."""
    return drawn_open() or (from_ms, to_ms)


def _open(key: str) -> None:
    """Write the zoomed time to the URL, so that the next run asks for it in finer steps; a double click ends it."""
    zoom = st.session_state[key].zoom
    from_s, to_s = math.floor(zoom["from_s"]), math.ceil(zoom["to_s"])
    address.write(**{OPEN: f"{from_s}-{max(to_s, from_s + LEAST_S)}" if to_s else None})


def show(key: str, chart: Chart, loads: bool = False) -> None:
    """Draw a chart. It keeps its zoom while its data is refreshed.

    Args:
        loads: the data is that of `window`, so a zoom loads finer data for all charts of the page; else a zoom only
            magnifies the data that the chart has.
    """
    more = {"on_zoom_change": partial(_open, key)} if loads else {}
    component("chart", "uplot/uPlot.min.css")(key=key, data=encode(chart, loads), **more)

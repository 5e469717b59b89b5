"""Charts of a node: its GPUs against their peers, any metric, and one GPU against another or against an earlier day."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Event, Health, from_json
from drover_dashboard import client
from drover_dashboard.pages.incident_rows import parse
from drover_dashboard.widgets import address, charts, strip, time_range, view
from drover_dashboard.widgets import format as fmt
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

CHARTED = ("sm_clock_mhz", "power_w", "gpu_temp_c", "gpu_util_ratio", "tensor_active_ratio", "nvlink_tx_bytes_per_s")
POINTS = 300
SILENT_MS = 60_000
LINKS = 16  # ports of a node in one chart
STRIP_EVENTS, STRIP_ROWS = 300, 100  # asked for
SHIFTS = {"yesterday": 86_400_000, "a week ago": 7 * 86_400_000}
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
GPU_OF = re.compile(rf"({NODE_NAME})/(\d{{1,3}})")
TYPED = re.compile(rf"(?:with +)?(?:(?!gpu\b)({NODE_NAME})[ /:]+)?(?:gpu *)?(\d{{1,3}})", re.IGNORECASE)
MET_SCOPES = (Scope.GPU, Scope.NODE, Scope.LINK)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the charts shall show: `further`, a metric for one more; `against`: "", a key of `SHIFTS`, or NODE/GPU."""

    span_ms: int
    gpu: int | None
    further: str
    against: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all charts of the page share.

    Attributes:
        slots: GPUs that are drawn, the one whose peers are drawn first.
        of: that one; None: no peers.
        other: (node, slot) of the GPU that it is compared with.
        shift_ms: so much earlier is what it is compared with; 0: nothing earlier.
    """

    detail: pb.NodeDetail
    from_ms: int
    to_ms: int
    slots: Sequence[int]
    of: int | None
    other: tuple[str, int] | None
    shift_ms: int

    @property
    def node(self) -> str:
        return self.detail.row.name

    @property
    def compares(self) -> bool:
        return self.other is not None or self.shift_ms > 0


def choose_against(node: str) -> str:
    """With what the chosen GPU is compared, kept in the URL as `vs`: a GPU of this node or rack, or an earlier day."""
    detail = client.fleet().node(node).value
    asked = st.query_params.get("vs", "")
    own = [f"{node}/{item.gpu}" for item in detail.gpus] if detail else []
    layout = client.fleet().layout().value
    rack = next((r for r in layout.racks if any(n.name == node for n in r.nodes)), None) if layout else None
    slot = _chosen(detail) if detail else 0
    near = [f"{n.name}/{slot}" for n in rack.nodes if n.name != node and slot < n.gpus] if rack else []
    options = ["", *SHIFTS, *own, *near]
    names = {n.name for r in layout.racks for n in r.nodes} if layout else set()
    if asked not in options and _read(asked, node, slot, names):
        options.append(asked)
    found = address.select(
        "vs", "Compare with", options, "", key="node_vs", width=220, accept_new_options=True, filter_mode="contains",
        format_func=lambda option: _against_label(option, node),
    )  # fmt: skip
    against = _read(found, node, slot, names)
    if found and not against:
        view.notice("vs", "trouble", f"{found!r} is no GPU here. Type a node, or NODE/GPU such as r01n02/3.")
    return against


def _read(text: str, node: str, slot: int, names: Collection[str]) -> str:
    """Return what a person chose or typed as `Asked` has it: a node alone is its GPU of the same slot. Pure.

    Enter takes what was typed, also where an option of the list has it: so all that the page calls a GPU is read.
    """
    if text in SHIFTS:
        return text
    if (found := TYPED.fullmatch(text.strip())) is not None:
        return f"{found[1] or node}/{int(found[2])}"
    return f"{text}/{slot}" if text in names else ""


def _chosen(detail: pb.NodeDetail) -> int:
    text = st.query_params.get("gpu", "")
    return int(text) if text.isdecimal() else next((item.gpu for item in detail.gpus), 0)


def _against_label(option: str, node: str) -> str:
    if not option:
        return "compare with ..."
    if (found := GPU_OF.fullmatch(option)) is None:
        return f"with {option}"
    return f"with GPU {found[2]}" if found[1] == node else f"with {found[1]} GPU {found[2]}"


def choose_further() -> str:
    """A metric for one more chart, kept in the URL: any of GPUs, of the node or of its network ports."""
    return address.select(
        "metric", "One more chart", ["", *further_metrics()], "", key="node_metric", width=260,
        format_func=_metric_label, filter_mode="contains",
    )  # fmt: skip


def further_metrics() -> list[str]:
    """What a chart can show besides those that are always there."""
    return [metric.name for scope in MET_SCOPES for metric in catalog.of_scope(scope) if metric.name not in CHARTED]


def _metric_label(name: str) -> str:
    if not name:
        return "one more chart: choose a metric"
    of = {Scope.NODE: " (node)", Scope.LINK: " (port)"}.get(catalog.BY_NAME[name].scope, "")
    return f"{fmt.label(name)}{of}"


def show(detail: pb.NodeDetail, asked: Asked, who: view.Viewer) -> None:
    """The strip of what happened, then the charts, that of the further metric first."""
    frame = _frame(detail, asked, who)
    lanes = _lanes(frame, who)
    clicked = strip.show("node_strip", lanes, frame.from_ms, frame.to_ms, who)
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})
    marks = strip.moments(lanes, frame.from_ms, frame.to_ms)
    sick = {item.gpu for item in detail.gpus if item.health not in (Health.HEALTHY, Health.UNKNOWN)}
    strong = frozenset(sick | ({asked.gpu} if asked.gpu is not None else set()))
    drawn: list[charts.Chart] = []
    if asked.further and catalog.BY_NAME[asked.further].scope is not Scope.GPU:
        drawn += _of_node(frame, asked.further, who)
        drawn += _of_gpus(frame, CHARTED, strong, who)
    else:
        drawn += _of_gpus(frame, (asked.further, *CHARTED) if asked.further else CHARTED, strong, who)
    columns = st.columns(3, gap="medium")
    for number, chart in enumerate(drawn):
        with columns[number % 3]:
            charts.show(f"node_{chart.metric.name}", replace(chart, marks=marks), loads=True)


def _frame(detail: pb.NodeDetail, asked: Asked, who: view.Viewer) -> _Frame:
    reported_ms = detail.row.last_seen_ms
    silent = reported_ms and who.now_ms - reported_ms > SILENT_MS
    end_ms = reported_ms if silent else who.now_ms  # a silent node's last values
    from_ms, to_ms = charts.window(end_ms - asked.span_ms, end_ms)
    other = GPU_OF.fullmatch(asked.against)
    shift_ms = SHIFTS.get(asked.against, 0)
    of = compared(detail, asked.gpu)
    slots = sorted((item.gpu for item in detail.gpus), key=lambda slot: (slot != of, slot))  # peers are of the first
    if (other or shift_ms) and slots:
        slots = [asked.gpu] if asked.gpu in slots and asked.gpu is not None else slots[:1]
        of = slots[0] if any(item.gpu == slots[0] and item.job for item in detail.gpus) else None
    return _Frame(detail, from_ms, to_ms, slots, of, (other[1], int(other[2])) if other else None, shift_ms)


def compared(detail: pb.NodeDetail, gpu: int | None) -> int | None:
    """Whose peers are drawn with the lines: the GPU asked for, else the first, of those that hold a job. An idle one
    differs from the busy ones of its model, and nothing is wrong."""
    held = [item.gpu for item in detail.gpus if item.job]
    return gpu if gpu in held else next(iter(held), None)


def _lanes(frame: _Frame, who: view.Viewer) -> list[strip.Lane]:
    """Incidents, actions and events of the node in the time of the charts."""
    fleet, node = client.fleet(), frame.node
    incidents, done = fleet.incidents("all", node=node, limit=STRIP_ROWS).value, fleet.actions(node, STRIP_ROWS).value
    request = pb.EventsRequest(node=node, from_ms=frame.from_ms, to_ms=frame.to_ms, limit=STRIP_EVENTS)
    asked = fleet.ask(methods.LIST_EVENTS, request, f"strip {node} {charts.drawn_open()}")
    events = [from_json(Event, text) for text in asked.value.events_json] if asked.value else None
    return [
        strip.incidents(parse(incidents) if incidents else None, who),
        strip.actions(done.actions if done else None, who),
        strip.ask_changes(f"{node} {time_range.named()}", [node], frame.from_ms, frame.to_ms, who),
        strip.events(events, who),
    ]


def _ask(
    frame: _Frame, scope: Scope, targets: Sequence[pb.SeriesTarget], metrics: Sequence[str], who: view.Viewer,
    shift_ms: int = 0,
) -> pb.SeriesReply | None:  # fmt: skip
    request = pb.SeriesRequest(
        scope=scope,
        targets=targets,
        metrics=metrics,
        from_ms=frame.from_ms - shift_ms,
        to_ms=frame.to_ms - shift_ms,
        max_points=POINTS,
        with_peers=scope is Scope.GPU and frame.of is not None and not shift_ms,
    )
    length = frame.to_ms - frame.from_ms
    key = (
        f"node {scope} {frame.node} {frame.slots} {frame.other} {length} {metrics[0]} {shift_ms} {charts.drawn_open()}"
    )
    answer = client.fleet().series(request, key)
    view.trouble(f"charts_{scope}_{shift_ms}", answer.trouble, 0, who)
    return answer.value


def _of_gpus(
    frame: _Frame, metrics: Sequence[str], strong: frozenset[int], who: view.Viewer
) -> list[charts.Chart]:  # fmt: skip
    if not frame.slots:
        return []
    targets = client.targets(frame.node, frame.slots)
    if frame.other is not None:
        targets = [*targets, pb.SeriesTarget(node=frame.other[0], gpu=frame.other[1])]
    now = _ask(frame, Scope.GPU, targets, metrics, who)
    if now is None:
        return []
    then = _ask(frame, Scope.GPU, targets, metrics, who, frame.shift_ms) if frame.shift_ms else None
    shown = ", ".join(f"GPU {slot}" for slot in sorted(strong)) + " thick" if 0 < len(strong) < len(frame.slots) else ""
    drawn = []
    for name in metrics:
        metric = catalog.BY_NAME[name]
        lines = _compared_lines(now, then, name, frame) if frame.compares else charts.lines_of(now, name, strong)
        own = [line for line in lines if line.role == "value"]
        band = charts.banded(metric) and len(own) < len(lines)
        gone = [f"{line.label}: no value" for line in own[1:] if frame.compares and charts.nothing_there([line])]
        thin = f"thick GPU {frame.slots[0]}, thin {own[1].label}" if frame.compares and len(own) > 1 else shown
        remarks = (thin, f"band: peers of GPU {frame.of}" if band else "", *gone)
        absent = why_absent(frame.detail, name, who) if charts.nothing_there(lines) else ""
        note = "; ".join(filter(None, remarks))
        times = charts.times_of(now)
        drawn.append(charts.Chart(metric, times, lines, frame.from_ms, frame.to_ms, note=note, absent=absent))
    return drawn


def _compared_lines(
    now: pb.SeriesReply, then: pb.SeriesReply | None, metric: str, frame: _Frame
) -> list[charts.Line]:  # fmt: skip
    """The GPU thick, what it is compared with thin, and the peers' band."""
    slot, times = frame.slots[0], charts.times_of(now)
    word, before = _word(frame), charts.times_of(then or now)
    lines = []
    for series in now.series:
        if series.metric != metric:
            continue
        values = np.frombuffer(series.values, "<f4")
        if series.role not in ("", "value"):
            lines.append(charts.Line(charts.PEER_LABELS.get(series.role, series.role), series.role, values))
        elif (series.node, series.gpu) == (frame.node, slot):
            lines.insert(0, charts.Line(f"{series.node} GPU {slot}", "value", values, slot, strong=True))
        else:
            lines.insert(1, charts.Line(f"{series.node} GPU {series.gpu}", "value", values, slot ^ 4))
    for series in () if then is None else then.series:
        if series.metric == metric and series.role in ("", "value"):
            values = aligned(np.frombuffer(series.values, "<f4"), before + frame.shift_ms, times)
            lines.insert(1, charts.Line(f"GPU {slot} {word}", "value", values, slot ^ 4))
    roles = ("value", *charts.PEER_LABELS)
    return sorted((line for line in lines if line.role in roles), key=lambda line: charts.ORDER[line.role])


def _word(frame: _Frame) -> str:
    return next((word for word, shift_ms in SHIFTS.items() if shift_ms == frame.shift_ms), "")


def aligned(
    values: npt.NDArray[np.float32], times_ms: npt.NDArray[np.int64], on_ms: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:  # fmt: skip
    """Return values at other times: each is that of the nearest time within one step, else NaN. Pure."""
    found = np.full(len(on_ms), np.nan, np.float32)
    if len(times_ms) < 2 or len(values) != len(times_ms):
        return found
    step = int(np.median(np.diff(times_ms)))
    after = np.clip(np.searchsorted(times_ms, on_ms), 1, len(times_ms) - 1)
    nearest = np.where(on_ms - times_ms[after - 1] <= times_ms[after] - on_ms, after - 1, after)
    near = np.abs(times_ms[nearest] - on_ms) <= step
    found[near] = values[nearest][near]
    return found


def _of_node(frame: _Frame, name: str, who: view.Viewer) -> list[charts.Chart]:
    """A metric of the node or of its ports; of nodes also against another node or an earlier day."""
    metric = catalog.BY_NAME[name]
    if metric.scope is Scope.LINK:
        targets = [pb.SeriesTarget(node=frame.node, link=link.link) for link in frame.detail.links[:LINKS]]
    else:
        others = [frame.other[0]] if frame.other and frame.other[0] != frame.node else []
        targets = [pb.SeriesTarget(node=node) for node in (frame.node, *others)]
    if not targets:
        return [_empty(frame, name, "no network port is known of this node")]
    now = _ask(frame, metric.scope, targets, [name], who)
    if now is None:
        return []
    lines = [replace(line, slot=at) for at, line in enumerate(charts.lines_of(now, name))]
    then = None
    if metric.scope is Scope.NODE and frame.shift_ms:
        then = _ask(frame, metric.scope, targets, [name], who, frame.shift_ms)
    if then is not None:
        for line in charts.lines_of(then, name):
            values = aligned(line.values, charts.times_of(then) + frame.shift_ms, charts.times_of(now))
            lines.append(replace(line, label=f"{line.label} {_word(frame)}", values=values, slot=5))
    absent = why_absent(frame.detail, name, who) if charts.nothing_there(lines) else ""
    return [
        charts.Chart(metric, charts.times_of(now), lines, frame.from_ms, frame.to_ms, note=frame.node, absent=absent)
    ]


def _empty(frame: _Frame, name: str, why: str) -> charts.Chart:
    return charts.Chart(catalog.BY_NAME[name], np.empty(0, np.int64), [], frame.from_ms, frame.to_ms, absent=why)


def why_absent(detail: pb.NodeDetail, name: str, who: view.Viewer) -> str:
    """Of the newest values: a time without any has its reason there."""
    of = [item.values for item in detail.gpus] + [detail.values] + [link.values for link in detail.links]
    values = [value for group in of for value in group if value.metric == name]
    reasons = sorted({fmt.absent(value.reason) for value in values if not value.present and value.reason})
    return who.localize(f"absent: {', '.join(reasons)}") if reasons else "no value in this time"

"""Probes on the screen: the fleet's distribution with a node marked, figures of a node, its NVLink matrix, orders.

All but `show_*` are pure: the collector's answer -> what the browser draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from drover_core.metrics.catalog import Kind, Metric, Scope
from drover_core.model.events import ProbeOrder, ProbeVerdict, from_json
from drover_dashboard import client
from drover_dashboard.widgets import charts, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.charts import Chart, Line
from drover_dashboard.widgets.components import component
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

PAIRS = "p2p"
BINS = 48
MOST_GROUPS = 3  # whose centres are drawn; more of them would hide the bars
PLAIN = ("pass", "fail")  # the other verdicts are drawn as unknown
RANK = {"fail": 0, "doubtful": 1, "unknown": 2, "pass": 3}
BADGES = {"fail": "confirmed", "doubtful": "suspect", "unknown": "unknown", "pass": "healthy"}
WORDS = {"fail": "failed", "doubtful": "look again", "unknown": "not judged", "pass": "passed"}
STATES = {"asked": "waits", "sent": "under way", "done": "ended", "failed": "no result"}
REASONS = {
    "confirm": "confirm a suspicion", "validate": "before it returns", "repaired": "after repair",
    "baseline": "new driver or firmware", "admit": "before it first serves", "idle": "routine", "person": "asked for",
}  # fmt: skip
LIST_PX, LONG_PX = 320, 640  # next to the parts of a chosen node, and without one


def number(value: float) -> str:
    """Four digits that count."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "absent"
    return fmt.number(value, 0 if abs(value) >= 1000 else max(0, 3 - math.floor(math.log10(abs(value)))))


def unit(text: str) -> str:
    return {"us": "µs", "degC/W": "°C/W", "degC": "°C"}.get(text, text)


def where(value: pb.ProbeValue) -> str:
    """`GPU 3`, `GPU 3 to 5`, `node`."""
    if not value.HasField("gpu"):
        return "node"
    return f"GPU {value.gpu}" + (f" to {value.peer}" if value.HasField("peer") else "")


def off(value: pb.ProbeValue) -> str:
    """`-5.0 %`: how far from what its configuration gives, negative being worse."""
    return f"{-100 * value.worse:+.1f} %" if value.HasField("worse") else ""


# ---- the distribution


def spread(figure: pb.ProbeFigure, node: str, gpu: int | None) -> dict[str, Any]:
    """What assets/spread.js draws: bars over the fleet, each configuration's centre and limit, the node's own marks."""
    known = [v for v in figure.values if v.HasField("value")]
    title = f"{figure.figure}, {unit(figure.unit)}" + ("" if figure.better != "lower" else " (lower is better)")
    base: dict[str, Any] = {"title": title, "note": _note(figure), "bins": [], "marks": [], "lines": []}
    if not known:
        return base | {"empty": "No node has given this figure yet."}
    values = np.array([v.value for v in known])
    lines = _lines(figure)
    low, high = _bounds(np.concatenate([values, [line["value"] for line in lines]]))
    counts = {word: np.zeros(BINS, int) for word in ("pass", "fail", "unknown")}
    for value in known:
        at = min(BINS - 1, int((value.value - low) / (high - low) * BINS))
        counts[value.verdict if value.verdict in PLAIN else "unknown"][at] += 1
    bins = [{word: int(count[at]) for word, count in counts.items()} for at in range(BINS)]
    return base | {
        "low": low, "high": high, "unit": unit(figure.unit), "bins": bins, "lines": lines, "empty": "",
        "marks": [_mark(v, node, gpu) for v in _marked(known, node)],
    }  # fmt: skip


def _note(figure: pb.ProbeFigure) -> str:
    of = {v.node for v in figure.values}
    boards = f"{fmt.several(len(figure.values), 'result')} of {fmt.several(len(of), 'node')}"
    return f"{boards} · {figure.sku or 'model not known'}"


def _bounds(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = max((high - low) * 0.06, abs(high) * 0.002, 1e-12)
    return max(0.0, low - room), high + room


def _lines(figure: pb.ProbeFigure) -> list[dict[str, Any]]:
    """Centre of each configuration, and the limit from which a board is judged worse."""
    if len(figure.groups) > MOST_GROUPS:
        return []
    worse = 1 if figure.better == "lower" else -1
    found = []
    for group in figure.groups:
        about = f"{group.configuration}: {fmt.number(group.size)} boards"
        found.append({"value": group.centre, "text": number(group.centre), "kind": "centre", "title": about})
        limit = group.centre * (1 + worse * group.detectable)
        limit_text = f"a board beyond {number(limit)} is found nine times in ten"
        found.append({"value": limit, "text": "", "kind": "limit", "title": f"{about}; {limit_text}"})
    return found


def _marked(known: Sequence[pb.ProbeValue], node: str) -> list[pb.ProbeValue]:
    """The node's own; without one, what failed."""
    if node:
        return [v for v in known if v.node == node and (not v.HasField("peer") or v.verdict != "pass")]
    return [v for v in known if v.verdict == "fail"]


def _mark(value: pb.ProbeValue, node: str, gpu: int | None) -> dict[str, Any]:
    own = value.gpu if value.HasField("gpu") else None
    label = "" if not node else "node" if own is None else f"{own}→{value.peer}" if value.HasField("peer") else f"{own}"
    return {
        "value": value.value, "label": label, "verdict": value.verdict, "id": place(value),
        "strong": bool(node) and gpu is not None and own == gpu,
        "title": f"{value.node} {where(value)}: {number(value.value)}{f' ({off(value)})' if off(value) else ''}",
    }  # fmt: skip


def place(value: pb.ProbeValue) -> str:
    """As a click reports it: `NODE/GPU`; of a node, `NODE/`."""
    return f"{value.node}/{value.gpu if value.HasField('gpu') else ''}"


def show_spread(key: str, data: dict[str, Any]) -> str | None:
    """The place that was just clicked."""
    shown = component("spread")(key=key, data=data, on_open_change=lambda: None)
    clicked: str | None = shown.open
    return clicked


# ---- what is not as it should be


def worst_rows(figure: pb.ProbeFigure, who: view.Viewer) -> list[Row]:
    """All but what passed, the worst first."""
    bad = [v for v in figure.values if v.verdict != "pass"]
    bad.sort(key=lambda v: (RANK.get(v.verdict, 2), -v.worse, v.node, v.gpu))
    return [
        Row(
            (
                verdict_cell(v.verdict),
                Cell(f"{v.node} {where(v)}", kind="strong"),
                _value_cell(v, figure.unit),
                Cell(who.localize(v.text), sub=f"measured {who.clock(v.ts_ms)}"),
            ),
            id=place(v),
            href=_link(figure.figure, v.node, v.gpu if v.HasField("gpu") else None),
        )
        for v in bad
    ]


def _link(figure: str, node: str, gpu: int | None = None) -> str:
    return view.href(view.PROBES, figure=figure or None, node=node, gpu=gpu)


def verdict_cell(word: str) -> Cell:
    return Cell(WORDS.get(word, word), badge=BADGES.get(word, "unknown"))


def _value_cell(value: pb.ProbeValue, its_unit: str) -> Cell:
    if not value.HasField("value"):
        return Cell("absent", kind="absent", title=value.text)
    tone = {"fail": "bad", "doubtful": "warn"}.get(value.verdict)
    mark = Mark(off(value) or WORDS[value.verdict], tone) if tone else None
    return Cell(f"{number(value.value)} {unit(its_unit)}".strip(), mark=mark, title=value.text)


# ---- one node


def node_rows(figures: Iterable[pb.ProbeFigure], slots: Sequence[int], who: view.Viewer, chosen: str = "") -> list[Row]:
    """A figure each: what its configuration gives, then each GPU. Pairs have a matrix of their own."""
    rows = []
    for figure in figures:
        if figure.figure == PAIRS:
            continue
        by_slot = {v.gpu if v.HasField("gpu") else None: v for v in figure.values}
        centres = [v.expected for v in figure.values if v.HasField("expected")]
        limit_text = f"{number(centres[0])} {unit(figure.unit)}" if centres else "not known"
        newest_ms = max(v.ts_ms for v in figure.values)
        cells = [
            Cell(figure.figure, kind="strong"),
            Cell("exact" if figure.better == "exact" else limit_text, kind="faint"),
            *(_slot_cell(by_slot.get(slot), figure) for slot in slots),
            _slot_cell(by_slot[None], figure) if None in by_slot else Cell(""),
            Cell(f"{who.ago(newest_ms)} ago", kind="faint", title=who.clock(newest_ms)),
        ]
        link = _link(figure.figure, figure.values[0].node)
        rows.append(Row(tuple(cells), figure.figure, link, "asked" if figure.figure == chosen else ""))
    return rows


def node_columns(slots: Sequence[int]) -> list[Column]:
    return [
        Column("Probe"), Column("Expected", "right", help="what boards of its configuration give"),
        *(Column(f"GPU {slot}", "right") for slot in slots), Column("Node", "right"), Column("Measured", "right"),
    ]  # fmt: skip


def _slot_cell(value: pb.ProbeValue | None, figure: pb.ProbeFigure) -> Cell:
    if value is None:
        return Cell("") if any(not v.HasField("gpu") for v in figure.values) else Cell("not probed", kind="absent")
    if figure.better == "exact" and value.HasField("value"):
        right = value.verdict == "pass"
        return Cell("right" if right else "", mark=None if right else Mark("WRONG", "bad"), title=value.text)
    return _value_cell(value, "")


def matrix(figure: pb.ProbeFigure | None) -> dict[str, Any]:
    """What assets/matrix.js draws: from each GPU (rows) to each other one (columns)."""
    values = list(figure.values) if figure is not None else []
    slots = sorted({slot for v in values for slot in (v.gpu, v.peer)})
    cells = {
        f"{v.gpu}/{v.peer}": {
            "text": number(v.value) if v.HasField("value") else "absent",
            "value": v.value if v.HasField("value") else None,
            "verdict": v.verdict,
            "title": v.text,
        }
        for v in values
    }
    best = max((v.value for v in values if v.HasField("value")), default=0.0)
    return {
        "slots": slots, "cells": cells, "best": best, "unit": unit(figure.unit) if figure is not None else "",
        "empty": "" if values else "No bandwidth between its GPUs has been measured.",
    }  # fmt: skip


def show_matrix(key: str, data: dict[str, Any]) -> None:
    component("matrix")(key=key, data=data)


# ---- history


def history(reply: pb.ProbeHistoryReply, what: str, slot: int, to_ms: int, who: view.Viewer) -> Chart:
    """One value for each run; those of another configuration are among them, for the reader to see what changed."""
    times = np.array([p.ts_ms for p in reply.points], np.int64)
    values = np.array([p.value if p.HasField("value") else np.nan for p in reply.points], np.float32)
    metric = Metric(
        0, reply.figure, reply.unit, Kind.GAUGE, Scope.GPU, "Float32", 0, -math.inf, math.inf, what, "", {}
    )  # fmt: skip
    first = int(times[0]) if len(times) else to_ms
    room = max((to_ms - first) // 20, 3_600_000)
    marks = [reply.since_ms] if reply.HasField("since_ms") else []  # the drift, next to it, says since when
    absent = "" if len(times) and np.isfinite(values).any() else "no run has measured it"
    lines = [Line(what, "value", values, slot, strong=True)]
    return Chart(metric, times, lines, first - room, to_ms + room // 4, marks, who.localize(reply.drift), absent, 170)


def show_history(key: str, chart: Chart) -> None:
    charts.show(key, chart)


# ---- orders


def order_rows(rows: Iterable[pb.ProbeOrderRow], who: view.Viewer) -> list[Row]:
    found = []
    for row in rows:
        order = from_json(ProbeOrder, row.order_json)
        verdicts = [from_json(ProbeVerdict, text) for text in row.verdicts_json]
        what = ", ".join(order.probes) or f"level {order.level}"
        slots = f"GPU {', '.join(map(str, order.gpus))}" if order.gpus else "all GPUs"
        by = "" if order.by == "drover" else f" by {order.by}"
        found.append(
            Row(
                (
                    _outcome(order, verdicts),
                    Cell(order.node, sub=f"{slots} · {what}", kind="strong"),
                    Cell(f"{REASONS.get(order.why, order.why)}{by}", sub=who.localize(_explanation(order, verdicts))),
                    Cell(who.clock(order.ts_ms), sub=f"{who.ago(order.ts_ms)} ago"),
                ),
                id=f"{order.node}/",
                href=_link("", order.node),
            )
        )
    return found


def _outcome(order: ProbeOrder, verdicts: Sequence[ProbeVerdict]) -> Cell:
    if any(v.passed is False for v in verdicts):
        return Cell("failed", badge="confirmed")
    if order.state == "done" and verdicts and all(v.passed for v in verdicts):
        return Cell("passed", badge="healthy")
    if order.state in ("asked", "sent"):
        return Cell(STATES[order.state], badge="info")
    return Cell("not proved" if order.state == "done" else STATES.get(order.state, order.state), badge="unknown")


def _explanation(order: ProbeOrder, verdicts: Sequence[ProbeVerdict]) -> str:
    for wanted in (False, None):
        for verdict in verdicts:
            if verdict.passed is wanted:
                return verdict.text
    return verdicts[0].text if verdicts else order.detail


def show_orders(
    key: str, answer: client.Answer[pb.ProbeOrderList], who: view.Viewer, empty: str, height: int
) -> str | None:
    columns = (Column("Outcome"), Column("Node"), Column("Why, and the result", wrap=True), Column("Changed"))
    rows = order_rows(answer.value.orders, who) if answer.value is not None else []
    if answer.value is None:
        empty = "Orders are not known while the collector does not answer."
    return table(key, columns, rows, empty=empty, link_column=1, height=height if len(rows) > 4 else None)


def worst_slot(figure: pb.ProbeFigure | None) -> int:
    """The GPU to look at first."""
    of = [v for v in figure.values if v.HasField("gpu")] if figure is not None else []
    return min(of, key=lambda v: (RANK.get(v.verdict, 2), -v.worse, v.gpu)).gpu if of else 0


def show_node(key: str, node: str, reply: pb.ProbeList, who: view.Viewer, chosen: str = "") -> str | None:
    """All figures of a node in one table; the figure that was just clicked."""
    slots = sorted({v.gpu for figure in reply.figures for v in figure.values if v.HasField("gpu")})
    return table(
        key, node_columns(slots), node_rows(reply.figures, slots, who, chosen), empty=f"{node} was never probed.",
        selected=chosen, link_column=0,
    )  # fmt: skip

"""Charts of one metric each over the same time, for pages that name entities and metrics alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Incident, from_json
from drover_dashboard import client
from drover_dashboard.widgets import charts, strip, time_range, view
from drover_proto import fleet_pb2 as pb

POINTS = 300
LINES = 16  # in a chart: more could not be distinguished
INCIDENTS = 200  # of the fleet, the newest


@dataclass(frozen=True, slots=True)
class Group:
    """Charts of the same entities.

    Attributes:
        targets: the first `LINES` are drawn.
        note: after each chart's title.
    """

    scope: Scope
    targets: Sequence[pb.SeriesTarget]
    metrics: Sequence[str]
    note: str


def show(key: str, groups: Sequence[Group], span_ms: int, who: view.Viewer) -> None:
    """Draw the strip of what happened on these nodes, then the charts. `key`: of the page and what it shows."""
    from_ms, to_ms = charts.window(who.now_ms - span_ms, who.now_ms)
    nodes = {target.node for group in groups for target in group.targets}
    changed = strip.ask_changes(f"{key} {' '.join(sorted(nodes))} {time_range.named()}", nodes, from_ms, to_ms, who)
    lanes = [strip.incidents(_incidents(nodes), who), changed]
    clicked = strip.show(f"{key}_strip", lanes, from_ms, to_ms, who)
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})
    marks = strip.moments(lanes, from_ms, to_ms)
    drawn = [chart for group in groups if group.targets for chart in _charts(key, group, (from_ms, to_ms), who)]
    columns = st.columns(2, gap="medium")
    for number, chart in enumerate(drawn):
        with columns[number % 2]:
            charts.show(f"{key}_{chart.metric.name}", replace(chart, marks=marks), loads=True)


def _incidents(nodes: set[str]) -> list[Incident] | None:
    answer = client.fleet().incidents("all", limit=INCIDENTS)
    if answer.value is None:
        return None
    found = (from_json(Incident, text) for text in answer.value.incidents_json)
    return [one for one in found if one.node in nodes or any(node in nodes for node, _ in one.members)]


def _charts(key: str, group: Group, time: tuple[int, int], who: view.Viewer) -> list[charts.Chart]:
    targets = list(group.targets[:LINES])
    request = pb.SeriesRequest(
        scope=group.scope, targets=targets, metrics=group.metrics, from_ms=time[0], to_ms=time[1], max_points=POINTS
    )
    of = " ".join(f"{target.node}/{target.gpu}/{target.link}" for target in targets)
    answer = client.fleet().series(request, f"{key} {of} {time_range.named()}")
    view.trouble(f"{key}_{group.scope}", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return []
    cut = f"the first {LINES} of {len(group.targets)}" if len(group.targets) > LINES else ""
    drawn = []
    for name in group.metrics:
        lines = [_line(series, at) for at, series in enumerate(s for s in answer.value.series if s.metric == name)]
        absent = "no value in this time" if charts.nothing_there(lines) else ""
        note = "; ".join(filter(None, (group.note, cut)))
        metric, times = catalog.BY_NAME[name], charts.times_of(answer.value)
        drawn.append(charts.Chart(metric, times, lines, *time, note=note, absent=absent))
    return drawn


def _line(series: pb.Series, slot: int) -> charts.Line:
    """Named in full: the lines are of several nodes."""
    part = f"GPU {series.gpu}" if series.HasField("gpu") else series.link
    return replace(charts.line_of(series), label=f"{series.node} {part}".strip(), slot=slot)

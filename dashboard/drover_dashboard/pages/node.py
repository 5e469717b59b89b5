"""One node: its GPUs side by side against their peers, its incidents, its charts, its log."""

from __future__ import annotations

import streamlit as st

from drover_core.model.events import Health
from drover_dashboard import client
from drover_dashboard.pages import (
    node_actions as node_acts,
)
from drover_dashboard.pages import (
    node_detail,
    node_history,
)
from drover_dashboard.pages import (
    probes_parts as probe_parts,
)
from drover_dashboard.widgets import address, charts, view
from drover_dashboard.widgets import format as fmt
from drover_proto import fleet_pb2 as pb

SPANS = {"15 min": 15, "1 h": 60, "6 h": 360, "24 h": 1440}
USUAL_SPAN = "15 min"
NO_NODE = "choose a node"
OUT = (Health.DRAINED, Health.VALIDATING, Health.REPAIR)  # no job runs there


def choose() -> tuple[str, int, str]:
    """The node, the charts' span in ms and a metric for one more chart, all kept in the URL."""
    usual = st.query_params.get("node", "")
    if not usual:
        worst = client.fleet().nodes(limit=1).value
        usual = worst.nodes[0].name if worst and worst.nodes else ""
    with st.container(horizontal=True, vertical_alignment="center"):
        node = address.node(NO_NODE, key="node_node", usual=usual, drops=("gpu", charts.OPEN))
        span = address.segments(
            "span", "Charts over", list(SPANS), USUAL_SPAN, key="node_span", drops=(charts.OPEN,),
            label_visibility="collapsed",
        )  # fmt: skip
        further = address.select(
            "metric", "One more chart", ["", *node_detail.further_metrics()], "", key="node_metric", width=260,
            format_func=lambda name: fmt.label(name) if name else "one more chart: choose a metric",
        )  # fmt: skip
    return node, SPANS[span] * 60_000, further


@st.fragment(run_every=3)
def now(name: str) -> None:
    who = view.viewer()
    answer = client.fleet().node(name)
    view.trouble("node", answer.trouble, answer.as_of_ms, who)
    if answer.value is not None:
        node_detail.now(answer.value, _asked_gpu(), who)


@st.fragment(run_every=10)
def history(name: str) -> None:
    """Of one that is out whether it is safe to give back; what was done to it and why; a click opens the incident."""
    detail: pb.NodeDetail | None = client.fleet().node(name).value
    if (
        detail is not None
        and detail.row.health in OUT
        and (look := client.fleet().preview_resume(name).value) is not None
    ):
        node_acts.safe(look, view.viewer(), "out")
    if detail is None:
        return  # why is said above
    clicked = node_history.show(name, view.viewer())
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})


@st.fragment(run_every=10)
def past(name: str, span_ms: int, further: str) -> None:
    detail: pb.NodeDetail | None = client.fleet().node(name).value
    if detail is not None:
        node_detail.past(detail, span_ms, _asked_gpu(), further, view.viewer())


@st.fragment(run_every=30)
def probed(name: str) -> None:
    """What probes gave of it; a click opens the Probes page on that figure."""
    answer = client.fleet().probes(node=name)
    if answer.value is None:
        return  # why is said above
    clicked = probe_parts.show_node("node_probes", name, answer.value, view.viewer())
    if clicked:
        st.switch_page(view.PROBES, query_params={"node": name, "figure": clicked})


def _asked_gpu() -> int | None:
    text = st.query_params.get("gpu", "")
    return int(text) if text.isdigit() else None


node, span_ms, further = choose()
address.title(node or "Node")
if node:
    node_acts.buttons(node)
    now(node)
    history(node)
    past(node, span_ms, further)
    probed(node)
else:
    who = view.viewer()
    answer = client.fleet().layout()
    view.trouble("layout", answer.trouble, answer.as_of_ms, who)

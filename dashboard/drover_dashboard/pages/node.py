"""One node: its GPUs side by side against their peers, its incidents, its charts, its log."""

from __future__ import annotations

import streamlit as st

from drover_core.model.events import Health
from drover_dashboard import client
from drover_dashboard.pages import (
    node_actions as node_acts,
)
from drover_dashboard.pages import (
    node_charts,
    node_detail,
    node_history,
)
from drover_dashboard.pages import (
    probes_parts as probe_parts,
)
from drover_dashboard.widgets import address, grafana, moment, time_range, view
from drover_proto import fleet_pb2 as pb

USUAL_SPAN = "15 min"
NO_NODE, TIME = "choose a node", "node_time"
OUT = (Health.DRAINED, Health.VALIDATING, Health.REPAIR)  # no job runs there


def choose() -> str:
    """The node, kept in the URL."""
    usual = st.query_params.get("node", "")
    if not usual:
        worst = client.fleet().nodes(limit=1).value
        usual = worst.nodes[0].name if worst and worst.nodes else ""
    with st.container(horizontal=True, vertical_alignment="center"):
        chosen = address.node(NO_NODE, key="node_node", usual=usual, drops=("gpu", "vs"))
        moment.pick(key="node_moment")
    return chosen


def choose_charts(name: str) -> node_charts.Asked:
    """The charts' time, with what the GPU is compared and a metric for one more chart, all kept in the URL."""
    with st.container(horizontal=True, vertical_alignment="center"):
        span_ms = time_range.pick(key=TIME, usual=USUAL_SPAN)
        against = node_charts.choose_against(name)
        further = node_charts.choose_further()
        grafana.button("node_grafana", grafana.span(span_ms or 0), [name])
    return node_charts.Asked(span_ms or 0, _asked_gpu(), further, against)


@st.fragment(run_every=3)
def who_is(name: str) -> None:
    who = view.viewer()
    answer = client.fleet().node(name)
    view.trouble("node", answer.trouble, answer.as_of_ms, who)
    if answer.value is not None:
        node_detail.identity(answer.value, who)
        with view.place():
            for number, text in enumerate(answer.value.absent):
                view.notice(f"then_{number}", "remark", text)


@st.fragment(run_every=3)
def now(name: str) -> None:
    answer = client.fleet().node(name)
    if answer.value is not None:  # else said above
        node_detail.gpus(answer.value, _asked_gpu(), view.viewer())


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
def past(name: str, asked: node_charts.Asked) -> None:
    time_range.follow(TIME)
    detail: pb.NodeDetail | None = client.fleet().node(name).value
    if detail is not None:
        node_charts.show(detail, asked, view.viewer())


@st.fragment(run_every=10)
def below(name: str) -> None:
    detail: pb.NodeDetail | None = client.fleet().node(name).value
    if detail is not None:
        node_detail.below(detail, _asked_gpu(), view.viewer())


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
    return int(text) if text.isdecimal() else None


node = choose()
address.title(node or "Node")
if node:
    who_is(node)
    then = bool(moment.at_ms())
    if not then:
        node_acts.buttons(node)
    now(node)
    past(node, choose_charts(node))
    below(node)
    if not then:  # what was done, safe to return, probes: they are of now
        history(node)
        probed(node)
else:
    who = view.viewer()
    answer = client.fleet().layout()
    view.trouble("layout", answer.trouble, answer.as_of_ms, who)

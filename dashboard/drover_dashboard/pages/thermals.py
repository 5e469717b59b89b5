"""Heat: which rack runs hot, which GPUs are held down by it, and whether it is the room or a heat sink."""

from __future__ import annotations

import streamlit as st

from drover_core.metrics.catalog import Scope
from drover_dashboard import client
from drover_dashboard.pages import fabric_parts
from drover_dashboard.pages import thermals_parts as heat_parts
from drover_dashboard.widgets import address, moment, panel, time_range, view
from drover_proto import fleet_pb2 as pb

NOW_S, CHARTS_S, TIME = 5, 10, "thermals_time"


def choose() -> tuple[str, str]:
    """What racks are coloured by, and the rack chosen ("": none), kept in the URL."""
    with st.container(horizontal=True, vertical_alignment="center"):
        by = address.segments(
            "by", "Colour by", list(heat_parts.MEASURES), heat_parts.USUAL, key="thermals_by",
            format_func=lambda name: heat_parts.MEASURES[name].label, label_visibility="collapsed",
        )  # fmt: skip
        moment.pick(key="thermals_moment")
    return by, st.query_params.get("rack", "")


@st.fragment(run_every=NOW_S)
def racks(by: str, rack: str) -> None:
    who = view.viewer()
    answer = client.fleet().thermals(rack)
    view.trouble("thermals", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    reply = answer.value
    with view.place():
        if text := heat_parts.verdict(reply, who):
            view.notice("verdict", "summary" if any(rack.incident for rack in reply.racks) else "remark", text)
    view.numbers(heat_parts.numbers(reply))
    left, right = st.columns([1.35, 1], gap="medium")
    with left:
        clicked = fabric_parts.show_tiles("racks", heat_parts.rack_tiles(reply, heat_parts.MEASURES[by], rack))
        if clicked and clicked != rack:
            address.write(rack=clicked)
            st.rerun()
    with right:
        with view.place():
            if reply.hot_total > len(reply.hot):
                view.notice("cut", "remark", f"The worst {len(reply.hot)} of {reply.hot_total} GPUs.")
        view.go(heat_parts.show_hot("hot", reply, who))
    with view.place():
        for number, line in enumerate(reply.absent):
            view.notice(f"absent_{number}", "remark", line)
    if rack:
        view.notice("nodes", "remark", f"Nodes of rack {rack}")
        view.go(heat_parts.show_nodes("nodes", reply))


@st.fragment(run_every=CHARTS_S)
def past(rack: str, span_ms: int) -> None:
    """The air of the rack's nodes and their fans, and its hottest GPUs, over time."""
    time_range.follow(TIME)
    answer = client.fleet().thermals(rack)
    if answer.value is None:
        return  # why is said above
    nodes = [pb.SeriesTarget(node=node.node) for node in answer.value.nodes]
    hot = [pb.SeriesTarget(node=gpu.node, gpu=gpu.gpu) for gpu in answer.value.hot if gpu.rack == rack]
    groups = [
        panel.Group(Scope.NODE, nodes, ("inlet_temp_c", "fan_min_rpm"), f"nodes of {rack}"),
        panel.Group(Scope.GPU, hot, ("gpu_temp_c", "sm_clock_mhz"), "the worst GPUs"),
    ]
    panel.show("thermals", groups, span_ms, view.viewer())


by, rack = choose()
address.title(f"Thermals {rack}".strip())
racks(by, rack)
if rack:
    past(rack, time_range.pick(key=TIME) or 0)

"""The fabric: is it one node or the switch? Leafs worst first, the ports of one, the NVLinks of a node."""

from __future__ import annotations

import streamlit as st

from drover_core.metrics.catalog import Scope
from drover_dashboard import client
from drover_dashboard.pages import fabric_parts
from drover_dashboard.pages import probes_parts as probe_parts
from drover_dashboard.widgets import address, moment, panel, time_range, view
from drover_dashboard.widgets import format as fmt
from drover_proto import fleet_pb2 as pb

NOW_S, CHARTS_S, TIME = 5, 10, "fabric_time"
CHARTED = ("tx_bytes", "rx_bytes", "symbol_errors", "link_downed")
NO_NODE = "choose a node for its NVLinks"


def choose() -> tuple[str, str]:
    """Leaf and node ("": none), kept in the URL."""
    with st.container(horizontal=True, vertical_alignment="center"):
        node = address.node(NO_NODE, key="fabric_node", width=300)
        moment.pick(key="fabric_moment")
    return st.query_params.get("leaf", ""), node


@st.fragment(run_every=NOW_S)
def leafs(leaf: str, node: str) -> None:
    who = view.viewer()
    answer = client.fleet().fabric(leaf, node)
    view.trouble("fabric", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    reply = answer.value
    if not leaf and not node and reply.leafs and reply.leafs[0].nodes_troubled:
        address.write(leaf=reply.leafs[0].name)  # the worst one first: one click less at night
        st.rerun()
    with view.place():
        kind, text = fabric_parts.verdict(reply, who)
        if text:
            view.notice("verdict", kind, text)
        for number, line in enumerate(reply.absent):
            view.notice(f"absent_{number}", "remark", line)
        if reply.leafs_total > len(reply.leafs):
            view.notice("cut", "remark", f"The worst {len(reply.leafs)} of {fmt.number(reply.leafs_total)} leafs.")
    clicked = fabric_parts.show_tiles("leafs", fabric_parts.leaf_tiles(reply, leaf, who, node))
    if clicked and clicked != leaf:
        address.write(leaf=clicked, node=None)
        st.rerun()
    with view.place():
        if reply.counted_from_ms:
            view.notice("counted", "remark", f"Errors and downs counted {who.since(reply.counted_from_ms)}.")
    if leaf or node:
        _ports(reply, leaf, node, who)


def _ports(reply: pb.Fabric, leaf: str, node: str, who: view.Viewer) -> None:
    of = node or leaf
    shown = (
        f"the worst {len(reply.ports)} of {reply.ports_total}"
        if len(reply.ports) < reply.ports_total
        else f"{reply.ports_total}"
    )
    view.notice("ports", "remark", f"Ports of {of}: {shown}, those in trouble first, then the busiest.")
    view.go(fabric_parts.show_ports("ports", reply, who, f"No port of {of} is known."), view.FABRIC)
    if not node:
        return
    left, right = st.columns([1.1, 1], gap="medium")
    with left:
        view.notice("nvlinks", "remark", f"NVLinks of {node}")
        view.go(fabric_parts.show_nvlinks("nvlinks", reply, node))
    with right:
        if moment.at_ms():
            return  # probes are of now
        pairs = client.fleet().probes(probe_parts.PAIRS, node)
        view.trouble("matrix", pairs.trouble, pairs.as_of_ms, who)
        if pairs.value is not None:
            probe_parts.show_matrix("matrix", probe_parts.matrix(next(iter(pairs.value.figures), None)))


@st.fragment(run_every=CHARTS_S)
def past(leaf: str, node: str, span_ms: int) -> None:
    """What the ports sent, received and got wrong over time: those in trouble first, then the busiest."""
    time_range.follow(TIME)
    answer = client.fleet().fabric(leaf, node)
    if answer.value is None:
        return  # why is said above
    first = sorted((port.node, port.link) for port in answer.value.ports[: panel.LINES])  # so a line keeps its colour
    if first:
        targets = [pb.SeriesTarget(node=of, link=link) for of, link in first]
        cut = f", {len(first)} of {answer.value.ports_total}" if len(first) < answer.value.ports_total else ""
        group = panel.Group(Scope.LINK, targets, CHARTED, f"ports of {node or leaf}{cut}")
        panel.show("fabric", [group], span_ms, view.viewer())


leaf, node = choose()
address.title(" ".join(("Fabric", node or leaf)).strip())
leafs(leaf, node)
if leaf or node:
    past(leaf, node, time_range.pick(key=TIME) or 0)

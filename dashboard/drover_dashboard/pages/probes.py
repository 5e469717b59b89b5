"""What probes gave: one figure over the fleet with a node marked, that node's figures, its history, and orders."""

from __future__ import annotations

import streamlit as st

from drover_core.model.probe_figures import FIGURES, VALIDATION_FIGURES, Better
from drover_dashboard import client
from drover_dashboard.pages import probes_parts as probe_parts
from drover_dashboard.widgets import address, view
from drover_dashboard.widgets.table import Column, table
from drover_proto import fleet_pb2 as pb

USUAL = "gemm_bf16"
NO_NODE = "every node"
REFRESH_S = 15
JUDGED = [
    name for name, figure in FIGURES.items() if figure.better is not Better.NEITHER and name not in VALIDATION_FIGURES
]


def choose() -> tuple[str, str]:
    """Figure and node ("": none), kept in the URL."""
    with st.container(horizontal=True, vertical_alignment="center"):
        figure = address.select(
            "figure", "Figure", JUDGED, USUAL, key="probes_figure", width=260,
            format_func=lambda name: f"{name}, {probe_parts.unit(FIGURES[name].unit)}",
        )  # fmt: skip
        node = address.node(NO_NODE, key="probes_node", drops=("gpu",))
    return figure, node


def go(clicked: str | None) -> None:
    """To what was clicked, `NODE/GPU`."""
    if not clicked:
        return
    node, _, gpu = clicked.rpartition("/")
    if (node, gpu) != (st.query_params.get("node", ""), st.query_params.get("gpu", "")):
        address.write(node=node, gpu=gpu or None)
        st.rerun()


@st.fragment(run_every=REFRESH_S)
def fleet(figure: str, node: str) -> None:
    who = view.viewer()
    answer = client.fleet().probes(figure)
    # As on Capacity: an answer that takes long says nothing of the collector, one out of its memory does.
    view.trouble("probes", answer.trouble or client.fleet().status().trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    found = list(answer.value.figures) or [pb.ProbeFigure(figure=figure, unit=FIGURES[figure].unit)]
    for number, one in enumerate(found):
        go(probe_parts.show_spread(f"spread_{number}", probe_parts.spread(one, node, _asked_gpu())))
        with view.place():
            for note_number, text in enumerate(one.notes):
                view.notice(f"note_{number}_{note_number}", "remark", who.localize(text))
    if not answer.value.figures:
        return
    rows = [row for one in found for row in probe_parts.worst_rows(one, who)]
    columns = (Column("Verdict"), Column("Where"), Column("Value", "right"), Column("Why", wrap=True))
    total = sum(len(one.values) for one in found)
    empty = f"All {total:,} results are as their configuration gives."
    height = (probe_parts.LIST_PX if node else probe_parts.LONG_PX) if len(rows) > 4 else None
    go(table("worst", columns, rows, empty=empty, link_column=1, height=height))


@st.fragment(run_every=REFRESH_S)
def node_parts(node: str) -> None:
    """Orders; of a node also the bandwidth between its GPUs."""
    who = view.viewer()
    answer = client.fleet().probe_orders(node)
    of = f" of {node}" if node else ""
    empty = f"No probe{of} was asked for in the last 90 days."
    height = probe_parts.LIST_PX if node else probe_parts.LONG_PX
    go(probe_parts.show_orders("orders", answer, who, empty, height))
    st.caption("Ask for one on the node's page, or with `drover probe NODE`.")
    if not node:
        return
    reply = client.fleet().probes(probe_parts.PAIRS, node)
    view.trouble("matrix", reply.trouble, reply.as_of_ms, who)
    if reply.value is not None:
        probe_parts.show_matrix("matrix", probe_parts.matrix(next(iter(reply.value.figures), None)))


@st.fragment(run_every=REFRESH_S)
def of_node(figure: str, node: str) -> None:
    """All figures of one node, and a GPU's history."""
    who = view.viewer()
    answer = client.fleet().probes(node=node)
    view.trouble("node_probes", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    clicked = probe_parts.show_node("node_probes", node, answer.value, who, figure)
    if clicked and clicked != figure:
        address.write(figure=clicked if clicked != USUAL else None)
        st.rerun()
    if answer.value.figures:
        named = {one.figure: one for one in answer.value.figures}
        _history(figure, node, named.get(figure), who)


def _history(figure: str, node: str, now: pb.ProbeFigure | None, who: view.Viewer) -> None:
    gpu = _asked_gpu()
    if gpu is None:
        gpu = probe_parts.worst_slot(now)
    of_gpu = now is None or any(v.HasField("gpu") for v in now.values)
    if figure == probe_parts.PAIRS:
        return  # of single GPUs only
    answer = client.fleet().probe_history(node, gpu if of_gpu else None, figure)
    if answer.value is None:
        view.trouble("history", answer.trouble, answer.as_of_ms, who)
        return
    what = f"History: {figure} of {f'GPU {gpu}' if of_gpu else node}"
    probe_parts.show_history("history", probe_parts.history(answer.value, what, gpu, who.now_ms, who))


def _asked_gpu() -> int | None:
    text = st.query_params.get("gpu", "")
    return int(text) if text.isdecimal() else None


figure, node = choose()
address.title(f"Probes {node}".strip())
left, right = st.columns([1.35, 1], gap="medium")
with left:
    fleet(figure, node)
with right:
    node_parts(node)
if node:
    of_node(figure, node)

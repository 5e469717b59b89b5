"""The Capacity page: who holds and uses GPUs, which are idle, where free GPUs are too scattered, what faults cost; and
the ledger, what the GPU-hours of teams and jobs were used for."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import client
from drover_dashboard.pages import capacity_parts, ledger_parts
from drover_dashboard.widgets import address, view

SPANS = {"1 day": 1.0, "7 days": 7.0, "30 days": 30.0, "90 days": 90.0}
USUAL_SPAN = "7 days"
EVERY_S = 15
NOW, LEDGER = "now", "ledger"
VIEWS = {NOW: "Now and faults", LEDGER: "Teams and jobs"}


def choose() -> tuple[float, str]:
    """Let the viewer choose over how many days, and what is shown; the choices are in the URL."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        shown = address.segments(
            "show", "Show", list(VIEWS), NOW, key="capacity_show", format_func=lambda name: VIEWS[name]
        )
        span = address.segments("span", "In the last", list(SPANS), USUAL_SPAN, key="capacity_span")
    return SPANS[span], shown


@st.fragment(run_every=EVERY_S)
def now(days: float) -> None:
    """Draw pools, idle GPUs, free blocks and services of now, and the costs of the last `days`."""
    who = view.viewer()
    answer = client.fleet().capacity(days)
    # This answer reads from disk and may be slow. The status comes from memory: it shows whether the collector is well.
    view.trouble("capacity", answer.trouble or client.fleet().status().trouble, answer.as_of_ms, who)
    reply = answer.value
    if reply is None:
        return
    capacity_parts.tiles(reply)
    with view.place():
        if not reply.judged_ms:
            text = "Nothing was judged in the last minute: what is not held is unknown, and so is what lies idle."
            view.notice("unjudged", "trouble", text)
    left, right = st.columns([1.15, 1], gap="medium")
    with left:
        view.heading("Pools now")
        capacity_parts.pools(reply)
        view.heading("What faults cost")
        capacity_parts.lost(reply, days)
    with right:
        view.heading("Idle and free GPUs")
        capacity_parts.idle(reply, who)
        capacity_parts.leafs(reply)
        view.heading("Inference services")
        capacity_parts.services(reply, who)


@st.fragment
def ledger(days: float) -> None:
    """Draw the ledger once: for a large fleet the collector reads for a minute, so it is not asked again and again."""
    ledger_parts.show(days)


address.title("Capacity")
days, shown = choose()
if shown == LEDGER:
    ledger(days)
else:
    now(days)

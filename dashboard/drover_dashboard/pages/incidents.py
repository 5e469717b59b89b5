"""What is open and what was, and everything about the one chosen: cause, proof, what to do, what Drover would do."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import client
from drover_dashboard.pages import incident_detail, incident_filters, incident_rows
from drover_dashboard.widgets import address, charts, moment, view

LIST_PX = 730


@st.fragment(run_every=view.ALERT_S)
def listing(filters: incident_filters.Filters) -> None:
    who = view.viewer()
    answer = filters.ask(client.fleet())
    view.trouble("incidents", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    found = incident_rows.parse(answer.value)
    if "id" not in st.query_params and found:
        address.write(id=found[0].id)  # the worst one first: one click less at night
        st.session_state["unasked"] = found[0].id
        st.rerun()
    lines = incident_rows.rows(found, view.racks(), who, answer.value.silences, answer.value.handling)
    known = filters.state == "closed" or moment.at_ms() or view.judged()
    empty = filters.empty() if known else view.unjudged()
    clicked = incident_rows.show(
        "incidents", lines, empty=empty, selected=st.query_params.get("id", ""), height=LIST_PX
    )
    with view.place():
        if answer.value.total > len(found):
            view.notice("more", "remark", f"{len(found)} of {answer.value.total:,} are shown; the CSV has all.")
    if clicked and clicked != st.query_params.get("id"):
        address.write(id=clicked, **charts.CLOSED)
        st.rerun()


@st.fragment(run_every=10)
def detail() -> None:
    chosen = st.query_params.get("id", "")
    if chosen:
        incident_detail.show(chosen)


address.title("Incidents")
# On a phone an incident that somebody asked for comes before the list (page.css).
asked = st.query_params.get("id", "") not in ("", st.session_state.get("unasked"))
with st.container(key="reversed_asked" if asked else "unasked"):
    left, right = st.columns([1, 1.75], gap="medium")
with left:
    listing(incident_filters.choose())
with right:
    detail()

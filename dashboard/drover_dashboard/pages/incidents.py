"""What is open and what was, and everything about the one chosen: cause, proof, what to do, what Drover would do."""

from __future__ import annotations

import streamlit as st

from drover_core.model.events import Severity
from drover_dashboard import client
from drover_dashboard.pages import incident_detail, incident_rows
from drover_dashboard.widgets import address, charts, view

LIST_PX = 730
OF_LIST = ("id", charts.OPEN)
STATES = ("open", "closed", "all")
SEVERITIES = {"info": "every severity", "warning": "warning and worse", "critical": "critical only"}
SILENCED = {"": "silenced too", "no": "hide silenced", "only": "only silenced"}
OF_SEVERITY = {
    "info": "incident",
    "warning": "incident of severity warning or critical",
    "critical": "critical incident",
}


def filters() -> tuple[str, str, str]:
    """State, least severity and what of silenced ones, kept in the URL. With another choice the incident shown is one
    of the new list."""
    with st.container(horizontal=True, vertical_alignment="center"):
        state = address.segments(
            "state", "State", STATES, "open", key="incidents_state", drops=OF_LIST, label_visibility="collapsed",
        )  # fmt: skip
        severity = address.select(
            "severity", "Severity", list(SEVERITIES), Severity.INFO.value, key="incidents_severity",
            drops=OF_LIST, format_func=lambda severity: SEVERITIES[severity], width=160,
        )  # fmt: skip
        silenced = address.select(
            "silenced", "Silenced", list(SILENCED), "", key="incidents_silenced", drops=OF_LIST,
            format_func=lambda silenced: SILENCED[silenced], width=140,
        )  # fmt: skip
    return state, severity, silenced


@st.fragment(run_every=view.ALERT_S)
def listing(state: str, severity: str, silenced: str) -> None:
    who = view.viewer()
    answer = client.fleet().incidents(state, min_severity=severity, silenced=silenced)
    view.trouble("incidents", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    found = incident_rows.parse(answer.value)
    if "id" not in st.query_params and found:
        address.write(id=found[0].id)  # the worst one first: one click less at night
        st.session_state["unasked"] = found[0].id
        st.rerun()
    lines = incident_rows.rows(found, view.racks(), who, answer.value.silences)
    kinds = (*([state] if state != "all" else []), *(["silenced"] if silenced == "only" else []), OF_SEVERITY[severity])
    empty = f"No {' '.join(kinds)}{' that is not silenced' if silenced == 'no' else ''}."
    clicked = incident_rows.show(
        "incidents", lines, empty=empty, selected=st.query_params.get("id", ""), height=LIST_PX
    )
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
    listing(*filters())
with right:
    detail()

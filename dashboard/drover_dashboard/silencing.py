"""Nobody is told of one incident for a while: asked for on its page, with who and why."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import answering, client, signin, view
from drover_proto import fleet_pb2 as pb
from drover_proto.events import Incident

HOURS = {"1 hour": 1.0, "4 hours": 4.0, "1 day": 24.0, "3 days": 72.0}
SAID = "silenced"


def button(incident: Incident) -> None:
    """For operators, while the incident is open."""
    told = st.session_state.pop(SAID, None)
    if told:
        view.notice("silenced", "remark", told)
    person = signin.person()
    if incident.closed_ms is not None or person is None or not person.may_act:
        return
    with st.popover("Silence", icon=":material/notifications_off:", key="silence"):
        st.text("Nobody is told of it meanwhile. It stays open, and what the policy does stays as it is.")
        with st.form(f"silence_{incident.id}", border=False):
            lasts = st.selectbox("For", list(HOURS), index=1, key="silence_for")
            name, why = answering.person_and_why(f"silence_{incident.id}", person)
            sent = st.form_submit_button("Silence it", type="primary", key="silence_send")
        if sent and not answering.lacks("silence", name, why):
            _silence(incident, HOURS[lasts], name, why)


def _silence(incident: Incident, hours: float, name: str, why: str) -> None:
    answer = client.fleet().silence(pb.SilenceAsk(incident=[incident.id], hours=hours, why=why, who=name))
    if answer.value is None:
        view.trouble("silence", answer.trouble, 0, view.viewer())
        return
    st.session_state[SAID] = f"Silenced for {hours:g} h by {' '.join(name.split())}."
    st.rerun()

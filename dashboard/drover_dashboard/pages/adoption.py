"""The form that takes a node into the fleet that reports and is not in the fleet file."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.server import signin
from drover_dashboard.widgets import cluster_choice, refusals, view
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import ADOPT_NODE

KEY = "adopt"
SAID = "adopted"  # of the session: what was done


def form(nodes: Sequence[str]) -> None:
    """For operators: adopt one of these nodes. Until then it is watched, and nothing is done to it."""
    key, said = client.scoped(KEY), client.scoped(SAID)  # of this cluster
    if result := st.session_state.pop(said, None):
        view.notice("adopted", "remark", result)
    person = signin.person()
    if person is None or not person.may_act:
        return
    with st.popover("Adopt a node", icon=":material/add_circle:", key=key):
        st.text("It belongs to the fleet then: it is judged, and the policy applies to it.")
        with st.form(f"{key}_form", border=False):
            node = st.selectbox("Node", nodes, key=f"{key}_node")
            places = [st.text_input(word, key=f"{key}_{word}", max_chars=100) for word in ("Rack", "Leaf", "Pool")]
            name, why = answering.person_and_why(key, person)
            sent = st.form_submit_button(cluster_choice.inside("Adopt it"), type="primary", key=f"{key}_send")
        refusals.keep(key, sent)
        if not sent or answering.lacks(key, name, why):
            return
        rack, leaf, pool = places
        request = pb.AdoptRequest(node=node, rack=rack, leaf=leaf, pool=pool, why=why, who=name)
        answer = client.fleet().act(ADOPT_NODE, request)
        if answer.value is None:
            refusals.fail(key, answer.trouble)
            return
        st.session_state[said] = f"{cluster_choice.inside(answer.value.detail)}."
        st.rerun()

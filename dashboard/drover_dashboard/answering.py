"""A person's yes or no to decisions that wait for one, with who and why."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from drover_dashboard import client, view
from drover_proto.events import Decision


def ask(waiting: Sequence[Decision]) -> None:
    """A form for each decision that waits; nothing when none does. Only for those who may answer."""
    told = st.session_state.pop("answered", None)
    if told:
        view.notice("answered", "remark", told)
    for decision in waiting:
        what = "" if decision.node else "Go on with this mass event? "
        with st.form(f"answer_{decision.id}", border=True):
            view.notice(f"asks_{decision.id}", "remark", f"Waits for a person: {what}{decision.reason}")
            left, right = st.columns([1, 2])
            who = left.text_input("Your name", key=f"who_{decision.id}", max_chars=80)
            why = right.text_input("Why", key=f"why_{decision.id}", max_chars=500)
            yes = no = st.container(horizontal=True)  # columns cut the words where the form is narrow
            approved = yes.form_submit_button("Approve", type="primary", key=f"yes_{decision.id}")
            rejected = no.form_submit_button("Reject", key=f"no_{decision.id}")
        if approved or rejected:
            _answer(decision, who, why, approved)


def _answer(decision: Decision, who: str, why: str, approved: bool) -> None:
    if not who.strip() or not why.strip():
        view.notice(f"lacks_{decision.id}", "trouble", "Give your name and the reason: both are kept with the answer.")
        return
    answer = client.fleet().answer(decision.id, why, who, approved)
    if answer.trouble is not None:
        view.trouble(f"answer_{decision.id}", answer.trouble, 0, view.viewer())
        return
    st.session_state["answered"] = f"{'Approved' if approved else 'Rejected'} by {' '.join(who.split())}."
    st.rerun()

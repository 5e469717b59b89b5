"""A person's yes or no to decisions that wait for one, with who and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from drover_core.model.events import WANTED_ORDER, Decision, RecommendedAction
from drover_dashboard import client
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import cluster_choice, refusals, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.components import component

MY_NAME = "my_name"  # of the session: who nobody signs in gives a name once, not in each form

FROM_BROWSER = "name_from_browser"  # of the session: what it remembered

TAKING = (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)  # they take the node from its jobs
JOBS = 3  # named in the form
NAME_CHARS = 80
INSTEAD = "Alternatives: reject it, and {node} stays in service; or test it first, with Probe on its page."


def strongest_first(waiting: Sequence[Decision]) -> list[Decision]:
    """Of equals the one that waits longest."""
    return sorted(waiting, key=lambda d: (-WANTED_ORDER.index(d.wanted), d.ts_ms, d.id))


def ask(waiting: Sequence[Decision], about: Mapping[str, str] | None = None) -> None:
    """A form for each decision that waits; nothing when none does. Only for those who may answer. `about`: what is
    wrong, by incident, on a page that has all of them: there a form has the page's width, and takes two lines."""
    person = signin.person()
    if person is None or not person.may_act:
        if waiting:
            view.notice("viewer", "remark", "An operator is to answer what waits here; you may look.")
        return
    answer = st.session_state.pop(client.scoped("answered"), None)
    if answer:
        view.notice("answered", "remark", answer)
    for decision in waiting:
        what = "" if decision.node else "Go on with this mass event? "
        with st.form(client.scoped(f"answer_{decision.id}"), border=True):
            if decision.node:  # what is approved, before why
                view.notice(f"asked_{decision.id}", "wish", fmt.capital(cluster_choice.inside(decision.what)))
            wrong = (about or {}).get(decision.incident_id, "")
            asked = f"{wrong}\n" if wrong else cluster_choice.inside("Waits for a person") + ": "
            view.notice(f"asks_{decision.id}", "remark", view.viewer().localize(f"{asked}{what}{decision.reason}"))
            if about is not None and decision.incident_id:
                link = {"id": decision.incident_id, "state": "all"}
                st.page_link(view.INCIDENTS, label="Its incident", icon=":material/arrow_forward:", query_params=link)
            _before(decision)
            fields, below = (st.container(), st.container()) if about is None else _side_by_side()
            with fields:
                who, why = person_and_why(client.scoped(decision.id), person)
            yes = no = below.container(horizontal=True)  # columns cut the words where the form is narrow
            approved = yes.form_submit_button("Approve", type="primary", key=client.scoped(f"yes_{decision.id}"))
            rejected = no.form_submit_button("Reject", key=client.scoped(f"no_{decision.id}"))
        refusals.keep(decision.id, approved or rejected)
        if approved or rejected:
            _answer(decision, who, why, approved)


def _before(decision: Decision) -> None:
    """What the act would meet, as the form of a person's own drain says it: who works there, and the guard's word."""
    if not decision.node or decision.wanted not in TAKING or decision.gpu is not None:  # of a GPU its node works on
        return
    look = client.fleet().preview_drain(decision.node).value
    if look is None:
        return
    jobs = ", ".join(f"{job.job} ({job.gpus_here} of its {job.gpus} GPUs)" for job in look.jobs[:JOBS])
    more = f" and {len(look.jobs) - JOBS} more" if len(look.jobs) > JOBS else ""
    calm = [f"Jobs on {decision.node}: {jobs}{more}." if jobs else f"No job runs on {decision.node}."]
    if look.hindrance:
        view.notice(f"hindrance_{decision.id}", "trouble", f"It cannot be done now: {look.hindrance}.")
    if look.maintenance:
        calm.append(f"Planned work there: {look.maintenance}.")
    if look.guard:
        view.notice(f"guard_{decision.id}", "trouble", f"The guard would hold a drain back: {look.guard}.")
    else:
        calm.append("The guard has nothing against it.")
    calm.append(INSTEAD.format(node=decision.node))
    view.notice(f"jobs_{decision.id}", "remark", "\n".join(calm))


def _side_by_side() -> tuple[Any, Any]:
    fields, buttons = st.columns([4, 1], vertical_alignment="bottom")
    return fields, buttons


def person_and_why(key: str, person: Person) -> tuple[str, str]:
    """Fields of a form: the name, where nobody asked for it before, and the reason."""
    if person.name:
        # The name as the field's placeholder: a label is Markdown, and read aloud with the signs that keep it plain.
        return person.name, st.text_input("Why", key=f"why_{key}", max_chars=500, placeholder=f"as {person.name}")
    fill_name(f"who_{key}")
    left, right = st.columns([1, 2])
    who = left.text_input("Your name", key=f"who_{key}", max_chars=NAME_CHARS)
    return who, right.text_input("Why", key=f"why_{key}", max_chars=500)


@st.fragment
def remember_name() -> None:
    """Carry the name between the forms and the browser, which remembers it; once on a page, where nobody signs in."""
    known = st.session_state.get(MY_NAME, "")
    shown = component("remembered")(key="remembered", data={"name": known}, on_name_change=lambda: None)
    name = " ".join((shown.name or "").split())[:NAME_CHARS]
    if name and name != st.session_state.get(FROM_BROWSER):
        st.session_state[FROM_BROWSER] = st.session_state[MY_NAME] = name


def fill_name(key: str) -> None:
    """Before the field of a name is drawn: fill it with the name that was given in another form."""
    if MY_NAME in st.session_state and not st.session_state.get(key):
        st.session_state[key] = st.session_state[MY_NAME]


def lacks(key: str, who: str, why: str) -> bool:
    """Whether one of them is not given; then it is said. `key`: of the form, which draws `refusals.keep`."""
    if who.strip() and why.strip():
        st.session_state[MY_NAME] = " ".join(who.split())
        return False
    refusals.refuse(key, "Give your name and the reason: both are kept with the answer.")
    return True


def _answer(decision: Decision, who: str, why: str, approved: bool) -> None:
    if lacks(decision.id, who, why):
        return
    answer = client.fleet().answer(decision.id, why, who, approved)
    if answer.trouble is not None:
        refusals.fail(decision.id, answer.trouble)
        return
    said = "Approved" if approved else "Rejected"
    wish = decision.what if decision.node else "to go on with the mass event"
    st.session_state[client.scoped("answered")] = f"{said} by {' '.join(who.split())}: {cluster_choice.inside(wish)}."
    st.rerun()

"""What a person does to a node: drain, resume, probe. Before it, what the guard would say and which jobs run there."""

from __future__ import annotations

import streamlit as st

from drover_core.model.probe_figures import LEVELS
from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import cluster_choice, refusals, view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import ACT_ON_NODE, REQUEST_PROBE

SAID, OPEN = "acted", "act_form"  # of the session: what was done; (node, act) whose form is open
WORDS = {
    "drain": "No new job gets the node; what runs there may end.",
    "resume": "The node gets jobs again.",
    "probe": "Micro-benchmarks, on GPUs that no process holds.",
}
NO_FORCE = " This console's certificate acts within the guard; past it acts an admin's: `drover drain --force`."


def buttons(node: str) -> None:
    """For operators; a press opens the form below, another press closes it."""
    result = st.session_state.pop(client.scoped(SAID), None)
    if result:
        view.notice("acted", "remark", result)
    person = signin.person()
    if person is None or not person.may_act:
        return
    kept = client.scoped(OPEN)  # the form of another cluster's node of this name stays closed
    open_ = st.session_state.get(kept)
    with st.container(horizontal=True, key="node_acts"):
        for act in WORDS:
            if st.button(f"{act.capitalize()} ...", key=client.scoped(f"act_{act}")):
                open_ = st.session_state[kept] = None if open_ == (node, act) else (node, act)
    if open_ is not None and open_[0] == node:
        with st.container(border=True, key="node_act"):
            _form(node, open_[1], person)


def _form(node: str, act: str, person: Person) -> None:
    who = view.viewer()
    view.notice("act_what", "summary", cluster_choice.inside(f"{act.capitalize()} {node}"))
    st.text(WORDS[act])
    answer = client.fleet().preview(node, "drain" if act == "probe" else act)
    if answer.value is None:
        view.trouble(f"preview_{act}", answer.trouble, 0, who)
        return
    look = answer.value
    _jobs(look)
    if not look.may_act:
        view.notice("no_operator", "trouble", "This console's own certificate is a viewer's: it may not act.")
        return
    if act != "probe" and look.hindrance:
        view.notice("hindrance", "trouble", f"It cannot be done: {look.hindrance}.")
        return
    held = bool(look.guard) and act == "drain"
    if held:
        view.notice(
            "guard", "trouble", f"The guard would hold it back: {look.guard}.{NO_FORCE if look.no_force else ''}"
        )
        if look.no_force:
            return
    elif act == "drain":
        view.notice("guard", "remark", "The guard has nothing against it.")
    if act == "resume":
        safe(look, who)
    if look.maintenance:
        view.notice("maintenance", "remark", f"Drover itself does nothing there: {look.maintenance}.")
    with st.form(client.scoped(f"form_{act}"), border=False):
        name, why = answering.person_and_why(client.scoped(act), person)
        level = st.selectbox("Level", list(LEVELS), key=client.scoped("level")) if act == "probe" else ""
        force = False
        if held:
            force = st.checkbox("Do it although the guard holds it back", key=client.scoped("force"))
        if act == "resume":
            at_once = bool(look.validates) and not look.no_force
            force = at_once and st.checkbox("At once, without probes", key=client.scoped("force"))
        label = cluster_choice.inside(f"{act.capitalize()} {node}")
        sent = st.form_submit_button(label, type="primary", key=client.scoped(f"send_{act}"))
    key = f"{act}_{node}"
    refusals.keep(key, sent)
    if not sent or answering.lacks(key, name, why):
        return
    if held and not force:
        refusals.refuse(key, "The guard holds it back: say that it is to be done all the same, or leave it.")
        return
    _do(node, act, name, why, level, force)


def safe(look: pb.ActPreview, who: view.Viewer, key: str = "form") -> None:
    """Is it safe to give it back, and how does anybody know. `key`: of the place on the page."""
    if not look.grounds:
        return  # it serves, or an older collector does not say
    verdict = "Nothing proves that it is safe to give back."
    if look.HasField("safe"):
        verdict = "It is safe to give back, by all that is known." if look.safe else "It is not safe to give back."
    gate = (
        f"It has to pass its {look.validates} probes first." if look.validates else "It gets jobs at once: no probes."
    )
    kind = "todo" if look.HasField("safe") and look.safe else "trouble"
    view.notice(f"safe_{key}", kind, "\n".join([f"{verdict} {gate}", *(who.localize(text) for text in look.grounds)]))


def _jobs(look: pb.ActPreview) -> None:
    rows = [
        Row((Cell(job.job, kind="strong"), Cell(str(job.gpus_here)), Cell(f"{job.gpus} on {job.nodes} nodes")))
        for job in look.jobs
    ]
    columns = (Column("Jobs that run there", wrap=True), Column("GPUs here", "right"), Column("GPUs in all", "right"))
    table("jobs_there", columns, rows, empty="No job runs there.", link_column=-1)


def _do(node: str, act: str, name: str, why: str, level: str, force: bool) -> None:
    if act == "probe":
        asked = client.fleet().act(REQUEST_PROBE, pb.ProbeAsk(node=node, level=level, why=why, who=name))
        done = asked.value is not None
        result = f"Probes of {cluster_choice.inside(node)} were asked for; the Probes page says what becomes of them."
        trouble = asked.trouble
    else:
        answer = client.fleet().act(ACT_ON_NODE, pb.ActRequest(node=node, act=act, why=why, force=force, who=name))
        done, trouble = answer.value is not None, answer.trouble
        reply = answer.value or pb.ActReply()
        state = {"intended": "under way", "": "not yet"}.get(reply.state, reply.state)
        said = f"{state}{f': {reply.detail}' if reply.detail else ''}"
        result = f"{act.capitalize()} {cluster_choice.inside(node)}: {said} (by {name.strip()})."
    if not done:
        refusals.fail(f"{act}_{node}", trouble)
        return
    st.session_state[client.scoped(SAID)], st.session_state[client.scoped(OPEN)] = result, None
    st.rerun()

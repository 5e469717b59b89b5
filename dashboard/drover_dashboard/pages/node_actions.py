"""What a person does to a node, or to one GPU of it: drain, resume, probe.

Before it, what the guard would say and which jobs run there.
"""

from __future__ import annotations

from dataclasses import dataclass

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
GPU = "drain_gpu"
WORDS = {
    "drain": "No new job gets the node; what runs there may end.",
    GPU: "No new job gets this GPU; the node's others stay in service.",
    "resume": "The node, or the GPU, gets jobs again. A drain that still waits for its jobs is withdrawn.",
    "probe": "Micro-benchmarks, on GPUs that no process holds.",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What is acted on. `uuid` of the board that a person sees in `gpu`; None and "": the node."""

    node: str
    gpu: int | None = None
    uuid: str = ""

    @property
    def name(self) -> str:
        return cluster_choice.inside(self.node if self.gpu is None else f"GPU {self.gpu} of {self.node}")

    def request(self, act: str) -> pb.ActRequest:
        return pb.ActRequest(node=self.node, act="drain" if act == GPU else act, gpu=self.gpu, gpu_uuid=self.uuid)


SAVE_S = 300  # as `drover drain --save-first`
SAVE_FIRST = f"Ask its jobs to save themselves first, and wait up to {SAVE_S // 60} min for them"
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
            if st.button(f"{_word(act)} ...", key=client.scoped(f"act_{act}")):
                open_ = st.session_state[kept] = None if open_ == (node, act) else (node, act)
    if open_ is not None and open_[0] == node:
        with st.container(border=True, key="node_act"):
            _form(node, open_[1], person)


def _form(node: str, act: str, person: Person) -> None:
    who = view.viewer()
    target = _target(node, act)
    if target is None:
        return
    view.notice("act_what", "summary", f"{_word(act, target)} {target.name}")
    st.text(WORDS[act])
    answer = client.fleet().preview(target.request("drain" if act == "probe" else act))
    if answer.value is None:
        view.trouble(f"preview_{act}", answer.trouble, 0, who)
        return
    look = answer.value
    if not _may_go_on(act, look):
        return
    held = _is_held(act, look)
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
        save = act == "drain" and st.checkbox(SAVE_FIRST, key=client.scoped("save_first"))
        if act == "resume":
            at_once = bool(look.validates) and not look.no_force
            force = at_once and st.checkbox("At once, without probes", key=client.scoped("force"))
        label = f"{_word(act, target)} {target.name}"
        sent = st.form_submit_button(label, type="primary", key=client.scoped(f"send_{act}"))
    key = f"{act}_{node}"
    refusals.keep(key, sent)
    if not sent or answering.lacks(key, name, why):
        return
    if held and not force:
        refusals.refuse(key, "The guard holds it back: say that it is to be done all the same, or leave it.")
        return
    if act == "probe":
        _probe(node, name, why, level)
    else:
        asked = target.request(act)
        asked.why, asked.who, asked.force, asked.save_s = why, name, force, SAVE_S if save else 0
        _act(asked, f"{_word(act, target)} {target.name}", key)


def _is_held(act: str, look: pb.ActPreview) -> bool:
    return bool(look.guard) and act in ("drain", GPU)


def _may_go_on(act: str, look: pb.ActPreview) -> bool:
    """Show what stands against an act. Return whether a person may fill in the form."""
    _jobs(look)
    if not look.may_act:
        view.notice("no_operator", "trouble", "This console's own certificate is a viewer's: it may not act.")
        return False
    if act != "probe" and look.hindrance:
        view.notice("hindrance", "trouble", f"It cannot be done: {look.hindrance}.")
        return False
    if _is_held(act, look):
        more = NO_FORCE if look.no_force else ""
        view.notice("guard", "trouble", f"The guard would hold it back: {look.guard}.{more}")
        return not look.no_force
    if act in ("drain", GPU):
        view.notice("guard", "remark", "\n".join(["The guard has nothing against it.", *look.grounds]))
    return True


def _word(act: str, target: Target | None = None) -> str:
    """Return what a button says of an act. `target`: its name follows, so the GPU is not named twice."""
    if act == GPU:
        return "Drain GPU" if target is None else "Drain"
    return act.capitalize()


def _target(node: str, act: str) -> Target | None:
    """Return what is to be acted on, as the person chooses; None: there is nothing to choose from."""
    if act == GPU:
        detail = client.fleet().node(node).value
        known = [] if detail is None else [item for item in detail.gpus if item.uuid]
        if not known:
            view.notice("no_gpus", "trouble", "No GPU of it can be named: the node has not reported their UUIDs.")
            return None
        asked = st.query_params.get("gpu", "")
        at = next((i for i, item in enumerate(known) if str(item.gpu) == asked), None)
        found = [Target(node, item.gpu, item.uuid) for item in known]
        return _choose(found, at, act)
    if act == "resume":
        done = client.fleet().actions(node, 1).value
        alone = [] if done is None else [Target(node, line.gpu, line.uuid) for line in done.gpus]
        if alone:
            return _choose([Target(node), *alone], None, act)
    return Target(node)


def _choose(targets: list[Target], at: int | None, act: str) -> Target | None:
    label = "Which GPU" if act == GPU else "What"
    names = [each.name if each.gpu is None else f"{each.name}: {each.uuid}" for each in targets]
    chosen = st.selectbox(label, names, index=at, key=client.scoped(f"target_{act}"), placeholder="Choose one")
    return None if chosen is None else targets[names.index(chosen)]


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


def _probe(node: str, name: str, why: str, level: str) -> None:
    asked = client.fleet().act(REQUEST_PROBE, pb.ProbeAsk(node=node, level=level, why=why, who=name))
    result = f"Probes of {cluster_choice.inside(node)} were asked for; the Probes page says what becomes of them."
    _end(f"probe_{node}", result if asked.value is not None else "", asked.trouble)


def _act(asked: pb.ActRequest, what: str, key: str) -> None:
    answer = client.fleet().act(ACT_ON_NODE, asked)
    reply = answer.value or pb.ActReply()
    state = {"intended": "under way", "": "not yet"}.get(reply.state, reply.state)
    said = f"{state}{f': {reply.detail}' if reply.detail else ''}"
    result = f"{what}: {said} (by {asked.who.strip()})."
    _end(key, result if answer.value is not None else "", answer.trouble)


def _end(key: str, result: str, trouble: client.Trouble | None) -> None:
    """Close the form `key` and show the result; "": show the trouble."""
    if not result:
        refusals.fail(key, trouble)
        return
    st.session_state[client.scoped(SAID)], st.session_state[client.scoped(OPEN)] = result, None
    st.rerun()

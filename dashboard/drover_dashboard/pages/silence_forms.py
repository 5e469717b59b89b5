"""Silences: made and ended on the page of an incident, listed and ended on the System page, with who and why."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from drover_core.model.events import Incident, Silence, from_json
from drover_core.model.silences import describe_scope
from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.server import signin
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import refusals, view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import CREATE_SILENCE, END_SILENCE

HOURS = {"1 hour": 1.0, "4 hours": 4.0, "1 day": 24.0, "3 days": 72.0}
MAKE, END = "silence", "end_silence"  # popovers
CLOSE = "silence_close"  # of the session: state of widgets in the next run
DONE = "silence_done"  # of the session: what was done, and to which incident
WIDER = "This silence also covers other incidents: {covers}. All of them are notified again."
LIST_PX, FIT = 260, 6


def words(note: pb.SilenceNote, who: view.Viewer) -> str:
    """`silenced until 23:30 by alex`."""
    return f"silenced until {fmt.minute(note.until_ms, who.where, who.now_ms)} by {note.by}"


def mark(note: pb.SilenceNote | None, who: view.Viewer) -> Mark | None:
    """The words behind an incident in a list; None for one that is not silenced."""
    return None if note is None else Mark(words(note, who), "muted")


def button(incident: Incident, note: pb.SilenceNote | None) -> None:
    """For operators, while the incident is open: silence it, or end its silence."""
    close_done()
    person = signin.person()
    if incident.closed_ms is not None or person is None or not person.may_act:
        return
    if note is not None:
        with st.popover(
            "End silence", icon=":material/notifications_active:", key=client.scoped(END), on_change="rerun"
        ):
            st.text("Notifications of this incident go out again." if note.alone else WIDER.format(covers=note.covers))
            if note.maintenance:
                st.text("It is a maintenance window: Drover may act on its nodes again, too.")
            key = client.scoped(f"{END}_{incident.id}")
            with st.form(key, border=False):
                name, why = answering.person_and_why(key, person)
                sent = st.form_submit_button("End it", type="primary", key=client.scoped("end_silence_send"))
            refusals.keep(key, sent)
            if sent and not answering.lacks(key, name, why) and end(note.id, name, why, key):
                _done(END, incident.id, f"Silence ended by {' '.join(name.split())}.")
        return
    with st.popover("Silence", icon=":material/notifications_off:", key=client.scoped(MAKE), on_change="rerun"):
        st.text("Mutes notifications only. The incident stays open and the policy still applies.")
        key = client.scoped(f"{MAKE}_{incident.id}")
        with st.form(key, border=False):
            lasts = st.selectbox("For", list(HOURS), index=1, key=client.scoped("silence_for"))
            name, why = answering.person_and_why(key, person)
            sent = st.form_submit_button("Silence it", type="primary", key=client.scoped("silence_send"))
        refusals.keep(key, sent)
        if sent and not answering.lacks(key, name, why):
            _silence(incident, HOURS[lasts], name, why, key)


def done(incident: Incident) -> None:
    """What was done last, for as long as this incident is looked at."""
    of, text = st.session_state.get(client.scoped(DONE), ("", ""))
    if text and of == incident.id:
        view.notice("silenced", "remark", text)


def _silence(incident: Incident, hours: float, name: str, why: str, key: str) -> None:
    answer = client.fleet().act(CREATE_SILENCE, pb.SilenceAsk(incident=[incident.id], hours=hours, why=why, who=name))
    if answer.value is None:
        refusals.fail(key, answer.trouble)
        return
    _done(MAKE, incident.id, f"Silenced for {hours:g} h by {' '.join(name.split())}.")


def end(silence_id: str, name: str, why: str, key: str) -> bool:
    """End a silence; where that fails, say why. `key`: of the form."""
    answer = client.fleet().act(END_SILENCE, pb.SilenceEnd(id=silence_id, why=why, who=name))
    if answer.value is None:
        refusals.fail(key, answer.trouble)
    return answer.value is not None


def _done(popover: str, incident: str, text: str) -> None:
    """Close the form, empty it, and say what was done for as long as the incident is looked at."""
    st.session_state[client.scoped(DONE)] = incident, text
    why = client.scoped(f"{popover}_{incident}")
    st.session_state[client.scoped(CLOSE)] = {client.scoped(popover): False, f"why_{why}": ""}
    st.rerun()


def close_done() -> None:
    """Before they are drawn: set the popover and the fields of what was done."""
    for key, value in st.session_state.pop(client.scoped(CLOSE), {}).items():
        st.session_state[key] = value


def listing(who: view.Viewer) -> None:
    """Silences and maintenance windows that are in force or to come, and a form to end one."""
    close_done()
    answer = client.fleet().silences()
    if answer.value is None:
        view.notice("silences_unknown", "remark", "Silences are not known while the collector does not answer.")
        return
    found = [from_json(Silence, text) for text in answer.value.silences_json]
    columns = (Column("Silences", wrap=True), Column("Until"), Column("By, why", wrap=True))
    empty = "No silence and no maintenance window is in force or to come."
    table("silences", columns, rows(found, who), empty=empty, height=LIST_PX if len(found) > FIT else None)
    with view.place():
        if answer.value.may_change and found:
            ending(found, who)


def rows(found: Sequence[Silence], who: view.Viewer) -> list[Row]:
    """Pure."""
    return [
        Row(
            (
                Cell(
                    describe_scope(silence),
                    sub="maintenance: Drover acts on none of it" if silence.maintenance else "notifications only",
                ),
                Cell(who.clock(silence.until_ms), sub=_when(silence, who)),
                Cell(silence.by, sub=silence.why),
            )
        )
        for silence in found
    ]


def _when(silence: Silence, who: view.Viewer) -> str:
    if silence.from_ms > who.now_ms:
        return f"from {who.clock(silence.from_ms)}"
    return f"{fmt.duration(silence.until_ms - who.now_ms)} left"


def ending(found: Sequence[Silence], who: view.Viewer) -> None:
    person = signin.person()
    if person is None or not person.may_act:
        return
    named = {silence.id: silence for silence in found}
    with st.popover(
        "End a silence", icon=":material/notifications_active:", key=client.scoped("end_any"), on_change="rerun"
    ):
        with st.form(client.scoped("end_any_form"), border=False):
            chosen = st.selectbox(
                "Which", list(named), key=client.scoped("end_which"),
                format_func=lambda id_: _label(named[id_], who),
            )  # fmt: skip
            name, why = answering.person_and_why(client.scoped("end_any"), person)
            sent = st.form_submit_button("End it", type="primary", key=client.scoped("end_any_send"))
        shut = client.scoped("end_any")
        refusals.keep(shut, sent)
        if sent and not answering.lacks(shut, name, why) and end(chosen, name, why, shut):
            st.session_state[client.scoped(CLOSE)] = {shut: False, f"why_{shut}": ""}
            st.rerun()


def _label(silence: Silence, who: view.Viewer) -> str:
    """With its id: two of the same place and end would be one choice, and the wrong one would end."""
    what = "window" if silence.maintenance else "silence"
    return f"{describe_scope(silence)}, {what} until {who.clock(silence.until_ms)} ({silence.id})"

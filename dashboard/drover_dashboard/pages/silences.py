"""Whose notifications are held back, and where people work: until when, by whom and why; make one, end one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import streamlit as st

from drover_core.model.events import Silence, from_json
from drover_core.model.silences import describe_scope
from drover_dashboard import client
from drover_dashboard.pages import incident_rows, silence_new
from drover_dashboard.pages import silence_forms as forms
from drover_dashboard.server import signin
from drover_dashboard.widgets import address, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import Cell, Column, Row, table

EVERY_S = 5
ENDED_DAYS = 7.0
STATES = ("now and to come", "ended too")
COLUMNS = (Column("Of", wrap=True), Column("State"), Column("By, why", wrap=True))  # they fit on a phone


def rows(found: Sequence[Silence], who: view.Viewer, titles: Mapping[str, str] = MappingProxyType({})) -> list[Row]:
    """Pure. `titles`: of incidents, by id."""
    return [
        Row(
            (
                Cell(describe_scope(silence), sub=_named(silence, titles)),
                _state(silence, who),
                Cell(silence.by, sub=silence.why),
            ),
            tone="" if silence.until_ms > who.now_ms else "muted",
        )
        for silence in found
    ]


def _named(silence: Silence, titles: Mapping[str, str]) -> str:
    """What its ids mean."""
    named = [titles[one] for one in silence.incident if one in titles]
    return " · ".join([*named, *([f"planned work {silence.event}"] if silence.event else [])])


def _state(silence: Silence, who: view.Viewer) -> Cell:
    """In force, to come or over, with its time."""
    begins, ends = (fmt.minute(ts_ms, who.where, who.now_ms) for ts_ms in (silence.from_ms, silence.until_ms))
    times = f"{begins} to {ends}"
    if silence.ended_by:
        return Cell("ended early", sub=f"{times}, by {silence.ended_by}", kind="faint")
    if silence.until_ms <= who.now_ms:
        return Cell("over", sub=times, kind="faint")
    if silence.from_ms > who.now_ms:
        return Cell("to come", badge="plain", sub=f"{times}, in {fmt.duration(silence.from_ms - who.now_ms)}")
    return Cell("in force", badge="muted", sub=f"{times}, {fmt.duration(silence.until_ms - who.now_ms)} left")


@st.fragment(run_every=EVERY_S)
def show(ended: bool) -> None:
    who = view.viewer()
    forms.close_done()
    answer = client.fleet().silences(ENDED_DAYS if ended else 0.0)
    view.trouble("silences", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    found = [from_json(Silence, text) for text in answer.value.silences_json]
    person = signin.person()
    with st.container(horizontal=True):
        if answer.value.may_change and person is not None and person.may_act:
            silence_new.form(person, who)
            if current := [silence for silence in found if silence.until_ms > who.now_ms]:
                forms.ending(current, who)
    silence_new.done()
    titles = incident_rows.titles() if any(silence.incident for silence in found) else {}
    past = f" of the last {ENDED_DAYS:g} days" if ended else " is in force or to come"
    view.heading("Silences")
    view.notice("silences_what", "remark", "Mute notifications only: incidents stay open and the policy still applies.")
    table("silences", COLUMNS, rows([s for s in found if not s.maintenance], who, titles), empty=f"No silence{past}.")
    view.heading("Maintenance windows")
    view.notice("windows_what", "remark", "Mute notifications, and Drover does nothing to these nodes by itself.")
    table("windows", COLUMNS, rows([s for s in found if s.maintenance], who), empty=f"No maintenance window{past}.")


address.title("Silences")
show(
    address.segments(
        "state", "State", STATES, STATES[0], key="silences_state", label_visibility="collapsed",
    ) == STATES[1]
)  # fmt: skip

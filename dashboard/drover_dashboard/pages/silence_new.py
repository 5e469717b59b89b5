"""A form for a silence or a maintenance window of a place: as `drover silence` with its options."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import streamlit as st

from drover_core.model.events import IncidentKind
from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.pages.silence_forms import CLOSE, HOURS
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import refusals, view
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import CREATE_SILENCE

PLACES = ("node", "rack", "leaf", "pool")
EVERYWHERE = "everywhere"
MADE = "silence_made"  # of the session: what was made
NEW = "silence_new"
FAR_MS = 366 * 86_400_000  # a begin that is farther away is a slip of the keyboard
TIME = "2026-11-28 23:00"  # as an example


def done() -> None:
    """What was made last, until the page is drawn again for another reason."""
    made = st.session_state.pop(client.scoped(MADE), None)
    with view.place():
        if made:
            view.notice("silence_made", "remark", made)


def form(person: Person, who: view.Viewer) -> None:
    """For operators."""
    key = client.scoped(NEW)
    with st.popover("New silence or window", icon=":material/notifications_off:", key=key, on_change="rerun"):
        with st.form(f"form_{key}", border=False):
            place = st.selectbox("Where", [*PLACES, EVERYWHERE], key=f"place_{key}")
            names = st.text_input("Names", key=f"names_{key}", max_chars=2000, placeholder="r01n03 r01n04")
            kinds = st.multiselect("Kinds of incident", list(map(str, IncidentKind)), key=f"kinds_{key}",
                                   placeholder="all")  # fmt: skip
            lasts = st.selectbox("For", list(HOURS), index=1, key=f"for_{key}")
            begins = st.text_input(f"Begins ({who.zone_name()})", key=f"from_{key}", placeholder=f"now, or {TIME}")
            held = st.checkbox("Maintenance window: Drover does nothing to these nodes either", key=f"held_{key}")
            name, why = answering.person_and_why(key, person)
            sent = st.form_submit_button("Make it", type="primary", key=f"send_{key}")
        refusals.keep(key, sent)
        if not sent or answering.lacks(key, name, why):
            return
        chosen = {"place": place, "names": names.replace(",", " ").split(), "kinds": kinds, "held": held}
        request = ask(chosen, HOURS[lasts], begins, who)
        if isinstance(request, str):
            refusals.refuse(key, request)
            return
        request.who, request.why = name, why
        _send(request, key, name)


def ask(chosen: Mapping[str, Any], hours: float, begins: str, who: view.Viewer) -> pb.SilenceAsk | str:
    """Return what is asked for, or what is wrong with it. Pure."""
    everywhere = chosen["place"] == EVERYWHERE
    if not everywhere and not chosen["names"]:
        return f"Name at least one {chosen['place']}."
    if everywhere and not chosen["kinds"]:
        return "Everywhere needs at least one kind of incident: a silence of all hides the fleet."
    request = pb.SilenceAsk(hours=hours, kind=chosen["kinds"], maintenance=chosen["held"])
    if not everywhere:
        getattr(request, chosen["place"]).extend(chosen["names"])
    if begins.strip():
        try:
            moment = datetime.fromisoformat(begins.strip())
            moment = moment if moment.tzinfo else moment.replace(tzinfo=who.where)
            from_ms = round(moment.timestamp() * 1000)
        except (ValueError, OverflowError):
            return f"{begins.strip()!r} is no time: write it as {TIME}."
        if abs(from_ms - who.now_ms) > FAR_MS:
            return f"{begins.strip()!r} is more than a year away: check the year."
        request.from_ms = from_ms
    return request


def _send(request: pb.SilenceAsk, key: str, name: str) -> None:
    answer = client.fleet().act(CREATE_SILENCE, request)
    if answer.value is None:
        refusals.fail(key, answer.trouble)
        return
    what = "Maintenance window" if request.maintenance else "Silence"
    covers = fmt.several(answer.value.covers, "open incident")
    st.session_state[client.scoped(MADE)] = f"{what} made by {' '.join(name.split())}; it covers {covers} now."
    st.session_state[client.scoped(CLOSE)] = {key: False, f"why_{key}": "", f"names_{key}": "", f"from_{key}": ""}
    st.rerun()

"""Who handles an incident: acknowledge it, hand it over, note what is known. Each note is kept with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urljoin, urlsplit

import streamlit as st

from drover_core.model.events import Audit, Incident
from drover_core.model.incident_notes import OUTCOME_WORDS, IncidentOutcome, NoteAct
from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import refusals, view
from drover_dashboard.widgets.table import Cell, Column, Mark, Row, table
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import NOTE_INCIDENT

CLOSE, DONE = "note_close", "note_done"  # of the session: widgets' state in the next run; what was noted, and where
POPOVER = "note"
UNSAID = "not_said"
SHOWN_TICKETS = 5
TICKET_CHARS = 40


@dataclass(frozen=True, slots=True)
class Note:
    """One note to store. `said`: how it is said when it is stored. `field`: the key of the widget that holds it."""

    act: NoteAct
    said: str
    text: str = ""
    value: str = ""
    field: str = ""


Kind = Literal["primary", "secondary"]
ACKNOWLEDGED: tuple[Note, str, Kind, str] = (
    Note(NoteAct.ACKNOWLEDGE, "acknowledged"), "Acknowledge", "primary",
    "Receivers stop paging again until it gets worse or comes back.",
)  # fmt: skip
UNACKNOWLEDGED: tuple[Note, str, Kind, str] = (
    Note(NoteAct.UNACKNOWLEDGE, "acknowledgement taken back"), "Unacknowledge", "secondary", "Receivers page again.",
)  # fmt: skip


def words(handling: pb.IncidentHandling | None, *, short: bool = False) -> str:
    """`acknowledged by alex, assigned to bo`; empty where nobody handles it. `short`: without the certificate."""
    if handling is None:
        return ""
    by = handling.acknowledged_by.partition(" (")[0] if short else handling.acknowledged_by
    parts = [f"acknowledged by {by}"] if by else []
    return ", ".join([*parts, *([f"assigned to {handling.assignee}"] if handling.assignee else [])])


def mark(handling: pb.IncidentHandling | None, silenced: Mark | None) -> Mark | None:
    """The words behind an incident in a list, with those of its silence."""
    parts = [words(handling, short=True), silenced.text if silenced else ""]
    return Mark(" · ".join(part for part in parts if part), "muted") if any(parts) else None


def outcome(word: str) -> str:
    return OUTCOME_WORDS[IncidentOutcome(word)] if word in list(IncidentOutcome) else word.replace("_", " ")


def rows(incident: Incident, handling: pb.IncidentHandling | None, who: view.Viewer) -> list[Row]:
    """Who handles it, its tickets and outcome, as facts of the incident."""
    known = handling or pb.IncidentHandling()
    found = []
    if known.acknowledged_by or known.assignee:
        sub = f"acknowledged {who.clock(known.acknowledged_ms)}" if known.acknowledged_by else "nobody acknowledged it"
        found.append(Row((Cell("Handled", kind="faint"), Cell(words(known), badge="muted", sub=sub))))
    elif incident.closed_ms is None:
        found.append(Row((Cell("Handled", kind="faint"), Cell("by nobody: not acknowledged, not assigned"))))
    if known.tickets:
        found.append(Row((Cell("Tickets", kind="faint"), Cell(", ".join(known.tickets[-SHOWN_TICKETS:])))))
    if known.outcome:
        said = f"{outcome(known.outcome)}, said {known.outcome_by}"
        found.append(Row((Cell("Outcome", kind="faint"), Cell(said))))
    return found


def comments(lines: Sequence[Audit], who: view.Viewer) -> None:
    """What people wrote about it, the newest first; nothing where nobody did."""
    found = sorted((a for a in lines if a.what == NoteAct.COMMENT), key=lambda a: -a.ts_ms)
    with view.place():
        if found:
            shown = [Row((Cell(who.clock(a.ts_ms), sub=a.by, kind="faint"), Cell(a.why, kind="prose"))) for a in found]
            table("comments", (Column("Comments"), Column(wrap=True)), shown, empty="")


def buttons(incident: Incident, handling: pb.IncidentHandling | None) -> None:
    """For operators: acknowledge, and a form that hands over and notes."""
    for key, value in st.session_state.pop(client.scoped(CLOSE), {}).items():
        st.session_state[key] = value
    person = signin.person()
    if person is None or not person.may_act:
        return
    if incident.closed_ms is None:
        _acknowledge(incident, handling, person)
    key = client.scoped(f"{POPOVER}_{incident.id}")
    with st.popover("Assign, note", icon=":material/edit_note:", key=client.scoped(POPOVER), on_change="rerun"):
        _form(incident, handling, person, key)


def done(incident: Incident) -> None:
    """What was noted last, for as long as this incident is looked at."""
    of, text = st.session_state.get(client.scoped(DONE), ("", ""))
    if text and of == incident.id:
        view.notice("noted", "remark", text)


def _acknowledge(incident: Incident, handling: pb.IncidentHandling | None, person: Person) -> None:
    """One press where the name is known; else it is asked for first."""
    name = person.name or st.session_state.get(answering.MY_NAME, "")
    held = handling is not None and bool(handling.acknowledged_by)
    note, label, kind, what = UNACKNOWLEDGED if held else ACKNOWLEDGED
    key = client.scoped(f"{note.act}_{incident.id}")
    if name:
        pressed = st.button(label, icon=":material/check:", type=kind, key=key, help=what)
        refusals.keep(key, pressed)
        if pressed:
            _store(incident, [note], name, key)
        return
    popover = client.scoped(f"popover_{note.act}")
    with st.popover(label, icon=":material/check:", type=kind, key=popover, on_change="rerun"):
        st.text(what)
        with st.form(f"form_{key}", border=False):
            given = st.text_input("Your name", key=f"who_{key}", max_chars=answering.NAME_CHARS)
            sent = st.form_submit_button(f"{label} it", type="primary", key=f"send_{key}")
        refusals.keep(key, sent)
        if sent and _named(given, key):
            _store(incident, [note], given, key, popover)


def _named(name: str, key: str) -> bool:
    if name.strip():
        st.session_state[answering.MY_NAME] = " ".join(name.split())
        return True
    refusals.refuse(key, "Give your name: it is kept with the note.")
    return False


def _form(incident: Incident, handling: pb.IncidentHandling | None, person: Person, key: str) -> None:
    now = handling.assignee if handling is not None else ""
    with st.form(f"form_{key}", border=False):
        name = person.name
        if not name:
            answering.fill_name(f"who_{key}")
            name = st.text_input("Your name", key=f"who_{key}", max_chars=answering.NAME_CHARS)
        assignee = st.text_input(
            "Assign to", key=f"assign_{key}", max_chars=answering.NAME_CHARS, placeholder=now or "nobody so far"
        )
        ticket = st.text_input("Ticket", key=f"ticket_{key}", max_chars=300, placeholder="its address or number")
        choices = [UNSAID, *map(str, IncidentOutcome)]
        said = st.selectbox("It was", choices, key=f"outcome_{key}", format_func=outcome)
        text = st.text_area("Comment", key=f"text_{key}", max_chars=2000, height=120)
        sent = st.form_submit_button("Save", type="primary", key=f"send_{key}")
    refusals.keep(key, sent)
    if not sent or not _named(name, key):
        return
    wanted = [
        Note(NoteAct.ASSIGN, f"assigned to {assignee.strip()}", value=assignee, field=f"assign_{key}"),
        Note(NoteAct.TICKET, "ticket linked", value=ticket, field=f"ticket_{key}"),
        Note(NoteAct.OUTCOME, f"it was {outcome(said)}", value="" if said == UNSAID else said, field=f"outcome_{key}"),
        Note(NoteAct.COMMENT, "comment stored", text=text, field=f"text_{key}"),
    ]
    notes = [each for each in wanted if (each.text + each.value).strip()]
    if not notes:
        refusals.refuse(key, "Fill in at least one field.")
        return
    _store(incident, notes, name, key, client.scoped(POPOVER))


def _store(incident: Incident, notes: Sequence[Note], name: str, key: str, popover: str = "") -> None:
    """Store notes, close the popover, and draw the page again. Of what is not stored the field stays filled, and the
    form `key` says why."""
    after: dict[str, object] = {}
    st.session_state[client.scoped(CLOSE)] = after
    for each in notes:
        request = pb.IncidentNoteAsk(id=incident.id, act=each.act, text=each.text, value=each.value, who=name)
        answer = client.fleet().act(NOTE_INCIDENT, request)
        if answer.value is None:
            refusals.fail(key, answer.trouble)
            return
        if each.field:
            after[each.field] = UNSAID if each.act is NoteAct.OUTCOME else ""
    if popover:
        after[popover] = False
    said = fmt.capital(", ".join(each.said for each in notes))
    st.session_state[client.scoped(DONE)] = incident.id, f"{said} by {' '.join(name.split())}."
    st.rerun()


def links(handling: pb.IncidentHandling | None) -> None:
    """A button for each ticket that is an address."""
    for ticket in list(handling.tickets if handling is not None else ())[-SHOWN_TICKETS:]:
        if ticket.startswith(("https://", "http://")):
            st.link_button(
                fmt.plain(ticket_label(ticket)), ticket, icon=":material/open_in_new:", help=fmt.plain(ticket)
            )


def ticket_label(ticket: str) -> str:
    """Return what a ticket's button says: the end of its address and whose it is. `OPS-4711 (tickets.example.com)`."""
    try:
        host = urlsplit(ticket).hostname or ""
    except ValueError:  # people write it
        host = ""
    end = ticket.rstrip("/").rpartition("/")[2][:TICKET_CHARS]
    return f"{end} ({host})" if host and end != host else end or "Ticket"


def share(incident: Incident, title: str, state: str, who: view.Viewer) -> None:
    """The link of this incident, and a text for a chat; each has a button that copies it."""
    path = view.href(view.INCIDENTS, id=incident.id, state="all")
    link = urljoin(st.context.url or "", path)
    with st.popover("Share", icon=":material/share:", key=client.scoped("share")):
        st.text("Link")
        st.code(link, language=None, wrap_lines=True)
        st.text("For a chat")
        lines = (
            f"{incident.severity.upper()}: {title}, {state}", who.localize(incident.summary),
            f"What to do: {who.localize(incident.advice)}", link,
        )  # fmt: skip
        st.code("\n".join(lines), language=None, wrap_lines=True)

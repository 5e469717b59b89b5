"""What helps with an incident: its run book, and earlier incidents like it with what was done for them."""

from __future__ import annotations

import functools
import re

import streamlit as st

from drover_core.model.events import Incident, IncidentKind
from drover_core.model.runbooks import PLACES, runbook_path
from drover_dashboard import client
from drover_dashboard.pages import incident_handling as handling
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import Cell, Column, Row, table
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import LIST_SIMILAR

SAME = {"gpu": "here", "node": "this node", "cause": ""}


@functools.cache
def run_book(kind: IncidentKind) -> str:
    """Return the page of a kind of incident as Markdown that stands alone; "": there is none.

    Its own title goes, its headings are small, and links to other pages are their words.
    """
    page = next((path for place in PLACES if (path := place / f"{kind}.md").is_file()), None)
    if page is None:
        return ""
    text = re.sub(r"\A# .*\n", "", page.read_text("utf-8"))
    text = re.sub(r"(?m)^#+ (.*)$", r"**\1**", text)
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).strip()


def show_run_book(incident: Incident) -> None:
    text = run_book(incident.kind)
    with st.expander(f"Run book: {incident.kind}", icon=":material/menu_book:"):
        if text:
            st.markdown(text)
        else:
            st.text(f"This installation lacks {runbook_path(incident.kind)}.")


def show_similar(incident: Incident, who: view.Viewer) -> None:
    answer = client.fleet().ask(LIST_SIMILAR, pb.SimilarRequest(id=incident.id))
    if answer.value is None:
        view.trouble("similar", answer.trouble, 0, who)
        return
    found = answer.value
    days = round((who.now_ms - found.since_ms) / 86_400_000)
    columns = (
        Column("Like this before", wrap=True),
        Column("What was done", wrap=True),
        Column("Since then", wrap=True),
    )
    clicked = table(
        "similar", columns, [_row(each, who) for each in found.incidents],
        empty=f"No earlier incident of this cause in {fmt.several(days, 'day')}.",
    )  # fmt: skip
    if found.total > len(found.incidents):
        view.notice("similar_more", "remark", f"{found.total - len(found.incidents)} more in the last {days} days.")
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})


def _row(each: pb.SimilarIncident, who: view.Viewer) -> Row:
    place = fmt.member(each.node or None, each.gpu if each.HasField("gpu") else None)
    lasted = f"{who.clock(each.since_ms)}, lasted {fmt.duration(each.closed_ms - each.since_ms)}"
    near = SAME.get(each.same, "")
    if each.again_ms:
        since = Cell(f"came back after {fmt.duration(each.again_ms - each.closed_ms)}", kind="strong")
    else:
        since = Cell(f"not again in {fmt.duration(who.now_ms - each.closed_ms)}")
    done = Cell("; ".join(each.done)) if each.done else Cell("no action by Drover", kind="faint")
    if each.outcome:
        done = Cell(done.text, kind=done.kind, sub=f"it was {handling.outcome(each.outcome)}")
    return Row(
        (Cell(f"{place}{f' ({near})' if near else ''}", sub=lasted), done, since),
        id=each.id, href=view.href(view.INCIDENTS, id=each.id, state="all"),
    )  # fmt: skip

"""Who did what, when and why: people, and Drover itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import streamlit as st

from drover_core.model.events import Audit, from_json
from drover_core.times import iso
from drover_dashboard import client
from drover_dashboard.pages import incident_rows
from drover_dashboard.widgets import address, csv_file, view
from drover_dashboard.widgets.table import Cell, Column, Row, table
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import LIST_AUDIT

EVERY_S = 10
MOST = 500  # lines
WHO = ("people", "Drover too")
SINCE = {"1d": "last 24 hours", "7d": "last 7 days", "30d": "last 30 days", "90d": "last 90 days"}
COLUMNS = (Column("When, who"), Column("What, about", wrap=True), Column("Why", wrap=True))  # they fit on a phone
HEADERS = ("time", "who", "what", "about", "why", "detail")
INCIDENT = re.compile(r"[0-9a-f]{16}")


def rows(
    found: Sequence[Audit], nodes: frozenset[str], who: view.Viewer, titles: Mapping[str, str] = MappingProxyType({})
) -> list[Row]:
    """Pure. `nodes`: of the fleet, for links. `titles`: of incidents, by id."""
    return [
        Row(
            (
                Cell(who.clock(a.ts_ms), sub=a.by),
                Cell(a.what, sub=_about(a, who, titles), title=a.subject if a.subject in titles else ""),
                Cell(who.localize(a.why), kind="prose"),
            ),
            id=a.subject if _opens(a, nodes) else "",
            href=_href(a, nodes),
        )
        for a in found
    ]


def _about(line: Audit, who: view.Viewer, titles: Mapping[str, str]) -> str:
    detail = who.localize(line.detail).removeprefix(f"incident {line.subject} ")  # a silence says again what it is of
    return " · ".join(part for part in (titles.get(line.subject, line.subject), detail) if part)


def _opens(line: Audit, nodes: frozenset[str]) -> bool:
    return line.subject in nodes or bool(INCIDENT.fullmatch(line.subject))


def _href(line: Audit, nodes: frozenset[str]) -> str:
    if line.subject in nodes:
        return view.href(view.NODE, node=line.subject)
    return view.href(view.INCIDENTS, id=line.subject, state="all") if _opens(line, nodes) else ""


def _fits(line: Audit, text: str) -> bool:
    return (
        text.casefold() in "\n".join((line.by, line.what, line.subject, line.why, line.detail, line.state)).casefold()
    )


def _csv(found: Sequence[Audit]) -> str:
    return csv_file.csv_text(HEADERS, [(iso(a.ts_ms), a.by, a.what, a.subject, a.why, a.detail) for a in found])


@st.fragment(run_every=EVERY_S)
def show(whole: bool, since: str, about: str, text: str) -> None:
    who = view.viewer()
    since_ms = who.now_ms - int(since.removesuffix("d")) * 86_400_000
    request = pb.AuditRequest(since_ms=since_ms, whole=whole, subject=about, limit=MOST)
    answer = client.fleet().ask(LIST_AUDIT, request, (since, whole, about))
    view.trouble("audit", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    lines = [from_json(Audit, each) for each in answer.value.audit_json]
    found = [line for line in lines if _fits(line, text)] if text else lines
    with view.place():
        if len(lines) >= MOST:
            view.notice("audit_cut", "remark", f"Only the newest {MOST} lines are looked at: choose less time.")
    nodes = frozenset(view.racks())
    empty = "Nothing that fits the filter." if about or text else "Nobody did anything in this time."
    csv_file.button("audit_csv", "audit", partial(_csv, found))
    shown = rows(found, nodes, who, incident_rows.titles())
    clicked = table("audit", COLUMNS, shown, empty=empty, link_column=1)
    if clicked in nodes:
        st.switch_page(view.NODE, query_params={"node": clicked})
    elif clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})


address.title("Audit")
with st.container(horizontal=True, vertical_alignment="center"):
    by = address.segments("by", "Who", WHO, WHO[0], key="audit_by", label_visibility="collapsed")
    since = address.select(
        "since", "Since", list(SINCE), "7d", key="audit_since", format_func=SINCE.__getitem__, width=160
    )
    with st.popover("Filter", icon=":material/filter_list:", key="audit_filter"):
        about = address.text("about", "About", key="audit_about", placeholder="a node, an incident's id", max_chars=100)
        text = address.text("text", "Text", key="audit_text", placeholder="a name, a word", max_chars=100)
show(by == WHO[1], since, about, text)

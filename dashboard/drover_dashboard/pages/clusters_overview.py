"""All clusters on one page: a strip for each, the open incidents of all, the worst first. The frame's search looks in
all of them."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from drover_core.model.collector_roles import why_unjudged
from drover_dashboard import clusters
from drover_dashboard.clusters import ClusterIncident, Clusters
from drover_dashboard.pages import incident_rows
from drover_dashboard.widgets import address, cluster_choice, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import Cell, Column, Mark, Row, table

COLUMNS = (Column("Cluster"), *incident_rows.COLUMNS)
SHOWN = 200  # open incidents; more is work for a cluster's own page
LIST_PX = 560
PAGES = {page.stem: page for page in view.ALL_PAGES}


def show(found: Clusters) -> None:
    """The Fleet page of all clusters."""
    address.title("All clusters")
    opened = cluster_choice.strips("")
    if opened:
        st.switch_page(view.FLEET, query_params={cluster_choice.NAME: opened})
    _incidents(found)


def choose(page: str) -> None:
    """Instead of a page whose address names no cluster, or one that there is not: the clusters to choose from."""
    address.title("Which cluster")
    asked = st.query_params.get(cluster_choice.NAME)
    unknown = f"There is no cluster {asked!r} here. " if asked else ""
    view.notice("which_cluster", "trouble" if asked else "summary", f"{unknown}Choose the cluster to look at.")
    kept = {key: value for key, value in st.query_params.to_dict().items() if key != cluster_choice.NAME}
    opened = cluster_choice.strips(page, **kept)
    if opened:
        st.switch_page(PAGES.get(page, view.FLEET), query_params=kept | {cluster_choice.NAME: opened})


# ---- incidents


@st.fragment(run_every=view.ALERT_S)
def _incidents(found: Clusters) -> None:
    who = view.viewer()
    received, now_ms = found.received(), clusters.now_ms()
    answers = [one for one in received if one.incidents.value is not None]
    old = {one.name for one in received if not one.incidents_fresh(now_ms)}
    lists = {
        one.name: (incident_rows.parse(one.incidents.value), one.incidents.value)
        for one in answers
        if one.incidents.value is not None
    }
    every = clusters.merged(lists, old)
    total = sum(one.incidents.value.total for one in answers if one.incidents.value is not None)
    with view.place():
        if silent := [one.name for one in received if one.name in old]:
            view.notice("not_of_now", "trouble", _not_of_now(silent, [name for name in silent if name not in lists]))
    empty = "No open incident in the clusters that answer." if old else "No open incident."
    if unjudged := [
        f"{one.name} ({'no answer' if one.status.value is None else why_unjudged(one.status.value.role)})"
        for one in answers
        if one.status.value is None or not one.status.value.newest_tick_ms
    ]:
        empty = f"What is open is not known in {', '.join(unjudged)}."
    clicked = table(
        "all_incidents", COLUMNS, rows(every[:SHOWN], who), empty=empty, link_column=2,
        height=LIST_PX if len(every) > 8 else None,
    )  # fmt: skip
    if total > len(every[:SHOWN]):
        shown, of = fmt.number(len(every[:SHOWN])), fmt.number(total)
        view.notice(
            "more_open", "remark", f"The worst {shown} of {of} open incidents; each cluster's own page has all."
        )
    if clicked:
        cluster, _, incident = clicked.partition("/")
        st.switch_page(view.INCIDENTS, query_params={cluster_choice.NAME: cluster, "id": incident})


def _not_of_now(silent: Sequence[str], never: Sequence[str]) -> str:
    verb = "does" if len(silent) == 1 else "do"
    text = f"{', '.join(silent)} {verb} not answer: what is open there now is not known."
    last = [name for name in silent if name not in never]
    return f"{text} Their last known incidents are grey below." if last else text


def rows(found: Sequence[ClusterIncident], who: view.Viewer) -> list[Row]:
    """Pure."""
    made = []
    for one in found:
        silences = {one.incident.id: one.silence} if one.silence is not None else {}
        handled = {one.incident.id: one.handling} if one.handling is not None else {}
        (row,) = incident_rows.rows([one.incident], {}, who, silences, handled)
        mark = Mark("last known", "muted") if one.old else None
        params = {cluster_choice.NAME: one.cluster, "id": one.incident.id}
        made.append(
            Row(
                (Cell(one.cluster, kind="strong", mark=mark), *row.cells),
                id=f"{one.cluster}/{one.incident.id}",
                href=view.href(view.INCIDENTS, **params),
                tone="muted" if one.old else row.tone,
            )
        )
    return made

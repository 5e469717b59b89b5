"""All clusters on one page: a strip for each, a search over all, the open incidents of all, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from drover_core.model.events import Incident
from drover_dashboard import clusters
from drover_dashboard.client import Answer, FleetClient
from drover_dashboard.clusters import ClusterIncident, Clusters
from drover_dashboard.pages import incident_rows
from drover_dashboard.widgets import address, cluster_choice, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import Cell, Column, Mark, Row, table
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

COLUMNS = (Column("Cluster"), *incident_rows.COLUMNS)
FOUND_COLUMNS = (Column("Cluster"), Column("Found"), Column("What", wrap=True))
SHOWN = 200  # open incidents; more is work for a cluster's own page
LIST_PX = 560
FIND_CHARS = 80
PAGES = {page.stem: page for page in view.ALL_PAGES}


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that a search found; `page` and `params` lead to it."""

    cluster: str
    name: str
    what: str
    page: str
    params: tuple[tuple[str, str], ...]


def show(found: Clusters) -> None:
    """The Fleet page of all clusters."""
    address.title("All clusters")
    opened = cluster_choice.strips("")
    if opened:
        st.switch_page(view.FLEET, query_params={cluster_choice.NAME: opened})
    _search(found)
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


# ---- search


def _search(found: Clusters) -> None:
    """By a part of the name of a node or job, or of the words of an incident that is open."""
    text = st.text_input(
        "Search all clusters", key="find_text", max_chars=FIND_CHARS, label_visibility="collapsed", width=420,
        placeholder="search all clusters: node, job, incident, XID", icon=":material/search:",
    ).strip()  # fmt: skip
    if not text:
        return
    who = view.viewer()
    answers = found.ask_all(lambda client: _of_cluster(client, text))
    hits = [hit for of in answers.values() if of is not None for hit in of]
    lists = {one.name: one.incidents.value for one in found.received() if one.incidents.value is not None}
    hits += _of_incidents({name: incident_rows.parse(reply) for name, reply in lists.items()}, text, who)
    unanswered = [name for name, of in answers.items() if of is None or name not in lists]
    with view.place():
        if unanswered:
            view.notice("unsearched", "trouble", f"Not searched, no answer: {', '.join(unanswered)}.")
    empty = f"Nothing with {text!r} in the clusters that answered."
    lines = [_hit_row(number, hit) for number, hit in enumerate(hits)]
    clicked = table("found", FOUND_COLUMNS, lines, empty=empty, link_column=1, height=300 if len(hits) > 7 else None)
    if clicked:
        hit = hits[int(clicked)]
        st.switch_page(PAGES[hit.page], query_params=dict(hit.params))


def _of_cluster(client: FleetClient, text: str) -> list[Hit] | None:
    """Nodes and jobs of one cluster; None: its collector did not answer."""
    nodes = client.ask(methods.LIST_NODES, pb.ListNodesRequest(contains=text, limit=clusters.FOUND))
    jobs: Answer[pb.JobList] = client.jobs(ended=True, contains=text)
    if nodes.value is None or jobs.value is None or nodes.trouble is not None or jobs.trouble is not None:
        return None
    name = client.cluster
    of = (cluster_choice.NAME, name)
    found = [Hit(name, node.name, _node_words(node), "node", (of, ("node", node.name))) for node in nodes.value.nodes]
    for job in jobs.value.jobs[: clusters.FOUND]:
        what = f"job on {fmt.several(job.gpus, 'GPU')} of {fmt.several(job.nodes, 'node')}"
        found.append(Hit(name, job.job, what, "job", (of, ("job", job.job))))
    return found


def _node_words(node: pb.NodeRow) -> str:
    rack = f", rack {node.rack}" if node.rack else ""
    return f"node, {node.health}{rack}{f': {node.reason}' if node.reason else ''}"


def _of_incidents(found: dict[str, list[Incident]], text: str, who: view.Viewer) -> list[Hit]:
    """Open incidents whose words, place, job, cause or id have the text."""
    wanted, hits = text.casefold(), []
    for name, incidents in found.items():
        for one in incidents:
            said = who.localize(one.summary)
            words = f"{one.id} {said} {fmt.cause(one.cause)} {one.node or ''} {one.job or ''}"
            if wanted in words.casefold():
                of = ((cluster_choice.NAME, name), ("id", one.id))
                hits.append(Hit(name, fmt.where(one, {}), f"incident, {one.severity}: {said}", "incidents", of))
    return hits[: clusters.FOUND]


def _hit_row(number: int, hit: Hit) -> Row:
    cells = (Cell(hit.cluster, kind="strong"), Cell(hit.name), Cell(hit.what))
    return Row(cells, id=str(number), href=view.href(PAGES[hit.page], **dict(hit.params)))

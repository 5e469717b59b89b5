"""One incident in full: the first screen says what, where, since when and what to do; proof and history follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import streamlit as st

from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Audit,
    Decision,
    Event,
    Evidence,
    Incident,
    IncidentKind,
    from_json,
)
from drover_core.model.incident_title import incident_title
from drover_core.model.reports import event_text
from drover_dashboard import client
from drover_dashboard.pages import approval_form as answering
from drover_dashboard.pages import incident_handling as handling
from drover_dashboard.pages import incident_past
from drover_dashboard.pages import silence_forms as silencing
from drover_dashboard.widgets import address, charts, grafana, moment, strip, time_range, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.fleet_picture import STATE_UNITS
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.incident_timeline import build_timeline

Link = tuple[Path, dict[str, str]]  # a page and its parameters
PLACES = ("Leaf", "Rack")
SHOWN_CHARTS = 4  # so that the sentences of the evidence are on the first screen too
SHOWN_TARGETS = 8
LEAST_PAD_MS, MOST_PAD_MS = 5 * 60_000, 2 * 3_600_000  # what a chart shows before the onset and after the end
POINTS = 600
PLAYED_BEFORE_MS = 10 * 60_000
OWN_TIME = "the incident's time"


def show(incident_id: str) -> None:
    """Draw the incident `incident_id`."""
    who = view.viewer()
    answer = client.fleet().incident(incident_id)
    if answer.value is None:
        view.trouble("incident", answer.trouble, answer.as_of_ms, who)
        return  # an old answer stays on the screen: the list next to it says that the collector is away
    detail = answer.value
    incident = from_json(Incident, detail.incident_json)
    decisions = [from_json(Decision, text) for text in detail.decisions_json]
    audit = [from_json(Audit, text) for text in detail.audit_json]
    address.title(f"{fmt.capital(fmt.cause(incident.cause))} {incident.node or fmt.where(incident, {})}")
    _head(incident, detail, decisions, who)
    handling.comments(audit, who)
    _evidence(incident, who)
    if not moment.at_ms():  # others like it, and whether it came back, are of now
        incident_past.show_similar(incident, who)
    _history(detail, who)


def _head(incident: Incident, detail: pb.IncidentDetail, decisions: Sequence[Decision], who: view.Viewer) -> None:
    title = incident_title(incident, view.racks())
    with st.container(key="incident_title"):
        view.heading(title)
    handled = detail.handling if detail.HasField("handling") else None
    note = detail.silence if detail.HasField("silence") else None
    with st.container(horizontal=True, key="incident_acts"):
        if not moment.at_ms():
            handling.buttons(incident, handled)
            silencing.button(incident, note)
        handling.share(incident, title, _state(incident, who), who)
        if incident.node is not None and st.button(f"Open {incident.node}", icon=":material/dns:"):
            slot = {} if incident.gpu is None else {"gpu": str(incident.gpu)}
            st.switch_page(view.NODE, query_params={"node": incident.node, **slot})
        if st.button("Play on the map", icon=":material/play_circle:"):
            st.switch_page(view.FLEET, query_params=_play(incident, who))
        handling.links(handled)
        _grafana(incident, who)
    if not moment.at_ms():
        handling.done(incident)
        silencing.done(incident)
    with st.container(key="incident_summary"):
        view.notice("what", "summary", who.localize(incident.summary))
    with st.container(key="reversed_facts"):  # on a phone what to do comes first
        facts, todo = st.columns([1.1, 1], gap="medium")
    with facts:
        links = _links(incident)
        rows = [
            Row((view.severity_cell(incident.severity), Cell(_state(incident, who), kind="strong"))),
            *([_silenced(note, who)] if note is not None else []),
            *handling.rows(incident, handled, who),
            *(_fact(name, cell, links) for name, cell in _facts(incident, detail, who)),
        ]
        clicked = table("facts", (Column(), Column(wrap=True)), rows, empty="", link_column=1)
        if clicked in links:
            st.switch_page(links[clicked][0], query_params=dict(links[clicked][1]))
        incident_past.show_run_book(incident)  # on this side: a form may stand on the other
    with todo:
        view.notice("advice", "todo", who.localize(f"What to do: {fmt.action(incident.action)}\n{incident.advice}"))
        view.notice("policy", "remark", _policy(decisions, who))
        if detail.may_answer:
            answering.ask(waiting(decisions))


def _grafana(incident: Incident, who: view.Viewer) -> None:
    """The board of the nodes that it names, or of its job, around its time."""
    from_ms, to_ms = _time(incident, None, who)
    time = (str(from_ms), "now" if incident.closed_ms is None else str(to_ms))
    job = incident.job or "" if incident.scope == "job" else ""
    nodes = () if job else tuple(dict.fromkeys(node for node, _ in incident.members))
    grafana.button("incident_grafana", time, nodes, job)


def _play(incident: Incident, who: view.Viewer) -> dict[str, str]:
    """Return what the map plays: the incident from shortly before its onset to its end, standing at the onset."""
    from_ms, to_ms = incident.since_ms - PLAYED_BEFORE_MS, min(incident.closed_ms or who.now_ms, who.now_ms)
    return moment.play(from_ms, max(to_ms, incident.since_ms + 60_000), incident.since_ms)


def _silenced(note: pb.SilenceNote, who: view.Viewer) -> Row:
    why = f"{note.why}{'' if note.alone else f' (covers {note.covers})'}"
    return Row((Cell("Notifications", kind="faint"), Cell(silencing.words(note, who), badge="muted", sub=why)))


def _fact(name: str, cell: Cell, links: Mapping[str, Link]) -> Row:
    if name not in links:
        return Row((Cell(name, kind="faint"), cell))
    return Row((Cell(name, kind="faint"), cell), id=name, href=view.href(links[name][0], **links[name][1]))


def _links(incident: Incident) -> dict[str, Link]:
    """Name of a fact -> where it leads: the job, the node, the leaf and rack in which it stands."""
    found: dict[str, Link] = {}
    if incident.job:
        found["Job"] = view.JOB, {"job": incident.job}
    if incident.node is not None:
        found["Where"] = (
            view.NODE,
            {"node": incident.node} | ({} if incident.gpu is None else {"gpu": str(incident.gpu)}),
        )
    rack, leaf = view.place_of(incident.node or next((node for node, _ in incident.members), ""))
    if leaf and incident.kind is IncidentKind.LINK:
        found["Leaf"] = view.FABRIC, {"leaf": leaf}
    if rack and incident.kind is IncidentKind.THERMAL:
        found["Rack"] = view.THERMALS, {"rack": rack}
    return found


def waiting(decisions: Sequence[Decision]) -> list[Decision]:
    """What a person is asked: how the newest decision of each node stands. One before it, for something else that was
    wanted then, no longer waits."""
    newest = {d.node: d for d in sorted(decisions, key=lambda d: d.ts_ms)}
    return [d for d in newest.values() if d.outcome == "pending_approval"]


def _state(incident: Incident, who: view.Viewer) -> str:
    if incident.closed_ms is None:
        return f"open, {who.since(incident.since_ms)}"
    lasted = fmt.duration(incident.closed_ms - incident.since_ms)
    return (
        f"closed {who.clock(incident.closed_ms)}, lasted {lasted} from {who.clock(incident.since_ms)} {who.zone_name()}"
    )


def _facts(incident: Incident, detail: pb.IncidentDetail, who: view.Viewer) -> list[tuple[str, Cell]]:
    lost, waited = fmt.hours(incident.gpu_hours_lost), fmt.hours(incident.gpu_hours_waited)
    reporters = ", ".join(incident.detectors) or "an unnamed detector"
    found = [
        ("Where", Cell(fmt.where(incident, view.racks()))),
        ("Cause", Cell(f"{fmt.kind_and_cause(incident.kind, incident.cause)}, {incident.confidence * 100:.0f} % sure")),
        ("Reported", Cell(f"{who.clock(incident.opened_ms)} by {reporters}")),
        ("Health then" if moment.at_ms() else "Health now", view.health_cell(detail.health or "unknown")),
        ("GPU-hours", Cell(f"lost: {lost}; peers waited: {waited}")),
    ]
    if len(incident.members) > 1:
        found.insert(1, ("Members", Cell(fmt.members(incident.members))))
    if incident.job:
        found.append(("Job", Cell(incident.job)))
    found += [(name, Cell(params[name.lower()])) for name, (_, params) in _links(incident).items() if name in PLACES]
    return found


def _policy(decisions: Sequence[Decision], who: view.Viewer) -> str:
    """What the policy does about it, the newest decision, said plainly."""
    if not decisions:
        return "Policy: no rule applies; Drover does nothing about it."
    newest = max(decisions, key=lambda decision: decision.ts_ms)
    outcome = fmt.OUTCOMES.get(newest.outcome, newest.outcome)
    said = f"Policy, {newest.mode} mode: {newest.what}: {outcome}."
    rule = fmt.rule(newest.rule)
    said += f" Rule {rule}: " if rule == newest.rule else f" {fmt.capital(rule)}: "
    return said + who.localize(newest.reason)


def _evidence(incident: Incident, who: view.Viewer) -> None:
    if not incident.evidence:
        view.notice("evidence", "remark", "This incident carries no measured evidence.")
        return
    drawn: dict[str, Evidence] = {}
    for item in incident.evidence:
        if (metric := catalog.BY_NAME.get(item.metric or "")) and metric.unit not in STATE_UNITS:
            drawn.setdefault(metric.name, item)
    span_ms = time_range.pick(key="incident_time", own=OWN_TIME) if drawn else None
    from_ms, to_ms = charts.window(*_time(incident, span_ms, who))
    if drawn:
        nodes = {node for node, _ in incident.members}
        changed = strip.ask_changes(f"{incident.id} {time_range.named()}", nodes, from_ms, to_ms, who)
        strip.show("incident_strip", [strip.incidents([incident], who), changed], from_ms, to_ms, who)
    columns = st.columns(2, gap="medium")
    for number, name in enumerate(list(drawn)[:SHOWN_CHARTS]):
        with columns[number % 2]:
            _chart(incident, name, (from_ms, to_ms), who)
    rows = [
        Row((Cell(who.localize(fmt.capital(item.text))), Cell(_numbers(item), kind="faint")))
        for item in incident.evidence
    ]
    table("evidence", (Column("Evidence", wrap=True), Column(align="right")), rows, empty="")


def _numbers(item: Evidence) -> str:
    """The figures that do not stand in its sentence."""
    metric = catalog.BY_NAME.get(item.metric or "")
    if metric is None or item.value is None or metric.unit == "us":
        return ""  # time held down: what was judged is its share of the time, which the sentence gives
    text, expected = fmt.value(metric, item.value), None
    if item.expected is not None:
        expected = fmt.value(metric, item.expected)
        text += f", expected {expected}"
    said = item.text.replace("degC", "°C")
    if fmt.value(metric, item.value) in said and (expected is None or expected in said):
        return ""  # the sentence has them
    text = f"{fmt.label(item.metric)}: {text}"
    if item.peers:
        text += f", {item.peers} peers"
    return text


def _time(incident: Incident, span_ms: int | None, who: view.Viewer) -> tuple[int, int]:
    """(from, to) of its charts: the span asked for, else all of the incident and some time around it."""
    if span_ms is not None:
        return who.now_ms - span_ms, who.now_ms
    end_ms = incident.closed_ms or who.now_ms
    pad_ms = min(MOST_PAD_MS, max(LEAST_PAD_MS, (end_ms - incident.since_ms) // 2))
    return incident.since_ms - pad_ms, min(who.now_ms, end_ms + pad_ms)


def _moments(incident: Incident, from_ms: int, to_ms: int) -> list[int]:
    """Its onset and its end; when it was reported, where that is not the same on the screen."""
    found = [incident.since_ms, *([incident.closed_ms] if incident.closed_ms is not None else [])]
    late = incident.opened_ms - incident.since_ms > (to_ms - from_ms) // 50
    return [*found, incident.opened_ms] if late else found


def _chart(incident: Incident, name: str, time: tuple[int, int], who: view.Viewer) -> None:
    metric = catalog.BY_NAME[name]
    from_ms, to_ms = time
    targets = _targets(incident, metric.scope)
    if not targets:
        return  # of a port or workload that the evidence does not name: the sentence below gives the value
    request = pb.SeriesRequest(
        scope=metric.scope,
        targets=targets,
        metrics=[name],
        from_ms=from_ms,
        to_ms=to_ms,
        max_points=POINTS,
        with_peers=metric.scope is Scope.GPU,
    )
    answer = client.fleet().series(request, f"{incident.id} {name} {time_range.named()}")
    if answer.value is None:
        view.trouble(f"chart_{name}", answer.trouble, 0, who)
        return
    lines = charts.lines_of(answer.value, name, frozenset() if len(targets) > 1 else frozenset({incident.gpu or 0}))
    place = f"{incident.node or incident.scope}{'' if incident.gpu is None else f' GPU {incident.gpu}'}"
    peers = charts.banded(metric) and any(line.role == "peers_p90" for line in lines)
    chart = charts.Chart(
        metric,
        charts.times_of(answer.value),
        lines,
        from_ms,
        to_ms,
        _moments(incident, from_ms, to_ms),
        note=f"{place}{'; band: peers p10 to p90' if peers else ''}",
        absent="no value in this time" if charts.nothing_there(lines) else "",
    )
    charts.show(f"evidence_{name}", chart, loads=True)


def _targets(incident: Incident, scope: Scope) -> list[pb.SeriesTarget]:
    """Whose values prove it: the GPU named, else the members' GPUs, else all of the node; nodes for node metrics,
    ports where the evidence is about them."""
    if scope in (Scope.LINK, Scope.WORKLOAD):
        ports = (item.port for item in incident.evidence if item.port)
        node = incident.node
        return [pb.SeriesTarget(node=node, link=port) for port in dict.fromkeys(ports)][:SHOWN_TARGETS] if node else []
    if scope is not Scope.GPU:
        nodes = list(dict.fromkeys([incident.node] if incident.node else [node for node, _ in incident.members]))
        return [pb.SeriesTarget(node=node) for node in nodes[:SHOWN_TARGETS]]
    if incident.node is not None and incident.gpu is not None:
        return [pb.SeriesTarget(node=incident.node, gpu=incident.gpu)]
    gpus = [(node, gpu) for node, gpu in incident.members if gpu is not None]
    if not gpus and incident.node is not None:
        gpus = [(incident.node, slot) for slot in range(_gpu_count(incident.node))]
    return [pb.SeriesTarget(node=node, gpu=gpu) for node, gpu in gpus[:SHOWN_TARGETS]]


def _gpu_count(name: str) -> int:
    layout = client.fleet().layout().value
    return next((n.gpus for rack in layout.racks for n in rack.nodes if n.name == name), 0) if layout else 0


def _source(source: str) -> str:
    return "" if source == "incident" else source


def _history(detail: pb.IncidentDetail, who: view.Viewer) -> None:
    left, right = st.columns(2, gap="medium")
    with left:
        rows = [
            Row(
                (
                    Cell(who.clock(moment.ts_ms), kind="faint"),
                    Cell(who.localize(moment.text), sub=_source(moment.source)),
                )
            )
            for moment in build_timeline(detail)
        ]
        rows += [Row((Cell("Health", kind="faint"), Cell(who.localize(text)))) for text in detail.health_history]
        table("timeline", (Column("Timeline"), Column(wrap=True)), rows, empty="Nothing noted yet.")
        sent = [Row((Cell(who.localize(text)),)) for text in detail.notifications]
        empty = "Nobody was notified: no receiver is set for it in the collector's settings."
        if detail.HasField("silence"):
            muted = f"Nobody is notified: it is {silencing.words(detail.silence, who)}."
            empty = muted
            sent = [Row((Cell(muted, kind="strong"),)), *sent] if sent else []
        table("notifications", (Column("Notifications", wrap=True),), sent, empty=empty)
    with right:
        events = [from_json(Event, text) for text in detail.events_json]
        table(
            "events",
            (Column("Log lines"), Column(), Column(wrap=True)),
            event_rows(events, who),
            empty="No log line around its time.",
        )


def event_rows(events: Sequence[Event], who: view.Viewer) -> list[Row]:
    """Events as they were reported, newest first."""
    return [
        Row(
            (
                Cell(who.clock(event.ts_ms), sub="clock suspect" if event.clock_suspect else "", kind="faint"),
                Cell(fmt.event(event.kind, event.code), sub=fmt.member(event.node, event.gpu)),
                Cell(
                    event_text(event.kind, event.message) + (f"  ({event.count} times)" if event.count > 1 else ""),
                    sub=_doubt(event),
                    kind="mono",
                ),
            )
        )
        for event in events
    ]


def _doubt(event: Event) -> str:
    remarks = [event.source] if event.source else []
    if event.backlog:
        remarks.append("history: not acted on")
    if event.forgeable:
        remarks.append("a place that any user can write; never acted on")
    return ", ".join(remarks)

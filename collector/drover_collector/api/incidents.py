"""Incidents and events: the lists, and one incident with all that is known about it."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any

from drover_collector.api.handling import handling_message, handlings
from drover_collector.api.snapshot import (
    DAY_MS,
    ApiSnapshot,
    bad_argument,
    not_found,
    worst_first,
)
from drover_collector.notify import describe
from drover_core.model.events import (
    SEVERITY_ORDER,
    Event,
    Incident,
    IncidentKind,
    NodeOutage,
    ProbeOrder,
    ProbeVerdict,
    Severity,
    Silence,
    to_json,
)
from drover_core.model.incident_notes import NOBODY, Handling
from drover_core.model.incident_title import incident_title
from drover_core.model.silences import describe_author, describe_scope
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

INCIDENTS_LIMIT = 500
INCIDENTS_MAX = 10_000
EVENTS_LIMIT = 500
EVENTS_MAX = 10_000
AROUND_EVENTS = 200
AROUND_NODES = 20  # of a large incident; the first ones show what happened
BEFORE_MS = 600_000
AFTER_MS = 60_000
FAR_MS = 2**62
SILENCED = ("", "no", "only")
SORTS: Mapping[str, Callable[[Incident], Any]] = {
    "worst": worst_first,
    "newest": lambda i: (-i.opened_ms, i.id),
    "oldest": lambda i: (i.opened_ms, i.id),
    "longest": lambda i: (i.closed_ms is not None, i.since_ms - (i.closed_ms or 0), i.id),  # open ones first
    "lost": lambda i: (-(i.gpu_hours_lost or 0.0) - (i.gpu_hours_waited or 0.0), i.id),
}
COVERS_CHARS = 200  # a silence may name 1,000 nodes, and a list 10,000 incidents
NAMED = 5  # ids in a message about an ambiguous one


def list_incidents(facts: ApiSnapshot, request: pb.ListIncidentsRequest) -> pb.IncidentList:
    state = request.state or "open"
    if state not in ("open", "closed", "all"):
        raise bad_argument(f"state {state!r}: give open, closed or all")
    if request.min_severity and request.min_severity not in list(Severity):
        raise bad_argument(f"min_severity {request.min_severity!r}: give one of {', '.join(Severity)}")
    if request.silenced not in SILENCED:
        raise bad_argument(f"silenced {request.silenced!r}: give no or only, or nothing for both")
    if request.acknowledged not in SILENCED:
        raise bad_argument(f"acknowledged {request.acknowledged!r}: give no or only, or nothing for both")
    if request.kind and request.kind not in list(IncidentKind):
        raise bad_argument(f"kind {request.kind[:80]!r}: give one of {', '.join(IncidentKind)}")
    if request.sort and request.sort not in SORTS:
        raise bad_argument(f"sort {request.sort[:80]!r}: give one of {', '.join(SORTS)}")
    if request.node:
        facts.node_number(request.node)
    handled = handlings(facts)
    known = facts.open_incidents() if state == "open" else facts.incidents(request.since_ms)
    found = sorted(
        (
            i for i in known
            if (state != "closed" or i.closed_ms is not None)
            and _wanted(facts, i, request, handled.get(i.id, NOBODY))
        ),
        key=SORTS[request.sort or "worst"],
    )  # fmt: skip
    shown = found[: min(request.limit or INCIDENTS_LIMIT, INCIDENTS_MAX)]
    silent = {i.id: silence for i in shown if (silence := _silence_of(facts, i)) is not None}
    return pb.IncidentList(
        incidents_json=[to_json(i) for i in shown],
        total=len(found),
        silenced={id_: _silenced(silence) for id_, silence in silent.items()},
        silences={id_: _note(silence, id_) for id_, silence in silent.items()},
        handling={i.id: handling_message(handled[i.id], i) for i in shown if i.id in handled},
    )


def _wanted(facts: ApiSnapshot, incident: Incident, request: pb.ListIncidentsRequest, handling: Handling) -> bool:
    least = SEVERITY_ORDER.index(Severity(request.min_severity or "info"))
    nodes = {node for node, _ in incident.members}
    places = facts.index.spec.by_name
    return (
        SEVERITY_ORDER.index(incident.severity) >= least
        and (not request.kind or incident.kind == request.kind)
        and (not request.job or incident.job == request.job)
        and (not request.node or request.node in nodes)
        and (not request.rack or any(n in places and places[n].rack == request.rack for n in nodes))
        and (not request.assignee or handling.assignee == request.assignee)
        and (not request.text or request.text.casefold() in _words(incident, handling))
        and (not request.silenced or (_silence_of(facts, incident) is not None) == (request.silenced == "only"))
        and (not request.acknowledged or handling.holds(incident) == (request.acknowledged == "only"))
    )


def _words(incident: Incident, handling: Handling) -> str:
    """Return all that a filter by text looks at."""
    parts = (
        incident_title(incident), incident.summary, incident.id, incident.cause, incident.job or "",
        *(node for node, _ in incident.members), handling.assignee, *handling.tickets,
    )  # fmt: skip
    return "\n".join(parts).casefold()


def get_incident(facts: ApiSnapshot, request: pb.IncidentRequest, may_answer: bool = False) -> pb.IncidentDetail:
    incident = find_incident(facts, request.id)
    store = facts.store
    node, gpu = incident.members[0] if incident.members else (incident.node, incident.gpu)
    health = ""
    if node in facts.index.node_number:
        health = str(facts.health_of(node, gpu)[0])
    upto_ms = facts.now_ms() if facts.is_past else FAR_MS
    rows = sorted(store.outbox.of_incidents(incident.id), key=lambda r: r.created_ms)
    silence = _silence_of(facts, incident)
    handling = handlings(facts).get(incident.id)
    return pb.IncidentDetail(
        incident_json=to_json(incident),
        decisions_json=[to_json(d) for d in store.decisions.of_incident(incident.id) if d.ts_ms <= upto_ms],
        events_json=[to_json(e) for e in _events_around(facts, incident)],
        notifications=[] if facts.is_past else [describe(row) for row in rows],
        health=health,
        health_history=_health_history(facts, incident),
        actions_json=[to_json(a) for a in store.actions.newest(incident=incident.id) if a.ts_ms <= upto_ms],
        duties_json=[to_json(d) for d in _duties(facts, incident) if d.ts_ms <= upto_ms],
        audit_json=[to_json(a) for a in store.audit.read(subject=incident.id) if a.ts_ms <= upto_ms],
        probe_orders_json=[to_json(o) for o in _orders(facts, incident) if o.ts_ms <= upto_ms],
        probe_verdicts_json=[to_json(v) for v in _verdicts(facts, incident) if v.ts_ms <= upto_ms],
        may_answer=may_answer and not facts.is_past,
        silenced="" if silence is None else _silenced(silence),
        silence=None if silence is None else _note(silence, incident.id),
        handling=None if handling is None else handling_message(handling, incident),
    )


def _silence_of(facts: ApiSnapshot, incident: Incident) -> Silence | None:
    """The silence that holds back the notifications of an open incident."""
    if incident.closed_ms is not None or facts.is_past:  # silences are of now
        return None
    return facts.pipeline.outbox.silences.of(incident, facts.now_ms())


def _silenced(silence: Silence) -> str:
    """`silenced by anna until 2026-11-22T06:00:00Z: firmware`."""
    return f"silenced {describe_author(silence)}"


def _note(silence: Silence, incident_id: str) -> pb.SilenceNote:
    return pb.SilenceNote(
        id=silence.id, by=silence.by, until_ms=silence.until_ms, why=silence.why, maintenance=silence.maintenance,
        covers=describe_scope(silence)[:COVERS_CHARS], alone=silence.incident == (incident_id,),
    )  # fmt: skip


def _duties(facts: ApiSnapshot, incident: Incident) -> list[NodeOutage]:
    """How its node went out of service and came back, for this incident, or stayed out because of it."""
    if incident.node is None:
        return []
    found = facts.store.outages.history(incident.node, incident.opened_ms)
    return [duty for duty in found if incident.id in (duty.incident_id, *duty.incidents)]


def _orders(facts: ApiSnapshot, incident: Incident) -> list[ProbeOrder]:
    if incident.node is None:
        return []
    orders = facts.store.probes.orders.newest(node=incident.node, since_ms=incident.opened_ms)
    return [order for order in orders if order.incident_id == incident.id]


def _verdicts(facts: ApiSnapshot, incident: Incident) -> list[ProbeVerdict]:
    if incident.node is None:
        return []
    found = facts.store.probes.verdicts.read(node=incident.node, from_ms=incident.opened_ms)
    return [verdict for verdict in found if verdict.incident_id == incident.id]


def find_incident(facts: ApiSnapshot, beginning: str) -> Incident:
    """The incident whose id begins so.

    Raises:
        RefusalError: no such incident, several, or an empty id.
    """
    if not beginning or set(beginning) - set(string.ascii_letters + string.digits + "-_"):
        raise bad_argument(f"{beginning!r} is no incident id; `drover incidents` lists them")
    found = {i.id: i for i in facts.incidents() if i.id.startswith(beginning)}
    if beginning in found:
        return found[beginning]
    if not found:
        raise not_found(f"no incident {beginning!r}; `drover incidents --state all` lists them")
    if len(found) > 1:
        some = ", ".join(sorted(found)[:NAMED]) + (", ..." if len(found) > NAMED else "")
        raise bad_argument(f"{beginning!r} begins {len(found)} ids: {some}; give more of it")
    return next(iter(found.values()))


def list_events(facts: ApiSnapshot, request: pb.EventsRequest) -> pb.EventList:
    gpu = request.gpu if request.HasField("gpu") else None
    if request.node:
        facts.node_number(request.node)
    elif gpu is not None:
        raise bad_argument("gpu without node; give the node too")
    to_ms = request.to_ms or facts.now_ms() + DAY_MS  # events of a node whose clock is ahead are not hidden
    if request.from_ms >= to_ms:
        raise bad_argument(f"from_ms {request.from_ms} is not before to_ms {to_ms}")
    limit = min(request.limit or EVENTS_LIMIT, EVENTS_MAX)
    events = facts.store.events.read(request.from_ms, to_ms, request.node or None, gpu, limit=limit)
    return pb.EventList(events_json=[to_json(e) for e in events])


def _until(facts: ApiSnapshot, incident: Incident) -> int:
    """Return up to when what happened around an incident is shown."""
    until_ms = (incident.closed_ms or facts.now_ms()) + AFTER_MS
    return min(until_ms, facts.now_ms() + 1) if facts.is_past else until_ms


def _health_history(facts: ApiSnapshot, incident: Incident) -> list[str]:
    """Changes of the members' health from shortly before the incident on, oldest first."""
    from_ms, to_ms = incident.since_ms - BEFORE_MS, _until(facts, incident)
    changes = [
        change
        for node, gpu in incident.members[:AROUND_NODES]
        for change in facts.store.health.history(node, gpu, from_ms, to_ms)
    ]
    changes.sort(key=lambda c: c["ts_ms"])
    return [
        f"{iso(c['ts_ms'])} {_place(c['node'], c['gpu'])}: {c['health']}" + (f", {c['reason']}" if c["reason"] else "")
        for c in changes
    ]


def _events_around(facts: ApiSnapshot, incident: Incident) -> list[Event]:
    """Events of the members' nodes that name a member GPU or none, newest first."""
    from_ms = incident.since_ms - BEFORE_MS
    to_ms = _until(facts, incident)
    slots: dict[str, set[int | None]] = {}
    for node, gpu in incident.members:
        slots.setdefault(node, set()).add(gpu)
    found: list[Event] = []
    for node in list(slots)[:AROUND_NODES]:
        wanted = slots[node]
        for event in facts.store.events.read(from_ms, to_ms, node, limit=AROUND_EVENTS):
            if event.gpu is None or None in wanted or event.gpu in wanted:
                found.append(event)
    found.sort(key=lambda e: e.ts_ms, reverse=True)
    return found[:AROUND_EVENTS]


def _place(node: str, gpu: int | None) -> str:
    return node if gpu is None else f"{node} GPU {gpu}"

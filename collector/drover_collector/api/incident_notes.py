"""What people note on incidents, and earlier incidents like one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import grpc

from drover_collector.api.handling import handling_message, handlings
from drover_collector.api.incidents import find_incident
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, RefusalError, bad_argument
from drover_core.model.events import Action, Audit, Incident, to_json
from drover_core.model.incident_notes import ACTS, NOBODY, Handling, IncidentOutcome, NoteAct
from drover_proto import fleet_pb2 as pb

TEXT_CHARS = 2_000
VALUE_CHARS = 300
PAST_DAYS = 90  # how far back similar incidents are looked for
PAST_FRESH_S = 60.0  # one answer for all callers meanwhile
SIMILAR, MOST_SIMILAR = 5, 50
DONE = 5  # acts by name
NEEDS = {
    NoteAct.TICKET: "give the ticket: its address, or its number",
    NoteAct.OUTCOME: f"give the outcome: {' or '.join(IncidentOutcome)}",
}


def note_incident(facts: ApiSnapshot, request: pb.IncidentNoteAsk, by: str) -> pb.IncidentNoteReply:
    """Store a note on an incident, open or closed.

    Raises:
        RefusalError: no such incident or act, a value that it needs is missing, or this collector stands by.
        StoreError: it could not be stored, and has no effect.
    """
    if not facts.pipeline.leading:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, "this collector stands by; ask the active one")
    incident = find_incident(facts, request.id)
    if request.act not in ACTS:
        raise bad_argument(f"act {request.act[:80]!r}: give one of {', '.join(ACTS)}")
    act, now_ms = NoteAct(request.act), facts.now_ms()
    text, value = request.text.strip(), _value(act, request.value, incident)
    if len(text) > TEXT_CHARS:
        raise bad_argument(f"the text has {len(text)} characters; at most {TEXT_CHARS}")
    if act is NoteAct.COMMENT and not text:
        raise bad_argument("the comment is empty")
    notes = facts.pipeline.outbox.notes
    with notes.writing:
        # A later note is later in the audit too, where two come within a millisecond.
        at_ms = max(now_ms, notes.of(incident.id).updated_ms + 1)
        id_ = hashlib.blake2b(f"{incident.id} {act} {by} {at_ms}".encode(), digest_size=8).hexdigest()
        detail = f"as {value}" if act is NoteAct.ACKNOWLEDGE else value
        line = Audit(id_, at_ms, by, act.value, incident.id, text, detail, state=value)
        facts.store.audit.write([line])
        notes.take(line)
    return pb.IncidentNoteReply(audit_json=to_json(line), handling=handling_message(notes.of(incident.id), incident))


def _value(act: NoteAct, given: str, incident: Incident) -> str:
    if act is NoteAct.ACKNOWLEDGE:
        return incident.severity.value
    value = " ".join("".join(c if c.isprintable() else " " for c in given).split())
    if len(value) > VALUE_CHARS:
        raise bad_argument(f"{value[:80]!r} has {len(value)} characters; at most {VALUE_CHARS}")
    if act in NEEDS and not value:
        raise bad_argument(NEEDS[act])
    if act is NoteAct.OUTCOME and value not in list(IncidentOutcome):
        raise bad_argument(f"outcome {value[:80]!r}: give {' or '.join(IncidentOutcome)}")
    return value if act in (NoteAct.ASSIGN, *NEEDS) else ""


def list_similar(facts: ApiSnapshot, request: pb.SimilarRequest) -> pb.SimilarList:
    """Return earlier incidents of the same cause: on its GPU, on its node, then elsewhere; the newest first."""
    incident = find_incident(facts, request.id)
    since_ms = facts.now_ms() - PAST_DAYS * DAY_MS
    past = facts.once("past incidents", PAST_FRESH_S, lambda: facts.store.incidents.for_cost(since_ms))
    same = [i for i in past if (i.kind, i.cause) == (incident.kind, incident.cause)]
    earlier = [i for i in same if i.id != incident.id and i.closed_ms is not None and i.opened_ms < incident.opened_ms]
    found = sorted(((_nearness(i, incident), i) for i in earlier), key=lambda pair: (pair[0], -pair[1].opened_ms))
    known = handlings(facts)
    limit = min(request.limit or SIMILAR, MOST_SIMILAR)
    return pb.SimilarList(
        incidents=[
            _similar(facts, each, ("gpu", "node", "cause")[near], same, known.get(each.id, NOBODY))
            for near, each in found[:limit]
        ],
        total=len(found), since_ms=since_ms,
    )  # fmt: skip


def _nearness(other: Incident, incident: Incident) -> int:
    """0: it hit one of the same GPUs (or the same node as a whole), 1: the same node, 2: neither."""
    if set(other.members) & set(incident.members):
        return 0
    return 1 if _nodes(other) & _nodes(incident) else 2


def _nodes(incident: Incident) -> set[str]:
    return {node for node, _ in incident.members}


def _similar(
    facts: ApiSnapshot, incident: Incident, same: str, alike: Iterable[Incident], handling: Handling
) -> pb.SimilarIncident:
    node, gpu = incident.members[0] if incident.members else ("", None)
    members = set(incident.members)
    later = [
        i.opened_ms for i in alike
        if i.id != incident.id and i.opened_ms > (incident.closed_ms or 0) and set(i.members) & members
    ]  # fmt: skip
    return pb.SimilarIncident(
        id=incident.id, same=same, kind=incident.kind, cause=incident.cause, node=node, gpu=gpu,
        since_ms=incident.since_ms, closed_ms=incident.closed_ms or 0,
        done=_done(facts.store.actions.newest(incident=incident.id)), outcome=handling.outcome,
        again_ms=min(later, default=0),
    )  # fmt: skip


def _done(actions: Iterable[Action]) -> list[str]:
    """Return what was done, a line for each kind of act and its outcome, the oldest first."""
    lines = [
        f"{a.action}: {a.state}" + ("" if a.by == "drover" else f" by {a.by}")
        for a in sorted(actions, key=lambda a: a.ts_ms)
    ]
    return list(dict.fromkeys(lines))[:DONE]

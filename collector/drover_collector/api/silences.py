"""Silences as people make, list and end them. Each is in the audit, with who and why."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import grpc

from drover_collector.api.incidents import find_incident
from drover_collector.api.snapshot import (
    ApiSnapshot,
    RefusalError,
    bad_argument,
    not_found,
)
from drover_collector.notify.maintenance_events import planned_work, unusable, wrong_id, wrong_source
from drover_collector.notify.maintenance_windows import PLACES, unknown_place
from drover_collector.notify.silences import covers
from drover_core.model.events import (
    Audit,
    IncidentKind,
    Silence,
    to_json,
)
from drover_core.model.silences import KEYS, describe_scope
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

WHY_CHARS = 500
LISTED = 1_000
MOST_LISTED = 10_000
MOST_ACTIVE = 1_000  # more of them hide a fleet
MOST_VALUES = 1_000  # of one list
LEAST_H = 1 / 60
PAST_MS = 60_000  # a clock may differ that much; a silence of the past mutes nothing
AHEAD_MS = 90 * 86_400_000


def list_silences(facts: ApiSnapshot, request: pb.SilencesRequest, may: bool) -> pb.SilenceList:
    now_ms = facts.now_ms()
    known = {silence.id: silence for silence in facts.pipeline.outbox.silences.known(now_ms)}
    if request.since_ms or not facts.pipeline.leading:  # a standby does not know the newest
        known |= {silence.id: silence for silence in facts.store.silences.newest(request.since_ms or now_ms)}
    since_ms = request.since_ms or now_ms
    found = sorted((s for s in known.values() if s.until_ms > since_ms), key=lambda s: (s.until_ms, s.id))
    shown = found[: min(request.limit or LISTED, MOST_LISTED)]
    return pb.SilenceList(
        silences_json=[to_json(s) for s in shown], may_change=may, max_hours=facts.config.notify.max_silence_h
    )


def create_silence(facts: ApiSnapshot, request: pb.SilenceAsk, by: str) -> pb.SilenceReply:
    """
    Raises:
        RefusalError: no end, too long, no reason, nothing that it covers, or this collector does not notify.
    """
    _leading(facts)
    now_ms = facts.now_ms()
    from_ms = request.from_ms or now_ms
    why = _why(request.why)
    most = facts.config.notify.max_silence_h
    if not math.isfinite(request.hours) or not LEAST_H <= request.hours <= most:
        raise bad_argument(
            f"a silence lasts from a minute to {most:g} hours (notify.max_silence_h), not {request.hours:g}; what is to"
            " be quiet for ever belongs into a route or the policy"
        )
    if not now_ms - PAST_MS <= from_ms <= now_ms + AHEAD_MS:
        raise bad_argument(f"it cannot begin at {iso(from_ms)}; at most {AHEAD_MS // 86_400_000} days ahead")
    if len(facts.pipeline.outbox.silences.known(now_ms)) >= MOST_ACTIVE:
        raise bad_argument(f"{MOST_ACTIVE} silences are in force; end some: drover silences, drover unsilence")
    made = Silence(
        "", now_ms, from_ms, from_ms + round(request.hours * 3_600_000), by, why,
        tuple(request.node), tuple(request.gpu), tuple(request.rack), tuple(request.leaf), tuple(request.pool),
        tuple(request.kind), tuple(find_incident(facts, text).id for text in request.incident), request.maintenance,
    )  # fmt: skip
    _check(facts, made)
    seed = f"{describe_scope(made)} {by} {from_ms} {made.until_ms} {now_ms}"
    made = replace(made, id=hashlib.blake2b(seed.encode(), digest_size=6).hexdigest())
    return _take(facts, made, "maintenance" if made.maintenance else "silence", by, why)


def end_silence(facts: ApiSnapshot, request: pb.SilenceEnd, by: str) -> pb.SilenceReply:
    """Ends one that is in force or to come; of a window of the settings this once.

    Raises:
        RefusalError: no reason, none of that id, or this collector does not notify.
    """
    _leading(facts)
    why, now_ms = _why(request.why), facts.now_ms()
    known = facts.pipeline.outbox.silences.known(now_ms)
    found = [s for s in known if request.id and s.id.startswith(request.id)]
    if exact := [s for s in found if s.id == request.id]:
        found = exact
    if not found:
        raise not_found(f"no silence {request.id[:80]!r} is in force or to come; `drover silences` lists them")
    if len(found) > 1:
        raise bad_argument(f"{request.id!r} begins {len(found)} ids; give more of it")
    ended = replace(found[0], until_ms=now_ms, from_ms=min(found[0].from_ms, now_ms), ended_by=by)
    return _take(facts, ended, "unsilence", by, why)


def report_maintenance(facts: ApiSnapshot, request: pb.MaintenanceReport, by: str) -> pb.SilenceReply:
    """Take planned work that somebody else reports; the same source and id change or end it.

    A report that comes late counts from its receipt: it hides nothing of before.

    Raises:
        RefusalError: no usable time, an unknown node, too much of the fleet, or this collector does not notify.
    """
    _leading(facts)
    why, now_ms, silences = _why(request.why), facts.now_ms(), facts.pipeline.outbox.silences
    source, id_ = request.source, request.id
    if wrong := wrong_source(source):
        raise bad_argument(f"source {source[:80]!r}: {wrong}")
    if wrong := wrong_id(id_):
        raise bad_argument(f"id {wrong}")
    before = next((s for s in silences.remembered(f"{source}:{id_}") if s.event == f"{source}:{id_}"), None)
    if request.over:
        if before is None or before.until_ms <= now_ms:
            raise not_found(f"no work {id_[:80]!r} of {source} is under way or to come; `drover maintenance` lists it")
        ended = replace(before, until_ms=now_ms, from_ms=min(before.from_ms, now_ms), ended_by=by)
        return _take(facts, ended, "maintenance over", by, why)
    begins_ms, nodes = max(request.from_ms, now_ms), tuple(dict.fromkeys(request.node))
    if before is not None and before.from_ms <= now_ms < before.until_ms:
        if more := [name for name in nodes if name not in before.node]:
            raise bad_argument(
                f"{id_!r} is under way without {more[0][:80]!r}: report more nodes under an id of their own"
            )
        begins_ms = before.from_ms  # it goes on
    elif len(silences.known(now_ms)) >= MOST_ACTIVE:
        raise bad_argument(f"{MOST_ACTIVE} silences are in force or to come; `drover silences` lists them")
    if not now_ms < request.until_ms or begins_ms > now_ms + AHEAD_MS:
        raise bad_argument("it must end after now, and begin within 90 days")
    if wrong := unusable(begins_ms, request.until_ms, len(nodes), why):
        raise bad_argument(wrong)
    if strange := unknown_place(facts.index.spec, {"node": nodes}):
        raise not_found(f"no node {strange[1][:80]!r} in the fleet file")
    made = replace(planned_work(source, id_, nodes, (begins_ms, request.until_ms), why, now_ms), by=f"{by} ({source})")
    others = {
        name for s in silences.known(now_ms)
        if s.event and s.id != made.id and s.from_ms < made.until_ms and made.from_ms < s.until_ms for name in s.node
    }  # fmt: skip
    if (covered := len(others | set(nodes))) > silences.most:
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"refused: with it {covered} nodes would be in planned work at a time; at most {silences.most} of"
            f" {facts.index.node_count} may (maintenance_events.most_ratio)",
        )
    return _take(facts, made, "maintenance", by, why)


def _take(facts: ApiSnapshot, silence: Silence, what: str, by: str, why: str) -> pb.SilenceReply:
    """Stores it with its line of the audit. About one incident or node it is found with that one."""
    now_ms = facts.now_ms()
    subject = next((v[0] for v in (silence.incident, silence.node) if len(v) == 1), silence.id)
    when = f"from {iso(silence.from_ms)[:19]}Z until {iso(silence.until_ms)[:19]}Z"
    detail = f"{describe_scope(silence)} {when} ({silence.id})"
    facts.pipeline.take_silence(silence, Audit(f"{what} {silence.id} {now_ms}", now_ms, by, what, subject, why, detail))
    count = sum(covers(silence, i, facts.index.spec.by_name) for i in facts.open_incidents())
    return pb.SilenceReply(silence_json=to_json(silence), covers=count)


def _check(facts: ApiSnapshot, silence: Silence) -> None:
    given = {key: getattr(silence, key) for key in KEYS if getattr(silence, key)}
    if not given:
        raise bad_argument(f"say what is to be silent: an incident, {', '.join(KEYS[1:-1])} or kind")
    for key, values in given.items():
        if len(values) > MOST_VALUES:
            raise bad_argument(f"{len(values)} values of {key}; at most {MOST_VALUES}")
    if wrong := unknown_place(facts.index.spec, {key: getattr(silence, key) for key in PLACES}):
        raise not_found(f"no {wrong[0]} {wrong[1][:80]!r} in the fleet file")
    for kind in silence.kind:
        if kind not in list(IncidentKind):
            raise bad_argument(f"kind {kind[:80]!r}: give one of {', '.join(IncidentKind)}")
    if silence.maintenance and set(given) - set(PLACES):
        raise bad_argument("maintenance is of whole nodes: give nodes, racks, leaf switches or pools alone")


def _why(text: str) -> str:
    why = " ".join(text.split())
    if not why:
        raise bad_argument("why is empty; say in a few words why, for those who miss the notification")
    if len(why) > WHY_CHARS:
        raise bad_argument(f"why has {len(why)} characters; at most {WHY_CHARS}")
    return why


def _leading(facts: ApiSnapshot) -> None:
    if not facts.pipeline.leading:
        raise RefusalError(
            grpc.StatusCode.FAILED_PRECONDITION, "this collector stands by; ask the active one, which notifies"
        )

"""One incident of the book: how it begins, how a finding joins it, and what of it is worth a new version. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drover_collector.incidents.correlation import leads as leads_over
from drover_collector.incidents.correlation import width
from drover_core.model.events import (
    WANTED_ORDER,
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    Note,
    NoteKind,
    RecommendedAction,
    Severity,
    stronger,
    worse,
)

MAX_EVIDENCE = 16
MAX_NOTES = 60
BEFORE = " Before that: "  # between what made an incident worse and its root cause
KEEP_CLOSED_MS = 3_600_000  # the book knows what it closed for so long
AWAY_MS = 300_000  # what a detector reports again after so long is news


@dataclass(slots=True)
class Record:
    """An incident and what only the book needs.

    Attributes:
        holds: detector -> when it last reported that the condition holds.
        reported_ms: (detector, cause) -> when it was last reported.
        slowed_to_ms: up to when it is counted what the slowness of its whole job takes.
    """

    incident: Incident
    holds: dict[str, int] = field(default_factory=dict)
    reported_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    lost_gpus: float | None = None
    waiting_gpus: float | None = None
    counted_to_ms: int = 0
    wanted: RecommendedAction = RecommendedAction.NONE  # by the detectors; the policy may say otherwise
    slowed_to_ms: int = 0


def opened(finding: Finding, subject: tuple[str, str, int | None], now_ms: int) -> Record:
    """Return a new incident about `subject`, as `IncidentBook` has it."""
    scope, name, gpu = subject
    # Made of what was seen, not of when it was reported: a replay gives the same ids.
    seed = f"{scope} {name} {gpu} {finding.since_ms} {finding.severity is Severity.INFO}"
    if finding.severity is Severity.INFO or finding.kind is IncidentKind.DRIFT:
        seed += finding.kind
    if scope != "gpu":  # a port that flaps does so since it was down, which was an incident of its own
        seed += f" {finding.kind} {finding.cause}"
    if now_ms - finding.since_ms > KEEP_CLOSED_MS:  # else it could have the id of one that was closed and forgotten
        seed += f" {now_ms // KEEP_CLOSED_MS}"
    id_ = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
    incident = Incident(
        id_, finding.kind, finding.cause, finding.scope, finding.node, finding.gpu, finding.members, now_ms,
        min(finding.since_ms, now_ms), None, finding.severity, finding.confidence, finding.action, finding.summary,
        finding.advice, finding.evidence[:MAX_EVIDENCE],
        (Note(now_ms, f"opened: {finding.summary}", NoteKind.OPENED),), (finding.detector,), finding.job,
        updated_ms=now_ms, snapshots=_kept({}, finding),
    )  # fmt: skip
    return Record(
        incident, {finding.detector: now_ms}, {(finding.detector, finding.cause): now_ms}, finding.lost_gpus,
        finding.waiting_gpus, min(finding.since_ms, now_ms), finding.action,
    )  # fmt: skip


def join(record: Record, finding: Finding, now_ms: int) -> None:
    """A finding about what an incident is about, or that it explains."""
    incident = record.incident
    info = finding.severity is Severity.INFO and incident.severity is not Severity.INFO
    if width(finding.scope) >= width(incident.scope) and (not info or finding.detector in record.holds):
        record.holds[finding.detector] = now_ms  # what it merely explains does not keep it open, nor does a note
    # What a wider incident explains is its evidence, and asks for nothing by itself.
    info = info or width(finding.scope) < width(incident.scope)
    leads = not info and leads_over(finding, incident)
    # Its reader must do what the worst finding asks for, although the root cause was reported before.
    raises = not info and not leads and worse(incident.severity, finding.severity) is not incident.severity
    words = raises or (leads and not _outdone(record, finding))
    # The advice is that of the finding that asks for most, or has made it worse: the recommendation says the same.
    asks, asked = WANTED_ORDER.index(finding.action), WANTED_ORDER.index(record.wanted)
    advises = not info and (raises or asks > asked or (words and asks == asked))
    summary = finding.summary if words else incident.summary
    if raises:
        summary += BEFORE + incident.summary
    notes: list[Note] = []

    def add(text: str, kind: NoteKind = NoteKind.OTHER, detector: str = "") -> None:
        notes.append(Note(now_ms, text, kind, detector))

    if incident.closed_ms is not None:
        add("came back", NoteKind.CAME_BACK)
        incident = replace(incident, closed_ms=None)
    if finding.detector not in incident.detectors or (info and not _is_in_timeline(incident, finding)):
        add(f"{finding.detector}: {finding.summary}", NoteKind.JOINED, finding.detector)
    elif not info and now_ms - record.reported_ms.get((finding.detector, finding.cause), now_ms) >= AWAY_MS:
        add(f"again: {finding.summary}", NoteKind.AGAIN)
    record.reported_ms[finding.detector, finding.cause] = now_ms
    severity = incident.severity if info else worse(incident.severity, finding.severity)
    if severity is not incident.severity:
        add(f"now {severity.value}: {finding.summary}")
    if leads and (finding.kind, finding.cause) != (incident.kind, incident.cause):
        add(f"cause now {finding.kind.value}/{finding.cause} (was {incident.kind.value}/{incident.cause})")
    members = incident.members
    if incident.scope == finding.scope:
        held = set(members)
        members += tuple(m for m in finding.members if m not in held)
        if len(members) > len(incident.members):
            add(f"{len(members) - len(incident.members)} more are hit")
    if not info:
        record.wanted = stronger(record.wanted, finding.action)
        if leads or record.lost_gpus is None:
            record.lost_gpus = finding.lost_gpus if finding.lost_gpus is not None else record.lost_gpus
        if leads or record.waiting_gpus is None:
            record.waiting_gpus = finding.waiting_gpus if finding.waiting_gpus is not None else record.waiting_gpus
    timeline = incident.timeline
    for note in dict.fromkeys(notes):
        timeline = noted(replace(incident, timeline=timeline), note)
    record.incident = replace(
        incident,
        kind=finding.kind if leads else incident.kind,
        cause=finding.cause if leads else incident.cause,
        summary=summary,
        advice=finding.advice if advises else incident.advice,
        severity=severity,
        confidence=max(incident.confidence, finding.confidence) if not info else incident.confidence,
        members=members,
        since_ms=incident.since_ms,
        evidence=_merged(incident.evidence, finding.evidence, words),
        timeline=timeline,
        detectors=tuple(dict.fromkeys((*incident.detectors, finding.detector))),
        job=incident.job or finding.job,
        worsened=raises or (incident.worsened and not words),
        snapshots=_kept(incident.snapshots, finding),
    )


def add_consequence(record: Record, finding: Finding, now_ms: int) -> None:
    """Note what an incident leads to: as evidence and in its timeline, once. It does not keep the incident open."""
    incident = record.incident
    key = f"{finding.detector} {finding.job}"
    if all(each.key != key for each in incident.evidence):
        note = Note(now_ms, f"{finding.detector}: {finding.summary}", NoteKind.JOINED, finding.detector)
        incident = replace(incident, timeline=noted(incident, note))
    fact = Evidence(finding.summary, key=key)
    record.incident = replace(incident, evidence=_merged(incident.evidence, (fact,), False))


def _outdone(record: Record, finding: Finding) -> bool:
    """Return whether something worse than this root cause was reported since, and still holds: its summary stays."""
    incident = record.incident
    same = (finding.kind, finding.cause) == (incident.kind, incident.cause)
    milder = worse(incident.severity, finding.severity) is not finding.severity
    return same and milder and incident.worsened and any(name != finding.detector for name in record.holds)


def _is_in_timeline(incident: Incident, finding: Finding) -> bool:
    return any(finding.summary in note.text for note in incident.timeline)


def was_absorbed(incident: Incident) -> bool:
    return bool(incident.timeline) and incident.timeline[-1].kind is NoteKind.ABSORBED


def was_cleared(incident: Incident) -> bool:
    """Whether a probe has refuted it."""
    return bool(incident.timeline) and incident.timeline[-1].kind is NoteKind.REFUTED


def closing(ts_ms: int, why: str) -> Note:
    """The line of a timeline that closes an incident."""
    return Note(ts_ms, f"closed: {why}", NoteKind.CLOSED, why=why)


def _kept(old: Mapping[str, Mapping[str, Any]], finding: Finding) -> Mapping[str, Mapping[str, Any]]:
    """What the findings of an incident carried, with that of one more: the newest of each name counts."""
    if not finding.snapshot:
        return old
    kept = dict(old.get(finding.detector, {}))
    for name, value in finding.snapshot.items():
        before = kept.get(name)
        kept[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return {**old, finding.detector: kept}


def noted(incident: Incident, note: Note) -> tuple[Note, ...]:
    """The timeline with one more line; a full one keeps its beginning and its newest part."""
    notes = (*incident.timeline, note)
    return notes if len(notes) <= MAX_NOTES else (*notes[:10], *notes[-(MAX_NOTES - 10) :])


def _merged(old: tuple[Evidence, ...], new: tuple[Evidence, ...], leads: bool) -> tuple[Evidence, ...]:
    """Newer values of the same metric or key replace older ones; other facts are added, the headline's first."""
    same = {name for item in new for name in (item.metric, item.key, item.text) if name}
    kept = tuple(e for e in old if not same & {e.metric, e.key, e.text})
    return (new + kept if leads else kept + new)[:MAX_EVIDENCE]


def visible(incident: Incident) -> tuple[object, ...]:
    """What makes a new version worth storing: not values that only moved."""
    return (
        incident.kind, incident.cause, incident.severity, incident.action, incident.closed_ms, incident.members,
        incident.timeline, incident.detectors, incident.job,
    )  # fmt: skip

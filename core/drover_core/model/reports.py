"""Reports of incidents and events: one JSON object each, times in ISO 8601 UTC.

Used by `drover replay`, exports (incidents.jsonl) and webhooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from drover_core.model.events import Event, EventKind, Incident, NoteKind
from drover_core.times import iso


def job_label(name: str) -> str:
    """Return `job 812`, or only the name if it begins with "job": `job-1001`."""
    return name if name.lower().startswith("job") else f"job {name}"


def gpu_hours(ms: float) -> str:
    """Return hours of GPU time for people: `1,204.5`, `0.59`, `0.0016`. One job's are written alike everywhere."""
    hours = ms / 3_600_000
    if 0 < hours < 0.001:  # a few seconds; Python would write 8.3e-06
        return "under 0.001"
    return f"{hours:,.1f}" if hours >= 1 or not hours else f"{hours:.2g}"


def incident_report(incident: Incident) -> dict[str, Any]:
    """Return the report of one incident. Empty fields of evidence are left out."""
    return {
        "id": incident.id,
        "kind": str(incident.kind),
        "scope": incident.scope,
        "node": incident.node,
        "gpu": incident.gpu,
        "members": [[node, gpu] for node, gpu in incident.members],
        "opened": iso(incident.opened_ms),
        "since": iso(incident.since_ms),
        "closed": None if incident.closed_ms is None else iso(incident.closed_ms),
        "severity": str(incident.severity),
        "cause": incident.cause,
        "confidence": incident.confidence,
        "action": str(incident.action),
        "asked": str(incident.asked or incident.action),
        "detectors": list(incident.detectors),
        "joined": [[iso(ts_ms), by] for ts_ms, by in _joined(incident)],
        "evidence": [_fact(dataclasses.asdict(evidence)) for evidence in incident.evidence],
        "summary": incident.summary,
        "advice": incident.advice,
        "job": incident.job,
        "gpu_hours_lost": incident.gpu_hours_lost,
        "gpu_hours_waited": incident.gpu_hours_waited,
    }


def _joined(incident: Incident) -> Iterator[tuple[int, str]]:
    """Yield when an open incident was reported again, and by which new detector; "": by the same."""
    for note in incident.timeline[1:]:
        if note.kind in (NoteKind.JOINED, NoteKind.ENDED):
            yield note.ts_ms, note.detector
        elif note.kind in (NoteKind.CAME_BACK, NoteKind.AGAIN):
            yield note.ts_ms, ""


def event_text(kind: str, message: str) -> str:
    """Return what an event says to people: of one whose message is JSON, the sentence in it."""
    if kind == EventKind.CONDITION:
        from drover_core.model import conditions  # a rare kind

        try:
            return conditions.sentence(conditions.from_message(message))
        except conditions.ConditionError:
            return message
    if kind != EventKind.RANK:
        return message
    from drover_core.jobs import checkpoint, owner, rank_report  # a rare kind

    try:
        return checkpoint.sentence(checkpoint.from_message(message))
    except checkpoint.ReportError:
        pass
    try:
        return owner.sentence(owner.from_message(message))
    except owner.OwnerError:
        return rank_report.text_of(message)


def event_report(event: Event) -> dict[str, Any]:
    """Return a line of a case's events.jsonl, with what a replay needs (receipt, backlog, forgeable)."""
    row = dataclasses.asdict(event)
    row["ts"] = iso(row.pop("ts_ms"))
    received_ms = row.pop("received_ms")
    if received_ms is not None:
        row["received"] = iso(received_ms)
    row["kind"] = str(event.kind)
    row["code"] = int(event.code) if event.code.isdigit() else event.code
    return row


def _fact(evidence: dict[str, Any]) -> dict[str, Any]:
    times = {"from_ms": "from", "to_ms": "to"}
    return {
        times.get(key, key): iso(value) if key in times else value
        for key, value in evidence.items()
        if value not in (None, "") and key != "key"
    }

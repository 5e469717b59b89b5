"""The timeline of an incident: what was seen, decided, answered, done and proven, in order of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drover_core.model.events import (
    Action,
    Audit,
    Decision,
    Incident,
    NodeOutage,
    ProbeOrder,
    ProbeVerdict,
    from_json,
)
from drover_core.model.incident_notes import describe_note, is_note
from drover_proto import fleet_pb2 as pb


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line. `source`: incident, policy, action, node, probe or person."""

    ts_ms: int
    source: str
    text: str


def build_timeline(detail: pb.IncidentDetail) -> list[TimelineEntry]:
    """Return the timeline of an incident from the Fleet API, oldest entry first."""
    incident = from_json(Incident, detail.incident_json)
    found = [TimelineEntry(note.ts_ms, "incident", note.text) for note in incident.timeline]
    found += _decisions([from_json(Decision, text) for text in detail.decisions_json])
    for action in [from_json(Action, text) for text in detail.actions_json]:
        by = "" if action.by == "drover" else f" by {action.by}"
        tries = f", {action.attempts} attempts" if action.attempts > 1 else ""
        text = f"{action.action} {action.node} through {action.actuator}: {action.state}{by}{tries}"
        found.append(TimelineEntry(action.ts_ms, "action", _with(text, action.detail)))
    for outage in [from_json(NodeOutage, text) for text in detail.duties_json]:
        stage = "back in service" if outage.stage == "healthy" else str(outage.stage)
        by = "" if outage.by == "drover" else f" by {outage.by}"
        found.append(TimelineEntry(outage.ts_ms, "node", _with(f"{outage.node} {stage}{by}", outage.reason)))
    for order in [from_json(ProbeOrder, text) for text in detail.probe_orders_json]:
        text = f"{order.level} probes of {order.node} to {order.why}: {order.state}"
        found.append(TimelineEntry(order.ts_ms, "probe", _with(text, order.detail)))
    for verdict in [from_json(ProbeVerdict, text) for text in detail.probe_verdicts_json]:
        text = {True: "passed", False: "failed", None: "not known"}[verdict.passed]
        place = verdict.node if verdict.gpu is None else f"{verdict.node} GPU {verdict.gpu}"
        found.append(TimelineEntry(verdict.ts_ms, "probe", _with(f"{place} {text}", verdict.text)))
    for line in [from_json(Audit, text) for text in detail.audit_json]:
        text = describe_note(line) if is_note(line) else _with(f"{line.what} by {line.by}", line.why)
        found.append(TimelineEntry(line.ts_ms, "person", text))
    return sorted(found, key=lambda entry: entry.ts_ms)


def _decisions(decisions: Iterable[Decision]) -> list[TimelineEntry]:
    return [
        TimelineEntry(
            d.ts_ms,
            "policy",
            _with(f"{_asked(d)}: {d.outcome.replace('_', ' ')}", f"{d.reason} [{d.rule}]"),
        )
        for d in decisions
    ]


def _asked(decision: Decision) -> str:
    """Return what is decided. A mass event has no node: a person decides whether Drover goes on."""
    return f"{decision.wanted} {decision.node}" if decision.node else "go on with a mass event"


def _with(text: str, more: str) -> str:
    return f"{text}: {more}" if more else text

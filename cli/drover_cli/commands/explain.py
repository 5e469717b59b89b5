"""`drover explain ID | NODE`: everything about one incident, or what happened to a node and why."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import grpc

from drover_cli import client, node_story
from drover_cli.commands.export import moment
from drover_cli.days import day
from drover_cli.errors import NotFoundError
from drover_cli.output import incident_json, message_json, plain, print_json, say, when, where
from drover_core.metrics.catalog import BY_NAME, describe
from drover_core.model.events import (
    Decision,
    Event,
    Evidence,
    Incident,
    from_json,
)
from drover_core.model.reports import event_text, job_label
from drover_core.model.runbooks import runbook_path
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from drover_proto.incident_timeline import build_timeline

HELP = "why: of an incident its evidence, life and log lines; of a node what was found, decided and done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("id", metavar="ID|NODE", help="incident id, or the beginning of one; or a node")
    span = parser.add_mutually_exclusive_group()
    span.add_argument("--day", help="of a node: today, yesterday, tuesday (the newest before today), 2026-11-17; UTC")
    span.add_argument("--since", default="7d", help="of a node: since an age such as 12h, or a time (default 7d)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    now_ms = round(time.time() * 1000)
    from_ms, to_ms = day(args.day, now_ms) if args.day else (moment(args.since, now_ms), now_ms + 1)
    with client.connect(args) as fleet:
        try:
            detail = fleet.call(methods.GET_INCIDENT, pb.IncidentRequest(id=args.id))
        except grpc.RpcError as error:
            if not node_story.is_unknown(error):
                raise
            try:
                story = node_story.of_node(fleet, args.id, from_ms, to_ms)
            except grpc.RpcError as other:
                if not node_story.is_unknown(other):
                    raise
                lists = "`drover incidents --state all` and `drover nodes` list them"
                raise NotFoundError(f"no incident and no node {args.id!r}; {lists}") from None
            return node_story.show(story, from_ms, to_ms, args.json)
    return _incident(detail, args)


def _timeline_rows(detail: pb.IncidentDetail) -> Iterator[dict[str, object]]:
    for entry in build_timeline(detail):
        yield {"ts": when(entry.ts_ms), "ts_ms": entry.ts_ms, "source": entry.source, "text": entry.text}


def _event(event: Event) -> str:
    text = plain(event_text(event.kind, event.message))
    return f"{when(event.ts_ms)}  {event.node} {event.kind} {event.code}: {text}"


def _incident(detail: pb.IncidentDetail, args: argparse.Namespace) -> int:
    incident = from_json(Incident, detail.incident_json)
    if args.json:
        print_json(
            {
                **incident_json(incident),
                "run_book": runbook_path(incident.kind),
                "decisions": [json.loads(text) for text in detail.decisions_json],
                "actions": [json.loads(text) for text in detail.actions_json],
                "duties": [json.loads(text) for text in detail.duties_json],
                "probe_orders": [json.loads(text) for text in detail.probe_orders_json],
                "probe_verdicts": [json.loads(text) for text in detail.probe_verdicts_json],
                "audit": [json.loads(text) for text in detail.audit_json],
                "life": list(_timeline_rows(detail)),
                "events": [json.loads(text) for text in detail.events_json],
                "notifications": list(detail.notifications),
                "silenced": detail.silenced or None,
                "handling": message_json(detail.handling) if detail.HasField("handling") else None,
                "health": detail.health,
                "health_history": list(detail.health_history),
            }
        )
        return 0
    print(f"{incident.id}: {incident.severity} {incident.kind}, {incident.cause}, {plain(where(incident))}")
    say(f"  {incident.summary}", 2)
    say(f"  do: {incident.advice}", 6)
    print(f"  run book: drover runbook {incident.kind}")
    closed = f", closed {when(incident.closed_ms)}" if incident.closed_ms else ", still open"
    print(f"  since {when(incident.since_ms)}, reported {when(incident.opened_ms)}{closed}")
    print(
        f"  confidence {incident.confidence:.0%}, wants {incident.action}"
        + (f", {plain(job_label(incident.job))}" if incident.job else "")
    )
    _handled(detail.silenced, detail.handling)
    _section("evidence", [_evidence(e) for e in incident.evidence])
    _section("timeline", [f"{when(m.ts_ms)}  {m.source:<8}  {plain(m.text)}" for m in build_timeline(detail)])
    waiting = _waiting([from_json(Decision, text) for text in detail.decisions_json])
    _section(
        "waits for a person",
        [f"{d.id}: {d.wanted} {d.node}; drover approve {d.id} --why TEXT, or drover reject" for d in waiting],
    )
    events = [from_json(Event, text) for text in detail.events_json]
    _section("events around it", [_event(event) for event in events])
    _section(
        "notifications",
        [plain(text) for text in detail.notifications]
        or [
            "nobody was notified: it is silenced"
            if detail.silenced
            else "nobody was notified: no receiver is set for it in the collector's settings"
        ],
    )
    _section("health", [plain(text) for text in [detail.health, *detail.health_history] if text])
    return 0


def _handled(silenced: str, handling: pb.IncidentHandling) -> None:
    if silenced:
        say(f"  {silenced}", 2)
    if handling.acknowledged_by:
        say(f"  acknowledged by {handling.acknowledged_by} at {when(handling.acknowledged_ms)}", 2)
    if handling.assignee:
        say(f"  assigned to {handling.assignee}", 2)
    for ticket in handling.tickets:
        say(f"  ticket {ticket}", 2)
    if handling.outcome:
        say(f"  outcome: {handling.outcome.replace('_', ' ')}, by {handling.outcome_by}", 2)


def _waiting(decisions: list[Decision]) -> list[Decision]:
    """Those whose newest version waits for a person."""
    newest = {d.id: d for d in sorted(decisions, key=lambda d: d.ts_ms)}
    return [d for d in newest.values() if d.outcome == "pending_approval"]


def _section(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            say(f"  {line}", 6)


def _evidence(evidence: Evidence) -> str:
    """Its sentence, and the figures that do not stand in it."""
    metric = BY_NAME.get(evidence.metric or "")
    if metric is None or evidence.value is None:
        return plain(evidence.text)
    value, expected = describe(metric, evidence.value), None
    if evidence.expected is not None:
        expected = describe(metric, evidence.expected)
    if value in evidence.text and (expected is None or expected in evidence.text):
        return plain(evidence.text)
    text = f"{evidence.text} [{metric.label} {value}" + (f", expected {expected}" if expected is not None else "")
    return plain(text + (f", {evidence.peers} peers]" if evidence.peers else "]"))

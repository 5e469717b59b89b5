"""`drover explain ID`: everything about one incident, or about the health of a node."""

from __future__ import annotations

import argparse
import json

from drover_cli import client
from drover_cli.commands.incidents import where
from drover_cli.output import plain, print_json, when
from drover_proto import fleet_pb2 as pb
from drover_proto.catalog import BY_NAME, describe
from drover_proto.events import Decision, Event, Evidence, Incident, from_json
from drover_proto.life import life
from drover_proto.reports import incident_report

HELP = "why Drover says what it says about an incident: evidence, its life from first sign to return, log lines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("id", help="incident id, or the beginning of one")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as stub:
        detail = stub.GetIncident(pb.IncidentRequest(id=args.id), timeout=client.DEADLINE_S)
    incident = from_json(Incident, detail.incident_json)
    if args.json:
        print_json(
            {
                **incident_report(incident),
                "decisions": [json.loads(text) for text in detail.decisions_json],
                "actions": [json.loads(text) for text in detail.actions_json],
                "duties": [json.loads(text) for text in detail.duties_json],
                "probe_orders": [json.loads(text) for text in detail.probe_orders_json],
                "probe_verdicts": [json.loads(text) for text in detail.probe_verdicts_json],
                "audit": [json.loads(text) for text in detail.audit_json],
                "life": [{"ts": when(m.ts_ms), "source": m.source, "text": m.text} for m in life(detail)],
                "events": [json.loads(text) for text in detail.events_json],
                "notifications": list(detail.notifications),
                "silenced": detail.silenced or None,
                "health": detail.health,
                "health_history": list(detail.health_history),
            }
        )
        return 0
    print(f"{incident.id}: {incident.severity} {incident.kind}, {incident.cause}, {plain(where(incident))}")
    print(f"  {plain(incident.summary)}")
    print(f"  do: {plain(incident.advice)}")
    closed = f", closed {when(incident.closed_ms)}" if incident.closed_ms else ", still open"
    print(f"  since {when(incident.since_ms)}, reported {when(incident.opened_ms)}{closed}")
    print(
        f"  confidence {incident.confidence:.0%}, wants {incident.action}"
        + (f", job {plain(incident.job)}" if incident.job else "")
    )
    if detail.silenced:
        print(f"  {plain(detail.silenced)}")
    _section("evidence", [_evidence(e) for e in incident.evidence])
    _section("timeline", [f"{when(m.ts_ms)}  {m.source:<8}  {plain(m.text)}" for m in life(detail)])
    waiting = _waiting([from_json(Decision, text) for text in detail.decisions_json])
    _section(
        "waits for a person",
        [f"{d.id}: {d.wanted} {d.node}; drover approve {d.id} --why TEXT, or drover reject" for d in waiting],
    )
    events = [from_json(Event, text) for text in detail.events_json]
    _section("events around it", [f"{when(e.ts_ms)}  {e.node} {e.kind} {e.code}: {plain(e.message)}" for e in events])
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


def _waiting(decisions: list[Decision]) -> list[Decision]:
    """Those whose newest version waits for a person."""
    newest = {d.id: d for d in sorted(decisions, key=lambda d: d.ts_ms)}
    return [d for d in newest.values() if d.outcome == "pending_approval"]


def _section(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")


def _evidence(evidence: Evidence) -> str:
    metric = BY_NAME.get(evidence.metric or "")
    if metric is None or evidence.value is None:
        return plain(evidence.text)
    text = f"{plain(evidence.text)} [{metric.label} {describe(metric, evidence.value)}"
    if evidence.expected is not None:
        text += f", expected {describe(metric, evidence.expected)}"
    return text + (f", {evidence.peers} peers]" if evidence.peers else "]")

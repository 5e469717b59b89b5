"""`drover incidents`: what is wrong, where, since when, what to do."""

from __future__ import annotations

import argparse
import time

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.output import duration, incident_json, print_json, print_table, where
from drover_core.model.events import Incident, Severity, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "incidents, the worst open ones first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--state", choices=["open", "closed", "all"], default="open", help="default: open")
    parser.add_argument("--node", default="", help="only of this node")
    parser.add_argument("--min-severity", choices=[s.value for s in Severity], default="info", help="default: info")
    parser.add_argument("--limit", type=count, default=500, help="at most so many (default 500)")
    parser.add_argument("--json", action="store_true", help="one JSON object per incident")


def run(args: argparse.Namespace) -> int:
    request = pb.ListIncidentsRequest(
        state=args.state, node=args.node, limit=args.limit, min_severity=args.min_severity
    )
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_INCIDENTS, request)
    incidents = [from_json(Incident, text) for text in reply.incidents_json]
    if args.json:
        for incident in incidents:
            print_json({**incident_json(incident), "silenced": reply.silenced.get(incident.id)})
        return 0
    if not incidents:
        print("no incidents" if args.state == "all" else f"no {args.state} incidents")
        return 0
    now = round(time.time() * 1000)
    rows = []
    for i in incidents:
        lasted = duration(((i.closed_ms or now) - i.since_ms) / 1000) + (", closed" if i.closed_ms else "")
        mute = f"({reply.silenced[i.id]}) " if i.id in reply.silenced else ""
        rows.append([i.id, i.severity, i.kind, i.cause, where(i), lasted, i.action, mute + i.summary])
    print_table(["ID", "SEVERITY", "KIND", "CAUSE", "WHERE", "FOR", "WANTS", "SUMMARY"], rows)
    if reply.total > len(incidents):
        print(f"{len(incidents)} of {reply.total} shown; --limit shows more")
    return 0

"""`drover decisions`: the decisions that wait for a person, then the others with their outcomes."""

from __future__ import annotations

import argparse
import json
import sys
import time

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.commands.export import moment
from drover_cli.output import print_json, print_table, when
from drover_core.model.events import Decision, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "decisions: those that wait for a person first, then the others with their outcomes"
OUTCOMES = ("would_act", "held", "pending_approval", "approved", "rejected", "expired", "act")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--outcome", choices=OUTCOMES, default="", help="only these")
    parser.add_argument(
        "--since", default="7d", help="an age such as 12h, or a time (default 7d); those that wait are always listed"
    )
    parser.add_argument("--limit", type=count, default=100, help="at most so many (default 100)")
    parser.add_argument("--json", action="store_true", help="one JSON object per decision")


def run(args: argparse.Namespace) -> int:
    since_ms = moment(args.since, round(time.time() * 1000))
    request = pb.DecisionsRequest(outcome=args.outcome, since_ms=since_ms, limit=args.limit)
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_DECISIONS, request)
    if args.json:
        for text in reply.decisions_json:
            print_json(json.loads(text))
        return 0
    show([from_json(Decision, text) for text in reply.decisions_json])
    if len(reply.decisions_json) >= args.limit:
        print(f"the list ends at --limit {args.limit}; there may be more", file=sys.stderr)
    return 0


def show(decisions: list[Decision]) -> None:
    if not decisions:
        print("no decisions")
        return
    rows = [
        [d.id, when(d.ts_ms), d.outcome.replace("_", " "), _wants(d), d.node or "-",
         d.incident_id, d.rule, d.reason]
        for d in decisions
    ]  # fmt: skip
    print_table(["ID", "WHEN", "STATE", "WANTS", "NODE", "INCIDENT", "RULE", "WHY"], rows)


def _wants(decision: Decision) -> str:
    if decision.gpu is not None:
        return f"isolate GPU {decision.gpu.slot}"
    return decision.wanted if decision.node else "go on"

"""`drover risk`: nodes by their chance to fail within a week, and why."""

from __future__ import annotations

import argparse

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.output import print_json, print_table
from drover_core.times import iso
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "nodes by their chance to fail within a week, the likeliest first, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--limit", type=count, default=20, help="at most so many (default 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object per node")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_RISK, pb.RiskRequest(limit=args.limit))
    if args.json:
        for node in reply.in_trouble:
            print_json(
                {
                    "node": node.node, "in_trouble": True, "incident": node.incident_id, "kind": node.kind,
                    "cause": node.cause, "severity": node.severity, "since_ms": node.since_ms,
                    "summary": node.summary,
                }
            )  # fmt: skip
        for row in reply.nodes:
            print_json(
                {
                    "node": row.node, "chance": row.chance, "days": reply.days, "reasons": list(row.reasons),
                    "in_trouble": row.in_trouble,
                }
            )  # fmt: skip
        return 0
    if reply.in_trouble:
        print_table(
            ["IN TROUBLE NOW", "SEVERITY", "SINCE", "WHAT"],
            [[node.node, node.severity, iso(node.since_ms), node.summary] for node in reply.in_trouble],
        )
        if reply.in_trouble_total > len(reply.in_trouble):
            print(f"{len(reply.in_trouble)} of {reply.in_trouble_total} nodes in trouble shown; --limit shows more")
        print("They have failed already: drover incidents says what to do. Which of the others may fail next:")
        print()
    if not reply.total:
        print("no ranking yet: it comes with the first buckets, and a standby collector has none")
        return 0
    known, total = [row for row in reply.nodes if row.reasons], reply.total - reply.in_trouble_total
    if not reply.nodes:
        print("there is no other node")
        return 0
    if not known:
        each = f"{reply.nodes[0].chance:.1%} each"
        print(f"of {total} nodes nothing is known that sets one apart: {each} within {reply.days} days")
        return 0
    print_table(
        ["NODE", f"WITHIN {reply.days} DAYS", "WHY"],
        [[row.node, f"{row.chance:.0%}", "; ".join(row.reasons)] for row in known],
    )
    if len(known) < len(reply.nodes):
        print(f"of the other {total - len(known)} nodes nothing is known")
    elif total > len(known):
        print(f"{len(known)} of {total} shown; --limit shows more")
    print("A ranking, not a prophecy: most failures come without a forerunner (docs/explanation/detectors.md, risk)")
    return 0

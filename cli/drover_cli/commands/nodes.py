"""`drover nodes`: one line per node, the worst first."""

from __future__ import annotations

import argparse
import time

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.output import ago, message_json, print_json, print_table
from drover_core.model.events import Health
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "nodes with their health and why, the worst first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("contains", nargs="?", default="", help="only nodes whose name contains this")
    parser.add_argument("--health", choices=[h.value for h in Health], default="", help="only nodes of this health")
    parser.add_argument("--limit", type=count, default=1000, help="at most so many (default 1000)")
    parser.add_argument("--json", action="store_true", help="one JSON object per node")


def run(args: argparse.Namespace) -> int:
    request = pb.ListNodesRequest(health=args.health, contains=args.contains, limit=args.limit)
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_NODES, request)
    if args.json:
        for row in reply.nodes:
            print_json(message_json(row, node=row.name))  # `name`: its older key
        return 0
    if not reply.nodes:
        print("no node fits; `drover nodes` without a filter lists all")
        return 0
    now = round(time.time() * 1000)
    print_table(
        ["NODE", "RACK", "POOL", "SKU", "HEALTH", "BAD GPUS", "LAST SEEN", "WHY"],
        [
            [
                row.name, row.rack, row.pool, row.sku, row.health,
                ",".join(str(i) for i, h in enumerate(row.gpu_health) if h != Health.HEALTHY) or "-",
                ago(row.last_seen_ms, now), row.reason or "-",
            ]
            for row in reply.nodes
        ],
    )  # fmt: skip
    if reply.total > len(reply.nodes):
        print(f"{len(reply.nodes)} of {reply.total} shown; --limit shows more")
    return 0

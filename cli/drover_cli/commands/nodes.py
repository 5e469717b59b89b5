"""`drover nodes`: one line per node, the worst first."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.output import ago, message_json, print_json, print_table
from drover_core.clusters import ALL
from drover_core.model.events import Health
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "nodes with their health and why, the worst first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True)
    parser.add_argument("contains", nargs="?", default="", help="only nodes whose name contains this")
    parser.add_argument("--health", choices=[h.value for h in Health], default="", help="only nodes of this health")
    parser.add_argument("--limit", type=count, default=1000, help="at most so many (default 1000)")
    parser.add_argument("--json", action="store_true", help="one JSON object per node")


def run(args: argparse.Namespace) -> int:
    """With --cluster all: exit code 3 where a collector does not answer."""
    if args.cluster != ALL:
        answers, missing = {args.cluster: _ask(args)}, False
    else:
        found = contexts.ask_each(args, _ask)
        answers = contexts.answered(found)
        missing = len(answers) < len(found)
    rows = [(name, row) for name, reply in answers.items() for row in reply.nodes]
    if args.json:
        for name, row in rows:
            of = {"cluster": name} if name else {}
            print_json({**of, **message_json(row, node=row.name)})  # `name`: its older key
    elif not rows:
        print("no node fits; `drover nodes` without a filter lists all")
    else:
        _show(rows, sum(reply.total for reply in answers.values()), all_=args.cluster == ALL)
    return 3 if missing else 0


def _ask(args: argparse.Namespace) -> pb.NodeList:
    with client.connect(args) as fleet:
        return fleet.call(
            methods.LIST_NODES, pb.ListNodesRequest(health=args.health, contains=args.contains, limit=args.limit)
        )


def _show(found: Sequence[tuple[str, pb.NodeRow]], total: int, *, all_: bool) -> None:
    now = round(time.time() * 1000)
    rows = [
        [
            *([cluster] if all_ else []), row.name, row.rack, row.pool, row.sku, row.health,
            ",".join(str(i) for i, h in enumerate(row.gpu_health) if h != Health.HEALTHY) or "-",
            ago(row.last_seen_ms, now), row.reason or "-",
        ]
        for cluster, row in found
    ]  # fmt: skip
    headers = ["NODE", "RACK", "POOL", "SKU", "HEALTH", "BAD GPUS", "LAST SEEN", "WHY"]
    print_table(["CLUSTER", *headers] if all_ else headers, rows)
    if total > len(found):
        print(f"{len(found)} of {total} shown; --limit shows more")

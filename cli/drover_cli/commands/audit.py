"""`drover audit`: who did what, when and why: people, and Drover itself."""

from __future__ import annotations

import argparse
import json
import time

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.commands.export import moment
from drover_cli.output import print_json, print_table, when
from drover_core.model.events import Audit, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "who did what, when and why: decisions and actions of Drover itself, answers, silences, changes of the policy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("subject", nargs="?", default="", help="only of this incident, node or decision")
    parser.add_argument("--since", default="30d", help="an age such as 12h, or a time (default 30d)")
    parser.add_argument("--limit", type=count, default=200, help="at most so many (default 200)")
    parser.add_argument("--people", action="store_true", help="without what Drover decided and did by itself")
    parser.add_argument("--json", action="store_true", help="one JSON object per line of it")


def run(args: argparse.Namespace) -> int:
    request = pb.AuditRequest(
        since_ms=moment(args.since, round(time.time() * 1000)), subject=args.subject, limit=args.limit,
        whole=not args.people,
    )  # fmt: skip
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_AUDIT, request)
    if args.json:
        for text in reply.audit_json:
            print_json(json.loads(text))
        return 0
    lines = [from_json(Audit, text) for text in reply.audit_json]
    if not lines:
        print("nothing was done by hand" if args.people else "nothing was decided or done")
        return 0
    print_table(
        ["WHEN", "WHO", "WHAT", "ABOUT", "WHY", "DETAIL"],
        [[when(a.ts_ms), a.by, a.what, a.subject, a.why, a.detail] for a in lines],
    )
    return 0

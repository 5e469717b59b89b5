"""What `drover drain`, `isolate` and `resume` share."""

from __future__ import annotations

import argparse

from drover_cli import client
from drover_cli.output import plain, print_json
from drover_proto import fleet_pb2 as pb

DEADLINE_S = 30.0  # the collector answers within 8 s, done or not


def add_arguments(parser: argparse.ArgumentParser, force: str) -> None:
    client.add_arguments(parser)
    parser.add_argument("node", metavar="NODE", help="as in the fleet file")
    parser.add_argument("--why", required=True, help="a sentence for the record, and for the scheduler's reason")
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace, act: str) -> int:
    """0: done, or under way; 1: it failed, the answer says why."""
    with client.connect(args) as stub:
        request = pb.ActRequest(node=args.node, act=act, why=args.why, force=args.force)
        reply = stub.ActOnNode(request, timeout=DEADLINE_S)
    if args.json:
        print_json({"node": args.node, "act": act, "id": reply.action_id, "state": reply.state, "detail": reply.detail})
    else:
        state = {"intended": "under way", "": "not yet"}.get(reply.state, reply.state)
        detail = plain(reply.detail) or "`drover explain` and the console say how it goes on"
        print(f"{act} {plain(args.node)}: {state}: {detail}")
    return int(reply.state in ("failed", "undone"))

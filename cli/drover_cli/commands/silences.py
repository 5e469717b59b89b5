"""`drover silences`: which notifications are held back, until when and why."""

from __future__ import annotations

import argparse
import json
import time

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.commands.export import moment
from drover_cli.output import print_json, print_table, when
from drover_core.model.events import Silence, from_json
from drover_core.model.silences import describe_scope
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "silences and maintenance windows that are in force or to come, the first to end first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--since", metavar="T", help="those too that have ended since: an age such as 7d, or a time")
    parser.add_argument("--limit", type=count, default=1000, help="at most so many (default 1000)")
    parser.add_argument("--json", action="store_true", help="one JSON object per silence")


def run(args: argparse.Namespace) -> int:
    now_ms = round(time.time() * 1000)
    request = pb.SilencesRequest(since_ms=moment(args.since, now_ms) if args.since else 0, limit=args.limit)
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_SILENCES, request)
    if args.json:
        for text in reply.silences_json:
            print_json(json.loads(text))
        return 0
    found = [from_json(Silence, text) for text in reply.silences_json]
    if not found:
        print("no silences")
        return 0
    rows = [
        [s.id, when(s.from_ms), when(s.until_ms), state(s, now_ms), "yes" if s.maintenance else "no", describe_scope(s),
         s.by, s.why]
        for s in found
    ]  # fmt: skip
    print_table(["ID", "FROM", "UNTIL", "STATE", "HOLDS ACTIONS", "OF", "WHO", "WHY"], rows)
    return 0


def state(silence: Silence, now_ms: int) -> str:
    if silence.ended_by:
        return f"ended by {silence.ended_by}"
    if silence.until_ms <= now_ms:
        return "over"
    return "in force" if silence.from_ms <= now_ms else "to come"

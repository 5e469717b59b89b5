"""`drover maintenance [NODE ...]`: list planned work on nodes, or report what somebody else has planned."""

from __future__ import annotations

import argparse
import json
import time

from drover_cli import client
from drover_cli.commands.export import moment
from drover_cli.commands.silence import show_silence
from drover_cli.errors import CliError
from drover_cli.output import print_json, print_table, when
from drover_core.model.events import Silence, from_json
from drover_core.model.silences import describe_scope
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "planned work on nodes: list it, or report what a cloud or another team has planned"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("node", nargs="*", metavar="NODE", help="report work on these nodes; without: list all work")
    parser.add_argument("--from", dest="begins", metavar="T", help="when it begins, ISO 8601 (default: now)")
    parser.add_argument("--until", metavar="T", help="when it ends, ISO 8601; it ends by itself then")
    parser.add_argument("--source", default="cli", help="who plans it, such as aws (default: cli)")
    parser.add_argument("--id", default="", help="its source's name for this work: the same one changes it later")
    parser.add_argument("--over", action="store_true", help="the work of this --source and --id is done or cancelled")
    parser.add_argument("--why", default="", help="what is done there, kept with your certificate's name")
    parser.add_argument("--json", action="store_true", help="one JSON object for each")


def run(args: argparse.Namespace) -> int:
    if not args.node and not args.over:
        return _list(args)
    now_ms = round(time.time() * 1000)
    if not args.why or (not args.until and not args.over):
        raise CliError("give --why, and --until with the time at which it ends")
    if args.over and not args.id:
        raise CliError("--over: give --id, its source's name for the work")
    begins_ms = moment(args.begins, now_ms) if args.begins else 0
    request = pb.MaintenanceReport(
        node=args.node, from_ms=begins_ms, until_ms=moment(args.until, now_ms) if args.until else 0, why=args.why,
        source=args.source, id=args.id or f"{'+'.join(args.node)[:60]} {begins_ms or now_ms}", over=args.over,
    )  # fmt: skip
    with client.connect(args) as fleet:
        return show_silence(fleet.call(methods.REPORT_MAINTENANCE, request), args)


def _list(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_SILENCES, pb.SilencesRequest())
    found = [silence for text in reply.silences_json if (silence := from_json(Silence, text)).maintenance]
    if args.json:
        for text in reply.silences_json:
            if from_json(Silence, text).maintenance:
                print_json(json.loads(text))
        return 0
    if not found:
        print("no planned work is under way or to come")
        return 0
    rows = [[s.id, when(s.from_ms), when(s.until_ms), describe_scope(s), s.by, s.why, s.event or "-"] for s in found]
    print_table(["ID", "FROM", "UNTIL", "OF", "WHO", "WHY", "EVENT"], rows)
    return 0

"""`drover find TEXT`: what a text names, in all clusters: the search of the console."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.output import print_json, print_table
from drover_core.clusters import ALL
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "nodes, GPUs, jobs, incidents, XIDs, racks and leaf switches that a text names, in all clusters"


class Hit(NamedTuple):
    cluster: str
    kind: str
    name: str
    what: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True, all_usual=True)
    what = "part of a name, UUID, serial number or id, words of an incident, or `xid 79`"
    parser.add_argument("text", metavar="TEXT", help=what)
    parser.add_argument("--limit", type=count, default=20, help="of each cluster (default 20, at most 100)")
    parser.add_argument("--json", action="store_true", help="one JSON object per hit")


def run(args: argparse.Namespace) -> int:
    """Exit code 4: nothing has it; 3: nothing has it, and not all clusters answered."""
    if args.cluster == ALL:
        found = contexts.ask_each(args, _of)
        answers = contexts.answered(found)
        missing = len(answers) < len(found)
    else:
        answers, missing = {args.cluster: _of(args)}, False
    hits = [hit for of in answers.values() for hit in of]
    if args.json:
        for hit in hits:
            print_json(hit._asdict())
    elif hits:
        print_table(["CLUSTER", "KIND", "NAME", "WHAT"], hits)
    else:
        print(f"nothing has {args.text!r}{' in the clusters that answered' if missing else ''}")
    return 0 if hits else 3 if missing else 4


def _of(args: argparse.Namespace) -> list[Hit]:
    with client.connect(args) as fleet:
        reply = fleet.call(methods.SEARCH, pb.SearchRequest(text=args.text, limit=args.limit))
    name = args.cluster or "-"
    return [
        Hit(name, hit.kind, hit.incident, f"{hit.name}; {hit.detail}")
        if hit.kind == "incident"
        else Hit(name, hit.kind, hit.name, hit.detail)
        for hit in reply.hits
    ]

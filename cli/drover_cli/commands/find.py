"""`drover find TEXT`: nodes, jobs and open incidents with a text in their name or words, in all clusters."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.output import print_json, print_table, where
from drover_core.clusters import ALL
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "nodes, jobs and open incidents with this text in their name or words, in all clusters"
OPEN = 1000  # incidents looked through


class Hit(NamedTuple):
    cluster: str
    kind: str
    name: str
    what: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True, all_usual=True)
    parser.add_argument("text", metavar="TEXT", help="part of a name of a node or job, or of an incident's words")
    parser.add_argument("--limit", type=count, default=20, help="of each kind and cluster (default 20)")
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
        nodes = fleet.call(methods.LIST_NODES, pb.ListNodesRequest(contains=args.text, limit=args.limit)).nodes
        jobs = fleet.call(methods.LIST_JOBS, pb.ListJobsRequest(contains=args.text, ended=True, limit=args.limit)).jobs
        opened = fleet.call(methods.LIST_INCIDENTS, pb.ListIncidentsRequest(limit=OPEN)).incidents_json
    name, wanted = args.cluster or "-", args.text.casefold()
    hits = [
        Hit(name, "node", node.name, f"{node.health}{f': {node.reason}' if node.reason else ''}") for node in nodes
    ] + [Hit(name, "job", job.job, f"{job.gpus} GPUs on {job.nodes} nodes") for job in jobs]
    incidents = [from_json(Incident, text) for text in opened]
    fitting = [one for one in incidents if wanted in _words(one).casefold()][: args.limit]
    return hits + [Hit(name, "incident", one.id, f"{one.severity}, {where(one)}: {one.summary}") for one in fitting]


def _words(incident: Incident) -> str:
    cause = incident.cause.replace("_", " ")
    return f"{incident.id} {incident.summary} {cause} {incident.node or ''} {incident.job or ''}"

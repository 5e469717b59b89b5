"""`drover incidents`: what is wrong, where, since when, what to do."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.output import duration, incident_json, print_json, print_table, where
from drover_core.clusters import ALL
from drover_core.model.events import SEVERITY_ORDER, WANTED_ORDER, Incident, Severity, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "incidents, the worst open ones first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True)
    parser.add_argument("--state", choices=["open", "closed", "all"], default="open", help="default: open")
    parser.add_argument("--node", default="", help="only of this node")
    parser.add_argument("--min-severity", choices=[s.value for s in Severity], default="info", help="default: info")
    parser.add_argument("--limit", type=count, default=500, help="at most so many (default 500)")
    parser.add_argument("--json", action="store_true", help="one JSON object per incident")


def run(args: argparse.Namespace) -> int:
    """With --cluster all: exit code 3 where a collector does not answer."""
    if args.cluster != ALL:
        answers, missing = {args.cluster: _ask(args)}, False
    else:
        found = contexts.ask_each(args, _ask)
        answers = contexts.answered(found)
        missing = len(answers) < len(found)
    incidents = [
        (name, from_json(Incident, text), reply.silenced) for name, reply in answers.items()
        for text in reply.incidents_json
    ]  # fmt: skip
    if args.cluster == ALL:
        incidents.sort(key=lambda row: _worst_first(row[1]))
    if args.json:
        for name, incident, silenced in incidents:
            of = {"cluster": name} if name else {}
            print_json({**of, **incident_json(incident), "silenced": silenced.get(incident.id)})
    elif not incidents:
        print("no incidents" if args.state == "all" else f"no {args.state} incidents")
    else:
        _show(incidents, sum(reply.total for reply in answers.values()), all_=args.cluster == ALL)
    return 3 if missing else 0


def _ask(args: argparse.Namespace) -> pb.IncidentList:
    request = pb.ListIncidentsRequest(
        state=args.state, node=args.node, limit=args.limit, min_severity=args.min_severity
    )
    with client.connect(args) as fleet:
        return fleet.call(methods.LIST_INCIDENTS, request)


def _worst_first(incident: Incident) -> tuple[bool, int, int]:
    """As each collector sorts its own; a stable sort keeps the rest."""
    closed = incident.closed_ms is not None
    return closed, -SEVERITY_ORDER.index(incident.severity), -WANTED_ORDER.index(incident.action)


def _show(incidents: Sequence[tuple[str, Incident, Mapping[str, str]]], total: int, *, all_: bool) -> None:
    now = round(time.time() * 1000)
    rows = []
    for cluster, i, silenced in incidents:
        lasted = duration(((i.closed_ms or now) - i.since_ms) / 1000) + (", closed" if i.closed_ms else "")
        mute = f"({silenced[i.id]}) " if i.id in silenced else ""
        row = [i.id, i.severity, i.kind, i.cause, where(i), lasted, i.action, mute + i.summary]
        rows.append([cluster, *row] if all_ else row)
    headers = ["ID", "SEVERITY", "KIND", "CAUSE", "WHERE", "FOR", "WANTS", "SUMMARY"]
    print_table(["CLUSTER", *headers] if all_ else headers, rows)
    if total > len(incidents):
        print(f"{len(incidents)} of {total} shown; --limit shows more")

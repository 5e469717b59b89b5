"""`drover incidents`: what is wrong, where, since when, what to do."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence

from drover_cli import client, contexts
from drover_cli.arguments import count
from drover_cli.commands.export import moment
from drover_cli.errors import CliError
from drover_cli.output import duration, incident_json, message_json, print_json, print_table, where
from drover_core.clusters import ALL
from drover_core.model.collector_roles import why_unjudged
from drover_core.model.events import SEVERITY_ORDER, WANTED_ORDER, Incident, IncidentKind, Severity, from_json
from drover_core.times import iso
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "incidents, the worst open ones first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True)
    parser.add_argument("--state", choices=["open", "closed", "all"], default="open", help="default: open")
    parser.add_argument("--node", default="", help="only of this node")
    parser.add_argument("--min-severity", choices=[s.value for s in Severity], default="info", help="default: info")
    parser.add_argument("--kind", default="", choices=list(map(str, IncidentKind)), help="only of this kind")
    parser.add_argument("--job", default="", help="only of this job")
    parser.add_argument("--rack", default="", help="only on nodes of this rack")
    parser.add_argument("--text", default="", help="only with this in its summary, node, job, id, assignee or ticket")
    parser.add_argument("--since", metavar="T", help="open or closed since: an age such as 12h, or a time")
    parser.add_argument("--silenced", choices=["no", "only"], default="", help="without silenced ones, or only them")
    parser.add_argument(
        "--acknowledged",
        choices=["no", "only"],
        default="",
        help="without acknowledged ones, or only them",
    )
    parser.add_argument("--assignee", default="", help="only those assigned to this person")
    parser.add_argument(
        "--sort", choices=["worst", "newest", "oldest", "longest", "lost"], default="worst", help="default: worst"
    )
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
        (name, from_json(Incident, text), reply) for name, reply in answers.items() for text in reply.incidents_json
    ]
    if args.cluster == ALL and args.sort == "worst":
        incidents.sort(key=lambda row: _worst_first(row[1]))
    if args.json:
        for name, incident, reply in incidents:
            of = {"cluster": name} if name else {}
            more = {"silenced": reply.silenced.get(incident.id), "handling": _handling(reply, incident.id)}
            print_json({**of, **incident_json(incident), **more})
    elif not incidents:
        print(_none(args, answers, missing))
    else:
        _show(incidents, sum(reply.total for reply in answers.values()), all_=args.cluster == ALL)
    return 3 if missing else 0


def _none(args: argparse.Namespace, answered: Collection[str], missing: bool) -> str:
    """Return what an empty list means: before anything is judged, nothing is known of what is open."""
    if not answered:
        return "no cluster answers: what is open is not known"
    none = "no incidents" if args.state == "all" else f"no {args.state} incidents"
    none += " in the clusters that answer" if missing else ""
    if args.state == "closed":
        return none
    if args.cluster != ALL:
        why = _unjudged(args)
        return none if why is None else f"{why}: what is open is not known"
    found = contexts.ask_each(args, _unjudged)
    whys = {name: found[name] for name in answered if found[name] is not None}
    if not whys:
        return none
    others = "" if len(whys) == len(answered) else f"; {none} in the others"
    unknown = ", ".join(
        f"{name} ({'no answer any more' if isinstance(why, CliError) else why})" for name, why in whys.items()
    )
    return f"what is open is not known in {unknown}{others}"


def _unjudged(args: argparse.Namespace) -> str | None:
    """Return why an empty list of a collector says nothing; None if it has judged."""
    with client.connect(args) as fleet:
        status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
    return None if status.newest_tick_ms else why_unjudged(status.role)


def _ask(args: argparse.Namespace) -> pb.IncidentList:
    request = pb.ListIncidentsRequest(
        state=args.state, node=args.node, limit=args.limit, min_severity=args.min_severity, kind=args.kind,
        job=args.job, rack=args.rack, text=args.text, silenced=args.silenced, acknowledged=args.acknowledged,
        assignee=args.assignee, sort=args.sort,
        since_ms=moment(args.since, round(time.time() * 1000)) if args.since else 0,
    )  # fmt: skip
    with client.connect(args) as fleet:
        return fleet.call(methods.LIST_INCIDENTS, request)


def _worst_first(incident: Incident) -> tuple[bool, int, int]:
    """As each collector sorts its own; a stable sort keeps the rest."""
    closed = incident.closed_ms is not None
    return closed, -SEVERITY_ORDER.index(incident.severity), -WANTED_ORDER.index(incident.action)


def _handling(reply: pb.IncidentList, id_: str) -> dict[str, object] | None:
    return message_json(reply.handling[id_]) if id_ in reply.handling else None


def _who(handling: pb.IncidentHandling | None) -> str:
    """`acknowledged by alex, assigned to bo`."""
    if handling is None:
        return ""
    parts = [f"acknowledged by {handling.acknowledged_by}"] if handling.acknowledged_by else []
    return ", ".join([*parts, *([f"assigned to {handling.assignee}"] if handling.assignee else [])])


def _show(incidents: Sequence[tuple[str, Incident, pb.IncidentList]], total: int, *, all_: bool) -> None:
    now = round(time.time() * 1000)
    rows = []
    for cluster, i, reply in incidents:
        lasted = duration(((i.closed_ms or now) - i.since_ms) / 1000) + (", closed" if i.closed_ms else "")
        mute = "".join(f"({text}) " for text in (reply.silenced.get(i.id), _who(reply.handling.get(i.id))) if text)
        since = f"{iso(i.since_ms)[:16]}Z"
        row = [i.id, i.severity, i.kind, i.cause, where(i), since, lasted, i.action, mute + i.summary]
        rows.append([cluster, *row] if all_ else row)
    headers = ["ID", "SEVERITY", "KIND", "CAUSE", "WHERE", "SINCE", "FOR", "WANTS", "SUMMARY"]
    print_table(["CLUSTER", *headers] if all_ else headers, rows)
    if total > len(incidents):
        print(f"{len(incidents)} of {total} shown; --limit shows more")

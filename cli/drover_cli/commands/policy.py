"""`drover policy check | diff | backtest`: is a policy good, how do two differ, what would one have done."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import duration, plain, print_json, print_table, when

if TYPE_CHECKING:
    from drover_collector.fleet_index import FleetIndex
    from drover_collector.policy import Policy
    from drover_collector.policy_backtest import Backtest
    from drover_proto.events import Incident

HELP = "check a policy, compare two, or see what one would have done with past incidents"
ALL = 10_000  # incidents of one question
SHOWN = 40  # differences and reasons of a table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    check = parts.add_parser("check", help="is this policy's file good; exit code 2 and the line if not")
    check.add_argument("policy", metavar="FILE", help="policy file, or nvidia, strict, cautious")
    diff = parts.add_parser("diff", help="how two policies differ; exit code 1 if they do")
    diff.add_argument("a", metavar="A", help="policy file, or nvidia, strict, cautious")
    diff.add_argument("b", metavar="B", help="likewise")
    back = parts.add_parser("backtest", help="what a policy would have done, against what another one would have")
    client.add_arguments(back)
    back.add_argument("policy", metavar="POLICY", help="policy file, or nvidia, strict, cautious")
    back.add_argument("--against", default="nvidia", metavar="POLICY", help="the present one (default nvidia)")
    source = back.add_mutually_exclusive_group()
    source.add_argument("--case", type=Path, metavar="CASE", help="of this case instead of the collector")
    source.add_argument("--since", default="30d", help="of the collector's history: 30d (default), 12h, or a time")
    for part in (check, diff, back):
        part.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    parts = {"check": _check, "diff": _diff, "backtest": _backtest}
    return parts[args.part](args)


def _policy(text: str) -> Policy:
    with needs("collector"):
        from drover_collector.policy import PRESETS, Policy
    from drover_proto.settings import SettingsError

    if text not in PRESETS and not Path(text).is_file():
        raise CliError(f"policy {text!r}: no such preset or file; give {', '.join(PRESETS)} or a file's path")
    try:
        return Policy.named(text)
    except SettingsError as error:
        raise CliError(str(error)) from None


def _check(args: argparse.Namespace) -> int:
    policy = _policy(args.policy)
    warnings = [
        f"rule {later + 1} ({_name(policy, later)}) never decides: rule {earlier + 1} ({_name(policy, earlier)})"
        " matches all that it does, and comes first"
        for later, earlier in policy.never_decides()
    ]
    if args.json:
        print_json({"policy": policy.name, "mode": policy.most_mode, "rules": len(policy.rules), "warnings": warnings})
    else:
        print(f"{args.policy}: good; {policy.name}, {len(policy.rules)} rules, does at most: {policy.most_mode}")
        for warning in warnings:
            print(f"warning: {plain(warning)}")
    return 0


def _name(policy: Policy, number: int) -> str:
    return policy.rules[number].name or f"action {policy.rules[number].action}"


def _diff(args: argparse.Namespace) -> int:
    a, b = _policy(args.a), _policy(args.b)
    with needs("collector"):
        from drover_collector.policy_diff import differences
    rows = differences(a, b)
    if args.json:
        print_json({"differences": [dict(zip(("what", "a", "b"), row, strict=True)) for row in rows]})
    elif rows:
        print_table(["WHAT", a.name, b.name], rows)
    else:
        print(f"{args.a} and {args.b} decide the same")
    return 1 if rows else 0


def _backtest(args: argparse.Namespace) -> int:
    new, present = _policy(args.policy), _policy(args.against)
    with needs("collector"):
        from drover_collector.policy_backtest import backtest
    started = time.monotonic()
    index, incidents, jobs, until_ms, source = _of_case(args.case) if args.case else _of_collector(args)
    results = [backtest(index, incidents, policy, until_ms, jobs) for policy in (present, new)]
    changed = sorted(
        (i for i in incidents if results[0].outcome(i.id) != results[1].outcome(i.id)), key=lambda i: i.opened_ms
    )
    print(f"{source}; decided twice in {time.monotonic() - started:.1f} s", file=sys.stderr)
    if args.json:
        told = [[i.id, results[0].outcome(i.id), results[1].outcome(i.id)] for i in changed]
        print_json(
            {"incidents": len(incidents), "present": _json(results[0]), "new": _json(results[1]), "changed": told}
        )
        return 0
    _print(results, incidents, changed)
    return 0


def _json(result: Backtest) -> dict[str, object]:
    return {
        "policy": result.policy,
        "wanted": dict(result.wanted),
        "nodes_out": sorted(result.out),
        "times_out": result.times_out,
        "most_out_at_once": result.most_out,
        "node_hours_out": round(result.node_hours, 2),
        "held": len({d.incident_id for d in result.held}),
        "mass_events": result.mass_events,
    }


def _print(results: Sequence[Backtest], incidents: Sequence[Incident], changed: Sequence[Incident]) -> None:
    from drover_cli.commands.incidents import where

    rows: list[list[object]] = [["incidents", *[len(incidents)] * 2]]
    rows += [[f"wants {word}", *(r.wanted[word] for r in results)] for word in ("advise", "probe", "drain", "isolate")]
    rows += [
        ["nodes taken out, times", *(r.times_out for r in results)],
        ["different nodes", *(len(r.out) for r in results)],
        ["most out at once", *(r.most_out for r in results)],
        ["node-hours out, until the incident closed", *(f"{r.node_hours:.1f}" for r in results)],
        ["held back by the guard, incidents", *(len({d.incident_id for d in r.held}) for r in results)],
        ["mass events (a person is asked)", *(r.mass_events for r in results)],
    ]
    names = [r.policy for r in results]
    print_table(["", f"{names[0]} (present)", f"{names[1]} (new)"], rows)
    if changed:
        print(f"\n{len(changed)} incidents would be decided otherwise:")
        told = [
            [
                when(i.opened_ms),
                where(i),
                f"{i.kind}/{i.cause}",
                i.severity,
                *(r.outcome(i.id) for r in results),
                _lasted(i),
            ]
            for i in changed[:SHOWN]
        ]
        print_table(["OPENED", "WHERE", "WHAT", "SEVERITY", *names, "LASTED"], told)
        if len(changed) > SHOWN:
            print(f"{SHOWN} of {len(changed)} shown; --json names all")
    for result in results:
        held = list({d.incident_id: d for d in result.held}.values())
        if held:
            print(f"\nheld back under {result.policy}:")
            print_table(
                ["WHEN", "NODE", "WANTED", "WHY"], [[when(d.ts_ms), d.node, d.wanted, d.reason] for d in held[:10]]
            )


def _lasted(incident: Incident) -> str:
    if incident.closed_ms is None:
        return "still open"
    return duration((incident.closed_ms - incident.opened_ms) / 1000)


def _of_collector(args: argparse.Namespace) -> tuple[FleetIndex, list[Incident], dict[str, set[str]], int, str]:
    """Its incidents since then, and its fleet. Nodes of jobs of the past are not known here."""
    from drover_cli.commands.export import moment
    from drover_collector.fleet_index import FleetIndex
    from drover_proto import fleet_pb2 as pb
    from drover_proto.events import Incident, from_json
    from drover_proto.fleet import FleetSpec, NodeSpec

    now_ms = round(time.time() * 1000)
    since_ms = moment(args.since, now_ms)
    with client.connect(args) as stub:
        layout = stub.GetLayout(pb.LayoutRequest(), timeout=client.DEADLINE_S)
        request = pb.ListIncidentsRequest(state="all", since_ms=since_ms, limit=ALL)
        reply = stub.ListIncidents(request, timeout=client.DEADLINE_S)
    nodes = tuple(NodeSpec(n.name, r.name, n.leaf, n.pool, n.sku, n.gpus) for r in layout.racks for n in r.nodes)
    incidents = [from_json(Incident, text) for text in reply.incidents_json]
    source = f"{len(incidents)} incidents of {args.collector} since {when(since_ms)}; caps of jobs are left out"
    if reply.total > len(incidents):
        source += f" ({reply.total} there are; give a later --since)"
    return FleetIndex(FleetSpec(nodes)), incidents, {}, now_ms, source


def _of_case(path: Path) -> tuple[FleetIndex, list[Incident], dict[str, set[str]], int, str]:
    """The incidents an export kept; of a case without them, those of one replay."""
    with needs("collector"):
        from drover_cli.case import read_jsonl
        from drover_collector.fleet_index import FleetIndex
    from drover_proto.fleet import FleetError, load_json
    from drover_proto.times import from_iso

    kept = path / "incidents.jsonl"
    if not kept.is_file():
        return _replayed(path)
    try:
        spec = load_json(path / "fleet.json")
    except FleetError as error:
        raise CliError(str(error)) from None
    incidents = []
    for number, row in read_jsonl(kept):
        try:
            incidents.append(_incident(row))
        except (KeyError, TypeError, ValueError) as error:
            raise CliError(f"{kept}: line {number}: no incident as an export writes it ({error})") from None
    jobs = {job.id: {node for node, _ in job.members} for job in spec.jobs}
    until_ms = max((i.closed_ms or i.opened_ms for i in incidents), default=0)
    events = path / "events.jsonl"
    if events.is_file():
        until_ms = max(
            [until_ms, *(from_iso(row["ts"]) for _, row in read_jsonl(events) if isinstance(row.get("ts"), str))]
        )
    return FleetIndex(spec), incidents, jobs, until_ms, f"{len(incidents)} incidents that {kept} keeps"


def _incident(row: dict[str, Any]) -> Incident:
    """An incident out of its report (drover_proto.reports)."""
    from drover_proto.events import Incident, from_json
    from drover_proto.times import from_iso

    held = {key: value for key, value in row.items() if key not in ("opened", "since", "closed", "evidence")}
    held |= {f"{key}_ms": from_iso(row[key]) for key in ("opened", "since")}
    held["closed_ms"] = None if row.get("closed") is None else from_iso(row["closed"])
    return from_json(Incident, json.dumps(held))


def _replayed(path: Path) -> tuple[FleetIndex, list[Incident], dict[str, set[str]], int, str]:
    from drover_cli.case import read_case
    from drover_collector.policy import Policy
    from drover_collector.replay import Replay

    case = read_case(path)
    incidents: dict[str, Incident] = {}
    for outcome in Replay(case.index, case.buckets(), case.events, Policy.load()):
        incidents.update((i.id, i) for i in outcome.incidents)
    jobs = {job.id: {node for node, _ in job.members} for job in case.spec.jobs}
    source = f"{len(incidents)} incidents of a replay of {path}, which has no incidents.jsonl (drover export writes it)"
    return case.index, list(incidents.values()), jobs, case.span[1], source

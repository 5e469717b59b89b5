"""`drover policy check | diff | backtest | if-enforced`: is it good, how do two differ, what would one have done."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import plain, print_json, print_table, say, when
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

if TYPE_CHECKING:
    from drover_cli.scoring.score import Label
    from drover_collector.fleet.index import FleetIndex
    from drover_collector.policy.policy import Policy
    from drover_core.model.events import Incident

HELP = "check a policy, compare two, or see what one would have done with past incidents"
ALL = 10_000  # incidents of one question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True)
    check = parts.add_parser("check", help="is this policy's file good; exit code 2 and the line if not")
    check.add_argument("policy", metavar="FILE", help="policy file, or nvidia, strict, cautious")
    diff = parts.add_parser("diff", help="how two policies differ; exit code 1 if they do")
    diff.add_argument("a", metavar="A", help="policy file, or nvidia, strict, cautious")
    diff.add_argument("b", metavar="B", help="the policy to compare with: as A")
    back = parts.add_parser("backtest", help="what a policy would have done, against what another one would have")
    client.add_arguments(back)
    back.add_argument("policy", metavar="POLICY", help="policy file, or nvidia, strict, cautious")
    back.add_argument(
        "--against",
        metavar="POLICY",
        help="compare with this one (default: the collector's present one; of a case nvidia)",
    )
    source = back.add_mutually_exclusive_group()
    source.add_argument("--case", type=Path, metavar="CASE", help="of this case instead of the collector")
    source.add_argument("--since", default="30d", help="of the collector's history: 30d (default), 12h, or a time")
    enforced = parts.add_parser("if-enforced", help="what Drover would have done by itself, had the policy enforced")
    client.add_arguments(enforced)
    enforced.add_argument("--since", default="7d", help="an age such as 12h, or a time (default 7d)")
    parts.metavar = "{" + ",".join(parts.choices) + "}"  # without a part, the error lists them
    for part in (check, diff, back, enforced):
        part.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    parts = {"check": _check, "diff": _diff, "backtest": _backtest, "if-enforced": _if_enforced}
    return parts[args.part](args)


def _policy(text: str) -> Policy:
    with needs("collector"):
        from drover_collector.policy.policy import PRESETS, Policy
    from drover_core.settings import SettingsError

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
        from drover_collector.policy.diff import differences
    rows = differences(a, b)
    if args.json:
        print_json({"differences": [dict(zip(("what", "a", "b"), row, strict=True)) for row in rows]})
    elif rows:
        print_table(["WHAT", a.name, b.name], rows)
    else:
        print(f"{args.a} and {args.b} decide the same")
    return 1 if rows else 0


def _if_enforced(args: argparse.Namespace) -> int:
    """Of decisions that were made, with the guard as it stood then; `backtest` decides again."""
    from drover_cli.commands.decisions import show
    from drover_cli.commands.export import moment
    from drover_core.model.events import Decision, from_json
    from drover_core.model.policy_what_if import describe_enforcement

    since_ms = moment(args.since, round(time.time() * 1000))
    with client.connect(args) as fleet:
        reply = fleet.call(methods.LIST_DECISIONS, pb.DecisionsRequest(since_ms=since_ms, limit=ALL))
    found = [from_json(Decision, text) for text in reply.decisions_json]
    said, about = describe_enforcement(found, f"the time since {when(since_ms)}")
    if args.json:
        print_json({"said": said, "decisions": [dataclasses.asdict(decision) for decision in about]})
        return 0
    say(said)
    if about:
        show(about)
    return 0


def _backtest(args: argparse.Namespace) -> int:
    new = _policy(args.policy)
    with needs("collector"):
        from drover_cli.commands.policy_table import Table
        from drover_collector.policy.backtest import backtest
    started = time.monotonic()
    decided = _of_case(args.case) if args.case else _of_collector(args)
    if args.against or decided.present is None:
        against, is_present = _policy(args.against or "nvidia"), False
    else:
        against, is_present = decided.present, True
    results = (
        backtest(decided.index, decided.incidents, against, decided.until_ms, decided.jobs),
        backtest(decided.index, decided.incidents, new, decided.until_ms, decided.jobs),
    )
    labels = _labels(args.case) if args.case else None
    table = Table(results, decided.incidents, labels, is_present=is_present, in_fact=decided.in_fact)
    print(f"{decided.source}; decided twice in {time.monotonic() - started:.1f} s", file=sys.stderr)
    if args.json:
        print_json(table.json())
    else:
        table.show()
    return 0


def _labels(path: Path) -> list[Label] | None:
    """What was really wrong, where the case says so."""
    from drover_cli.case.read import read_jsonl
    from drover_cli.scoring.score import label_of

    labels = path / "labels.jsonl"
    if not labels.is_file():
        return None
    found = []
    for number, row in read_jsonl(labels):
        try:
            found.append(label_of(row))
        except (KeyError, TypeError, ValueError) as error:
            raise CliError(f"{labels}: line {number}: no label as docs/reference/cases.md has it ({error})") from None
    return found


@dataclasses.dataclass(frozen=True)
class _Decided:
    """What is decided again, and where it is from."""

    index: FleetIndex
    incidents: list[Incident]
    jobs: dict[str, set[str]]
    until_ms: int
    source: str
    present: Policy | None = None  # of the collector; None: of a case
    in_fact: list[pb.ActionLine] | None = None  # nodes that were taken out in that time


def _of_collector(args: argparse.Namespace) -> _Decided:
    """Its incidents since then, its fleet, its policy and what it did. Nodes of jobs of the past are not known here."""
    from drover_cli.commands.export import moment
    from drover_collector.fleet.index import FleetIndex
    from drover_core.model.events import Incident, from_json
    from drover_core.model.fleet import FleetSpec, NodeSpec

    now_ms = round(time.time() * 1000)
    since_ms = moment(args.since, now_ms)
    with client.connect(args) as fleet:
        layout = fleet.call(methods.GET_LAYOUT, pb.LayoutRequest())
        request = pb.ListIncidentsRequest(state="all", since_ms=since_ms, limit=ALL)
        reply = fleet.call(methods.LIST_INCIDENTS, request)
        present = None if args.against else _present(fleet.call(methods.GET_POLICY, pb.PolicyRequest()))
        done = fleet.call(methods.LIST_ACTIONS, pb.ActionsRequest(limit=ALL)).actions
    took = [a for a in done if a.act in ("drain", "isolate") and a.state in ("done", "undone") and a.ts_ms >= since_ms]
    nodes = tuple(NodeSpec(n.name, r.name, n.leaf, n.pool, n.sku, n.gpus) for r in layout.racks for n in r.nodes)
    incidents = [from_json(Incident, text) for text in reply.incidents_json]
    source = f"{len(incidents)} incidents of {args.collector} since {when(since_ms)}; caps of jobs are left out"
    if reply.total > len(incidents):
        source += f" ({reply.total} there are; give a later --since)"
    return _Decided(FleetIndex(FleetSpec(nodes)), incidents, {}, now_ms, source, present, took)


def _present(state: pb.PolicyState) -> Policy:
    """The policy that is in force there."""
    from drover_collector.policy.diff import read

    try:
        return read({"name": state.name, "mode": state.mode, **json.loads(state.policy_json)})
    except (TypeError, KeyError, ValueError):
        raise CliError(
            "the collector's policy has rules that this version does not know; name one: --against nvidia, or its file"
        ) from None


def _of_case(path: Path) -> _Decided:
    """The incidents an export kept; of a case without them, those of one replay."""
    with needs("collector"):
        from drover_cli.case.read import read_jsonl
        from drover_collector.fleet.index import FleetIndex
    from drover_core.model.fleet import FleetError, load_json
    from drover_core.times import from_iso

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
    return _Decided(FleetIndex(spec), incidents, jobs, until_ms, f"{len(incidents)} incidents that {kept} keeps")


def _incident(row: dict[str, Any]) -> Incident:
    """An incident out of its report (drover_core.model.reports)."""
    from drover_core.model.events import Incident, from_json
    from drover_core.times import from_iso

    held = {key: value for key, value in row.items() if key not in ("opened", "since", "closed", "evidence")}
    held |= {f"{key}_ms": from_iso(row[key]) for key in ("opened", "since")}
    held["closed_ms"] = None if row.get("closed") is None else from_iso(row["closed"])
    return from_json(Incident, json.dumps(held))


def _replayed(path: Path) -> _Decided:
    from drover_cli.case.read import read_case
    from drover_collector.engine.replay import Replay
    from drover_collector.policy.policy import Policy

    case = read_case(path)
    incidents: dict[str, Incident] = {}
    for outcome in Replay(case.index, case.buckets(), case.events, Policy.load()):
        incidents.update((i.id, i) for i in outcome.incidents)
    jobs = {job.id: {node for node, _ in job.members} for job in case.spec.jobs}
    source = f"{len(incidents)} incidents of a replay of {path}, which has no incidents.jsonl (drover export writes it)"
    return _Decided(case.index, list(incidents.values()), jobs, case.span[1], source)

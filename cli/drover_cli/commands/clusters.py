"""`drover clusters`: a line for each cluster: health, GPUs, open incidents, mode."""

from __future__ import annotations

import argparse

from drover_cli import client, contexts
from drover_cli.commands.status import as_json
from drover_cli.errors import CliError
from drover_cli.output import print_json, print_table
from drover_core.clusters import ALL
from drover_core.model.events import SEVERITY_ORDER, Health
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "a line for each cluster: health, GPUs, open incidents, mode; who does not answer"
DEADLINE_S = 4.0
HEADERS = ("CLUSTER", "MODE", "GPUS", "HEALTHY", "BAD", "UNKNOWN", "OUT", "INCIDENTS", "WAITS", "WHAT")
OUT = (Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.set_defaults(takes_all=True, all_usual=True)
    parser.add_argument("--json", action="store_true", help="one JSON object per cluster")


def run(args: argparse.Namespace) -> int:
    """Exit code 3 where a collector does not answer."""
    found: dict[str, pb.Status | CliError]
    found = contexts.ask_each(args, _ask) if args.cluster == ALL else {args.cluster or "-": _ask(args)}
    away = [name for name, answer in found.items() if isinstance(answer, CliError)]
    if args.json:
        for name, answer in found.items():
            known = {} if isinstance(answer, CliError) else as_json(answer)
            print_json({"cluster": name, "answers": name not in away, "error": str(answer) if name in away else None}
                       | {key: value for key, value in known.items() if key != "tables"})  # fmt: skip
        return 3 if away else 0
    print_table(HEADERS, [_row(name, answer) for name, answer in found.items()], right=frozenset({2, 3, 4, 5, 6, 8}))
    return 3 if away else 0


def _ask(args: argparse.Namespace) -> pb.Status:
    with client.connect(args) as fleet:
        return fleet.call(methods.GET_STATUS, pb.StatusRequest(), DEADLINE_S)


def _row(name: str, answer: pb.Status | CliError) -> list[object]:
    """What is not known is `?`, never 0."""
    if isinstance(answer, CliError):
        return [name, *["?"] * 8, str(answer)]
    health, expected = answer.gpus_by_health, answer.gpus_expected
    counted = {state: health.get(state, 0) for state in Health}
    unknown = counted[Health.UNKNOWN] + max(0, expected - sum(counted.values()))
    bad = counted[Health.SUSPECT] + counted[Health.CONFIRMED]
    by_severity = answer.open_incidents_by_severity
    opened = ", ".join(f"{by_severity[s]} {s}" for s in reversed(SEVERITY_ORDER) if by_severity[s])
    opened = opened or ("none" if answer.newest_tick_ms else "?")  # before anything is judged nothing found is not none
    notes = "; ".join([*answer.blind, *answer.troubles][:2]) or "-"
    out = sum(counted[state] for state in OUT)
    return [
        name, answer.mode, expected, counted[Health.HEALTHY], bad, unknown, out, opened, answer.pending or "-", notes,
    ]  # fmt: skip

"""`drover report`: what GPU-hours were used for, what faults took, and availability, for those who pay."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "a page for those who pay: useful GPU-hours, what faults took, availability, nodes to repair, energy"
DEADLINE_S = 600.0  # of GetLedger: a week of a large fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    when = parser.add_argument_group("time")
    when.add_argument(
        "--week", nargs="?", const="last", metavar="YEAR-WEEK",
        help="an ISO week such as 2026-W47, UTC; without a value the last one that is over",
    )  # fmt: skip
    when.add_argument("--days", type=count, metavar="N", help="the last N days (default 7)")
    when.add_argument("--since", metavar="T", help="ISO 8601 time, or an age such as 6h, 7d")
    when.add_argument("--until", metavar="T", help="end of the time, in the same form (default: now)")
    parser.add_argument(
        "--format", choices=("markdown", "html", "csv", "json"), default="markdown", help="default markdown"
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file instead of stdout")
    parser.add_argument("--job", default="", metavar="ID", help="of one job, with its nodes")
    parser.add_argument("--limit", type=count, default=200, help="jobs and nodes in CSV and JSON (default 200)")
    case = parser.add_argument_group("of a case, without a collector")
    case.add_argument("--case", type=Path, metavar="CASE", help="a case folder; the detectors run over it")
    case.add_argument("--incidents", type=Path, metavar="FILE", help="lines of drover replay --json, instead of that")
    case.add_argument("--gpu-hour", type=float, metavar="PRICE", help="price of a GPU-hour")
    case.add_argument("--kwh", type=float, metavar="PRICE", help="price of a kWh")
    case.add_argument("--currency", default="", help="what prices are in")


def run(args: argparse.Namespace) -> int:
    from drover_cli.report import forms
    from drover_cli.report.span import of_arguments

    chosen = any(value is not None for value in (args.week, args.days, args.since, args.until))
    span = of_arguments(args, round(time.time() * 1000)) if chosen or not args.case else None
    if args.case is not None:
        ledger = _of_case(args, span)
    else:
        if args.incidents is not None:
            raise CliError("--incidents needs --case")
        assert span is not None
        request = pb.LedgerRequest(from_ms=span[0], to_ms=span[1], job=args.job, limit=args.limit)
        with client.connect(args) as fleet:
            ledger = fleet.call(methods.GET_LEDGER, request, DEADLINE_S)
    form = "json" if args.json else args.format
    made = {
        "markdown": forms.markdown, "html": forms.html_page, "csv": forms.csv_rows, "json": forms.json_text,
    }[form](ledger)  # fmt: skip
    if args.output is None:
        sys.stdout.write(made)
        return 0
    try:
        args.output.write_text(made, "utf-8")
    except OSError as error:
        raise CliError(f"{args.output}: {error.strerror}; choose a file that this user may write") from None
    return 0


def _of_case(args: argparse.Namespace, span: tuple[int, int] | None) -> pb.Ledger:
    with needs("collector"):
        from drover_cli.case.read import read_case
        from drover_cli.report.offline import case_ledger, read_incidents, replayed
        from drover_collector.config import CostConfig
        from drover_collector.ledger.message import Prices
    if args.job:
        raise CliError("--job needs a collector; the report of a case lists all jobs")
    case = read_case(args.case)
    if args.incidents is None:
        incidents, buckets = replayed(case)
    else:
        incidents, buckets = read_incidents(args.incidents, case.span[1]), list(case.buckets())
    for note in case.notes:
        print(f"could not judge: {note}", file=sys.stderr)
    prices = Prices(args.currency, [args.gpu_hour] * len(case.index.nodes), args.kwh, CostConfig().availability)
    return case_ledger(case, incidents, buckets, span, prices, args.limit)

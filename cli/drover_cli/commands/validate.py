"""`drover validate POOL`: prove that nodes may serve, alone and together, with a report to sign."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.errors import CliError

HELP = "prove that nodes may serve, alone and together, before they do: a report to sign"
STAGES = ("node", "storage", "network", "training")
LEVELS = ("quick", "standard", "deep")
ENDINGS = {".md": "markdown", ".html": "html", ".json": "json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("name", nargs="+", help="a pool, or nodes; none may hold a job")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="only these (default: all)")
    parser.add_argument("--level", choices=LEVELS, default="standard", help="how long and thorough (default standard)")
    parser.add_argument(
        "--burn-in", action="store_true", help="of new and repaired nodes: level deep, and only nodes out of service"
    )
    parser.add_argument("--why", default="", help="kept with the orders, and in the report")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="an earlier report as JSON, to hold the training steps against"
    )
    parser.add_argument(
        "--limit", type=count, default=0, metavar="MIN", help="minutes for each stage (default: what suits its level)"
    )
    parser.add_argument(
        "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write the report: .md, .html or .json; repeatable (default: Markdown on stdout)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    from drover_cli.validation import stages
    from drover_cli.validation.judge import judge
    from drover_cli.validation.model import Mark
    from drover_cli.validation.page import Validation, reference_of
    from drover_proto import fleet_methods as methods
    from drover_proto import fleet_pb2 as pb

    _check(args)
    level = "deep" if args.burn_in else args.level
    began_ms = _now_ms()
    with client.connect(args) as fleet:
        members = stages.members(fleet, list(dict.fromkeys(args.name)), burn_in=args.burn_in, now_ms=began_ms)
        reference = None
        if args.reference:
            reference = reference_of(_read(args.reference), str(args.reference), len(members), level)
        status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
        wanted = [stage for stage in STAGES if stage in args.stages]
        answers = stages.run(fleet, stages.Plan(members, wanted, level, args.why, args.limit * 60.0), _say)
    judged = judge(answers, members, [stage for stage in STAGES if stage not in wanted], reference)
    by = ", ".join(sorted({answer.order.by for answer in answers}))
    versions = {"collector": status.version, "agents": ", ".join(sorted({m.agent for m in members if m.agent}))}
    _write(
        args,
        Validation(began_ms, _now_ms(), status.fleet, by, args.why, level, wanted, versions, members, answers, judged),
    )
    _say(f"{judged.mark.value.upper()}: " + ("; ".join(f.text for f in judged.findings) or "nothing out of order"))
    return int(judged.mark is not Mark.PASSED)


def _check(args: argparse.Namespace) -> None:
    """
    Raises:
        CliError: a file's ending says no form, or its folder is not there.
    """
    for path in args.output:
        if path.suffix not in ENDINGS:
            raise CliError(f"--output {path}: must end with one of {', '.join(ENDINGS)}")
        if not path.absolute().parent.is_dir():
            raise CliError(f"--output {path}: its folder is not there")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CliError(f"--reference {path}: {getattr(error, 'strerror', None) or error}") from None


def _write(args: argparse.Namespace, validation: object) -> None:
    from drover_cli.report.forms import page_html, page_markdown
    from drover_cli.validation.page import LEGEND, Validation, as_json, page

    assert isinstance(validation, Validation)
    made = page(validation)
    forms = {
        "markdown": lambda: page_markdown(made, LEGEND),
        "html": lambda: page_html(made, LEGEND),
        "json": lambda: json.dumps(as_json(validation), allow_nan=False, indent=1) + "\n",
    }
    for path in args.output:
        try:
            path.write_text(forms[ENDINGS[path.suffix]](), "utf-8")
        except OSError as error:
            raise CliError(f"--output {path}: {error.strerror}") from None
    if args.json or not args.output:
        sys.stdout.write(forms["json" if args.json else "markdown"]())


def _say(text: str) -> None:
    from drover_cli.output import plain

    print(plain(text), file=sys.stderr, flush=True)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""`drover replay CASE`: the same detectors over a recorded case, in the case's own time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import Progress, print_json, print_table, when

if TYPE_CHECKING:
    from drover_cli.case.read import Case
    from drover_collector.fleet.buckets import Bucket

HELP = "run the detectors over a recorded case; incidents on stdout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, metavar="CASE", help="case folder")
    parser.add_argument(
        "--policy", default="nvidia", help="nvidia, strict, cautious, or a policy file (default nvidia)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per incident on stdout")


def run(args: argparse.Namespace) -> int:
    with needs("collector"):
        from drover_cli.case.read import read_case
        from drover_collector.engine.replay import Replay
        from drover_collector.policy.policy import PRESETS, Policy
    from drover_cli.output import where
    from drover_core.model.events import Incident
    from drover_core.model.reports import incident_report
    from drover_core.settings import SettingsError

    try:
        if args.policy not in PRESETS and not Path(args.policy).is_file():
            raise CliError(
                f"policy {args.policy!r}: no such preset or file; give {', '.join(PRESETS)} or a file's path"
            )
        policy = Policy.named(args.policy)
    except SettingsError as error:
        raise CliError(str(error)) from None
    started = time.monotonic()
    case = read_case(args.case)
    replay = Replay(case.index, _watched(case), case.events, policy, case.inventories, case.probes.verdicts)
    incidents: dict[str, Incident] = {}
    for outcome in replay:
        incidents.update((i.id, i) for i in outcome.incidents)
    shown = sorted(incidents.values(), key=lambda i: (i.opened_ms, i.id))
    found = [i for i in shown if i.scope != "fleet"]
    for i in shown if args.json else ():
        if i.scope == "fleet":  # the guard's word on the others, and no detection: no case's label means it
            print(f"mass event, not among the JSON lines: {when(i.opened_ms)}: {i.summary}", file=sys.stderr)
    for note in [*case.notes, *replay.could_not_judge()]:
        print(f"could not judge: {note}", file=sys.stderr)
    for detector, trouble in replay.engine.errors.items() if replay.engine else ():
        print(f"trouble: detector {detector} failed {trouble.count} times, last: {trouble.latest}", file=sys.stderr)
    first, last = case.span
    days = case.spec.gpu_count * (last - first) / 86_400_000
    print(f"{days:.1f} GPU-days in {time.monotonic() - started:.1f} s, {len(found)} incidents", file=sys.stderr)
    if args.json:
        for incident in found:
            print_json(incident_report(incident))
    else:
        print_table(
            ["OPENED", "SEVERITY", "KIND", "CAUSE", "WHERE", "WANTS", "SUMMARY"],
            [[when(i.opened_ms), i.severity, i.kind, i.cause, where(i), i.action, i.summary] for i in shown],
        )
    return 0


def _watched(case: Case) -> Iterator[Bucket]:
    """The case's buckets, with progress."""
    first, last = case.span
    progress = Progress("replaying", max(1, last - first))
    for bucket in case.buckets():
        yield bucket
        progress.update(bucket.end_ms - first)
    progress.done()

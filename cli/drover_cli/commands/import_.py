"""`drover import CASE`: a case folder into the embedded store of a stopped collector, or into a store of a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drover_cli.commands.restore import add_store_arguments, store_url
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import Progress, print_json

HELP = "take a case folder into a store; its collector is stopped"
LONGEST_DAYS = 3650


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, metavar="CASE", help="folder of `drover export` or of the same form")
    add_store_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    with needs("collector"):
        from drover_cli.case import read_case
        from drover_cli.importing import load, read_absences
        from drover_collector.store import Store, StoreError

    case = read_case(args.case)
    absences = read_absences(case)  # first: it may be unusable
    url = store_url(args)
    files = (case.gpu, case.node, case.link)
    progress = Progress("import", sum(len(samples.ts_ms) for samples in files if samples is not None))
    try:
        # Else an old case would be deleted on its way in. The collector sets its own limits when it starts.
        store = Store.open(
            url,
            retention_days=LONGEST_DAYS,
            retention_10s_days=LONGEST_DAYS,
            retention_5min_days=LONGEST_DAYS,
        )
        try:
            done = load(store, case, absences, progress.update)
        finally:
            store.close()
    except StoreError as error:
        raise CliError(str(error)) from None
    finally:
        progress.done()
    for note in case.notes:
        print(f"drover: note: {note}", file=sys.stderr)
    if args.json:
        print_json({"url": url, "case": str(args.case), **done, "notes": case.notes})
    else:
        print(f"{url}: " + ", ".join(f"{count:,} {what}" for what, count in done.items()) + "; again changes nothing")
    return 0

"""`drover import CASE`: a case folder into the embedded store of a stopped collector, or into a store of a server."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from drover_cli.commands.restore import add_store_arguments, store_of
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
        from drover_cli.case.read import read_case
        from drover_cli.case.store_import import (
            load,
            read_absences,
            read_instances,
        )
        from drover_collector.config import store_password
        from drover_collector.store import Store, StoreError, redacted
        from drover_core.settings import SettingsError

    logging.getLogger("clickhouse_connect").setLevel(logging.ERROR)  # a failure is raised, and reported once
    case = read_case(args.case, for_store=True)
    absences, instances = read_absences(case), read_instances(case)  # may be unusable
    config = store_of(args)
    url = redacted(config.url)
    files = (case.gpu, instances.samples, case.node, case.link, case.work.samples)
    progress = Progress("import", sum(len(samples.ts_ms) for samples in files if samples is not None))
    # Else an old case would be deleted on its way into a store of its own, whose collector sets its own limits when it
    # starts. Those of a server run meanwhile, and would not.
    embedded = config.url.startswith("chdb:")
    try:
        store = Store.open(
            config.url,
            password=store_password(config),
            cluster=config.cluster,
            retention_days=LONGEST_DAYS if embedded else config.retention_days,
            retention_10s_days=LONGEST_DAYS if embedded else config.retention_10s_days,
            retention_5min_days=LONGEST_DAYS if embedded else config.retention_5min_days,
            visitor=True,
        )
        try:
            done = load(store, case, absences, progress.update, instances)
        finally:
            store.close()
    except (SettingsError, StoreError) as error:
        raise CliError(str(error)) from None
    finally:
        progress.done()
    if 0 < case.span[0] < (time.time() - config.retention_days * 86_400) * 1000:
        case.notes.append(
            f"samples older than store.retention_days ({config.retention_days} here) are deleted"
            f" {'when a collector starts; give it more days before' if embedded else 'by the server'}"
        )
    for note in case.notes:
        print(f"drover: note: {note}", file=sys.stderr)
    if args.json:
        print_json({"url": url, "case": str(args.case), **done, "notes": case.notes})
    else:
        print(f"{url}: " + ", ".join(f"{count:,} {what}" for what, count in done.items()) + "; again changes nothing")
    return 0

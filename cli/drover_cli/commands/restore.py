"""`drover restore BACKUP`: the embedded store of a stopped collector out of a backup."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import print_json, size_text

if TYPE_CHECKING:
    from drover_collector.config import StoreConfig

HELP = "an embedded store out of a backup, while its collector is stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=Path, metavar="BACKUP", help="folder that `drover backup` made")
    add_store_arguments(parser)
    parser.add_argument("--force", action="store_true", help="move a store that is there aside")
    parser.add_argument("--salvage", action="store_true", help="of a damaged backup, all that is whole")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="the collector's settings, which name its store")
    where.add_argument("--url", metavar="URL", help="the store itself, chdb:///PATH")


def store_of(args: argparse.Namespace) -> StoreConfig:
    """The store that the arguments name; by default that of a collector without settings.

    Raises:
        CliError: settings that cannot be used.
    """
    from drover_collector.config import CollectorConfig, StoreConfig
    from drover_core.settings import SettingsError, load

    if args.url:
        return StoreConfig(url=args.url)
    try:
        return load(CollectorConfig, args.config).store
    except SettingsError as error:
        raise CliError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    with needs("collector"):
        from drover_collector.store import StoreError, restore

    url = store_of(args).url
    try:
        copied = restore(
            url, args.backup, force=args.force, salvage=args.salvage, say=lambda line: print(line, file=sys.stderr)
        )
    except StoreError as error:
        raise CliError(str(error)) from None
    if args.json:
        print_json({"url": url, "bytes": copied.bytes, "rows": copied.rows, "lost": list(copied.lost)})
        return 0
    held = ", ".join(f"{table} {rows:,}" for table, rows in sorted(copied.rows.items()) if rows) or "no rows"
    whole = f"all but {len(copied.lost)} damaged parts" if copied.lost else "every file and row as noted"
    print(f"{url}: {size_text(copied.bytes)}, {whole}: {held}")
    return 0

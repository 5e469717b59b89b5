"""How lists are printed: `-o wide|json|csv` and `--watch`, given to every command that prints one, and colours."""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from drover_cli.errors import CliError, UnreachableError, visible
from drover_core.model.events import Health, Severity

FORMS = ("table", "wide", "json", "csv")
LEAST_S, MOST_S, USUAL_S = 1.0, 3600.0, 2.0
WATCHED = frozenset({
    "status", "clusters", "node", "nodes", "incidents", "job", "decisions", "silences", "audit", "fabric", "thermals",
    "capacity", "risk",
})  # fmt: skip
CLEAR = "\x1b[H\x1b[2J\x1b[3J"

RED, YELLOW, GREEN, BLUE, DIM, END = "\x1b[1;31m", "\x1b[33m", "\x1b[32m", "\x1b[34m", "\x1b[2m", "\x1b[0m"
# Only whole cells: a word inside a sentence says nothing of the row.
COLOURS: dict[str, str] = {
    Severity.CRITICAL: RED, Severity.WARNING: YELLOW, Health.CONFIRMED: RED, Health.SUSPECT: YELLOW,
    Health.HEALTHY: GREEN, Health.UNKNOWN: DIM, Health.DRAINING: BLUE, Health.DRAINED: BLUE, Health.VALIDATING: BLUE,
    Health.REPAIR: BLUE, "FAIL": RED, "bad": RED, "warn": YELLOW, "ok": GREEN, "enforce": RED, "approve": BLUE,
    "?": DIM,
}  # fmt: skip


class _Form:
    """Of this run: the form of lists, and where a CSV goes."""

    name = "table"
    out: TextIO | None = None
    lists = 0


def wide() -> bool:
    return _Form.name == "wide"


def csv_out() -> TextIO | None:
    """Return where the CSV of a list goes; None: lists are tables."""
    return _Form.out


def write_csv(headers: Sequence[str], rows: Sequence[Sequence[object]], out: TextIO) -> None:
    """Write a list as RFC 4180 has it. `-`, which stands for nothing in a table, is an empty cell."""
    if _Form.lists:
        out.write("\r\n")
    _Form.lists += 1
    writer = csv.writer(out)
    writer.writerow([header.lower().replace(" ", "_") for header in headers])
    writer.writerows([["" if str(cell) == "-" else visible(str(cell)) for cell in row] for row in rows])


def colours() -> bool:
    """Whether stdout shows colours: a terminal, and nobody asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(cell: str, padded: str) -> str:
    """Return `padded`, which holds the cell, in the colour of what it says."""
    colour = COLOURS.get(cell)
    return padded.replace(cell, f"{colour}{cell}{END}", 1) if colour else padded


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Add `-o` where the command and its parts have `--json`, and `--watch` where it only looks."""
    for inner in (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)):
        for part in inner.choices.values():
            add_arguments("", part)
    options = {option for action in parser._actions for option in action.option_strings}
    if "--json" not in options:
        return
    if "-o" not in options and "--output" not in options:
        parser.add_argument(
            "-o", dest="form", choices=FORMS, default="table",
            help="of lists: wide (a row is a line, however long), json (as --json) or csv",
        )  # fmt: skip
    if name in WATCHED:
        parser.add_argument(
            "--watch", nargs="?", type=float, const=USUAL_S, metavar="SECONDS",
            help=f"again and again until Ctrl-C (default every {USUAL_S:g} s)",
        )  # fmt: skip


@contextlib.contextmanager
def chosen(args: argparse.Namespace) -> Iterator[None]:
    """Print lists in the form that `args` ask for.

    Raises:
        CliError: a CSV of a command that printed no list.
    """
    form = getattr(args, "form", "table")
    if form == "json":
        args.json = True
    _Form.name, _Form.out, _Form.lists = form, None, 0
    try:
        if form != "csv":
            yield
            return
        if args.json:
            raise CliError("-o csv and --json are two forms: give one of them")
        _Form.out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # what is not the list is for people
            yield
        if not _Form.lists:
            raise CliError(f"`drover {args.command}` printed no list, so there is no CSV; -o json has what it knows")
        _Form.out.flush()
    finally:
        _Form.name, _Form.out = "table", None


def watched(args: argparse.Namespace, run: Callable[[], int]) -> int:
    """Run once, or with `--watch` until Ctrl-C. A collector that does not answer is said and asked again."""
    every_s = getattr(args, "watch", None)
    if every_s is None:
        return run()
    if not LEAST_S <= every_s <= MOST_S:
        raise CliError(f"--watch must be from {LEAST_S:g} to {MOST_S:g} seconds")
    try:
        while True:
            if sys.stdout.isatty():
                print(CLEAR, end="")
            if not args.json and getattr(args, "form", "table") != "csv":
                print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, every {every_s:g} s, Ctrl-C ends it\n")
            try:
                run()
            except UnreachableError as error:
                print(f"drover: {visible(str(error))}", file=sys.stderr)
            sys.stdout.flush()
            time.sleep(every_s)
    except KeyboardInterrupt:  # the usual way to end it
        return 0

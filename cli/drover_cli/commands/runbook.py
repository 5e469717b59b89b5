"""`drover runbook [NAME]`: the page of an alert or a kind of incident, on hosts that have no checkout too."""

from __future__ import annotations

import argparse
import difflib

from drover_cli.errors import NotFoundError
from drover_cli.output import print_json
from drover_core.model import runbooks

HELP = "what an alert or a kind of incident means, the first look and the action; without a name, all there are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="of an alert (DroverBlind) or of a kind of incident (hang); or a page's path"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object: the name and its text, or all names")


def run(args: argparse.Namespace) -> int:
    found = [page for place in runbooks.PLACES for page in place.glob("*.md") if page.stem != "README"]
    pages = {page.stem.lower(): page for page in found}
    names = sorted((page.stem for page in pages.values()), key=lambda name: (name.startswith("Drover"), name))
    if not args.name:
        if args.json:
            print_json({"runbooks": names})
        else:
            print("\n".join(names))
        return 0
    asked = args.name.rpartition("/")[2].removesuffix(".md").lower()
    if asked not in pages:
        near = [pages[name].stem for name in difflib.get_close_matches(asked, pages, 2, 0.8)]
        hint = f": {' or '.join(near)}?" if near else "; `drover runbook` lists them"
        raise NotFoundError(f"there is no run book {args.name!r}{hint}")
    text = pages[asked].read_text("utf-8")
    if args.json:
        print_json({"name": pages[asked].stem, "text": text})
    else:
        print(text, end="")
    return 0

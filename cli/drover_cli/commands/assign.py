"""`drover assign INCIDENT NAME`: who works on it."""

from __future__ import annotations

import argparse

from drover_cli import noting
from drover_core.model.incident_notes import NoteAct

HELP = "say who works on an incident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    noting.add_arguments(parser)
    parser.add_argument("name", nargs="?", default="", help="the person; without: nobody any more")
    noting.add_common(parser, why="what they are to know")


def run(args: argparse.Namespace) -> int:
    return noting.note(args, NoteAct.ASSIGN, text=args.why, value=args.name)

"""`drover ack INCIDENT`: somebody knows of it."""

from __future__ import annotations

import argparse

from drover_cli import noting
from drover_core.model.incident_notes import NoteAct

HELP = "acknowledge an incident: receivers stop paging again until it gets worse or comes back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    noting.add_arguments(parser)
    parser.add_argument("--undo", action="store_true", help="take it back: receivers page again")
    noting.add_common(parser, why="what you know or do, for those who read it later")


def run(args: argparse.Namespace) -> int:
    return noting.note(args, NoteAct.UNACKNOWLEDGE if args.undo else NoteAct.ACKNOWLEDGE, text=args.why)

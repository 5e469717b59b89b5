"""`drover ticket INCIDENT TICKET`: where else it is worked on."""

from __future__ import annotations

import argparse

from drover_cli import noting
from drover_core.model.incident_notes import NoteAct

HELP = "link a ticket to an incident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    noting.add_arguments(parser)
    parser.add_argument("ticket", help="its address or number")
    noting.add_common(parser, why="what it is for")


def run(args: argparse.Namespace) -> int:
    return noting.note(args, NoteAct.TICKET, text=args.why, value=args.ticket)

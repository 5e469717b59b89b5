"""`drover comment INCIDENT TEXT`: a remark that stays with it."""

from __future__ import annotations

import argparse

from drover_cli import noting
from drover_core.model.incident_notes import NoteAct

HELP = "leave a comment on an incident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    noting.add_arguments(parser)
    parser.add_argument("text", help="the comment, kept with your certificate's name")
    noting.add_common(parser)


def run(args: argparse.Namespace) -> int:
    return noting.note(args, NoteAct.COMMENT, text=args.text)

"""`drover outcome INCIDENT fault|false_alarm`: what it turned out to be."""

from __future__ import annotations

import argparse

from drover_cli import noting
from drover_core.model.incident_notes import IncidentOutcome, NoteAct

HELP = "say what an incident turned out to be: a fault, or a false alarm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    noting.add_arguments(parser)
    parser.add_argument("outcome", choices=[str(each) for each in IncidentOutcome])
    noting.add_common(parser, why="how that is known, and what helped")


def run(args: argparse.Namespace) -> int:
    return noting.note(args, NoteAct.OUTCOME, text=args.why, value=args.outcome)

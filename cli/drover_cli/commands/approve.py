"""`drover approve ID --why TEXT`: a person's yes to a decision that waits for one."""

from __future__ import annotations

import argparse
import json
import sys

from drover_cli import client
from drover_cli.commands.decisions import show
from drover_cli.output import plain, print_json
from drover_core.model.events import Decision, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "say yes to a decision that waits for a person"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("id", help="id of the decision or its beginning (drover decisions), or of its incident")
    parser.add_argument("--why", required=True, help="the reason, kept with your certificate's name")
    parser.add_argument("--json", action="store_true", help="one JSON object for each decision that follows")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        return show_answer(fleet.call(methods.APPROVE_DECISION, pb.Answer(decision=args.id, why=args.why)), args)


def show_answer(reply: pb.Answered, args: argparse.Namespace) -> int:
    """Print what came of an answer; 1 where the guard holds back what was approved."""
    made = [from_json(Decision, text) for text in reply.decisions_json]
    if args.json:
        for text in reply.decisions_json:
            print_json(json.loads(text))
    else:
        show(made)
    held = [decision for decision in made if decision.outcome == "held"]
    for decision in held:
        print(f"drover: approved, and held back for now: {plain(decision.reason)}", file=sys.stderr)
    return 1 if held else 0

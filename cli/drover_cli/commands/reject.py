"""`drover reject ID --why TEXT`: a person's no to a decision that waits for one."""

from __future__ import annotations

import argparse

from drover_cli import client
from drover_cli.commands import approve
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "say no to a decision that waits for a person: not asked again until more is wanted"
add_arguments = approve.add_arguments


def run(args: argparse.Namespace) -> int:
    request = pb.Answer(decision=args.id, why=args.why)
    with client.connect(args) as fleet:
        return approve.show_answer(fleet.call(methods.REJECT_DECISION, request), args)

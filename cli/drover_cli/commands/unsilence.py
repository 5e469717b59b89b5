"""`drover unsilence ID --why TEXT`: a silence ends before its time."""

from __future__ import annotations

import argparse

from drover_cli import client
from drover_cli.commands.silence import show_silence
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "end a silence or maintenance window before its time: people are notified at once of what is still wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("id", help="id of the silence (drover silences), or the beginning of one")
    parser.add_argument("--why", required=True, help="the reason, kept with your certificate's name")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        return show_silence(fleet.call(methods.END_SILENCE, pb.SilenceEnd(id=args.id, why=args.why)), args)

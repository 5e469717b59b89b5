"""`drover backup NAME`: a copy of the running collector's embedded store, on its host."""

from __future__ import annotations

import argparse

from drover_cli import client
from drover_cli.output import print_json, size_text
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "copy the running embedded store, on the collector's host"
DEADLINE_S = 6 * 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="folder to make in the collector's store.backup_folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        reply = fleet.call(methods.BACKUP, pb.BackupRequest(name=args.name), DEADLINE_S)
    if args.json:
        print_json({"path": reply.path, "bytes": reply.bytes, "seconds": round(reply.seconds, 3)})
    else:
        print(f"{reply.path}: {size_text(reply.bytes)} in {reply.seconds:.1f} s; `drover restore` brings it back")
    return 0

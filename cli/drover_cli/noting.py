"""What `drover ack`, `assign`, `comment`, `ticket` and `outcome` share: a note on an incident."""

from __future__ import annotations

import argparse
import json

from drover_cli import client
from drover_cli.output import plain, print_json
from drover_core.model.events import Audit, from_json
from drover_core.model.incident_notes import NoteAct, describe_note
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("id", metavar="INCIDENT", help="id of an incident, or the beginning of one (drover incidents)")


def add_common(parser: argparse.ArgumentParser, *, why: str = "") -> None:
    """`why`: what the optional reason is for; "": the command has none."""
    if why:
        parser.add_argument("--why", default="", help=why)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def note(args: argparse.Namespace, act: NoteAct, *, text: str = "", value: str = "") -> int:
    request = pb.IncidentNoteAsk(id=args.id, act=act, text=text, value=value)
    with client.connect(args) as fleet:
        reply = fleet.call(methods.NOTE_INCIDENT, request)
    if args.json:
        print_json(json.loads(reply.audit_json))
    else:
        line = from_json(Audit, reply.audit_json)
        print(f"{line.subject}: {plain(describe_note(line))}")
    return 0

"""`drover silence ... --for 2h --why TEXT`: hold back the notifications of some incidents for a while."""

from __future__ import annotations

import argparse
import json
import time

from drover_cli import client
from drover_cli.commands.export import moment
from drover_cli.errors import CliError
from drover_cli.output import plain, print_json, when
from drover_core.model.events import IncidentKind, Silence, from_json
from drover_core.model.silences import describe_scope
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "hold back the notifications of an incident, or of a place, for a while; it is still found and shown"
PLACES = ("node", "rack", "leaf", "pool")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("incident", nargs="*", metavar="INCIDENT", help="ids of incidents, or beginnings of them")
    for place in PLACES:
        parser.add_argument(f"--{place}", nargs="+", default=[], metavar="NAME", help=f"of these {place}s alone")
    parser.add_argument("--gpu", nargs="+", type=int, default=[], metavar="SLOT", help="of these slots of the nodes")
    parser.add_argument("--kind", nargs="+", default=[], choices=list(map(str, IncidentKind)), help="of these kinds")
    parser.add_argument("--for", dest="lasts", required=True, metavar="T", help="how long: 30m, 2h, 3d")
    parser.add_argument("--from", dest="begins", metavar="T", help="a time to come, ISO 8601 (default: now)")
    parser.add_argument("--maintenance", action="store_true", help="nothing is done to the nodes meanwhile, either")
    parser.add_argument("--why", required=True, help="the reason, kept with your certificate's name")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    if any(slot < 0 for slot in args.gpu):
        raise CliError("--gpu: slots are numbers from 0 on")
    now_ms = round(time.time() * 1000)
    try:
        hours = (now_ms - moment(args.lasts, now_ms)) / 3_600_000
    except CliError:
        hours = 0.0
    if hours <= 0 or not args.lasts.endswith(("s", "m", "h", "d")):
        raise CliError(f"--for {args.lasts!r} is no time that it lasts; write 30m, 2h or 3d")
    request = pb.SilenceAsk(
        node=args.node, gpu=args.gpu, rack=args.rack, leaf=args.leaf, pool=args.pool, kind=args.kind,
        incident=args.incident, from_ms=moment(args.begins, now_ms) if args.begins else 0, hours=hours, why=args.why,
        maintenance=args.maintenance,
    )  # fmt: skip
    with client.connect(args) as fleet:
        return show_silence(fleet.call(methods.CREATE_SILENCE, request), args)


def show_silence(reply: pb.SilenceReply, args: argparse.Namespace) -> int:
    """Print how a silence stands."""
    if args.json:
        print_json({**json.loads(reply.silence_json), "covers": reply.covers})
        return 0
    silence = from_json(Silence, reply.silence_json)
    held = "; nothing is done to its nodes until then" if silence.maintenance and not silence.ended_by else ""
    state = f"ended by {silence.ended_by}" if silence.ended_by else f"until {when(silence.until_ms)}{held}"
    begins = f"from {when(silence.from_ms)} " if silence.from_ms > silence.made_ms else ""
    print(f"silence {silence.id} of {plain(describe_scope(silence))}: {begins}{plain(state)}")
    again = (
        "notifications go out within seconds"
        if silence.ended_by
        else f"to end it: drover unsilence {silence.id} --why ..."
    )
    print(f"  {reply.covers} open incidents are covered; {again}")
    return 0

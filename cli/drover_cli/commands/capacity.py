"""`drover capacity`: who holds the GPUs, what lies idle, what faults cost."""

from __future__ import annotations

import argparse
import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from drover_cli import client
from drover_cli.commands.export import moment
from drover_cli.output import plain, print_json, print_table, say, when
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "what faults cost, by cause; of each pool what is held, idle, free and out of service"
NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--since", default="7d", help="of what faults cost: an age such as 30d, or a time (default 7d)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    now_ms = round(time.time() * 1000)
    with client.connect(args) as fleet:
        request = pb.CapacityRequest(from_ms=moment(args.since, now_ms), to_ms=now_ms)
        reply = fleet.call(methods.GET_CAPACITY, request)
    if args.json:
        found: dict[str, Any] = MessageToDict(reply, preserving_proto_field_name=True)
        print_json(found | {"from_ms": reply.from_ms, "to_ms": reply.to_ms, "judged_ms": reply.judged_ms})
        return 0
    lost, waited = sum(row.lost for row in reply.lost), sum(row.waited for row in reply.lost)
    say(
        f"faults took {lost + waited:,.1f} GPU-hours{_money(reply)} from {when(reply.from_ms)} to {when(reply.to_ms)}:"
        f" {lost:,.1f} lost, {waited:,.1f} waited"
    )
    if reply.untold:
        print(f"what {reply.untold} more incident{'' if reply.untold == 1 else 's'} took is not known")
    if reply.lost:
        print_table(
            ["WHAT", "INCIDENTS", "LOST", "WAITED", "COST", "DEAREST"],
            [
                [
                    f"{row.kind}, {row.cause}" if row.cause else row.kind, row.incidents, f"{row.lost:,.1f}",
                    f"{row.waited:,.1f}", f"{row.cost:,.0f} {reply.currency}" if row.HasField("cost") else NONE,
                    row.worst or NONE,
                ]
                for row in reply.lost
            ],
            right=frozenset({1, 2, 3, 4}),
        )  # fmt: skip
    print()
    print_table(
        ["POOL", "NODES", "GPUS", "HELD", "IDLE", "FREE", "WHOLE NODES", "OUT", "UNKNOWN", "GPU-HOUR"],
        [
            [
                pool.pool or "(no pool)", pool.nodes, pool.gpus, pool.held,
                pool.idle if pool.HasField("idle") else NONE, pool.free, pool.free_nodes, pool.out, pool.unknown,
                f"{pool.price:g} {reply.currency}" if pool.HasField("price") else NONE,
            ]
            for pool in reply.pools
        ],
        right=frozenset(range(1, 10)),
    )  # fmt: skip
    for holder in reply.idle:
        print(f"idle: {holder.idle} of {holder.gpus} GPUs of {plain(holder.job)} since {when(holder.since_ms)}")
    if not reply.judged_ms:
        say("nothing was judged in the last minute: what is not held is unknown, and so is what lies idle")
    return 0


def _money(reply: pb.Capacity) -> str:
    """Of those that have a price; says where not all have one."""
    known = [row.cost for row in reply.lost if row.HasField("cost")]
    if not reply.currency or not known:
        return ""
    rest = "" if len(known) == len(reply.lost) else " at least"
    return f",{rest} {sum(known):,.0f} {reply.currency},"

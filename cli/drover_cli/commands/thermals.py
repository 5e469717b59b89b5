"""`drover thermals [RACK]`: which rack runs hot, and which GPUs heat holds down."""

from __future__ import annotations

import argparse
from typing import Any

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.output import message_json, print_json, print_table, say
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "racks, the hottest first, and the GPUs that heat holds down; of a rack its nodes"
NONE = "-"
COLDEST = float("-inf")  # what is not known stands last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("rack", nargs="?", default="", metavar="RACK", help="its nodes")
    parser.add_argument("--limit", type=count, default=20, help="at most so many racks, and GPUs (default 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object per rack, then per GPU and node")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        reply = fleet.call(methods.GET_THERMALS, pb.ThermalsRequest(rack=args.rack))
    # Those that an incident names first: a rack is hot against its like, not by its degrees alone.
    racks = sorted(reply.racks, key=lambda rack: (not rack.incident, -_or(rack, "inlet_c"), -_or(rack, "gpu_max_c")))
    shown, hot = racks[: args.limit], list(reply.hot)[: args.limit]
    if args.rack:
        shown = [rack for rack in racks if rack.name == args.rack]
        hot = [gpu for gpu in reply.hot if gpu.rack == args.rack]
    if args.json:
        for kind, rows in (("rack", shown), ("gpu", hot), ("node", reply.nodes)):
            for row in rows:
                print_json(message_json(row, type=kind))
        return 0
    for rack in racks:
        if rack.summary and (not args.rack or rack.name == args.rack):
            say(f"{rack.name}: {rack.summary}", 2)
    _racks(shown)
    if len(shown) < len(racks) and not args.rack:
        print(f"{len(shown)} of {len(racks)} racks shown; --limit shows more")
    if reply.nodes:
        _nodes(list(reply.nodes))
    if hot:
        _gpus(hot)
    for line in reply.absent:
        say(f"not known: {line}", 2)
    return 0


def _racks(racks: list[pb.RackHeat]) -> None:
    print_table(
        ["RACK", "NODES", "INLET", "HOTTEST INLET", "MEDIAN GPU", "HOTTEST GPU", "AT", "POWER", "OF", "HELD", "WRONG"],
        [
            [
                rack.name, rack.nodes, _c(rack, "inlet_c"), _c(rack, "inlet_max_c"), _c(rack, "gpu_median_c"),
                _c(rack, "gpu_max_c"), rack.gpu_max_at or NONE, _kw(rack, "power_w"), _kw(rack, "budget_w"),
                rack.throttled, rack.cause or NONE,
            ]
            for rack in racks
        ],
        right=frozenset({1, 2, 3, 4, 5, 7, 8, 9}),
    )  # fmt: skip


def _nodes(nodes: list[pb.NodeHeat]) -> None:
    print()
    print_table(
        ["NODE", "INLET", "MEDIAN GPU", "HOTTEST GPU", "POWER", "SLOWEST FAN", "HELD"],
        [
            [
                node.node, _c(node, "inlet_c"), _c(node, "gpu_median_c"), _c(node, "gpu_max_c"), _kw(node, "power_w"),
                f"{node.fan_min_rpm:,.0f} rpm" if node.HasField("fan_min_rpm") else NONE, node.throttled,
            ]
            for node in nodes
        ],
        right=frozenset({1, 2, 3, 4, 5, 6}),
    )  # fmt: skip


def _gpus(hot: list[pb.HotGpu]) -> None:
    print()
    print_table(
        ["GPU", "RACK", "CORE", "MARGIN", "HELD", "RESISTANCE", "USUAL", "JOB", "WHY"],
        [
            [
                f"{gpu.node} GPU {gpu.gpu}", gpu.rack, _c(gpu, "temp_c"), _c(gpu, "margin_c"),
                f"{gpu.held_share:.0%}" if gpu.HasField("held_share") else NONE, _ratio(gpu, "resistance"),
                _ratio(gpu, "expected"), gpu.job or NONE, gpu.summary or NONE,
            ]
            for gpu in hot
        ],
        right=frozenset({2, 3, 4, 5, 6}),
    )  # fmt: skip


def _or(row: Any, name: str) -> float:
    return float(getattr(row, name)) if row.HasField(name) else COLDEST


def _c(row: Any, name: str) -> str:
    return f"{getattr(row, name):.1f} °C" if row.HasField(name) else NONE


def _kw(row: Any, name: str) -> str:
    return f"{getattr(row, name) / 1000:.1f} kW" if row.HasField(name) else NONE


def _ratio(row: Any, name: str) -> str:
    return f"{getattr(row, name):.3f} °C/W" if row.HasField(name) else NONE

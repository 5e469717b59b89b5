"""`drover fabric [LEAF|NODE]`: is it one node or the switch?"""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from drover_cli import client
from drover_cli.arguments import count
from drover_cli.errors import NotFoundError
from drover_cli.node_story import is_unknown
from drover_cli.output import message_json, print_json, print_table, say, when
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

HELP = "leafs, those in trouble first: is it one node or the switch; of a leaf or node its ports"
NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("place", nargs="?", default="", metavar="LEAF|NODE", help="its ports, those in trouble first")
    parser.add_argument("--limit", type=count, default=20, help="at most so many leafs, and ports (default 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object per leaf, then per port")


def run(args: argparse.Namespace) -> int:
    with client.connect(args) as fleet:
        reply = _asked(fleet, args.place, args.limit)
    leafs, ports = list(reply.leafs), list(reply.ports)[: args.limit]
    if args.place:  # where it lies, whatever else is worse
        under = {port.leaf for port in reply.ports} | {args.place}
        leafs = [row for row in leafs if row.name in under]
    if args.json:
        for leaf in leafs:
            print_json(message_json(leaf, type="leaf"))
        for port in ports:
            print_json(message_json(port, type="port"))
        return 0
    if args.place:
        _say(leafs)
        print_table(
            ["PORT", "STATE", "IN USE", "ERRORS", "DOWNS", "TROUBLE"],
            [
                [
                    f"{port.node} {port.link}", port.state, _given(port, "saturation", "{:.0%}"),
                    _given(port, "errors", "{:,.0f}"), _given(port, "downs", "{:,.0f}"), port.trouble or NONE,
                ]
                for port in ports
            ],
            right=frozenset({2, 3, 4}),
        )  # fmt: skip
        if reply.ports_total > len(ports):
            print(f"{len(ports)} of {reply.ports_total} ports shown; --limit shows more")
    else:
        bad = [row for row in leafs if row.verdict]
        _say(bad)
        if leafs and not bad:
            print("no leaf is known to have trouble")
        print_table(
            ["LEAF", "NODES", "TROUBLED", "PORTS", "DOWN", "ERRORS", "DOWNS", "BUSIEST", "IT IS"],
            [
                [
                    row.name, len(row.nodes), row.nodes_troubled, row.ports, row.ports_down,
                    _given(row, "errors", "{:,.0f}"), _given(row, "downs", "{:,.0f}"),
                    _given(row, "saturation_max", "{:.0%}"), _is(row),
                ]
                for row in leafs
            ],
            right=frozenset({1, 2, 3, 4, 5, 6, 7}),
        )  # fmt: skip
        if reply.leafs_total > len(leafs):
            print(f"{len(leafs)} of {reply.leafs_total} leafs shown; --limit shows more")
    if reply.counted_from_ms:
        print(f"errors and downs are of the time since {when(reply.counted_from_ms)}")
    for line in reply.absent:
        say(f"not known: {line}", 2)
    return 0


def _asked(fleet: client.FleetClient, place: str, limit: int) -> pb.Fabric:
    """Of a leaf; where there is none of that name, of a node."""
    if not place:
        return fleet.call(methods.GET_FABRIC, pb.FabricRequest(limit=limit))
    try:
        return fleet.call(methods.GET_FABRIC, pb.FabricRequest(leaf=place))
    except grpc.RpcError as error:
        if not is_unknown(error):
            raise
    try:
        return fleet.call(methods.GET_FABRIC, pb.FabricRequest(node=place))
    except grpc.RpcError as error:
        if not is_unknown(error):
            raise
        raise NotFoundError(f"no leaf and no node {place!r}; `drover fabric` and `drover nodes` list them") from None


def _say(leafs: list[pb.LeafRow]) -> None:
    for row in leafs:
        say(f"{row.name}: {row.verdict or 'no trouble'}", 2)


def _is(row: pb.LeafRow) -> str:
    if row.switch:
        return "the switch"
    return ", ".join(node.node for node in row.nodes if node.state == "trouble") or NONE


def _given(row: Any, name: str, form: str) -> str:
    return form.format(getattr(row, name)) if row.HasField(name) else NONE

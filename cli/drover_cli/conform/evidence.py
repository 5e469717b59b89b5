"""Read what the answers are made of from a running collector. Nothing is acted on: previews do nothing."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.message import Message

from drover_cli.client import FleetClient
from drover_cli.conform.answers import Evidence, Q, R
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import FleetMethod

DAY_MS = 86_400_000
MOST_NODES = 10_000  # of one answer
LOOKED_AT = 16  # nodes whose details are read
REPORTS_MS = 120_000  # a node that reported within this time reports now
ACTS = ("drain", "reset", "reboot")


def read(fleet: FleetClient) -> Evidence:
    """Ask the collector. Ages are by its clock.

    Raises:
        grpc.RpcError: it answers nothing.
    """
    replies: dict[str, Message] = {}
    unread: dict[str, str] = {}

    def ask(method: FleetMethod[Q, R], request: Q) -> R | None:
        try:
            reply = fleet.call(method, request)
        except grpc.RpcError as error:
            unread[method.name] = str(error.details() or error.code().name)
            return None
        replies[method.name] = reply
        return reply

    status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
    replies[methods.GET_STATUS.name], now_ms = status, status.ts_ms
    ask(methods.GET_SYSTEM, pb.SystemRequest())
    ask(methods.GET_POLICY, pb.PolicyRequest())
    ask(methods.GET_CAPACITY, pb.CapacityRequest(from_ms=now_ms - DAY_MS, to_ms=now_ms))
    ask(methods.LIST_REPORTING, pb.ReportingRequest())
    ask(methods.LIST_SILENCES, pb.SilencesRequest(since_ms=now_ms - 30 * DAY_MS))
    ask(methods.LIST_ACTIONS, pb.ActionsRequest(limit=1000))
    ask(methods.LIST_INCIDENTS, pb.ListIncidentsRequest(state="all", since_ms=now_ms - 30 * DAY_MS, limit=500))
    ask(methods.LIST_AUDIT, pb.AuditRequest(since_ms=now_ms - 90 * DAY_MS, limit=1000))
    ask(methods.LIST_EVENTS, pb.EventsRequest(from_ms=now_ms - DAY_MS, to_ms=now_ms, limit=500))
    ask(methods.GET_FABRIC, pb.FabricRequest(limit=10_000))
    listed = ask(methods.LIST_NODES, pb.ListNodesRequest(limit=MOST_NODES, order="name"))
    details: list[pb.NodeDetail] = []
    previews: dict[tuple[str, str], pb.ActPreview] = {}
    for name in looked_at(listed.nodes if listed is not None else (), now_ms):
        detail = ask(methods.GET_NODE, pb.NodeRequest(node=name))
        if detail is not None:
            details.append(detail)
        for act in ACTS:
            preview = ask(methods.PREVIEW_ACT, pb.ActRequest(node=name, act=act))
            if preview is not None:
                previews[name, act] = preview
    return Evidence(replies, unread, details, previews)


def looked_at(nodes: Sequence[pb.NodeRow], now_ms: int) -> list[str]:
    """Return the nodes whose details are read: of those that report one of each model, then others evenly."""
    reporting = [node for node in nodes if now_ms - node.last_seen_ms <= REPORTS_MS]
    first = {node.sku: node.name for node in reversed(reporting)}
    step = max(1, len(reporting) // LOOKED_AT)
    return list(dict.fromkeys([*first.values(), *(node.name for node in reporting[::step])]))[:LOOKED_AT]

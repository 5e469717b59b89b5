"""What probe orders need of the rest of the collector: its nodes, and whether it is the active one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Protocol

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb


class Stream(Protocol):
    """An agent's stream that has been welcomed."""

    def send(self, message: pb.CollectorMessage, /) -> Awaitable[None]: ...


@dataclass(slots=True)
class NodeAccess:
    """How this collector reaches nodes, and what is known of them now.

    Attributes:
        stream: a node's stream here; None: this collector has none.
        busy: nodes that a job runs on. Drover's own orders and orders of groups are not sent to them.
        address: where other nodes reach a node; "": unknown.
        maintained: nodes that people work on. Drover asks for no probe there by itself.
    """

    stream: Callable[[str], Stream | None]
    busy: Callable[[], Collection[str]] = tuple
    address: Callable[[str], str] = lambda _: ""
    maintained: Callable[[], Container[str]] = tuple


@dataclass(slots=True)
class ProbeRuntime:
    """This collector's role and clock.

    Attributes:
        leading: whether this collector is the active one, which asks, judges and ends.
        troubles: problem -> a sentence for the operator.
        poll_s: how often open orders are checked without a reason.
    """

    leading: Callable[[], bool]
    now_ms: Callable[[], int]
    troubles: dict[str, str] = field(default_factory=dict)
    poll_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """What the parts of the service share."""

    store: Store
    index: FleetIndex
    config: ProbesConfig
    nodes: NodeAccess
    runtime: ProbeRuntime

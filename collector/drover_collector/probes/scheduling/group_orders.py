"""Decide when a group of nodes is probed together, and make its nodes' requests. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder
from drover_core.model.events import ProbeOrder
from drover_core.model.probe_figures import GROUP_FIGURES, VALIDATION_PROBES
from drover_proto import telemetry_pb2 as pb

TIMEOUT_S = 300  # of a group's request: seconds, plus the import of torch and the wait for each other
TRAINING_TIMEOUT_S = 1200  # the same where it trains for minutes
MOST_NODES = 256
ADDRESS = "probe.address"  # in a node's inventory: where others reach it


@dataclass(frozen=True, slots=True)
class GroupTurn:
    """Whether a group is sent now (`port`), later (neither), or never (`why`)."""

    port: int = 0
    why: str = ""


def check_group(index: FleetIndex, nodes: Sequence[str], probes: Iterable[str]) -> None:
    """Check that these nodes can form a group.

    Raises:
        ValueError: one line that says what to do.
    """
    if unknown := [name for name in nodes if name not in index.spec.by_name]:
        raise ValueError(f"no node is called {unknown[0]!r}; `drover nodes` lists them")
    if not 2 <= len(nodes) <= MOST_NODES or len(set(nodes)) < len(nodes):
        raise ValueError(f"a group has 2 to {MOST_NODES} nodes, each once")
    gpus = {index.spec.by_name[name].gpus for name in nodes}
    if len(gpus) > 1:
        raise ValueError(f"nodes of a group must have the same number of GPUs; these have {sorted(gpus)}")
    known = (*GROUP_FIGURES, *VALIDATION_PROBES)
    if wrong := [name for name in probes if name not in known]:
        raise ValueError(f"{wrong[0]!r} is not a probe for groups; there are {', '.join(known)}")


def timeout_s(order: ProbeOrder) -> int:
    """Return how long the request of a group's order may run on its node."""
    trains = order.level != "quick" and any(name in VALIDATION_PROBES for name in order.probes)
    return TRAINING_TIMEOUT_S if trains else TIMEOUT_S


def groups_of(held: Iterable[OpenOrder]) -> dict[str, list[OpenOrder]]:
    """Return the open orders of groups by group, in the order they were asked for."""
    found: dict[str, list[OpenOrder]] = defaultdict(list)
    for one in held:
        if one.order.group:
            found[one.order.group].append(one)
    return found


def group_turn(
    group: Sequence[OpenOrder],
    under_way: Sequence[ProbeOrder],
    racks: Mapping[str, str],
    busy: Collection[str],
    here: Callable[[str], bool],
    config: ProbesConfig,
) -> GroupTurn:
    """Decide about a group that has not been sent.

    Args:
        under_way: orders that were sent and not answered. racks: node -> rack. busy: nodes that a job runs on.
        here: whether a node has a stream.
    """
    members = group[0].order.members
    if held := sorted(set(members) & set(busy)):
        return GroupTurn(why=f"given up: a job runs on {held[0]}, so that the group is not run")
    if len(group) < len(members):
        left = sorted(set(members) - {one.order.node for one in group})
        return GroupTurn(why=f"given up: the order of {', '.join(left)} has ended")
    if not all(map(here, members)) or {o.node for o in under_way} & set(members):
        return GroupTurn()
    in_rack = Counter(racks.get(order.node, "") for order in under_way)
    more = Counter(racks.get(name, "") for name in members)
    for rack, count in more.items():  # a group that is larger than the limit may run alone
        if rack and in_rack[rack] and in_rack[rack] + count > config.most_per_rack:
            return GroupTurn()
    if under_way and len(under_way) + len(members) > config.most_at_once:
        return GroupTurn()
    taken = {order.port for order in under_way if order.group and order.members[:1] == members[:1]}
    return GroupTurn(port=next((port for port in config.ports if port not in taken), 0))


def request_of(order: ProbeOrder, join_s: float) -> pb.ProbeRequest:
    """Return the request for an order's node. The order has addresses and port."""
    return pb.ProbeRequest(
        id=order.id, probes=order.probes, level=order.level, timeout_s=timeout_s(order), protection=order.protection,
        group=pb.ProbeGroup(
            address=order.addresses[0], port=order.port, node=order.members.index(order.node),
            nodes=len(order.members), names=order.members, addresses=order.addresses, key=order.group, join_s=join_s,
        ),
    )  # fmt: skip


def address_of(inventory: Mapping[str, str], peer: str) -> str:
    """Return where other nodes reach this one: from its settings, else from its stream's address; "": unknown.

    `peer`: gRPC's form: "ipv4:10.0.0.7:43210", "ipv6:%5Bfe80::1%5D:43210".
    """
    if configured := inventory.get(ADDRESS, ""):
        return configured
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")

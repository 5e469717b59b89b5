"""Orders for several nodes together: whether a group's turn has come, and what its nodes are told. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder
from drover_core.model.events import ProbeOrder
from drover_core.model.probe_figures import GROUP_FIGURES
from drover_proto import telemetry_pb2 as pb

TIMEOUT_S = 300  # of a group's request: it takes seconds, beside the import of torch and who waits for whom
MOST_NODES = 256
ADDRESS = "probe.address"  # in a node's inventory: where others reach it


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of a group that was not sent: all of it now (`port`), nothing yet, or never (`why`)."""

    port: int = 0
    why: str = ""


def check_group(index: FleetIndex, nodes: Sequence[str], probes: Iterable[str]) -> None:
    """Raises ValueError: one line, what to do."""
    if unknown := [name for name in nodes if name not in index.spec.by_name]:
        raise ValueError(f"no node is called {unknown[0]!r}; `drover nodes` lists them")
    if not 2 <= len(nodes) <= MOST_NODES or len(set(nodes)) < len(nodes):
        raise ValueError(f"a group has 2 to {MOST_NODES} nodes, each once")
    gpus = {index.spec.by_name[name].gpus for name in nodes}
    if len(gpus) > 1:
        raise ValueError(f"nodes of a group have as many GPUs as each other; these have {sorted(gpus)}")
    if wrong := [name for name in probes if name not in GROUP_FIGURES]:
        raise ValueError(f"{wrong[0]!r} is no probe of a group; there are {', '.join(GROUP_FIGURES)}")


def groups_of(held: Iterable[OpenOrder]) -> dict[str, list[OpenOrder]]:
    """Open orders of groups, by group, in the order they were asked for."""
    found: dict[str, list[OpenOrder]] = defaultdict(list)
    for one in held:
        if one.order.group:
            found[one.order.group].append(one)
    return found


def turn(
    group: Sequence[OpenOrder],
    under_way: Sequence[ProbeOrder],
    racks: Mapping[str, str],
    busy: Collection[str],
    here: Callable[[str], bool],
    config: ProbesConfig,
) -> Turn:
    """Of a group none of whose orders was sent.

    Args:
        under_way: orders that were sent and not answered. racks: of nodes. busy: nodes that a job runs on.
        here: whether a node has a stream.
    """
    members = group[0].order.members
    if held := sorted(set(members) & set(busy)):
        return Turn(why=f"given up: a job runs on {held[0]}, so that the group is not run")
    if len(group) < len(members):
        left = sorted(set(members) - {one.order.node for one in group})
        return Turn(why=f"given up: the order of {', '.join(left)} has ended")
    if not all(map(here, members)) or {o.node for o in under_way} & set(members):
        return Turn()
    in_rack = Counter(racks.get(order.node, "") for order in under_way)
    more = Counter(racks.get(name, "") for name in members)
    for rack, count in more.items():  # a group that is larger than the bound may run alone
        if rack and in_rack[rack] and in_rack[rack] + count > config.most_per_rack:
            return Turn()
    if under_way and len(under_way) + len(members) > config.most_at_once:
        return Turn()
    taken = {order.port for order in under_way if order.group and order.members[:1] == members[:1]}
    return Turn(port=next((port for port in config.ports if port not in taken), 0))


def request_of(order: ProbeOrder, join_s: float) -> pb.ProbeRequest:
    """What its node is asked, once the order has addresses and port."""
    return pb.ProbeRequest(
        id=order.id, probes=order.probes, level=order.level, timeout_s=TIMEOUT_S, protection=order.protection,
        group=pb.ProbeGroup(
            address=order.addresses[0], port=order.port, node=order.members.index(order.node),
            nodes=len(order.members), names=order.members, addresses=order.addresses, key=order.group, join_s=join_s,
        ),
    )  # fmt: skip


def address_of(inventory: Mapping[str, str], peer: str) -> str:
    """Where other nodes reach this one: as its settings say, else whence its stream comes; "" where neither tells.

    `peer`: as gRPC names it: "ipv4:10.0.0.7:43210", "ipv6:%5Bfe80::1%5D:43210".
    """
    if told := inventory.get(ADDRESS, ""):
        return told
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")

"""Plan which nodes are probed next, and which nodes together. Pure: no I/O, no clock.

Probes are planned where nothing runs. The node's probe service checks again and refuses a GPU that a process holds. By
default only probes that a person or a validation asks for are planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from drover_collector.probes.settings import ProbesConfig
from drover_core.model.events import (
    Decision,
    Incident,
    ProbeOrder,
    ProbeReason,
    RecommendedAction,
)
from drover_core.model.fleet import FleetSpec

DAY_MS = 86_400_000
AGAIN_MS = 1_800_000  # while its incident is open a suspect is probed again after this long, whatever came before
# By cause, in place of the level's own probes: with the soak, since heat shows only under load that lasts. The level
# says how long: at `quick` only seconds.
_PROBES_OF_CAUSE = {"thermal": ("gemm_bf16", "hbm_copy", "sdc", "soak"), "cooling": ("gemm_bf16", "sdc", "soak")}


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a node with GPUs.

    Attributes:
        idle_ms: for how long nothing has run there; None: something runs.
        probed_ms: when it was probed last; 0: never.
        firmware: its driver and VBIOS now; "": unknown.
        probed_firmware: its driver and VBIOS when it was probed last; "": unknown.
        risk: of a fault; higher is probed first.
    """

    node: str
    idle_ms: int | None
    probed_ms: int = 0
    firmware: str = ""
    probed_firmware: str = ""
    risk: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedProbe:
    """Arguments of `OrderBook.ask`. The probe measures all GPUs of the node that no process holds."""

    node: str
    why: ProbeReason
    probes: tuple[str, ...] = ()
    incident_id: str = ""


def confirmations(
    decisions: Iterable[Decision],
    incidents: Mapping[str, Incident],
    nodes: Mapping[str, Standing],
    orders: Iterable[ProbeOrder],
    config: ProbesConfig,
    now_ms: int,
) -> list[PlannedProbe]:
    """Return probes for the incidents that a probe can confirm now: the policy wants one, and no job runs on the node.

    All GPUs of the node are measured, because the suspect is compared with its neighbours. So no job may run on them:
    the probe would slow it (links, host memory, heat), and the job would lower the neighbours' figures.

    Args:
        decisions: the newest of each incident.
        orders: the newest version of each order of the last hours.
    """
    tried = {o.incident_id: max(o.ts_ms, 0) for o in sorted(orders, key=lambda o: o.ts_ms) if o.incident_id}
    found = []
    for decision in decisions:
        incident, standing = incidents.get(decision.incident_id), nodes.get(decision.node)
        allowed = decision.outcome == "act" or (config.confirm and decision.outcome == "would_act")
        if (
            decision.wanted is not RecommendedAction.PROBE
            or not allowed
            or incident is None
            or incident.closed_ms is not None
        ):
            continue
        free = standing is not None and standing.idle_ms is not None
        if not free or now_ms - tried.get(incident.id, -AGAIN_MS) < AGAIN_MS:
            continue
        probes = _PROBES_OF_CAUSE.get(incident.cause, ())
        found.append(PlannedProbe(decision.node, ProbeReason.CONFIRM, probes, incident.id))
    return found


def upkeep(
    nodes: Iterable[Standing], open_nodes: Collection[str], asked_of_idle: int, config: ProbesConfig, room: int
) -> list[PlannedProbe]:
    """Return probes for nodes with a new driver or firmware, never probed nodes, and idle nodes up to a daily budget.

    Args:
        open_nodes: nodes with an order under way.
        asked_of_idle: orders from that budget in the last day.
        room: at most so many probes are returned.
    """
    listed = list(nodes)
    ready = [
        n for n in listed
        if n.idle_ms is not None and n.idle_ms >= config.idle_for_s * 1000 and n.node not in open_nodes
    ]  # fmt: skip
    found: list[PlannedProbe] = []
    rest: list[Standing] = []
    for n in sorted(ready, key=lambda n: (-n.risk, n.probed_ms, n.node)):
        changed = bool(n.firmware and n.probed_firmware) and n.firmware != n.probed_firmware
        if config.baseline and n.probed_ms and changed:
            found.append(PlannedProbe(n.node, ProbeReason.BASELINE))
        elif config.admit and not n.probed_ms:
            found.append(PlannedProbe(n.node, ProbeReason.ADMIT))
        else:
            rest.append(n)
    budget = int(config.idle_share_per_day * len(listed)) - asked_of_idle
    if 0 < config.idle_share_per_day * len(listed) < 1:
        budget = 1 - asked_of_idle  # a small fleet is probed one node a day
    found += [PlannedProbe(n.node, ProbeReason.IDLE) for n in rest[: max(budget, 0)]]
    return found[: max(room, 0)]


Pairs = tuple[tuple[str, str], ...]


def fabric_rounds(spec: FleetSpec, among: Collection[str] | None = None) -> list[Pairs]:
    """Return pairs of nodes for collectives, in rounds; in one round a node is in at most one pair.

    Two rounds pair nodes under the same leaf switch, two pair nodes across leaves. Each round has other partners, so
    that a bad link between two nodes can be distinguished from a bad node (`probes/judging/multi_node.py`). Each node
    is in some pair, if there are two; only one whose leaf is unknown is in none.

    Args:
        among: only these nodes; None: all with GPUs.
    """
    chosen = [n for n in spec.nodes if n.gpus and n.leaf and (among is None or n.name in among)]
    leaves: dict[str, list[str]] = {}
    for node in sorted(chosen, key=lambda n: (n.leaf, n.name)):
        leaves.setdefault(node.leaf, []).append(node.name)
    leaf = {node.name: node.leaf for node in chosen}
    rounds: list[list[tuple[str, str]]] = [[], []]
    for names in leaves.values():
        rounds[0] += _neighbours(names)
        if len(names) > 2:  # two have no other partner
            rounds[1] += _neighbours(names[1:] + names[:1])
    order = [name for names in leaves.values() for name in names]
    half = len(order) // 2
    across = [list(zip(order[:half], order[half : 2 * half], strict=True))]
    # Of an odd number the last is left out first, then the first.
    near, far = order[-2 * half : len(order) - half], order[-half:]
    if half > 1 or len(order) % 2:
        across.append(list(zip(near, far[1:] + far[:1], strict=True)))
    rounds += [[pair for pair in pairs if leaf[pair[0]] != leaf[pair[1]]] for pairs in across]
    return [tuple(pairs) for pairs in rounds if pairs]


def _neighbours(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(names[i], names[i + 1]) for i in range(0, len(names) - 1, 2)]

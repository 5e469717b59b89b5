"""What a node is made of and set to, against its peers: driver, firmware, power limit, ECC, clocks.

Peers are of the same SKU, pool and model. Nobody has written down what is right, so the majority is: a value that
at least three quarters share, against one that a single node or less than a tenth has. Three things look like drift and
are none: a rollout on its way through the fleet, what is so on all nodes of a rack (a planned power cap, one delivery),
and a second standard that many nodes have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.inventory import (
    UNKNOWN,
    Codes,
    Column,
    Inventory,
    Times,
)
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.steady import Ints
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.drift.texts import (
    ATTRIBUTES,
    NIC,
    Attribute,
    Deviation,
    finding,
)
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, Incident, Severity

NAME = "drift"
VERSION = 1
EVERY_MS = 60_000  # a look at the whole fleet; what is found is told again each time
QUIET_MS = 180_000

# Ours. With less agreement nobody can say what is right; what more nodes have is a standard of its own.
MAJORITY = 0.75
MINORITY = 0.10
MINORITY_NODES = 20
LEAST = {"node": 4, "gpu": 8}  # entities in a group
HEARD_SHARE = 0.5  # of a group's entities must have told

# An agent reads settings every 5 minutes, so a change made everywhere at once is seen over 6 (nvml_inventory.py).
SETTLE_MS = 360_000
FOUND_MS = 60_000  # after a node told first: its peers tell within this after a start

# A rollout goes on in order, with nights and a weekend in it; a new setting of a rack is made within minutes.
ROLLOUT_MS = 72 * 3_600_000
ROLLOUT_SETTING_MS = 900_000
ROLLOUT_NODES = 2  # that took the new value: one alone is a change of that node
ROLLOUT_SHARE = 0.1  # of the group's nodes that lately took what is now the majority's: the others' turn is to come


@dataclass(slots=True)
class DriftState:
    looked_ms: int = 0
    told: frozenset[tuple[str, int, str]] = frozenset()  # attribute, node or GPU, value: of the last look
    left: Sequence[Incident] = ()  # open at the start


def restored(incidents: Sequence[Incident]) -> DriftState:
    """State that still knows who was told of: mending one of two does not end the other's incident after a restart."""
    return DriftState(left=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.node is not None])


def _take_over(index: FleetIndex, s: DriftState) -> None:
    known = set(s.told)
    scopes = {attribute.key: attribute.scope for attribute in ATTRIBUTES}
    for incident in s.left:
        n = index.node_number.get(incident.node or "")
        if n is None:
            continue
        differs: Mapping[str, str] = incident.snapshot_of(NAME).get("differs", {})
        for key, value in differs.items():
            if scopes.get(key, "node") == "node":
                known.add((key, n, value))
                continue
            gpus = range(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
            known |= {(key, g, value) for g in gpus if incident.gpu in (None, int(index.gpu_slot[g]))}
    s.told, s.left = frozenset(known), ()


def detect(window: Window, state: DriftState | None, now_ms: int) -> tuple[list[Finding], DriftState]:
    s = state if state is not None else DriftState()
    told = window.inventory
    if not window.fresh or told is None or 0 <= now_ms - s.looked_ms < EVERY_MS:
        return [], s
    s.looked_ms = now_ms
    if s.left:
        _take_over(window.index, s)
    groups: dict[str, Ints] = {}
    found = [
        d for attribute in _attributes(told) for d in _deviations(window.index, told, attribute, s.told, now_ms, groups)
    ]
    s.told = frozenset((d.attribute.key, d.n if d.g is None else d.g, d.value) for d in found)
    subjects: dict[tuple[int, int | None], list[Deviation]] = {}
    for deviation in _of_whole_nodes(window.index, found):
        subjects.setdefault((deviation.n, deviation.g), []).append(deviation)
    return [finding(NAME, window, deviations, now_ms) for deviations in subjects.values()], s


def could_not_judge(window: Window) -> list[str]:
    if window.inventory is None or not window.inventory.version:
        return ["what differs between nodes: no inventory was told"]
    return []


def _attributes(told: Inventory) -> Iterator[Attribute]:
    for attribute in ATTRIBUTES:
        if attribute.key in (told.gpu if attribute.scope == "gpu" else told.node):
            yield attribute
    for name in told.nic_boards:
        yield NIC._replace(key=name, words=f"firmware of {name.removeprefix('nic.')}")


def _groups(index: FleetIndex, told: Inventory, attribute: Attribute) -> Ints:
    """Number of the group that each entity is compared in, int64 [E]."""
    model = told.gpu["model"].codes.astype(np.int64)
    keys: list[Ints] = [index.sku.astype(np.int64), index.pool.astype(np.int64)]
    if attribute.scope == "gpu":
        keys = [key[index.gpu_node] for key in keys] + [model]
        if attribute.by_board:
            keys.append(told.gpu["part_number"].codes.astype(np.int64))
    else:
        first = np.minimum(index.first_gpu[:-1], max(0, index.gpu_count - 1))
        keys.append(model[first] if index.gpu_count else np.zeros(index.node_count, np.int64))
        if attribute.key in told.nic_boards:
            keys.append(told.nic_boards[attribute.key].codes.astype(np.int64))
    group = np.zeros(len(keys[0]), np.int64)
    for key in keys:  # one number for each different pair; few, so that the next product stays small
        group = group * (int(key.max(initial=0)) + 2) + key + 1
        group = np.unique(group, return_inverse=True)[1].reshape(-1)
    return group


def _deviations(
    index: FleetIndex,
    told: Inventory,
    attribute: Attribute,
    before: Set[tuple[str, int, str]],
    now_ms: int,
    known_groups: dict[str, Ints],
) -> Iterator[Deviation]:
    """`known_groups`: of this look, by what they depend on."""
    column = (told.gpu if attribute.scope == "gpu" else told.node)[attribute.key]
    known = column.codes != UNKNOWN
    values = np.unique(column.codes[known])
    if len(values) < 2:  # all alike, the usual case
        return
    node = index.gpu_node if attribute.scope == "gpu" else np.arange(index.node_count, dtype=np.int32)
    by = attribute.key if attribute.key in told.nic_boards else f"{attribute.scope} {attribute.by_board}"
    groups = known_groups[by] if by in known_groups else known_groups.setdefault(by, _groups(index, told, attribute))
    standing: dict[str, list[int]] = {}
    for key, number, value in before:
        if key == attribute.key:
            standing.setdefault(value, []).append(number)
    for group in np.unique(groups[known & (column.codes != _commonest(column.codes[known]))]).tolist():
        inside = groups == group
        mine = np.flatnonzero(inside & known)
        mine = mine[~_racks_apart(column.codes[mine], index.rack[node[mine]], node[mine])]
        codes, counts = np.unique(column.codes[mine], return_counts=True)
        usual, count = int(codes[counts.argmax()]), int(counts.max())
        if len(mine) < LEAST[attribute.scope] or count < MAJORITY * len(mine) or len(mine) < HEARD_SHARE * inside.sum():
            continue
        look = _Look(told, column, mine, node[mine], usual, attribute.version, now_ms)
        if look.rolls_out():
            continue
        for code in codes[codes != usual].tolist():
            for at in look.strangers(int(code), standing.get(told.values[code], ())):
                since = int(column.changed_ms[at]) or int(told.told_ms[node[at]])
                yield Deviation(
                    attribute, int(node[at]), int(at) if attribute.scope == "gpu" else None, told.values[code],
                    told.values[usual], count, len(mine), since,
                )  # fmt: skip


def _commonest(codes: Codes) -> int:
    return int(np.bincount(codes).argmax())


class _Look:
    """One attribute in one group: entities `mine` with their nodes, and what most of them have."""

    def __init__(
        self,
        told: Inventory,
        column: Column,
        mine: Ints,
        nodes: Codes,
        usual: int,
        version: bool,
        now_ms: int,
    ) -> None:
        self.found_ms = told.told_ms[nodes]
        self.mine, self.nodes, self.usual = mine, nodes, usual
        self.codes, self.changed_ms, self.was = column.codes[mine], column.changed_ms[mine], column.was[mine]
        self.version = version
        self.now_ms = now_ms
        self.lately_ms = ROLLOUT_MS if version else ROLLOUT_SETTING_MS

    def _movers(self, code: int) -> int:
        """Nodes that lately took this value."""
        moved = (self.changed_ms > self.now_ms - self.lately_ms) & (self.codes == code)
        return len(np.unique(self.nodes[moved]))

    def rolls_out(self) -> bool:
        """Whether what most have is still on its way to the others."""
        movers = self._movers(self.usual)
        return movers >= max(ROLLOUT_NODES, ROLLOUT_SHARE * len(np.unique(self.nodes)))

    def strangers(self, code: int, standing: Collection[int]) -> Times:
        """Entities whose value `code` is drift: indices into the fleet. `standing`: those told of already."""
        have = self.codes == code
        count = len(np.unique(self.nodes[have]))
        few = count == 1 or (count <= MINORITY_NODES and have.sum() < MINORITY * len(self.mine))
        # A setting that others lately gave up is being undone node by node, as a planned power cap is lifted. Whoever
        # was told of before still has it: mending one of two does not end the other's incident.
        left = (self.was == code) & (self.changed_ms > self.now_ms - self.lately_ms)
        undone = not self.version and bool(left.any())
        if not few or self._movers(code) >= ROLLOUT_NODES:
            return np.zeros(0, np.int64)
        if undone:
            have &= np.isin(self.mine, list(standing))
        changed = self.changed_ms > 0
        for_ms = self.now_ms - np.where(changed, self.changed_ms, self.found_ms)
        settled = for_ms >= np.where(changed, SETTLE_MS, FOUND_MS)
        return np.asarray(self.mine[have & settled], np.int64)


def _racks_apart(codes: Codes, racks: Codes, nodes: Codes) -> Bools:
    """Entities of racks that are set up otherwise as a whole: most of a rack, two nodes at least."""
    result = np.zeros(len(codes), bool)
    usual = _commonest(codes)
    for rack in np.unique(racks[codes != usual]).tolist():
        inside = racks == rack
        common = _commonest(codes[inside])
        have = inside & (codes == common)
        if common != usual and have.sum() >= MAJORITY * inside.sum() and len(np.unique(nodes[have])) > 1:
            result |= inside
    return result


def _of_whole_nodes(index: FleetIndex, found: list[Deviation]) -> Iterator[Deviation]:
    """The same deviation of all GPUs of a node is one, of the node."""
    by_node: dict[tuple[str, int, str], list[Deviation]] = {}
    for deviation in found:
        by_node.setdefault((deviation.attribute.key, deviation.n, deviation.value), []).append(deviation)
    for (_, n, _), same in by_node.items():
        if same[0].g is not None and len(same) > 1 and len(same) == index.nodes[n].gpus:
            yield same[0]._replace(g=None)
        else:
            yield from same


def _example_inventory(index: FleetIndex, **odd: str) -> Inventory:
    """All nodes alike, but for GPU 3 of node n05."""
    told = Inventory(index)
    for node in index.nodes:
        facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071-nvidia"}
        for slot in range(node.gpus):
            mine = {"model": "NVIDIA H100 80GB HBM3", "ecc_mode": "on", "power_limit_set_w": "700"}
            if (node.name, slot) == ("n05", 3):
                mine |= odd
            facts |= {f"gpu{slot}.{key}": value for key, value in mine.items()}
        told.update(node.name, facts, START_MS - FOUND_MS)
    return told


EXAMPLES = (
    Example(
        "all nodes alike", lambda: play(small_fleet(), 8, inventory=_example_inventory(small_fleet())), frozenset()
    ),
    Example(
        "ECC is off on one GPU",
        lambda: play(small_fleet(), 8, inventory=_example_inventory(small_fleet(), ecc_mode="off")),
        frozenset({("drift", "ecc_mode", "gpu", Severity.WARNING.value)}),
    ),
)

"""Detect hardware and settings that differ from those of the peers: driver, firmware, power limit, ECC, clocks.

Peers have the same SKU, pool and model. The majority's value counts as right: at least three quarters share it, while a
single node or less than a tenth differs. Three cases look like drift and are not reported: a rollout in progress, a
value that a whole rack shares (a planned power cap, one delivery), and a second standard of many nodes.
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
from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools
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
EVERY_MS = 60_000  # between two comparisons of the whole fleet; each reports all deviations
QUIET_MS = 180_000

# Drover's own limits. With less agreement no value counts as right; a value of more nodes is a standard of its own.
MAJORITY = 0.75
MINORITY = 0.10
MINORITY_NODES = 20
LEAST = {"node": 4, "gpu": 8}  # entities in a group
REPORTING_SHARE = 0.5  # of a group's entities must have reported

# An agent reads settings every 5 minutes, so a change made everywhere at once shows over 6 minutes.
SETTLE_MS = 360_000
FOUND_MS = 60_000  # after a node's first report: its peers report within this time after a start

# A rollout takes the next node within this time; after it a single newer version is one that nobody meant, or a trial.
AHEAD_MS = 2 * 3_600_000
# A rollout may pause for nights and a weekend; a new setting of a rack is made within minutes.
ROLLOUT_MS = 72 * 3_600_000
ROLLOUT_SETTING_MS = 900_000
ROLLOUT_NODES = 2  # with the new value; a single one is a change of that node
ROLLOUT_SHARE = 0.1  # of the group's nodes that lately took the majority's value: the others will follow


@dataclass(slots=True)
class DriftState:
    compared_ms: int = 0
    known: frozenset[tuple[str, int, str]] = frozenset()  # attribute, node or GPU, value: found last time
    reopened: Sequence[Incident] = ()  # open when the collector started


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> DriftState:
    """Return state with the open deviations: the repair of one of two must not close the other's incident."""
    return DriftState(
        reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.node is not None]
    )


def _resume(index: FleetIndex, s: DriftState) -> None:
    known = set(s.known)
    scopes = {attribute.key: attribute.scope for attribute in ATTRIBUTES}
    for incident in s.reopened:
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
    s.known, s.reopened = frozenset(known), ()


def detect(window: Window, state: DriftState | None, now_ms: int) -> tuple[list[Finding], DriftState]:
    s = state if state is not None else DriftState()
    inventory = window.inventory
    if not window.fresh or inventory is None or 0 <= now_ms - s.compared_ms < EVERY_MS:
        return [], s
    s.compared_ms = now_ms
    if s.reopened:
        _resume(window.index, s)
    groups: dict[str, Ints] = {}
    found = [
        d
        for attribute in _attributes(inventory)
        for d in _deviations(window.index, inventory, attribute, s.known, now_ms, groups)
    ]
    s.known = frozenset((d.attribute.key, d.n if d.g is None else d.g, d.value) for d in found)
    subjects: dict[tuple[int, int | None], list[Deviation]] = {}
    for deviation in _of_whole_nodes(window.index, found):
        subjects.setdefault((deviation.n, deviation.g), []).append(deviation)
    return [finding(NAME, window, deviations, now_ms) for deviations in subjects.values()], s


def could_not_judge(window: Window) -> list[str]:
    if window.inventory is None or not window.inventory.version:
        return ["differences between nodes: no node has reported its inventory"]
    return []


def _attributes(inventory: Inventory) -> Iterator[Attribute]:
    for attribute in ATTRIBUTES:
        if attribute.key in (inventory.gpu if attribute.scope == "gpu" else inventory.node):
            yield attribute
    for name in inventory.nic_boards:
        yield NIC._replace(key=name, words=f"firmware of {name.removeprefix('nic.')}")


def _groups(index: FleetIndex, inventory: Inventory, attribute: Attribute) -> Ints:
    """Return the number of the group that each entity is compared in, int64 [E]."""
    model = inventory.gpu["model"].codes.astype(np.int64)
    keys: list[Ints] = [index.sku.astype(np.int64), index.pool.astype(np.int64)]
    if attribute.scope == "gpu":
        keys = [key[index.gpu_node] for key in keys] + [model]
        if attribute.by_board:
            keys.append(inventory.gpu["part_number"].codes.astype(np.int64))
    else:
        first = np.minimum(index.first_gpu[:-1], max(0, index.gpu_count - 1))
        keys.append(model[first] if index.gpu_count else np.zeros(index.node_count, np.int64))
        if attribute.key in inventory.nic_boards:
            keys.append(inventory.nic_boards[attribute.key].codes.astype(np.int64))
    group = np.zeros(len(keys[0]), np.int64)
    for key in keys:  # renumber after each key, so that the products stay small
        group = group * (int(key.max(initial=0)) + 2) + key + 1
        group = np.unique(group, return_inverse=True)[1].reshape(-1)
    return group


def _deviations(
    index: FleetIndex,
    inventory: Inventory,
    attribute: Attribute,
    before: Set[tuple[str, int, str]],
    now_ms: int,
    known_groups: dict[str, Ints],
) -> Iterator[Deviation]:
    """Yield what differs in one attribute.

    Args:
        before: the deviations found last time.
        known_groups: cache of this comparison's groups, by what they depend on.
    """
    column = (inventory.gpu if attribute.scope == "gpu" else inventory.node)[attribute.key]
    known = column.codes != UNKNOWN
    values = np.unique(column.codes[known])
    if len(values) < 2:  # all alike: the usual case
        return
    node = index.gpu_node if attribute.scope == "gpu" else np.arange(index.node_count, dtype=np.int32)
    by = attribute.key if attribute.key in inventory.nic_boards else f"{attribute.scope} {attribute.by_board}"
    groups = (
        known_groups[by] if by in known_groups else known_groups.setdefault(by, _groups(index, inventory, attribute))
    )
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
        if (
            len(mine) < LEAST[attribute.scope]
            or count < MAJORITY * len(mine)
            or len(mine) < REPORTING_SHARE * inside.sum()
        ):
            continue
        group_values = GroupValues(inventory, column, mine, usual, attribute, now_ms)
        if group_values.is_rolling_out():
            continue
        for code in codes[codes != usual].tolist():
            for at in group_values.drifted(int(code), standing.get(inventory.values[code], ())):
                since = int(column.changed_ms[at]) or int(inventory.first_ms[node[at]])
                yield Deviation(
                    attribute, int(node[at]), int(at) if attribute.scope == "gpu" else None, inventory.values[code],
                    inventory.values[usual], count, len(mine), since, now_ms - since >= AHEAD_MS,
                )  # fmt: skip


def _commonest(codes: Codes) -> int:
    return int(np.bincount(codes).argmax())


class GroupValues:
    """Values of one attribute in one group of entities `mine`, and the value `usual` that most of them have."""

    def __init__(
        self, inventory: Inventory, column: Column, mine: Ints, usual: int, attribute: Attribute, now_ms: int
    ) -> None:
        self.mine, self.usual = mine, usual
        self.nodes: Ints = inventory.node_of(attribute.scope)[mine]
        self.found_ms = inventory.first_ms[self.nodes]
        self.codes, self.changed_ms, self.was = column.codes[mine], column.changed_ms[mine], column.was[mine]
        self.version = attribute.version
        self.now_ms = now_ms
        self.lately_ms = ROLLOUT_MS if attribute.version else ROLLOUT_SETTING_MS

    def _changed_nodes(self, code: int) -> int:
        """Return how many nodes lately changed to this value."""
        changed = (self.changed_ms > self.now_ms - self.lately_ms) & (self.codes == code)
        return len(np.unique(self.nodes[changed]))

    def is_rolling_out(self) -> bool:
        """Return True if the usual value is still being rolled out to the others."""
        changed = self._changed_nodes(self.usual)
        return changed >= max(ROLLOUT_NODES, ROLLOUT_SHARE * len(np.unique(self.nodes)))

    def drifted(self, code: int, standing: Collection[int]) -> Times:
        """Return the entities whose value `code` is drift, as indices over the fleet. `standing`: reported before."""
        have = self.codes == code
        count = len(np.unique(self.nodes[have]))
        few = count == 1 or (count <= MINORITY_NODES and have.sum() < MINORITY * len(self.mine))
        # A setting that others lately gave up is being undone node by node, as when a planned power cap is lifted.
        # Entities reported before stay: the repair of one of two does not close the other's incident.
        gave_up = (self.was == code) & (self.changed_ms > self.now_ms - self.lately_ms)
        undone = not self.version and bool(gave_up.any())
        if not few or self._changed_nodes(code) >= ROLLOUT_NODES:
            return np.zeros(0, np.int64)
        if undone:
            have &= np.isin(self.mine, list(standing))
        changed = self.changed_ms > 0
        for_ms = self.now_ms - np.where(changed, self.changed_ms, self.found_ms)
        settled = for_ms >= np.where(changed, SETTLE_MS, FOUND_MS)
        return np.asarray(self.mine[have & settled], np.int64)


def _racks_apart(codes: Codes, racks: Codes, nodes: Codes) -> Bools:
    """Return the entities of racks that differ as a whole, bool [E]: most of a rack, at least two nodes."""
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
    """Merge the same deviation of all GPUs of a node into one of the node."""
    by_node: dict[tuple[str, int, str], list[Deviation]] = {}
    for deviation in found:
        by_node.setdefault((deviation.attribute.key, deviation.n, deviation.value), []).append(deviation)
    for (_, n, _), same in by_node.items():
        if same[0].g is not None and len(same) > 1 and len(same) == index.nodes[n].gpus:
            yield same[0]._replace(g=None)
        else:
            yield from same


def _example_inventory(index: FleetIndex, **odd: str) -> Inventory:
    """Return an inventory of equal nodes, except GPU 3 of node n05."""
    inventory = Inventory(index)
    for node in index.nodes:
        facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071-nvidia"}
        for slot in range(node.gpus):
            mine = {"model": "NVIDIA H100 80GB HBM3", "ecc_mode": "on", "power_limit_set_w": "700"}
            if (node.name, slot) == ("n05", 3):
                mine |= odd
            facts |= {f"gpu{slot}.{key}": value for key, value in mine.items()}
        inventory.update(node.name, facts, START_MS - FOUND_MS)
    return inventory


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

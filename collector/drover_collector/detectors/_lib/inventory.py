"""Keep the hardware and settings that nodes report, as arrays that `drift` compares. Bounded by the keys it keeps.

An agent reports all of them at once, as the flat map of its Hello, and again after a change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.fleet.ports import FOUND_MAX, in_order
from drover_core.jobs import place

Codes = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Times = Ints
Floats = npt.NDArray[np.float64]

UNKNOWN = -1
MAX_VALUE = 96  # characters kept of a value
MAX_VALUES = 50_000  # different ones in all; any beyond count as unknown
MAX_NICS = 64  # names of adapters over the fleet

# Reported key, after "gpuN." or alone -> attribute. Simulated and older agents use the shorter keys.
GPU_KEYS: Mapping[str, str] = {
    key: key
    for key in (
        "model", "part_number", "vbios", "inforom_image", "gsp_firmware", "power_limit_set_w", "ecc_mode", "mig_mode",
        "sm_clock_max_mhz", "memory_clock_max_mhz", "memory_temp_max_c",
    )
}  # fmt: skip
NODE_KEYS: Mapping[str, str] = {
    "driver_version": "driver", "driver": "driver", "host.kernel": "kernel", "kernel": "kernel",
    "host.bios_version": "bios", "bios": "bios", "cuda_version": "cuda", "cuda": "cuda",
}  # fmt: skip
_NIC = re.compile(r"nic\.(.+)\.(firmware|board)")
_CARD = re.compile(r"nic\.(.+)\.(?:driver|pci|mac|guid)")
MAX_CARDS = 4 * FOUND_MAX  # names of a node's network cards
InventoryReport = tuple[int, str, Mapping[str, str]]  # time in ms, node, all that it reported


class Column:
    """One attribute of all nodes or GPUs.

    Attributes:
        codes: int32 [E], number of the value in `Inventory.values`, UNKNOWN where none is reported.
        last: int32 [E], the newest known code.
        changed_ms: int64 [E], when the value changed; 0: never. was: int32 [E], the code before that change.
    """

    __slots__ = ("changed_ms", "codes", "last", "was")

    def __init__(self, count: int) -> None:
        self.codes: Codes = np.full(count, UNKNOWN, np.int32)
        self.last: Codes = np.full(count, UNKNOWN, np.int32)
        self.was: Codes = np.full(count, UNKNOWN, np.int32)
        self.changed_ms: Times = np.zeros(count, np.int64)

    def put(self, at: int, code: int, now_ms: int) -> bool:
        """Set a code. Return True if it changed."""
        if code == self.codes[at]:
            return False
        self.codes[at] = code
        if code != UNKNOWN:
            if self.last[at] not in (UNKNOWN, code):
                self.changed_ms[at], self.was[at] = now_ms, self.last[at]
            self.last[at] = code
        return True


class Inventory:
    """The newest inventory of each node of a fleet.

    Attributes:
        gpu, node: attribute -> Column over the GPUs or nodes of the fleet.
        first_ms: int64 [N], time of each node's first report; 0: none.
        version: grows with each change.
        serves: node number -> network card -> slot of the nearest GPU on the PCI bus.
        cards: node number -> network cards in the node's newest report; no key if it names none.
        ports_version: grows with each change of `serves` or `cards`.
        boards: number of a GPU -> its UUID, and when another one was there before; 0: none is known.
        places: number of a GPU -> where the rank on it says that it stands in its job's parallel groups.
        places_version: grows with each change of `places`.
    """

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}
        self.gpu = {name: Column(index.gpu_count) for name in GPU_KEYS.values()}
        self.node = {name: Column(index.node_count) for name in dict.fromkeys(NODE_KEYS.values())}
        self.nic_boards: dict[str, Column] = {}  # board of the adapter "nic.NAME"; its firmware is in `node`
        self.first_ms: Times = np.zeros(index.node_count, np.int64)
        self.version = 0
        self.serves: dict[int, Mapping[str, int]] = {}
        self.cards: dict[int, frozenset[str]] = {}
        self.ports_version = 0
        self.boards: dict[int, tuple[str, int]] = {}
        self.places: dict[int, place.RankPlace] = {}
        self.places_version = 0

    def numbers(self, name: str) -> Floats:
        """Return an attribute of all GPUs as numbers, float64 [G]; NaN where none is reported, or no number."""
        known = np.array([_number(value) for value in self.values] + [np.nan])
        return known[self.gpu[name].codes]  # UNKNOWN is the last

    def node_of(self, scope: str) -> Ints:
        """Return the node number of each entity of a scope ("gpu" or "node"), int64 [E]."""
        index = self._index
        return index.gpu_node.astype(np.int64) if scope == "gpu" else np.arange(index.node_count, dtype=np.int64)

    def update(self, node: str, facts: Mapping[str, str], now_ms: int) -> None:
        """Store a node's report. A node outside the fleet is ignored."""
        n = self._index.node_number.get(node)
        if n is None:
            return
        changed = False
        if not self.first_ms[n]:
            self.first_ms[n], changed = max(1, now_ms), True
        found: dict[str, str] = {}
        for key, name in NODE_KEYS.items():
            if facts.get(key):
                found.setdefault(name, facts[key])
        for name in dict.fromkeys(NODE_KEYS.values()):
            changed |= self.node[name].put(n, self._number(found.get(name, "")), now_ms)
        for slot, g in enumerate(range(int(self._index.first_gpu[n]), int(self._index.first_gpu[n + 1]))):
            if uuid := facts.get(f"gpu{slot}.uuid", "").strip()[:MAX_VALUE]:
                was, since_ms = self.boards.get(g, (uuid, 0))
                self.boards[g] = uuid, since_ms if was == uuid else now_ms
            self._put_place(g, facts.get(place.key(slot), ""))
            for key, name in GPU_KEYS.items():
                changed |= self.gpu[name].put(g, self._number(facts.get(f"gpu{slot}.{key}", "")), now_ms)
        changed |= self._nics(n, facts, now_ms)
        self.version += changed
        serves, cards = served_by(facts, int(self._index.first_gpu[n + 1] - self._index.first_gpu[n])), cards_of(facts)
        if (serves, cards) != (self.serves.get(n, {}), self.cards.get(n, frozenset())):
            self.serves[n], self.cards[n] = serves, cards
            self.ports_version += 1

    def _put_place(self, g: int, text: str) -> None:
        """What cannot be read is not known: an agent of a later version may write more."""
        try:
            found = place.unpack(text) if text else None
        except place.PlaceError:
            found = None
        if found != self.places.get(g):
            self.places_version += 1
            if found is None:
                del self.places[g]
            else:
                self.places[g] = found

    def _nics(self, n: int, facts: Mapping[str, str], now_ms: int) -> bool:
        found: dict[str, dict[str, str]] = {}
        for key, value in facts.items():
            if key.startswith("nic.") and (match := _NIC.fullmatch(key)):
                found.setdefault(f"nic.{match[1]}", {})[match[2]] = value
        changed = False
        for name in found:
            if name not in self.node and len(self.nic_boards) < MAX_NICS:
                self.node[name] = Column(self._index.node_count)
                self.nic_boards[name] = Column(self._index.node_count)
        for name, board in self.nic_boards.items():
            card = found.get(name, {})
            changed |= self.node[name].put(n, self._number(card.get("firmware", "")), now_ms)
            changed |= board.put(n, self._number(card.get("board", "")), now_ms)
        return changed

    def _number(self, value: str) -> int:
        value = value.strip()[:MAX_VALUE]
        if not value:
            return UNKNOWN
        number = self._numbers.get(value, UNKNOWN)
        if number == UNKNOWN and len(self.values) < MAX_VALUES:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("nan")


def served_by(facts: Mapping[str, str], gpus: int) -> dict[str, int]:
    """Return network card -> slot of the GPU that it serves, from the nearest cards that a node reports for each GPU.

    GPUs with the same nearest cards share them in order, as NCCL does: two GPUs and two cards at one switch get one
    card each. A card that several GPUs share serves the first of them.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for slot in range(gpus):
        names = tuple(in_order(set(filter(None, facts.get(f"gpu{slot}.nic", "").split(",")[:FOUND_MAX]))))
        if names:
            groups.setdefault(names, []).append(slot)
    found: dict[str, int] = {}
    for names, slots in groups.items():
        for at, name in enumerate(names):
            found.setdefault(name, slots[at * len(slots) // len(names)])
    return found


def cards_of(facts: Mapping[str, str]) -> frozenset[str]:
    names = (match[1] for key, value in facts.items() if value and (match := _CARD.fullmatch(key)))
    return frozenset(in_order(set(names))[:MAX_CARDS])

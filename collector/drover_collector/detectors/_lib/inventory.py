"""What nodes say they are made of and set to, as arrays: what `drift` compares. Bounded by the keys it keeps.

An agent tells all it knows at once (the flat map of its Hello), and again when something changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.fleet.ports import FOUND_MAX, in_order

Codes = npt.NDArray[np.int32]
Times = npt.NDArray[np.int64]

UNKNOWN = -1
MAX_VALUE = 96  # characters kept of a value
MAX_VALUES = 50_000  # different ones in all; more are unknown: what is compared has few
MAX_NICS = 64  # names of adapters over the fleet

# Key as the agent tells it, below "gpuN." or alone -> the name used here. Simulated and older agents say it shorter.
GPU_KEYS: Mapping[str, str] = {
    key: key
    for key in (
        "model", "part_number", "vbios", "inforom_image", "gsp_firmware", "power_limit_set_w", "ecc_mode", "mig_mode",
        "sm_clock_max_mhz", "memory_clock_max_mhz",
    )
}  # fmt: skip
NODE_KEYS: Mapping[str, str] = {
    "driver_version": "driver", "driver": "driver", "host.kernel": "kernel", "kernel": "kernel",
    "host.bios_version": "bios", "bios": "bios", "cuda_version": "cuda", "cuda": "cuda",
}  # fmt: skip
_NIC = re.compile(r"nic\.(.+)\.(firmware|board)")
_CARD = re.compile(r"nic\.(.+)\.(?:driver|pci|mac|guid)")
MAX_CARDS = 4 * FOUND_MAX  # names of a node's network cards
Told = tuple[int, str, Mapping[str, str]]  # when, by which node, all that it told


class Column:
    """One attribute of all nodes or GPUs.

    Attributes:
        codes: int32 [E], number of the value in `Inventory.values`, UNKNOWN where it is not told.
        changed_ms: int64 [E], when it became another value than before; 0: as it was found. was: that value.
    """

    __slots__ = ("changed_ms", "codes", "last", "was")

    def __init__(self, count: int) -> None:
        self.codes: Codes = np.full(count, UNKNOWN, np.int32)
        self.last: Codes = np.full(count, UNKNOWN, np.int32)  # newest that was known
        self.was: Codes = np.full(count, UNKNOWN, np.int32)
        self.changed_ms: Times = np.zeros(count, np.int64)

    def put(self, at: int, code: int, now_ms: int) -> bool:
        """Whether that is news."""
        if code == self.codes[at]:
            return False
        self.codes[at] = code
        if code != UNKNOWN:
            if self.last[at] not in (UNKNOWN, code):
                self.changed_ms[at], self.was[at] = now_ms, self.last[at]
            self.last[at] = code
        return True


class Inventory:
    """
    Attributes:
        gpu, node: attribute -> Column over the GPUs or nodes of the fleet.
        told_ms: int64 [N], when each node told first; 0 never.
        version: grows with each change.
        serves: node number -> network card -> slot of the GPU that it is nearest to on the PCI bus.
        cards: node number -> network cards that the node has, as of its newest word; no key where it says nothing.
        ports_version: grows with each change of these two.
    """

    def __init__(self, index: FleetIndex) -> None:
        self._index = index
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}
        self.gpu = {name: Column(index.gpu_count) for name in GPU_KEYS.values()}
        self.node = {name: Column(index.node_count) for name in dict.fromkeys(NODE_KEYS.values())}
        self.nic_boards: dict[str, Column] = {}  # of the adapter "nic.NAME" in `node`, where its firmware is
        self.told_ms: Times = np.zeros(index.node_count, np.int64)
        self.version = 0
        self.serves: dict[int, Mapping[str, int]] = {}
        self.cards: dict[int, frozenset[str]] = {}
        self.ports_version = 0

    def update(self, node: str, told: Mapping[str, str], now_ms: int) -> None:
        """Take in all that a node tells. A node that the fleet does not have is left out."""
        n = self._index.node_number.get(node)
        if n is None:
            return
        news = False
        if not self.told_ms[n]:
            self.told_ms[n], news = max(1, now_ms), True
        found: dict[str, str] = {}
        for key, name in NODE_KEYS.items():
            if told.get(key):
                found.setdefault(name, told[key])
        for name in dict.fromkeys(NODE_KEYS.values()):
            news |= self.node[name].put(n, self._number(found.get(name, "")), now_ms)
        for slot, g in enumerate(range(int(self._index.first_gpu[n]), int(self._index.first_gpu[n + 1]))):
            for key, name in GPU_KEYS.items():
                news |= self.gpu[name].put(g, self._number(told.get(f"gpu{slot}.{key}", "")), now_ms)
        news |= self._nics(n, told, now_ms)
        self.version += news
        serves, cards = served_by(told, int(self._index.first_gpu[n + 1] - self._index.first_gpu[n])), cards_of(told)
        if (serves, cards) != (self.serves.get(n, {}), self.cards.get(n, frozenset())):
            self.serves[n], self.cards[n] = serves, cards
            self.ports_version += 1

    def _nics(self, n: int, told: Mapping[str, str], now_ms: int) -> bool:
        found: dict[str, dict[str, str]] = {}
        for key, value in told.items():
            if key.startswith("nic.") and (match := _NIC.fullmatch(key)):
                found.setdefault(f"nic.{match[1]}", {})[match[2]] = value
        news = False
        for name in found:
            if name not in self.node and len(self.nic_boards) < MAX_NICS:
                self.node[name] = Column(self._index.node_count)
                self.nic_boards[name] = Column(self._index.node_count)
        for name, board in self.nic_boards.items():
            card = found.get(name, {})
            news |= self.node[name].put(n, self._number(card.get("firmware", "")), now_ms)
            news |= board.put(n, self._number(card.get("board", "")), now_ms)
        return news

    def _number(self, value: str) -> int:
        value = value.strip()[:MAX_VALUE]
        if not value:
            return UNKNOWN
        number = self._numbers.get(value, UNKNOWN)
        if number == UNKNOWN and len(self.values) < MAX_VALUES:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


def served_by(told: Mapping[str, str], gpus: int) -> dict[str, int]:
    """Network card -> slot of the GPU that it serves, of what a node says is nearest to each of its GPUs.

    GPUs that have the same cards nearest share them in order, as NCCL does: of two GPUs and two cards at one switch
    each GPU has one. A card that is the nearest of several GPUs, and the only one, is said to serve the first.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for slot in range(gpus):
        names = tuple(in_order(set(filter(None, told.get(f"gpu{slot}.nic", "").split(",")[:FOUND_MAX]))))
        if names:
            groups.setdefault(names, []).append(slot)
    found: dict[str, int] = {}
    for names, slots in groups.items():
        for at, name in enumerate(names):
            found.setdefault(name, slots[at * len(slots) // len(names)])
    return found


def cards_of(told: Mapping[str, str]) -> frozenset[str]:
    names = (match[1] for key, value in told.items() if value and (match := _CARD.fullmatch(key)))
    return frozenset(in_order(set(names))[:MAX_CARDS])

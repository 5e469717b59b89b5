"""Lay out the network ports of a fleet: their nodes, GPUs and leafs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools
from drover_collector.fleet.index import FleetIndex


@dataclass(frozen=True, slots=True)
class Port:
    """A network port.

    Attributes:
        leaf: the switch that it is connected to; "": unknown.
        gpu: slot of the GPU that it serves, from the fleet file, else from the node's PCI bus; None: none or unknown.
        listed: the fleet file has the port. sure: it also has the leaf.
        there: its node's newest report still has the card.
    """

    node: int
    name: str
    leaf: str
    gpu: int | None = None
    listed: bool = True
    sure: bool = True
    there: bool = True

    @property
    def computes(self) -> bool:
        """True if it serves a GPU."""
        return self.gpu is not None

    @property
    def group(self) -> str:
        """Its leaf if that is sure, else ""."""
        return self.leaf if self.sure else ""


def ports_of(index: FleetIndex, inventory: Inventory | None = None) -> list[Port]:
    """Return the ports of a fleet, in the layout of a bucket's link columns.

    The fleet file's GPU and leaf of a port take precedence; a GPU below 0 means none. A port that is not listed belongs
    to its node's leaf if it serves a GPU: ports for storage and management have other switches.
    """
    found = []
    for port in index.ports.all():
        n, node, link = port.node, index.nodes[port.node], port.listed
        card = port.name.partition("/")[0]
        gpu = None if link is None else link.gpu
        if gpu is None and inventory is not None and n in inventory.serves:
            gpu = inventory.serves[n].get(card)
        gpu = None if gpu is None or gpu < 0 else gpu
        leaf = node.leaf if link is None and gpu is not None else "" if link is None else link.leaf or node.leaf
        cards = inventory.cards.get(n) if inventory is not None else None
        found.append(
            Port(n, port.name, leaf, gpu, link is not None, bool(leaf) and link is not None, not cards or card in cards)
        )
    return found


def ports_version(index: FleetIndex, inventory: Inventory | None) -> tuple[int, int]:
    """Return a value that changes whenever the result of `ports_of` changes."""
    return len(index.ports), 0 if inventory is None else inventory.ports_version


class PortLayout:
    """The L ports of a fleet as arrays.

    Attributes:
        version: of the ports, see `ports_version`.
        of_node: int64 [L], node of each port. of_leaf: leaf -> its ports, in order.
        computes: bool [L], the port serves a GPU. there: bool [L], the node still has the card.
    """

    __slots__ = ("computes", "index", "of_leaf", "of_node", "ports", "there", "version")

    def __init__(self, index: FleetIndex, inventory: Inventory | None) -> None:
        self.index, self.version = index, ports_version(index, inventory)
        self.ports = ports_of(index, inventory)
        self.of_node: Ints = np.array([port.node for port in self.ports], np.int64)
        self.computes: Bools = np.array([port.computes for port in self.ports], bool)
        self.there: Bools = np.array([port.listed or port.there for port in self.ports], bool)
        of_leaf: dict[str, list[int]] = {}
        for k, port in enumerate(self.ports):
            of_leaf.setdefault(port.leaf, []).append(k)
        self.of_leaf: dict[str, Ints] = {leaf: np.array(mine, np.int64) for leaf, mine in of_leaf.items()}

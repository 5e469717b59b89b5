"""Number the nodes and GPUs of a fleet, in the order of its file. Arrays are laid out by these numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.ports import FleetPorts
from drover_core.model.fleet import FleetSpec, NodeSpec

IntArray = npt.NDArray[np.int32]

RACK_NODES = 64  # more nodes of one rack name are not a rack: some fleet files have one name for all


class FleetIndex:
    """Arrays over N nodes and G GPUs. A changed fleet is a new index; only `ports` grows, as agents report.

    Attributes:
        nodes: N node specs; node_number: name -> n.
        gpu_node, gpu_slot: int32 [G].
        first_gpu: int32 [N + 1]; GPUs of node n are first_gpu[n] .. first_gpu[n + 1].
        ports: the network ports by number, by which link columns of buckets are laid out.
        rack, leaf, pool, sku: code per node, int32 [N]; names in `racks`, `leafs`, `pools`, `skus`.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.nodes: tuple[NodeSpec, ...] = spec.nodes
        self.node_number = {node.name: n for n, node in enumerate(self.nodes)}
        self.ports = FleetPorts(self.nodes)
        counts = np.array([node.gpus for node in self.nodes], np.int32)
        self.first_gpu: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.gpu_node: IntArray = np.repeat(np.arange(len(self.nodes), dtype=np.int32), counts)
        self.gpu_slot: IntArray = (np.arange(len(self.gpu_node)) - self.first_gpu[self.gpu_node]).astype(np.int32)
        self.rack, self.racks = _codes(node.rack for node in self.nodes)
        self.leaf, self.leafs = _codes(node.leaf for node in self.nodes)
        self.pool, self.pools = _codes(node.pool for node in self.nodes)
        self.sku, self.skus = _codes(node.sku for node in self.nodes)
        self._rack_nodes = np.bincount(self.rack, minlength=len(self.racks))
        order = "\n".join(f"{node.rack} {node.name} {node.gpus}" for node in self.nodes)
        self.version = hashlib.blake2b(order.encode(), digest_size=8).hexdigest()

    @property
    def node_count(self) -> int:
        return len(self.nodes)

    @property
    def gpu_count(self) -> int:
        return len(self.gpu_node)

    def gpu(self, node: str, slot: int) -> int | None:
        """Return the number of a GPU, or None if the fleet has no such node or slot."""
        n = self.node_number.get(node)
        if n is None or not 0 <= slot < self.nodes[n].gpus:
            return None
        return int(self.first_gpu[n]) + slot

    def near(self, node: str) -> str:
        """Return the rack of a node, by which its GPUs are stored; the node itself if it has no real rack."""
        n = self.node_number.get(node)
        rack = -1 if n is None else int(self.rack[n])
        return self.racks[rack] if rack >= 0 and self._rack_nodes[rack] <= RACK_NODES and self.racks[rack] else node

    def member(self, gpu: int) -> tuple[str, int]:
        """Return (node name, slot) of the GPU with number `gpu`."""
        return self.nodes[int(self.gpu_node[gpu])].name, int(self.gpu_slot[gpu])


def _codes(names: Iterable[str]) -> tuple[IntArray, Sequence[str]]:
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(name, len(numbers)) for name in names]
    return np.array(codes, np.int32), tuple(numbers)

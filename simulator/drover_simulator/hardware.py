"""Lay out the GPUs, nodes and ports of a fleet as arrays, with the constants of each unit.

Units of one board differ naturally: slots of a chassis by +-11 % in thermal resistance, chips by a few percent in
leakage, dynamic power and speed (published for healthy fleets: 8 % on average, 22 % at most).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec
from drover_simulator.sku import Sku, sku_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# PCI buses of the eight boards of an HGX baseboard, as its usual hosts number them.
PCI_BUSES = (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB)
# Thermal resistance by slot: boards behind others get warmer air. Mean 1, ends at +-11 % (Theta).
SLOT_RESISTANCE = (0.89, 0.93, 0.97, 1.00, 1.00, 1.03, 1.07, 1.11)
UNIT_SD = 0.03  # leakage, dynamic power, thermal resistance
SPEED_SD = 0.007  # work done at the same clock
TRUNCATE_SD = 2.2


def truncated(rng: np.random.Generator, sd: float, size: int) -> Floats:
    """Return factors around 1 with `sd`, clipped at 2.2 sd, float64 [size]."""
    return 1 + sd * np.clip(rng.standard_normal(size), -TRUNCATE_SD, TRUNCATE_SD)


def links_of(node: NodeSpec) -> tuple[LinkSpec, ...]:
    """Return the ports of a node: those of its fleet file, else one NIC per GPU."""
    return node.links or tuple(LinkSpec(f"mlx5_{slot}", slot, node.leaf or None) for slot in range(node.gpus))


class Hardware:
    """G GPUs, N nodes, L ports in the order of the fleet file, slots ascending.

    Attributes:
        gpu_node, gpu_slot: int64 [G]; first_gpu: int64 [N + 1]; rack: int64 [N], `racks` its names.
        link_node, link_gpu: int64 [L]; link_gpu is -1 where a port serves no GPU; link_names: [(node name, port)].
        the constants of `Sku` per GPU as float64 [G], with each unit's own factors in them.
    """

    def __init__(self, spec: FleetSpec, seed: int, unit_sd: float = UNIT_SD, speed_sd: float = SPEED_SD) -> None:
        self.spec = spec
        self._unit_sd, self._speed_sd = unit_sd, speed_sd
        self.names = [node.name for node in spec.nodes]
        self.number = {name: n for n, name in enumerate(self.names)}
        counts = np.array([node.gpus for node in spec.nodes], np.int64)
        self.first_gpu: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.gpu_node: Ints = np.repeat(np.arange(len(counts)), counts)
        self.gpu_slot: Ints = np.arange(len(self.gpu_node)) - self.first_gpu[self.gpu_node]
        racks = {name: i for i, name in enumerate(dict.fromkeys(node.rack for node in spec.nodes))}
        self.racks = list(racks)
        self.rack: Ints = np.array([racks[node.rack] for node in spec.nodes], np.int64)
        self.sku_of_node: list[Sku] = [sku_of(node.sku) for node in spec.nodes]
        self._lay_out_links()
        self._draw_units(np.random.default_rng([seed, 1]))

    @property
    def gpus(self) -> int:
        return len(self.gpu_node)

    @property
    def nodes(self) -> int:
        return len(self.names)

    def gpus_of(self, node: int) -> Ints:
        """Return the GPU indices of a node."""
        return np.arange(self.first_gpu[node], self.first_gpu[node + 1])

    def pci(self, gpu: int) -> str:
        """Return the PCI address of a GPU as in XID lines, `0000:3a:00`."""
        slot = int(self.gpu_slot[gpu])
        return f"{slot // len(PCI_BUSES):04x}:{PCI_BUSES[slot % len(PCI_BUSES)]:02x}:00"

    def _lay_out_links(self) -> None:
        nodes: list[int] = []
        gpus: list[int] = []
        self.link_names: list[tuple[str, str]] = []
        for n, name in enumerate(self.names):
            for link in links_of(self.spec.nodes[n]):
                nodes.append(n)
                gpus.append(-1 if link.gpu is None or link.gpu < 0 else int(self.first_gpu[n]) + link.gpu)
                self.link_names.append((name, link.link))
        self.link_node: Ints = np.array(nodes, np.int64)
        self.link_gpu: Ints = np.array(gpus, np.int64)
        self.link_gbps = np.array([self.sku_of_node[n].network_gbps for n in nodes], np.float64)

    def _draw_units(self, rng: np.random.Generator) -> None:
        count = self.gpus

        def of(field: str) -> Floats:
            return np.array([getattr(self.sku_of_node[n], field) for n in self.gpu_node], np.float64).reshape(count)

        slots = np.array(SLOT_RESISTANCE)[self.gpu_slot % len(SLOT_RESISTANCE)]
        self.tdp_w = of("tdp_w")
        leakage = truncated(rng, self._unit_sd, count)
        self.idle_w = of("idle_w") * leakage
        self.static_w = of("static_w") * leakage
        self.dynamic_w = of("dynamic_w") * truncated(rng, self._unit_sd, count)
        self.resistance = of("thermal_resistance") * slots * truncated(rng, self._unit_sd, count)
        self.heat_capacity = of("heat_capacity_j_per_k")
        self.speed = truncated(rng, self._speed_sd, count)
        self.max_clock_mhz = of("max_clock_mhz")
        self.idle_clock_ratio = of("idle_clock_mhz") / self.max_clock_mhz
        self.memory_clock_mhz = of("memory_clock_mhz")
        self.memory_bytes = of("memory_bytes")
        self.operating_temp_c = of("operating_temp_c")
        self.slowdown_temp_c = of("slowdown_temp_c")
        self.nvlinks = of("nvlinks")
        self.nvlink_bytes_per_s = of("nvlink_bytes_per_s")
        self.pcie_generation = of("pcie_generation")
        self.pcie_width = of("pcie_width")
        self.pcie_bytes_per_s = of("pcie_bytes_per_s")
        self.remap_banks = of("remap_banks")
        self.network_bytes_per_s = of("network_gbps") * 1e9 / 8
        self.inlet_offset_c: Floats = 0.4 * rng.standard_normal(self.nodes)
        self.rack_inlet_c: Floats = 24.5 + np.clip(1.2 * rng.standard_normal(len(self.racks)), -2.5, 2.5)

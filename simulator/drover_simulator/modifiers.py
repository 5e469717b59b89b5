"""Hold what faults change: reset before every step, then changed by each active fault."""

from __future__ import annotations

import numpy as np

from drover_simulator.hardware import Bools, Floats, Hardware

# PCIe bandwidth of a lane by generation, relative to generation 1 (2.5, 5, 8, 16, 32 GT/s with their encodings).
LANE_SPEED = np.array([0.0, 1.0, 2.0, 3.94, 7.88, 15.75, 31.5])


class Modifiers:
    """Arrays over G GPUs, N nodes and L ports.

    Attributes:
        resistance: factor on the thermal resistance. limit_w: enforced power limit. clock_cap: highest clock over the
            board's highest. memory_speed, nvlink_speed: bandwidth left, 0..1. nvlinks_down: links lost.
        pcie_generation, pcie_width: of the link now. host_time: factor on the time the host needs per step.
        network_time: factor on the time of collectives between nodes. work: factor on a rank's share of the work.
        running: share of time that the job has data to work on. stopped: the rank takes no further step.
        deadlocked: the rank spins in a collective that never ends.
        lost: the GPU does not answer. corrupting: it computes a wrong product at times, which no sensor shows.
        inlet_rise_c, host_busy (0..1), silent, hung: per node.
        link_rate: share of the port's rate. link_down: per port.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        gpus, nodes, links = hardware.gpus, hardware.nodes, len(hardware.link_names)
        self.resistance: Floats = np.ones(gpus)
        self.limit_w: Floats = hardware.tdp_w.copy()
        self.clock_cap: Floats = np.ones(gpus)
        self.memory_speed: Floats = np.ones(gpus)
        self.nvlink_speed: Floats = np.ones(gpus)
        self.nvlinks_down: Floats = np.zeros(gpus)
        self.pcie_generation: Floats = hardware.pcie_generation.copy()
        self.pcie_width: Floats = hardware.pcie_width.copy()
        self.host_time: Floats = np.ones(gpus)
        self.network_time: Floats = np.ones(gpus)
        self.work: Floats = np.ones(gpus)
        self.running: Floats = np.ones(gpus)
        self.stopped: Bools = np.zeros(gpus, np.bool_)
        self.deadlocked: Bools = np.zeros(gpus, np.bool_)
        self.lost: Bools = np.zeros(gpus, np.bool_)
        self.corrupting: Bools = np.zeros(gpus, np.bool_)
        self.inlet_rise_c: Floats = np.zeros(nodes)
        self.host_busy: Floats = np.zeros(nodes)
        self.silent: Bools = np.zeros(nodes, np.bool_)
        self.hung: Bools = np.zeros(nodes, np.bool_)
        self.link_rate: Floats = np.ones(links)
        self.link_down: Bools = np.zeros(links, np.bool_)

    def reset(self) -> None:
        """Set everything to normal."""
        for ones in (
            self.resistance, self.clock_cap, self.memory_speed, self.nvlink_speed, self.host_time, self.network_time,
            self.work, self.running, self.link_rate,
        ):  # fmt: skip
            ones.fill(1.0)
        for zeros in (self.nvlinks_down, self.inlet_rise_c, self.host_busy):
            zeros.fill(0.0)
        for flags in (
            self.stopped, self.deadlocked, self.lost, self.corrupting, self.silent, self.hung, self.link_down,
        ):  # fmt: skip
            flags.fill(False)
        self.limit_w[:] = self._hardware.tdp_w
        self.pcie_generation[:] = self._hardware.pcie_generation
        self.pcie_width[:] = self._hardware.pcie_width

    def pcie_speed(self) -> Floats:
        """Return the PCIe bandwidth over that of the board's full link, float64 [G]."""
        full = LANE_SPEED[self._hardware.pcie_generation.astype(np.int64)] * self._hardware.pcie_width
        return LANE_SPEED[self.pcie_generation.astype(np.int64)] * self.pcie_width / full

"""Read the simulated fleet as agents would: catalog values with the sensors' noise and resolution.

A metric is absent where a board has no such sensor.

Resolution as the reader of NVML gives it: temperatures in whole degrees, power in mW, utilisation in whole percent,
clocks in steps of 15 MHz, PCIe and NVLink rates in MB/s.
"""

from __future__ import annotations

import numpy as np

from drover_agent.sources.base import RATE_STEP
from drover_simulator.counters import Counters
from drover_simulator.hardware import Floats, Hardware
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import Physics
from drover_simulator.steps import Shares, Steps

ASKED = ("tensor", "dram", "occupancy", "nvlink", "pcie_bytes_per_s", "memory_fill")

CLOCK_STEP_MHZ = 15.0
DROPOUTS_PER_VALUE = 4e-6  # reads that fail: about one value a minute on a fleet of 1,000 GPUs
# Half of the traffic does not depend on the progress of steps (prefetching, relaying for others in rings and trees), so
# a GPU with a slow path carries less than its peers although all make the same steps.
RELAXED = 0.5
WAIT_SM = 0.13  # SMs that a collective's kernel keeps busy
MEMORY_TOTAL_BYTES = 2.0 * 2**40
FABRIC_COMPLETED = 3.0


def relaxed(speed: Floats) -> Floats:
    """Return the traffic of a GPU over its peers' when its path has `speed` of its bandwidth left."""
    return np.asarray(1 - RELAXED + RELAXED * speed)


class Sensors:
    """The sensors of a fleet. Every step draws the same number of random values."""

    rate_step = RATE_STEP  # B/s

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self._hw = hardware
        self._rng = np.random.default_rng([seed, 7])
        self._unsupported: dict[str, Floats] = {}
        for n, sku in enumerate(hardware.sku_of_node):
            for name in sku.unsupported:
                mask = self._unsupported.setdefault(name, np.zeros(hardware.gpus))
                mask[hardware.gpus_of(n)] = np.nan
        self._load: Floats = np.full(hardware.nodes, 10.0)
        self._root_used: Floats = self._rng.uniform(0.18, 0.55, hardware.nodes)

    def network_bytes_per_s(self, shares: Shares, steps: Steps, modifiers: Modifiers) -> Floats:
        """Return the traffic of each GPU's NIC, one way, float64 [G]."""
        use = steps.profile("network")
        flow = shares.main * use * shares.rate * 0.5 + shares.sync * np.minimum(2 * use, 0.9) / modifiers.network_time
        return np.asarray(flow * self._hw.network_bytes_per_s)

    def gpu(
        self, shares: Shares, steps: Steps, physics: Physics, modifiers: Modifiers, counters: Counters
    ) -> dict[str, Floats]:
        """Return catalog name -> float64 [G], NaN where absent."""
        hw, n = self._hw, self._hw.gpus
        noise = self._rng.standard_normal((12, n))
        ask = {name: steps.profile(name) for name in ASKED}

        def ratio(value: Floats, which: int, step: float = 1e-3, spread: float = 0.012) -> Floats:
            clipped = np.clip(value * (1 + spread * noise[which]), 0, 1)
            return np.asarray(np.round(clipped / step) * step)

        def rate(value: Floats) -> Floats:
            return np.asarray(np.round(value / self.rate_step) * self.rate_step)

        computing = np.clip(shares.duty - shares.gap, 0, 1)
        sm = shares.main * (0.90 * computing + WAIT_SM * (1 - shares.duty)) + shares.sync * 0.3 + shares.spin * WAIT_SM
        tensor = shares.main * ask["tensor"] * shares.tensor_duty
        dram = shares.main * ask["dram"] * shares.rate * relaxed(modifiers.memory_speed) + shares.sync * 0.25
        dram += shares.spin * 0.01
        nvlink_share = shares.main * ask["nvlink"] * shares.rate + shares.sync * 0.35
        nvlink = hw.nvlink_bytes_per_s * nvlink_share * relaxed(modifiers.nvlink_speed)
        pcie_speed = modifiers.pcie_speed()
        pcie = shares.main * ask["pcie_bytes_per_s"] * shares.rate * relaxed(pcie_speed)
        network = self.network_bytes_per_s(shares, steps, modifiers)
        saved = shares.checkpoint * 6e9 * pcie_speed
        room = hw.pcie_bytes_per_s * pcie_speed * 0.9
        util = shares.main * (1 - shares.gap) + shares.sync + shares.spin + shares.checkpoint * 0.04
        clock_mhz = physics.clock * hw.max_clock_mhz
        temp = np.round(physics.core_c + 0.25 * noise[0])
        held = shares.held.astype(np.float64)

        columns = {
            "sm_clock_mhz": np.round(clock_mhz / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ,
            "memory_clock_mhz": np.round(hw.memory_clock_mhz * modifiers.memory_speed),
            "clock_event_reasons": physics.reasons.astype(np.float64),
            "throttle_power_us": np.floor(physics.held_power_us),
            "throttle_thermal_sw_us": np.floor(physics.held_thermal_sw_us),
            "throttle_thermal_hw_us": np.floor(physics.held_thermal_hw_us),
            "throttle_brake_us": np.zeros(n),
            "throttle_sync_us": np.zeros(n),
            "power_w": np.round(physics.power_w * (1 + 0.008 * noise[1]), 3),
            "power_limit_w": modifiers.limit_w.copy(),
            "energy_j": np.floor(physics.energy_j * 1e3) / 1e3,
            "gpu_temp_c": temp,
            "memory_temp_c": np.round(physics.hbm_c + 0.25 * noise[2]),
            "thermal_margin_c": hw.operating_temp_c - temp,
            "gpu_util_ratio": ratio(util, 3, 0.01, 0.003),
            "memory_util_ratio": ratio(1.25 * dram / np.maximum(modifiers.memory_speed, 0.2), 4, 0.01),
            "framebuffer_used_bytes": np.floor(np.where(held > 0, ask["memory_fill"], 0.008) * hw.memory_bytes),
            "framebuffer_total_bytes": hw.memory_bytes.copy(),
            "sm_active_ratio": ratio(sm, 5),
            "sm_occupancy_ratio": ratio(sm * ask["occupancy"], 6),
            "tensor_active_ratio": ratio(tensor, 7),
            "dram_active_ratio": ratio(dram, 8),
            "fp64_active_ratio": np.zeros(n),
            "fp32_active_ratio": ratio(0.07 * sm, 9),
            "fp16_active_ratio": ratio(0.03 * sm, 9),
            "pcie_tx_bytes_per_s": rate(np.minimum(pcie * 0.6 + network + saved, room) * (1 + 0.03 * noise[10])),
            "pcie_rx_bytes_per_s": rate(np.minimum(pcie + network, room) * (1 + 0.03 * noise[10])),
            "nvlink_tx_bytes_per_s": rate(nvlink * (1 + 0.015 * noise[11])),
            "nvlink_rx_bytes_per_s": rate(nvlink * (1 - 0.015 * noise[11])),
            "pcie_generation": modifiers.pcie_generation.copy(),
            "pcie_width": modifiers.pcie_width.copy(),
            "nvlink_active_links": hw.nvlinks - modifiers.nvlinks_down,
            "nvlink_effective_ber": np.zeros(n),
            "remap_banks_max": hw.remap_banks - counters.gpu["remapped_rows_corrected"]
            - counters.gpu["remapped_rows_uncorrected"],
            "fabric_state": np.full(n, FABRIC_COMPLETED),
            "compute_processes": held,
            **{name: np.floor(values) for name, values in counters.gpu.items()},
        }  # fmt: skip
        for name, mask in self._unsupported.items():
            columns[name] = columns[name] + mask
        self._drop(columns)
        return columns

    def _drop(self, columns: dict[str, Floats]) -> None:
        count = int(self._rng.poisson(DROPOUTS_PER_VALUE * self._hw.gpus * len(columns)))
        names = list(columns)
        for which, gpu in zip(
            self._rng.integers(0, len(names), count), self._rng.integers(0, max(1, self._hw.gpus), count), strict=True
        ):
            columns[names[which]][gpu] = np.nan

    def node(
        self, dt_s: float, shares: Shares, inlet_c: Floats, modifiers: Modifiers, counters: Counters
    ) -> dict[str, Floats]:
        """Return catalog name -> float64 [N]."""
        nodes = self._hw.nodes
        noise = self._rng.standard_normal((7, nodes))

        def mean(values: Floats) -> Floats:
            return np.bincount(self._hw.gpu_node, values, nodes) / np.maximum(np.diff(self._hw.first_gpu), 1)

        held, main, saving = mean(shares.held.astype(np.float64)), mean(shares.main), mean(shares.checkpoint)
        cpu = np.clip(0.012 + 0.05 * held + 0.11 * main + 0.2 * saving + 0.75 * modifiers.host_busy, 0, 1)
        self._load += (224 * cpu - self._load) * -np.expm1(-dt_s / 60)
        return {
            "cpu_util_ratio": np.round(np.clip(cpu * (1 + 0.05 * noise[0]), 0, 1), 4),
            "load1": np.round(self._load * (1 + 0.01 * noise[1]), 2),
            "memory_available_bytes": np.floor(MEMORY_TOTAL_BYTES * (0.93 - 0.35 * held + 0.002 * noise[2])),
            "memory_total_bytes": np.full(nodes, MEMORY_TOTAL_BYTES),
            "disk_read_bytes_per_s": np.floor((2e5 + 4e8 * main) * np.exp(0.1 * noise[3])),
            "disk_write_bytes_per_s": np.floor((4e5 + 5e9 * saving) * np.exp(0.1 * noise[4])),
            "root_used_ratio": np.round(self._root_used, 4),
            "net_rx_bytes_per_s": np.floor((3e5 + 1.2e8 * main) * np.exp(0.1 * noise[5])),
            "net_tx_bytes_per_s": np.floor((2e5 + 2e7 * main + 1e9 * saving) * np.exp(0.1 * noise[6])),
            "inlet_temp_c": np.round(inlet_c, 1),
            **{name: np.floor(values) for name, values in counters.node.items()},
        }

    def link(self, modifiers: Modifiers, counters: Counters) -> dict[str, Floats]:
        """Catalog name -> float64 [L]."""
        return {
            "link_up": (~modifiers.link_down).astype(np.float64),
            "rate_gbps": np.round(self._hw.link_gbps * modifiers.link_rate, 1),
            **{name: np.floor(values) for name, values in counters.link.items()},
        }

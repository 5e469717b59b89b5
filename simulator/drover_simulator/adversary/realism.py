"""Degrade telemetry between the hardware and the collector: noise, coarse sensors, gaps, missing columns, wrong clocks.

All of it is drawn per fleet. Which columns a site lacks follows from how it reads: no GPM and no DCGM (no profiling), a
BMC that the agent may not query (no inlet, no fans), Ethernet instead of InfiniBand. The rates are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_simulator.hardware import Bools, Floats, Hardware
from drover_simulator.physics import POWER_CAP, SW_THERMAL
from drover_simulator.steps import Shares

PROFILING = (
    "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio", "fp64_active_ratio",
    "fp32_active_ratio", "fp16_active_ratio",
)  # fmt: skip
TRAFFIC = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
THROTTLES = (
    "throttle_power_us", "throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us", "throttle_sync_us",
)  # fmt: skip
# (share of the pools that lack them, columns that are missing together); shares are assumed.
GPU_LACKS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.12, (*PROFILING, *TRAFFIC)),
    (0.10, THROTTLES),
    (0.06, ("clock_event_reasons",)),
    (0.10, ("memory_temp_c",)),
    (0.15, ("thermal_margin_c",)),
    (0.10, ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries")),
    (0.08, ("nvlink_active_links",)),
    (0.08, ("pcie_replays",)),
    (0.05, ("power_limit_w",)),
    (0.10, ("remap_banks_max", "remap_banks_none")),
    (0.30, ("recovery_action",)),
)  # fmt: skip
NODE_LACKS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.25, ("inlet_temp_c",)),
    (0.50, ("fan_min_rpm", "fans_failed")),
    (0.10, ("pcie_aer_correctable", "pcie_aer_fatal")),
    (0.10, ("edac_corrected", "edac_uncorrected")),
)
LINK_LACKS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.25, ("out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts")),
    (0.20, ("symbol_errors", "link_error_recoveries", "link_downed", "local_integrity_errors", "buffer_overruns")),
    (0.15, ("tx_wait",)),
)
NOISY = (*PROFILING, "memory_util_ratio", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
CLOCK_STEP_MHZ = 15.0
DIP = 0.72  # power in the exchange at a step's end over the mean (assumed; swings of a third and more are published)
SKEWED_SHARE = 0.04  # of nodes: their time service does not work


@dataclass(frozen=True, slots=True)
class Realism:
    """What telemetry loses on its way.

    Attributes:
        noise: relative spread added to each profiling value; clock_noise: to the clock. coarse: whole percents.
        instant: power is read at one instant of the step, not as its mean.
        holes: values lost per value read. gaps: ticks of a node lost per tick (0.1 to 1 in 10,000). late: rows of a
            node that arrive after their bucket was judged, per tick.
        lacks: metric -> bool [G], [N] or [L], True where it is never read. skew_s: float64 [N], node clock minus true.
    """

    noise: float
    clock_noise: float
    coarse: bool
    instant: bool
    holes: float
    gaps: float
    late: float
    gpu_lacks: dict[str, Bools]
    node_lacks: dict[str, Bools]
    link_lacks: dict[str, Bools]
    skew_s: Floats


def draw_realism(rng: np.random.Generator, hardware: Hardware) -> Realism:
    spec = hardware.spec
    pools = sorted({node.pool for node in spec.nodes})
    of_node = np.array([pools.index(node.pool) for node in spec.nodes])

    def lacks(table: tuple[tuple[float, tuple[str, ...]], ...], place: npt.NDArray[np.int64]) -> dict[str, Bools]:
        found: dict[str, Bools] = {}
        for share, names in table:
            for pool in range(len(pools)):
                if rng.random() < share:
                    for name in names:
                        found[name] = found.get(name, np.zeros(len(place), np.bool_)) | (of_node[place] == pool)
        return found

    nodes = hardware.nodes
    skew = rng.normal(0, 0.002, nodes)
    skewed = rng.random(nodes) < SKEWED_SHARE
    skew = np.where(
        skewed, rng.choice([-1.0, 1.0], nodes) * np.exp(rng.uniform(np.log(0.05), np.log(3.0), nodes)), skew
    )
    return Realism(
        noise=float(rng.uniform(0.0, 0.03)),
        clock_noise=float(rng.uniform(0.0, 0.006)),
        coarse=bool(rng.random() < 0.3),
        instant=bool(rng.random() < 0.3),
        holes=float(10 ** rng.uniform(-6, -4)),
        gaps=float(10 ** rng.uniform(-5, -4)),
        late=float(10 ** rng.uniform(-5, -3.5)),
        gpu_lacks=lacks(GPU_LACKS, hardware.gpu_node),
        node_lacks=lacks(NODE_LACKS, np.arange(nodes)),
        link_lacks=lacks(LINK_LACKS, hardware.link_node),
        skew_s=skew,
    )


class TelemetryLosses:
    """Turns what sensors show into what arrives."""

    def __init__(self, realism: Realism, hardware: Hardware, rng: np.random.Generator) -> None:
        self._real, self._hw, self._rng = realism, hardware, rng

    def blur(self, gpu: dict[str, Floats], shares: Shares) -> None:
        """Add noise and round to coarse steps, in place."""
        real, count = self._real, self._hw.gpus
        for name in NOISY:
            values = gpu[name]
            values = values * (1 + real.noise * self._rng.standard_normal(count))
            if name.endswith("_ratio"):
                values = np.asarray(np.round(np.clip(values, 0, 1), 2 if real.coarse else 4), np.float64)
            gpu[name] = values
        # A clock that the power cap governs varies all the time; one at its maximum or at a setting is constant.
        governed = np.nan_to_num(gpu["clock_event_reasons"]).astype(np.int64) & (POWER_CAP | SW_THERMAL) != 0
        noise = 1 + real.clock_noise * self._rng.standard_normal(count) * governed
        clocks: Floats = (gpu["sm_clock_mhz"] * noise / CLOCK_STEP_MHZ).round() * CLOCK_STEP_MHZ
        gpu["sm_clock_mhz"] = np.minimum(np.maximum(clocks, CLOCK_STEP_MHZ), self._hw.max_clock_mhz)
        if real.instant:
            # In the exchange at a step's end power is below its mean; GPUs of a node are read together.
            instant = self._rng.random(self._hw.nodes)[self._hw.gpu_node]
            dip = (instant < shares.sync + shares.checkpoint) & shares.held
            power: Floats = gpu["power_w"] * np.where(dip, DIP, 1.0)
            gpu["power_w"] = power.round(3)

    def cut(self, gpu: dict[str, Floats], node: dict[str, Floats], link: dict[str, Floats]) -> tuple[Bools, Bools]:
        """Remove values and columns, in place. Return which nodes lost this row, and whose row is late; bool [N]."""
        real, rng = self._real, self._rng
        for columns, lacks in ((gpu, real.gpu_lacks), (node, real.node_lacks), (link, real.link_lacks)):
            for name, where in lacks.items():
                if name in columns:
                    columns[name] = np.where(where, np.nan, columns[name])
        names = list(gpu)
        count = int(rng.poisson(real.holes * self._hw.gpus * len(names)))
        for which, g in zip(rng.integers(0, len(names), count), rng.integers(0, self._hw.gpus, count), strict=True):
            gpu[names[which]][g] = np.nan
        drawn = rng.random(self._hw.nodes)
        return drawn < real.gaps, (drawn >= real.gaps) & (drawn < real.gaps + real.late)

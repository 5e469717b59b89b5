"""Keep error counters and states of GPUs, nodes and ports, which last until a repair."""

from __future__ import annotations

import numpy as np

from drover_simulator.hardware import Floats, Hardware

VOLATILE = (
    "pcie_replays", "nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries", "ecc_sram_corrected",
    "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected",
)  # fmt: skip
STATES = ("sram_threshold_exceeded", "row_remap_pending", "row_remap_failed", "recovery_action")
GPU_COUNTERS = (*VOLATILE, "remapped_rows_corrected", "remapped_rows_uncorrected", "remap_banks_none", *STATES)
NODE_COUNTERS = ("pcie_aer_correctable", "pcie_aer_fatal", "edac_corrected", "edac_uncorrected", "oom_kills")
LINK_COUNTERS = (
    "rx_bytes", "tx_bytes", "symbol_errors", "link_downed", "link_error_recoveries", "rx_errors", "tx_discards",
    "tx_wait", "local_integrity_errors", "buffer_overruns", "out_of_sequence", "packet_sequence_errors",
    "rnr_nak_retries", "ack_timeouts",
)  # fmt: skip

# A few GPUs hold nearly all correctable errors (Perlmutter: 4.5 % of the GPUs hold all single-bit errors).
ERROR_PRONE_SHARE = 0.045


class Counters:
    """Catalog name -> float64 [G], [N] or [L]. Fractions are kept, and dropped where they are read."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 6])
        self._hw = hardware
        gpus, links = hardware.gpus, len(hardware.link_names)
        self.gpu: dict[str, Floats] = {name: np.zeros(gpus) for name in GPU_COUNTERS}
        self.node: dict[str, Floats] = {name: np.zeros(hardware.nodes) for name in NODE_COUNTERS}
        self.link: dict[str, Floats] = {name: np.zeros(links) for name in LINK_COUNTERS}
        prone = self._rng.random(gpus) < ERROR_PRONE_SHARE
        self._ecc_per_s: Floats = np.where(prone, self._rng.lognormal(-8.5, 1.0, gpus), 0.0)
        self.gpu["ecc_dram_corrected"] += np.floor(prone * self._rng.exponential(30, gpus))
        self.gpu["remapped_rows_corrected"] += prone * self._rng.integers(0, 3, gpus)
        self.gpu["pcie_replays"] += self._rng.poisson(0.3, gpus)
        self.node["pcie_aer_correctable"] += self._rng.poisson(0.5, hardware.nodes)
        self.link["symbol_errors"] += self._rng.poisson(0.4, links)
        for name in ("rx_bytes", "tx_bytes"):
            self.link[name] += np.floor(self._rng.uniform(1e12, 1e15, links))

    def advance(self, dt_s: float, network_bytes_per_s: Floats, link_share: Floats) -> None:
        """Add traffic and the rare errors of healthy hardware.

        Args:
            network_bytes_per_s: float64 [G] through the NIC of each GPU.
            link_share: float64 [L], of the port's rate; 0 where it is down.
        """
        self.gpu["ecc_dram_corrected"] += self._rng.poisson(self._ecc_per_s * dt_s)
        if not len(link_share):
            return
        served = np.where(self._hw.link_gpu >= 0, network_bytes_per_s[self._hw.link_gpu], 0.0)
        sent = np.floor(served * link_share * dt_s)
        self.link["tx_bytes"] += sent
        self.link["rx_bytes"] += sent
        self.link["tx_wait"] += np.floor(sent * 2e-6)
        # A healthy optical link has one symbol error a day.
        self.link["symbol_errors"] += self._rng.random(len(sent)) < dt_s / 86400

    def forget(self, gpu: int) -> None:
        """Restart volatile counters and states of a GPU that was reset or replaced."""
        for name in (*VOLATILE, *STATES):
            self.gpu[name][gpu] = 0.0

"""Draw the details of a trouble beyond its severity: its sequence of events, its signs, what a link trains to."""

from __future__ import annotations

import numpy as np

from drover_simulator.adversary.effects import left_of, pcie_state
from drover_simulator.adversary.jobs import Job
from drover_simulator.adversary.kinds import (
    CONTAINED,
    GSP_TO_ERROR,
    NVLINK_RECURS,
    NVLINK_SPREADS,
    PCIE_WITH_79,
    REMAP_SUCCEEDS,
    REMAP_SUCCEEDS_ELSE,
    SPI_TO_MMU,
)
from drover_simulator.hardware import Hardware, Ints
from drover_simulator.modifiers import LANE_SPEED

# Assumed shares of faults that show no reason (clock, HBM) or a second sign (host, fan, NIC).
CLOCK_SILENT, HBM_SILENT, HOST_BUSY, FAN_REPORTED, NIC_TRAINED_LOWER = 0.4, 0.5, 0.5, 0.6, 0.5
MOST_XIDS = 6


def facts_of(
    rng: np.random.Generator, name: tuple[str, str], hw: Hardware, nodes: Ints, gpus: Ints, job: Job | None,
    severity: float,
) -> dict[str, float]:  # fmt: skip
    """Return name -> value; "severity" is included where the value that can be set differs from the drawn one."""
    u = rng.uniform
    drawn: dict[str, float] = {"seed": float(rng.integers(1 << 30)), "watchdog_s": float(u(30, 600))}
    g, sku = int(gpus[0]), hw.sku_of_node[int(nodes[0])]
    if name == ("straggler", "clock"):
        drawn["silent"] = float(rng.random() < CLOCK_SILENT)
    elif name == ("straggler", "hbm"):
        drawn["silent"] = float(rng.random() < HBM_SILENT)
    elif name == ("straggler", "host"):
        drawn["busy"] = float(u(0.3, 1.0) * (rng.random() < HOST_BUSY))
    elif name == ("thermal", "fan"):
        drawn["reported"] = float(rng.random() < FAN_REPORTED)
    elif name == ("straggler", "nic"):
        drawn["trained_lower"] = float(rng.random() < NIC_TRAINED_LOWER)
    elif name == ("straggler", "pcie") and job is not None:
        drawn |= _pcie(rng, hw, g, job, severity)
    elif name in (("straggler", "nvlink"), ("link", "nvlink")):
        drawn |= _nvlink(rng, name, hw, g, job, severity)
    elif name == ("link", "ib_flap"):
        drawn |= {"down_s": float(u(25, 60)), "up_s": float(u(30, 240))}
    elif name == ("xid", "fallen_off_bus"):
        drawn["aer"] = float(rng.random() < u(*PCIE_WITH_79))
    elif name == ("xid", "spi_failure"):
        drawn["mmu"] = float(rng.random() < SPI_TO_MMU)
    elif name == ("xid", "gsp_timeout"):
        drawn["stays"] = float(rng.random() < GSP_TO_ERROR)
    elif name == ("memory", "uncorrectable"):
        drawn["remapped"] = float(rng.random() < REMAP_SUCCEEDS.get(sku.name, REMAP_SUCCEEDS_ELSE))
        drawn["contained"] = float(drawn["remapped"] or rng.random() < CONTAINED)
    elif name == ("liveness", "clock_wrong"):
        drawn["sign"] = float(rng.choice([-1.0, 1.0]))
    elif name == ("straggler", "stage_imbalance"):
        drawn["parts"] = float(rng.choice([2, 4, 8]))
    elif name == ("straggler", "garbage_collection"):
        drawn["share"] = float(u(0.02, 0.3))
    elif name == ("xid", "application"):
        drawn |= {"which": float(rng.integers(1 << 20)), "code": float(rng.choice([13, 31]))}
    elif name == ("link", "leaf_down"):
        drawn["hold_s"] = float(u(60, 600))
    elif name == ("drift", "rollout"):
        drawn |= {"each_s": float(u(60, 240)), "away_s": float(u(30, 55))}
    return drawn


def _pcie(rng: np.random.Generator, hw: Hardware, g: int, job: Job, severity: float) -> dict[str, float]:
    share = job.profile.transfer
    generation, width = int(hw.pcie_generation[g]), int(hw.pcie_width[g])
    g2, w2 = pcie_state(float(left_of(share, severity)), generation, width)
    speed = LANE_SPEED[g2] * w2 / (LANE_SPEED[generation] * width)
    lost = float(1 - 1 / (1 + share * (1 / speed - 1)))
    return {
        "generation": g2, "width": w2, "severity": lost, "replays_per_s": float(rng.choice([0.0, 0.1, 2.0]))
    }  # fmt: skip


def _nvlink(
    rng: np.random.Generator, name: tuple[str, str], hw: Hardware, g: int, job: Job | None, severity: float
) -> dict[str, float]:
    links = float(hw.nvlinks[g])
    times = 1
    while times < MOST_XIDS and rng.random() < NVLINK_RECURS:
        times += 1
    drawn = {
        "errors_per_s": float(10 ** rng.uniform(-1, 2.3)), "ber": float(rng.uniform(-11.5, -7)), "times": float(times),
        "apart_s": float(rng.uniform(20, 400)), "other": -1.0,
    }  # fmt: skip
    if rng.random() < NVLINK_SPREADS:
        first = int(hw.first_gpu[hw.gpu_node[g]])
        others = [k for k in range(first, int(hw.first_gpu[hw.gpu_node[g] + 1])) if k != g]
        drawn["other"] = float(rng.choice(others)) if others else -1.0
    share = severity
    if name[0] == "straggler" and job is not None:
        share = 1 - float(left_of(job.profile.exchange, severity))
    drawn["down"] = float(np.clip(round(share * links), 1, links - 1))
    if name[0] == "straggler" and job is not None:
        speed = 1 - drawn["down"] / links
        drawn["severity"] = float(1 - 1 / (1 + job.profile.exchange * (1 / speed - 1)))
    return drawn

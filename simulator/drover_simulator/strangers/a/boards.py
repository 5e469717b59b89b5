"""Boards and the fleet: what is bolted into which rack, with the spread between healthy units.

Sources of the numbers: vendor data sheets for TDP, clocks, memory, links; Sinha et al. (SC'22, "Not all GPUs are created
equal") for the spread (8 % of performance typical, up to 22 %); plain arithmetic where a comment says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Board:
    """One GPU product in its usual server."""

    name: str
    fmax: float  # MHz, highest SM clock
    fidle: float  # MHz without a context
    tdp: float  # W
    idle: float  # W, all static power at 40 degC
    leak: float  # share of static power that grows with heat
    over: float  # full dynamic load at full clock, over the power that the cap leaves: > 1 means that the cap binds
    mem_gb: float
    mem_mhz: float
    mem_w: float  # W of the memory at full traffic
    hbm: bool  # has a memory temperature sensor
    nvlinks: int
    nvl_bps: float  # B/s per direction
    pcie_gen: int
    pcie_bps: float
    nics: int
    nic_gbps: float
    t_soft: float  # degC where software slowdown begins
    t_hw: float  # degC of hardware slowdown
    rise: float  # K, die over its air at TDP and 80 % fan
    sink_tau: float  # s, sink against the air
    preheat: float  # K that a front GPU at TDP adds to the air of the one behind
    gpus: tuple[int, ...]
    liquid: bool = False
    remap: bool = True
    blackwell: bool = False
    vbios: tuple[str, ...] = ()
    fstep: float = 15.0


BOARDS = {
    # A100: idle 50-60 W, 400 W; training runs near 1300-1410 MHz. 12 NVLink3 links of 25 GB/s per direction.
    "a100": Board(
        "NVIDIA A100-SXM4-80GB",
        1410,
        210,
        400,
        55,
        0.45,
        1.12,
        80,
        1593,
        60,
        True,
        12,
        300e9,
        4,
        26e9,
        8,
        200,
        85,
        92,
        36,
        45,
        7,
        (8, 8, 4),
        vbios=("92.00.45.00.03", "92.00.9E.00.01"),
    ),
    # H100: idle 65-75 W, 700 W; GEMM heavy training is power capped at 1400-1800 MHz. 18 NVLink4 links.
    "h100": Board(
        "NVIDIA H100 80GB HBM3",
        1980,
        345,
        700,
        70,
        0.5,
        1.22,
        80,
        2619,
        90,
        True,
        18,
        450e9,
        5,
        52e9,
        8,
        400,
        85,
        90,
        40,
        50,
        9,
        (8,),
        vbios=("96.00.74.00.01", "96.00.89.00.01"),
    ),
    # L40S: passive PCIe board, 350 W, GDDR6 without a readable memory temperature.
    "l40s": Board(
        "NVIDIA L40S",
        2520,
        210,
        350,
        34,
        0.4,
        1.18,
        46,
        9001,
        45,
        False,
        0,
        0,
        4,
        25e9,
        2,
        100,
        87,
        94,
        38,
        60,
        8,
        (8, 4),
        vbios=("95.02.66.00.02", "95.02.41.00.03"),
    ),
    # T4: 70 W and always power capped: 1590 MHz on paper, 900-1200 under load. Page retirement, no row remapper.
    "t4": Board(
        "Tesla T4",
        1590,
        300,
        70,
        10,
        0.4,
        1.9,
        15,
        5001,
        9,
        False,
        0,
        0,
        3,
        12e9,
        0,
        25,
        85,
        94,
        38,
        75,
        5,
        (4, 8),
        remap=False,
        vbios=("90.04.38.00.03", "90.04.96.00.01"),
    ),
    # B200: 1000 W, cold plates; coolant 30-40 degC, total resistance about 0.03 K/W.
    "b200": Board(
        "NVIDIA B200",
        1965,
        120,
        1000,
        140,
        0.5,
        1.1,
        180,
        3996,
        130,
        True,
        18,
        900e9,
        5,
        52e9,
        8,
        400,
        84,
        90,
        26,
        12,
        0,
        (8,),
        liquid=True,
        blackwell=True,
        vbios=("97.00.82.00.18", "97.00.9A.00.02"),
    ),
}
DRIVERS = ("535.183.06", "550.127.08", "560.35.03", "570.172.08", "575.57.08")


@dataclass
class Fleet:
    """Arrays over GPUs (G), nodes (N), racks and ports (L)."""

    seed_rng: np.random.Generator
    dt: float
    steps: int
    t0_ms: int
    roce: bool
    nodes: list[dict[str, Any]] = field(default_factory=list)
    boards: list[Board] = field(default_factory=list)  # per node
    node_rack: Any = None
    node_leaf: Any = None
    node_pool: Any = None
    first: Any = None  # first GPU of each node
    count: Any = None
    g_node: Any = None
    g_slot: Any = None
    g_front: Any = None  # index of the GPU in front, or itself
    g_rear: Any = None  # 1.0 for rear GPUs
    l_node: Any = None
    l_name: Any = None
    g_link: Any = None  # port of each GPU or -1
    l_rate: Any = None
    drivers: list[str] = field(default_factory=list)  # per node
    g_vbios: list[str] = field(default_factory=list)
    p: dict[str, Any] = field(default_factory=dict)  # per GPU constants
    opt: dict[str, Any] = field(default_factory=dict)  # instruments

    @property
    def hours(self) -> float:
        return self.steps * self.dt / 3600

    @property
    def end(self) -> float:
        return self.steps * self.dt

    def gpus(self, node: int) -> np.ndarray:
        return np.arange(self.first[node], self.first[node] + self.count[node])

    def board(self, gpu: int) -> Board:
        return self.boards[self.g_node[gpu]]

    def name(self, node: int) -> str:
        return str(self.nodes[node]["name"])

    def ms(self, t: float) -> float:
        return self.t0_ms + 1000.0 * t


def per_gpu(fleet: Fleet, attr: str) -> np.ndarray:
    return np.array([float(getattr(fleet.boards[n], attr)) for n in fleet.g_node])


def make_fleet(rng: np.random.Generator, nodes: int | None, hours: float | None, interval: float | None) -> Fleet:
    """Draw a fleet: 1 to 3 pools, racks of 4 to 8 nodes, leaves over racks."""
    dt = float(
        interval
        if interval is not None
        else rng.choice([1, 2, 5, 10, 15, 20, 30, 60], p=[0.04, 0.06, 0.13, 0.32, 0.15, 0.1, 0.13, 0.07])
    )
    span = float(hours if hours is not None else rng.uniform(2.5, 5.0)) * 3600
    most = int(5_000_000 / (8 * span / dt))  # rows; keeps a case well under a minute
    n = int(nodes if nodes is not None else min(rng.integers(8, 49), max(8, most)))
    steps = max(2, int(span // dt))
    t0 = 1_767_225_600_000 + int(rng.integers(0, 300 * 24 * 60)) * 60_000  # some minute of 2026
    fleet = Fleet(rng, dt, steps, t0, roce=bool(rng.random() < 0.45))
    pools = int(rng.choice([1, 2, 3], p=[0.45, 0.4, 0.15])) if n >= 12 else int(rng.choice([1, 2], p=[0.75, 0.25]))
    kinds = [str(k) for k in rng.choice(list(BOARDS), size=pools, replace=False, p=[0.25, 0.33, 0.16, 0.12, 0.14])]
    share = np.sort(rng.dirichlet(np.full(pools, 4.0)))[::-1]
    sizes = np.maximum(2, np.floor(share * n)).astype(int)
    sizes[0] += n - sizes.sum()
    rack = leaf = 0
    racks: list[int] = []
    leaves: list[int] = []
    pool_of: list[int] = []
    style = int(rng.integers(0, 3))
    stem = str(rng.choice(["gpu", "node", "hgx", "c", "worker-"]))
    width = int(rng.choice([2, 3, 4]))
    for k, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        board = BOARDS[kind]
        per_rack = int(rng.integers(3, 5)) if board.tdp >= 700 else int(rng.integers(4, 9))
        racks_per_leaf = int(rng.integers(1, 3)) if per_rack >= 4 else 2
        gpus = int(rng.choice(board.gpus))
        driver = str(DRIVERS[int(rng.integers(3 if board.blackwell else 0, len(DRIVERS)))])
        vbios = str(rng.choice(board.vbios))
        for i in range(size):
            if i and i % per_rack == 0:
                rack += 1
                if (i // per_rack) % racks_per_leaf == 0:
                    leaf += 1
            number = len(fleet.nodes) + 1
            name = {
                0: f"{stem}{number:0{width}d}",
                1: f"r{rack + 1:02d}-{stem}{i % per_rack + 1:02d}",
                2: f"{stem}{number:0{width}d}.{kind}.dc1",
            }[style]
            fleet.nodes.append(
                {
                    "name": name,
                    "rack": f"rack-{rack + 1:02d}",
                    "leaf": f"leaf-{leaf + 1:02d}",
                    "pool": f"{kind}-pool",
                    "sku": f"{kind}x{gpus}",
                    "gpus": gpus,
                }
            )
            fleet.boards.append(board)
            fleet.drivers.append(driver)
            fleet.g_vbios += [vbios] * gpus
            racks.append(rack)
            leaves.append(leaf)
            pool_of.append(k)
        rack += 1
        leaf += 1
    if len({x["name"] for x in fleet.nodes}) < n:
        for i, x in enumerate(fleet.nodes):
            x["name"] = f"{stem}{i + 1:0{width}d}"
    fleet.node_rack, fleet.node_leaf, fleet.node_pool = np.array(racks), np.array(leaves), np.array(pool_of)
    _wire(fleet, rng)
    _spread(fleet, rng)
    _instruments(fleet, rng)
    return fleet


def _wire(fleet: Fleet, rng: np.random.Generator) -> None:
    """Lay GPUs, air lanes and ports out flat."""
    fleet.count = np.array([x["gpus"] for x in fleet.nodes])
    fleet.first = np.concatenate([[0], np.cumsum(fleet.count)[:-1]])
    fleet.g_node = np.repeat(np.arange(len(fleet.nodes)), fleet.count)
    fleet.g_slot = np.arange(len(fleet.g_node)) - fleet.first[fleet.g_node]
    half = fleet.count[fleet.g_node] // 2
    fleet.g_rear = (fleet.g_slot >= half).astype(float)
    fleet.g_front = np.where(fleet.g_rear > 0, np.arange(len(fleet.g_node)) - half, np.arange(len(fleet.g_node)))
    l_node, l_name, l_rate = [], [], []
    fleet.g_link = np.full(len(fleet.g_node), -1)
    for n, board in enumerate(fleet.boards):
        nics = min(board.nics, int(fleet.count[n]))
        for k in range(nics):
            served = np.array_split(fleet.gpus(n), nics)[k]
            fleet.g_link[served] = len(l_node)
            l_node.append(n)
            l_name.append(f"mlx5_{k}" if not fleet.roce else f"rocep{k}s0" if board.nics < 8 else f"mlx5_{k}")
            l_rate.append(board.nic_gbps)
    fleet.l_node, fleet.l_name, fleet.l_rate = np.array(l_node, int), np.array(l_name, object), np.array(l_rate, float)


def _spread(fleet: Fleet, rng: np.random.Generator) -> None:
    """Draw the differences of healthy units."""
    g = len(fleet.g_node)
    p = fleet.p
    for attr in (
        "fmax",
        "fidle",
        "tdp",
        "idle",
        "leak",
        "over",
        "mem_w",
        "t_soft",
        "t_hw",
        "rise",
        "sink_tau",
        "preheat",
        "nvl_bps",
        "pcie_bps",
        "mem_gb",
        "mem_mhz",
        "pcie_gen",
        "nvlinks",
        "fstep",
        "liquid",
        "hbm",
        "remap",
    ):
        p[attr] = per_gpu(fleet, attr)
    wide = float(
        rng.choice([0.035, 0.05, 0.075], p=[0.5, 0.35, 0.15])
    )  # sd of dynamic power: half of it is clock at the cap
    p["eff"] = np.clip(rng.normal(1.0, 0.008, g), 0.97, 1.03)  # speed at one clock
    static = p["idle"]
    p["static"] = static * rng.lognormal(0, 0.08, g)
    p["dyn"] = (p["tdp"] - static * 1.25 - p["mem_w"] * 0.6) * p["over"] * np.clip(rng.normal(1, wide, g), 0.85, 1.18)
    # Total resistance = rise / TDP. About a third lies between die and sink (interface), the rest from sink to air.
    total = p["rise"] / p["tdp"]
    p["r_ds"] = total * 0.34 * rng.lognormal(0, 0.08, g)
    p["r_sa"] = total * 0.66 * rng.lognormal(0, 0.06, g)
    p["c_s"] = p["sink_tau"] / (total * 0.66)
    p["c_d"] = 2.5 / (total * 0.34)  # the die follows its sink within 2 to 3 s
    p["r_dh"] = total * 1.6  # HBM hears the die beside it ...
    p["r_hs"] = total * 1.1 * rng.lognormal(0, 0.08, g)  # ... and gives heat to the sink
    p["c_h"] = 8.0 / (total * 1.1)
    p["slot_hot"] = rng.normal(0, 0.4, 16)[fleet.g_slot % 16] + np.where(fleet.g_slot % 4 == 3, 0.8, 0.0)  # edge lanes
    p["sensor"] = np.round(rng.normal(0, 0.8, g))
    p["hbm_sensor"] = np.round(rng.normal(1, 1.0, g))
    p["cap"] = p["tdp"].copy()
    p["clk"] = np.ones(g)
    if rng.random() < 0.15:  # an operator caps a whole pool, as energy programmes do: 80 to 90 % of TDP
        pool = int(rng.integers(0, fleet.node_pool.max() + 1))
        p["cap"][fleet.node_pool[fleet.g_node] == pool] *= float(rng.choice([0.8, 0.86, 0.9]))
        p["cap"] = np.round(p["cap"])
    p["n_height"] = rng.normal(0, 0.7, len(fleet.nodes))
    p["n_rpm"] = rng.normal(1, 0.02, len(fleet.nodes)) * np.where([b.tdp >= 700 for b in fleet.boards], 9500, 13500)
    p["n_liquid"] = np.array([b.liquid for b in fleet.boards], float)
    p["room"] = float(rng.uniform(19, 26))  # ASHRAE A1: 18 to 27 degC recommended
    p["coolant"] = float(rng.uniform(28, 38))
    p["recirc"] = float(rng.uniform(1.0, 4.0))  # K that a rack's full load adds to its own inlet


def _instruments(fleet: Fleet, rng: np.random.Generator) -> None:
    """Which columns and files this fleet has, and how badly it measures."""
    o = fleet.opt
    drop: set[str] = set()
    style = str(rng.choice(["full", "nvml", "dcgm"], p=[0.5, 0.25, 0.25]))
    prof = [
        "sm_active_ratio",
        "sm_occupancy_ratio",
        "tensor_active_ratio",
        "dram_active_ratio",
        "fp64_active_ratio",
        "fp32_active_ratio",
        "fp16_active_ratio",
        "nvlink_tx_bytes_per_s",
        "nvlink_rx_bytes_per_s",
    ]
    if style == "nvml":
        drop |= set(prof)
    if style == "dcgm":
        drop |= {
            "recovery_action",
            "thermal_margin_c",
            "throttle_thermal_hw_us",
            "throttle_brake_us",
            "nvlink_effective_ber",
            "compute_processes",
            "nvlink_active_links",
        }
    loose = [
        "sm_occupancy_ratio",
        "fp64_active_ratio",
        "fp32_active_ratio",
        "fp16_active_ratio",
        "memory_clock_mhz",
        "thermal_margin_c",
        "throttle_sync_us",
        "remap_banks_max",
        "remap_banks_none",
        "fabric_state",
        "framebuffer_total_bytes",
        "compute_processes",
        "memory_util_ratio",
        "pcie_tx_bytes_per_s",
        "pcie_rx_bytes_per_s",
        "energy_j",
        "clock_event_reasons",
        "power_limit_w",
        "nvlink_effective_ber",
        "load1",
        "root_used_ratio",
        "oom_kills",
        "edac_uncorrected",
        "agent_rss_bytes",
        "agent_cpu_ratio",
        "fans_failed",
        "fan_min_rpm",
        "rnr_nak_retries",
        "ack_timeouts",
        "buffer_overruns",
    ]
    for name in loose:
        if rng.random() < 0.14:
            drop.add(name)
    if rng.random() < 0.12:
        drop |= {"throttle_power_us", "throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us"}
    if fleet.roce:
        drop |= {"symbol_errors", "local_integrity_errors", "buffer_overruns", "link_error_recoveries"}
    elif rng.random() < 0.5:
        drop |= {"cnp_sent", "cnp_handled"}
    if all(b.tdp == 70 for b in fleet.boards):
        drop |= {"nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries"}
    o["drop"] = drop
    o["style"] = style
    o["node_file"] = bool(rng.random() < 0.85)
    o["link_file"] = bool(rng.random() < 0.8) and len(fleet.l_node) > 0
    o["links_listed"] = bool(rng.random() < 0.25)
    o["nic_inventory"] = bool(rng.random() < 0.6)
    o["jobs_listed"] = str(rng.choice(["all", "some", "none"], p=[0.4, 0.25, 0.35]))
    o["inventory"] = bool(rng.random() < 0.9)
    o["slow_pace"] = bool(fleet.dt < 10 and rng.random() < 0.7)  # NVML's slow values come once in 10 s (30 s)
    o["aligned"] = bool(rng.random() < 0.4)
    o["loss"] = float(rng.choice([0.0, 0.0005, 0.002, 0.006]))  # share of rows that never arrive
    o["late"] = float(rng.choice([0.0, 0.0, 0.002]))
    o["null"] = float(rng.choice([0.0, 0.0005, 0.002]))  # single values that time out
    n = len(fleet.nodes)
    o["inlet_ok"] = rng.random(n) > float(rng.choice([0.05, 0.3, 1.0], p=[0.6, 0.25, 0.15]))
    o["fan_ok"] = (rng.random(n) > 0.15) & ~np.array([b.liquid for b in fleet.boards])
    o["phase"] = np.zeros(n) if o["aligned"] else rng.uniform(0, fleet.dt, n) * 0.9
    o["offset"] = rng.normal(0, 0.02, n) + np.where(rng.random(n) < 0.06, rng.normal(0, 0.8, n), 0)  # NTP, some without
    o["inlet_whole"] = bool(rng.random() < 0.6)  # IPMI gives whole degrees


def has(fleet: Fleet, *columns: str) -> bool:
    return not any(c in fleet.opt["drop"] for c in columns)

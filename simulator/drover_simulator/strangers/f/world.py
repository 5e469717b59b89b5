"""The machines: boards, pools, racks, leaves, and the spread between healthy units.

Numbers are from data sheets (TDP, clocks, memory, links) or arithmetic (heat capacities: kg of copper x 385 J/kgK;
air: 1200 J/m3K; water: 4180 J/kgK), resistances are set so that a healthy board at TDP is where real ones are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

GIB = 2.0**30


@dataclass(frozen=True)
class Board:
    model: str
    pool: str
    gpus: int
    tdp: float
    idle: float  # W with no context, clocks low
    fmax: float
    fidle: float
    step: float  # MHz between clock steps
    r_ds: float  # die to sink, K/W
    r_sa: float  # sink to air at 70 % fan, or to coolant at nominal flow, K/W
    c_s: float  # J/K of sink or cold plate
    r_hs: float  # HBM stacks to the sink, K/W
    r_hd: float  # HBM to die over the interposer, K/W
    c_h: float
    hbm_w: float  # W of the memory at full bandwidth
    t_slow: float
    t_hw: float
    fb: float
    hbm_bw: float
    mem_clock: float
    nvlinks: int
    nvl_bw: float  # B/s each way
    pcie_gen: int
    nics: int
    nic_gbps: float
    liquid: bool
    preheat: float  # W/K of the stream past an upstream GPU
    mem_temp: bool = True
    gpm: bool = True
    vbios: str = "96.00.74.00.01"


BOARDS = [
    Board(
        "NVIDIA A100-SXM4-80GB",
        "a100",
        8,
        400,
        52,
        1410,
        210,
        15,
        0.042,
        0.050,
        900,
        0.40,
        0.9,
        60,
        62,
        85,
        92,
        80 * GIB,
        2.04e12,
        1593,
        12,
        3.0e11,
        4,
        8,
        200,
        False,
        110,
        gpm=False,
        vbios="92.00.45.00.06",
    ),
    Board(
        "NVIDIA H100 80GB HBM3",
        "h100",
        8,
        700,
        70,
        1980,
        345,
        15,
        0.021,
        0.036,
        1300,
        0.30,
        0.7,
        70,
        85,
        87,
        91,
        80 * GIB,
        3.35e12,
        2619,
        18,
        4.5e11,
        5,
        8,
        400,
        False,
        150,
        vbios="96.00.89.00.01",
    ),
    Board(
        "NVIDIA H100 80GB HBM3",
        "h100-dlc",
        8,
        700,
        68,
        1980,
        345,
        15,
        0.021,
        0.024,
        260,
        0.27,
        0.7,
        70,
        85,
        87,
        91,
        80 * GIB,
        3.35e12,
        2619,
        18,
        4.5e11,
        5,
        8,
        400,
        True,
        84,
        vbios="96.00.74.00.11",
    ),
    Board(
        "NVIDIA H200",
        "h200",
        8,
        700,
        76,
        1980,
        345,
        15,
        0.021,
        0.035,
        1350,
        0.26,
        0.6,
        85,
        105,
        87,
        91,
        141 * GIB,
        4.8e12,
        3201,
        18,
        4.5e11,
        5,
        8,
        400,
        False,
        155,
        vbios="96.00.99.00.12",
    ),
    Board(
        "NVIDIA B200",
        "b200",
        8,
        1000,
        140,
        1965,
        120,
        15,
        0.014,
        0.026,
        1800,
        0.17,
        0.5,
        110,
        150,
        87,
        92,
        180 * GIB,
        8.0e12,
        3996,
        18,
        9.0e11,
        5,
        8,
        400,
        False,
        260,
        vbios="97.00.88.00.0F",
    ),
    Board(
        "NVIDIA GB200",
        "gb200",
        4,
        1200,
        155,
        2062,
        120,
        15,
        0.012,
        0.0125,
        320,
        0.15,
        0.5,
        110,
        160,
        87,
        92,
        186 * GIB,
        8.0e12,
        3996,
        18,
        9.0e11,
        5,
        4,
        400,
        True,
        110,
        vbios="97.00.82.00.3A",
    ),
    Board(
        "NVIDIA L40S",
        "l40s",
        8,
        350,
        34,
        2520,
        210,
        15,
        0.045,
        0.058,
        650,
        0.6,
        1.2,
        50,
        55,
        88,
        93,
        45 * GIB,
        8.64e11,
        9001,
        0,
        0.0,
        4,
        2,
        200,
        False,
        95,
        mem_temp=False,
        vbios="95.02.66.00.08",
    ),
]


@dataclass
class Fleet:
    rng: np.random.Generator
    boards: list[Board] = field(default_factory=list)  # by node
    names: list[str] = field(default_factory=list)
    rack: list[str] = field(default_factory=list)
    leaf: list[str] = field(default_factory=list)
    first: np.ndarray | None = None  # first GPU of each node
    node_of: np.ndarray | None = None
    slot: np.ndarray | None = None
    link_node: np.ndarray | None = None
    link_name: list[str] = field(default_factory=list)
    link_leaf: list[str] = field(default_factory=list)
    link_of_gpu: np.ndarray | None = None
    gpu_of_link: np.ndarray | None = None  # the first GPU it serves
    rail: bool = False
    roce: bool = False
    p: dict[str, np.ndarray] = field(default_factory=dict)  # board values by GPU, with spread

    @property
    def n(self) -> int:
        return len(self.names)

    @property
    def g(self) -> int:
        return len(self.node_of)

    def gpus(self, node: int) -> np.ndarray:
        return np.arange(self.first[node], self.first[node] + self.boards[node].gpus)

    def links(self, node: int) -> np.ndarray:
        return np.flatnonzero(self.link_node == node)

    def same(self, kind: str, node: int) -> list[int]:
        values = getattr(self, kind)
        return [m for m in range(self.n) if values[m] == values[node]]

    def pool_nodes(self, node: int) -> list[int]:
        return [m for m in range(self.n) if self.boards[m].pool == self.boards[node].pool]


def volts(rel):
    """Voltage over that at the top clock: flat to 55 % of it, then linear (the V/f curve of current boards)."""
    return 0.74 + 0.26 * np.clip((rel - 0.55) / 0.45, 0.0, 1.1)


def power_parts(p, rel, ten, sm, dram, nvl, td):
    """Return (die, memory, board) watts. p: per-GPU values (or a dict of floats)."""
    v = volts(rel)
    leak = p["leak"] * np.exp((td - 60.0) / 55.0) * v**2  # doubles every 38 K
    die = leak + p["c_dyn"] * (0.62 * ten / 0.5 + 0.38 * sm / 0.9) * rel * v * v + p["nvl_w"] * nvl
    mem = p["hbm_idle"] + p["hbm_w"] * dram
    return die, mem, (die + mem) * (1.0 + p["vrm"]) + p["aux"]


def build(rng: np.random.Generator, nodes: int) -> Fleet:
    f = Fleet(rng)
    k = 1 if nodes < 8 else int(rng.choice([1, 2, 3], p=[0.45, 0.4, 0.15]))
    k = max(1, min(k, nodes // 4))
    kinds = [BOARDS[i] for i in rng.choice(len(BOARDS), k, replace=False, p=[0.16, 0.22, 0.14, 0.14, 0.13, 0.12, 0.09])]
    share = rng.dirichlet([4.0] * k) if k > 1 else np.ones(1)
    counts = np.maximum(4 if nodes >= 8 else 1, np.round(share * nodes).astype(int))
    while counts[1:].sum() > nodes - 4 and k > 1:
        counts[1 + int(np.argmax(counts[1:]))] -= 1
    counts[0] = nodes - counts[1:].sum()
    f.rail = bool(rng.random() < 0.4)
    f.roce = bool(rng.random() < 0.4)
    style = int(rng.integers(3))
    serial = int(rng.integers(1, 400))
    rack_no = int(rng.integers(1, 30))
    link_node: list[int] = []
    link_gpu: list[int] = []
    node_of: list[int] = []
    slot: list[int] = []
    link_of: list[int] = []
    for board, count in zip(kinds, counts, strict=True):
        per_rack = int(rng.choice([2, 4, 4, 8])) if board.gpus == 8 else int(rng.choice([4, 8]))
        per_leaf = per_rack * int(rng.choice([1, 2])) if not f.rail else 32
        for j in range(int(count)):
            n = len(f.names)
            r = rack_no + j // per_rack
            f.names.append(
                [
                    f"{board.pool}-{serial + j:04d}",
                    f"gpu{serial + j:03d}-r{r:02d}",
                    f"node-{r:02d}-{j % per_rack:02d}-{board.pool}",
                ][style]
            )
            f.rack.append(f"R{r:02d}")
            leaf = f"leaf-{board.pool}-{j // per_leaf + 1}"
            f.leaf.append(leaf)
            f.boards.append(board)
            base = len(node_of)
            for s in range(board.gpus):
                node_of.append(n)
                slot.append(s)
                link_of.append(len(link_node) + s * board.nics // board.gpus)
            for q in range(board.nics):
                link_node.append(n)
                link_gpu.append(base + q * board.gpus // board.nics)
                f.link_name.append(f"eth{q}" if f.roce and style == 0 else f"mlx5_{q}")
                f.link_leaf.append(f"{leaf}-rail{q}" if f.rail else leaf)
        rack_no += (int(count) - 1) // per_rack + 1
        serial += int(count) + int(rng.integers(0, 20))
    f.node_of, f.slot = np.array(node_of), np.array(slot)
    f.first = np.flatnonzero(f.slot == 0)
    f.link_node, f.gpu_of_link, f.link_of_gpu = np.array(link_node), np.array(link_gpu), np.array(link_of)
    spread(f)
    return f


def spread(f: Fleet) -> None:
    """Board values by GPU. Healthy units differ: 3 to 5 % in dynamic power, 6 % in R, 20 % in leakage (SC'22: about
    8 % of performance between GPUs under one power cap)."""
    rng, g = f.rng, f.g

    def of(name: str) -> np.ndarray:
        return np.array([float(getattr(f.boards[n], name)) for n in f.node_of])

    p = {
        k: of(k)
        for k in (
            "tdp",
            "idle",
            "fmax",
            "fidle",
            "step",
            "r_ds",
            "r_sa",
            "c_s",
            "r_hs",
            "r_hd",
            "c_h",
            "hbm_w",
            "t_slow",
            "t_hw",
            "fb",
            "nvl_bw",
            "preheat",
            "liquid",
            "nvlinks",
            "pcie_gen",
        )
    }
    lot = np.exp(rng.normal(0, 0.015, f.n))[f.node_of]
    p["leak"] = 0.085 * p["tdp"] * np.exp(rng.normal(0, 0.20, g))
    p["hbm_idle"] = 0.25 * p["hbm_w"]
    p["vrm"] = np.full(g, 0.075)
    p["aux"] = 0.02 * p["tdp"]
    p["nvl_w"] = 0.055 * p["tdp"] * (p["nvlinks"] > 0)
    # a training load (tensor 0.5, SMs 0.9, memory 0.45) at the top clock asks for 100 to 122 % of TDP, by design of pool
    ask = {b.pool: rng.uniform(1.0, 1.22) for b in dict.fromkeys(f.boards)}
    want = np.array([ask[f.boards[n].pool] for n in f.node_of]) * p["tdp"]
    other = (p["hbm_idle"] + 0.45 * p["hbm_w"] + 0.085 * p["tdp"] * 1.15) * 1.075 + p["aux"]
    p["c_dyn"] = (want - other) / 1.075 * lot * np.exp(rng.normal(0, rng.uniform(0.02, 0.045), g))
    p["r_ds"] *= np.exp(rng.normal(0, 0.06, g))
    p["r_sa"] *= np.exp(rng.normal(0, 0.04, g)) * np.exp(rng.normal(0, 0.025, f.n))[f.node_of]
    p["r_hs"] *= np.exp(rng.normal(0, 0.07, g))
    p["fcap"] = p["fmax"].copy()
    f.p = p


def upstream(f: Fleet) -> np.ndarray:
    """Index of the GPU whose heat reaches this one first (itself when none): air goes over slots 0-3, then 4-7 (two
    rows of a baseboard); cold plates are in series by pairs 0-1, 2-3, ..."""
    up = np.arange(f.g)
    for n in range(f.n):
        b, a = f.boards[n], f.first[n]
        for s in range(b.gpus):
            if b.liquid and s % 2:
                up[a + s] = a + s - 1
            elif not b.liquid and s >= b.gpus // 2:
                up[a + s] = a + s - b.gpus // 2
    return up


def steady(f: Fleet, i: int, act: tuple[float, float, float, float], t_in: float = 27.0, rel: float | None = None):
    """Steady clock (share of the top clock), watts and die temperature of GPU i under a load, by plain iteration."""
    p = {k: float(v[i]) for k, v in f.p.items()}
    ten, sm, dram, nvl = act
    up = p["tdp"] / p["preheat"] * 0.6
    td, r = 65.0, 1.0 if rel is None else rel
    for _ in range(60):
        die, mem, total = power_parts(p, r, ten, sm, dram, nvl, td)
        td = 0.5 * td + 0.5 * (t_in + up * 0.5 + die * p["r_ds"] + (die + mem) * p["r_sa"])
        if rel is None:
            r = float(np.clip(r * (p["tdp"] / total) ** 0.3, 0.2, 1.0))
    return r, float(total), float(die), float(td)

"""Boards, sites and the healthy spread between units: all that is fixed before the clock starts.

Figures are from memory of data sheets and of `nvidia-smi -q`, where no other source is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Small = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rng = np.random.Generator


@dataclass(frozen=True)
class Board:
    """One model of GPU. `r_air`, `r_liquid`: K/W from die to air or coolant (None: not sold so)."""

    sku: str
    model: str
    tdp_w: float
    clock_mhz: float
    memory_mhz: float
    memory_gb: float
    slow_c: float  # software slowdown begins
    hard_c: float  # hardware slowdown halves the clock
    memory_max_c: float
    hbm: bool
    r_air: float | None
    r_liquid: float | None
    links: int  # NVLinks
    slots: Sequence[int] = (8,)


# R: (die at full load - inlet) / power, e.g. H100 SXM by air: (72 - 30 - 4) / 700 = 0.054; by cold plate half of that.
BOARDS = (
    Board("v100-sxm2", "Tesla V100-SXM2-32GB", 300, 1530, 877, 32, 83, 90, 85, True, 0.105, 0.06, 6, (4, 8)),
    Board("a100-sxm4-40", "NVIDIA A100-SXM4-40GB", 400, 1410, 1215, 40, 85, 92, 95, True, 0.075, 0.045, 12, (4, 8)),
    Board("a100-sxm4-80", "NVIDIA A100-SXM4-80GB", 400, 1410, 1593, 80, 85, 92, 95, True, 0.075, 0.045, 12, (4, 8)),
    Board("a100-pcie", "NVIDIA A100 80GB PCIe", 300, 1410, 1512, 80, 85, 92, 95, True, 0.115, None, 0, (4, 8)),
    Board("h100-sxm5", "NVIDIA H100 80GB HBM3", 700, 1980, 2619, 80, 87, 94, 95, True, 0.053, 0.032, 18, (8,)),
    Board("h100-pcie", "NVIDIA H100 PCIe", 350, 1755, 1593, 80, 87, 94, 95, True, 0.098, None, 0, (4, 8)),
    Board("h200-sxm5", "NVIDIA H200", 700, 1980, 3201, 141, 87, 94, 95, True, 0.053, 0.032, 18, (8,)),
    Board("b200-sxm", "NVIDIA B200", 1000, 1965, 3996, 180, 88, 95, 105, True, 0.040, 0.024, 18, (8,)),
    Board("gb200", "NVIDIA GB200", 1200, 2062, 3996, 186, 88, 95, 105, True, None, 0.022, 18, (4,)),
    Board("l40s", "NVIDIA L40S", 350, 2520, 9001, 48, 88, 96, 105, False, 0.115, None, 0, (4, 8)),
)


@dataclass
class Site:
    """A fleet as built: where things stand, how the room and the fans behave, what is measured."""

    nodes: int
    slots: int
    steps: int
    dt: float
    sub: int  # physics steps to a row
    interval: float
    t0_ms: int
    names: list[str] = field(default_factory=list)
    racks: list[str] = field(default_factory=list)
    rack_of: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    boards: list[Board] = field(default_factory=list)  # by node
    pools: list[str] = field(default_factory=list)
    liquid: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    fans: int = 8
    fan_law: str = "pi"
    fan_target_c: float = 70.0
    fan_fixed: float = 0.6
    fan_max_rpm: float = 12000.0
    columns: set[str] = field(default_factory=set)
    has_node: bool = True
    has_link: bool = False
    lists_jobs: bool = True
    no_inlet: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    no_fan: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    mig: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    idle_context: float = 1.5  # power of a board with an idle context over one with none
    context_clock: float = 1.0  # its clock over the maximum

    @property
    def rows(self) -> int:
        """Ticks that give rows."""
        return self.steps // self.sub

    @property
    def seconds(self) -> float:
        """Length of the case."""
        return self.steps * self.dt

    def step(self, at_s: float) -> int:
        """Index of the physics step at a time."""
        return int(min(max(at_s / self.dt, 0), self.steps))

    def row(self, at_s: float) -> int:
        """Index of the first row at or after a time."""
        return int(min(max(np.ceil(at_s / self.interval) - 1, 0), self.rows))

    def ms(self, at_s: float) -> float:
        """Time of the case in milliseconds UTC."""
        return self.t0_ms + at_s * 1000


@dataclass
class Units:
    """What differs between healthy boards; arrays are (nodes, slots) if not said otherwise."""

    tdp: Array
    limit: Array
    clock: Array
    c_dyn: Array
    p_idle: Array
    p_memory: Array
    leak: Array
    leak_c: float
    r_die: Array
    r_sink: Array
    tau_die: float
    tau_sink: Array
    flow_power: Array  # exponent of R over flow
    r_hbm: Array
    slow: Array
    hard: Array
    memory_max: Array
    offset: Array
    offset_hbm: Array
    speed: Array
    upstream: Array  # (slots, slots): K per W of j in the air of i, at flow 1
    preheat: Array  # (nodes,)
    fan_share: Array  # (slots, fans)
    fan_unit: Array  # (nodes, fans)


def build_site(rng: Rng, nodes: int | None, hours: float | None, interval_s: float | None) -> Site:
    """Draw a fleet. Most are 30 to 200 GPUs and 3 to 6 hours."""
    interval = float(interval_s) if interval_s else float(rng.choice([1, 2, 5, 10, 10, 10, 15, 30, 30, 60]))
    long = float(hours) if hours else float(rng.uniform(3, 6 if interval >= 5 else 3.6))
    slots = int(rng.choice([8, 8, 8, 4]))
    most = 200 if interval >= 5 else 64
    count = int(nodes) if nodes else max(4, int(rng.integers(36, most + 1)) // slots)
    sub = max(1, int(np.ceil(interval / 5)))
    rows = max(60, int(long * 3600 / interval))
    start = 1_767_225_600_000 + int(rng.integers(0, 300 * 86400)) * 1000
    site = Site(count, slots, rows * sub, interval / sub, sub, interval, start)
    _place(rng, site)
    _cool(rng, site)
    _instrument(rng, site)
    return site


def _place(rng: Rng, site: Site) -> None:
    per_rack = int(rng.choice([2, 3, 4, 4, 6]))
    site.rack_of = np.arange(site.nodes) // per_rack
    style = str(rng.choice(["gpu{:03d}", "dgx-{:02d}", "c1r{rack}n{slot}", "node-{:04d}"]))
    base = int(rng.integers(1, 60))
    for n in range(site.nodes):
        rack, slot = int(site.rack_of[n]) + base, n % per_rack + 1
        site.names.append(style.format(base + n, rack=rack, slot=slot))
        site.racks.append(f"R{rack:02d}")
    fits = [board for board in BOARDS if site.slots in board.slots]
    picks = [fits[int(rng.integers(len(fits)))] for _ in range(2 if rng.random() < 0.35 and site.nodes >= 8 else 1)]
    cut = int(site.nodes * rng.uniform(0.3, 0.7)) // per_rack * per_rack
    site.boards = [picks[0] if n < cut else picks[-1] for n in range(site.nodes)]
    site.pools = [f"{board.sku}-{'ab'[int(len(picks) > 1 and n >= cut)]}" for n, board in enumerate(site.boards)]
    wet = {
        p: board.r_air is None or (board.r_liquid is not None and rng.random() < 0.3) for p, board in enumerate(picks)
    }
    site.liquid = np.array([wet[0] if n < cut else wet[len(picks) - 1] for n in range(site.nodes)])


def _cool(rng: Rng, site: Site) -> None:
    site.fans = int(rng.choice([6, 8, 8, 10, 12]))
    site.fan_law = str(rng.choice(["pi", "pi", "pi", "steps", "steps", "fixed"]))
    site.fan_target_c = float(rng.uniform(62, 74))
    site.fan_fixed = float(rng.uniform(0.65, 0.9))
    site.fan_max_rpm = float(rng.choice([9000, 11000, 13500, 16000, 22000]))
    site.idle_context = float(rng.uniform(1.05, 1.8))  # H100 at 70 W idle, 110 to 120 W with a context (memory)
    site.context_clock = float(rng.choice([1.0, 1.0, 0.18]))


def _instrument(rng: Rng, site: Site) -> None:
    groups = {
        "memory_temp_c": 0.8, "clock_event_reasons": 0.75, "throttle": 0.6, "energy_j": 0.6, "thermal_margin_c": 0.4,
        "power_limit_w": 0.7, "prof": 0.6, "framebuffer": 0.85, "ecc": 0.75, "pcie": 0.6, "compute_processes": 0.65,
        "memory_clock_mhz": 0.5, "memory_util_ratio": 0.6, "gpu_util_ratio": 0.9, "nvlink": 0.3, "inlet": 0.7,
        "fan": 0.6, "fans_failed": 0.4, "host": 0.7, "clock": 0.75, "inventory_memory_max": 0.5, "power_round": 0.3,
        "temp_fine": 0.08,
    }  # fmt: skip
    site.columns = {name for name, share in groups.items() if rng.random() < share}
    if not site.columns & {"gpu_util_ratio", "prof"}:
        site.columns.add("gpu_util_ratio")
    site.has_node = bool(rng.random() < 0.88)
    site.has_link = bool(rng.random() < 0.45)
    site.lists_jobs = bool(rng.random() < 0.75)
    if not site.columns & {"framebuffer", "compute_processes"}:
        site.lists_jobs = True  # else nothing says that an idle GPU is held
    site.no_inlet = (rng.random(site.nodes) < 0.08) | ("inlet" not in site.columns) | (not site.has_node)
    site.no_fan = (rng.random(site.nodes) < 0.08) | ("fan" not in site.columns) | site.liquid | (not site.has_node)
    modern = np.array([not board.sku.startswith(("v100", "l40s")) for board in site.boards])
    site.mig = (rng.random(site.nodes) < 0.04) & modern


def _by_node(site: Site, get: str) -> Array:
    return np.repeat(np.array([float(getattr(b, get)) for b in site.boards])[:, None], site.slots, axis=1)


def build_units(rng: Rng, site: Site) -> Units:
    """Draw the healthy spread. R differs by 10 to 20 % from best to worst; C by some %, as of SC'22 (variability)."""
    shape = (site.nodes, site.slots)
    tdp = _by_node(site, "tdp_w")
    wet = np.repeat(site.liquid[:, None], site.slots, axis=1)
    r_total = np.array(
        [float((b.r_liquid if w else b.r_air) or 0.1) for b, w in zip(site.boards, site.liquid, strict=True)]
    )
    spread = rng.uniform(0.03, 0.055)
    r = r_total[:, None] * np.exp(np.clip(rng.normal(0, spread, shape), -2.2 * spread, 2.2 * spread))
    r *= np.exp(rng.normal(0, rng.uniform(0, 0.04), site.slots))[None, :]  # slots hotter by design
    die = np.where(wet, rng.uniform(0.5, 0.65), rng.uniform(0.35, 0.5))
    altitude = np.exp(rng.choice([0, 0, 0, 500, 1600, 2200]) / 8400)  # thinner air: R up by density^-0.8
    slow = _by_node(site, "slow_c")
    return Units(
        tdp=tdp, limit=tdp.copy(), clock=_by_node(site, "clock_mhz"),
        c_dyn=tdp * rng.uniform(0.9, 1.05) * np.exp(rng.normal(0, 0.035, shape)),
        p_idle=tdp * rng.uniform(0.05, 0.08) * np.exp(rng.normal(0, 0.06, shape)),
        p_memory=tdp * rng.uniform(0.1, 0.15) * np.exp(rng.normal(0, 0.03, shape)),
        leak=tdp * rng.uniform(0.04, 0.08) * np.exp(rng.normal(0, 0.2, shape)), leak_c=float(rng.uniform(30, 55)),
        r_die=r * die, r_sink=r * (1 - die) * np.where(wet, 1.0, altitude**0.8),
        tau_die=float(rng.uniform(2, 8)),
        tau_sink=np.where(wet, rng.uniform(8, 25), rng.uniform(25, 130)) * np.exp(rng.normal(0, 0.05, shape)),
        flow_power=np.where(wet, 0.45, rng.uniform(0.6, 0.85)),
        r_hbm=rng.uniform(0.08, 0.18) * 85 / (tdp * 0.125) * np.exp(rng.normal(0, 0.12, shape)),
        slow=slow, hard=_by_node(site, "hard_c"), memory_max=_by_node(site, "memory_max_c"),
        offset=np.clip(rng.normal(0, rng.uniform(0.3, 1.4), shape), -3, 3),
        offset_hbm=np.clip(rng.normal(0, 1.2, shape), -3, 3),
        speed=np.exp(rng.normal(0, rng.uniform(0.002, 0.008), shape)),
        upstream=_airflow(rng, site), preheat=np.where(site.liquid, 0.5, rng.uniform(1, 6))
        + rng.normal(0, 0.4, site.nodes),
        fan_share=_fan_zones(rng, site), fan_unit=1 + rng.normal(0, 0.015, (site.nodes, site.fans)),
    )  # fmt: skip


def _airflow(rng: Rng, site: Site) -> Array:
    """Boards behind others: 0.06 m3/s of air a channel carries 70 W/K, so 700 W in front add 10 K; water: 100."""
    up = np.zeros((site.slots, site.slots))
    layout = str(rng.choice(["two_rows", "abreast", "pairs"]))
    if layout == "two_rows":
        for i in range(site.slots // 2):
            up[i, i + site.slots // 2] = 1.0
    elif layout == "pairs":
        for i in range(0, site.slots, 2):
            up[i, i + 1] = 1.0
    for i in range(site.slots - 1):  # a little leaks between neighbours
        up[i, i + 1] += 0.06
        up[i + 1, i] += 0.06
    return up * rng.uniform(0.6, 1.1) / 75 * 0.6


def _fan_zones(rng: Rng, site: Site) -> Array:
    """Share of each fan in the air of each slot: a wall mixes, so a stopped fan is felt mostly by those near it."""
    half = max(1, site.slots // 2)
    where = (np.arange(site.slots) % half + 0.5) / half
    fans = (np.arange(site.fans) + 0.5) / site.fans
    share = np.exp(-0.5 * ((where[:, None] - fans[None, :]) / rng.uniform(0.12, 0.4)) ** 2)
    return np.asarray(share / share.sum(axis=1, keepdims=True))

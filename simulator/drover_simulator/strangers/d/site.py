"""The site that a seed draws: boards, cooling, network, what is measured, and how badly.

Figures of boards are NVIDIA's data sheets; thermal resistances follow from them (a GPU at its limit sits some 15-25
degrees under its slowdown). Sites differ as published fleets do: bare columns at one, everything at another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Board:
    name: str
    idle_w: float
    tdp_w: float
    clock: float  # MHz, highest SM clock
    idle_clock: float
    mem_clock: float
    memory_gib: float
    hbm: bool
    links: int  # NVLinks; 0: none
    link_gbs: float  # GB/s a direction, all links
    pcie: int
    lanes: int
    nic_gbps: float
    nics: int  # of a node; 0: the front network alone
    gpus: int
    t_slow: float  # software slowdown
    margin: bool  # T.Limit is reported
    blackwell: bool


BOARDS = {
    b.name: b
    for b in (
        Board("A100-PCIE-40GB", 38, 250, 1410, 210, 1215, 40, True, 0, 0, 4, 16, 100, 2, 8, 88, False, False),
        Board("A100-PCIE-80GB", 45, 300, 1410, 210, 1512, 80, True, 0, 0, 4, 16, 200, 2, 4, 88, False, False),
        Board("A100-SXM4-80GB", 58, 400, 1410, 210, 1593, 80, True, 12, 300, 4, 16, 200, 8, 8, 87, False, False),
        Board("H100-SXM5-80GB", 72, 700, 1980, 345, 2619, 80, True, 18, 450, 5, 16, 400, 8, 8, 87, True, False),
        Board("H200-SXM5-141GB", 78, 700, 1980, 345, 3201, 141, True, 18, 450, 5, 16, 400, 8, 8, 87, True, False),
        Board("B200-SXM-180GB", 140, 1000, 1965, 120, 3996, 180, True, 18, 900, 5, 16, 400, 8, 8, 88, True, True),
        Board("GB200-186GB", 165, 1200, 2062, 120, 3996, 186, True, 18, 900, 5, 16, 400, 4, 4, 88, True, True),
        Board("GB300-279GB", 175, 1400, 2032, 120, 3996, 279, True, 18, 900, 6, 16, 800, 4, 4, 88, True, True),
        Board("L40S-48GB", 34, 350, 2520, 210, 9001, 45, False, 0, 0, 4, 16, 200, 2, 8, 89, True, False),
        Board("T4-16GB", 10, 70, 1590, 300, 5001, 15, False, 0, 0, 3, 16, 25, 0, 4, 88, False, False),
    )
}
SHARE = {
    "A100-PCIE-40GB": 0.05, "A100-PCIE-80GB": 0.07, "A100-SXM4-80GB": 0.2, "H100-SXM5-80GB": 0.27,
    "H200-SXM5-141GB": 0.12, "B200-SXM-180GB": 0.08, "GB200-186GB": 0.07, "GB300-279GB": 0.03, "L40S-48GB": 0.07,
    "T4-16GB": 0.04,
}  # fmt: skip


@dataclass
class Site:
    rng: np.random.Generator
    hours: float
    dt: float  # s
    t0_ms: int
    boards: list[Board]  # of each node
    names: list[str]
    racks: list[str]
    leaves: list[str]
    pools: list[str]
    liquid: bool
    fabric: str  # "ib", "roce" or "none"
    drop: dict[str, set[str]] = field(default_factory=dict)  # scope -> columns that this site lacks
    round_temp: float = 1.0
    noise: float = 1.0
    jobs_listed: str = "all"  # "all", "some", "none"
    labels_known: bool = True
    inventories: bool = True
    workloads: bool = True
    inlet: bool = True
    gaps: float = 0.0
    shuffle: float = 0.0
    doubled: float = 0.0
    jitter_s: float = 0.0
    room_c: float = 23.0
    design_c: float = 66.0  # a GPU at its limit, all in order
    drift_c: float = 1.0
    room_phase: float = 0.0
    ports: list[tuple[int, str, int, str]] = field(default_factory=list)  # node, name, its first GPU's slot, leaf
    ports_listed: bool = True
    rows_shifted: bool = True  # rows carry the node's own clock

    def __post_init__(self) -> None:
        self.n = len(self.boards)
        self.node_of = np.repeat(np.arange(self.n), [b.gpus for b in self.boards])
        self.slot_of = np.concatenate([np.arange(b.gpus) for b in self.boards])
        self.first = np.concatenate([[0], np.cumsum([b.gpus for b in self.boards])])
        self.g = len(self.node_of)
        self.steps = max(int(round(self.hours * 3600 / self.dt)), 10)
        self.span = self.steps * self.dt

    def board(self, gpu: int) -> Board:
        return self.boards[int(self.node_of[gpu])]

    def of_board(self, name: str) -> np.ndarray:
        """An attribute of each GPU's board."""
        return np.array([float(getattr(b, name)) for b in self.boards])[self.node_of]

    def gpus_of(self, node: int) -> np.ndarray:
        return np.arange(self.first[node], self.first[node + 1])

    def port_of(self, gpu: int) -> int | None:
        """The port that serves a GPU."""
        node, slot = int(self.node_of[gpu]), int(self.slot_of[gpu])
        mine = [k for k, p in enumerate(self.ports) if p[0] == node and p[2] >= 0]
        return mine[slot * len(mine) // self.boards[node].gpus] if mine else None

    def bus(self, gpu: int) -> str:
        four = ("0008:01:00", "0009:01:00", "0018:01:00", "0019:01:00")
        eight = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
        slot = int(self.slot_of[gpu])
        return four[slot] if self.board(gpu).name.startswith("GB") else f"0000:{eight[slot % 8]}:00"


def draw_site(rng: np.random.Generator, nodes: int | None, hours: float | None, interval_s: float | None) -> Site:
    """Draw a site; `nodes`, `hours` and `interval_s` as given."""
    names = list(SHARE)
    share = np.array(list(SHARE.values()))
    main = BOARDS[str(rng.choice(names, p=share / share.sum()))]
    if nodes is None:
        small, large = rng.random(), rng.random()
        nodes = (
            int(rng.integers(1, 6))
            if small < 0.1
            else int(rng.integers(25, 41))
            if large < 0.12
            else int(rng.integers(6, 25))
        )
    if hours is None:
        hours = float(np.round(rng.uniform(4, 12), 1))
    if interval_s is None:
        interval_s = float(rng.choice([1, 5, 10, 15, 30, 60], p=[0.06, 0.14, 0.4, 0.15, 0.17, 0.08]))
        while nodes * main.gpus * hours * 3600 / interval_s > 500_000 and interval_s < 60:
            interval_s = {1: 5, 5: 10, 10: 15, 15: 30, 30: 60}[int(interval_s)]
    boards = [main] * nodes
    if nodes >= 6 and rng.random() < 0.2:
        other = BOARDS[str(rng.choice([n for n in names if n != main.name and not n.startswith("GB")]))]
        for k in range(nodes - int(rng.integers(1, max(2, nodes // 3))), nodes):
            boards[k] = other
    liquid = main.name.startswith("GB") or (main.tdp_w >= 700 and rng.random() < 0.3)
    fabric = str(rng.choice(["ib", "roce", "none"], p=[0.5, 0.3, 0.2])) if main.nics else "none"
    rack_size = int(rng.choice([2, 4, 4, 6, 8])) if not main.name.startswith("GB") else 9
    style = int(rng.integers(0, 4))
    prefix = str(rng.choice(["gpu", "hgx", "node", "dgx", "ip-10-3"]))
    made = []
    for k in range(nodes):
        made.append(
            (
                f"{prefix}-{k:03d}",
                f"r{k // rack_size + 1:02d}-{prefix}{k % rack_size + 1:02d}",
                f"{prefix}{k + 1}",
                f"{prefix}-{k + 17:02d}.cluster",
            )[style]
        )
    known = rng.random() > 0.25
    racks = [f"rack{k // rack_size + 1:02d}" for k in range(nodes)]
    per_leaf = int(rng.choice([4, 8, 16]))
    leaves = [f"leaf{k // per_leaf + 1:02d}" for k in range(nodes)]
    pools = ["train"] * nodes
    for k in range(nodes):
        if boards[k] is not main or (k >= 0.8 * nodes and nodes >= 6):
            pools[k] = "serve"
    t0 = int(
        (
            1_767_225_600
            + int(rng.integers(0, 300)) * 86400
            + int(rng.integers(0, 24)) * 3600
            + int(rng.integers(0, 3600))
        )
        * 1000
    )
    t0 -= t0 % int(max(interval_s, 1) * 1000)
    site = Site(rng, hours, float(interval_s), t0, boards, made, racks, leaves, pools, liquid, fabric)
    site.labels_known = known
    site.round_temp = float(rng.choice([1.0, 1.0, 1.0, 0.1]))
    site.noise = float(rng.uniform(0.7, 1.5))
    site.jobs_listed = str(rng.choice(["all", "some", "none"], p=[0.55, 0.2, 0.25]))
    site.inventories, site.workloads = rng.random() < 0.7, rng.random() < 0.4
    site.gaps = float(rng.choice([0, 0.0005, 0.003]))
    site.shuffle, site.doubled = float(rng.choice([0, 0, 0.003])), float(rng.choice([0, 0, 0.002]))
    site.jitter_s = float(rng.choice([0, 0.02, 0.3])) * min(1.0, interval_s / 5)
    site.room_c = float(rng.uniform(18, 27)) if not liquid else float(rng.uniform(25, 40))
    site.design_c = float(rng.uniform(62, 74)) if not site.liquid else float(rng.uniform(50, 62))
    site.drift_c, site.room_phase = float(rng.uniform(0.2, 2.5)), float(rng.uniform(0, 2 * np.pi))
    site.ports_listed, site.rows_shifted = rng.random() < 0.6, rng.random() < 0.5
    _draw_columns(site)
    _draw_ports(site, per_leaf)
    return site


def _draw_columns(site: Site) -> None:
    rng, main = site.rng, site.boards[0]
    gpu: set[str] = set()
    node: set[str] = set()
    link: set[str] = set()
    if rng.random() < 0.28:  # no GPM and no profiling module: plain NVML
        gpu |= {"sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio"}
        gpu |= {
            "fp64_active_ratio",
            "fp32_active_ratio",
            "fp16_active_ratio",
            "nvlink_tx_bytes_per_s",
            "nvlink_rx_bytes_per_s",
        }
    elif rng.random() < 0.4:
        gpu |= {"fp64_active_ratio", "fp32_active_ratio", "fp16_active_ratio"}
    if rng.random() < 0.2:
        gpu |= {"pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"}
    if not main.hbm or rng.random() < 0.2:
        gpu.add("memory_temp_c")
    if not main.margin or rng.random() < 0.2:
        gpu.add("thermal_margin_c")
    if not main.links:
        gpu |= {
            "nvlink_active_links",
            "nvlink_crc_errors",
            "nvlink_replays",
            "nvlink_recoveries",
            "nvlink_tx_bytes_per_s",
            "nvlink_rx_bytes_per_s",
            "fabric_state",
        }
    if not main.blackwell:
        gpu.add("nvlink_effective_ber")
    if rng.random() < 0.35:
        gpu |= {"recovery_action", "sram_threshold_exceeded", "fabric_state"}
    for name, odds in (("throttle_sync_us", 0.5), ("throttle_brake_us", 0.4), ("throttle_thermal_hw_us", 0.3), ("compute_processes", 0.25), ("energy_j", 0.2), ("clock_event_reasons", 0.12), ("memory_clock_mhz", 0.1), ("remap_banks_max", 0.4)):  # fmt: skip
        if rng.random() < odds:
            gpu.add(name)
    if "remap_banks_max" in gpu:
        gpu.add("remap_banks_none")
    if not main.hbm:
        gpu |= {"remap_banks_max", "remap_banks_none"}
    if main.name.startswith("T4"):  # pages are retired there; rows are not remapped
        gpu |= {"remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failed"}
    site.inlet = rng.random() < 0.65
    if not site.inlet:
        node.add("inlet_temp_c")
    if site.liquid or rng.random() < 0.5:
        node |= {"fan_min_rpm", "fans_failed"}
    if rng.random() < 0.3:
        node |= {"pcie_aer_correctable", "pcie_aer_fatal", "edac_corrected", "edac_uncorrected"}
    if rng.random() < 0.3:
        node |= {"agent_tick_s", "agent_slowest_read_s", "source_nvml_read_s", "source_nvml_outcome", "agent_sources_failing", "agent_sources_hung", "agent_read_failures", "agent_missed_ticks"}  # fmt: skip
    if site.fabric == "roce":
        link |= {"symbol_errors", "link_error_recoveries", "tx_wait", "local_integrity_errors", "buffer_overruns"}
    else:
        link |= {"cnp_sent", "cnp_handled"}
    if rng.random() < 0.2:
        link |= {"out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts"}
    site.drop = {"gpu": gpu, "node": node, "link": link}


def _draw_ports(site: Site, per_leaf: int) -> None:
    if site.fabric == "none":
        return
    rail = site.rng.random() < 0.4
    storage = site.rng.random() < 0.4
    for node, board in enumerate(site.boards):
        count = board.nics or 1
        for k in range(count):
            leaf = (
                f"rail{k + 1:02d}-{node // (per_leaf * 2) + 1}" if rail and count == board.gpus else site.leaves[node]
            )
            site.ports.append((node, f"mlx5_{k}", k * board.gpus // count, leaf))
        if storage:
            site.ports.append((node, f"mlx5_{count}", -1, f"store{node // per_leaf + 1:02d}"))

"""Boards, nodes and instruments of a fleet of "stranger c": a mixed cloud with bad instruments."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Board:
    """A kind of GPU. Numbers: vendor data sheets; idle power, thresholds and temperatures as operators publish them."""

    name: str
    sku: str
    gpus: int  # in a node
    tdp: float  # W
    idle: float  # W, no context, at 35 degC
    ctx: float  # W more when a context holds the clocks up
    fmax: float  # MHz
    fidle: float
    fmem: float
    mem_gib: float
    resistance: float  # K/W from supply air or coolant at the node to the die, at full fans or nominal flow
    liquid: bool
    slow_c: float  # software slowdown
    hot_c: float  # hardware slowdown
    links: int  # NVLinks
    nv_gbs: float  # GB/s, one way, all links
    gen: int
    width: int
    hbm_tbs: float
    nics: int
    nic_gbps: float
    per_rack: int
    blackwell: bool = False
    hbm: bool = True
    vbios: str = ""
    clock_step: float = 15.0


BOARDS = {
    "a100": Board(
        "NVIDIA A100-SXM4-80GB",
        "HGX A100",
        8,
        400,
        56,
        22,
        1410,
        210,
        1593,
        80,
        0.088,
        False,
        86,
        92,
        12,
        300,
        4,
        16,
        2.04,
        8,
        200,
        4,
        vbios="92.00.81.00.0",
    ),
    "h100": Board(
        "NVIDIA H100 80GB HBM3",
        "HGX H100",
        8,
        700,
        70,
        45,
        1980,
        345,
        2619,
        80,
        0.054,
        False,
        85,
        90,
        18,
        450,
        5,
        16,
        3.35,
        8,
        400,
        4,
        vbios="96.00.89.00.0",
    ),
    "h200": Board(
        "NVIDIA H200",
        "HGX H200",
        8,
        700,
        76,
        45,
        1980,
        345,
        3201,
        141,
        0.053,
        False,
        85,
        90,
        18,
        450,
        5,
        16,
        4.8,
        8,
        400,
        4,
        vbios="96.00.A5.00.0",
    ),
    "gb200": Board(
        "NVIDIA GB200",
        "GB200 NVL72",
        4,
        1200,
        150,
        60,
        2062,
        345,
        3996,
        186,
        0.0195,
        True,
        86,
        92,
        18,
        900,
        6,
        1,
        8.0,
        4,
        400,
        18,
        True,
        vbios="97.00.88.00.0",
    ),
    "gb300": Board(
        "NVIDIA GB300",
        "GB300 NVL72",
        4,
        1400,
        165,
        65,
        2032,
        345,
        3996,
        279,
        0.0180,
        True,
        86,
        92,
        18,
        900,
        6,
        1,
        8.0,
        4,
        800,
        18,
        True,
        vbios="97.10.4A.00.0",
    ),
    "l4": Board(
        "NVIDIA L4",
        "L4 x8 PCIe",
        8,
        72,
        13,
        14,
        2040,
        210,
        6251,
        23,
        0.55,
        False,
        84,
        92,
        0,
        0,
        4,
        16,
        0.30,
        1,
        100,
        6,
        hbm=False,
        vbios="95.04.65.00.0",
    ),
}

# gpu columns in groups: a site has a group or not, a pool of a site can lack one more
GROUPS = {
    "base": ["sm_clock_mhz", "power_w", "gpu_temp_c", "gpu_util_ratio", "framebuffer_used_bytes"],
    "clocks": ["memory_clock_mhz", "clock_event_reasons"],
    "throttle": [
        "throttle_power_us",
        "throttle_thermal_sw_us",
        "throttle_thermal_hw_us",
        "throttle_brake_us",
        "throttle_sync_us",
    ],
    "limit": ["power_limit_w"],
    "energy": ["energy_j"],
    "mtemp": ["memory_temp_c"],
    "margin": ["thermal_margin_c"],
    "mutil": ["memory_util_ratio"],
    "fbtotal": ["framebuffer_total_bytes"],
    "prof": ["sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"],
    "prof_more": ["sm_occupancy_ratio", "fp64_active_ratio", "fp32_active_ratio", "fp16_active_ratio"],
    "traffic": ["pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"],
    "nvtraffic": ["nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"],
    "pcie": ["pcie_generation", "pcie_width", "pcie_replays"],
    "nvlink": ["nvlink_active_links", "nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries"],
    "ber": ["nvlink_effective_ber"],
    "ecc": ["ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected"],
    "sram": ["sram_threshold_exceeded"],
    "remap": ["remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failed"],
    "banks": ["remap_banks_max", "remap_banks_none"],
    "action": ["recovery_action"],
    "fabric": ["fabric_state"],
    "procs": ["compute_processes"],
}
# how often a site has a group: DCGM default field lists have ECC, remaps, PCIe replays; profiling only where licensed or
# where no one else profiles; recovery_action and banks only with new agents
P_GROUP = {
    "base": 1,
    "clocks": 0.85,
    "throttle": 0.65,
    "limit": 0.7,
    "energy": 0.75,
    "mtemp": 0.85,
    "margin": 0.4,
    "mutil": 0.7,
    "fbtotal": 0.7,
    "prof": 0.5,
    "prof_more": 0.5,
    "traffic": 0.5,
    "nvtraffic": 0.5,
    "pcie": 0.8,
    "nvlink": 0.7,
    "ber": 0.6,
    "ecc": 0.88,
    "sram": 0.45,
    "remap": 0.85,
    "banks": 0.4,
    "action": 0.4,
    "fabric": 0.5,
    "procs": 0.5,
}

NODE_GROUPS = {
    "cpu": ["cpu_util_ratio", "load1", "memory_available_bytes", "memory_total_bytes"],
    "disk": ["disk_read_bytes_per_s", "disk_write_bytes_per_s", "root_used_ratio"],
    "net": ["net_rx_bytes_per_s", "net_tx_bytes_per_s"],
    "inlet": ["inlet_temp_c"],
    "offset": ["clock_offset_s"],
    "aer": ["pcie_aer_correctable", "pcie_aer_fatal"],
    "edac": ["edac_corrected", "edac_uncorrected", "oom_kills"],
    "agent": [
        "agent_cpu_ratio",
        "agent_rss_bytes",
        "spool_bytes",
        "agent_tick_s",
        "agent_slowest_read_s",
        "agent_sources_failing",
        "agent_sources_hung",
        "agent_read_failures",
        "agent_missed_ticks",
    ],
    "sources": ["source_nvml_read_s", "source_nvml_outcome"],
    "fan": ["fan_min_rpm", "fans_failed"],
}
P_NODE = {
    "cpu": 0.95,
    "disk": 0.7,
    "net": 0.7,
    "inlet": 0.8,
    "offset": 0.6,
    "aer": 0.5,
    "edac": 0.6,
    "agent": 0.5,
    "sources": 0.4,
    "fan": 0.6,
}

LINK_IB = [
    "link_up",
    "rate_gbps",
    "rx_bytes",
    "tx_bytes",
    "symbol_errors",
    "link_downed",
    "link_error_recoveries",
    "rx_errors",
    "tx_discards",
    "tx_wait",
    "local_integrity_errors",
    "buffer_overruns",
]
LINK_HW = ["out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts", "cnp_sent", "cnp_handled"]
NOT_ETHERNET = {"symbol_errors", "link_error_recoveries", "tx_wait", "local_integrity_errors", "buffer_overruns"}


@dataclass
class Fleet:
    """Who is where, what each unit is like, and what the site can see."""

    nodes: list[dict]
    boards: list[Board]  # of nodes
    pool: np.ndarray  # of nodes, number
    rack: np.ndarray
    leaf: np.ndarray
    racks: list[str]
    leaves: list[str]
    first: np.ndarray  # first GPU of a node
    gnode: np.ndarray  # node of a GPU
    slot: np.ndarray
    lnode: np.ndarray  # node of a port
    lname: np.ndarray
    lgpu: np.ndarray  # GPU (number) that a port serves, -1
    glink: np.ndarray  # port of a GPU, -1
    roce: bool = False
    gpu_columns: list[str] = field(default_factory=list)
    node_columns: list[str] = field(default_factory=list)
    link_columns: list[str] = field(default_factory=list)
    lacks: dict[int, set[str]] = field(default_factory=dict)  # pool -> gpu columns absent
    inlet_dead: np.ndarray | None = None  # nodes without an inlet sensor
    has_node: bool = True
    has_link: bool = True
    tell_links: bool = False
    tell_jobs: bool = True
    tell_nic: bool = False
    power_average: bool = True
    tenths: bool = False
    node_every: int = 1
    interval: float = 10.0

    @property
    def G(self) -> int:
        return len(self.gnode)

    @property
    def N(self) -> int:
        return len(self.nodes)

    def name(self, n: int) -> str:
        return self.nodes[n]["name"]

    def sees(self, n: int, *columns: str) -> bool:
        """Whether the columns exist for node n (gpu, node and link columns have distinct names)."""
        for c in columns:
            if c in self.gpu_columns:
                if c in self.lacks[int(self.pool[n])]:
                    return False
            elif c in self.node_columns:
                if not self.has_node or (c == "inlet_temp_c" and self.inlet_dead[n]):
                    return False
            elif not (c in self.link_columns and self.has_link and not (self.roce and c in NOT_ETHERNET)):
                return False
        return True

    def gpus_of(self, n: int) -> np.ndarray:
        return np.arange(self.first[n], self.first[n] + self.boards[n].gpus)

    def member(self, g: int) -> list:
        return [self.name(int(self.gnode[g])), int(self.slot[g])]


def pick_pools(rng: np.random.Generator, nodes: int) -> list[tuple[str, int]]:
    """Draw pools and how many nodes each has: at least four, so that a pool has peers."""
    want = int(rng.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.3, 0.15]))
    want = max(1, min(want, nodes // 4))
    keys = list(rng.choice(list(BOARDS), size=want, replace=False, p=[0.2, 0.28, 0.18, 0.13, 0.07, 0.14]))
    share = rng.dirichlet(np.full(want, 3.0))
    count = np.maximum(4, np.round(share * nodes)).astype(int)
    while count.sum() > nodes:
        count[int(np.argmax(count))] -= 1
    count[int(np.argmax(count))] += nodes - count.sum()
    return [(str(k), int(c)) for k, c in zip(keys, count, strict=True)]


def build_fleet(rng: np.random.Generator, nodes: int, interval: float) -> Fleet:
    pools = pick_pools(rng, nodes)
    rows, boards, pool, rack, leaf, racks, leaves = [], [], [], [], [], [], []
    style = int(rng.integers(3))
    region = str(rng.choice(["fra1", "iad2", "sin3", "ord1"]))
    roce = bool(rng.random() < 0.4)
    number = int(rng.integers(1, 400))
    for p, (key, count) in enumerate(pools):
        b = BOARDS[key]
        per_rack = b.per_rack if b.liquid else int(rng.choice([2, 4, b.per_rack]))
        per_leaf = int(rng.choice([8, 12, 16]))
        for i in range(count):
            if i % per_rack == 0:
                racks.append(f"{region}-r{len(racks) + 1:02d}")
            if i % per_leaf == 0:
                leaves.append(f"{'leaf' if not roce else 'tor'}{len(leaves) + 1:02d}")
            name = [
                f"{key}-{number + len(rows):04d}",
                f"gpu{number + len(rows)}.{region}",
                f"ip-10-{p + 3}-{i // 200}-{i % 200 + 11}",
            ][style]
            rows.append(
                {
                    "name": name,
                    "rack": racks[-1],
                    "leaf": leaves[-1],
                    "pool": f"{key}-{'abcd'[p]}",
                    "sku": b.sku,
                    "gpus": b.gpus,
                }
            )
            boards.append(b)
            pool.append(p)
            rack.append(len(racks) - 1)
            leaf.append(len(leaves) - 1)
    size = np.array([b.gpus for b in boards])
    first = np.concatenate([[0], np.cumsum(size)[:-1]])
    gnode = np.repeat(np.arange(nodes), size)
    slot = np.concatenate([np.arange(s) for s in size])
    lnode, lname, lgpu = [], [], []
    glink = np.full(len(gnode), -1)
    for n, b in enumerate(boards):
        for k in range(b.nics):
            serves = first[n] + k if b.nics == b.gpus else -1
            if serves >= 0:
                glink[serves] = len(lnode)
            lnode.append(n)
            lname.append(f"mlx5_{k}")
            lgpu.append(serves)
    fleet = Fleet(
        rows,
        boards,
        np.array(pool),
        np.array(rack),
        np.array(leaf),
        racks,
        leaves,
        first,
        gnode,
        slot,
        np.array(lnode),
        np.array(lname, object),
        np.array(lgpu),
        glink,
        roce,
        interval=interval,
    )
    for n in range(nodes):  # a GPU without its own port uses the node's first
        own = fleet.gpus_of(n)
        if boards[n].nics != boards[n].gpus:
            glink[own] = int(np.flatnonzero(fleet.lnode == n)[0])
    instruments(rng, fleet, len(pools))
    if fleet.tell_links:
        for n, row in enumerate(rows):
            row["links"] = [
                {
                    "link": str(fleet.lname[x]),
                    "gpu": int(fleet.slot[fleet.lgpu[x]]) if fleet.lgpu[x] >= 0 else -1,
                    "leaf": row["leaf"],
                }
                for x in np.flatnonzero(fleet.lnode == n)
            ]
    return fleet


def instruments(rng: np.random.Generator, fleet: Fleet, pools: int) -> None:
    """What this site sees. A pool may lack a group that the site has (other image, other agent)."""
    have = {g for g, p in P_GROUP.items() if rng.random() < p}
    fleet.gpu_columns = [c for g, cs in GROUPS.items() if g in have for c in cs]
    for p in range(pools):
        b = fleet.boards[int(np.flatnonzero(fleet.pool == p)[0])]
        lacks: set[str] = set()
        for g in sorted(have - {"base"}):
            if rng.random() < 0.06:
                lacks |= set(GROUPS[g])
        if not b.hbm:
            lacks |= {*GROUPS["mtemp"], *GROUPS["remap"], *GROUPS["banks"], *GROUPS["margin"], *GROUPS["sram"]}
        if not b.links:
            lacks |= {*GROUPS["nvlink"], *GROUPS["nvtraffic"], *GROUPS["fabric"]}
        if not b.blackwell:
            lacks |= set(GROUPS["ber"])
        if b.name.startswith("NVIDIA A100"):
            lacks |= {*GROUPS["margin"], *GROUPS["sram"]}
        fleet.lacks[p] = lacks
    fleet.gpu_columns = [c for c in fleet.gpu_columns if not all(c in x for x in fleet.lacks.values())]
    fleet.node_columns = [c for g, cs in NODE_GROUPS.items() if rng.random() < P_NODE[g] for c in cs]
    fleet.has_node = bool(rng.random() < 0.88) and bool(fleet.node_columns)
    fleet.has_link = bool(rng.random() < 0.8)
    fleet.link_columns = list(LINK_IB) + (LINK_HW if fleet.roce or rng.random() < 0.6 else [])
    if fleet.roce:
        fleet.link_columns = [c for c in fleet.link_columns if c not in NOT_ETHERNET]
    fleet.inlet_dead = rng.random(fleet.N) < rng.choice([0, 0.05, 0.2])
    fleet.tell_links = bool(rng.random() < 0.25)
    fleet.tell_nic = bool(rng.random() < 0.4)
    fleet.tell_jobs = bool(rng.random() < 0.65)
    fleet.power_average = bool(rng.random() < 0.6)
    fleet.tenths = bool(rng.random() < 0.1)  # a site with an exporter that gives tenths of a degree
    # the host and port sources are often slower than the GPU's
    fleet.node_every = (
        1 if fleet.interval >= 10 or (fleet.interval >= 5 and rng.random() < 0.5) else int(np.ceil(10 / fleet.interval))
    )

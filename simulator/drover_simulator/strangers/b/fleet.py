"""The site: nodes, racks, leaves, boards, units with their spread; and jobs with the work of one step."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drover_simulator.strangers.b.boards import BOARDS, WEIGHTS, Board

Rng = np.random.Generator


@dataclass
class Job:
    """A job: kind, members (global GPU numbers), life in seconds, and the work of its step per member."""

    name: str
    kind: str  # dp, tp, pp, moe, service, notebook, batch, held
    gpus: np.ndarray
    start: float
    end: float
    work: dict[str, np.ndarray] = field(default_factory=dict)
    tp: np.ndarray | None = None  # group that waits for each other inside a step
    sync: np.ndarray | None = None  # group that waits for each other at the end of a step
    frac: float = 0.0  # memory share used
    listed: bool = True
    seed_rho: float = 0.6

    @property
    def waits(self) -> bool:
        """Whether its members wait for each other."""
        return self.kind in ("dp", "tp", "pp", "moe") and len(self.gpus) > 1


class Fleet:
    """All that does not change with time."""

    def __init__(self, rng: Rng, n: int | None, hours: float | None, dt: float | None, boards: str | None) -> None:
        """Draw a site."""
        self.rng = rng
        drawn_n, drawn_h = int(rng.choice([8, 12, 16, 24, 32, 48, 64, 96], p=[.15, .15, .2, .17, .15, .08, .06, .04])), round(rng.uniform(2, 6), 2)  # fmt: skip
        drawn_dt = float(rng.choice([1, 2, 5, 10, 15, 20, 30, 60], p=[0.05, 0.06, 0.21, 0.3, 0.17, 0.06, 0.09, 0.06]))
        self.n, self.dt, self.hours = n or drawn_n, dt or drawn_dt, hours or drawn_h
        if self.dt < 5:  # short intervals: smaller fleets, unless given
            self.n, self.hours = n or min(self.n, 12), hours or min(self.hours, 2.5)
        self.T = int(self.hours * 3600 / self.dt)
        self.span = self.T * self.dt
        self.t0_ms = int(1740787200000 + rng.integers(0, 500 * 86400) * 1000)
        names = list(WEIGHTS)
        p = np.array([WEIGHTS[x] for x in names], float)
        k = 1 if self.n < 12 else int(rng.choice([1, 2, 3], p=[0.45, 0.4, 0.15]))
        if boards:
            pick = [x for part in boards.split(",") for x in names if part.lower() in x.lower()][:4]
            pick = pick or [names[0]]
        else:
            pick = list(rng.choice(names, k, replace=False, p=p / p.sum()))
        cut = np.sort(rng.choice(np.arange(4, self.n - 3), len(pick) - 1, replace=False)) if len(pick) > 1 and self.n > 10 else np.array([], int)  # fmt: skip
        pool = np.searchsorted(cut, np.arange(self.n), side="right")
        self.pool = pool
        self.boards: list[Board] = [BOARDS[pick[i]] for i in pool]
        per = {b: int(rng.choice(BOARDS[b].per_node)) for b in pick}
        self.ng = np.array([per[b.name] for b in self.boards])
        self.g0 = np.concatenate([[0], np.cumsum(self.ng)])
        self.G = int(self.g0[-1])
        self.node = np.repeat(np.arange(self.n), self.ng)
        self.slot = np.arange(self.G) - self.g0[self.node]
        style = int(rng.integers(4))
        pre = str(rng.choice(["gpu", "node", "compute", "hgx", "n", "worker-"]))
        per_rack = int(rng.choice([2, 4, 4, 8]))
        self.rack = np.array([(i - int(np.argmax(pool == pool[i]))) // (18 if "GB" in self.boards[i].name else per_rack) + 100 * int(pool[i]) for i in range(self.n)])  # fmt: skip
        _, self.rack = np.unique(self.rack, return_inverse=True)
        self.names = [[f"{pre}{i:03d}", f"{pre}{self.rack[i]:02d}-{i:02d}", f"r{self.rack[i]}{pre}{i}", f"{pre}{i + 17}.dc{style}"][style] for i in range(self.n)]  # fmt: skip
        self.rail = bool(rng.random() < 0.4)  # one leaf per slot (rail), or per nodes
        self.ports_per_gpu = bool(rng.random() < 0.65)
        per_leaf = int(rng.choice([2, 4, 4, 8, 8, 16]))
        pod = np.arange(self.n) // per_leaf
        self.node_leaf = pod.copy()
        self.roce = bool(rng.random() < 0.45)
        self.port_node: list[int] = []
        self.port_gpu: list[int] = []
        self.port_name: list[str] = []
        leaf: list[str] = []
        self.gport = np.zeros(self.G, int)
        for i in range(self.n):
            one = not self.ports_per_gpu or self.ng[i] == 1 or not self.boards[i].hbm
            for s in range(1 if one else self.ng[i]):
                self.gport[self.g0[i] + s : self.g0[i + 1]] = len(self.port_node)
                self.port_node.append(i)
                self.port_gpu.append(-1 if one and self.ng[i] > 1 else s)
                self.port_name.append(f"mlx5_{s}" if not self.roce else f"eth{s}")
                leaf.append(f"leaf{pod[i]}" if not self.rail else f"leaf{pod[i] // 2}-{s}")
        self.leaf_names, self.port_leaf = np.unique(np.array(leaf), return_inverse=True)
        self.NP = len(self.port_node)
        self.port_bw = np.array([self.boards[i].nic_gbps * 1.25e8 for i in self.port_node])
        self.uplinks = int(rng.choice([2, 4, 4, 8]))
        self.oversub = float(rng.choice([1.0, 1.0, 1.5, 2.0]))
        f = lambda a: np.array([getattr(self.boards[i], a) for i in self.node], float)
        self.b = {a: f(a) for a in ("tdp", "idle", "fmax", "fidle", "mclk", "mclk_idle", "mem", "hbm_bw", "links", "nvl_bw", "gen", "pcie_bw", "t_sw", "t_hw", "tm_sw")}  # fmt: skip
        self.hbm = np.array([self.boards[i].hbm for i in self.node])
        liq = {b: bool(rng.random() < BOARDS[b].liquid) for b in pick}
        self.liquid = np.array([liq[self.boards[i].name] for i in self.node])
        r = np.where(self.liquid, f("r_liq"), f("r_air"))
        self.R = r * np.clip(rng.normal(1, 0.09, self.G), 0.8, 1.3)  # 11 % between units, part of it from the inlet
        self.cd = np.clip(rng.normal(1, 0.05, self.G), 0.86, 1.16)  # switched capacitance: 8 % in capped clocks
        self.unit = np.clip(rng.normal(1, 0.006, self.G), 0.97, 1.02)
        self.slot_heat = np.where(self.liquid, 0.0, (self.slot >= self.ng[self.node] / 2) * rng.uniform(2, 6))
        self.slot_heat += np.where(self.liquid, 0.5, 0.8) * rng.standard_normal(self.G)
        self.room = rng.uniform(19, 27)
        self.coolant = rng.uniform(22, 38)
        self.rack_off = rng.normal(0, 1.2, self.rack.max() + 1)
        self.crac = (rng.uniform(500, 1500), rng.uniform(0.1, 0.8), rng.uniform(0, 6.3))
        self.day = (rng.uniform(0.5, 2.0), rng.uniform(0, 6.3))
        prof = rng.random() < 0.6
        self.prof = np.array([prof and self.boards[i].prof for i in self.node])
        have: dict[str, bool] = {}
        for key, share in (("inlet", 0.5), ("node", 0.75), ("links", 0.5), ("link_file", 0.8), ("memtemp", 0.8), ("margin", 0.6),
                           ("occupancy", 0.7), ("fans", 0.5), ("remap", 0.85), ("nvlerr", 0.8), ("reasons", 0.9), ("throttle", 0.8),
                           ("traffic", 0.75), ("sources", 0.4), ("fp", 0.5), ("inventory", 0.9), ("procs", 0.7), ("energy", 0.85)):  # fmt: skip
            have[key] = bool(rng.random() < share)
        self.have = have
        self.jobs_listed = float(rng.choice([1.0, 0.0, 0.5], p=[0.75, 0.15, 0.1]))
        self.blank_rack, self.blank_leaf = bool(rng.random() < 0.2), bool(rng.random() < 0.2)
        self.pw_window = float(rng.choice([0.1, 1.0, 1.0]))  # s, averaging of the power and use read by NVML
        self.jobs: list[Job] = []
        self.job_no = int(rng.integers(1000, 90000))
        self._draw_jobs()

    def gpus_of(self, nodes: Any) -> np.ndarray:
        """All GPUs of some nodes."""
        return np.concatenate([np.arange(self.g0[i], self.g0[i + 1]) for i in np.atleast_1d(nodes)])

    def _draw_jobs(self) -> None:
        rng = self.rng
        for p in np.unique(self.pool):
            nodes = np.flatnonzero(self.pool == p)
            hbm = self.boards[nodes[0]].hbm
            at = 0
            while at < len(nodes):
                left = len(nodes) - at
                role = str(rng.choice(["train", "service", "small", "free"], p=[0.68, 0.16, 0.12, 0.04] if hbm else [0.45, 0.33, 0.17, 0.05]))  # fmt: skip
                size = int(min(left, rng.choice([1, 2, 4, 4, 6, 8, 12, 16, 24, 32])))
                if role == "train" and left >= 3:
                    size = min(left, max(2, size))
                if role != "train":
                    size = min(size, 4, left)
                if role == "free":
                    size = 1
                block = nodes[at : at + size]
                at += size
                t = -rng.uniform(600, 40000) if rng.random() < 0.85 else rng.uniform(0, self.span * 0.2)
                if role == "small":
                    self._small(block)
                    continue
                while t < self.span - 600 and role != "free":
                    life = rng.uniform(0.5, 2.5) * 3600 if rng.random() < 0.3 else self.span * 3
                    if t < 0:
                        life -= t if life < 1e5 else 0
                    end = t + life
                    kind = "service" if role == "service" else str(rng.choice(["dp", "tp", "pp", "moe"], p=[0.4, 0.27, 0.18, 0.15]))  # fmt: skip
                    if not hbm and kind not in ("service",):
                        kind = "dp"
                    self.add_job(kind, self.gpus_of(block), t, end)
                    t = end + rng.uniform(60, 1500)

    def _small(self, block: np.ndarray) -> None:
        rng = self.rng
        for g in self.gpus_of(block):
            t = rng.uniform(-7000, 1500)
            while t < self.span - 300:
                end = t + rng.uniform(900, 9000)
                if rng.random() < 0.7:
                    self.add_job(str(rng.choice(["notebook", "batch", "mig"])), np.array([g]), t, end)
                t = end + rng.uniform(60, 2000)

    def add_job(self, kind: str, gpus: np.ndarray, start: float, end: float, like: Job | None = None) -> Job:
        """Make a job with the work of its step; `like`: a restart of that job."""
        rng = self.rng
        self.job_no += int(rng.integers(1, 9))
        name = str(rng.choice([f"job-{self.job_no}", f"{kind}{self.job_no}"])) if like is None else like.name.split(".")[0] + f".{self.job_no}"  # fmt: skip
        m = len(gpus)
        job = Job(name, kind, gpus, start, end)
        s = float(np.exp(rng.uniform(np.log(0.15), np.log(14.0))))  # length of a step, s
        if rng.random() < 0.45:  # sharded by layer: members wait at each layer's gathers, not once in a step
            s = float(np.exp(rng.uniform(np.log(0.02), np.log(0.3))))
        per_node = int(self.ng[self.node[gpus[0]]])
        nv = self.b["nvl_bw"][gpus[0]] > 0
        one = np.ones(m)
        w = {
            "F": one * rng.uniform(0.45, 0.68), "B": one * rng.uniform(0.2, 0.5), "N": one * (rng.uniform(0.05, 0.14) if nv else 0),
            "X": one * (rng.uniform(0.05, 0.18)), "P": one * rng.uniform(0.01, 0.05), "H": one * rng.uniform(0.01, 0.03),
            "O": one * rng.uniform(0.02, 0.05), "bub": one * 0.0, "tens": one * rng.uniform(0.5, 0.82), "ov": one * rng.uniform(0, 0.6),
        }  # fmt: skip
        if per_node == m and m > 1:
            w["X"] = one * 0.02 * (0 if nv else 3)
        job.frac = rng.uniform(0.55, 0.95)
        tp = np.arange(m)
        sync = np.zeros(m, int)
        if kind in ("tp", "pp", "moe") and nv:
            size = per_node if rng.random() < 0.6 else max(1, per_node // 2)
            tp = self.node[gpus] * 16 + self.slot[gpus] // size
        else:
            w["N"] = w["N"] * 0.3
        if kind == "pp":
            stages = int(min(len(np.unique(self.node[gpus])), rng.choice([2, 4, 8])))
            st = np.unique(self.node[gpus], return_inverse=True)[1] % max(1, stages)
            bal = rng.normal(1, rng.uniform(0.01, 0.1), stages)
            bal[-1] += rng.uniform(0, 0.1)
            w["F"] = w["F"] * bal[st]
            w["B"] = w["B"] * bal[st]
            w["X"] = w["X"] * 0.6
            w["bub"] = one * rng.uniform(0.04, 0.2)
        if kind == "moe":
            w["F"] = w["F"] * np.clip(rng.normal(1, 0.09, m), 0.75, 1.3)
            w["X"] = w["X"] * 1.6
        if kind == "service":
            size = int(rng.choice([k for k in (1, 2, 4, 8) if k <= per_node]))
            tp = self.node[gpus] * 16 + self.slot[gpus] // size
            sync = tp.copy()
            w["B"], w["F"], w["tens"] = one * rng.uniform(0.5, 0.8), one * rng.uniform(0.15, 0.4), one * 0.6
            w["X"], w["O"] = one * 0.01, one * 0.0
            if size == 1:
                w["N"] = one * 0.0
            s = rng.uniform(0.02, 0.3)
        if kind in ("notebook", "batch", "mig"):
            sync = np.arange(m)
            w["X"], w["N"], w["H"] = one * 0, one * 0, one * (0.02 if kind == "batch" else 0.2)
            job.frac = rng.uniform(0.05, 0.9)
        if like is not None:
            keep = np.isin(like.gpus, gpus)
            w = {k: v[keep] for k, v in like.work.items()}
            job.work, job.frac, job.seed_rho = w, like.frac, like.seed_rho
            assert like.tp is not None and like.sync is not None
            job.tp, job.sync = like.tp[keep], like.sync[keep]
        else:
            job.work = {k: v * (s if k not in ("bub", "tens", "ov") else 1) for k, v in w.items()}
            job.tp, job.sync = tp, sync
            job.seed_rho = rng.uniform(0.35, 0.85) if kind in ("service", "batch") else rng.uniform(0.1, 0.6)
        job.listed = bool(rng.random() < self.jobs_listed)
        self.jobs.append(job)
        return job

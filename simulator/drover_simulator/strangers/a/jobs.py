"""Jobs: who runs where and when, and the model of one step.

A step of a rank is compute + memory + exchange inside the node + PCIe + host work; then all ranks wait for the slowest
and exchange over the network. Shares of a step are those that papers on large training give (MegaScale, NSDI'24; Llama 3,
2024): 55 to 75 % compute, 5 to 20 % exposed communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_simulator.strangers.a.boards import Fleet

PHASES = {  # kind -> (share of time in steps, host x, network x, compute x, waits spinning?)
    "warm": (0.15, 3.0, 0.5, 1.0, 0),
    "eval": (1.0, 1.4, 0.05, 0.38, 1),
    "ckpt": (0.0, 1.0, 0.0, 1.0, 1),
    "ckpt_idle": (0.0, 1.0, 0.0, 1.0, 0),  # ranks that write and wait on the host, not in a barrier
    "ckpt_async": (0.85, 1.3, 1.1, 1.0, 1),
    "stall": (1.0, 8.0, 1.0, 1.0, 1),
    "hang": (0.0, 1.0, 0.0, 1.0, 1),
    "incast": (1.0, 1.0, 1.8, 1.0, 1),
    "gone": (0.0, 1.0, 0.0, 1.0, 0),
}


@dataclass
class Job:
    """One job on fixed GPUs. Times in seconds from the start of the case; `start` may lie before it."""

    id: str
    kind: str  # "dp", "pipe", "moe", "infer", "single", "bench"
    gpus: np.ndarray
    start: float
    end: float
    prof: tuple[float, float, float, float, float, float]  # compute, memory, nvlink, pcie, host, network; sum 1
    inten: float  # power of the compute part: 1 is a dense GEMM
    load: np.ndarray
    ou: float = 0.0  # sd of a load that wanders (experts)
    spin: float = 0.4  # power of a waiting rank, of full dynamic power
    mem: float = 0.8
    bubble: float = 0.0
    tensor: float = 0.55
    phases: list[tuple[float, float, str, float]] = field(default_factory=list)
    rate: tuple[float, float] = (0.5, 0.2)  # inference: mean use and burstiness
    bursts: list[tuple[float, float, float]] = field(default_factory=list)
    held: list[tuple[float, float, str]] = field(
        default_factory=list
    )  # times that a fault or negative speaks of the job
    replica: int = 1  # inference: GPUs that serve one request together
    pid: int = 4000

    @property
    def sync(self) -> bool:
        return self.kind in ("dp", "pipe", "moe")

    def steady(self, t0: float, t1: float) -> bool:
        return self.start + 900 <= t0 and t1 <= self.end - 120 and self.kind != "held"

    def free(self, t0: float, t1: float) -> bool:
        return not any(a < t1 + 1200 and t0 < b + 1200 for a, b, _ in self.held)


class Schedule:
    """All jobs of a case. GPUs hold one job at a time."""

    def __init__(self, fleet: Fleet, rng: np.random.Generator) -> None:
        self.fleet, self.rng = fleet, rng
        self.jobs: list[Job] = []
        self._number = int(rng.integers(1000, 90000))
        self.idle_nodes: list[int] = []
        for pool in range(int(fleet.node_pool.max()) + 1):
            self._fill(np.flatnonzero(fleet.node_pool == pool))
        for job in self.jobs:
            self.phases(job)

    def _fill(self, nodes: np.ndarray) -> None:
        """Cut a pool into groups of nodes; each group runs one sort of work after the other."""
        rng, board, i = self.rng, self.fleet.boards[nodes[0]], 0
        small = board.nics == 0
        while i < len(nodes):
            left = len(nodes) - i
            sort = str(
                rng.choice(
                    ["train", "infer", "single", "idle"],
                    p=[0.15, 0.5, 0.27, 0.08] if small else [0.66, 0.15, 0.13, 0.06],
                )
            )
            size = 1
            if sort == "train" and not small:
                size = int(
                    min(left, rng.choice([1, 2, 3, 4, 6, 8, 12, 16], p=[0.1, 0.22, 0.08, 0.25, 0.1, 0.15, 0.05, 0.05]))
                )
            elif sort == "infer":
                size = int(min(left, rng.integers(1, 5)))
            group = nodes[i : i + size]
            i += size
            if sort == "idle":
                self.idle_nodes += [int(x) for x in group]
                continue
            gpus = np.concatenate([self.fleet.gpus(int(n)) for n in group])
            if sort == "single":
                cut = rng.choice([1, 2, 4])
                for part in np.split(gpus, np.arange(cut, len(gpus), cut)):
                    self._chain(part, "single")
            else:
                self._chain(gpus, sort)

    def _chain(self, gpus: np.ndarray, sort: str) -> None:
        rng, t = self.rng, -float(self.rng.uniform(600, 20 * 3600))
        while t < self.fleet.end:
            long = sort != "single"
            length = float(rng.uniform(2.0, 30) if long else rng.lognormal(0.4, 0.9)) * 3600
            if t + length > 600:
                kind = sort if sort != "train" else str(rng.choice(["dp", "pipe", "moe"], p=[0.62, 0.22, 0.16]))
                if kind == "single" and len(gpus) > 1:
                    kind = "dp"
                self.make(gpus, kind, t, t + length)
            t += length + float(rng.uniform(60, 1500) if rng.random() < 0.85 else rng.uniform(1500, 6000))

    def make(self, gpus: np.ndarray, kind: str, start: float, end: float, like: Job | None = None) -> Job:
        rng, board = self.rng, self.fleet.board(int(gpus[0]))
        self._number += int(rng.integers(1, 40))
        nodes = len(np.unique(self.fleet.g_node[gpus]))
        c, m, n = rng.uniform(0.55, 0.75), rng.uniform(0.08, 0.2), rng.uniform(0.03, 0.1) * (board.nvlinks > 0)
        p, h = rng.uniform(0.015, 0.04), rng.uniform(0.01, 0.04)
        e = rng.uniform(0.05, 0.2) if nodes > 1 else 0.0
        if board.nvlinks == 0 and len(gpus) > 1 and kind != "infer":
            p = rng.uniform(0.1, 0.25)  # the exchange goes over PCIe
        if kind == "single":
            c, m, h = rng.uniform(0.25, 0.8), rng.uniform(0.05, 0.4), rng.uniform(0.03, 0.4)
        if kind == "infer":  # decoding reads weights: memory bound
            c, m, e, h = rng.uniform(0.25, 0.5), rng.uniform(0.3, 0.6), 0.0, rng.uniform(0.01, 0.08)
        load = np.ones(len(gpus))
        bubble = ou = 0.0
        if kind == "pipe":
            stages = int(rng.choice([x for x in (2, 4, 8, 16) if x <= max(2, len(gpus) // 2)]))
            weight = 1 - rng.uniform(0, 0.18, stages)
            weight[0] *= rng.uniform(0.75, 0.97)  # embedding only
            weight[-1] = rng.uniform(0.95, 1.0)  # the head
            load = weight[np.arange(len(gpus)) * stages // len(gpus)]
            bubble = (stages - 1) / (stages - 1 + int(rng.choice([16, 32, 64])))
        if kind == "moe":
            load = np.exp(rng.normal(0, rng.uniform(0.03, 0.09), len(gpus)))
            load /= load.max()
            ou = float(rng.uniform(0.02, 0.06))
        total = c + m + n + p + h + e
        job = Job(
            f"{self._number}",
            kind,
            gpus,
            start,
            end,
            tuple(x / total for x in (c, m, n, p, h, e)),
            inten=float(rng.uniform(0.72, 1.05) if kind not in ("single", "infer") else rng.uniform(0.35, 0.95)),
            load=load,
            ou=ou,
            spin=float(rng.uniform(0.28, 0.45)),
            mem=float(rng.uniform(0.45, 0.96)),
            bubble=float(bubble),
            tensor=float(rng.uniform(0.4, 0.7)),
            rate=(float(rng.uniform(0.25, 0.7)), float(rng.uniform(0.08, 0.3))),
            replica=int(rng.choice([r for r in (1, 2, 4, 8) if len(gpus) % r == 0])),
            pid=int(rng.integers(3000, 4_000_000)),
        )
        if like is not None:
            job.prof, job.inten, job.mem, job.tensor, job.spin = like.prof, like.inten, like.mem, like.tensor, like.spin
        self.jobs.append(job)
        return job

    def phases(self, job: Job) -> None:
        """Warm up, checkpoints each 15 to 60 min, evaluations each 40 to 120 min."""
        rng = self.rng
        job.phases.append((job.start, job.start + float(rng.uniform(90, 600)), "warm", 1.0))
        if job.kind == "infer":  # bursts come as a Poisson process, about two an hour, 1 to 6 min long
            begin, end = max(job.start, -600.0), min(job.end, self.fleet.end)
            for t in np.sort(rng.uniform(begin, max(begin, end), int(rng.poisson(max(0.0, end - begin) / 1800)))):
                job.bursts.append((float(t), float(t + rng.uniform(60, 360)), float(rng.uniform(0.1, 0.5))))
        if job.kind in ("infer", "bench"):
            return
        every, cost, how = (
            rng.uniform(900, 3600),
            rng.uniform(10, 100),
            str(rng.choice(["ckpt_async", "ckpt", "ckpt_idle"], p=[0.5, 0.3, 0.2])),
        )
        for t in np.arange(job.start + every * rng.uniform(0.3, 1), min(job.end, self.fleet.end), every):
            if t > -200:
                job.phases.append((float(t), float(t + cost), how, 1.0))
        if rng.random() < 0.55:
            every, cost = rng.uniform(2400, 7200), rng.uniform(60, 420)
            for t in np.arange(job.start + every * rng.uniform(0.3, 1), min(job.end, self.fleet.end), every):
                if t > -500:
                    job.phases.append((float(t), float(t + cost), "eval", 1.0))

    def at(self, gpu: int, t: float) -> Job | None:
        for job in self.jobs:
            if job.start <= t < job.end and gpu in job.gpus:
                return job
        return None

    def on_node(self, node: int, t0: float, t1: float) -> list[Job]:
        gpus = self.fleet.gpus(node)
        return [j for j in self.jobs if j.start < t1 and t0 < j.end and np.isin(gpus, j.gpus).any()]

    def kill(
        self, job: Job, t: float, linger: float, lost: np.ndarray, again: float | None, back: float | None
    ) -> None:
        """The job dies at t: its ranks spin for `linger` until a watchdog ends it. What is left of it starts again
        after `again` without the GPUs of `lost`'s nodes, or after `back` with all of them."""
        old_end = job.end
        job.end = min(job.end, t + linger)
        job.phases.append((t, job.end, "hang", 1.0))
        bad = (
            np.isin(self.fleet.g_node[job.gpus], np.unique(self.fleet.g_node[lost]))
            if len(lost)
            else np.zeros(len(job.gpus), bool)
        )
        rest = job.gpus[~bad]
        start = job.end + again if again is not None and len(rest) else None
        gpus = rest
        if start is None and back is not None:
            start, gpus = max(back, job.end) + 120, job.gpus
        if start is not None and start < min(old_end, self.fleet.end):
            new = self.make(gpus, job.kind if len(gpus) > 1 else "single", start, old_end, like=job)
            self.phases(new)

    def clear(self, gpus: np.ndarray, t0: float, t1: float) -> bool:
        """Whether nothing that a label speaks of runs on these GPUs from t0 on (so that a job there may die)."""
        return all(
            all(b < t0 - 300 for _, b, _ in j.held)
            for j in self.jobs
            if j.start < t1 and t0 < j.end and np.isin(gpus, j.gpus).any()
        )

    def tables(self, ts: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [B, J] of what phase each job is in."""
        b, j = len(ts), len(self.jobs)
        out = {
            "act": np.ones((b, j)),
            "host": np.ones((b, j)),
            "net": np.ones((b, j)),
            "comp": np.ones((b, j)),
            "spin": np.ones((b, j)),
            "busy": np.ones((b, j)),
            "io": np.zeros((b, j)),
            "incast": np.zeros((b, j)),
        }
        lo, hi = ts[0], ts[-1]
        for k, job in enumerate(self.jobs):
            for t0, t1, kind, amount in job.phases:
                if t1 <= lo or t0 > hi:
                    continue
                s = (ts >= t0) & (ts < t1)
                act, host, net, comp, spin = PHASES[kind]
                out["act"][s, k] = np.minimum(out["act"][s, k], act)
                out["host"][s, k] *= host if kind != "stall" else 1 + (host - 1) * amount
                out["net"][s, k] *= net if kind != "incast" else 1 + (net - 1) * amount
                out["comp"][s, k] *= comp
                out["busy"][s, k] = kind != "gone"
                out["spin"][s, k] = np.minimum(out["spin"][s, k], spin)
                out["io"][s, k] += amount * (kind.startswith("ckpt"))
                out["incast"][s, k] += amount * (kind == "incast")
        out["io"] *= out["busy"]  # a job that does nothing writes nothing
        return out

    def owner(self, ts: np.ndarray) -> np.ndarray:
        """[B, G] number of the job on each GPU, or -1."""
        out = np.full((len(ts), len(self.fleet.g_node)), -1)
        for k, job in enumerate(self.jobs):
            if job.start <= ts[-1] and job.end > ts[0]:
                s = np.flatnonzero((ts >= job.start) & (ts < job.end))
                if len(s):
                    out[s[0] : s[-1] + 1, job.gpus] = k
        return out

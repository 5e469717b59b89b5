"""Jobs: what holds which GPUs, and what each asks of them over time.

A step of a synchronous job is compute (with the clock), memory (with HBM), PCIe, host, then collectives over NVLink and
the network that all members leave together. Shapes follow MegaScale, Llama 3's report and the MLaaS trace of Alibaba.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from drover_simulator.strangers.d.site import Site


@dataclass
class Job:
    id: str
    kind: str
    members: np.ndarray  # of GPUs
    start: float  # s; may lie before the case
    end: float  # s; may lie behind it
    costs: dict[str, float]  # c, m, p, h, n, x: parts of a nominal step
    tensor: float
    intensity: float
    dram: float
    memory: float  # share of device memory
    groups: np.ndarray  # of members that wait for each other
    weights: np.ndarray
    wobble: float = 0.0  # uneven experts: how far weights move
    net: float = 0.0  # GB/s a GPU's port carries at full speed
    listed: bool = True
    stalls: list[tuple[float, float, str]] = field(default_factory=list)  # (from, to, why)
    used: bool = True
    seed: int = 0
    restarts: int = 0

    @property
    def sync(self) -> bool:
        return self.kind in ("dp", "pp", "moe")

    def restart_from(self, t: float, without: set[int]) -> "Job | None":
        """The same job again on the members that are left."""
        keep = np.array([m not in without for m in self.members])
        if keep.sum() < 2:
            return None
        return replace(
            self, id=f"{self.id}r{self.restarts + 1}", members=self.members[keep], start=t, groups=self.groups[keep],
            weights=self.weights[keep], stalls=[], restarts=self.restarts + 1,
        )  # fmt: skip


def draw_jobs(site: Site) -> list[Job]:
    """Draw the schedule: blocks of nodes that run one job after another, and shared nodes."""
    rng, jobs, number = site.rng, [], [int(site.rng.integers(10_000, 90_000))]
    nodes = list(range(site.n))
    train = [k for k in nodes if site.pools[k] == "train"]
    at = 0
    blocks: list[tuple[str, list[int]]] = []
    idle_share = rng.uniform(0, 0.12)
    while at < len(train):
        left = len(train) - at
        size = min(left, int(rng.choice([1, 2, 4, 8, 16], p=[0.15, 0.2, 0.3, 0.25, 0.1])))
        while size > 1 and site.boards[train[at]] is not site.boards[train[at + size - 1]]:
            size -= 1
        kind = (
            "idle"
            if rng.random() < idle_share and size <= 2
            else str(rng.choice(["dp", "pp", "moe"], p=[0.6, 0.2, 0.2]))
        )
        if size == 1:
            kind = str(rng.choice(["dp", "mixed", "batch", kind]))
        if size == 1 and kind == "pp":
            kind = "dp"
        blocks.append((kind, train[at : at + size]))
        at += size
    for k in nodes:
        if site.pools[k] != "train":
            blocks.append(
                (str(rng.choice(["infer", "infer", "batch", "mixed", "idle"], p=[0.45, 0.2, 0.15, 0.15, 0.05])), [k])
            )
    for kind, block in blocks:
        if kind == "idle":
            continue
        gpus = np.concatenate([site.gpus_of(k) for k in block])
        if kind == "mixed":
            _mixed(site, jobs, gpus, number)
            continue
        t = float(-rng.uniform(0, 6) * 3600)
        if rng.random() < 0.2:
            t = float(rng.uniform(0, 0.3) * site.span)
        while t < site.span:
            long = rng.random() < 0.6 or kind == "infer"
            end = t + float(rng.uniform(4, 40) if long else rng.uniform(0.5, 5)) * 3600
            if end > 0:
                jobs.append(_make(site, kind, gpus, t, end, number))
            t = end + float(rng.uniform(60, 1500))
    for job in jobs:
        job.listed = site.jobs_listed == "all" or (site.jobs_listed == "some" and rng.random() < 0.6)
    return jobs


def _mixed(site: Site, jobs: list[Job], gpus: np.ndarray, number: list[int]) -> None:
    rng, at = site.rng, 0
    while at < len(gpus):
        size = int(min(len(gpus) - at, rng.choice([1, 1, 2, 4])))
        kind = (
            str(rng.choice(["one", "notebook", "infer", "dp", "batch"])) if size > 1 or rng.random() < 0.9 else "none"
        )
        if size == 1 and kind == "dp":
            kind = "one"
        t = float(-rng.uniform(0, 3) * 3600)
        while t < site.span and kind != "none":
            end = t + float(rng.lognormal(0.8, 0.8)) * 3600
            if end > 0:
                jobs.append(_make(site, kind, gpus[at : at + size], t, end, number))
            t = end + float(rng.exponential(1200) + 60)
            kind = str(rng.choice(["one", "notebook", kind])) if size == 1 else kind
        at += size


def _make(site: Site, kind: str, gpus: np.ndarray, start: float, end: float, number: list[int]) -> Job:
    rng, count = site.rng, len(gpus)
    number[0] += int(rng.integers(1, 40))
    board = site.board(int(gpus[0]))
    multi = len(set(site.node_of[gpus])) > 1
    groups = np.zeros(count, int)
    weights = 1 + 0.006 * rng.standard_normal(count)
    net = 0.0
    costs = {"c": 0.68, "m": 0.12, "p": 0.01, "h": 0.02, "n": 0.1, "x": 0.07 if multi else 0.0}
    tensor, intensity, dram, memory, wobble = (
        rng.uniform(0.35, 0.62),
        rng.uniform(0.75, 1.12),
        rng.uniform(0.25, 0.5),
        rng.uniform(0.7, 0.95),
        0.0,
    )
    peak = board.nic_gbps / 8
    if kind == "dp":
        costs["x"] *= rng.uniform(0.5, 1.8)
        net = rng.uniform(0.08, 0.35) * peak if multi else 0
    elif kind == "pp":
        stages = 2 if count <= 16 else 4
        per = np.arange(count) * stages // count
        skew = 1 + rng.uniform(-0.1, 0.06, stages)
        skew[-1] *= rng.uniform(1.0, 1.15)  # the head
        weights = weights * skew[per]
        costs |= {"c": 0.6, "n": 0.14, "h": 0.03}
        net = rng.uniform(0.03, 0.15) * peak if multi else 0
    elif kind == "moe":
        weights, wobble = weights * (1 + 0.05 * rng.standard_normal(count)), rng.uniform(0.02, 0.09)
        costs |= {"c": 0.5, "n": 0.2, "x": 0.14 if multi else 0.0}
        net = rng.uniform(0.2, 0.5) * peak if multi else 0
    elif kind == "infer":
        tp = int(rng.choice([k for k in (1, 2, 4, 8) if k <= count]))
        groups = np.arange(count) // tp
        costs = {"c": 0.35, "m": 0.45, "p": 0.03, "h": 0.05, "n": 0.1 if tp > 1 else 0.0, "x": 0.0}
        tensor, intensity, dram, memory = (
            rng.uniform(0.15, 0.4),
            rng.uniform(0.45, 0.85),
            rng.uniform(0.45, 0.75),
            rng.uniform(0.85, 0.95),
        )
    elif kind in ("batch", "one", "notebook"):
        groups = np.arange(count)
        costs = {"c": 0.6, "m": 0.2, "p": 0.06, "h": 0.12, "n": 0.0, "x": 0.0}
        intensity, memory = rng.uniform(0.5, 1.05), rng.uniform(0.2, 0.9)
    if not board.links:
        costs["p"] += costs["n"] * 0.8
        costs["n"] = 0.0
    total = sum(costs.values())
    costs = {key: value / total for key, value in costs.items()}
    name = {"infer": "svc", "batch": "batch", "notebook": "nb"}.get(kind, "job")
    return Job(f"{name}-{number[0]}", kind, np.asarray(gpus), start, end, costs, float(tensor), float(intensity), float(dram),
               float(memory), groups, weights, float(wobble), float(net), seed=int(rng.integers(1 << 30)))  # fmt: skip


SERIES = ("load", "intensity", "scale", "comm", "store", "fill", "tensor")


def series(site: Site, job: Job) -> np.ndarray:
    """float32 [steps, SERIES]: what the job asks for; zero load outside its life."""
    rng = np.random.default_rng(job.seed)
    dt, t = site.dt, np.arange(site.steps) * site.dt
    out = np.ones((site.steps, len(SERIES)))
    load, intensity, scale, comm, store, fill, tensor = out.T
    store[:] = 0
    a0 = max(job.start, -3600.0)
    warm = float(rng.uniform(60, 420)) * (1.5 if len(job.members) > 16 else 0.7)
    if job.start < 0:
        warm = min(warm, 0.0 - job.start)
    stalls = [(job.start, job.start + warm, "start"), *job.stalls]
    if job.sync:
        every, lasts = float(rng.uniform(900, 5400)), float(rng.uniform(8, 120))
        k = a0 + rng.uniform(0, every)
        while k < min(job.end, site.span):
            stalls.append((k, k + lasts * rng.uniform(0.8, 1.3), "checkpoint"))
            k += every
        if rng.random() < 0.6:
            every, lasts = float(rng.uniform(1800, 9000)), float(rng.uniform(60, 400))
            k = a0 + rng.uniform(0, every)
            while k < min(job.end, site.span):
                share = _cover(t, dt, k, k + lasts)
                intensity *= 1 - 0.3 * share  # forward only
                comm *= 1 - 0.75 * share
                tensor *= 1 - 0.15 * share
                load *= 1 - 0.1 * share
                k += every
        if rng.random() < 0.3:  # the sequence length grows in steps
            for k in np.sort(rng.uniform(0, site.span, int(rng.integers(1, 4)))):
                later = t >= k
                scale[later] *= rng.uniform(1.1, 1.4)
                intensity[later] *= rng.uniform(0.93, 1.04)
        if rng.random() < 0.2:  # restarts by itself, as software does
            k = float(rng.uniform(a0, min(job.end, site.span)))
            stalls.append((k, k + float(rng.uniform(120, 700)), "restart"))
        load *= 1 - 0.04 * np.abs(_walk(rng, site.steps, dt, 900))
    elif job.kind == "infer":
        day = 1 + rng.uniform(0.1, 0.5) * np.sin(2 * np.pi * (t / 86400 + rng.random()))
        base = rng.uniform(0.25, 0.65) * day * (1 + 0.15 * _walk(rng, site.steps, dt, 240))
        for k in rng.uniform(0, site.span, int(rng.poisson(site.span / 5400))):
            base = base + rng.uniform(0.2, 0.6) * _cover(t, dt, k, k + float(rng.uniform(30, 600)))
        load[:] = base
    elif job.kind == "notebook":
        load[:] = 0
        k = a0
        while k < site.span:
            lasts = float(rng.lognormal(4.5, 1.0))
            load += rng.uniform(0.2, 1) * _cover(t, dt, k, k + lasts)
            k += lasts + float(rng.exponential(900))
        np.clip(load, 0, 1, out=load)
    else:
        load *= 0.97 - 0.08 * np.abs(_walk(rng, site.steps, dt, 300))
        k = a0
        while k < site.span and job.kind == "batch":  # a shard ends, the next is loaded
            k += float(rng.uniform(600, 3600))
            stalls.append((k, k + float(rng.uniform(5, 60)), "shard"))
    for a, b, why in stalls:
        share = _cover(t, dt, a, b)
        load *= 1 - share
        if why == "start" or why == "restart":
            fill *= 1 - share * 0.9
        if why == "checkpoint":
            store += share
    if not job.used:
        load[:] = 0
        store[:] = 0
    alive = (t >= job.start) & (t < job.end)
    load *= alive
    store *= alive
    return out.astype(np.float32)


def _cover(t: np.ndarray, dt: float, a: float, b: float) -> np.ndarray:
    """Which share of each interval [t, t + dt) lies in [a, b)."""
    return np.clip((np.minimum(t + dt, b) - np.maximum(t, a)) / dt, 0, 1)


def _walk(rng: np.random.Generator, steps: int, dt: float, tau: float) -> np.ndarray:
    """An Ornstein-Uhlenbeck walk of variance 1, made on a coarse grid."""
    coarse = max(int(steps * dt / tau * 4) + 3, 4)
    keep = np.exp(-0.25)
    x = np.empty(coarse)
    x[0] = rng.standard_normal()
    for k, e in enumerate(rng.standard_normal(coarse - 1) * np.sqrt(1 - keep**2), 1):
        x[k] = keep * x[k - 1] + e
    return np.interp(np.linspace(0, coarse - 1, steps), np.arange(coarse), x)

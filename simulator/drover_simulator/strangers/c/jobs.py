"""Tenants: jobs of a queue, services with autoscaling, notebooks. A plan on the grid of steps, made before the physics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_simulator.strangers.c.boards import Fleet

NONE, WARM, TRAIN, CKPT, EVAL, STALL, HANG, HELD = range(8)
# share of the running activity, share of time with a kernel otherwise, share of communication, CPU share of the node
PH_ACT = np.array([0, 0.06, 1, 0.03, 0.78, 0.35, 0, 0])
PH_UTIL = np.array([0, 0.08, 0, 0.06, 0.03, 0.02, 0, 0])
PH_COMM = np.array([0, 0.05, 1, 0.1, 0.15, 0.35, 0, 0])
PH_CPU = np.array([0, 0.25, 0.10, 0.16, 0.12, 0.22, 0.06, 0.005])
SYNC = {"dp", "pipeline", "moe", "finetune"}


@dataclass
class Job:
    id: str
    kind: str
    gpus: np.ndarray
    start: float  # s after the case's start, negative: before
    end: float  # may lie after the case's end
    # shares of a step at full clock, no waiting: compute, memory, host, PCIe, ports, NVLink
    c: float = 0.6
    m: float = 0.2
    h: float = 0.03
    p: float = 0.02
    inter: float = 0
    intra: float = 0
    act: float = 0.9  # switching activity of compute, 1: the worst kernel
    tensor: float = 0.6
    dense: float = 0.9  # SMs busy while computing
    fb: float = 0.8
    spin: float = 1.0  # a rank that waits spins in a kernel (NCCL) or sleeps (0)
    noise: float = 0.006
    net: float = 10e9  # B/s of a GPU's port at full speed
    stall: float = 0.35  # activity left in a data stall
    weight: np.ndarray = field(default_factory=lambda: np.ones(1))
    phase: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    replica: int = 1  # GPUs of a replica (services)
    load: float = 0.6  # of a service: mean demand over capacity
    surges: list = field(default_factory=list)  # (start, end, factor)
    wander: float = 0.0  # of a rank's own load (experts)
    ckpts: list = field(default_factory=list)

    def nodes(self, f: Fleet) -> np.ndarray:
        return np.unique(f.gnode[self.gpus])


@dataclass
class Plan:
    """The grid and all jobs on it."""

    K: int
    h: float
    jobs: list[Job]

    def step(self, s: float) -> int:
        return int(np.clip(round(s / self.h), 0, self.K))

    @property
    def length(self) -> float:
        return self.K * self.h

    def paint(self, job: Job, phase: int, a: float, b: float, only: int | None = None) -> None:
        part = job.phase[self.step(max(a, 0)) : self.step(min(b, self.length))]
        if only is None:
            part[part != NONE] = phase
        else:
            part[part == only] = phase

    def stop(self, job: Job, s: float) -> None:
        job.end = min(job.end, s)
        job.phase[self.step(s) :] = NONE

    def covering(self, a: float, b: float) -> list[Job]:
        return [j for j in self.jobs if j.start <= a - 240 and j.end >= b]

    def on_gpu(self, g: int, a: float, b: float) -> list[Job]:
        return [j for j in self.jobs if j.start < b and j.end > a and g in j.gpus]


def fill(rng: np.random.Generator, plan: Plan, job: Job) -> None:
    """Phases of a job: warm up, steps, checkpoints, evaluation, short stalls."""
    job.phase = np.zeros(plan.K, np.uint8)
    a, b = plan.step(max(0, job.start)), plan.step(min(job.end, plan.length))
    job.phase[a:b] = TRAIN
    if job.kind == "held":
        job.phase[a:b] = HELD
        return
    if job.kind == "notebook":  # bursts of seconds to minutes, thinking between: Philly and Helios traces
        job.phase[a:b] = HELD
        s = max(0, job.start) + rng.exponential(300)
        while s < min(job.end, plan.length):
            d = rng.lognormal(np.log(60), 0.9)
            plan.paint(job, TRAIN, s, s + d)
            s += d + rng.lognormal(np.log(500), 0.7)
        return
    if job.kind == "service":
        return
    warm = rng.uniform(60, 300) if len(job.gpus) > 1 else rng.uniform(20, 120)
    plan.paint(job, WARM, job.start, job.start + warm)
    end = min(job.end, plan.length)
    if job.kind != "single" or rng.random() < 0.5:
        every, size = rng.uniform(900, 3600), rng.uniform(8, 60)  # CheckFreq, Gemini: minutes to an hour; 10 to 60 s
        s = job.start + warm + every * rng.uniform(0.3, 1)
        while s < end:
            plan.paint(job, CKPT, s, s + size * rng.uniform(0.8, 1.3), TRAIN)
            job.ckpts.append(s)
            s += every
    if rng.random() < (0.8 if job.kind == "finetune" else 0.4):
        every, size = rng.uniform(1200, 5400), rng.uniform(40, 300)
        s = job.start + warm + every * rng.uniform(0.4, 1)
        while s < end:
            plan.paint(job, EVAL, s, s + size, TRAIN)
            s += every
    for _ in range(rng.poisson(max(0, end - max(0, job.start)) / 7200)):  # short stalls of a loader
        s = rng.uniform(max(0, job.start), end)
        plan.paint(job, STALL, s, s + rng.uniform(5, 25), TRAIN)


def make(
    rng: np.random.Generator, f: Fleet, plan: Plan, kind: str, gpus: np.ndarray, start: float, end: float, tag: str
) -> Job:
    """Draw a job's shape. Shares of communication: 5 to 30 % dense, 20 to 40 % experts (Megatron, Tutel, DeepSeek)."""
    n = len(gpus)
    b = f.boards[int(f.gnode[gpus[0]])]
    nodes = len(np.unique(f.gnode[gpus]))
    one_domain = b.liquid and len(np.unique(f.rack[f.gnode[gpus]])) == 1
    j = Job(tag, kind, np.sort(gpus), start, end, weight=np.ones(n))
    comm = (
        {
            "dp": rng.uniform(0.06, 0.22),
            "pipeline": rng.uniform(0.06, 0.16),
            "moe": rng.uniform(0.18, 0.35),
            "finetune": rng.uniform(0.04, 0.15),
        }.get(kind, 0.0)
        if n > 1
        else 0.0
    )
    across = 0 if nodes == 1 or one_domain else rng.uniform(0.55, 0.85)
    if not b.links and nodes == 1:
        j.inter, j.intra, extra = 0, 0, comm
    else:
        j.inter, j.intra, extra = comm * across, comm * (1 - across), 0
    j.m = rng.uniform(0.12, 0.3)
    j.h, j.p = rng.uniform(0.01, 0.05), rng.uniform(0.005, 0.03) + extra
    j.c = 1 - comm - j.m - j.h - j.p + extra
    j.act, j.tensor, j.dense = rng.uniform(0.72, 1.0), rng.uniform(0.45, 0.78), rng.uniform(0.82, 0.97)
    j.fb = rng.uniform(0.6, 0.95)
    j.spin = 1.0 if rng.random() < 0.85 else rng.uniform(0.2, 0.6)
    j.noise = rng.uniform(0.003, 0.012)
    j.net = b.nic_gbps / 8 * 1e9 * rng.uniform(0.15, 0.5) * (b.nics / b.gpus)
    j.stall = rng.uniform(0.2, 0.65)
    if kind == "pipeline":  # stages by node (or by half node): first and last bear embedding and loss
        stages = max(2, nodes if nodes > 1 else 2)
        w = rng.uniform(0.90, 1.0, stages)
        w[0], w[-1] = w[0] * rng.uniform(0.85, 1.0), rng.uniform(0.97, 1.06)
        j.weight = np.repeat(w, int(np.ceil(n / stages)))[:n]
        j.intra, j.c = j.intra + 0.04, j.c - 0.04
    elif kind == "moe":
        j.weight = rng.lognormal(0, rng.uniform(0.02, 0.06), n)
        j.wander = rng.uniform(0.02, 0.06)
    elif kind == "finetune":
        j.act *= 0.85
        j.h += rng.uniform(0, 0.08)
        j.c -= min(0.08, j.c / 4)
    elif kind == "single":
        j.act, j.tensor, j.h = rng.uniform(0.2, 0.9), rng.uniform(0.02, 0.5), rng.uniform(0.02, 0.5)
        j.c, j.m = (1 - j.h) * 0.65, (1 - j.h) * 0.33
        j.fb = rng.uniform(0.1, 0.8)
    elif kind == "notebook":
        j.act, j.tensor, j.fb, j.h = rng.uniform(0.2, 0.7), rng.uniform(0.05, 0.4), rng.uniform(0.03, 0.6), 0.15
        j.c, j.m = 0.55, 0.25
    elif kind == "service":  # decode reads memory
        j.c, j.m, j.h, j.p = 0.38, 0.5, 0.09, 0.03
        j.act, j.tensor, j.fb = rng.uniform(0.45, 0.8), rng.uniform(0.12, 0.35), rng.uniform(0.82, 0.94)
        j.replica = int(rng.choice([r for r in (1, 2, 4, 8) if n % r == 0 and r <= b.gpus]))
        j.load = rng.uniform(0.35, 0.8)
        for _ in range(rng.poisson(plan.length / 5000)):
            s = rng.uniform(0, plan.length)
            j.surges.append((s, s + rng.uniform(40, 500), rng.uniform(1.2, 2.2)))
    elif kind == "held":
        j.fb = rng.uniform(0.3, 0.9)
    elif kind == "benchmark":
        j.act, j.tensor, j.c, j.m, j.h, j.p, j.inter, j.intra = 1.0, 0.92, 0.93, 0.05, 0.005, 0.015, 0, 0
    fill(rng, plan, j)
    plan.jobs.append(j)
    return j


def schedule(rng: np.random.Generator, f: Fleet, plan: Plan) -> None:
    """Fill the pools: gangs of nodes and parts of nodes, each with a row of jobs from the queue."""
    serial = int(rng.integers(1000, 90000))
    end = plan.length
    for p in np.unique(f.pool):
        nodes = list(np.flatnonzero(f.pool == p))
        b = f.boards[int(nodes[0])]
        i = 0
        while i < len(nodes):
            left = len(nodes) - i
            if b.links:
                size = int(rng.choice([s for s in (1, 1, 1, 2, 2, 3, 4, 6, 8) if s <= left and s * b.gpus <= 64]))
            else:
                size = int(rng.choice([s for s in (1, 2, 3) if s <= left]))
            group = nodes[i : i + size]
            i += size
            if rng.random() < (0.06 if size <= 2 else 0):
                continue  # idle, nobody's
            whole = np.concatenate([f.gpus_of(int(n)) for n in group])
            parts: list[np.ndarray] = [whole]
            if size == 1 and rng.random() < 0.5:
                cut = int(rng.choice([c for c in (1, 2, 4) if b.gpus % c == 0]))
                parts = list(whole.reshape(-1, cut))
            for gpus in parts:
                if len(parts) > 3 and rng.random() < 0.2:
                    continue
                s = -rng.exponential(3 * 3600) - 300 if rng.random() < 0.88 else rng.uniform(0, end * 0.3)
                if not b.links:
                    kinds, odds = ["service", "single", "notebook"], [0.7, 0.22, 0.08]
                elif size > 1:
                    kinds, odds = ["dp", "pipeline", "moe", "service"], [0.48, 0.2, 0.2, 0.12]
                elif len(gpus) > 1:
                    kinds, odds = ["dp", "finetune", "moe", "service"], [0.2, 0.42, 0.08, 0.3]
                else:
                    kinds, odds = ["single", "notebook", "service"], [0.5, 0.25, 0.25]
                while s < end - 600:
                    kind = str(rng.choice(kinds, p=odds))
                    long = kind == "service" or size > 1
                    d = rng.lognormal(np.log(6 * 3600 if long else 2.2 * 3600), 0.7)
                    if s < 0:
                        d = max(d, -s + rng.exponential(2 * 3600 if not long else 5 * 3600) + 300)
                    if kind == "service" and rng.random() < 0.85:
                        d = 1e6
                    serial += int(rng.integers(1, 30))
                    n = gpus
                    if kind not in ("service",) and not b.links and len(gpus) > 1:  # L4: single GPU work
                        for g in gpus:
                            if rng.random() < 0.75:
                                serial += 1
                                make(
                                    rng,
                                    f,
                                    plan,
                                    str(rng.choice(["single", "notebook"], p=[0.75, 0.25])),
                                    np.array([g]),
                                    s + rng.uniform(0, 60),
                                    s + d * rng.uniform(0.5, 1),
                                    f"job-{serial}",
                                )
                    else:
                        make(rng, f, plan, kind, n, s, s + d, f"{'svc' if kind == 'service' else 'job'}-{serial}")
                    s = s + d + rng.exponential(400) + 30  # the queue fills a hole in minutes


class Service:
    """Replicas behind a balancer: M/G/k as a fluid with noise, and an autoscaler with its delays."""

    def __init__(self, rng: np.random.Generator, job: Job, length: float) -> None:
        self.job, self.rng = job, rng
        self.k = len(job.gpus) // job.replica
        self.on = max(1, int(np.ceil(self.k * min(1, job.load / 0.65))))
        self.loading: list[float] = []  # when a replica that starts is ready
        self.queue = 0.0
        self.hour = rng.uniform(0, 24)
        self.swing = rng.uniform(0.15, 0.45)
        self.ou = 0.0
        self.high = self.low = 0.0
        self.scales = rng.random() < 0.6
        self.load_time = rng.uniform(60, 200)  # weights from storage
        self.floor = int(max(1, self.k * rng.uniform(0.3, 0.7)))

    def tick(self, t: float, h: float) -> tuple[np.ndarray, np.ndarray]:
        """Return busy (0 to 1) and whether loaded, per GPU of the job."""
        j, rng = self.job, self.rng
        self.ou += -self.ou * h / 300 + 0.12 * np.sqrt(2 * h / 300) * rng.standard_normal()
        rate = (
            j.load
            * self.k
            * (1 + self.swing * np.sin(2 * np.pi * (self.hour / 24 + t / 86400)))
            * np.exp(min(self.ou, 1.0))
        )
        for a, b, factor in j.surges:
            if a <= t < b:
                rate *= factor
        ready = [r for r in self.loading if r <= t]
        self.loading = [r for r in self.loading if r > t]
        self.on = min(self.k, self.on + len(ready))
        offered = rate + self.queue / 20  # a queue is worked off in 20 s where there is room
        served = min(offered, self.on)
        self.queue = max(0.0, min(self.queue + (rate - served) * h, 120.0 * self.on))  # clients give up
        rho = served / self.on
        self.high = self.high + h if rho > 0.85 else 0
        self.low = self.low + h if rho < 0.40 else 0
        if self.scales and self.high > 60 and self.on + len(self.loading) < self.k:
            self.loading.append(t + self.load_time)
            self.high = 0
        if self.scales and self.low > 400 and self.on > self.floor:
            self.on -= 1
            self.low = 0
        busy = np.zeros(self.k)
        busy[: self.on] = np.clip(rho * (1 + 0.06 * rng.standard_normal(self.on)), 0, 1)
        loaded = np.zeros(self.k)
        loaded[: self.on] = 1
        loaded[self.on : self.on + len(self.loading)] = 0.5
        return np.repeat(busy, j.replica), np.repeat(loaded, j.replica)

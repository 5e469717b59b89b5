"""What runs: jobs as segments in time on sets of GPUs, and their activity at each step of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from drover_simulator.strangers.f.world import Fleet


@dataclass
class Job:
    id: str
    kind: str  # train, pipe, moe, serve, single, held, bench
    gpus: np.ndarray
    t0: float  # s from the case's start; may be before it
    t1: float
    par: dict
    w: np.ndarray  # share of work by rank
    root: str = ""  # the job that this one restarts
    replica: int = 1  # GPUs of a replica of a service
    mods: list = field(default_factory=list)  # (what, t0, t1, value), shared by restarts
    listed: bool = True
    seed: int = 0
    memory: float = 0.8

    def has(self, i: int) -> bool:
        return bool(np.any(self.gpus == i))


def mix(rng, kind: str, board, multi: bool) -> dict:
    """Shares of a step: tensor-bound, memory-bound, NVLink, network, PCIe, host; they sum to 1."""
    if kind in ("serve",):
        s = dict(
            tc=rng.uniform(0.2, 0.35), tm=rng.uniform(0.4, 0.6), tl=rng.uniform(0.04, 0.12), tn=0.0, tp=0.02, th=0.05
        )
    elif kind == "single":
        s = dict(
            tc=rng.uniform(0.3, 0.6), tm=rng.uniform(0.15, 0.35), tl=0.0, tn=0.0, tp=0.05, th=rng.uniform(0.05, 0.25)
        )
    else:
        s = dict(
            tc=rng.uniform(0.42, 0.62),
            tm=rng.uniform(0.12, 0.25),
            tl=rng.uniform(0.06, 0.14),
            tn=rng.uniform(0.05, 0.16) if multi else 0.0,
            tp=rng.uniform(0.015, 0.04),
            th=rng.uniform(0.01, 0.04),
        )
        if kind == "moe":
            s["tl"] *= 1.5
    if board.nvlinks == 0:
        s["tp"] += s["tl"]
        s["tl"] = 0.0
    total = sum(s.values())
    s = {k: v / total for k, v in s.items()}
    s["kt"] = rng.uniform(0.62, 0.85)  # tensor pipes while in the tensor-bound part
    s["kd"] = rng.uniform(0.75, 0.9)
    s["ks"] = rng.uniform(0.86, 0.97)
    s["kl"] = rng.uniform(0.5, 0.8)  # of the NVLinks' speed while in that part
    s["kn"] = rng.uniform(0.55, 0.9)
    s["step"] = float(np.exp(rng.uniform(np.log(0.4), np.log(12))))
    return s


def load_of(job: Job, rank_w: float = 1.0) -> tuple[float, float, float, float]:
    """Nominal activity (tensor, SM, memory, NVLink) of one rank."""
    q = job.par
    own = (q["tc"] + q["tm"]) * rank_w
    return (
        q["kt"] * q["tc"] * rank_w,
        q["ks"] * own + 0.12 * (1 - own),
        min(1.0, q["kd"] * q["tm"] + 0.25 * q["tc"]),
        q["kl"] * q["tl"],
    )


def plan_jobs(f: Fleet, rng: np.random.Generator, span: float) -> list[Job]:
    """Fill the pools: large and small training, services, single-GPU jobs, idle nodes."""
    jobs: list[Job] = []
    serial = int(rng.integers(1000, 90000))
    form = int(rng.integers(3))

    def name(kind: str) -> str:
        nonlocal serial
        serial += int(rng.integers(1, 9))
        return [f"{serial}", f"{kind}-{serial}", f"slurm-{serial}"][form]

    def add(kind, gpus, t0, t1, replica=1):
        board = f.boards[f.node_of[gpus[0]]]
        multi = len(set(f.node_of[gpus].tolist())) > 1
        q = mix(rng, kind, board, multi)
        w = np.ones(len(gpus))
        if kind == "pipe":  # stages are consecutive nodes; first (embedding) and last (head) differ
            stages = int(min(len(gpus), rng.choice([4, 8]))) if len(gpus) >= 4 else 1
            by = 1 - np.abs(rng.normal(0, 0.05, stages))
            by[0] *= rng.uniform(0.8, 1)
            w = by[(np.arange(len(gpus)) * stages) // len(gpus)]
        if kind == "moe":
            w = 1 - np.abs(rng.normal(0, rng.uniform(0.03, 0.08), len(gpus)))
        jobs.append(
            Job(
                name(kind),
                kind,
                np.array(gpus),
                t0,
                t1,
                q,
                w,
                replica=replica,
                seed=int(rng.integers(1 << 31)),
                memory=rng.uniform(0.45, 0.95),
            )
        )

    pools: dict[str, list[int]] = {}
    for n in range(f.n):
        pools.setdefault(f.boards[n].pool, []).append(n)
    for nodes in pools.values():
        nodes = list(nodes)
        if rng.random() < 0.3:
            rng.shuffle(nodes)
        idle = max(1, round(len(nodes) * rng.uniform(0.06, 0.15))) if len(nodes) > 3 else 0
        nodes = nodes[: len(nodes) - idle]
        first = True
        while nodes:
            if first:
                size, kind = max(min(len(nodes), 2), int(len(nodes) * rng.uniform(0.3, 0.5))), "train"
                kind = str(rng.choice(["train", "train", "pipe", "moe"]))
            else:
                kind = str(
                    rng.choice(["train", "pipe", "moe", "serve", "serve", "single"], p=[0.24, 0.1, 0.1, 0.3, 0.1, 0.16])
                )
                size = {"single": 1, "serve": int(rng.integers(1, 4))}.get(kind, int(rng.integers(1, 7)))
            first = False
            take, nodes = nodes[: min(size, len(nodes))], nodes[min(size, len(nodes)) :]
            gpus = np.concatenate([f.gpus(n) for n in take])
            if kind == "single":
                for i in gpus:
                    if rng.random() < 0.75:
                        a = -rng.uniform(0, 3e4) if rng.random() < 0.5 else rng.uniform(0, 0.5) * span
                        add("single", [i], a, span + 1 if rng.random() < 0.5 else a + rng.uniform(0.3, 0.9) * span)
                continue
            rep = int(rng.choice([1, 2, 4, f.boards[take[0]].gpus])) if kind == "serve" else 1
            t0 = -rng.uniform(600, 2e5)
            t1 = span + 1
            if rng.random() < 0.25 and len(take) < 6:  # ends within the case, another one follows
                t1 = rng.uniform(0.35, 0.8) * span
                follow = str(rng.choice(["train", "serve", "pipe"]))
                add(follow, gpus, t1 + rng.uniform(60, 1500), span + 1, rep if follow == "serve" else 1)
            elif rng.random() < 0.12:
                t0 = rng.uniform(0.02, 0.3) * span
            add(kind, gpus, t0, t1, rep)
    return jobs


def cut(jobs: list[Job], job: Job, t: float, without: set[int], again: float | None, node_of) -> Job | None:
    """End `job` at t; start it again at `again` without the nodes of `without`. Returns the new segment."""
    end, job.t1 = job.t1, t
    keep = np.array([node_of[i] not in without for i in job.gpus])
    if again is None or again > end - 300 or not keep.any():
        return None
    new = replace(
        job,
        id=job.id + "-r" if not job.id.isdigit() else str(int(job.id) + 700),
        gpus=job.gpus[keep],
        w=job.w[keep],
        t0=again,
        t1=end,
        root=job.root or job.id,
        seed=job.seed + 1,
    )
    jobs.append(new)
    return new


def duty(job: Job, groups: int, times: np.ndarray, dt: float) -> np.ndarray:
    """How busy each sync group wants to be, by step (groups x times): 1 is flat out. Services may ask for more."""
    rng = np.random.default_rng(job.seed)
    out = np.ones((groups, len(times)), np.float32)
    on = (times >= job.t0) & (times < job.t1)
    if job.kind in ("train", "pipe", "moe", "bench"):
        d = np.ones(len(times), np.float32)
        if job.kind != "bench":
            every, long = rng.uniform(500, 2400), rng.uniform(8, 70)  # checkpoints: 10 to 40 min apart
            d[((times + rng.uniform(0, every)) % every) < long] *= rng.uniform(0.02, 0.5)
            if rng.random() < 0.5:  # evaluation in between
                ev, lo = rng.uniform(1800, 5400), rng.uniform(60, 300)
                d[((times + rng.uniform(0, ev)) % ev) < lo] *= rng.uniform(0.5, 0.8)
            for t in rng.uniform(times[0], times[-1], rng.poisson(len(times) * dt / 5000)):  # short data stalls
                d[(times >= t) & (times < t + rng.exponential(25))] *= rng.uniform(0.1, 0.7)
        since = times - job.t0
        warm = rng.uniform(60, 240)  # load, compile, then go
        d = np.where(since < warm, d * np.where(since < 0.7 * warm, 0.03, 0.6), d).astype(np.float32)
        out *= d
    elif job.kind == "single":
        work, rest = rng.uniform(300, 3000), rng.uniform(0, 400)
        out *= np.where(((times + rng.uniform(0, work)) % (work + rest)) < work, rng.uniform(0.5, 1), 0.05)
    elif job.kind == "serve":
        base = rng.uniform(0.12, 0.85)
        slow = 1 + 0.25 * np.sin(2 * np.pi * (times / rng.uniform(9e3, 4e4) + rng.random()))
        a = np.exp(-dt / 40.0)
        noise = np.empty((groups, len(times)), np.float32)
        kick = rng.normal(0, np.sqrt(1 - a * a), (groups, len(times))).astype(np.float32)
        x = np.zeros(groups, np.float32)
        for k in range(len(times)):
            x = a * x + kick[:, k]
            noise[:, k] = x
        out *= base * slow * np.exp(0.22 * noise)
        for t in rng.uniform(times[0], times[-1], rng.poisson(2)):
            m = (times >= t) & (times < t + rng.uniform(60, 600))
            out[:, m] *= rng.uniform(1.2, 1.8)
    elif job.kind == "held":
        out *= 0
    for what, a, b, value in sorted(job.mods, key=lambda m: m[0] == "hang"):  # a hang beats all else
        m = (times >= a) & (times < b)
        if what == "scale":
            out[:, m] *= value
        elif what == "stutter":  # stalls of some seconds, over and over
            period, long, low = value
            out[:, m & ((times % period) < long)] *= low
        elif what == "hang":
            out[:, m] = -1.0  # marks it
    return out * on

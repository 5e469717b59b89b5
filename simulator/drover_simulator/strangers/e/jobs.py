"""Jobs over nodes and time: training, pipelines, experts, inference, bursts, comings and goings, held and idle GPUs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drover_simulator.strangers.e.boards import Array, Rng, Site, Small

Member = tuple[int, int | None]


@dataclass
class Label:
    """A line of labels.jsonl in seconds of the case, still without names."""

    kind: str
    cause: str
    members: list[Member]
    start: float
    end: float | None
    note: str
    hardware: bool = False
    severity: float = 1.0
    precursor: str | None = None
    precursor_start: float | None = None


@dataclass
class Job:
    """One job: `gpus` are (node, slot)."""

    kind: str
    gpus: list[tuple[int, int]]
    start: float
    end: float | None


@dataclass
class Load:
    """What is asked of each board; arrays (steps, nodes, slots)."""

    demand: Small  # share of time with work
    kernel: Small  # power of its kernels, 1: the hottest
    dram: Small
    bound: Small  # share of its work that follows the clock
    share: Small  # its part of a synchronous step, mean 1
    processes: Small
    memory: Small  # share of framebuffer
    job: Small  # index; the last means none
    jobs: list[Job] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    sync: list[bool] = field(default_factory=list)
    claimed: set[int] = field(default_factory=set)  # nodes that have a labelled idle fault


class Scheduler:
    """Fills a fleet with jobs."""

    def __init__(self, rng: Rng, site: Site, healthy: bool) -> None:
        """Begin with an idle fleet."""
        self.rng, self.site, self.healthy = rng, site, healthy
        shape = (site.steps, site.nodes, site.slots)
        self.t = np.arange(site.steps) * site.dt

        def full(value: float) -> Small:
            return np.full(shape, value, np.float32)

        self.load = Load(full(0), full(0.5), full(0.1), full(0.7), full(1), full(0), full(0.005), full(-1))

    def fill(self) -> Load:
        """Give each block of nodes a use for the whole case."""
        site, rng, n = self.site, self.rng, 0
        uses = ["train", "moe", "pipeline", "service", "burst", "churn", "night", "held", "single", "notebook"]
        chance = np.array([0.17, 0.06, 0.06, 0.17, 0.1, 0.16, 0.05, 0.15, 0.04, 0.04])
        turn = 0
        while n < site.nodes:
            use = str(rng.choice(uses, p=chance)) if turn else str(rng.choice(["train", "service"]))
            if self.healthy and use == "held":
                use = "notebook"
            size = int(rng.integers(2, 7)) if use in ("train", "moe", "pipeline") else int(rng.integers(1, 4))
            size = 1 if use in ("held", "notebook", "night", "single") else size
            block = list(range(n, min(site.nodes, n + size)))
            if len(block) == 1 and use in ("train", "moe", "pipeline"):
                use = "churn"
            getattr(self, f"_{use}")(block)
            n, turn = n + size, turn + 1
        load = self.load
        load.job[load.job < 0] = len(load.jobs)
        load.sync = [job.kind in ("train", "moe", "pipeline", "partial") for job in load.jobs]
        return load

    def put(self, kind: str, gpus: list[tuple[int, int]], start: float, end: float | None) -> tuple[slice, Any, Any]:
        """Enter a job; return the index of its part of the arrays."""
        load, site = self.load, self.site
        last = site.steps if end is None else site.step(end)
        a = np.array([n for n, _ in gpus])
        b = np.array([k for _, k in gpus])
        when = slice(site.step(start), last)
        load.job[when, a, b] = len(load.jobs)
        load.processes[when, a, b] = 1
        load.memory[when, a, b] = self.rng.uniform(0.5, 0.94)
        load.jobs.append(Job(kind, gpus, start, end))
        return when, a, b

    def gpus(self, block: list[int]) -> list[tuple[int, int]]:
        """All boards of some nodes."""
        return [(n, k) for n in block for k in range(self.site.slots)]

    def mark(self, kind: str, cause: str, job: Job, span: tuple[float, float | None], note: str) -> None:
        """Label a hard negative of a whole job."""
        nodes = sorted({n for n, _ in job.gpus})
        self.load.labels.append(Label(kind, cause, [(n, None) for n in nodes], span[0], span[1], note))

    def phases(self, when: slice) -> Array:
        """Demand of a training run: warm-up, evaluation, checkpoints, data stalls."""
        rng, t = self.rng, self.t[when] - self.t[when][0]
        level = np.full(len(t), rng.uniform(0.9, 0.99))
        level[t < rng.uniform(30, 240)] = 0.1  # loading
        every, long = rng.uniform(1200, 3600), rng.uniform(15, 90)
        level[(t % every) > every - long] = 0.03  # checkpoint
        if rng.random() < 0.5:
            every, long = rng.uniform(2400, 5400), rng.uniform(120, 420)
            level[(t % every) > every - long] = rng.uniform(0.4, 0.7)  # evaluation
        if rng.random() < 0.3:
            at = rng.uniform(0.2, 0.8) * t[-1]
            level[(t > at) & (t < at + rng.uniform(60, 900))] *= rng.uniform(0.3, 0.7)
        return level

    def _work(self, where: tuple[slice, Any, Any], demand: Array, kernel: float, dram: float) -> None:
        load = self.load
        demand = demand if demand.ndim == 2 else demand[:, None]
        load.demand[where] = demand
        load.kernel[where] = kernel
        load.dram[where] = dram
        load.bound[where] = float(np.clip(1.15 - dram, 0.3, 0.95))

    def _train(self, block: list[int], kind: str = "train") -> None:
        rng, site = self.rng, self.site
        cuts = [0.0, None] if rng.random() < 0.6 else [0.0, float(rng.uniform(0.3, 0.7)) * site.seconds, None]
        for start, end in itertools.pairwise(cuts):
            begin = (start or 0.0) + (rng.uniform(200, 1500) if start else 0.0)
            where = self.put(kind, self.gpus(block), begin, end)
            job = self.load.jobs[-1]
            kernel = float(rng.uniform(0.6, 1.0))
            self._work(where, self.phases(where[0]), kernel, float(rng.uniform(0.3, 0.7)))
            if kind == "pipeline":
                stage = np.exp(rng.normal(0, 0.07, len(block)))
                self.load.share[where] = np.repeat(stage, site.slots)[None, :]
            elif kind == "moe":
                self._experts(where, job)
            elif rng.random() < 0.3:
                at = site.step(begin + rng.uniform(0.3, 0.7) * ((end or site.seconds) - begin))
                hot = (slice(at, where[0].stop), where[1], where[2])
                self.load.kernel[hot] = min(1.1, kernel * float(rng.uniform(1.12, 1.35)))
                self.mark(
                    "thermal",
                    "hotter_kernel",
                    job,
                    (at * site.dt, at * site.dt + 2400),
                    "all ranks run a hotter kernel",
                )

    def _moe(self, block: list[int]) -> None:
        self._train(block, "moe")

    def _pipeline(self, block: list[int]) -> None:
        self._train(block, "pipeline")

    def _experts(self, where: tuple[slice, Any, Any], job: Job) -> None:
        rng = self.rng
        count, long = len(where[1]), where[0].stop - where[0].start
        fixed = rng.normal(0, 0.06, count)
        drift = np.cumsum(rng.normal(0, 1, (long // 60 + 2, count)), axis=0)
        drift = np.repeat(drift, 60, axis=0)[:long] * 0.006
        self.load.share[where] = np.exp(np.clip(fixed + drift, -0.3, 0.3))
        self.mark("straggler", "uneven_experts", job, (job.start, job.end), "experts differ by 6 % and wander")

    def _service(self, block: list[int]) -> None:
        """Inference: 20 to 40 % of the power limit, with a curve of traffic and replicas of a node or of some GPUs."""
        rng, site = self.rng, self.site
        for n in block:
            width = int(rng.choice([w for w in (2, 4, 8) if w <= site.slots]))
            for first in range(0, site.slots, width):
                gpus = [(n, k) for k in range(first, first + width)]
                where = self.put("service", gpus, 0.0, None)
                t = self.t
                wave = 1 + 0.35 * np.sin(t / rng.uniform(3000, 9000) + rng.uniform(0, 6))
                jitter = np.convolve(rng.normal(0, 1, len(t) + 11), np.ones(12) / 12, "valid")
                level = np.clip(rng.uniform(0.3, 0.6) * wave * (1 + 0.25 * jitter), 0.02, 1)
                self._work(where, level, float(rng.uniform(0.35, 0.55)), float(rng.uniform(0.5, 0.9)))
        if rng.random() < 0.4:
            at, long = rng.uniform(0.2, 0.7) * site.seconds, rng.uniform(600, 2400)
            when = slice(site.step(at), site.step(at + long))
            demand = self.load.demand[when, block[0] : block[-1] + 1]
            np.minimum(demand * 2.2, 1, out=demand)
            self.mark("thermal", "traffic_burst", self.load.jobs[-1], (at, at + long), "a service has a burst")

    def _burst(self, block: list[int]) -> None:
        """Full load for minutes, then little: batch inference, evolution of prompts, reinforcement learning."""
        rng = self.rng
        for n in block:
            where = self.put("burst", self.gpus([n]), 0.0, None)
            period, duty = rng.uniform(240, 1500), rng.uniform(0.3, 0.7)
            phase = (self.t / period + 0.15 * np.sin(self.t / 3100) + rng.random()) % 1
            level = np.where(phase < duty, rng.uniform(0.85, 1), rng.uniform(0.02, 0.15))
            self._work(where, level, float(rng.uniform(0.6, 1)), float(rng.uniform(0.3, 0.8)))

    def _churn(self, block: list[int]) -> None:
        """Jobs of 5 to 60 minutes on parts of a node, with gaps."""
        rng, site = self.rng, self.site
        for n in block:
            width = int(rng.choice([w for w in (1, 2, 4, 8) if w <= site.slots]))
            for first in range(0, site.slots, width):
                at = rng.uniform(0, 900)
                while at < site.seconds - 300:
                    end = at + float(np.exp(rng.uniform(np.log(300), np.log(3600))))
                    where = self.put("churn", [(n, k) for k in range(first, first + width)], at, min(end, site.seconds))
                    level = np.full(where[0].stop - where[0].start, rng.uniform(0.5, 1))
                    self._work(where, level, float(rng.uniform(0.3, 1)), float(rng.uniform(0.2, 0.8)))
                    at = end + rng.exponential(400) + 60

    def _single(self, block: list[int]) -> None:
        rng, site = self.rng, self.site
        for gpu in self.gpus(block):
            if rng.random() < 0.7:
                where = self.put("single", [gpu], 0.0, None)
                level = np.full(site.steps, rng.uniform(0.4, 1))
                self._work(where, level, float(rng.uniform(0.3, 0.95)), float(rng.uniform(0.2, 0.8)))

    def _night(self, block: list[int]) -> None:
        """Idle at P8 with no job; most start work in the last part."""
        site, rng = self.site, self.rng
        start = rng.uniform(0.5, 0.8) * site.seconds
        where = self.put("single", self.gpus(block), start, None)
        self._work(where, self.phases(where[0]), float(rng.uniform(0.6, 1)), 0.5)
        note = "idle, no job; then starts at full load"
        self.load.labels.append(
            Label("thermal", "idle_then_starts", [(block[0], None)], max(0.0, start - 1800), None, note)
        )

    def _notebook(self, block: list[int]) -> None:
        """Used by hand: minutes of work with pauses of up to 20 minutes. Not held: it is in use."""
        rng = self.rng
        where = self.put("notebook", self.gpus(block)[: int(rng.integers(1, self.site.slots + 1))], 0.0, None)
        level, at = np.zeros(self.site.steps), 0.0
        while at < self.site.seconds:
            long = rng.uniform(60, 700)
            level[self.site.step(at) : self.site.step(at + long)] = rng.uniform(0.2, 0.9)
            at += long + rng.uniform(120, 1200)
        self._work(where, level, 0.6, 0.4)
        self.mark("idle", "notebook_in_use", self.load.jobs[-1], (0.0, None), "notebook in use, pauses under 20 min")

    def _held(self, block: list[int]) -> None:
        """A job that holds GPUs and does nothing, in five ways."""
        rng, site = self.rng, self.site
        way = str(rng.choice(["from_start", "after_work", "hourly", "dead_service", "partial"]))
        begin = 0.0 if rng.random() < 0.5 else float(rng.uniform(300, 2400))
        count = site.slots if rng.random() < 0.6 else int(rng.integers(1, site.slots + 1))
        gpus = self.gpus(block)[: max(count, 2 if way == "partial" else 1)]
        where = self.put("partial" if way == "partial" else "held", gpus, begin, None)
        when, t, start, idle = where[0], self.t[where[0]], begin, gpus
        level: Array = np.zeros(len(t))
        if way == "after_work":
            start = begin + rng.uniform(900, 0.35 * site.seconds)
            level = np.where(t < start, self.phases(when), 0.0)
        elif way == "hourly":
            offset, every = rng.uniform(600, 3000), rng.uniform(3000, 4200)
            level = np.where((t - begin + offset) % every < rng.uniform(30, 75), rng.uniform(0.3, 1), 0.0)
        elif way == "dead_service":
            start = begin + rng.uniform(600, 0.3 * site.seconds)
            level = np.where(t < start, np.clip(rng.normal(0.4, 0.1, len(t)), 0.02, 1), 0.0)
            self.load.memory[where] = 0.9
        elif way == "partial":
            works = int(rng.integers(1, len(gpus)))
            idle = gpus[works:]
            level = np.multiply.outer(self.phases(when), np.arange(len(gpus)) < works)
        else:
            known = site.lists_jobs or "compute_processes" in site.columns
            self.load.memory[where] = float(rng.choice([0.006 if known else 0.1, 0.2, 0.6, 0.9]))
        self._work(where, level, float(rng.uniform(0.4, 0.95)), 0.5)
        if way == "partial":
            self.load.jobs[-1].kind = "held"
        members: list[Member] = [(n, k) for n, k in idle]
        note = f"{way}, {len(idle)} of {len(gpus)} GPUs of the job idle"
        self.load.labels.append(Label("idle", "held", members, float(start), None, note, hardware=True))
        self.load.claimed.add(block[0])

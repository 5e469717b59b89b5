"""Draw jobs that start, stop and overlap, and the work that each of their GPUs does by design.

Patterns: `data` (equal ranks), `tensor` (data parallel over nodes whose GPUs share every layer: much NVLink),
`pipeline` (stages of different work), `expert` (mixture of experts: more exchange; all experts are equal), `inference`
(independent replicas, with the day's rhythm). Mix, step parts and durations are assumed; sizes are powers of two, as in
schedulers of training clusters, up to 2,048 GPUs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from drover_simulator.hardware import Floats, Hardware, Ints
from drover_simulator.workload import Profile

LARGEST_JOB_NODES = 256
IDLE_SHARE = (0.02, 0.15)  # of a pool's nodes: no job starts once so few are free, but the last job may take these too
WARM_UP_S = (60.0, 600.0)  # loading and compiling: the job holds its GPUs, and no kernel runs
TRAINING = ("data", "tensor", "pipeline", "expert")


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a job. Arrays are aligned with `gpus` (indices over the fleet).

    Attributes:
        team: number of GPUs that step together (all of a training job, one replica of an inference job).
        warm_s: how long loading and compiling take.
        work: time of a step by design, relative to the slowest GPU (1).
        asks: field of `Profile` -> factor of each GPU.
        uneven: random spread of work from step to step.
        load: mean, daily swing and noise of an inference job's load.
    """

    id: str
    pattern: str
    start_s: float
    end_s: float
    nodes: tuple[int, ...]
    gpus: Ints
    team: int
    warm_s: float
    profile: Profile
    work: Floats
    asks: dict[str, Floats] = field(default_factory=dict)
    uneven: float = 0.0
    load: tuple[float, float, float] = (1.0, 0.0, 0.0)

    @property
    def trains(self) -> bool:
        return self.pattern in TRAINING

    def ready_s(self) -> float:
        return self.start_s + self.warm_s

    def again(self, id_: str, start_s: float, without: set[int], hardware: Hardware) -> Job | None:
        """Return the job's next attempt after a crash, on its nodes but `without`; None if none is left."""
        keep = ~np.isin(hardware.gpu_node[self.gpus], list(without))
        if not keep.any():
            return None
        nodes = tuple(n for n in self.nodes if n not in without)
        asks = {name: values[keep] for name, values in self.asks.items()}
        return replace(
            self, id=id_, start_s=start_s, nodes=nodes, gpus=self.gpus[keep], work=self.work[keep], asks=asks
        )


def draw_profile(rng: np.random.Generator, pattern: str, nodes: int) -> Profile:
    """Return the profile of a job; ranges are assumed, around those of `workload.draw_profile`."""
    u = rng.uniform
    many = nodes > 1
    memory, transfer, host = u(0.08, 0.22), u(0.01, 0.04), u(0.005, 0.03)
    exchange = u(0.10, 0.20) if pattern in ("tensor", "expert") else u(0.04, 0.12)
    if pattern == "inference":
        memory, exchange = u(0.40, 0.65), u(0.05, 0.12)
    sync = u(0.04, 0.15) if many else u(0.02, 0.05)
    return Profile(
        step_s=u(0.04, 0.12) if pattern == "inference" else u(0.6, 12.0),
        sync_share=0.01 if pattern == "inference" else sync,
        activity=u(0.35, 0.60) if pattern == "inference" else u(0.62, 0.95),
        tensor=u(0.08, 0.25) if pattern == "inference" else u(0.30, 0.60),
        dram=u(0.45, 0.75) if pattern == "inference" else u(0.25, 0.50),
        occupancy=u(0.15, 0.45),
        nvlink=u(0.15, 0.40) if pattern in ("tensor", "expert") else u(0.05, 0.20),
        network=u(0.10, 0.45) if many and pattern != "inference" else u(0.0, 0.02),
        pcie_bytes_per_s=u(0.8e9, 4e9),
        memory_fill=u(0.55, 0.97),
        checkpoint_every_s=1e12 if pattern == "inference" else u(600, 3600),
        checkpoint_s=0.0 if pattern == "inference" else u(4, 60),
        compute=1 - memory - exchange - transfer - host,
        memory=memory,
        exchange=exchange,
        transfer=transfer,
        host=host,
    )


def _stages(rng: np.random.Generator, nodes: int) -> tuple[Ints, Floats, dict[str, Floats]]:
    """Return the pipeline stage of each node, and per stage the work and the factors on the profile."""
    most = int(np.log2(nodes))
    count = 2 ** int(rng.integers(1, min(4, most) + 1))
    stage = (np.arange(nodes) * count // nodes) if rng.random() < 0.5 else (np.arange(nodes) % count)
    work = rng.uniform(0.90, 1.0, count)
    work[0] *= rng.uniform(0.80, 1.05)  # embeddings
    work[-1] *= rng.uniform(0.85, 1.15)  # head and loss
    asks = {name: np.ones(count) for name in ("tensor", "dram", "pcie_bytes_per_s", "network", "memory_fill")}
    asks["pcie_bytes_per_s"][0] *= rng.uniform(1.2, 2.5)
    asks["dram"][0] *= rng.uniform(1.0, 1.2)
    asks["tensor"][-1] *= rng.uniform(0.9, 1.1)
    asks["network"][[0, -1]] *= rng.uniform(0.5, 0.9)  # one neighbour instead of two
    asks["memory_fill"] *= np.linspace(1.0, rng.uniform(0.7, 0.95), count)  # early stages keep more activations
    return stage.astype(np.int64), work / work.max(), asks


def draw_job(
    rng: np.random.Generator, hardware: Hardware, id_: str, nodes: tuple[int, ...], start_s: float, end_s: float
) -> Job:
    """Return a job on these nodes, with a drawn pattern."""
    count = len(nodes)
    if count == 1:
        pattern = str(rng.choice(["data", "tensor", "inference"], p=[0.45, 0.25, 0.30]))
    else:
        pattern = str(rng.choice([*TRAINING, "inference"], p=[0.25, 0.20, 0.30, 0.12, 0.13]))
    gpus = np.concatenate([hardware.gpus_of(n) for n in nodes])
    if count == 1 and rng.random() < 0.12:
        gpus = gpus[: len(gpus) // 2]  # half a node; the other half stays free
    work, asks = np.ones(len(gpus)), {}
    if pattern == "pipeline":
        stage, of_stage, by_stage = _stages(rng, count)
        of_gpu = stage[np.searchsorted(nodes, hardware.gpu_node[gpus])]
        work = of_stage[of_gpu]
        asks = {name: values[of_gpu] for name, values in by_stage.items()}
    team = len(gpus)
    load = (1.0, 0.0, 0.0)
    if pattern == "inference":
        team = min(int(rng.choice([1, 2, 4, 8], p=[0.2, 0.15, 0.25, 0.4])), len(gpus))
        load = (float(rng.uniform(0.35, 0.75)), float(rng.uniform(0.05, 0.25)), float(rng.uniform(0.02, 0.10)))
    return Job(
        id_, pattern, start_s, end_s, nodes, gpus, team, float(rng.uniform(*WARM_UP_S)),
        draw_profile(rng, pattern, count), work, asks, float(rng.uniform(0.0, 0.02)), load,
    )  # fmt: skip


def draw_jobs(rng: np.random.Generator, hardware: Hardware, until_s: float) -> list[Job]:
    """Return all jobs of the fleet until `until_s`, in order of start; those running at 0 started before."""
    pools: dict[str, list[int]] = {}
    for n, node in enumerate(hardware.spec.nodes):
        pools.setdefault(node.pool, []).append(n)
    number = iter(range(int(rng.integers(10_000, 900_000)), 10_000_000))
    jobs = [job for nodes in pools.values() for job in _pool(rng, hardware, nodes, until_s, number)]
    return sorted(jobs, key=lambda job: job.start_s)


def _pool(
    rng: np.random.Generator, hardware: Hardware, nodes: list[int], until_s: float, number: Iterator[int]
) -> Iterator[Job]:
    free = sorted(nodes)
    idle = int(rng.uniform(*IDLE_SHARE) * len(nodes))
    ends: list[tuple[float, tuple[int, ...]]] = []
    at_s = -3600.0
    largest = min(LARGEST_JOB_NODES, 2 ** int(np.log2(max(1.0, 0.7 * len(nodes)))))
    first = True
    while at_s < until_s:
        while len(free) > idle:
            size = largest if first else 2 ** min(int(rng.geometric(0.28)) - 1, int(np.log2(largest)))
            if size > len(free):
                size = 2 ** int(np.log2(len(free)))
            first = False
            # Usually neighbours, as from schedulers; sometimes scattered nodes.
            taken = free[:size] if rng.random() < 0.85 else sorted(rng.choice(free, size, replace=False).tolist())
            free = [n for n in free if n not in set(taken)]
            wait_s = 0.0 if at_s < 0 else float(rng.uniform(20, 900))
            start_s = at_s + wait_s if at_s >= 0 else -float(rng.uniform(900, 6 * 3600))
            lasts_s = float(np.clip(rng.lognormal(9.1, 0.9), 1800, 48 * 3600))
            end_s = max(start_s, 0.0) + lasts_s
            yield draw_job(rng, hardware, str(next(number)), tuple(taken), start_s, end_s)
            heapq.heappush(ends, (end_s, tuple(taken)))
        if not ends:
            return
        at_s, back = heapq.heappop(ends)
        free = sorted([*free, *back])

"""Plan jobs: what a training job does with its GPUs, and which jobs hold which nodes when.

The nodes of a fleet are divided into groups that run one job after the other. So a seed's plan of all jobs is known
ahead (faults can target running jobs), and simulations of any length have the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from drover_core.model.fleet import FleetSpec, JobSpec


@dataclass(frozen=True, slots=True)
class Profile:
    """What one kind of training job asks of its GPUs. Shares and ratios are 0..1 at full speed."""

    step_s: float  # one step at full speed
    sync_share: float  # part of a step in which all exchange gradients and the optimizer runs
    activity: float  # dynamic power while computing, over the busiest kernel's
    tensor: float
    dram: float
    occupancy: float
    nvlink: float  # share of the NVLink bandwidth in use
    network: float  # share of the NIC's
    pcie_bytes_per_s: float
    memory_fill: float
    checkpoint_every_s: float
    checkpoint_s: float

    # Parts of a step's time at full speed, which grow when clock, HBM, NVLink, PCIe or host are slow.
    compute: float = 0.76
    memory: float = 0.12
    exchange: float = 0.09
    transfer: float = 0.02
    host: float = 0.01


NOTHING = Profile(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e12, 0.0)  # what an idle GPU runs


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job before it runs. Seconds count from the fleet's start; negative ones are before it."""

    id: str
    start_s: float
    end_s: float
    nodes: tuple[int, ...]
    profile: Profile
    gpus: tuple[int, ...] | None = None  # GPU indices; None: all GPUs of the nodes


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that run one job after the other; `idle` ones are idle before their first."""

    number: int
    nodes: tuple[int, ...]
    idle: bool


def draw_profile(rng: np.random.Generator, nodes: int) -> Profile:
    """Return the profile of a training job; larger ones communicate more."""
    return Profile(
        step_s=float(rng.uniform(0.6, 5.0)),
        sync_share=float(rng.uniform(0.04, 0.10)) if nodes > 1 else float(rng.uniform(0.02, 0.05)),
        activity=float(rng.uniform(0.70, 0.84)),
        tensor=float(rng.uniform(0.38, 0.56)),
        dram=float(rng.uniform(0.30, 0.48)),
        occupancy=float(rng.uniform(0.25, 0.45)),
        nvlink=float(rng.uniform(0.10, 0.28)),
        network=float(rng.uniform(0.15, 0.40)) if nodes > 1 else 0.0,
        pcie_bytes_per_s=float(rng.uniform(1.5e9, 4e9)),
        memory_fill=float(rng.uniform(0.72, 0.96)),
        checkpoint_every_s=float(rng.uniform(900, 2400)),
        checkpoint_s=float(rng.uniform(6, 15)),
    )


def group_nodes(spec: FleetSpec, seed: int) -> list[Group]:
    """Divide the fleet into groups: per pool and board half its nodes, a quarter, single nodes, a few idle.

    Pools beyond 256 nodes get several large groups, so that no job is larger than 128 nodes.
    """
    rng = np.random.default_rng([seed, 3])
    pools: dict[tuple[str, str], list[int]] = {}
    for n, node in enumerate(spec.nodes):
        if node.gpus:
            pools.setdefault((node.pool, node.sku), []).append(n)
    groups: list[Group] = []
    for nodes in pools.values():
        free = list(nodes)  # in the order of the file: jobs get neighbouring nodes, as from schedulers
        sizes: list[int] = []
        if len(free) >= 4:
            half = min(128, 2 ** int(np.log2(len(free) / 2)))
            sizes = [half] * max(1, len(free) // 2 // half)
            quarter = half // 2
            while quarter >= 2 and len(free) - sum(sizes) - quarter >= max(2, len(free) // 5):
                sizes.append(quarter)
                if len(sizes) % 2 == 0:
                    quarter //= 2
        for size in sizes:
            groups.append(Group(len(groups), tuple(free[:size]), False))
            free = free[size:]
        idle = set(rng.permutation(len(free))[: (3 * len(free) + 4) // 8].tolist()) if len(free) > 1 else set()
        for i, n in enumerate(free):
            groups.append(Group(len(groups), (n,), i in idle))
    return groups


def plan_group(group: Group, seed: int) -> Iterator[PlannedJob]:
    """Yield the jobs of one group, one after the other, without end."""
    rng = np.random.default_rng([seed, 4, group.number])
    if group.idle:
        start = float(rng.uniform(1800, 3 * 3600))
        end = start + float(rng.uniform(1800, 4 * 3600))
    else:
        start = -float(rng.uniform(1800, 6 * 3600))
        end = float(rng.uniform(3600, 8 * 3600))
    number = 1
    while True:
        profile = draw_profile(rng, len(group.nodes))
        yield PlannedJob(f"job-{group.number + 1}{number:03d}", start, end, group.nodes, profile)
        start = end + float(rng.uniform(120, 1200))
        end = start + float(np.clip(rng.lognormal(9.2, 0.7), 1800, 24 * 3600))
        number += 1


def planned_jobs(spec: FleetSpec, seed: int, until_s: float) -> list[tuple[Group, list[PlannedJob]]]:
    """Return all jobs per group that start before `until_s`."""
    result = []
    for group in group_nodes(spec, seed):
        jobs = []
        for job in plan_group(group, seed):
            if job.start_s >= until_s:
                break
            jobs.append(job)
        result.append((group, jobs))
    return result


def fixed_plan(jobs: list[JobSpec], spec: FleetSpec, start_ms: int, seed: int) -> list[PlannedJob]:
    """Return the plan of given jobs, with drawn profiles."""
    rng = np.random.default_rng([seed, 5])
    first: dict[str, int] = {}
    count = 0
    for node in spec.nodes:
        first[node.name] = count
        count += node.gpus
    number = {node.name: n for n, node in enumerate(spec.nodes)}
    result = []
    for job in jobs:
        nodes = tuple(sorted({number[name] for name, _ in job.members}))
        end_s = float("inf") if job.end_ms is None else (job.end_ms - start_ms) / 1000
        gpus = tuple(sorted(first[name] + slot for name, slot in job.members))
        profile = draw_profile(rng, len(nodes))
        result.append(PlannedJob(job.id, (job.start_ms - start_ms) / 1000, end_s, nodes, profile, gpus))
    return result


def restarted(job: PlannedJob, at_s: float, without: set[int]) -> PlannedJob | None:
    """Return the job after a crash, without the nodes in `without`; None if no node or no time is left."""
    nodes = tuple(n for n in job.nodes if n not in without)
    if not nodes or job.end_s - at_s < 600 or job.gpus is not None:
        return None
    base, _, attempt = job.id.partition("r")
    return replace(job, id=f"{base}r{int(attempt or 0) + 1}", start_s=at_s, nodes=nodes)

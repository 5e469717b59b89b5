"""Draw the faults of a simulation: the five of the demo, or a seeded mix for scoring."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from drover_core.model.fleet import FleetSpec
from drover_simulator.fault import Fault, FaultsError
from drover_simulator.kinds import KINDS, FaultKind
from drover_simulator.workload import Group, PlannedJob, planned_jobs

FAULTS_PER_NODE_HOUR = 0.2  # far above the field's rates: a case for scoring needs faults, not years
SETTLE_S = 300.0  # without a fault before a fault in a job's run, and after it
CRASH_PAUSE_S = 600.0  # after a crash: the scheduler starts the job again after about 4 minutes
TRIES = 60


def demo_faults(spec: FleetSpec, seed: int) -> list[Fault]:
    """Return five faults on five nodes within the first minute that do not hide each other; `seed` chooses GPUs.

    Raises:
        FaultsError: fewer than five nodes with GPUs.
    """
    rng = np.random.default_rng([seed, 8])
    plan = planned_jobs(spec, seed, 1.0)
    running = sorted(((g, j[0]) for g, j in plan if j and j[0].start_s <= 0), key=lambda p: -len(p[0].nodes))
    idle = [n for g, j in plan if not (j and j[0].start_s <= 0) for n in g.nodes]
    if len(idle) + sum(len(g.nodes) for g, _ in running) < 5:
        raise FaultsError("the demo's five faults need five nodes with GPUs; give more nodes, or --faults none")
    jobs = [list(group.nodes) for group, _ in running]  # the largest first
    used: set[int] = set()

    def pick(*choices: list[int]) -> int:
        """Return a free node of the first choice that has one."""
        for choice in choices:
            if free := [n for n in choice if n not in used]:
                node = int(rng.choice(free))
                used.add(node)
                return node
        raise FaultsError("the demo's five faults need a running job; give more nodes, or --faults none")

    everywhere = [*idle, *(n for job in reversed(jobs) for n in job)]
    single = [n for job in jobs[2:] if len(job) == 1 for n in job]
    straggler = pick(jobs[0])
    fallen = pick(*jobs[1:2], everywhere)
    cooling = pick(single, *jobs[2:], *jobs[1:2], everywhere)
    silent = pick(idle, single, everywhere)
    apart = [n for job in jobs[2:] for n in job]  # neither in the straggler's job nor in the one that crashes
    remap = pick(apart, idle, jobs[0], everywhere)

    def fault(kind: str, cause: str, node: int, start_s: float, severity: float, ramp_s: float = 0.0) -> Fault:
        name = spec.nodes[node]
        gpu = int(rng.integers(name.gpus)) if KINDS[kind, cause].scope == "gpu" else None
        return Fault(kind, cause, name.name, gpu, round(start_s, 1), None, severity, ramp_s)

    return [
        fault("thermal", "cooling", cooling, rng.uniform(15, 18), 1.8, 30.0),
        fault("straggler", "power_cap", straggler, rng.uniform(16, 26), 0.28),
        fault("xid", "fallen_off_bus", fallen, rng.uniform(24, 34), 1.0),
        fault("liveness", "silent", silent, rng.uniform(20, 40), 1.0),
        fault("memory", "row_remap_failure", remap, rng.uniform(34, 45), 1.0),
    ]


def draw_faults(spec: FleetSpec, hours: float, seed: int) -> list[Fault]:
    """Return faults of all kinds over `hours`, in order of start, with hard negatives, on jobs that run then.

    Faults on the same node or in the same job do not overlap, so that each can be scored alone.
    """
    rng = np.random.default_rng([seed, 9])
    end_s = hours * 3600
    plan = planned_jobs(spec, seed, end_s)
    if not plan:
        return []
    wanted = max(6, round(FAULTS_PER_NODE_HOUR * hours * len(spec.nodes)))
    calendar = _Calendar(spec, [group for group, _ in plan])
    weights = np.array([len(group.nodes) ** 0.5 for group, _ in plan])
    faults: list[Fault] = []
    for name, kind in _kinds(rng, wanted):
        for _ in range(TRIES):
            group, jobs = plan[int(rng.choice(len(plan), p=weights / weights.sum()))]
            fault = _attempt(rng, spec, name, kind, group, jobs, end_s)
            if fault is not None and calendar.book(fault, kind, group):
                faults.append(fault)
                break
    faults.sort(key=lambda f: f.start_s)
    return faults


def _kinds(rng: np.random.Generator, count: int) -> Iterator[tuple[tuple[str, str], FaultKind]]:
    """Yield `count` kinds: rounds of all of them in random order, each as often as its weight."""
    deck: list[tuple[tuple[str, str], FaultKind]] = []
    for _ in range(count):
        if not deck:
            once = [item for item in KINDS.items() for _ in range(item[1].weight)]
            deck = [once[i] for i in rng.permutation(len(once))]
        yield deck.pop()


def _attempt(
    rng: np.random.Generator,
    spec: FleetSpec,
    name: tuple[str, str],
    kind: FaultKind,
    group: Group,
    jobs: list[PlannedJob],
    end_s: float,
) -> Fault | None:
    duration = float(rng.uniform(*kind.duration_s))
    duration = min(duration, max(180.0, end_s * 0.35))  # a short case has shorter faults
    latest = end_s - duration - 60
    if latest <= SETTLE_S:
        latest = max(end_s - duration, 60.0)
    start = float(rng.uniform(min(SETTLE_S, latest * 0.5), latest))
    settle = min(SETTLE_S, start)
    meets = any(job.start_s <= start - settle and start + duration + 30 <= job.end_s for job in jobs)
    if kind.needs_job and not meets:
        return None
    if kind.scope == "node" and name[0] == "straggler" and len(group.nodes) < 2:
        return None  # in a job on one node all ranks are equally late, and none uses the network
    node = spec.nodes[int(rng.choice(group.nodes))]
    gpu = int(rng.integers(node.gpus)) if kind.scope == "gpu" else None
    severity = round(float(rng.uniform(*kind.severity)), 3)
    stop = round(start + duration, 1)
    return Fault(name[0], name[1], node.name, gpu, round(start, 1), stop, severity, kind.ramp_s)


class _Calendar:
    """The times in which each node has a fault or recovers from one."""

    def __init__(self, spec: FleetSpec, groups: list[Group]) -> None:
        self._spec = spec
        self._groups = groups
        self._taken: dict[str, list[tuple[float, float]]] = {}

    def book(self, fault: Fault, kind: FaultKind, group: Group) -> bool:
        """Book the nodes that the fault affects. Return False if one of them is not free."""
        names = {self._spec.nodes[n].name for n in group.nodes}
        if kind.scope == "rack":
            rack = self._spec.by_name[fault.node].rack
            members = [[self._spec.nodes[n] for n in other.nodes] for other in self._groups]
            names |= {node.name for nodes in members if any(m.rack == rack for m in nodes) for node in nodes}
        assert fault.end_s is not None
        begin, end = fault.start_s - SETTLE_S, fault.end_s + (CRASH_PAUSE_S if kind.ends_job else SETTLE_S)
        if any(begin < b and a < end for name in names for a, b in self._taken.get(name, [])):
            return False
        for name in names:
            self._taken.setdefault(name, []).append((fault.start_s, end))
        return True

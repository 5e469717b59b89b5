"""Step a simulated fleet in time: nodes, jobs, faults, and what its agents would read and send."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from drover_agent.sources.base import Reading
from drover_core.model.events import Event, EventKind, Member
from drover_core.model.fleet import FleetSpec, JobSpec, NodeSpec
from drover_core.times import iso
from drover_simulator.counters import Counters
from drover_simulator.effects import EFFECTS, Target
from drover_simulator.fault import Fault, Label
from drover_simulator.hardware import (
    Bools,
    Floats,
    Hardware,
    Ints,
    links_of,
)
from drover_simulator.kinds import KINDS
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import Physics
from drover_simulator.readings import ReadingMaker
from drover_simulator.sensors import Sensors
from drover_simulator.sku import A100, H100, H200
from drover_simulator.steps import Steps
from drover_simulator.workload import (
    PlannedJob,
    fixed_plan,
    group_nodes,
    plan_group,
    restarted,
)
from drover_simulator.xid_lines import xid_line

NODES_PER_RACK = 8
RACKS_PER_LEAF = 2
MIXED_FROM = 48  # nodes: larger fleets have pools of other boards too
LONGEST_STEP_S = 2.0  # longer steps are divided: duty, clock and heat act on each other within seconds
WARM_UP_S = 150.0  # ten thermal time constants
RESTART_AFTER_S = 180.0
DAY_RHYTHM_C = 1.2  # inlet, coolest at 3 and warmest at 15 UTC
DRIFT_C, DRIFT_TIME_S = 0.3, 900.0


def build_fleet(nodes: int, seed: int, gpus_per_node: int = 8) -> FleetSpec:
    """Return a fleet of `nodes` nodes in racks of 8, two racks under a leaf switch, one NIC port per GPU.

    Up to 47 nodes all have H100. The last racks of larger fleets, about an eighth each, have H200 and A100 in pools of
    their own. The layout depends on the size only; `seed` names the fleet.
    """
    racks = -(-nodes // NODES_PER_RACK)
    other = max(1, racks // 8) if nodes >= MIXED_FROM else 0  # racks of each other board
    result = []
    for n in range(nodes):
        rack = n // NODES_PER_RACK
        sku, pool = H100, "train"
        if rack >= racks - 2 * other:
            sku, pool = (A100, "a100") if rack >= racks - other else (H200, "h200")
        node = NodeSpec(
            name=f"r{rack + 1:02d}n{n % NODES_PER_RACK + 1:02d}",
            rack=f"r{rack + 1:02d}",
            leaf=f"leaf{rack // RACKS_PER_LEAF + 1:02d}",
            pool=pool,
            sku=sku.name,
            gpus=gpus_per_node,
        )
        result.append(node)
    nodes_with_links = (replace(node, links=links_of(node)) for node in result)
    return FleetSpec(tuple(nodes_with_links), (), f"simulated-{seed}")


@dataclass(slots=True)
class _Run:
    """A job that has started."""

    job: PlannedJob
    members: tuple[tuple[str, int], ...]
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Active:
    """A fault that is active now."""

    fault: Fault
    target: Target


class SimulatedFleet:
    """A fleet that steps from `start_ms` on. The same spec, seed, faults and steps give the same fleet.

    Attributes:
        now_s: seconds since the start. labels: ground truth of the faults that have begun.
        skipped: faults that did not happen, as they needed a running job and there was none.
        active: the present faults. closed: nodes that get no jobs. booting: nodes that are rebooting.
    """

    def __init__(
        self, spec: FleetSpec, seed: int, faults: list[Fault], start_ms: int, jobs: list[JobSpec] | None = None
    ) -> None:
        self.spec = spec
        self.start_ms = start_ms
        self.now_s = 0.0
        self.hardware = Hardware(spec, seed)
        self.modifiers = Modifiers(self.hardware)
        self.physics = Physics(self.hardware, seed)
        self.counters = Counters(self.hardware, seed)
        self.steps = Steps(self.hardware)
        self.labels: list[Label] = []
        self.skipped: list[Fault] = []
        self._sensors = Sensors(self.hardware, seed)
        self._rng = np.random.default_rng([seed, 10])
        self._seed = seed
        self._drift: Floats = np.zeros(len(self.hardware.racks))
        self._runs: dict[str, _Run] = {}
        self.active: list[Active] = []
        self._events: list[Event] = []
        self.closed: set[int] = set()  # nodes that a scheduler gives no work
        self.booting: set[int] = set()
        self._event_numbers = np.zeros(self.hardware.nodes, np.int64)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._readings: ReadingMaker | None = None
        if jobs is None:
            for group in group_nodes(spec, seed):
                self._follow(plan_group(group, seed))
        else:
            self._follow(iter(sorted(fixed_plan(jobs, spec, start_ms, seed), key=lambda job: job.start_s)))
        for number, fault in enumerate(sorted(faults, key=lambda f: f.start_s), 1):
            named = fault if fault.id else replace(fault, id=f"fault-{number:03d}")
            self.at(named.start_s, lambda fault=named, number=number: self._begin(fault, number))  # type: ignore[misc]  # mypy cannot infer lambda defaults
        self._warm_up()

    # What the fleet looks like now

    @property
    def now_ms(self) -> int:
        return self.start_ms + round(self.now_s * 1000)

    @property
    def jobs(self) -> list[JobSpec]:
        """All jobs that have started, with their ends if they ended."""
        return [
            JobSpec(
                run.job.id,
                self._ms(run.job.start_s),
                None if run.end_s is None else self._ms(run.end_s),
                run.members,
            )
            for run in self._runs.values()
        ]

    def faults_on(self, gpu: int) -> set[tuple[str, str]]:
        """Return kind and cause of the faults that a GPU has now."""
        return {(a.fault.kind, a.fault.cause) for a in self.active if gpu in a.target.gpus}

    def silent_nodes(self) -> set[str]:
        """Return the nodes that send nothing."""
        return {self.hardware.names[n] for n in np.flatnonzero(self.modifiers.silent)}

    def unreachable(self) -> Bools:
        """Return the GPUs without values, bool [G]: lost, on a node with a hung driver, or on a silent node."""
        node = self.hardware.gpu_node
        return np.asarray(self.modifiers.lost | self.modifiers.hung[node] | self.modifiers.silent[node])

    def gpu_columns(self) -> dict[str, Floats]:
        """Return catalog name -> float64 [G] at `now_ms`, NaN where absent."""
        return self._gpu_columns

    def node_columns(self) -> dict[str, Floats]:
        """Return catalog name -> float64 [N]."""
        return self._node_columns

    def link_columns(self) -> tuple[list[tuple[str, str]], dict[str, Floats]]:
        """Return the ports as (node, port), and catalog name -> float64 [L]."""
        return self.hardware.link_names, self._link_columns

    def take_events(self) -> list[Event]:
        """Return the events since the last call, of nodes that are not silent, in order of time."""
        events, self._events = self._events, []
        return events

    def readings(self) -> dict[str, Reading]:
        """Return what the agent of each node that is not silent has read, with the events since the last call."""
        if self._readings is None:
            self._readings = ReadingMaker(self.hardware)
        return self._readings.make(self)

    # Time

    def step(self, dt_s: float) -> None:
        """Advance by `dt_s` seconds and read all sensors once at the end."""
        parts = max(1, math.ceil(dt_s / LONGEST_STEP_S - 1e-9))
        for _ in range(parts):
            self._advance(dt_s / parts)
        self._measure(dt_s)

    def _advance(self, dt_s: float) -> None:
        self._run_due(self.now_s + dt_s)
        self.modifiers.reset()
        for active in self.active:
            fault, effect = active.fault, EFFECTS[active.fault.kind, active.fault.cause]
            gone = KINDS[fault.kind, fault.cause].scope == "job" and active.target.job not in self.steps.running
            if effect.during is not None and not gone:
                passed = self.now_s + dt_s - fault.start_s
                level = min(1.0, passed / fault.ramp_s) if fault.ramp_s > 0 else 1.0
                effect.during(self, fault, active.target, level, dt_s)
        for n in self.booting:
            self.modifiers.silent[n] = True
            self.modifiers.stopped[self.hardware.gpus_of(n)] = True
        inlet_c = self._inlet(dt_s)
        shares = self.steps.advance(self.now_s, dt_s, self.modifiers, self.physics)
        traffic = shares.main * self.steps.profile("dram") * shares.rate
        self.physics.advance(
            dt_s, shares.held, shares.main, shares.activity, shares.rest_activity, traffic, inlet_c, self.modifiers
        )
        network = self._sensors.network_bytes_per_s(shares, self.steps, self.modifiers)
        self.counters.advance(dt_s, network, self.modifiers.link_rate * ~self.modifiers.link_down)
        self._shares, self._inlet_c = shares, inlet_c
        self.now_s += dt_s

    def _measure(self, dt_s: float) -> None:
        gone, silent = self.unreachable(), self.modifiers.silent
        self._gpu_columns = self._sensors.gpu(self._shares, self.steps, self.physics, self.modifiers, self.counters)
        self._node_columns = self._sensors.node(dt_s, self._shares, self._inlet_c, self.modifiers, self.counters)
        self._link_columns = self._sensors.link(self.modifiers, self.counters)
        if gone.any():
            for values in self._gpu_columns.values():
                values[gone] = np.nan
        if silent.any():
            for values in self._node_columns.values():
                values[silent] = np.nan
            for values in self._link_columns.values():
                values[silent[self.hardware.link_node]] = np.nan

    def _warm_up(self) -> None:
        """Bring boards to the state that running jobs keep them in; time does not advance for anything else."""
        self._run_due(0.0)
        for _ in range(round(WARM_UP_S / LONGEST_STEP_S)):
            inlet_c = self._inlet(0.0)
            shares = self.steps.advance(0.0, LONGEST_STEP_S, self.modifiers, self.physics)
            self.physics.advance(
                LONGEST_STEP_S, shares.held, shares.main, shares.activity, shares.rest_activity,
                shares.main * self.steps.profile("dram"), inlet_c, self.modifiers,
            )  # fmt: skip
            self._shares, self._inlet_c = shares, inlet_c
        self._measure(0.0)

    def _inlet(self, dt_s: float) -> Floats:
        """Return the inlet temperature of each node: of its rack, with the time of day, a slow drift, and faults."""
        share = -math.expm1(-dt_s / DRIFT_TIME_S)
        noise = self._rng.standard_normal(len(self._drift))
        self._drift += -self._drift * share + DRIFT_C * math.sqrt(2 * share) * noise
        hour = (self.start_ms / 3_600_000 + self.now_s / 3600) % 24
        day = DAY_RHYTHM_C * math.sin((hour - 9) / 24 * 2 * math.pi)
        rack = self.hardware.rack_inlet_c + self._drift + day
        return np.asarray(rack[self.hardware.rack] + self.hardware.inlet_offset_c + self.modifiers.inlet_rise_c)

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Call `act` at a time, or in the next step if it has passed."""
        heapq.heappush(self._due, (at_s, next(self._order), act))

    def _run_due(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            heapq.heappop(self._due)[2]()

    def _ms(self, at_s: float) -> int:
        return self.start_ms + round(at_s * 1000)

    # Events

    def event(self, node: int, gpu: int | None, kind: EventKind, code: str, message: str, at_s: float) -> None:
        """Send an event at `at_s`, unless the node is silent then. `gpu` is an index over the fleet."""

        def send() -> None:
            if self.modifiers.silent[node]:
                return
            self._event_numbers[node] += 1
            name = self.hardware.names[node]
            slot = None if gpu is None else int(self.hardware.gpu_slot[gpu])
            number = int(self._event_numbers[node])
            self._events.append(
                Event(f"{name}/sim/{number}", self._ms(at_s), name, slot, kind, code, message, source="simulation")
            )

        self.at(at_s, send)

    def xid(self, gpu: int, xid: int, at_s: float, after: int = 0) -> None:
        """Write an XID line to a node's kernel log."""
        slot = int(self.hardware.gpu_slot[gpu])
        line = xid_line(xid, self.hardware.pci(gpu), slot, pid=4000 + slot * 37 + int(at_s) % 20000, after=after)
        self.event(int(self.hardware.gpu_node[gpu]), gpu, EventKind.XID, str(xid), line, at_s)

    # Jobs

    def _follow(self, plan: Iterator[PlannedJob]) -> None:
        """Schedule the next job of a plan, and at its start the following one."""
        job = next(plan, None)
        if job is None:
            return

        def start() -> None:
            self._start(job)
            self._follow(plan)

        self.at(job.start_s, start)

    def _start(self, planned: PlannedJob) -> None:
        without = self._faulty_nodes()
        nodes = tuple(n for n in planned.nodes if n not in without)
        if not nodes:
            return
        job = planned if planned.gpus is not None else replace(planned, nodes=nodes)
        self.steps.start(job)
        gpus = self.steps.gpus_of(job.id)
        members = tuple((self.hardware.names[self.hardware.gpu_node[g]], int(self.hardware.gpu_slot[g])) for g in gpus)
        self._runs[job.id] = _Run(job, members)
        if math.isfinite(job.end_s):
            self.at(job.end_s, lambda: self.end_job(job.id, job.end_s))

    def end_job(self, job_id: str, at_s: float) -> None:
        if job_id in self.steps.running:
            self.steps.end(job_id)
            self._runs[job_id].end_s = at_s

    def crash(self, job_id: str | None, at_s: float, xids: tuple[int, ...]) -> None:
        """Crash a job at `at_s`: one GPU of each of its nodes shows one of `xids`. The job starts again later."""
        if job_id is None:
            return

        def end() -> None:
            if job_id not in self.steps.running:
                return
            job = self.steps.running[job_id]
            for n in job.nodes if xids else ():
                alive = [g for g in self.hardware.gpus_of(n) if not self.modifiers.lost[g]]
                if alive:
                    code = int(self._rng.choice(xids))
                    self.xid(int(self._rng.choice(alive)), code, at_s + float(self._rng.uniform(0, 1.5)))
            self.end_job(job_id, at_s)
            self.at(at_s + RESTART_AFTER_S, lambda: self.start_again(job, at_s + RESTART_AFTER_S))

        self.at(at_s, end)

    def start_again(self, job: PlannedJob, at_s: float) -> None:
        again = restarted(job, at_s, self._faulty_nodes())
        if again is not None:
            self._start(again)

    def _faulty_nodes(self) -> set[int]:
        """Return the nodes that the scheduler does not use now."""
        return self.closed | {
            int(n)
            for active in self.active
            if (kind := KINDS[active.fault.kind, active.fault.cause]).ends_job and kind.hardware
            for n in active.target.nodes
        }

    # Faults

    def _begin(self, fault: Fault, number: int) -> None:
        kind = KINDS[fault.kind, fault.cause]
        target = self._target(fault, number)
        if kind.needs_job and target.job is None:
            self.skipped.append(fault)
            return
        active = Active(fault, target)
        self.active.append(active)
        self.labels.append(self._label(fault, target))
        effect = EFFECTS[fault.kind, fault.cause]
        if effect.begin is not None:
            effect.begin(self, fault, target)
        if fault.end_s is not None:
            self.at(fault.end_s, lambda: self._repair(active))

    def _repair(self, active: Active) -> None:
        if active not in self.active:  # a boot or a reset has cured it
            return
        self.active.remove(active)
        effect = EFFECTS[active.fault.kind, active.fault.cause]
        if effect.end is not None:
            effect.end(self, active.fault, active.target)

    def _target(self, fault: Fault, number: int) -> Target:
        hw = self.hardware
        n = hw.number[fault.node]
        scope = KINDS[fault.kind, fault.cause].scope
        first = int(hw.first_gpu[n]) + (fault.gpu or 0)
        job = self.steps.job_at(first) if hw.spec.nodes[n].gpus else None
        gpus: Ints
        if scope == "gpu":
            gpus, nodes = np.array([first]), np.array([n])
        elif scope == "rack":
            nodes = np.flatnonzero(hw.rack == hw.rack[n])
            gpus = np.flatnonzero(np.isin(hw.gpu_node, nodes))
            jobs = [name for g in gpus if (name := self.steps.job_at(int(g)))]
            job = jobs[0] if jobs else None
        elif scope == "job" and job is not None:
            gpus = self.steps.gpus_of(job)
            nodes = np.unique(hw.gpu_node[gpus])
        else:
            gpus, nodes = hw.gpus_of(n), np.array([n])
        links = np.flatnonzero(np.isin(hw.link_node, nodes))
        rng = np.random.default_rng([self._seed, 11, number])
        return Target(gpus, nodes, np.roll(links, -int(rng.integers(max(1, len(links))))), job, rng)

    def _label(self, fault: Fault, target: Target) -> Label:
        kind = KINDS[fault.kind, fault.cause]
        members: tuple[Member, ...]
        if kind.scope == "gpu":
            members = ((fault.node, fault.gpu),)
        else:
            members = tuple((self.hardware.names[n], None) for n in target.nodes)
        end = None if fault.end_s is None else iso(self._ms(fault.end_s))
        start = iso(self._ms(fault.start_s))
        return Label(
            fault.id, fault.kind, fault.node, fault.gpu, start, end, fault.cause, kind.hardware, kind.scope, members
        )

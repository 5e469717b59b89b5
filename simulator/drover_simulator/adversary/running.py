"""Run an adversary's fleet step by step, and return what arrives of it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from drover_core.model.events import Event, EventKind
from drover_simulator.adversary.effects import DURING
from drover_simulator.adversary.jobs import Job
from drover_simulator.adversary.onsets import BEGIN, END
from drover_simulator.adversary.realism import Realism, TelemetryLosses
from drover_simulator.adversary.teams import Teams
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.counters import Counters
from drover_simulator.fleet import DAY_RHYTHM_C, DRIFT_C, DRIFT_TIME_S
from drover_simulator.hardware import Bools, Floats, Hardware, Ints
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import APPLICATION_CLOCKS, Physics
from drover_simulator.sensors import Sensors
from drover_simulator.steps import Shares
from drover_simulator.xid_lines import xid_line

LONGEST_STEP_S = 10.0  # of the physics; runs with ticks of a minute and more take one step a tick
WARM_UP_STEPS = 15
PCIE_SLEEPS, PCIE_ASLEEP = {"A100-SXM"}, 1.0  # boards whose link drops to this generation while they rest
TELEMETRY_DELAY_MS = (50, 3000)  # from a line in the kernel log to the collector
LATE_CLOCK_S = 15.0  # with a clock that is wrong by more, a node's rows miss their buckets
FAN_RPM = 12_000.0


class RunPlan(Protocol):
    """What a run reads of its fleet. `crashes`: number of a job that crashes -> XIDs that its nodes show."""

    @property
    def seed(self) -> int: ...

    @property
    def start_ms(self) -> int: ...

    @property
    def hardware(self) -> Hardware: ...

    @property
    def realism(self) -> Realism: ...

    @property
    def jobs(self) -> Sequence[Job]: ...

    @property
    def troubles(self) -> Sequence[Trouble]: ...

    @property
    def crashes(self) -> Mapping[int, tuple[int, ...]]: ...


@dataclass(frozen=True, slots=True)
class Tick:
    """What arrived of one interval; unpacks as (ts_ms, gpu, node, link, events).

    Attributes:
        gpu, node, link: catalog name -> float64 [G], [N], [L] in catalog units, NaN where absent.
        gpu_present, node_present, link_present: bool [G], [N], [L]; rows that arrived.
    """

    ts_ms: int
    gpu: dict[str, Floats]
    node: dict[str, Floats]
    link: dict[str, Floats]
    events: list[Event]
    gpu_present: Bools
    node_present: Bools
    link_present: Bools

    def __iter__(self) -> Iterator[object]:
        return iter((self.ts_ms, self.gpu, self.node, self.link, self.events))


class AdversaryRun:
    """One run through a fleet. Effects may change `modifiers`, `counters`, `node_facts` and `skew_s`."""

    def __init__(self, fleet: RunPlan) -> None:
        self.fleet, self.hw = fleet, fleet.hardware
        self.rng = np.random.default_rng([fleet.seed, 101])
        self.modifiers = Modifiers(self.hw)
        self.physics = Physics(self.hw, fleet.seed)
        self.counters = Counters(self.hw, fleet.seed)
        self.teams = Teams(self.hw, fleet.jobs, np.random.default_rng([fleet.seed, 102]))
        self.now_s = 0.0
        self.inlet_c: Floats = np.full(self.hw.nodes, 25.0)
        self.skew_s: Floats = fleet.realism.skew_s.copy()
        self.node_facts: dict[str, Floats] = {}
        self._sensors = Sensors(self.hw, fleet.seed)
        self._losses = TelemetryLosses(fleet.realism, self.hw, np.random.default_rng([fleet.seed, 103]))
        of_node = np.array([sku.name in PCIE_SLEEPS for sku in self.hw.sku_of_node], np.bool_)
        self._sleeps: Bools = of_node[self.hw.gpu_node]
        self._drift: Floats = np.zeros(len(self.hw.racks))
        self._fan: Floats = FAN_RPM * (1 + 0.03 * self.rng.standard_normal(self.hw.nodes))
        self._shown: list[tuple[str, str, Ints, Floats]] = []
        self._hidden: list[Ints] = []
        self._full_memory_clock: list[Ints] = []
        self._active: dict[str, Trouble] = {}
        self._events: list[tuple[float, int, int, Event]] = []
        self._number = count()
        self._order = count()
        self._due: list[tuple[float, int, str, object]] = []
        self._before: list[dict[str, Floats]] = []
        for j, job in enumerate(fleet.jobs):
            self._at(job.start_s, "start", j)
            self._at(job.end_s, "end", j)
        for trouble in fleet.troubles:
            self._at(trouble.start_s, "trouble", trouble)
            self._at(trouble.end_s, "repair", trouble)
        self._warm_up()

    def _at(self, at_s: float, what: str, which: object) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), what, which))

    # What effects call

    def show(self, scope: str, metric: str, index: Ints, values: Floats) -> None:
        """Override what a sensor shows in this step; boards without the sensor ignore it."""
        self._shown.append((scope, metric, index, values))

    def hide_setting(self, gpus: Ints) -> None:
        """Hide the driver's reason for the lower clock of these GPUs."""
        self._hidden.append(gpus)

    def keep_memory_clock(self, gpus: Ints) -> None:
        """Show the usual memory clock of these GPUs although their memory is slow."""
        self._full_memory_clock.append(gpus)

    def event(self, node: int, gpu: int | None, kind: EventKind, code: str, message: str, at_s: float) -> None:
        """Send an event at `at_s`, stamped with the node's own clock. `gpu` is an index over the fleet."""
        name, slot = self.hw.names[node], None if gpu is None else int(self.hw.gpu_slot[gpu])
        true_ms = self.fleet.start_ms + round(at_s * 1000)
        number = next(self._number)
        delay_ms = int(self.rng.integers(*TELEMETRY_DELAY_MS))
        event = Event(
            f"{name}/sim/{number}", true_ms + round(float(self.skew_s[node]) * 1000), name, slot, kind, code, message,
            source="simulation", received_ms=true_ms + delay_ms,
        )  # fmt: skip
        heapq.heappush(self._events, (at_s + delay_ms / 1000, number, node, event))

    def xid(self, gpu: int, xid: int, at_s: float, after: int = 0) -> None:
        """Write an XID line to a node's kernel log."""
        slot = int(self.hw.gpu_slot[gpu])
        line = xid_line(xid, self.hw.pci(gpu), slot, pid=4000 + slot * 37 + int(at_s) % 20000, after=after)
        self.event(int(self.hw.gpu_node[gpu]), gpu, EventKind.XID, str(xid), line, at_s)

    # Time

    def ticks(self, interval_ms: int, ticks: int) -> Iterator[Tick]:
        dt_s = interval_ms / 1000
        parts = max(1, math.ceil(dt_s / LONGEST_STEP_S - 1e-9)) if dt_s < 60 else 1
        for number in range(1, ticks + 1):
            for _ in range(parts):
                self._advance(dt_s / parts)
            yield self._measure(self.fleet.start_ms + number * interval_ms, dt_s)

    def _advance(self, dt_s: float) -> None:
        self._run_due(self.now_s + dt_s)
        self.teams.settle()
        self.modifiers.reset()
        self._shown, self._hidden, self._full_memory_clock = [], [], []
        nodes = self.hw.nodes
        self.node_facts = {
            "fans_failed": np.zeros(nodes), "fan_min_rpm": self._fan.copy(), "disk_write_bytes_per_s": np.zeros(nodes)
        }  # fmt: skip
        hour = (self.fleet.start_ms / 3_600_000 + self.now_s / 3600) % 24
        self.modifiers.work *= self.teams.work * self.teams.wander(dt_s)
        self.modifiers.running *= self.teams.load(self.now_s, dt_s, hour)
        self.skew_s = self.fleet.realism.skew_s.copy()
        middle_s = self.now_s + dt_s / 2
        for trouble in self._active.values():
            during = DURING.get(trouble.name)
            if during is not None and (trouble.job is None or trouble.job in self.teams.held_by):
                level = trouble.level(middle_s)
                if level > 0:
                    during(self, trouble, level, dt_s)
        self._inlets(dt_s, hour)
        shares = self._shares_for(dt_s)
        network = self._sensors.network_bytes_per_s(shares, self.teams, self.modifiers)
        self.counters.advance(dt_s, network, self.modifiers.link_rate * ~self.modifiers.link_down)
        self.now_s += dt_s
        self._shares = shares

    def _shares_for(self, dt_s: float) -> Shares:
        shares = self.teams.advance(self.now_s, dt_s, self.modifiers, self.physics)
        traffic = shares.main * self.teams.profile("dram") * shares.rate
        self.physics.advance(
            dt_s, shares.held, shares.main, shares.activity, shares.rest_activity, traffic, self.inlet_c, self.modifiers
        )
        return shares

    def _warm_up(self) -> None:
        """Bring the boards to the state that the jobs running at 0 keep them in."""
        self._run_due(0.0)
        self.teams.settle()
        self._inlets(0.0, self.fleet.start_ms / 3_600_000 % 24)
        for _ in range(WARM_UP_STEPS):
            self._shares_for(LONGEST_STEP_S)

    def _inlets(self, dt_s: float, hour: float) -> None:
        share = -math.expm1(-dt_s / DRIFT_TIME_S)
        noise = self.rng.standard_normal(len(self._drift))
        self._drift += -self._drift * share + DRIFT_C * math.sqrt(2 * share) * noise
        rack = self.hw.rack_inlet_c + self._drift + DAY_RHYTHM_C * math.sin((hour - 9) / 24 * 2 * math.pi)
        self.inlet_c = rack[self.hw.rack] + self.hw.inlet_offset_c + self.modifiers.inlet_rise_c

    def _run_due(self, until_s: float) -> None:
        """Start and end the jobs, and begin and repair the troubles, that are due."""
        while self._due and self._due[0][0] <= until_s:
            _, _, what, which = heapq.heappop(self._due)
            if isinstance(which, Trouble):
                if what == "trouble":
                    self._active[which.id] = which
                    if which.name in BEGIN:
                        BEGIN[which.name](self, which)
                elif self._active.pop(which.id, None) is not None and which.name in END:
                    END[which.name](self, which)
            elif isinstance(which, int):
                if what == "start":
                    self.teams.begin(which)
                else:
                    self._end(which)

    def _end(self, number: int) -> None:
        """End a job; if it crashes, one GPU of each of its nodes shows an XID."""
        job = self.fleet.jobs[number]
        self.teams.finish(number)
        for n in job.nodes if number in self.fleet.crashes else ():
            alive = [g for g in self.hw.gpus_of(n) if not self.modifiers.lost[g]]
            if alive and not self.modifiers.silent[n]:
                code = int(self.rng.choice(self.fleet.crashes[number]))
                self.xid(int(self.rng.choice(alive)), code, job.end_s + float(self.rng.uniform(0, 1.5)))

    # What arrives

    def _measure(self, ts_ms: int, dt_s: float) -> Tick:
        m, hw = self.modifiers, self.hw
        gpu = self._sensors.gpu(self._shares, self.teams, self.physics, m, self.counters)
        node = self._sensors.node(dt_s, self._shares, self.inlet_c, m, self.counters)
        link = self._sensors.link(m, self.counters)
        self._correct(gpu, node)
        self._losses.blur(gpu, self._shares)
        lost, late = self._losses.cut(gpu, node, link)
        wrong_s = np.abs(self.skew_s)
        silent = m.silent | lost | late | (wrong_s > LATE_CLOCK_S)
        self._lag(gpu, node, link, (wrong_s > 5.0) & ~silent)
        node_present = ~silent
        gpu_present = ~(m.lost | m.hung[hw.gpu_node] | silent[hw.gpu_node])
        link_present = ~silent[hw.link_node]
        for columns, present in ((gpu, gpu_present), (node, node_present), (link, link_present)):
            if not present.all():
                for values in columns.values():
                    values[~present] = np.nan
        return Tick(ts_ms, gpu, node, link, self._arrived(), gpu_present, node_present, link_present)

    def _correct(self, gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
        for gpus in self._hidden:
            known = gpus[~np.isnan(gpu["clock_event_reasons"][gpus])]
            reasons = gpu["clock_event_reasons"][known].astype(np.int64) & ~APPLICATION_CLOCKS
            gpu["clock_event_reasons"][known] = reasons
        for gpus in self._full_memory_clock:
            known = gpus[~np.isnan(gpu["memory_clock_mhz"][gpus])]
            gpu["memory_clock_mhz"][known] = self.hw.memory_clock_mhz[known]
        asleep = (gpu["gpu_util_ratio"] < 0.01) & self._sleeps & ~np.isnan(gpu["pcie_generation"])
        gpu["pcie_generation"][asleep] = PCIE_ASLEEP
        for scope, metric, index, values in self._shown:
            columns = gpu if scope == "gpu" else node
            if metric in columns:
                known = ~np.isnan(columns[metric][index])
                columns[metric][index[known]] = values[known]
        node["disk_write_bytes_per_s"] = node["disk_write_bytes_per_s"] + self.node_facts["disk_write_bytes_per_s"]
        node["fans_failed"] = self.node_facts["fans_failed"]
        node["fan_min_rpm"] = np.round(self.node_facts["fan_min_rpm"] / 60) * 60
        node["clock_offset_s"] = np.round(self.skew_s + 0.0005 * self.rng.standard_normal(self.hw.nodes), 6)

    def _lag(self, gpu: dict[str, Floats], node: dict[str, Floats], link: dict[str, Floats], nodes: Bools) -> None:
        """Give nodes whose clock is behind their rows of the last tick: those fall into this bucket."""
        if not nodes.any():
            self._before = []
            return
        kept = [{name: values.copy() for name, values in columns.items()} for columns in (gpu, node, link)]
        places = (nodes[self.hw.gpu_node], nodes, nodes[self.hw.link_node])
        for columns, before, where in zip((gpu, node, link), self._before or kept, places, strict=True):
            for name, values in columns.items():
                values[where] = before[name][where]
        self._before = kept

    def _arrived(self) -> list[Event]:
        result = []
        while self._events and self._events[0][0] <= self.now_s:
            _, _, node, event = heapq.heappop(self._events)
            if not self.modifiers.silent[node] or event.code.startswith("agent_"):
                result.append(event)  # an agent's stop and start are sent before and after the silence
        return result

"""Divide each step of the simulation into shares of time that the GPUs of synchronous jobs spend in each phase.

Within a job every GPU computes for a time that depends on its clock, memory, links and host, then waits in a collective
for the slowest, layer by layer: its wait is spread over the step. At the end of a training step all GPUs exchange
gradients. So a slow GPU lowers the duty of all its peers, which keep the collective's kernel running and show 100 %
utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drover_simulator.hardware import (
    Bools,
    Floats,
    Hardware,
    Ints,
)
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import Physics
from drover_simulator.workload import NOTHING, PlannedJob

WAIT_ACTIVITY = 0.18  # dynamic power of a kernel that spins in a collective
SYNC_ACTIVITY = 0.30
HOST_ACTIVITY = 0.02  # held, no kernel
PARTS = ("compute", "memory", "exchange", "transfer", "host")
FIELDS = (
    "step_s", "sync_share", "activity", "tensor", "dram", "occupancy", "nvlink", "network", "pcie_bytes_per_s",
    "memory_fill", "checkpoint_every_s", "checkpoint_s", *PARTS,
)  # fmt: skip


@dataclass(slots=True)
class Shares:
    """How the GPUs spent the step, float64 [G] unless noted.

    Attributes:
        held: bool, a job holds the GPU. main: computing and waiting layer by layer; sync: the exchange at a step's end;
        spin: waiting in a collective for a rank that has stopped. The rest to 1 is time without a kernel.
        duty: part of main in which this GPU computes; tensor_duty: its busy SM cycles over those at full speed;
        gap: part of main without a kernel (host or PCIe is late); rate: steps per time over those at full speed;
        activity, rest_activity: for the physics; checkpoint: share of time in which one is written.
    """

    held: Bools
    main: Floats
    sync: Floats
    spin: Floats
    duty: Floats
    tensor_duty: Floats
    gap: Floats
    rate: Floats
    activity: Floats
    rest_activity: Floats
    checkpoint: Floats


class Steps:
    """The running jobs of a fleet. J jobs; index J stands for idle GPUs."""

    def __init__(self, hardware: Hardware) -> None:
        self._hw = hardware
        self.running: dict[str, PlannedJob] = {}
        self.job_of: Ints = np.zeros(hardware.gpus, np.int64)
        self._names: list[str] = []
        self._phases: Floats = np.zeros(0)  # how far each job is in its training step, 0..1
        self._lay_out()

    def start(self, job: PlannedJob) -> None:
        self.running[job.id] = job
        self._lay_out()

    def end(self, job_id: str) -> None:
        del self.running[job_id]
        self._lay_out()

    def gpus_of(self, job_id: str) -> Ints:
        """Return the GPU indices that a running job holds."""
        job = self.running[job_id]
        if job.gpus is not None:
            return np.array(job.gpus, np.int64)
        return np.concatenate([self._hw.gpus_of(n) for n in job.nodes])

    def job_at(self, gpu: int) -> str | None:
        """Return the job that holds a GPU."""
        j = int(self.job_of[gpu])
        return self._names[j] if j < len(self._names) else None

    def name_of(self, number: int) -> str | None:
        return self._names[number] if number < len(self._names) else None

    def profile(self, field: str) -> Floats:
        """Return a field of the profile of each GPU's job, float64 [G]; 0 without a job."""
        return self._fields[field][self.job_of]

    def _lay_out(self) -> None:
        """Build the arrays per job and GPU, after a job started or ended."""
        phases = dict(zip(self._names, self._phases.tolist(), strict=True))
        self._names = list(self.running)
        profiles = [job.profile for job in self.running.values()]
        self._fields = {name: np.array([getattr(p, name) for p in [*profiles, NOTHING]]) for name in FIELDS}
        self.job_of = np.full(self._hw.gpus, len(self._names), np.int64)
        for j, name in enumerate(self._names):
            self.job_of[self.gpus_of(name)] = j
        self._phases = np.array([phases.get(name, 0.0) for name in self._names])
        self._order = np.argsort(self.job_of, kind="stable")
        self._starts = np.searchsorted(self.job_of[self._order], np.arange(len(self._names)))
        self._held = self.job_of < len(self._names)
        self._start_s = np.array([job.start_s for job in self.running.values()] + [0.0])

    def _worst(self, values: Floats) -> Floats:
        """Return the largest value of each job's GPUs, float64 [J + 1]; 1 for idle GPUs."""
        result = np.ones(len(self._names) + 1)
        if self._names:
            members = values[self._order][: int(self._held.sum())]
            result[:-1] = np.maximum.reduceat(members, self._starts)
        return result

    def advance(self, now_s: float, dt_s: float, modifiers: Modifiers, physics: Physics) -> Shares:
        """Return the shares of the step from `now_s` for `dt_s`, with the clocks that the physics allows."""
        job, held = self.job_of, self._held
        fields = {name: self.profile(name) for name in (*PARTS, "activity")}
        late = fields["transfer"] / np.maximum(modifiers.pcie_speed(), 1e-3) + fields["host"] * modifiers.host_time
        on_time = fields["transfer"] + fields["host"]
        other = (
            fields["memory"] / np.maximum(modifiers.memory_speed, 0.05)
            + fields["exchange"] / np.maximum(modifiers.nvlink_speed, 0.05)
            + late
        )
        clock = np.maximum(physics.clock, 0.105)
        activity = fields["activity"]
        for _ in range(2):  # clock and duty depend on each other: two rounds from the last clock are enough
            time = modifiers.work * (fields["compute"] / (clock * self._hw.speed) + other)
            slowest = self._worst(time)[job]
            duty = time / slowest
            gap = np.clip(modifiers.work * (late - on_time) / slowest, 0.0, 0.95)
            busy = modifiers.work / (clock * self._hw.speed * slowest)
            activity = fields["activity"] * (0.8 * busy + 0.2 * (duty - gap)) + WAIT_ACTIVITY * (1 - duty) * held
            clock = physics.clock_for(activity, held, modifiers)

        running, stopped, checkpoint = self._modes(now_s, dt_s, modifiers)
        main_share = self._phase_share(dt_s, slowest, modifiers, running)
        main = main_share[job] * running[job] * held
        sync = (1 - main_share[job]) * running[job] * held
        spin = stopped[job] * held * ~modifiers.stopped
        rest = np.maximum(1 - main, 1e-9)
        rest_activity = np.where(held, (sync * SYNC_ACTIVITY + spin * WAIT_ACTIVITY) / rest + HOST_ACTIVITY, 0.0)
        return Shares(
            held, main, sync, spin, duty, busy, gap, 1 / slowest, activity, rest_activity, checkpoint[job] * held
        )  # fmt: skip

    def _modes(self, now_s: float, dt_s: float, modifiers: Modifiers) -> tuple[Floats, Floats, Floats]:
        """Return per job: share of the step in which it runs; 1 if a rank has stopped; share in a checkpoint."""
        stopped = self._worst((modifiers.stopped | modifiers.deadlocked).astype(np.float64))
        stopped[-1] = 0.0
        data = 1 - self._worst(1 - modifiers.running)
        data[-1] = 0.0
        age = now_s - self._start_s
        every, length = self._fields["checkpoint_every_s"], self._fields["checkpoint_s"]
        into = np.mod(age, every)
        checkpoint = np.clip((length - into) / dt_s, 0.0, 1.0) * (age > length)
        return data * (1 - stopped) * (1 - checkpoint), stopped, checkpoint * (1 - stopped)

    def _phase_share(self, dt_s: float, slowest: Floats, modifiers: Modifiers, running: Floats) -> Floats:
        """Return the exact part of the step in main phases, from each job's place in its training step, [J + 1]."""
        result = np.ones(len(self._names) + 1)
        if not self._names:
            return result
        first = self._order[self._starts]
        step, sync = self._fields["step_s"][:-1], self._fields["sync_share"][:-1]
        main_s = step * (1 - sync) * slowest[first]
        whole_s = main_s + step * sync * self._worst(modifiers.network_time)[:-1]
        begin = self._phases * whole_s
        end = begin + dt_s
        until_end = np.floor(end / whole_s) * main_s + np.minimum(np.mod(end, whole_s), main_s)
        result[:-1] = np.clip((until_end - np.minimum(begin, main_s)) / dt_s, 0.0, 1.0)
        self._phases = np.mod(end / whole_s, 1.0) * (running[:-1] > 0)
        return result

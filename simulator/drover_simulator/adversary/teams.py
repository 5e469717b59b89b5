"""Step GPUs that differ by design: roles in a job, replicas of a service, work that varies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drover_simulator.adversary.jobs import Job
from drover_simulator.hardware import Floats, Hardware, Ints
from drover_simulator.steps import FIELDS, Steps
from drover_simulator.workload import PlannedJob

WANDER_S = 120.0  # time constant of uneven shares of work (assumed: a few dozen steps)
LOAD_S = 300.0  # time constant of the load of an inference service (assumed)


class Teams(Steps):
    """Teams of GPUs that make their steps together, within jobs. Profiles are kept per GPU.

    Attributes:
        job_code: int32 [G], index of the job that holds each GPU, -1 none.
    """

    def __init__(self, hardware: Hardware, jobs: Sequence[Job], rng: np.random.Generator) -> None:
        self._asks: dict[str, Floats] = {}
        self._stale = False
        super().__init__(hardware)
        self._hardware, self._jobs, self._rng = hardware, jobs, rng
        self.job_code: npt.NDArray[np.int32] = np.full(hardware.gpus, -1, np.int32)
        self.held_by: dict[int, Job] = {}
        self._roles: dict[str, Floats] = {}
        self._forget_roles()
        self._wander: Floats = np.zeros(hardware.gpus)
        self._crowd: Floats = np.zeros(hardware.gpus)

    def _forget_roles(self) -> None:
        count = self._hardware.gpus
        self.work: Floats = np.ones(count)
        self.uneven: Floats = np.zeros(count)
        self._ready_s: Floats = np.zeros(count)
        self._load: Floats = np.zeros((3, count))
        self._load[0] = 1.0
        self._team: Ints = np.zeros(count, np.int64)
        self._roles = {}

    def begin(self, number: int) -> None:
        """Give job `number` its GPUs. Call `settle` before the next step."""
        job = self._jobs[number]
        for k in range(math.ceil(len(job.gpus) / job.team)):
            gpus = tuple(job.gpus[k * job.team : (k + 1) * job.team].tolist())
            name = f"{number}/{k}"
            self.running[name] = PlannedJob(name, job.ready_s(), math.inf, job.nodes, job.profile, gpus)
        self.job_code[job.gpus] = number
        self.held_by[number] = job
        self._stale = True

    def finish(self, number: int) -> None:
        """Take job `number` off its GPUs."""
        job = self.held_by.pop(number)
        for k in range(math.ceil(len(job.gpus) / job.team)):
            del self.running[f"{number}/{k}"]
        mine = job.gpus[self.job_code[job.gpus] == number]
        self.job_code[mine] = -1
        self._stale = True

    def settle(self) -> None:
        """Lay out the arrays again after jobs began or finished."""
        if not self._stale:
            return
        self._stale = False
        self._forget_roles()
        for job in self.held_by.values():
            self.work[job.gpus] = job.work
            self.uneven[job.gpus] = job.uneven
            self._ready_s[job.gpus] = job.ready_s()
            self._load[:, job.gpus] = np.array(job.load)[:, None]
            self._team[job.gpus] = np.arange(len(job.gpus)) // job.team
            for name, factors in job.asks.items():
                self._roles.setdefault(name, np.ones(len(self.work)))[job.gpus] = factors
        self._lay_out()

    def _lay_out(self) -> None:
        super()._lay_out()
        self._asks = {name: self._fields[name][self.job_of] for name in FIELDS}
        for name, factors in getattr(self, "_roles", {}).items():
            self._asks[name] = self._asks[name] * factors

    def profile(self, field: str) -> Floats:
        """Return a field of the profile of each GPU's job, float64 [G]; 0 where no job runs."""
        return self._asks[field]

    def wander(self, dt_s: float) -> Floats:
        """Return factors on each GPU's work that vary around 1, float64 [G]."""
        keep = math.exp(-dt_s / WANDER_S)
        noise = self._rng.standard_normal(len(self._wander))
        self._wander = keep * self._wander + math.sqrt(1 - keep * keep) * noise
        return np.asarray(1 + self.uneven * np.clip(self._wander, -2.5, 2.5))

    def load(self, now_s: float, dt_s: float, hour: float) -> Floats:
        """Return the share of time with work, float64 [G]: 0 while a job loads; with inference, the day's rhythm."""
        keep = math.exp(-dt_s / LOAD_S)
        noise = self._rng.standard_normal(len(self._crowd))
        self._crowd = keep * self._crowd + math.sqrt(1 - keep * keep) * noise
        day = math.sin((hour - 9) / 24 * 2 * math.pi)
        mean, swing, crowd = self._load
        # All GPUs of a team have the value of its first.
        first = np.flatnonzero(np.diff(np.append(-1, self.job_of)) != 0) if len(self.job_of) else self._team
        own = self._crowd[np.repeat(first, np.diff(np.append(first, len(self.job_of))))]
        share = np.where(crowd > 0, mean + swing * day + crowd * own, mean)
        return np.asarray(np.clip(share, 0.02, 1.0) * (now_s >= self._ready_s))

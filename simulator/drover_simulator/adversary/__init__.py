"""Draw fleets that are hard for detectors: mixed, noisy, with faults of every kind and many harmless look-alikes.

`draw(seed, gpus=512, hours=4)` returns a fleet whose jobs, faults and labels are all known beforehand; `ticks` runs it.
docs/explanation/simulation.md has the ranges and sources. Tuning uses seeds 1000-1999, scoring 0-99.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_core.model.fleet import FleetSpec, JobSpec
from drover_simulator.adversary.jobs import Job, draw_jobs
from drover_simulator.adversary.layout import draw_layout
from drover_simulator.adversary.plan import draw_plan
from drover_simulator.adversary.realism import Realism, draw_realism
from drover_simulator.adversary.running import AdversaryRun, Tick
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.hardware import Hardware

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
FAULTS_PER_1000_GPU_DAYS = 240.0
NEGATIVES_PER_1000_GPU_DAYS = 240.0

__all__ = ["AdversaryFleet", "Tick", "draw"]


@dataclass(frozen=True, slots=True)
class AdversaryFleet:
    """A fleet with everything that will happen to it.

    Attributes:
        spec: nodes, and all jobs with their starts and ends.
        labels: rows of labels.jsonl, with additional keys: severity, onset, grown (when a straggler first lost 3 %),
            job, job_gpus, follows (the label that this one results from or repeats: an incident that is still open may
            include it).
        inventory: rows of inventory.jsonl: {"ts", "node", "inventory": {...}}, at the start and at each change.
        crashes: number of a job that crashes -> XIDs that its nodes show.
    """

    seed: int
    hours: float
    start_ms: int
    spec: FleetSpec
    labels: list[dict[str, Any]]
    inventory: list[dict[str, Any]]
    hardware: Hardware
    jobs: list[Job]
    troubles: list[Trouble]
    crashes: dict[int, tuple[int, ...]]
    realism: Realism

    @property
    def gpu_days(self) -> float:
        return self.hardware.gpus * self.hours / 24

    def ticks(self, interval_ms: int = 10_000) -> Iterator[Tick]:
        """Yield every interval as it arrives: unpacks as (ts_ms, gpu, node, link, events), float64 columns, NaN absent.

        Each call with the same interval yields the same ticks. With intervals of a minute and more, physics takes one
        step each.
        """
        return AdversaryRun(self).ticks(interval_ms, max(1, round(self.hours * 3_600_000 / interval_ms)))

    def holders(self, at_ms: int) -> npt.NDArray[np.int32]:
        """Return the index into `spec.jobs` of the job that holds each GPU at `at_ms`, int32 [G]; -1 for none."""
        held = np.full(self.hardware.gpus, -1, np.int32)
        at_s = (at_ms - self.start_ms) / 1000
        for number, job in enumerate(self.jobs):
            if job.start_s < at_s <= job.end_s:
                held[job.gpus] = number
        return held


def draw(
    seed: int,
    *,
    gpus: int,
    hours: float,
    faults_per_1000_gpu_days: float = FAULTS_PER_1000_GPU_DAYS,
    negatives_per_1000_gpu_days: float = NEGATIVES_PER_1000_GPU_DAYS,
    start_ms: int = START_MS,
) -> AdversaryFleet:
    """Return the fleet of a seed. With rates of 0 it has no faults, only natural noise, errors and jobs."""
    rng = np.random.default_rng([seed, 100])
    nodes = draw_layout(rng, gpus, f"adversary-{seed}")
    hardware = Hardware(nodes, seed, float(rng.uniform(0.02, 0.045)), float(rng.uniform(0.004, 0.015)))
    realism = draw_realism(rng, hardware)
    jobs = draw_jobs(rng, hardware, hours * 3600)
    gpu_days = hardware.gpus * hours / 24
    plan = draw_plan(
        rng, hardware, jobs, hours * 3600, start_ms,
        round(faults_per_1000_gpu_days * gpu_days / 1000), round(negatives_per_1000_gpu_days * gpu_days / 1000),
    )  # fmt: skip
    spec = FleetSpec(nodes.nodes, tuple(_job_spec(job, hardware, start_ms) for job in plan.jobs), nodes.name)
    return AdversaryFleet(
        seed, hours, start_ms, spec, plan.labels, plan.inventory, hardware, plan.jobs, plan.troubles, plan.crashes,
        realism,
    )  # fmt: skip


def _job_spec(job: Job, hardware: Hardware, start_ms: int) -> JobSpec:
    members = tuple((hardware.names[hardware.gpu_node[g]], int(hardware.gpu_slot[g])) for g in job.gpus)
    return JobSpec(job.id, start_ms + round(job.start_s * 1000), start_ms + round(job.end_s * 1000), members)

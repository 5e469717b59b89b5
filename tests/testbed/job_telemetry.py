"""Made-up telemetry of training jobs whose loops report nothing: what their GPUs and ports do in each bucket.

Each second of a job is made from its steps: compute, then communication that compute does not hide; GPUs are sampled
once a second, so that long steps beat with the samples as they do on a real node. `tuning(seed)` and `scoring(seed)`
draw jobs of different structure, as in step_series: thresholds were set by the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors.slowdown.telemetry import CLOCK, DRAM, SM, TENSOR, TRAFFIC, UTIL
from drover_collector.detectors.slowdown.work_rate import POWER

Floats = npt.NDArray[np.float64]
BUCKET_S = 10
CLOCK_MHZ = 1755.0
KINDS = ("network", "data", "clock")  # "kernels": an image whose kernels are slower, from the begin


@dataclass(frozen=True, slots=True)
class Other:
    """Time in which the job does something else, from `at_s` on.

    Attributes:
        kind: pause (nothing), evaluation (no gradients are sent, other kernels), generation (decoding: memory), slower
            (a save in the background), stage (other work to the end), growth (longer sequences), batch (a larger one).
        factor: of the evaluation's speed, the slower step, or the growth.
    """

    kind: str
    at_s: float
    length_s: float
    factor: float = 1.0


@dataclass(slots=True)
class Plan:
    """One job.

    Attributes:
        step_s: of one step. hidden: share of the step in which GPUs compute; the rest is communication or input.
        sigma, wander, wander_s: noise of one step, and of its slow part, log. mix: noise of each figure by itself.
        tensor, dram, sent: activity while computing, activity of memory then, bytes/s of a node in the mean.
        waits: power of a GPU that waits in a collective, as a share of that of one that computes.
        slower_s, slower_by, slower: from when a step takes longer, by how much, and why (KINDS).
    """

    hours: float
    step_s: float
    hidden: float
    sigma: float
    wander: float
    wander_s: float
    tensor: float
    dram: float
    sent: float
    waits: float
    mix: float = 0.003
    warm: float = 0.1
    others: list[Other] = field(default_factory=list)
    slower_s: float = math.inf
    slower_by: float = 0.0
    slower: str = "network"


def tuning(seed: int, hours: float = 8.0) -> Plan:
    """Draw a job of the kind that thresholds were set by."""
    rng = np.random.default_rng([21, seed])
    plan = Plan(
        hours, float(rng.choice([0.4, 1.0, 2.0, 5.0, 12.0])), float(rng.uniform(0.7, 0.97)),
        float(rng.uniform(0.002, 0.03)), float(rng.uniform(0, 0.008)), float(rng.choice([60, 300])),
        float(rng.uniform(0.3, 0.6)), float(rng.uniform(0.3, 0.6)), float(rng.uniform(1e9, 2e10)),
        float(rng.uniform(0.35, 0.65)),
    )  # fmt: skip
    end = hours * 3600
    if rng.random() < 0.6:
        _again(plan, "pause", float(rng.choice([600, 1800])), float(rng.uniform(10, 90)), 1.0)
    if rng.random() < 0.5:
        _again(plan, "evaluation", float(rng.choice([1500, 3600])), float(rng.uniform(60, 400)), 0.7)
    if rng.random() < 0.3:
        plan.others.append(Other("pause", float(rng.uniform(3600, end)), float(rng.uniform(150, 900))))
    if rng.random() < 0.3:
        kind = str(rng.choice(["growth", "batch", "stage"]))
        plan.others.append(Other(kind, float(rng.uniform(4000, end)), end, float(rng.choice([1.1, 1.3, 2.0]))))
    return plan


def scoring(seed: int, hours: float = 8.0) -> Plan:
    """Draw a job of another structure."""
    rng = np.random.default_rng([83, seed])
    plan = Plan(
        hours, float(np.exp(rng.uniform(math.log(0.15), math.log(30)))), float(rng.beta(6, 1.2)),
        float(np.exp(rng.uniform(math.log(0.001), math.log(0.05)))), float(rng.gamma(1.0, 0.003)),
        float(np.exp(rng.uniform(math.log(30), math.log(900)))), float(rng.uniform(0.15, 0.7)),
        float(rng.uniform(0.15, 0.7)), float(np.exp(rng.uniform(math.log(3e8), math.log(5e10)))),
        float(rng.uniform(0.3, 0.75)), mix=float(rng.uniform(0.001, 0.008)), warm=float(rng.uniform(0, 0.4)),
    )  # fmt: skip
    end = hours * 3600
    for _ in range(int(rng.poisson(1.5))):
        kind = str(rng.choice(["pause", "pause", "slower", "evaluation", "generation"]))
        length = {"pause": (3, 200), "slower": (10, 90), "evaluation": (30, 900), "generation": (20, 400)}[kind]
        factor = float(rng.uniform(1.02, 1.15) if kind == "slower" else rng.uniform(0.5, 1.3))
        _again(plan, kind, float(rng.uniform(500, 7000)), float(rng.uniform(*length)), factor)
    for _ in range(int(rng.poisson(hours / 20))):
        plan.others.append(Other("pause", float(rng.uniform(1500, end)), float(rng.uniform(150, 3000))))
    if rng.random() < 0.4:
        kind = str(rng.choice(["growth", "batch", "stage"]))
        factor = float(rng.uniform(1.05, 2.0))
        plan.others.append(Other(kind, float(rng.uniform(3000, end)), end, factor))
    return plan


def _again(plan: Plan, kind: str, every_s: float, length_s: float, factor: float) -> None:
    for at in np.arange(every_s, plan.hours * 3600, every_s).tolist():
        plan.others.append(Other(kind, at, length_s, factor))


def slowed(plan: Plan, at_s: float, by: float, why: str) -> Plan:
    """Return a job that is slower from a time on, for an hour, and does not start or change in that hour."""
    end = at_s + 3600
    kept = [
        other for other in plan.others
        if other.at_s + min(other.length_s, 1200) < at_s - 3000
        or (other.kind not in ("growth", "batch", "stage") and other.length_s < 1000 and other.at_s < end)
    ]  # fmt: skip
    return replace(plan, slower_s=at_s, slower_by=by, slower=why, hours=end / 3600, others=kept)


def figures(plan: Plan, seed: int) -> Floats:
    """Return the means over a job's GPUs and ports in each bucket, float64 [buckets, 7], as `work_rate` orders them."""
    return telemetry(plan, seed)[0]


def telemetry(plan: Plan, seed: int) -> tuple[Floats, Floats]:
    """Return `figures`, and the time of a step that a loop would report in each bucket, NaN where no step ended."""
    rng = np.random.default_rng([6, seed])
    seconds = int(plan.hours * 3600) // BUCKET_S * BUCKET_S
    at = np.arange(seconds + 1)
    scale = _scales(plan, at[:-1].astype(np.float64))
    ends, computes = _steps(plan, scale, seconds, rng)
    begins = np.append(0.0, ends[:-1])
    knots = np.column_stack([begins, begins + computes]).ravel()
    work = np.concatenate([[0.0], np.cumsum(np.column_stack([computes, np.zeros(len(ends))]).ravel())])[:-1]
    per_s = np.diff(np.interp(at, knots, work))  # share of each second with compute
    sends = np.diff(np.interp(at, np.append(0.0, ends), np.arange(len(ends) + 1.0)))
    found = _columns(plan, scale, per_s, sends)
    noise = rng.normal(0, plan.mix, found.shape)
    noise[:, CLOCK] *= 0.2
    return found * np.exp(noise), _reported(ends, ends - begins, scale["busy"], seconds)


def _columns(plan: Plan, scale: dict[str, Floats], per_s: Floats, sends: Floats) -> Floats:
    busy, slow = scale["busy"], np.arange(len(per_s)) >= plan.slower_s
    columns = np.full((len(per_s), POWER + 1), np.nan)
    columns[:, TENSOR] = plan.tensor * per_s * scale["tensor"] * busy
    columns[:, SM] = (0.85 * per_s + 0.1 * (1 - per_s)) * busy
    columns[:, DRAM] = plan.dram * per_s * scale["dram"] * busy
    columns[:, UTIL] = busy * np.where(slow & (plan.slower == "data"), per_s, 1.0)
    columns[:, CLOCK] = CLOCK_MHZ / np.where(slow & (plan.slower == "clock"), 1 + plan.slower_by, 1)
    columns[:, TRAFFIC] = plan.sent * plan.step_s * sends * scale["sent"] * busy
    exposed = np.where(slow & (plan.slower == "data"), 0.2, plan.waits)  # without a kernel a GPU takes less
    columns[:, POWER] = 650 * (0.18 * (1 - busy) + busy * (per_s * scale["power"] + exposed * (1 - per_s)))
    buckets = columns.reshape(-1, BUCKET_S, POWER + 1)
    found: Floats = np.sort(buckets, axis=1)[:, (BUCKET_S - 1) // 2]  # the lower median, as the collector takes it
    found[:, [TRAFFIC, POWER]] = buckets[:, :, [TRAFFIC, POWER]].mean(axis=1)  # both are counters
    return found


def _reported(ends: Floats, taken: Floats, busy: Floats, seconds: int) -> Floats:
    """Return the mean time of the steps that ended in each bucket of a job at work, float64 [buckets]."""
    kept = ends < seconds
    bucket = (ends[kept] // BUCKET_S).astype(np.int64)
    count = np.bincount(bucket, minlength=seconds // BUCKET_S)
    total = np.bincount(bucket, taken[kept], seconds // BUCKET_S)
    works = busy.reshape(-1, BUCKET_S).min(axis=1) > 0
    return np.where((count > 0) & works, total / np.maximum(count, 1), np.nan)


def _scales(plan: Plan, at: Floats) -> dict[str, Floats]:
    """Return, for each second, factors of the time of a step, its compute, and each figure while it computes."""
    found = {key: np.ones(len(at)) for key in ("time", "compute", "tensor", "dram", "sent", "busy", "power")}
    run = np.zeros(len(at))
    for other in plan.others:
        there = (at >= other.at_s) & (at < other.at_s + other.length_s)
        if other.kind == "pause":
            found["busy"][there] = 0.0
            if other.length_s > 120:
                run[at >= other.at_s + other.length_s] = other.at_s + other.length_s
        elif other.kind == "evaluation":
            found["tensor"][there], found["dram"][there], found["sent"][there] = other.factor, 1.2 * other.factor, 0.05
            found["power"][there] = 0.6 + 0.4 * other.factor
        elif other.kind == "generation":
            found["tensor"][there], found["dram"][there], found["sent"][there] = 0.1, 1.4, 0.1
            found["power"][there] = 0.7
        elif other.kind == "slower":
            found["time"][there] *= other.factor
        elif other.kind == "growth":  # attention grows with the square, and runs a little worse
            for key, power in (("time", 1.12), ("compute", 1.12)):
                found[key][there] *= other.factor**power
            found["tensor"][there] *= other.factor**0.03
        elif other.kind == "batch":
            for key in ("time", "compute"):
                found[key][there] *= other.factor**0.97
            found["tensor"][there] *= other.factor**0.03
        else:  # a stage: fine-tuning, another model
            drawn = np.random.default_rng(int(other.at_s)).uniform(0.5, 1.1, 4)
            drawn[3] = 0.6 + 0.4 * drawn[3]
            for key, factor in zip(("tensor", "dram", "sent", "power"), drawn, strict=True):
                found[key][there] *= factor
    found["time"] *= 1 + plan.warm * np.exp(-np.minimum((at - run) / 45, 50))
    found["time"][at >= plan.slower_s] *= 1 + plan.slower_by
    if plan.slower == "kernels":  # as much tensor work in a longer time, more memory traffic, as without fusion
        found["compute"][at >= plan.slower_s] *= 1 + plan.slower_by
        found["tensor"][at >= plan.slower_s] /= 1 + plan.slower_by
    if plan.slower == "clock":  # as much memory traffic in a longer time
        found["compute"][at >= plan.slower_s] *= 1 + plan.slower_by
        found["dram"][at >= plan.slower_s] /= 1 + plan.slower_by
        found["power"][at >= plan.slower_s] /= (1 + plan.slower_by) ** 1.5
    return found


def _steps(plan: Plan, scale: dict[str, Floats], seconds: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return when each step ends, and how long it computes, float64 [steps]."""
    ends, computes, at, slow = [], [], 0.0, 0.0
    decay = math.exp(-plan.step_s / plan.wander_s)
    many = iter(rng.standard_normal((int(1.5 * seconds / plan.step_s) + 100, 2)).tolist())
    while at < seconds:
        here = int(at)
        first, second = next(many, (0.0, 0.0))
        slow = decay * slow + math.sqrt(1 - decay * decay) * plan.wander * first
        noise = math.exp(slow + plan.sigma * second)
        computes.append(plan.step_s * plan.hidden * scale["compute"][here])
        at += max(plan.step_s * scale["time"][here] * noise, computes[-1])
        ends.append(at)
    return np.array(ends), np.array(computes)

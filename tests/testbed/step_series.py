"""Made-up training jobs as their loops report them, healthy with all that looks like a slowdown, or slower from a time.

`tuning(seed)` and `scoring(seed)` draw jobs of different structure: the first with normal noise and plain phases, the
second with skewed and slowly wandering noise, other kinds of evaluation and other lengths. Thresholds were set by the
first; what docs/evidence/slowdown.md reports is of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.examples import LAG_MS, START_MS
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Workloads
from drover_collector.fleet.index import FleetIndex
from drover_core.model.fleet import FleetSpec, NodeSpec

Floats = npt.NDArray[np.float64]
BUCKET_S = BUCKET_MS / 1000
GPUS = 8


@dataclass(frozen=True, slots=True)
class Phase:
    """Time in which the loop does something else: from `every` to `every` seconds, for `length` s.

    Attributes:
        kind: pause (no step ends; `reset` after it: the loop says so), slower or faster steps by `factor`.
    """

    kind: str
    every_s: float
    length_s: float
    factor: float = 1.0
    reset: bool = False
    first_s: float = 0.0


@dataclass(slots=True)
class JobPlan:
    """One job.

    Attributes:
        sigma: of one step, log. wander: of the slow part of the noise, log, with `wander_s` as its time constant.
        tail: share of steps that take longer by up to half (uneven batches). compile_s, warm: of the first minutes.
        growth: (second, tokens, operations, time) factors from that second on, reported; silent: not reported.
        restarts: seconds, and the pause after each. lost: share of a node's reports that are missing.
    """

    step_s: float
    nodes: int
    sigma: float
    wander: float
    wander_s: float
    tail: float
    hours: float
    phases: list[Phase] = field(default_factory=list)
    growth: list[tuple[float, float, float, float]] = field(default_factory=list)
    restarts: list[tuple[float, float]] = field(default_factory=list)
    lost: float = 0.0
    compile_s: float = 60.0
    warm: float = 0.1
    flops: bool = True
    slower_s: float = math.inf
    slower_by: float = 0.0
    tensor: bool = True
    stops_s: float = math.inf


def tuning(seed: int, hours: float = 8.0) -> JobPlan:
    """Draw a job of the kind that thresholds were set by."""
    rng = np.random.default_rng([11, seed])
    step_s = float(rng.choice([0.4, 1.0, 2.0, 5.0, 12.0, 30.0]))
    plan = JobPlan(
        step_s, int(rng.choice([1, 2, 4, 8])), float(rng.uniform(0.002, 0.03)), float(rng.uniform(0, 0.008)),
        float(rng.choice([60, 300])), float(rng.choice([0, 0.02, 0.1])), hours, flops=bool(rng.random() < 0.7),
        lost=float(rng.choice([0, 0, 0.05])),
    )  # fmt: skip
    if rng.random() < 0.6:
        plan.phases.append(Phase("pause", float(rng.choice([600, 1800])), float(rng.uniform(10, 90)), reset=rng.random() < 0.5))
    if rng.random() < 0.5:
        factor = float(rng.choice([0.4, 1.3]))
        plan.phases.append(Phase("work", float(rng.choice([1500, 3600])), float(rng.uniform(60, 240)), factor))
    if rng.random() < 0.3:
        plan.restarts.append((float(rng.uniform(3600, 20_000)), float(rng.uniform(150, 900))))
    if rng.random() < 0.25:
        plan.growth.append((float(rng.uniform(4000, 20_000)), 2.0, 2.3, 2.25))
    return plan


def scoring(seed: int, hours: float = 8.0) -> JobPlan:
    """Draw a job of another structure, which no threshold has seen."""
    rng = np.random.default_rng([97, seed])
    step_s = float(np.exp(rng.uniform(math.log(0.15), math.log(45))))
    plan = JobPlan(
        step_s, int(rng.integers(1, 13)), float(np.exp(rng.uniform(math.log(0.001), math.log(0.05)))),
        float(rng.gamma(1.0, 0.003)), float(np.exp(rng.uniform(math.log(30), math.log(900)))),
        float(rng.beta(1, 20)), hours, flops=bool(rng.random() < 0.6), lost=float(rng.choice([0, 0.02, 0.2])),
        compile_s=float(rng.uniform(0, 240)), warm=float(rng.uniform(0, 0.4)),
    )  # fmt: skip
    for _ in range(int(rng.poisson(1.3))):
        kind = str(rng.choice(["save", "save", "async", "eval", "generate"]))
        every = float(rng.uniform(400, 7000))
        first = float(rng.uniform(0.3, 1.0)) * every
        if kind == "save":
            plan.phases.append(Phase("pause", every, float(rng.uniform(3, 150)), reset=bool(rng.random() < 0.4), first_s=first))
        elif kind == "async":  # a save in the background slows steps for a while
            plan.phases.append(Phase("work", every, float(rng.uniform(10, 70)), float(rng.uniform(1.02, 1.15)), first_s=first))
        elif kind == "eval":  # reported as steps
            plan.phases.append(Phase("work", every, float(rng.uniform(40, 400)), float(rng.uniform(0.2, 0.8)), first_s=first))
        else:  # samples are generated within the loop, which stands still meanwhile
            plan.phases.append(Phase("pause", every, float(rng.uniform(60, 300)), first_s=first))
    for _ in range(int(rng.poisson(0.4))):
        plan.restarts.append((float(rng.uniform(1500, hours * 3000)), float(rng.uniform(40, 2400))))
    if rng.random() < 0.2:
        grown = float(rng.uniform(1.1, 2.0))
        plan.growth.append((float(rng.uniform(3000, hours * 3000)), grown, grown**1.15, grown**1.12))
    if rng.random() < 0.1:
        plan.stops_s = float(rng.uniform(0.5, 0.9)) * hours * 3600
    return plan


@dataclass(slots=True)
class _Loop:
    """What a job has reported up to now."""

    plan: JobPlan
    rng: np.random.Generator
    at_s: float = 0.0
    slow: float = 0.0
    run_s: float = 0.0  # when this run began
    done: set[tuple[int, int]] = field(default_factory=set)


def reports(plan: JobPlan, seed: int) -> Iterator[tuple[float, float, float, float]]:
    """Yield (end, step time, tokens factor, operations factor) of each report: the mean of the steps of a second."""
    loop = _Loop(plan, np.random.default_rng([5, seed]))
    loop.at_s = plan.compile_s
    restarts = sorted(plan.restarts)
    while loop.at_s < plan.hours * 3600:
        if loop.at_s >= plan.stops_s:
            return
        if restarts and loop.at_s >= restarts[0][0]:
            loop.run_s = loop.at_s = loop.at_s + restarts.pop(0)[1]
            loop.at_s += plan.compile_s
        yield _report(loop)


def _report(loop: _Loop) -> tuple[float, float, float, float]:
    plan, rng = loop.plan, loop.rng
    tokens = flops = factor = 1.0
    for since_s, more_tokens, more_flops, longer in plan.growth:
        if loop.at_s >= since_s:
            tokens, flops, factor = tokens * more_tokens, flops * more_flops, factor * longer
    factor *= 1 + plan.warm * math.exp(-(loop.at_s - loop.run_s - plan.compile_s) / 45)
    factor *= 1 + plan.slower_by if loop.at_s >= plan.slower_s else 1.0
    pause_s = 0.0
    for number, phase in enumerate(plan.phases):
        into = loop.at_s - (phase.first_s or phase.every_s)
        if into < 0:
            continue
        turn, into = int(into // phase.every_s), into % phase.every_s
        if phase.kind == "work" and into < phase.length_s:
            factor *= phase.factor
        elif phase.kind == "pause" and (number, turn) not in loop.done:
            loop.done.add((number, turn))
            pause_s = phase.length_s
            if phase.reset:
                loop.at_s += pause_s
                pause_s = 0.0
    base = plan.step_s * factor
    count = max(1, math.ceil(1.0 / base))
    decay = math.exp(-count * base / plan.wander_s)
    loop.slow = decay * loop.slow + math.sqrt(1 - decay * decay) * plan.wander * float(rng.normal())
    times = base * np.exp(loop.slow + plan.sigma * rng.standard_normal(count))
    times *= np.where(rng.random(count) < plan.tail, 1 + 0.5 * rng.random(count), 1.0)
    taken = float(times.sum()) + pause_s
    loop.at_s += taken
    return loop.at_s, taken / count, tokens, flops


def windows(plan: JobPlan, seed: int, job: str = "812", name: str = "pretrain") -> Iterator[tuple[Window, int]]:
    """Yield the windows of a fleet in which the job runs, as the engine builds them."""
    index = FleetIndex(
        FleetSpec(tuple(NodeSpec(f"n{n:02d}", f"r{n // 4}", f"l{n // 4}", "p", "H100", GPUS) for n in range(plan.nodes)))
    )
    rng = np.random.default_rng([3, seed])
    held: tuple[Bucket, ...] = ()
    for number, rows in enumerate(_by_bucket(plan, seed)):
        bucket = _bucket(plan, index, number, rows, rng, (job, name))
        held = (*held[-1:], bucket)
        yield Window(index, held, True, (), START_MS), bucket.end_ms + LAG_MS


def _by_bucket(plan: JobPlan, seed: int) -> Iterator[list[tuple[float, float, float, float]]]:
    mine: list[tuple[float, float, float, float]] = []
    number = 0
    for report in reports(plan, seed):
        while report[0] >= (number + 1) * BUCKET_S:
            yield mine
            mine, number = [], number + 1
        mine.append(report)
    while number < plan.hours * 3600 / BUCKET_S:
        yield mine
        mine, number = [], number + 1


def _bucket(
    plan: JobPlan, index: FleetIndex, number: int, rows: list[tuple[float, float, float, float]],
    rng: np.random.Generator, named: tuple[str, str],
) -> Bucket:  # fmt: skip
    nodes = np.flatnonzero(rng.random(plan.nodes) >= plan.lost) if rows else np.zeros(0, np.int64)
    times = sorted(row[1] for row in rows)
    value = times[(len(times) - 1) // 2] if rows else math.nan
    tokens, flops = (rows[-1][2], rows[-1][3]) if rows else (1.0, 1.0)
    columns = {
        "step_time_s": value * (1 + 0.001 * rng.standard_normal(len(nodes))),
        "tokens_per_step": np.full(len(nodes), 4e6 * tokens),
    }
    if plan.flops:
        columns["flops_per_step"] = np.full(len(nodes), 1.7e17 * flops)
    work = Workloads.of(nodes.astype(np.int32), [named[1]] * len(nodes), columns)
    gpu = {}
    if plan.tensor and rows:
        busy = 0.45 * plan.step_s * flops / value
        gpu["tensor_active_ratio"] = np.clip(busy * (1 + 0.005 * rng.standard_normal(index.gpu_count)), 0, 1)
        gpu["sm_clock_mhz"] = np.full(index.gpu_count, 1755.0)
    count = np.full(index.node_count, 10, np.int32)
    return Bucket(
        START_MS + number * BUCKET_MS, BUCKET_MS, gpu, {}, count[index.gpu_node], count,
        np.zeros(index.gpu_count, np.int32), (named[0],), work=work,
    )  # fmt: skip

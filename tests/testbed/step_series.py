"""Made-up training jobs as their loops report them, healthy with all that looks like a slowdown, or slower from a time.

`tuning(seed)` and `scoring(seed)` draw jobs of different structure: the first with normal noise and plain phases, the
second with skewed and slowly wandering noise, other kinds of evaluation and other lengths. Thresholds were set by the
first; what docs/evidence/slowdown.md reports is of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.examples import LAG_MS, START_MS
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import BUCKET_MS, NO_WORKLOADS, Bucket, Workloads
from drover_collector.fleet.index import FleetIndex
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec

Floats = npt.NDArray[np.float64]
BUCKET_S = BUCKET_MS / 1000
GPUS = 8
REPORT_S = 2.5  # a report for so long: four in a bucket
TOKENS, FLOPS = 4e6, 1.7e17


@dataclass(frozen=True, slots=True)
class Phase:
    """Time in which the loop does something else, again and again.

    Attributes:
        kind: pause (no step ends; `reset` after it: the loop says so), work (other work, reported as steps that take
            `factor` times as long), slower (the same work).
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
        growth: (second, tokens, operations, time) factors from that second on.
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
        every, length = float(rng.choice([600, 1800])), float(rng.uniform(10, 90))
        plan.phases.append(Phase("pause", every, length, reset=bool(rng.random() < 0.5)))
    if rng.random() < 0.5:
        factor = float(rng.choice([0.4, 1.3]))
        plan.phases.append(Phase("work", float(rng.choice([1500, 3600])), float(rng.uniform(60, 240)), factor))
    if rng.random() < 0.3:
        plan.restarts.append((float(rng.uniform(3600, 20_000)), float(rng.uniform(150, 900))))
    if rng.random() < 0.25:
        plan.growth.append((float(rng.uniform(4000, 20_000)), 2.0, 2.3, 2.25))
    return plan


def scoring(seed: int, hours: float = 8.0) -> JobPlan:
    """Draw a job of another structure, by which no threshold was set."""
    rng = np.random.default_rng([97, seed])
    step_s = float(np.exp(rng.uniform(math.log(0.15), math.log(45))))
    plan = JobPlan(
        step_s, int(rng.integers(1, 13)), float(np.exp(rng.uniform(math.log(0.001), math.log(0.05)))),
        float(rng.gamma(1.0, 0.003)), float(np.exp(rng.uniform(math.log(30), math.log(900)))),
        float(rng.beta(1, 20)), hours, flops=bool(rng.random() < 0.6), lost=float(rng.choice([0, 0.02, 0.2])),
        compile_s=float(rng.uniform(0, 240)), warm=float(rng.uniform(0, 0.4)), tensor=bool(rng.random() < 0.7),
    )  # fmt: skip
    for _ in range(int(rng.poisson(1.3))):
        kind, every = str(rng.choice(["save", "save", "async", "eval", "generate"])), float(rng.uniform(400, 7000))
        first = float(rng.uniform(0.3, 1.0)) * every
        if kind == "save":
            length, reset = float(rng.uniform(3, 150)), bool(rng.random() < 0.4)
            plan.phases.append(Phase("pause", every, length, reset=reset, first_s=first))
        elif kind == "async":  # a save in the background slows steps for a while
            length, factor = float(rng.uniform(10, 70)), float(rng.uniform(1.02, 1.15))
            plan.phases.append(Phase("slower", every, length, factor, first_s=first))
        elif kind == "eval":  # reported as steps
            factor = float(rng.uniform(0.2, 0.8) if rng.random() < 0.7 else rng.uniform(1.2, 3.0))
            plan.phases.append(Phase("work", every, float(rng.uniform(40, 400)), factor, first_s=first))
        else:  # samples are generated within the loop, which stands still meanwhile
            plan.phases.append(Phase("pause", every, float(rng.uniform(60, 300)), first_s=first))
    for _ in range(int(rng.poisson(hours / 20))):
        plan.restarts.append((float(rng.uniform(1500, hours * 3000)), float(rng.uniform(40, 2400))))
    if rng.random() < 0.2:
        grown = float(rng.uniform(1.1, 2.0))
        plan.growth.append((float(rng.uniform(3000, hours * 3000)), grown, grown**1.15, grown**1.12))
    if rng.random() < 0.1:
        plan.stops_s = float(rng.uniform(0.5, 0.9)) * hours * 3600
    return plan


def slowed(plan: JobPlan, at_s: float, by: float) -> JobPlan:
    """Return a job that is slower from a time on, and does not stop, start or grow in the hour after it."""
    end = at_s + 3600
    return replace(
        plan, slower_s=at_s, slower_by=by, stops_s=math.inf, hours=end / 3600,
        restarts=[r for r in plan.restarts if r[0] + r[1] < at_s - 2400],
        growth=[g for g in plan.growth if g[0] < at_s - 2400],
    )  # fmt: skip


class Row(NamedTuple):
    """What a job reports in a bucket.

    Attributes:
        step_s: the lower median of its reports. tokens, flops: of a step, relative. same: the work is that of training.
    """

    bucket: int
    step_s: float
    tokens: float
    flops: float
    same: bool


def _intervals(plan: JobPlan) -> list[tuple[float, float, Phase]]:
    """Return (from, to, phase) of all phases, in order of time."""
    end = plan.hours * 3600
    starts = [(at, p) for p in plan.phases for at in np.arange(p.first_s or p.every_s, end, p.every_s).tolist()]
    return sorted(((at, at + p.length_s, p) for at, p in starts), key=lambda entry: entry[0])


def rows(plan: JobPlan, seed: int) -> Iterator[Row]:
    """Yield what the job reports in each bucket in which it reports, in order of time."""
    found: list[tuple[float, float, float, bool]] = []
    number = 0
    for at_s, step_s, tokens, flops, same in _reports(plan, np.random.default_rng([5, seed])):
        here = int(at_s // BUCKET_S)
        if here != number and found:
            yield _row(number, found)
            found = []
        number = here
        found.append((step_s, tokens, flops, same))


def _row(number: int, found: list[tuple[float, float, float, bool]]) -> Row:
    return Row(number, *sorted(found)[(len(found) - 1) // 2])


def _reports(plan: JobPlan, rng: np.random.Generator) -> Iterator[tuple[float, float, float, float, bool]]:
    """Yield (end, mean step time, tokens, operations, whether it trains) of each report, of about REPORT_S."""
    intervals, restarts, growth = _intervals(plan), sorted(plan.restarts), sorted(plan.growth)
    active: list[tuple[float, float, Phase]] = []
    at = run = 0.0
    slow, tokens, flops, grown, pause = 0.0, 1.0, 1.0, 1.0, 0.0
    at = plan.compile_s
    drawn = iter(())
    end = min(plan.hours * 3600, plan.stops_s)
    while at < end:
        if restarts and at >= restarts[0][0]:
            run = at = at + restarts.pop(0)[1]
            at += plan.compile_s
        while growth and at >= growth[0][0]:
            _, more_tokens, more_flops, longer = growth.pop(0)
            tokens, flops, grown = tokens * more_tokens, flops * more_flops, grown * longer
        while intervals and at >= intervals[0][0]:
            interval = intervals.pop(0)
            if interval[2].kind != "pause":
                active.append(interval)
            elif interval[2].reset:
                at += interval[2].length_s
            else:
                pause += interval[2].length_s
        active = [interval for interval in active if at < interval[1]] if active else active
        base = plan.step_s * grown * (1 + plan.warm * math.exp(-min((at - run - plan.compile_s) / 45, 50)))
        base *= 1 + plan.slower_by if at >= plan.slower_s else 1.0
        for _, _, phase in active:
            base *= phase.factor
        count = max(1, round(REPORT_S / base))
        pair = next(drawn, None)
        if pair is None:
            drawn = iter(np.column_stack([rng.standard_normal((4096, 2)), rng.random((4096, 2))]).tolist())
            pair = next(drawn)
        decay = math.exp(-count * base / plan.wander_s)
        slow = decay * slow + math.sqrt(1 - decay * decay) * plan.wander * pair[0]
        taken = base * math.exp(slow + plan.sigma * pair[1] / math.sqrt(count))
        if pair[2] < plan.tail:
            taken *= 1 + 0.5 * pair[3] / math.sqrt(count)
        taken, pause = taken * count + pause, 0.0
        at += taken
        yield at, taken / count, tokens, flops, not any(phase.kind == "work" for _, _, phase in active)


def figures(plan: JobPlan, row: Row) -> tuple[float, float]:
    """Return tensor activity, and bytes/s on the network: those of the step's work in its time."""
    share = plan.step_s * row.flops / row.step_s
    return (0.45 * share, 4e9 * share) if row.same else (0.45 * min(1.0, 1.4 * share), 1e8)


def windows(plan: JobPlan, seed: int, job: str = "812", name: str = "pretrain") -> Iterator[tuple[Window, int]]:
    """Yield the windows of a fleet in which the job runs, as the engine builds them."""
    ports = (LinkSpec("mlx5_0", 0),)
    names = [(f"n{n:02d}", f"r{n // 4}", f"l{n // 4}") for n in range(plan.nodes)]
    nodes = tuple(NodeSpec(name, rack, leaf, "p", "H100", GPUS, ports) for name, rack, leaf in names)
    index = FleetIndex(FleetSpec(nodes))
    rng = np.random.default_rng([3, seed])
    held: tuple[Bucket, ...] = ()
    sent = np.zeros(plan.nodes)
    found = {row.bucket: row for row in rows(plan, seed)}
    for number in range(math.ceil(plan.hours * 3600 / BUCKET_S)):
        bucket = _bucket(plan, index, number, found.get(number), rng)
        bucket = replace(bucket, job_names=(job,), work=replace(bucket.work, name=(name,) * len(bucket.work)))
        if number in found:
            sent = sent + figures(plan, found[number])[1] * BUCKET_S
        held = (*held[-1:], replace(bucket, link={"tx_bytes": sent}))
        yield Window(index, held, True, (), START_MS), bucket.end_ms + LAG_MS


def _bucket(plan: JobPlan, index: FleetIndex, number: int, row: Row | None, rng: np.random.Generator) -> Bucket:
    gpu: dict[str, Floats] = {}
    work = NO_WORKLOADS
    if row is not None:
        nodes = np.flatnonzero(rng.random(plan.nodes) >= plan.lost).astype(np.int32)
        columns = {
            "step_time_s": row.step_s * (1 + 0.001 * rng.standard_normal(len(nodes))),
            "tokens_per_step": np.full(len(nodes), TOKENS * row.tokens),
        }
        if plan.flops:
            columns["flops_per_step"] = np.full(len(nodes), FLOPS * row.flops)
        work = Workloads.of(nodes, ["pretrain"] * len(nodes), columns)
        if plan.tensor:
            noise = 1 + 0.005 * rng.standard_normal(index.gpu_count)
            gpu["tensor_active_ratio"] = np.clip(figures(plan, row)[0] * noise, 0, 1)
            gpu["sm_clock_mhz"] = np.full(index.gpu_count, 1755.0)
    count = np.full(index.node_count, 10, np.int32)
    return Bucket(
        START_MS + number * BUCKET_MS, BUCKET_MS, gpu, {}, count[index.gpu_node], count,
        np.zeros(index.gpu_count, np.int32), ("812",), work=work,
    )  # fmt: skip

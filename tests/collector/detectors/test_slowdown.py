"""Jobs that slow as a whole: what is found, how soon, and all that looks like it and is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import LAG_MS, START_MS, play, small_fleet
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown import detector as slowdown
from drover_collector.detectors.slowdown.detector import SlowdownState
from drover_collector.detectors.slowdown.series import steps_of
from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Floats, Workloads
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.book import IncidentBook
from drover_core.model.events import Finding, RecommendedAction, Severity
from drover_core.model.fleet import ObjectiveSpec
from testbed.step_series import JobPlan, Phase, scoring, slowed, tuning, windows

Values = dict[str, float]


def plan(step_s: float = 2.0, nodes: int = 4, hours: float = 0.75, **more: object) -> JobPlan:
    """A steady job."""
    made = JobPlan(step_s, nodes, 0.01, 0.002, 60, 0.0, hours)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # whatever field the test says


def judge(seen: Iterable[tuple[Window, int]], state: SlowdownState | None = None) -> list[Finding]:
    found: list[Finding] = []
    for window, now_ms in seen:
        findings, state = slowdown.detect(window, state, now_ms)
        found += findings
    return found


def warnings(found: Iterable[Finding]) -> list[Finding]:
    return [each for each in found if each.severity is not Severity.INFO]


def at_s(finding: Finding) -> float:
    return (finding.ts_ms - START_MS) / 1000


def loops(
    rows: Iterable[dict[tuple[int, str], Values]],
    index: FleetIndex,
    jobs: dict[str, list[int]] | None = None,
    gpu: dict[str, Floats] | None = None,
) -> Iterator[tuple[Window, int]]:
    """Yield windows in which (node, name) reports these values; `jobs`: name -> its GPUs."""
    held = np.full(index.gpu_count, -1, np.int32)
    for number, gpus in enumerate((jobs or {}).values()):
        held[gpus] = number
    count = np.full(index.node_count, 10, np.int32)
    buckets: tuple[Bucket, ...] = ()
    for number, row in enumerate(rows):
        metrics = sorted({metric for values in row.values() for metric in values})
        work = Workloads.of(
            np.array([node for node, _ in row], np.int32), [name for _, name in row],
            {metric: np.array([values.get(metric, np.nan) for values in row.values()]) for metric in metrics},
        )  # fmt: skip
        bucket = Bucket(
            START_MS + number * BUCKET_MS, BUCKET_MS, gpu or {}, {}, count[index.gpu_node], count, held,
            tuple(jobs or {}), work=work,
        )  # fmt: skip
        buckets = (*buckets[-1:], bucket)
        yield Window(index, buckets, True, (), START_MS), bucket.end_ms + LAG_MS


def noisy(value: float, number: int, sigma: float = 0.003) -> float:
    return value * math.exp(sigma * float(np.random.default_rng(number).normal()))


# What is found


@pytest.mark.parametrize(("step_s", "by"), [(0.3, 0.05), (2.0, 0.05), (2.0, 0.10), (5.0, 0.20)])
def test_a_steady_job_that_slows_is_found_within_three_minutes(step_s: float, by: float) -> None:
    found = judge(windows(plan(step_s, slower_s=1800.0, slower_by=by), 1))
    first = found[0]
    assert 60 < at_s(first) - 1800 <= 180
    assert (first.kind.value, first.cause, first.scope, first.job) == ("slowdown", "waits_alike", "job", "812")
    assert (first.severity, first.action) == (Severity.WARNING, RecommendedAction.NONE)
    assert abs(first.since_ms - START_MS - 1_800_000) <= 20_000
    assert first.summary.startswith(f"Job 812 is {by:.0%} slower since 08:30 UTC: a step takes ")
    assert first.evidence[0].expected == pytest.approx(step_s, rel=0.02)
    assert any(fact.text.startswith("All 32 GPUs wait alike") for fact in first.evidence)
    assert first.lost_gpus == pytest.approx(32 * by / (1 + by), rel=0.3)


def test_steps_longer_than_a_bucket() -> None:
    found = judge(windows(plan(35.0, hours=1.5, slower_s=3600.0, slower_by=0.1), 2))
    assert 100 < at_s(found[0]) - 3600 <= 400


def test_it_ends_when_the_job_is_as_fast_as_before() -> None:
    index = small_fleet(1)
    steps = [2.0] * 60 + [2.16] * 30 + [2.0] * 40
    rows = [{(0, "pretrain"): {"step_time_s": noisy(step, n)}} for n, step in enumerate(steps)]
    found = judge(loops(rows, index))
    assert 70 <= at_s(found[0]) / 10 <= 76
    assert 90 <= at_s(found[-1]) / 10 <= 97


def test_the_next_run_of_the_same_model_is_compared_with_the_last() -> None:
    """A wrong image after a restart: another job of the scheduler, the same loop and operations."""
    index = small_fleet(2)

    def run(step_s: float, count: int, first: int) -> list[dict[tuple[int, str], Values]]:
        return [
            {(n, "pretrain"): {"step_time_s": noisy(step_s, first + b), "flops_per_step": 1e17} for n in range(2)}
            for b in range(count)
        ]

    gpus = list(range(16))
    state = SlowdownState()
    before = [*loops(run(2.0, 80, 0), index, {"812": gpus})]
    after = [*loops([{}] * 100 + run(2.16, 80, 100), index, {"813": gpus})]
    assert judge(before, state) == []
    found = judge(after[100:], state)
    assert found
    assert found[0].summary.startswith("Job 813 is 8% slower since ")
    assert ", than job 812 was: a step takes " in found[0].summary
    state = SlowdownState()
    judge(before, state)
    again = [*loops([{}] * 100 + run(2.04, 80, 100), index, {"813": gpus})][100:]
    assert judge(again, state) == [], "2 % may be another place"


def test_a_restart_of_the_collector_goes_on_with_the_open_incident() -> None:
    seen = [*windows(plan(slower_s=1800.0, slower_by=0.06), 3)]
    found = judge(seen[:220])
    book = IncidentBook(seen[0][0].index, {"slowdown": slowdown.QUIET_MS}, lambda _incident, asked: asked)
    book.apply(found[-1:], found[-1].ts_ms, closing=True)
    [record] = book.open()
    later = judge(seen[200:], slowdown.restored([record.incident]))
    assert later
    assert later[0].ts_ms <= seen[203][1]
    assert later[0].since_ms == found[0].since_ms
    assert later[0].evidence[0].expected == pytest.approx(found[-1].evidence[0].expected, rel=0.02)


# What explains it


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        ({"tensor_active_ratio": 1 / 1.08, "gpu_util_ratio": 0.92}, "waits_for_host", "run no kernel for more"),
        ({"sm_clock_mhz": 1 / 1.08}, "clocks", "The clocks of all 64 GPUs fell alike"),
        ({"rack": 0.85}, "rack_capped", "Rack r01 runs at lower clocks than the job's other racks: r01 at 14"),
        ({}, "more_work", "as much more tensor work in a step"),
    ],
)
def test_what_the_gpus_show_is_named(change: dict[str, float], cause: str, words: str) -> None:
    index = small_fleet(8)

    def columns(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
        for metric, factor in change.items() if number >= 70 else ():
            if metric == "rack":
                gpu["sm_clock_mhz"][32:] *= factor
            else:
                gpu[metric] *= factor

    seen = []
    for number, (window, now_ms) in enumerate(play(index, 90, columns)):
        nodes = np.arange(8, dtype=np.int32)
        step_s = noisy(2.0 if number < 70 else 2.16, number)
        work = Workloads.of(nodes, ["llama"] * 8, {"step_time_s": np.full(8, step_s)})
        newest = dataclasses.replace(window.newest, work=work)
        seen.append((dataclasses.replace(window, buckets=(*window.buckets[:-1], newest)), now_ms))
    found = judge(seen)
    assert found[0].cause == cause
    assert any(words in fact.text for fact in found[0].evidence), found[0].evidence
    assert found[0].severity is (Severity.INFO if cause == "more_work" else Severity.WARNING)


# What looks like it


NEGATIVES = {
    "evaluations with slower steps": plan(phases=[Phase("work", 900, 240, 1.3)]),
    "evaluations with faster steps": plan(phases=[Phase("work", 700, 300, 0.4)]),
    "checkpoints": plan(phases=[Phase("pause", 300, 45)]),
    "checkpoints with reset": plan(phases=[Phase("pause", 300, 45, reset=True)]),
    "saves in the background": plan(phases=[Phase("slower", 700, 60, 1.12)]),
    "a restart with slow first minutes": plan(restarts=[(1500, 300)], warm=0.4, compile_s=120),
    "longer sequences": plan(growth=[(1500, 2.0, 2.3, 2.25)]),
    "uneven batches": plan(tail=0.1, wander=0.008, wander_s=300.0, sigma=0.03),
    "steps of half a minute": plan(30.0, tail=0.1, sigma=0.02, hours=1.5),
    "a loop that stops": plan(stops_s=1700),
    "reports that are missing": plan(lost=0.5),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_healthy(name: str) -> None:
    assert warnings(judge(windows(NEGATIVES[name], 4))) == []


def test_made_up_jobs_of_both_kinds_are_quiet_and_found() -> None:
    """A sample of what benchmarks/bench_slowdown.py plays."""
    assert [seed for seed in range(2) if warnings(judge(windows(tuning(seed, 1.5), seed)))] == []
    assert [seed for seed in range(30, 32) if warnings(judge(windows(scoring(seed, 1.5), seed)))] == []
    assert warnings(judge(windows(slowed(tuning(0, 3.0), 2400, 0.2), 0)))


def test_loops_of_one_name_that_do_not_step_together_are_not_judged() -> None:
    index = small_fleet(4)
    rows = [{(n, "train"): {"step_time_s": 1.0 + 0.3 * n} for n in range(4)}]
    [(window, _)] = loops(rows, index)
    assert list(steps_of(window)) == []


def test_jobs_that_share_a_node_are_distinguished_by_their_nodes() -> None:
    index = small_fleet(3)
    rows = [
        {(0, "a"): {"step_time_s": 1.0}, (1, "a"): {"step_time_s": 1.0}, (1, "b"): {"step_time_s": 3.0},
         (2, "b"): {"step_time_s": 3.0}},
    ]  # fmt: skip
    jobs = {"left": list(range(12)), "right": list(range(12, 24))}
    [(window, _)] = loops(rows, index, jobs)
    assert [(s.name, s.job, s.nodes, len(s.gpus), s.step_s) for s in steps_of(window)] == [
        ("a", "left", (0, 1), 12, 1.0), ("b", "right", (1, 2), 12, 3.0),
    ]  # fmt: skip


# Services


def served(number: int, running: float, slower: float = 1.0, waiting: float = 0.0) -> Values:
    """A server whose requests get slower with its load."""
    each = 50 / (1 + running / 40) / slower
    return {
        "requests_running": running, "requests_waiting": waiting, "tokens_per_s": noisy(each * running, number, 0.02),
        "ttft_p50_s": noisy(0.2 * slower * (1 + waiting), number + 5000, 0.05), "ttft_p95_s": 0.5 * (1 + waiting),
    }  # fmt: skip


def load(number: int) -> float:
    return float(round(16 + 12 * math.sin(number / 15)))


def test_a_burst_is_no_fault_of_a_service() -> None:
    rows = [
        {(n, "chat"): served(b, 60.0, 1.4, 20.0) if 150 <= b < 200 else served(b, load(b)) for n in range(2)}
        for b in range(300)
    ]
    assert judge(loops(rows, small_fleet(2))) == []


def test_a_service_that_is_slower_at_like_load_is_found() -> None:
    rows = [{(n, "chat"): served(b, load(b), 1.3 if b >= 200 else 1.0) for n in range(2)} for b in range(280)]
    found = judge(loops(rows, small_fleet(2)))
    assert found[0].summary.startswith("Service chat makes tokens 23% slower since 08:3")
    assert (found[0].cause, found[0].job, found[0].severity) == ("tokens_slower", "chat", Severity.WARNING)
    assert 2300 < at_s(found[0]) < 2600


# Objectives


def test_objectives_of_the_fleet_file() -> None:
    index = small_fleet(2)
    objectives = (
        ObjectiveSpec("llama*", "", "step_time_s", 2.2, 5.0), ObjectiveSpec("", "chat", "ttft_p95_s", 0.8, 10.0),
        ObjectiveSpec("other", "", "step_time_s", 0.1, 1.0),
    )  # fmt: skip
    index.spec = dataclasses.replace(index.spec, objectives=objectives)
    rows = [
        {(0, "llama-7b"): {"step_time_s": 2.3 if b >= 10 else 2.1},
         (1, "chat"): {"ttft_p95_s": 0.7 if b in range(40) or b == 60 else 0.9, "requests_running": 4.0}}
        for b in range(130)
    ]  # fmt: skip
    found = judge(loops(rows, index))
    [job, service] = [next(f for f in found if f.cause == cause) for cause in ("step_time_objective", "ttft_objective")]
    assert {f.cause for f in found} == {"step_time_objective", "ttft_objective"}
    assert at_s(job) == pytest.approx(10 * 10 + 300 + 7, abs=10)
    assert job.summary == (
        "Job llama-7b misses its objective since 08:01 UTC: a step takes 2.3 s, the objective is 2.2 s."
    )
    assert at_s(service) == pytest.approx(61 * 10 + 600 + 7, abs=10), "one bucket within it begins again"
    assert service.evidence[0].expected == 0.8

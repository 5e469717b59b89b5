"""Jobs whose loops report nothing: found by what their GPUs and ports do in a second; other work is no slowdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import LAG_MS, START_MS, small_fleet
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown import detector as slowdown
from drover_collector.detectors.slowdown.detector import SlowdownState
from drover_collector.detectors.slowdown.telemetry import METRICS, TRAFFIC
from drover_collector.detectors.slowdown.work_rate import POWER
from drover_collector.fleet.buckets import BUCKET_MS, NO_WORKLOADS, Bucket, Floats, Workloads
from drover_collector.incidents.book import IncidentBook
from drover_core.model.events import Finding, RecommendedAction, Severity
from testbed.job_telemetry import Other, Plan, figures

NODES, PORTS = 2, 2
AT_S = 3600.0


def plan(**more: object) -> Plan:
    """A steady job."""
    made = Plan(1.25, 1.0, 0.85, 0.01, 0.002, 60, 0.5, 0.45, 8e9, 0.5)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # whatever field the test says


def windows(made: Plan, nodes: int = NODES, without: tuple[str, ...] = (), work: bool = False) -> Iterator[Window]:
    """Yield windows of a fleet on which the job runs, on all GPUs."""
    index = small_fleet(nodes, ports=PORTS)
    seen = figures(made, 7)
    sent, energy = np.zeros(nodes * PORTS), np.zeros(index.gpu_count)
    rows = np.full(nodes, 10, np.int32)
    loops = Workloads.of(np.arange(nodes, dtype=np.int32), ["x"] * nodes, {"requests_running": np.full(nodes, 4.0)})
    held: tuple[Bucket, ...] = ()
    for number, row in enumerate(seen):
        sent, energy = sent + row[TRAFFIC] / PORTS * 10, energy + row[POWER] * 10
        gpu: dict[str, Floats] = {m: np.full(index.gpu_count, row[at]) for at, m in enumerate(METRICS)}
        gpu["energy_j"] = energy
        bucket = Bucket(
            START_MS + number * BUCKET_MS, BUCKET_MS, {m: c for m, c in gpu.items() if m not in without}, {},
            np.full(index.gpu_count, 10, np.int32), rows, np.zeros(index.gpu_count, np.int32), ("812",),
            {"tx_bytes": sent}, work=loops if work else NO_WORKLOADS,
        )  # fmt: skip
        held = (*held[-1:], bucket)
        yield Window(index, held, True, (), START_MS)


def judge(seen: Iterator[Window] | list[Window], state: SlowdownState | None = None) -> list[Finding]:
    found: list[Finding] = []
    for window in seen:
        findings, state = slowdown.detect(window, state, window.newest.end_ms + LAG_MS)
        found += findings
    return found


@pytest.mark.parametrize(
    ("why", "cause"), [("network", "waits_alike"), ("data", "waits_for_host"), ("clock", "clocks")]
)
def test_a_job_that_does_less_is_found(why: str, cause: str) -> None:
    [first, *rest] = judge(windows(plan(slower_s=AT_S, slower_by=0.1, slower=why)))
    delay_s = (first.ts_ms - START_MS) / 1000 - AT_S
    assert 240 < delay_s < 600
    assert (first.cause, first.severity, first.action) == (cause, Severity.WARNING, RecommendedAction.NONE)
    assert first.job == "812"
    assert abs((first.since_ms - START_MS) / 1000 - AT_S) <= 90
    assert first.summary.startswith("Job 812 is probably 10% slower since 09:0")
    assert first.lost_gpus == pytest.approx(16 * 0.1 / 1.1, rel=0.2)
    assert rest, "and it stays open"


OTHERS = {
    "nothing": [],
    "checkpoints": [Other("pause", at, 45) for at in range(900, 4500, 600)],
    "evaluations": [Other("evaluation", at, 300, 0.7) for at in range(1600, 4500, 1300)],
    "generation": [Other("generation", 3500, 900)],
    "a restart": [Other("pause", 3000, 600)],
    "longer sequences": [Other("growth", AT_S, 9999, 1.3)],
    "a larger batch": [Other("batch", AT_S, 9999, 1.1)],
    "a save in the background": [Other("slower", at, 70, 1.12) for at in range(1500, 4500, 1100)],
    "another program": [Other("stage", AT_S, 9999)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_healthy(name: str) -> None:
    assert judge(windows(plan(others=OTHERS[name]))) == []


def test_what_cannot_be_judged() -> None:
    slow = plan(slower_s=AT_S, slower_by=0.1)
    assert judge(windows(slow, nodes=1)) == [], "a server with fewer requests looks slower, too"
    assert judge(windows(slow, without=("energy_j",))) == [], "without power"
    served = list(windows(slow, work=True))
    assert judge(served) == [], "a server or loop that reports is judged by that"
    bare = judge(windows(slow, without=("tensor_active_ratio", "sm_active_ratio", "dram_active_ratio")))
    assert {each.severity for each in bare} == {Severity.INFO}, "less is known: only information"


def test_a_restart_of_the_collector_goes_on() -> None:
    seen = list(windows(plan(slower_s=AT_S, slower_by=0.1)))
    found = judge(seen[:420])
    book = IncidentBook(seen[0].index, {"slowdown": slowdown.QUIET_MS}, lambda _incident, asked: asked)
    book.apply(found[-1:], found[-1].ts_ms, closing=True)
    [record] = book.open()
    later = judge(seen[420:], slowdown.restored([record.incident]))
    assert later
    assert later[0].since_ms == found[0].since_ms
    assert later[-1].summary.startswith("Job 812 is probably 10% slower since 09:0")

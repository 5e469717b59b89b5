"""Idle: what a job holds and does not use, and free GPUs in pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from drover_collector.detectors import idle
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.idle import IDLE_MS, WARN_MS
from drover_collector.engine.engine import Engine
from drover_collector.incidents.correlation import jobs_hurt
from drover_collector.incidents.incident import opened
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Finding,
    Health,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from testbed.detecting import only

INDEX = small_fleet(8, 8, 4)
BUCKETS = IDLE_MS // 10_000


class Feed:
    def __init__(self) -> None:
        self.state: idle.IdleState | None = None
        self.number = 0
        self.jobs = np.zeros(INDEX.gpu_count, np.int32)
        self.names: tuple[str, ...] = ("812",)

    def tick(self, rest: list[int], count: int = 1, **columns: float) -> list[Finding]:
        """`count` buckets in which GPUs `rest` do nothing, but for `columns`; gives the last one's findings."""
        found: list[Finding] = []
        for _ in range(count):
            bucket = training_bucket(INDEX, self.number)
            gpu = dict(bucket.gpu)
            still = {"gpu_util_ratio": 0.0, "power_w": 95.0, "pcie_tx_bytes_per_s": 1e5} | columns
            for metric, value in still.items():
                gpu[metric] = np.array(gpu.get(metric, np.zeros(INDEX.gpu_count)))
                gpu[metric][rest] = value
            bucket = dataclasses.replace(bucket, gpu=gpu, jobs=self.jobs, job_names=self.names)
            window = Window(INDEX, (bucket,), True, (), START_MS)
            findings, self.state = idle.detect(window, self.state, bucket.end_ms + 7_000)
            found = findings or found if count > 1 else findings
            self.number += 1
        return found


def test_a_part_of_a_job_that_does_nothing_is_one_note_with_what_it_cost() -> None:
    feed = Feed()
    assert feed.tick([0, 1, 9], BUCKETS - 1) == []
    (found,) = feed.tick([0, 1, 9], 3)
    assert (found.kind, found.cause, found.scope, found.job) == (IncidentKind.IDLE, "idle_gpus", "job", "812")
    assert (found.severity, found.action) == (Severity.INFO, RecommendedAction.NONE)
    assert found.members == (("n00", 0), ("n00", 1), ("n01", 1))
    assert found.lost_gpus == 3
    assert "3 of its 64 GPUs" in found.summary
    assert "1.5 GPU-hours" in found.summary


def test_minutes_of_work_a_copy_or_another_job_start_the_wait_again() -> None:
    for interruption in ({"gpu_util_ratio": 0.4}, {"pcie_tx_bytes_per_s": 2e9}, {"power_w": 400.0}):
        feed = Feed()
        feed.tick([0], BUCKETS - 2)
        feed.tick([0], 18, **interruption)
        assert feed.tick([0], BUCKETS - 2) == []
        assert feed.tick([0], 3) != []
    feed = Feed()
    feed.tick([0], BUCKETS - 2)
    feed.names = ("813",)
    assert feed.tick([0], 20) == []


def test_half_a_minute_of_it_does_not_and_work_that_goes_on_ends_what_was_reported() -> None:
    feed = Feed()
    feed.tick([0], BUCKETS - 2)
    feed.tick([0], 3, pcie_tx_bytes_per_s=2e9)  # a save, as a job makes that does nothing else
    assert feed.tick([0], 20) == []
    assert feed.tick([0], 20) != []
    feed.tick([0], 100)
    feed.tick([0], 6, gpu_util_ratio=0.9)
    assert feed.tick([0], 6) == []


def test_a_large_job_that_has_cost_a_gpu_day_is_a_warning_within_the_hour() -> None:
    most = list(range(40))
    feed = Feed()
    (note,) = feed.tick(most, BUCKETS + 10)[-1:]
    assert (note.severity, note.lost_gpus) == (Severity.INFO, 40)
    (warning,) = feed.tick(most, 2160 // 10 - BUCKETS)[-1:]  # 40 GPUs for 36 minutes are 24 GPU-hours
    assert (warning.severity, warning.action, len(warning.members)) == (Severity.WARNING, RecommendedAction.NONE, 40)


def test_after_an_hour_it_is_a_warning_of_those_that_have_rested_so_long() -> None:
    feed = Feed()
    feed.tick([0], 60)
    (note,) = feed.tick([0, 1], WARN_MS // 10_000 - 66)[-1:]
    assert (note.severity, note.members) == (Severity.INFO, (("n00", 0), ("n00", 1)))
    (warning,) = feed.tick([0, 1], 12)[-1:]
    assert (warning.severity, warning.action, warning.members) == (
        Severity.WARNING,
        RecommendedAction.NONE,
        (("n00", 0),),
    )
    engine = Engine(INDEX, Policy.named("nvidia"), START_MS)
    engine.restore([opened(warning, ("job", "812", None), warning.ts_ms).incident], [], [])
    assert engine.health_of("n00")[0] is not Health.SUSPECT
    assert jobs_hurt(engine.incidents.values()) == set()


def test_the_warning_comes_with_the_bucket_that_completes_the_hour() -> None:
    feed = Feed()
    feed.jobs[8:16], feed.names = 1, ("812", "813")
    feed.tick([0], 3)  # the other job is idle half a minute later: open findings repeat once a minute
    findings = feed.tick([0, 9], WARN_MS // 10_000 - 1)
    assert {f.job: f.severity for f in findings} == {"812": Severity.WARNING, "813": Severity.INFO}
    assert {f.job: f.severity for f in feed.tick([0, 9])} == {"812": Severity.WARNING, "813": Severity.WARNING}


def test_a_job_that_used_its_gpus_before_is_warned_of_after_four_gpu_hours() -> None:
    def warned_after_h(count: int, breaks: tuple[int, ...] = ()) -> float:
        """Hours of idleness of `count` GPUs until the warning. `breaks`: minutes that they rested before."""
        feed = Feed()
        feed.jobs[:] = -1
        feed.jobs[:count] = 0
        gpus = list(range(count))
        for minutes in (0, *breaks):
            feed.tick(gpus, minutes * 6)
            feed.tick([], 90)
        for number in range(1, 3 * 360):
            if any(f.severity is Severity.WARNING for f in feed.tick(gpus)):
                return number / 360
        return math.inf

    assert warned_after_h(2) == pytest.approx(2, abs=0.03)  # Princeton's sliding_warning_minutes, of one GPU
    assert warned_after_h(4) == pytest.approx(1, abs=0.03)
    assert warned_after_h(4, (50,)) == pytest.approx(100 / 60, abs=0.03)  # as it rested 50 minutes before


def test_a_restart_goes_on_counting() -> None:
    feed = Feed()
    (findings,) = feed.tick([0, 1], BUCKETS + 6)[:1]
    record = opened(findings, ("job", "812", None), findings.ts_ms)
    feed.state = idle.restored([record.incident])
    (again,) = feed.tick([0, 1], 6)[:1]
    assert 0 <= again.since_ms - findings.since_ms <= 10_000
    assert again.members == findings.members


def test_a_gap_in_the_data_is_neither_work_nor_idleness() -> None:
    feed = Feed()
    feed.tick([0], BUCKETS - 2)
    assert feed.tick([0], 20, gpu_util_ratio=float("nan"), power_w=float("nan")) == []
    assert feed.tick([0], 3) != []


def test_gpus_that_nobody_holds_are_not_idle_but_free() -> None:
    feed = Feed()
    feed.jobs = np.full(INDEX.gpu_count, -1, np.int32)
    feed.names = ()
    assert feed.tick([0, 1], BUCKETS + 5) == []


def scattered(feed: Feed) -> None:
    """Leaf l01: four nodes, each with two GPUs in use by small jobs; leaf l00 has one job of whole nodes."""
    feed.jobs = np.full(INDEX.gpu_count, -1, np.int32)
    feed.jobs[:32] = 0
    for node in range(4, 8):
        feed.jobs[node * 8 : node * 8 + 2] = node - 3
    feed.names = ("big", "a", "b", "c", "d")


def test_free_gpus_in_pieces_are_one_note_of_their_leaf() -> None:
    feed = Feed()
    scattered(feed)
    assert feed.tick([], BUCKETS - 1) == []
    (found,) = feed.tick([], 8)
    assert (found.kind, found.cause, found.scope, found.severity) == (
        IncidentKind.IDLE, "scattered", "leaf", Severity.INFO,
    )  # fmt: skip
    assert "24 of 24 free GPUs" in found.summary
    assert {node for node, _ in found.members} == {"n04", "n05", "n06", "n07"}


def test_where_small_jobs_are_the_rule_pieces_are_what_they_want() -> None:
    feed = Feed()
    scattered(feed)
    feed.jobs[:32] = np.arange(32) % 16 + 5
    feed.names = tuple(str(n) for n in range(21))
    assert feed.tick([], BUCKETS + 5) == []


def test_it_makes_nobody_suspect_and_closes_no_other_note() -> None:
    engine = Engine(INDEX, Policy.named("nvidia"), START_MS, only("idle", "liveness", "hang"))
    for number in range(WARN_MS // 10_000 + 12):
        bucket = training_bucket(INDEX, number)
        gpu = dict(bucket.gpu)
        for metric, value in (("gpu_util_ratio", 0.0), ("power_w", 95.0)):
            gpu[metric] = np.where(np.arange(INDEX.gpu_count) < 16, value, gpu[metric])
        outcome = engine.on_bucket(dataclasses.replace(bucket, gpu=gpu), bucket.end_ms + 7_000)
        assert outcome.decisions == ()
    assert [(i.kind, i.severity, i.action) for i in engine.incidents.values()] == [
        (IncidentKind.IDLE, Severity.INFO, RecommendedAction.NONE),
        (IncidentKind.IDLE, Severity.WARNING, RecommendedAction.NONE),
    ]
    assert {engine.health_of(node.name)[0] for node in INDEX.nodes} == {Health.HEALTHY}


def kept(change: Callable[[int, dict[str, np.ndarray]], None], buckets: int) -> list[Finding]:
    """Return what is reported of GPUs without a job, all of them at rest."""
    index, state, found = small_fleet(), None, []
    for number in range(buckets):
        bucket = training_bucket(index, number)
        for metric, value in (("gpu_util_ratio", 0.0), ("power_w", 95.0)):
            bucket.gpu[metric][:] = value
        bucket.gpu["compute_processes"] = np.zeros(64)
        change(number, bucket.gpu)
        bucket = dataclasses.replace(bucket, jobs=np.full(64, -1, np.int32))
        findings, state = idle.detect(Window(index, (bucket,), True, (), START_MS), state, bucket.end_ms + 7000)
        found += findings
    return found


def test_a_process_that_keeps_a_gpu_which_no_job_holds_is_a_note_and_after_an_hour_a_warning() -> None:
    def left(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][[10, 11]] = 1 if number % 30 == 0 else np.nan  # read every five minutes

    found = kept(left, 370)
    assert {(f.cause, f.node, f.action) for f in found} == {("process_left", "n01", RecommendedAction.NONE)}
    assert found[0].severity is Severity.INFO and found[-1].severity is Severity.WARNING
    assert found[-1].members == (("n01", 2), ("n01", 3))
    assert "GPUs 2, 3 of node n01 have a process and no work for" in found[-1].summary


def test_a_process_that_works_ends_or_is_everywhere_is_not_left_over() -> None:
    def works(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][10] = 1
        gpu["gpu_util_ratio"][10] = 0.6 if number % 8 == 5 else 0.0

    def ends(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][10] = float(number < 170)

    def everywhere(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][:] = 1

    assert kept(works, 400) == kept(ends, 400) == kept(everywhere, 400) == []


def test_a_process_on_a_node_that_falls_silent_or_that_becomes_a_service_is_no_longer_reported() -> None:
    def kept_until(change: Callable[[int, dict[str, np.ndarray]], None], silent_from: int) -> int:
        index, state, last = small_fleet(), None, 0
        for number in range(700):
            bucket = training_bucket(index, number, silent=[1] if number >= silent_from else [])
            for metric, value in (("gpu_util_ratio", 0.0), ("power_w", 95.0)):
                bucket.gpu[metric][~np.isnan(bucket.gpu[metric])] = value
            bucket.gpu["compute_processes"] = np.where(bucket.gpu_rows > 0, 0.0, np.nan)
            change(number, bucket.gpu)
            bucket = dataclasses.replace(bucket, jobs=np.full(64, -1, np.int32))
            findings, state = idle.detect(Window(index, (bucket,), True, (), START_MS), state, bucket.end_ms + 7000)
            last = number if findings else last
        return last

    def left(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][10] += 1

    def service(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][10] = 1.0
        gpu["compute_processes"][: max(0, number - 400)] = 1.0

    assert 250 < kept_until(left, 300) <= 300 + 92
    assert 250 < kept_until(service, 10**6) < 460


def test_memory_in_use_shows_a_process_where_these_are_not_read() -> None:
    def left(share: float) -> Callable[[int, dict[str, np.ndarray]], None]:
        def change(number: int, gpu: dict[str, np.ndarray]) -> None:
            gpu["compute_processes"] = np.full(64, np.nan)
            gpu["framebuffer_total_bytes"] = np.full(64, 8e10)
            gpu["framebuffer_used_bytes"] = np.full(64, 6e8)
            gpu["framebuffer_used_bytes"][[10, 11]] = share * 8e10

        return change

    found = kept(left(0.7), 370)
    assert found[-1].severity is Severity.WARNING and found[-1].members == (("n01", 2), ("n01", 3))
    assert "GPUs 2, 3 of node n01 have 70% of their memory in use and no work for" in found[-1].summary
    assert kept(left(0.05), 370) == []


def test_in_a_fleet_where_nobody_names_jobs_those_that_work_are_no_service() -> None:
    """All others work, each with a process: more than half of the fleet has one."""

    def left(number: int, gpu: dict[str, np.ndarray]) -> None:
        gpu["compute_processes"][:] = 1
        gpu["compute_processes"][20:40] = 0
        gpu["gpu_util_ratio"][:20], gpu["gpu_util_ratio"][40:] = 0.95, 0.95
        gpu["gpu_util_ratio"][10] = 0.0

    assert [f.members for f in kept(left, 370)][-1] == (("n01", 2),)


def test_replicas_that_wait_on_all_idle_gpus_are_a_service_and_a_lost_row_is_no_end() -> None:
    def memory(number: int, gpu: dict[str, np.ndarray], held: slice) -> None:
        gpu["framebuffer_total_bytes"], gpu["framebuffer_used_bytes"] = np.full(64, 8e10), np.full(64, 6e8)
        gpu["framebuffer_used_bytes"][held] = 6e10
        gpu["compute_processes"] = np.full(64, np.nan)

    def service(number: int, gpu: dict[str, np.ndarray]) -> None:
        memory(number, gpu, slice(0, 64))
        gpu["compute_processes"] = np.ones(64)

    def seldom(number: int, gpu: dict[str, np.ndarray]) -> None:
        memory(number, gpu, slice(10, 12))
        if number % 3:
            gpu["framebuffer_used_bytes"][:] = np.nan

    assert kept(service, 400) == []
    found = kept(seldom, 400)
    assert found[-1].members == (("n01", 2), ("n01", 3))
    assert not [f.summary for f in found if "nan" in f.summary]

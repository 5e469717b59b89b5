"""The sequential test: it reports small lasting changes, but not varying work, coarse sensors or changes of many."""

from __future__ import annotations

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors._lib.robust import Grouping, peers
from drover_collector.detectors.straggler import detector as straggler
from drover_collector.detectors.straggler.cusum import (
    CLOCK,
    DRAM,
    DUTY,
    LATE,
    K,
    _in_percents,
    threshold,
)
from drover_core.model.events import Finding

Columns = dict[str, np.ndarray]
SLOW = 13  # GPU 5 of n01
FROM = 30


def run(change, count: int = 60, nodes: int = 8) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(nodes), count, change):
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    return reported


def slower(gpu: Columns, by: float, who: int | np.ndarray = SLOW) -> None:
    gpu["sm_clock_mhz"][who] *= 1 - by
    for metric in ("sm_active_ratio", "tensor_active_ratio"):
        gpu[metric][who] /= 1 - 0.8 * by


@pytest.mark.parametrize("by", [0.03, 0.05])
def test_a_gpu_a_little_slower_than_it_was_is_reported_within_ten_minutes(by: float) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= FROM:
            slower(gpu, by)

    reported = run(change)
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n01", 5, "clock")}
    bucket_ms = 10_000
    onset_ms = reported[0].ts_ms - reported[0].since_ms
    assert onset_ms <= 10 * 60_000
    assert abs((reported[0].since_ms - 1_800_000_000_000) / bucket_ms - FROM) <= 1
    assert any("before, its clock was" in e.text for e in reported[0].evidence)


def test_its_own_offset_from_the_first_bucket_on_is_its_nature() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        slower(gpu, 0.05)

    assert run(change) == []


def test_a_small_cap_older_than_the_job_is_reported_because_the_gpu_reports_it() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        slower(gpu, 0.04)
        gpu["power_limit_w"][SLOW] = 640

    assert {(f.node, f.gpu, f.cause) for f in run(change, 20)} == {("n01", 5, "power_cap")}


def test_a_clock_that_follows_its_work_at_the_power_limit_is_not_reported() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= FROM:
            slower(gpu, 0.05)
            gpu["clock_event_reasons"][SLOW] = 0x4

    assert run(change) == []


def test_a_fast_chip_that_loses_its_lead_when_the_power_limit_lets_go_of_all_is_not_reported() -> None:
    """Another one slows the job: the rest draws less, and all clocks rise to the same highest."""
    fast = [3, 13, 24, 40]

    def change(number: int, gpu: Columns, node: Columns) -> None:
        limited = number < FROM
        gpu["clock_event_reasons"][:] = 0x4 * limited
        gpu["throttle_power_us"] = min(number, FROM) * np.full(64, 0.9e7)
        if limited:
            slower(gpu, -0.05, np.array(fast))
        else:
            gpu["sm_clock_mhz"][:] = 1980.0

    assert run(change, 90) == []


def test_work_that_wanders_is_not_reported() -> None:
    rng = np.random.default_rng(1)
    wander = np.zeros(64)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        nonlocal wander
        wander = 0.92 * wander + 0.39 * rng.standard_normal(64)
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric] *= 1 + 0.02 * wander

    assert run(change, 400) == []


def test_sensors_of_whole_percents_are_not_reported() -> None:
    rng = np.random.default_rng(2)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric] = np.round(gpu[metric] * (1 + 0.01 * rng.standard_normal(64)) * 0.7, 2)

    assert run(change, 400) == []


def test_a_part_of_the_job_that_changes_at_once_is_learnt_again() -> None:
    part = np.arange(16)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= FROM:
            slower(gpu, 0.05, part)
        if number >= 2 * FROM:
            slower(gpu, 0.05)  # one of them, on top

    reported = run(change, 3 * FROM)
    assert {(f.node, f.gpu) for f in reported} == {("n01", 5)}
    assert min(f.since_ms for f in reported) >= 1_800_000_000_000 + 2 * FROM * 10_000


def test_slow_hbm_at_its_usual_clock() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["dram_active_ratio"] *= 1 + 0.008 * np.random.default_rng(900 + number).standard_normal(64)
        if number >= FROM:
            gpu["dram_active_ratio"][SLOW] *= 0.95
            gpu["sm_active_ratio"][SLOW] *= 1.01

    assert {(f.gpu, f.cause) for f in run(change)} == {(5, "hbm")}


def test_a_lead_in_traffic_that_ends_when_the_job_waits_is_no_slow_hbm() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["dram_active_ratio"][:] = 0.4 if number < FROM else 0.2  # all alike, and then
        if number < FROM:
            gpu["dram_active_ratio"][[13, 24, 40]] *= 1.05

    assert run(change) == []


def test_less_work_is_no_slow_hbm() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= FROM:
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
                gpu[metric][SLOW] *= 0.95

    assert run(change, 240) == [], "nor when the offset of its duty has been learnt again"


def test_a_late_host_in_a_job_of_two_nodes() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= FROM:
            gpu["gpu_util_ratio"][8:16] -= 0.06
            node["cpu_util_ratio"][1] = 0.9

    assert {(f.scope, f.node, f.cause) for f in run(change, nodes=2)} == {("node", "n01", "host")}


def test_two_of_eight_gpus_may_report_a_cap_at_once() -> None:
    two = np.array([2, 5])

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 6:
            slower(gpu, 0.15, two)
            gpu["power_limit_w"][two] = 500

    assert {(f.gpu, f.cause) for f in run(change, 16, nodes=1)} == {(2, "power_cap"), (5, "power_cap")}


def test_a_rack_with_lower_limits_is_planned_though_one_node_of_it_is_in_the_job() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["power_limit_w"][:32] = 500  # all four nodes of the rack
        slower(gpu, 0.15, np.arange(8))

    def jobs(window):
        import dataclasses

        held = np.full(64, -1, np.int32)
        held[[*range(8), *range(32, 64)]] = 0  # one node of that rack, and four others
        buckets = tuple(dataclasses.replace(b, jobs=held) for b in window.buckets)
        return dataclasses.replace(window, buckets=buckets)

    state, reported = None, []
    for window, now_ms in play(small_fleet(), 20, change):
        findings, state = straggler.detect(jobs(window), state, now_ms)
        reported += findings
    assert reported == []


def test_the_threshold_keeps_its_budget_of_false_alarms() -> None:
    """On pure noise; a large budget, so that there is something to count."""
    bucket_ms, budget = 10_000, 4_320.0  # one in 2,000 buckets
    h = threshold(bucket_ms, budget)
    rng, gpus, buckets = np.random.default_rng(3), 400, 3_000
    score, alarms = np.zeros(gpus), 0
    for _ in range(buckets):
        score = np.maximum(0, score + rng.standard_normal(gpus) - K)
        alarms += int((score > h).sum())
        score[score > h] = 0
    gpu_days = gpus * buckets * bucket_ms / 86_400_000
    assert 0.6 <= alarms / gpu_days * 1000 / budget <= 1.6
    assert threshold(10_000) > threshold(60_000)  # fewer looks a day need less


@pytest.mark.parametrize(("step", "whole"), [(0.01, True), (0.001, False)])
def test_whole_percents_are_known_in_32_bits_too(step: float, whole: bool) -> None:
    values = np.arange(0, 1, step)
    assert _in_percents(values) is whole
    assert _in_percents(values.astype(np.float32).astype(np.float64)) is whole


def test_hbm_traffic_needs_more_than_metrics_with_a_second_sign_of_their_own() -> None:
    state = None
    for window, now_ms in play(small_fleet(), 5):
        _, state = straggler.detect(window, state, now_ms)
    assert state is not None
    state.drifts.score[:] = threshold(10_000) + 0.1
    assert [bool(state.drifts.passed(channel).all()) for channel in (CLOCK, DUTY, DRAM, LATE)] == [
        True,
        True,
        False,
        True,
    ]
    state.drifts.score[:] = threshold(10_000, 0.05) + 0.1
    assert state.drifts.passed(DRAM).all()


def test_medians_of_all_metrics_at_once_are_those_of_each() -> None:
    rng = np.random.default_rng(4)
    groups = rng.integers(-1, 9, 300).astype(np.int64)
    values = rng.normal(size=(6, 300))
    values[:, rng.integers(0, 300, 80)] = np.nan
    values[3] = np.nan
    together = Grouping(groups).peers(values)
    for row in range(6):
        alone = peers(values[row], groups)
        for name in ("median", "sigma", "count"):
            np.testing.assert_array_equal(getattr(together, name)[row], getattr(alone, name))
    one = groups == 2
    known = values[0][one][~np.isnan(values[0][one])]
    assert together.median[0][one][0] == pytest.approx(np.median(known))


def waited_for(gpu: Columns, by: float, who: int | np.ndarray = SLOW) -> None:
    """A step takes `by` longer because of `who`: all do the same work in it, and the others wait at its end."""
    busy = gpu["sm_active_ratio"].copy()
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        gpu[metric] /= 1 + by
    gpu["sm_active_ratio"][who] = (busy[who] + by) / (1 + by)
    gpu["power_w"] *= 1 - 0.5 * by
    gpu["power_w"][who] *= 1 + by


@pytest.mark.parametrize("by", [0.03, 0.08, 0.33])
def test_a_gpu_that_all_wait_for_is_found_without_a_cause(by: float) -> None:
    """Slow HBM at its usual clock, as a stranger's physics has it: SM 0.615 -> 0.674, its peers' 0.614 -> 0.535."""
    noise = np.random.default_rng(4)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric] *= 0.7 * (1 + 0.004 * noise.standard_normal(64))
        if number >= FROM:
            waited_for(gpu, by)

    reported = run(change, 90)
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n01", 5, "unexplained")}
    assert reported[0].ts_ms - (1_800_000_000_000 + FROM * 10_000) <= (60_000 if by > 0.05 else 600_000)
    assert "its memory bandwidth first" in reported[0].advice


def test_a_heavier_share_of_the_work_is_no_straggler() -> None:
    """An expert that gets more tokens is waited for, too: it makes more products."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_active_ratio"] *= 0.7
        if number >= FROM:
            waited_for(gpu, 0.15)
            gpu["tensor_active_ratio"][SLOW] *= 1.3

    assert run(change) == []


def test_less_work_in_the_same_time_is_no_straggler() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_active_ratio"] *= 0.7
        if number >= FROM:
            for metric in ("tensor_active_ratio", "dram_active_ratio"):
                gpu[metric][SLOW] *= 0.8

    assert "unexplained" not in {f.cause for f in run(change)}


def test_a_busier_gpu_for_which_nobody_waits_is_no_straggler() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_active_ratio"] *= 0.7
        if number >= FROM:
            gpu["sm_active_ratio"][SLOW] *= 1.15

    assert run(change) == []


@pytest.mark.parametrize("who", [np.arange(0, 64, 8), np.arange(8, 16)], ids=["a stage", "a node"])
def test_many_that_are_waited_for_are_the_works_matter(who: np.ndarray) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_active_ratio"] *= 0.7
        if number >= FROM:
            waited_for(gpu, 0.15, who)

    assert run(change) == []


@pytest.mark.parametrize("reads", ["the same bytes twice", "nothing but memory's use"])
def test_a_gpu_that_all_wait_for_is_found_whatever_its_memory_does(reads: str) -> None:
    """Its SMs are active for twice as long with the same products; and on boards where no duty is read."""
    noise = np.random.default_rng(4)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric] *= 0.5 * (1 + 0.004 * noise.standard_normal(64))
        used = np.full(64, 0.30)
        if number >= FROM:
            waited_for(gpu, 0.3)
            gpu["dram_active_ratio"][SLOW] *= 2.0
            used /= 1.3
            used[SLOW] = 0.32
        gpu["memory_util_ratio"] = np.round(used + 0.004 * noise.standard_normal(64), 2)
        if reads == "nothing but memory's use":
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
                gpu[metric] = np.full(64, np.nan)

    assert {(f.node, f.gpu, f.cause) for f in run(change, 90)} == {("n01", 5, "unexplained")}


def test_profiling_that_pauses_for_a_bucket_or_an_hour_accuses_nobody_and_hides_nobody() -> None:
    noise = np.random.default_rng(4)

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric] *= 0.5 * (1 + 0.004 * noise.standard_normal(64))
        used = 0.30 + 0.03 * (np.arange(64) % 3)
        if number >= 90:
            waited_for(gpu, 0.3)
        if number % 10 == 5 or 30 <= number < 60:
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
                gpu[metric] = np.full(64, np.nan)
        gpu["memory_util_ratio"] = np.round(used + 0.004 * noise.standard_normal(64), 2)

    reported = run(change, 140)
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n01", 5, "unexplained")}
    assert reported[0].ts_ms >= 1_800_000_000_000 + 900_000

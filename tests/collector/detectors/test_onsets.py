"""What was before a fault, and when it began: minutes of the fault change neither."""

from __future__ import annotations

import re

import numpy as np

from drover_collector.detectors._lib.examples import START_MS, play, small_fleet
from drover_collector.detectors.thermal import detector as thermal
from drover_core.model.events import Finding
from testbed.straggler_findings import SLOW, Columns, run, waits


def capped(gpu: Columns) -> None:
    waits(gpu, 1.35)
    gpu["sm_clock_mhz"][SLOW] /= 1.35
    gpu["power_limit_w"][SLOW] = gpu["power_w"][SLOW] = 450
    gpu["clock_event_reasons"][SLOW] = 0x4


def before_of(found: list[Finding]) -> list[dict[str, float]]:
    """What each finding says was usual: clock, duty, HBM traffic or lateness."""
    return [dict(f.snapshot.get("usual", {})) for f in found]


def test_what_a_slow_gpu_had_before_is_not_learnt_from_its_fault() -> None:
    """A job's GPU is capped 3 minutes into the job, and 10 minutes later its clock was "before, 69.7 %"."""

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 18:
            capped(gpu)

    findings = run(change, 80)
    assert len(findings) > 50
    for usual in before_of(findings):
        assert abs(usual["clock"] - 1) < 0.02
        assert abs(usual["duty"] - 1) < 0.02


def test_where_nothing_was_learnt_before_the_fault_nothing_is_said_of_before() -> None:
    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 6:
            capped(gpu)

    findings = run(change, 80)
    assert len(findings) > 50
    assert before_of(findings) == [{}] * len(findings)


def test_after_a_fault_of_a_young_job_the_same_gpu_is_learnt_unchanged() -> None:
    """Its next fault is held against its health, not against the fault before."""

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if 6 <= number < 40 or number >= 100:
            capped(gpu)

    second = [f for f in run(change, 160) if f.since_ms >= START_MS + 900_000]
    assert second
    for usual in before_of(second):
        assert abs(usual["clock"] - 1) < 0.02


def test_a_straggler_began_with_the_first_bucket_that_shows_it_though_the_jobs_power_moved_too_much_to_judge() -> None:
    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 12:
            capped(gpu)
            gpu["power_w"] *= 0.75  # of the whole job, which waits: its power is steady from the next bucket on
            gpu["power_w"][SLOW] = 450

    findings = run(change, 20)
    assert {(f.cause, f.gpu) for f in findings} == {("power_cap", 5)}
    assert {f.since_ms for f in findings} == {START_MS + 120_000}


def cooling(change_from: int, ramp: int, count: int, slowed: bool = False) -> list[Finding]:
    """GPU 21 gets warmer by steps over `ramp` buckets, at a power that moves at first."""

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        gpu["throttle_thermal_sw_us"][21] = max(0, number - change_from) * (4e6 if slowed else 0)
        if number >= change_from:
            if number < change_from + 2:
                gpu["power_w"][16:24] *= 0.8
            share = min(1.0, (number - change_from + 1) / ramp)
            gpu["gpu_temp_c"][21] = 26 + 0.055 * (1 + 0.6 * share) * gpu["power_w"][21]
            gpu["thermal_margin_c"][21] = 87 - gpu["gpu_temp_c"][21]

    state, findings = None, list[Finding]()
    for window, now_ms in play(small_fleet(), count, change):
        found, state = thermal.detect(window, state, now_ms)
        findings += found
    return findings


def test_bad_cooling_began_with_the_first_bucket_that_shows_it_though_no_load_was_steady_enough_to_judge() -> None:
    findings = cooling(10, 1, 24)
    assert {(f.cause, f.node, f.gpu) for f in findings} == {("cooling", "n02", 5)}
    assert {f.since_ms for f in findings} == {START_MS + 100_000}


def test_what_a_gpus_cooling_was_in_its_own_past_is_not_learnt_while_heat_holds_it_down() -> None:
    """A rise of 15 % alone is not bad cooling; heat that throttles the GPU is reported, and its past stays."""

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        gpu["throttle_thermal_sw_us"][21] = max(0, number - 50) * 4e6
        if number >= 50:
            gpu["gpu_temp_c"][21] = 26 + 0.055 * 1.15 * gpu["power_w"][21]

    state, findings = None, list[Finding]()
    for window, now_ms in play(small_fleet(), 160, change):
        found, state = thermal.detect(window, state, now_ms)
        findings += found
    past = [
        float(m[1]) for f in findings for e in f.evidence if (m := re.search(r"had ([\d.]+) degC/W in its own", e.text))
    ]
    assert len(past) > 90
    assert np.ptp(past) < 0.001

"""Device memory: states of the driver and counters that grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from drover_collector.detectors import DETECTORS, memory
from drover_collector.detectors._lib.examples import (
    LAG_MS,
    START_MS,
    play,
    small_fleet,
    training_bucket,
)
from drover_collector.engine.engine import Engine
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Finding,
    Incident,
    RecommendedAction,
    Severity,
)

Columns = dict[str, np.ndarray]


def run(change: Callable[[int, Columns], None], count: int = 6) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(), count, lambda number, gpu, node: change(number, gpu)):
        findings, state = memory.detect(window, state, now_ms)
        reported += findings
    return reported


@pytest.mark.parametrize(
    ("metric", "value", "cause", "severity", "action"),
    [
        ("row_remap_failed", 1, "remap_failed", Severity.CRITICAL, RecommendedAction.DRAIN),
        ("row_remap_pending", 1, "remap_pending", Severity.WARNING, RecommendedAction.DRAIN),
        ("sram_threshold_exceeded", 1, "sram_threshold", Severity.CRITICAL, RecommendedAction.DRAIN),
        ("remapped_rows_uncorrected", 512, "remaps_many", Severity.WARNING, RecommendedAction.ADVISE),
        ("remap_banks_none", 1, "no_spare_rows", Severity.WARNING, RecommendedAction.ADVISE),
    ],
)
def test_states(metric: str, value: float, cause: str, severity: Severity, action: RecommendedAction) -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu.setdefault(metric, np.zeros(64))[11] = value if number >= 2 else 0

    reported = run(change)
    assert {(f.node, f.gpu, f.cause, f.severity, f.action) for f in reported} == {("n01", 3, cause, severity, action)}
    assert len({f.since_ms for f in reported}) == 1


def test_what_hundreds_of_boards_show_at_once_is_one_finding_and_what_stood_before_stays_one_of_its_own() -> None:
    state, reported = None, []

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        gpu["row_remap_pending"][11] = 1
        gpu["row_remap_pending"][40:] = number >= 70

    for window, now_ms in play(small_fleet(), 80, change):
        reported, state = memory.detect(window, state, now_ms)
    assert sorted((f.scope, f.cause, f.node, f.gpu, f.action) for f in reported if f.scope == "gpu") == [
        ("gpu", "remap_pending", "n01", 3, RecommendedAction.DRAIN), *[
            ("gpu", "remap_pending", f"n0{5 + k // 8}", k % 8, RecommendedAction.DRAIN) for k in range(24)
        ],
    ]  # fmt: skip

    def most(number: int, gpu: Columns, node: Columns) -> None:
        change(number, gpu, node)
        gpu["row_remap_pending"][24:] = number >= 70

    state = None
    for window, now_ms in play(small_fleet(), 80, most):
        reported, state = memory.detect(window, state, now_ms)
    assert [(f.scope, f.cause, f.action, len(f.members)) for f in reported] == [
        ("gpu", "remap_pending", RecommendedAction.DRAIN, 1),
        ("rack", "remap_pending_common", RecommendedAction.ADVISE, 5),
    ]


def test_a_board_that_stood_alone_before_the_many_does_so_after_a_restart_too() -> None:
    def detect(numbers: range, left: Sequence[Incident]) -> Engine:
        engine = Engine(small_fleet(), Policy.load(), START_MS, [d for d in DETECTORS if d.name == "memory"])
        engine.restore(left, [], [])
        for number in numbers:
            made = training_bucket(engine.index, number)
            made.gpu["row_remap_pending"] = np.where(np.arange(64) >= 24, float(number >= 70), 0.0)
            made.gpu["row_remap_pending"][11] = 1
            engine.on_bucket(made, made.end_ms + LAG_MS)
        return engine

    def reported(engine: Engine) -> set[tuple[str, str | None, str]]:
        return {(i.id, i.node, i.cause) for i in engine.incidents.values() if i.closed_ms is None}

    before = detect(range(80), [])
    assert sorted(cause for _, _, cause in reported(before)) == ["remap_pending", "remap_pending_common"]
    assert reported(detect(range(80, 120), list(before.incidents.values()))) == reported(before)


def test_511_remapped_rows_are_quiet() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["remapped_rows_uncorrected"][11] = 511

    assert run(change) == []


def test_an_uncorrected_error_is_reported_when_it_is_new_and_not_when_it_was_there_before() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_uncorrected"][3] = 7  # since long ago
        gpu["ecc_dram_uncorrected"][11] = 1 if number >= 3 else 0

    reported = run(change)
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n01", 3, "uncorrected_errors")}


def test_a_counter_that_starts_again_is_no_growth() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_uncorrected"][11] = 5 if number < 3 else 0

    assert run(change) == []


def test_a_value_that_comes_late_is_no_growth() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_uncorrected"][11] = np.nan if number < 3 else 5

    assert run(change) == []


def test_corrected_errors_matter_only_in_a_storm() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_corrected"] = np.zeros(64)
        gpu["ecc_dram_corrected"][5] = 10 * number  # one a second
        gpu["ecc_dram_corrected"][11] = 5000 * number

    reported = run(change)
    assert {(f.node, f.gpu, f.cause, f.action) for f in reported} == {("n01", 3, "ecc_storm", RecommendedAction.PROBE)}


def test_a_counter_that_is_read_now_and_then_or_alone_hides_no_errors() -> None:
    def now_and_then(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_corrected"] = np.zeros(64)
        gpu["ecc_dram_corrected"][10] = number
        if number % 30 == 0:
            gpu["ecc_sram_corrected"] = np.zeros(64)

    def alone(number: int, gpu: Columns) -> None:
        gpu["ecc_sram_corrected"] = np.zeros(64)
        gpu["ecc_sram_corrected"][10] = number

    for change, metric in ((now_and_then, "ecc_dram_corrected"), (alone, "ecc_sram_corrected")):
        reported = run(change, 120)
        assert {(f.node, f.gpu, f.cause, f.evidence[0].metric) for f in reported} == {("n01", 2, "ecc_bursts", metric)}


def test_errors_that_come_again_and_again_are_reported_before_a_storm_and_stray_ones_are_not() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["ecc_dram_corrected"] = np.zeros(64)
        gpu["ecc_dram_corrected"][11] = 5 * (number // 9)  # five every minute and a half
        gpu["ecc_dram_corrected"][20] = number // 6  # one a minute, for less than half an hour
        gpu["ecc_dram_corrected"][30] = 900 * (number >= 30)  # one burst
        gpu["ecc_dram_corrected"][40] = 5000 * number
        gpu["ecc_sram_corrected"] = np.zeros(64)
        gpu["ecc_sram_corrected"][50] = 5 * (number // 9)

    reported = run(change, 120)
    assert {(f.node, f.gpu, f.cause, f.action) for f in reported if f.cause == "ecc_bursts"} == {
        ("n01", 3, "ecc_bursts", RecommendedAction.ADVISE), ("n06", 2, "ecc_bursts", RecommendedAction.ADVISE),
    }  # fmt: skip
    assert {f.gpu for f in reported if f.cause == "ecc_storm"} == {0}
    assert len({f.since_ms for f in reported if f.cause == "ecc_bursts"}) == 1
    assert {f.evidence[0].metric for f in reported if f.node == "n06"} == {"ecc_sram_corrected"}


def test_rows_that_are_replaced_one_after_the_other_are_reported_before_the_gpu_vanishes() -> None:
    def change(number: int, gpu: Columns) -> None:
        gpu["remapped_rows_corrected"] = np.full(64, 30.0)  # since long ago
        gpu["remapped_rows_corrected"][11] += number // 4  # 1.5 a minute
        gpu["remapped_rows_corrected"][20] += number // 20  # 2 within this time
        gpu["remapped_rows_corrected"][40] = np.nan if number < 9 else 80  # reports late

    reported = run(change, 50)
    assert {(f.node, f.gpu, f.cause, f.action) for f in reported} == {
        ("n01", 3, "remaps_pile_up", RecommendedAction.PROBE)
    }
    assert reported[0].severity is Severity.WARNING

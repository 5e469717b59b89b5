"""A GPU whose telemetry is partly lost is reported; what its whole node or fleet loses is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import (
    KEPT,
    LAG_MS,
    START_MS,
    small_fleet,
    training_bucket,
)
from drover_collector.detectors._lib.report_interval import ReportInterval
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.liveness import detector as liveness
from drover_core.model.events import Finding, RecommendedAction, Severity

Columns = dict[str, np.ndarray]
GPU = 21  # GPU 5 of n02
Change = Callable[[int, Columns, np.ndarray], None]  # changes the values and rows of GPUs in a bucket


def run(change: Change, count: int = 120, restart: int | None = None) -> list[Finding]:
    """Return what is reported, without ends. `restart`: the bucket before which the collector starts again."""
    index = small_fleet()
    held, interval, state, found = Buckets(KEPT), ReportInterval(index), None, []
    last: dict[tuple[str, int | None], Finding] = {}
    for number in range(count):
        bucket = training_bucket(index, number)
        rows = bucket.gpu_rows.copy()
        change(number, bucket.gpu, rows)
        held.append(replace(bucket, gpu_rows=rows))
        interval.add_bucket(held.all()[-1])
        if number == restart:
            state = liveness._fresh(index, bucket.start_ms)
            for finding in last.values():
                state.partial.resume(index.gpu(finding.node or "", finding.gpu or 0) or 0, finding.since_ms)
        window = Window(index, held.all(), True, (), START_MS, report_interval=interval)
        findings, state = liveness.detect(window, state, bucket.end_ms + LAG_MS)
        last = {(f.node, f.gpu): f for f in findings if not f.cleared}
        found += findings
    return [f for f in found if not f.cleared]


def lose(gpus: slice | int, often: int, of: int, first: int = 20, last: int = 10**6) -> Change:
    def change(number: int, gpu: Columns, rows: np.ndarray) -> None:
        if first <= number <= last and number % of < often:
            rows[gpus] = 0
            for values in gpu.values():
                values[gpus] = np.nan

    return change


def test_a_gpu_that_misses_a_third_of_its_rows_is_reported_with_its_neighbours_quiet() -> None:
    found = run(lose(GPU, 1, 3))
    assert {(f.cause, f.node, f.gpu, f.severity, f.action) for f in found} == {
        ("gpu_partial", "n02", 5, Severity.WARNING, RecommendedAction.ADVISE)
    }
    assert found[0].ts_ms <= START_MS + 20 * 10_000 + 900_000
    assert found[0].since_ms == START_MS + 21 * 10_000


def test_some_of_the_rows_of_each_bucket_are_enough() -> None:
    def change(number: int, gpu: Columns, rows: np.ndarray) -> None:
        if number >= 20:
            rows[GPU] = 7

    assert {f.cause for f in run(change)} == {"gpu_partial"}


def test_one_sensor_that_is_no_longer_read_is_reported() -> None:
    def change(number: int, gpu: Columns, rows: np.ndarray) -> None:
        if number >= 20:
            gpu["power_w"][GPU] = np.nan

    assert {f.cause for f in run(change)} == {"gpu_partial"}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the whole node loses rows", lose(slice(16, 24), 1, 2)),
        ("the whole fleet loses rows", lose(slice(0, 64), 1, 3)),
        ("a row in twenty is lost", lose(GPU, 1, 20)),
        ("one gap of two minutes: a reset", lose(GPU, 1, 1, 30, 31)),
    ],
)
def test_what_is_not_of_one_gpu_is_not_reported(what: str, change: Change) -> None:
    assert [f for f in run(change) if f.cause == "gpu_partial"] == [], what


def test_a_sensor_that_the_board_never_had_is_not_missing() -> None:
    def change(number: int, gpu: Columns, rows: np.ndarray) -> None:
        gpu["power_w"][GPU] = np.nan

    assert run(change) == []


def test_a_gpu_that_is_gone_is_lost_and_not_partly_there() -> None:
    assert {f.cause for f in run(lose(GPU, 1, 1, 30))} == {"gpu_lost"}


def test_it_ends_when_the_gpu_answers_again_and_outlives_a_restart() -> None:
    whole = run(lose(GPU, 1, 3, 20, 100), count=260)
    again = run(lose(GPU, 1, 3, 20, 100), count=260, restart=90)
    for found in (whole, again):
        assert START_MS + 1_000_000 < max(f.ts_ms for f in found) < START_MS + 2_200_000
    assert {f.since_ms for f in again} == {f.since_ms for f in whole}
    assert [f.ts_ms for f in again][:40] == [f.ts_ms for f in whole][:40]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_node_with_one_gpu_or_two_has_nothing_to_compare_with(gpus: int) -> None:
    index, state, found = small_fleet(4, gpus=gpus), None, []
    held, interval = Buckets(KEPT), ReportInterval(index)
    for number in range(120):
        bucket = training_bucket(index, number)
        if number >= 20 and number % 3 == 0:
            bucket.gpu_rows[gpus] = 0
            for values in bucket.gpu.values():
                values[gpus] = np.nan
        held.append(bucket)
        interval.add_bucket(bucket)
        window = Window(index, held.all(), True, (), START_MS, report_interval=interval)
        findings, state = liveness.detect(window, state, bucket.end_ms + LAG_MS)
        found += findings
    assert found == []


def test_a_gpu_that_is_lost_in_the_end_is_no_longer_partly_there() -> None:
    def change(number: int, gpu: Columns, rows: np.ndarray) -> None:
        lose(GPU, 1, 3 if number < 90 else 1)(number, gpu, rows)

    found = run(change, count=130)
    assert max(f.ts_ms for f in found if f.cause == "gpu_partial") <= START_MS + 96 * 10_000
    assert found[-1].cause == "gpu_lost"

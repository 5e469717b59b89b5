"""Jobs that stand still, and what only looks like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from drover_collector.detectors import DETECTORS
from drover_collector.detectors._lib.examples import (
    KEPT,
    LAG_MS,
    START_MS,
    play,
    small_fleet,
    training_bucket,
)
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.hang import detector as hang
from drover_collector.engine.engine import Engine
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_simulator.faults import Fault
from testbed.simulated_buckets import Recording, record

Columns = dict[str, np.ndarray]
CULPRIT = 21  # GPU 5 of n02
STOPS = 5  # number of the bucket
HANG = next(detector for detector in DETECTORS if detector.name == hang.NAME)


def run(change: Callable[[int, Columns, Columns], None], count: int = 18) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(), count, change):
        findings, state = hang.detect(window, state, now_ms)
        reported += findings
    return reported


def spin(gpu: Columns) -> None:
    gpu["tensor_active_ratio"][:], gpu["dram_active_ratio"][:] = 0.0, 0.01
    gpu["power_w"][:], gpu["gpu_util_ratio"][:] = 210.0, 1.0


def rest(gpu: Columns, which: object) -> None:
    gpu["power_w"][which], gpu["gpu_util_ratio"][which] = 110.0, 0.0


def test_the_rank_without_a_kernel_is_named_after_ninety_seconds_and_ten_minutes_are_critical() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)
            rest(gpu, CULPRIT)

    reported = run(change, 70)
    first = reported[0]
    assert (first.node, first.gpu, first.scope, first.job) == ("n02", 5, "gpu", "812")
    assert first.ts_ms - LAG_MS - first.since_ms == hang.REPORT_MS
    assert first.since_ms == START_MS + STOPS * 10_000
    assert (first.lost_gpus, first.waiting_gpus) == (1.0, 63.0)
    assert first.action is RecommendedAction.PROBE
    grave = next(f for f in reported if f.severity is Severity.CRITICAL)
    assert grave.ts_ms - LAG_MS - grave.since_ms == hang.CRITICAL_MS
    assert {f.action for f in reported} == {RecommendedAction.PROBE}, "no drain: most hangs are of software"


def test_a_rank_that_spins_like_the_others_is_named_when_it_stopped_before_them() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        work = gpu["tensor_active_ratio"].copy(), gpu["dram_active_ratio"].copy()
        if number >= STOPS - 1:
            spin(gpu)
        if number == STOPS - 1:
            others = np.arange(64) != CULPRIT
            gpu["tensor_active_ratio"][others], gpu["dram_active_ratio"][others] = work[0][others], work[1][others]

    reported = run(change)
    assert {(f.node, f.gpu) for f in reported} == {("n02", 5)}
    assert "stopped 10 s before them" in reported[0].summary


def test_where_none_stands_out_it_is_of_the_job() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)

    reported = run(change)
    assert {(f.scope, f.cause, f.node, f.action) for f in reported} == {
        ("job", "standstill", None, RecommendedAction.WATCH)
    }
    assert len(reported[0].members) == 64


def test_a_node_whose_ranks_all_stopped_is_named() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)
            rest(gpu, slice(16, 20))

    assert {(f.scope, f.node, f.gpu) for f in run(change)} == {("node", "n02", None)}


@pytest.mark.parametrize("kept", ["tensor_active_ratio", "dram_active_ratio"])
def test_one_gpu_at_work_is_no_standstill(kept: str) -> None:
    """A barrier around what one rank does: an evaluation, a save."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        work = gpu[kept][CULPRIT]
        if number >= STOPS:
            spin(gpu)
            gpu[kept][CULPRIT] = work / 3

    assert run(change, 40) == []


def test_a_pause_shorter_than_ninety_seconds_is_not_reported() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS and number % 10 < 8:
            spin(gpu)

    assert run(change, 60) == []


def test_full_power_is_work_of_a_kind_that_no_channel_shows() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            power = gpu["power_w"].copy()
            spin(gpu)
            gpu["power_w"][:] = power

    assert run(change, 30) == []


def test_by_power_alone_it_takes_three_minutes() -> None:
    """A100s without DCGM have utilisation and power only."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)
        del gpu["tensor_active_ratio"], gpu["dram_active_ratio"]

    reported = run(change, 40)
    assert reported[0].ts_ms - LAG_MS - reported[0].since_ms == hang.REPORT_ALONE_MS


def test_a_job_that_never_worked_does_not_hang() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        spin(gpu)

    assert run(change, 40) == []


def test_a_job_with_a_node_that_does_not_report_may_be_working() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)

    state, reported, kept = None, [], Buckets(KEPT)
    index = small_fleet()
    for number in range(30):
        kept.append(training_bucket(index, number, change, silent=[1] if number >= STOPS else []))
        found, state = hang.detect(Window(index, kept.all(), True, (), START_MS), state, 0)
        reported += found
    assert reported == []


def test_another_job_begins_again_and_what_is_gone_is_forgotten() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)

    state, kept, reported = None, Buckets(KEPT), []
    index = small_fleet()
    for number in range(100):
        kept.append(training_bucket(index, number, change, job="812" if number < 10 else "813"))
        found, state = hang.detect(Window(index, kept.all(), True, (), START_MS), state, 0)
        reported += found
    assert reported == [], "the first was ended in time, the second never worked"
    assert set(state.jobs) == {"813"}


def test_a_job_that_falls_silent_while_it_stands_still_is_not_reported() -> None:
    """Its evidence contains no absent values either."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)

    def run_silent(since: int) -> list[Finding]:
        state, reported = None, []
        for window, now_ms in play(small_fleet(), 40, change, lambda number: range(8) if number >= since else []):
            findings, state = hang.detect(window, state, now_ms)
            reported += findings
        return reported

    assert run_silent(STOPS + 4) == []
    assert len(run_silent(STOPS + 12)) == 4, "until no GPU reports"


def test_a_gpu_without_utilisation_that_reports_is_not_called_silent() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][:] = 1.0
        if number >= STOPS:
            spin(gpu)
        gpu["gpu_util_ratio"][CULPRIT] = np.nan

    assert {(f.scope, f.cause) for f in run(change)} == {("job", "standstill")}


def test_ranks_of_several_nodes_that_rest_are_named() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)
            rest(gpu, [CULPRIT, 40])

    (first, *_) = run(change)
    assert (first.scope, first.lost_gpus) == ("job", 2.0)
    assert "62 of its GPUs wait for 2 GPUs on n02, n05; each runs no kernel." in first.summary


def test_one_bucket_of_ten_minutes_is_no_standstill_of_ten_minutes() -> None:
    index, state, kept, reported = small_fleet(), None, Buckets(KEPT), []
    for number in range(12):
        bucket = training_bucket(
            index, number, lambda number, gpu, _node: spin(gpu) if number == STOPS or number >= STOPS + 3 else None
        )
        kept.append(dataclasses.replace(bucket, start_ms=START_MS + number * 600_000, length_ms=600_000))
        found, state = hang.detect(Window(index, kept.all(), True, (), START_MS), state, number)
        reported += found
    assert reported[0].ts_ms == STOPS + 4, "the second of the second time"


@pytest.mark.parametrize("culprits", [[CULPRIT], [], list(range(16, 20))])
def test_a_job_that_hangs_for_longer_than_what_a_restart_reads_stays_the_same_incident(culprits: list[int]) -> None:
    index = small_fleet()

    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)
            rest(gpu, culprits)

    first, second = (Engine(index, Policy.load(), START_MS, [HANG]) for _ in range(2))
    for number in range(80):
        first.on_bucket(training_bucket(index, number, change), START_MS + (number + 1) * 10_000 + LAG_MS)
    (before,) = first.incidents.values()
    second.restore([before], (training_bucket(index, number, change) for number in range(20, 80)), [])
    for number in range(80, 110):
        second.on_bucket(training_bucket(index, number, change), START_MS + (number + 1) * 10_000 + LAG_MS)
    (after,) = second.incidents.values()
    assert (after.id, after.closed_ms, after.scope) == (before.id, None, before.scope)
    assert after.summary.split(":")[1].split("wait")[1] == before.summary.split(":")[1].split("wait")[1]
    for number in range(110, 120):
        second.on_bucket(training_bucket(index, number), START_MS + (number + 1) * 10_000 + LAG_MS)
    assert [i.closed_ms is None for i in second.incidents.values()] == [False], "it works again"


def test_a_hang_that_was_part_of_another_incident_goes_on_in_plain_words_after_a_restart() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        spin(gpu)
        rest(gpu, CULPRIT)

    usual = tuple(
        Evidence("then", metric, 0.0, level)
        for metric, level in (("tensor_active_ratio", 0.5), ("dram_active_ratio", 0.5), ("power_w", 600.0))
    )
    left = Incident(
        "i", IncidentKind.XID, "xid_119", "gpu", "n02", 5, (("n02", 5),), START_MS, START_MS, None, Severity.WARNING,
        0.9, RecommendedAction.PROBE, "XID 119 on it.", "", usual, (), ("xid", "hang"), "812", updated_ms=START_MS,
    )  # fmt: skip
    state, reported = hang.restored([left]), []
    for window, now_ms in play(small_fleet(), 12, change):
        findings, state = hang.detect(window, state, now_ms)
        reported += findings
    assert {(f.node, f.gpu) for f in reported} == {("n02", 5)}
    assert reported[-1].summary.endswith("wait for GPU 5 of node n02, which stopped.")


def judge(recording: Recording) -> list[Finding]:
    state, reported, kept = None, [], Buckets(KEPT)
    for bucket in recording.buckets:
        kept.append(bucket)
        window = Window(recording.index, kept.all(), True, (), recording.buckets[0].start_ms)
        findings, state = hang.detect(window, state, bucket.end_ms + LAG_MS)
        reported += findings
    return reported


def test_simulated_hangs_are_reported_with_the_right_gpu() -> None:
    reported = judge(record(1320, 10, lambda spec: [Fault("hang", "rank_stopped", "r01n02", 3, 200.0, 560.0)]))
    assert {(f.node, f.gpu) for f in reported} == {("r01n02", 3)}


def test_simulated_jobs_without_data_and_those_that_save_do_not_hang() -> None:
    assert judge(record(1321, 10, lambda spec: [Fault("hang", "data_stall", "r01n02", None, 200.0, 500.0, 0.95)])) == []


@pytest.mark.parametrize("rests", [True, False])
def test_a_board_that_spins_at_nearly_full_power_shows_a_hang_by_the_rank_that_rests(rests: bool) -> None:
    """As a T4 does: no tensor or HBM activity is read, PCIe traffic falls, power hardly does."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio"):
            gpu[metric][:] = np.nan
        gpu["pcie_rx_bytes_per_s"] = np.full(64, 8e8)
        gpu["power_w"][:] = 65.0
        if number >= STOPS:
            gpu["gpu_util_ratio"][:], gpu["power_w"][:], gpu["pcie_rx_bytes_per_s"][:] = 1.0, 60.0, 4e7
            if rests:
                rest(gpu, CULPRIT)

    reported = run(change, 70)
    assert {(f.node, f.gpu) for f in reported} == ({("n02", 5)} if rests else set())


def test_a_gpu_that_loses_a_row_is_not_the_one_that_stopped() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= STOPS:
            spin(gpu)

    state, reported = None, []
    for window, now_ms in play(small_fleet(), STOPS + 20, change):
        bucket = window.newest
        if (bucket.end_ms - START_MS) // 10_000 == STOPS + 9:  # as it is reported
            rows = bucket.gpu_rows.copy()
            rows[CULPRIT] = 0
            gpu = {metric: values.copy() for metric, values in bucket.gpu.items()}
            for values in gpu.values():
                values[CULPRIT] = np.nan
            window = dataclasses.replace(  # the window as it came, less a row
                window, buckets=(*window.buckets[:-1], dataclasses.replace(bucket, gpu=gpu, gpu_rows=rows))
            )
        findings, state = hang.detect(window, state, now_ms)
        reported += findings
    assert reported and {f.cause for f in reported} == {"standstill"}


def test_a_gpu_that_a_job_holds_and_never_used_has_not_stopped_it() -> None:
    """Without profiling metrics: PCIe traffic ends as the data is in the cache, and power stays."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio"):
            gpu[metric][:] = np.nan
        gpu["pcie_rx_bytes_per_s"] = np.full(64, 4e8 if number < STOPS else 2e7)
        gpu["power_w"][:] = 649.0 if number < STOPS else 600.0  # less to load
        gpu["gpu_util_ratio"][:] = 0.98
        gpu["pcie_rx_bytes_per_s"][CULPRIT] = 2e5
        rest(gpu, CULPRIT)

    assert run(change, 70) == []


def test_an_evaluation_that_only_pcie_shows_is_no_standstill() -> None:
    index, state, reported = small_fleet(), None, []

    def change(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu.pop(metric)
        evaluates = number >= 30 and number % 60 < 24
        for metric in ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"):
            gpu[metric] = np.full(index.gpu_count, 4e8 * (0.4 if evaluates else 1.0))
        gpu["power_w"] *= 0.72 if evaluates else 1.0

    for window, now_ms in play(index, 100, change):
        findings, state = hang.detect(window, state, now_ms)
        reported += findings
    assert reported == []

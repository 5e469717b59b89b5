"""Stragglers: the one that is waited for and its cause; quiet about uneven work, planned caps and natural spread."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.straggler import detector as straggler
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, RecommendedAction, Severity
from drover_core.model.fleet import FleetSpec, LinkSpec
from drover_simulator.faults import Fault
from testbed.simulated_buckets import Recording, record
from testbed.straggler_findings import SLOW, Columns, run, waits


def test_a_power_cap_is_explained_with_values() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            waits(gpu, 1.2)
            gpu["sm_clock_mhz"][SLOW] /= 1.2
            gpu["power_limit_w"][SLOW] = gpu["power_w"][SLOW] = 480
            gpu["clock_event_reasons"][SLOW] = 0x4

    reported = run(change)
    assert {(f.node, f.gpu, f.cause, f.severity, f.action, f.job) for f in reported} == {
        ("n01", 5, "power_cap", Severity.WARNING, RecommendedAction.PROBE, "812")
    }
    first = reported[0]
    assert "1,4" in first.summary
    assert "63 peers of job 812 have 1,75" in first.summary
    assert "peers wait about 17% of each step" in first.summary
    assert first.waiting_gpus == pytest.approx(0.167 * 63, rel=0.1)
    clock = next(e for e in first.evidence if e.metric == "sm_clock_mhz")
    assert clock.value is not None
    assert clock.expected is not None
    assert clock.value < clock.expected
    assert clock.peers == 63
    assert any("software power cap" in e.text for e in first.evidence)


def test_a_slow_gpu_that_nobody_waits_for_is_no_straggler() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:  # it has less to do, and runs slower for it
            gpu["sm_clock_mhz"][SLOW] *= 0.85
            gpu["tensor_active_ratio"][SLOW] *= 0.8
            gpu["sm_active_ratio"][SLOW] *= 0.8

    assert run(change) == []


def test_natural_spread_of_clocks_at_full_power_is_quiet() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        waits(gpu, 1.12)
        gpu["sm_clock_mhz"][SLOW] *= 0.88  # leaks more than the others, draws all it may
        gpu["power_w"][SLOW] = 699
        gpu["clock_event_reasons"][SLOW] = 0x4
        gpu["throttle_power_us"][SLOW] = 0.9 * number * 10e6

    assert run(change, count=20) == []


def test_a_job_that_is_capped_as_a_whole_is_quiet() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["power_limit_w"][:] = 500
            gpu["sm_clock_mhz"] *= 0.8
            gpu["clock_event_reasons"][:] = 0x4

    assert run(change) == []


def test_a_rack_of_the_job_that_is_capped_is_planned_not_32_stragglers() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["power_limit_w"][:32] = 500
            gpu["sm_clock_mhz"][:32] *= 0.8
            gpu["tensor_active_ratio"][32:] *= 0.8
            gpu["sm_active_ratio"][32:] *= 0.8

    assert run(change) == []


def test_idle_gpus_are_not_compared() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][:] = 0.0
        gpu["sm_clock_mhz"][SLOW] = 345

    assert run(change) == []


def test_the_first_buckets_of_a_job_do_not_count() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number in (5, 6):  # as the new job starts, one rank still compiles
            waits(gpu, 1.3)
            gpu["sm_clock_mhz"][SLOW] /= 1.3

    assert run(change, jobs=lambda number: np.full(64, int(number >= 5), np.int32)) == []


def test_gpus_without_a_job_and_small_jobs_are_not_judged() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["sm_clock_mhz"][SLOW] *= 0.7
        gpu["tensor_active_ratio"][SLOW] *= 1.4

    def three(number: int) -> np.ndarray:
        held = np.full(64, -1, np.int32)
        held[12:15] = 0
        return held

    assert run(change, jobs=lambda number: np.full(64, -1, np.int32)) == []
    assert run(change, jobs=three) == []


def test_one_bucket_is_not_enough() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number in (4, 7):
            waits(gpu, 1.2)
            gpu["sm_clock_mhz"][SLOW] /= 1.2
            gpu["power_limit_w"][SLOW] = 480

    assert run(change) == []


def test_a_narrow_pcie_link_needs_an_effect() -> None:
    def narrow(number: int, gpu: Columns, node: Columns) -> None:
        gpu["pcie_width"][SLOW] = 4

    def late(number: int, gpu: Columns, node: Columns) -> None:
        gpu["pcie_width"][SLOW] = 4
        gpu["gpu_util_ratio"][SLOW] = 0.9

    assert run(narrow) == []
    assert {(f.gpu, f.cause) for f in run(late)} == {(5, "pcie")}


def test_a_late_host_is_reported_the_node() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["gpu_util_ratio"][8:16] = 0.85
            node["cpu_util_ratio"][1] = 0.95

    assert {(f.scope, f.node, f.gpu, f.cause) for f in run(change)} == {("node", "n01", None, "host")}


def test_a_node_whose_gpus_rest_while_its_cpu_rests_too_is_not_blamed_on_its_host() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["gpu_util_ratio"][8:16] = 0.85

    assert run(change) == []


FAULTS = [
    ("power_cap", 0.2), ("clock", 0.2), ("hbm", 0.6), ("pcie", 0.85), ("nvlink", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "severity"), FAULTS)
def test_simulated_fault_is_found_with_its_cause_and_nothing_else(cause: str, severity: float) -> None:
    recording = record(1300, 4, lambda spec: [Fault("straggler", cause, "r01n02", 3, 60.0, None, severity)])
    reported = _detect(recording)
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("r01n02", 3, cause)}
    onset_ms = recording.buckets[0].start_ms + 60_000
    assert reported[0].ts_ms - onset_ms <= 60_000
    assert abs(reported[0].since_ms - onset_ms) <= 10_000


@pytest.mark.parametrize("cause", ["workload", "planned_power_cap"])
def test_simulated_uneven_work_and_planned_caps_are_quiet(cause: str) -> None:
    recording = record(1301, 5, lambda spec: [Fault("straggler", cause, "r01n02", None, 60.0, None, 0.3)])
    assert _detect(recording) == []


def _detect(recording: Recording) -> list[Finding]:
    held, state, reported = Buckets(6), None, []
    for bucket in recording.buckets:
        held.append(bucket)
        window = Window(recording.index, held.all(), True, (), recording.buckets[0].start_ms)
        findings, state = straggler.detect(window, state, bucket.end_ms + 7000)
        reported += findings
    return reported


def sleeps(gpu: Columns, which: np.ndarray | int) -> None:
    """Held by the job, given no work: clocks, links and utilisation of an idle GPU."""
    for metric, value in (
        ("gpu_util_ratio", 0.0), ("sm_active_ratio", 0.0), ("tensor_active_ratio", 0.0), ("dram_active_ratio", 0.0),
        ("power_w", 75.0), ("sm_clock_mhz", 345.0), ("pcie_generation", 1.0), ("clock_event_reasons", 1.0),
    ):  # fmt: skip
        gpu[metric][which] = value


@pytest.mark.parametrize("which", [SLOW, np.arange(8, 16)], ids=["a GPU", "a node"])
def test_what_a_job_holds_and_does_not_use_is_no_straggler(which: np.ndarray | int) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        sleeps(gpu, which)
        node.clear()  # only gpu.parquet: no CPU to recognise a late host

    assert run(change) == []


def test_a_lightly_loaded_node_is_not_late() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("gpu_util_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            gpu[metric][8:16] *= 0.6
        node.clear()

    assert run(change) == []


def test_a_heavier_rank_at_full_power_is_no_slow_clock_where_no_reasons_are_read() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("clock_event_reasons", "throttle_power_us"):
            del gpu[metric]
        gpu["power_w"][SLOW] = 699
        waits(gpu, 1.2)
        gpu["sm_clock_mhz"][SLOW] *= 0.9

    assert run(change) == []


def test_a_capped_node_of_a_large_job_is_one_finding_of_the_node() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            waits(gpu, 1.2)
            gpu["power_limit_w"][8:16] = gpu["power_w"][8:16] = 480
            gpu["sm_clock_mhz"][8:16] /= 1.2
            for metric in ("sm_active_ratio", "tensor_active_ratio"):
                gpu[metric][8:16] = gpu[metric][SLOW]

    reported = run(change)
    assert {(f.scope, f.node, f.gpu, f.cause) for f in reported} == {("node", "n01", None, "power_cap")}
    assert "8 of its 8 GPUs" in reported[0].summary


def test_a_lower_pcie_generation_is_what_the_summary_says() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            gpu["pcie_generation"][SLOW] = 3
            gpu["gpu_util_ratio"][SLOW] = 0.8

    reported = run(change)
    assert {f.cause for f in reported} == {"pcie"}
    assert "generation 3 while 63 peers of job 812 have 5" in reported[0].summary


def test_what_was_seen_in_one_job_is_no_beginning_in_the_next() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number in (4, 8):  # the last bucket of one job, and the first that counts of the next
            gpu["pcie_width"][SLOW], gpu["gpu_util_ratio"][SLOW] = 4, 0.8

    assert run(change, jobs=lambda number: np.full(64, 0 if number < 5 else 1, np.int32)) == []


def ports(rates: dict[str, float], slow: str = "") -> list[Finding]:
    """Every node of 8 has these ports; port `slow` of n01 runs at half its rate."""
    links = tuple(LinkSpec(name, 0 if name.startswith("ib") else None) for name in rates)
    index = FleetIndex(FleetSpec(tuple(dataclasses.replace(n, links=links) for n in small_fleet().nodes)))
    state, reported = None, []
    for window, now_ms in play(index, 6):
        values = np.array([rates[name] / (2 if (n, name) == (1, slow) else 1) for n in range(8) for name in rates])
        held = tuple(dataclasses.replace(b, link={"rate_gbps": values}) for b in window.buckets)
        findings, state = straggler.detect(dataclasses.replace(window, buckets=held), state, now_ms)
        reported += findings
    return reported


def test_ports_are_held_against_their_like_as_soon_as_boards_are_known() -> None:
    """No SKU is named, three nodes have slower ports by design, and memory clocks come a bucket after the rates."""
    slower = np.arange(8) >= 5

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["memory_clock_mhz"] = np.full(64, np.nan) if number < 1 else np.repeat(np.where(slower, 1593.0, 2619.0), 8)

    nodes = (dataclasses.replace(n, sku="", links=(LinkSpec("ib0", 0),)) for n in small_fleet().nodes)
    index, state, reported = FleetIndex(FleetSpec(tuple(nodes))), None, []
    for window, now_ms in play(index, 6, change):
        rates = {"rate_gbps": np.where(slower, 200.0, 400.0)}
        held = tuple(dataclasses.replace(b, link=rates) for b in window.buckets)
        findings, state = straggler.detect(dataclasses.replace(window, buckets=held), state, now_ms)
        reported += findings
    assert reported == []


def test_a_port_for_management_is_compared_with_its_like() -> None:
    rates = {"ib0": 400.0, "ib1": 400.0, "eth0": 25.0}
    assert ports(rates) == []
    assert {(f.node, f.cause) for f in ports(rates, "ib1")} == {("n01", "nic")}
    assert "25 Gb/s" in ports(rates, "eth0")[0].summary


def test_boards_that_the_fleet_file_does_not_name_are_reported_by_their_memory_clock() -> None:
    spec = FleetSpec(tuple(dataclasses.replace(n, sku="") for n in small_fleet(12).nodes))

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["memory_clock_mhz"][:8] = 1593
        gpu["sm_clock_mhz"][:8] = 1410
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric][:8] *= 1.3

    state, reported = None, []
    for window, now_ms in play(FleetIndex(spec), 10, change):
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    assert reported == []


def test_two_gpus_of_a_small_job_that_both_lost_lanes_are_both_reported() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["pcie_width"][[1, SLOW]] = 4
        gpu["gpu_util_ratio"][[1, SLOW]] = 0.9

    def sixteen(number: int) -> np.ndarray:
        return np.where(np.arange(64) < 16, 0, -1).astype(np.int32)

    assert {(f.node, f.gpu, f.cause) for f in run(change, jobs=sixteen)} == {("n00", 1, "pcie"), ("n01", 5, "pcie")}


def test_a_clock_that_nothing_governs_is_reported_where_no_duty_is_read() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
            del gpu[metric]
        gpu["power_w"][:] = 500.0
        gpu["throttle_power_us"][:] = 0.0
        if number >= 4:
            gpu["sm_clock_mhz"][SLOW] *= 0.7
            gpu["power_w"][SLOW] = limit

    limit = 400.0
    assert {(f.gpu, f.cause) for f in run(change)} == {(5, "clock")}


def test_a_node_whose_clocks_are_locked_in_a_job_of_eight_is_reported() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["clock_event_reasons"][8:16] = 0x2
        gpu["sm_clock_mhz"][8:16] *= 0.85
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric][8:16] *= 1.15

    assert {(f.scope, f.node, f.cause) for f in run(change)} == {("node", "n01", "clock")}


def test_a_slow_clock_is_not_excused_by_peers_whose_clocks_dip() -> None:
    index, state, reported = small_fleet(), None, []

    def change(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= 20:
            gpu["sm_clock_mhz"][10] *= 0.85
            gpu["power_w"][10] *= 0.8
            gpu["sm_active_ratio"][10], gpu["tensor_active_ratio"][10] = 0.93, 0.64
        if number % 6 == 0:
            some = np.random.default_rng(number).permutation(64)[:24]
            gpu["sm_clock_mhz"][some[some != 10]] *= 0.9

    for window, now_ms in play(index, 60, change):
        findings, state = straggler.detect(window, state, now_ms)
        reported += findings
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n01", 2, "clock")}

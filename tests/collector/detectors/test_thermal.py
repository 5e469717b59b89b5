"""Heat: one heat sink, a node's fans, a rack's air; and what only looks like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.thermal import detector as thermal
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, RecommendedAction, Severity
from drover_core.model.fleet import FleetSpec
from drover_simulator.faults import Fault, demo_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet
from testbed.simulated_buckets import START_MS, Recording, record

Columns = dict[str, np.ndarray]


def run(change: Callable[[int, Columns, Columns], None], count: int = 10, nodes: int = 8) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(nodes), count, change):
        findings, state = thermal.detect(window, state, now_ms)
        reported += findings
    return reported


def heat(gpu: Columns, which: slice, ratio: float) -> None:
    gpu["gpu_temp_c"][which] = 26 + 0.055 * ratio * gpu["power_w"][which]
    gpu["thermal_margin_c"][which] = 87 - gpu["gpu_temp_c"][which]


def test_a_bad_heat_sink_is_reported_with_its_resistance() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            heat(gpu, slice(21, 22), 1.6)

    reported = run(change)
    assert {(f.node, f.gpu, f.cause, f.severity) for f in reported} == {("n02", 5, "cooling", Severity.WARNING)}
    assert reported[0].action is RecommendedAction.ADVISE  # hot, but not slowed yet
    assert "degC/W" in reported[0].summary


def test_hbm_at_the_limit_of_its_driver_is_reported() -> None:
    index = small_fleet()

    def found(limit: str, temp_c: float, every: int = 1) -> list[Finding]:
        inventory, state, reported = Inventory(index), None, []
        inventory.update("n02", {"gpu5.memory_temp_max_c": limit}, 1)

        def change(number: int, gpu: Columns, _node: Columns) -> None:
            gpu["memory_temp_c"] = np.where((np.arange(index.gpu_count) == 21) & (number >= 4), temp_c, 80.0)
            gpu["memory_temp_c"][:] = gpu["memory_temp_c"] if number % every == 0 else np.nan

        for window, now_ms in play(index, 10, change, inventory=inventory):
            findings, state = thermal.detect(window, state, now_ms)
            reported += findings
        return reported

    reported = found("95", 95.0)
    assert {(f.node, f.gpu, f.cause, f.severity) for f in reported} == {("n02", 5, "hbm", Severity.WARNING)}
    assert "has reached the driver's limit of 95 degC" in reported[0].summary
    assert [f.cause for f in found("95", 97.0, every=3)][:1] == ["hbm"]  # read each 30 s
    assert found("95", 94.0) == found("", 120.0) == found("not a number", 120.0) == []


def test_the_headline_stays_where_one_reason_of_two_goes() -> None:
    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 4:
            heat(gpu, slice(21, 22), 1.6 if number < 10 else 1.0)
            gpu["thermal_margin_c"][21] = -5.0

    reported = run(change, 16)
    first = next(f.ts_ms for f in reported if "is cooled badly" in f.summary)
    later = [f for f in reported if f.ts_ms >= first]
    assert {f.confidence for f in later} == {0.95, 0.8}, "cooling and heat, then heat alone"
    assert all("n02 is cooled badly: core" in f.summary for f in later)


def test_under_a_light_load_one_gpu_is_reported_when_it_is_clear_of_the_sensors_and_a_whole_node_is_not() -> None:
    def light(which: slice, over_c: float) -> Callable[[int, Columns, Columns], None]:
        def change(number: int, gpu: Columns, _node: Columns) -> None:
            gpu["power_w"][:] = 240.0  # of 700
            gpu["gpu_temp_c"][:] = 26 + 0.055 * 240
            gpu["gpu_temp_c"][which] += over_c * (number >= 4)

        return change

    assert {(f.node, f.gpu, f.cause) for f in run(light(slice(21, 22), 12.0))} == {("n02", 5, "cooling")}
    assert run(light(slice(21, 22), 8.0)) == []
    assert run(light(slice(16, 24), 12.0)) == []  # its inlet sensor may be off


def test_heat_that_slows_it_asks_for_a_drain_and_below_the_slowdown_offset_is_critical() -> None:
    def slowed(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            heat(gpu, slice(21, 22), 1.6)
            gpu["throttle_thermal_sw_us"][21] = number * 4e6

    def beyond(number: int, gpu: Columns, node: Columns) -> None:
        slowed(number, gpu, node)
        if number >= 4:
            gpu["thermal_margin_c"][21] = -3

    assert run(slowed)[-1].action is RecommendedAction.DRAIN
    assert run(slowed)[-1].severity is Severity.WARNING
    assert run(beyond)[-1].severity is Severity.CRITICAL


def test_a_margin_that_no_running_gpu_can_have_drains_nothing() -> None:
    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 4:
            gpu["thermal_margin_c"][21] = margin

    margin = -200.0
    assert run(change) == []
    margin = -9.0
    assert {(f.node, f.gpu, f.severity, f.action) for f in run(change)} == {
        ("n02", 5, Severity.CRITICAL, RecommendedAction.DRAIN)
    }


def test_a_hot_slot_of_every_chassis_is_no_fault() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        for slot, ratio in ((6, 1.11), (7, 1.2)):
            for n in range(8):
                heat(gpu, slice(n * 8 + slot, n * 8 + slot + 1), ratio)

    assert run(change) == []


def test_a_load_that_falls_leaves_a_warm_core_that_is_no_fault() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 5:
            gpu["power_w"][21] = 380  # and the core has not cooled yet
        if number >= 7:
            heat(gpu, slice(21, 22), 1.0)

    assert run(change, 12) == []


@pytest.mark.parametrize("low", [4, 5])
def test_power_read_at_a_few_low_moments_in_a_row_is_no_bad_cooling(low: int) -> None:
    """Boards that show the power of one moment: a node's are read together, in the exchange at a step's end."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        node.clear()
        heat(gpu, slice(16, 24), 1.05)
        if 7 <= number < 7 + low:
            gpu["power_w"][16:24] *= 0.72

    assert run(change, 16) == []


def test_resistance_that_grew_against_its_own_past() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        heat(gpu, slice(21, 22), 1.0 if number < 450 else 1.2)

    reported = run(change, 660)
    assert {(f.node, f.gpu) for f in reported} == {("n02", 5)}
    assert min(f.since_ms for f in reported) >= START_MS + 420 * 10_000  # its block of five minutes
    texts = [e.text for e in reported[0].evidence]
    assert "warmer than this GPU was before at such a load: +" in texts[0]
    assert any("in its own past and has 0.066 now: +1" in text for text in texts), "the rise is not learnt as its past"


def test_all_gpus_of_a_node_are_its_fans() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            heat(gpu, slice(16, 24), 1.7)

    assert {(f.scope, f.node, f.gpu, f.cause) for f in run(change, nodes=16)} == {("node", "n02", None, "fan")}


def test_a_room_that_warms_as_a_whole_is_no_hot_rack() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        node["inlet_temp_c"] += number * 0.4
        gpu["gpu_temp_c"] += number * 0.4

    assert run(change, 20, nodes=16) == []


def test_one_hot_inlet_sensor_is_no_hot_rack() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            node["inlet_temp_c"][1] = 48

    assert [f for f in run(change, nodes=16) if f.scope == "rack"] == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("thermal", "cooling", "r01n03", 6, 60.0, None, 1.5, 60.0), ("gpu", "r01n03", 6, "cooling")),
        (Fault("thermal", "fan", "r01n03", None, 60.0, None, 1.2, 60.0), ("node", "r01n03", None, "fan")),
        (Fault("thermal", "inlet", "r01n03", None, 60.0, None, 10.0, 60.0), ("rack", None, None, "inlet")),
    ],
)
def test_simulated_fault_is_found_and_nothing_else(
    fault: Fault, expected: tuple[str, str | None, int | None, str]
) -> None:
    recording = record(1310, 6, lambda spec: [fault], nodes=24)
    reported = _detect(recording)
    assert {(f.scope, f.node, f.gpu, f.cause) for f in reported} == {expected}


def _detect(recording: Recording) -> list[Finding]:
    held, state, reported = Buckets(6), None, []
    for bucket in recording.buckets:
        held.append(bucket)
        window = Window(recording.index, held.all(), True, (), recording.buckets[0].start_ms)
        findings, state = thermal.detect(window, state, bucket.end_ms + 7000)
        reported += findings
    return reported


def test_racks_without_inlet_sensors_are_compared_within_themselves() -> None:
    def warm(number: int, gpu: Columns, node: Columns) -> None:
        node.clear()
        gpu["gpu_temp_c"][:32] += 16  # a warm aisle, by design

    def warm_and_bad(number: int, gpu: Columns, node: Columns) -> None:
        heat(gpu, slice(21, 22), 1.9)
        warm(number, gpu, node)

    assert run(warm, nodes=16) == []
    assert {(f.node, f.gpu) for f in run(warm_and_bad, nodes=16)} == {("n02", 5)}


@pytest.mark.parametrize("fails", [False, True], ids=["room", "room and heat sink"])
def test_where_no_inlet_is_read_a_room_that_warms_is_no_gpus_own_rise(fails: bool) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        del node["inlet_temp_c"]
        heat(gpu, slice(3, 4), 1.15 * (1.6 if fails and number >= 45 else 1.0))  # warmer than its like by nature
        if number >= 45:
            gpu["gpu_temp_c"][:32] += 10

    assert {(f.cause, f.node, f.gpu) for f in run(change, 60)} == ({("cooling", "n00", 3)} if fails else set())


@pytest.mark.parametrize(
    ("ratio", "reported"), [(1.4, {("fan", "n02", None)}), (1.3, set())], ids=["by 40 %", "by 30 %"]
)
def test_a_node_whose_gpus_are_all_warmer_needs_no_gpu_that_is_by_far(ratio: float, reported: set[object]) -> None:
    assert {
        (f.cause, f.node, f.gpu) for f in run(lambda _number, gpu, _node: heat(gpu, slice(16, 24), ratio))
    } == reported


def test_peers_that_cool_in_a_pause_make_no_fan_of_a_bad_heat_sink() -> None:
    """A job that holds most peers stops for seconds: their power hardly shows it, and their cores are cooler after."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        heat(gpu, slice(21, 22), 1.6)
        for after, ratio in enumerate((0.85, 0.87, 0.89, 0.92, 0.96)):
            if number == 10 + after:
                heat(gpu, slice(24, 96), ratio)

    assert {(f.scope, f.node, f.gpu, f.cause) for f in run(change, 20, nodes=12)} == {("gpu", "n02", 5, "cooling")}


def test_a_bad_gpu_whose_neighbours_stay_warm_too_is_its_nodes_fans() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        heat(gpu, slice(16, 24), 1.16)
        heat(gpu, slice(21, 22), 1.6)

    reported = run(change, 20, nodes=12)
    assert {(f.scope, f.node, f.gpu, f.cause) for f in reported[-3:]} == {("node", "n02", None, "fan")}


def test_the_demos_cooling_fault_keeps_its_cause_while_others_write_checkpoints() -> None:
    """Minute 41 of `drover demo`, where a job of 16 nodes of 32 pauses: reported once as a second incident, of fans."""
    spec = build_fleet(32, 7)
    fault = next(f for f in demo_faults(spec, 7) if f.kind == "thermal")
    fleet = SimulatedFleet(spec, 7, [fault], START_MS)
    fleet.step(2400)
    reported = _detect(record(7, 2, nodes=32, made=fleet))
    assert {(f.scope, f.node, f.gpu, f.cause) for f in reported} == {("gpu", fault.node, fault.gpu, "cooling")}


def test_a_pool_cooled_by_air_is_not_held_against_the_same_board_cooled_by_liquid() -> None:
    nodes = [dataclasses.replace(n, pool="air" if k < 2 else "liquid") for k, n in enumerate(small_fleet(12).nodes)]

    def change(number: int, gpu: Columns, node: Columns) -> None:
        heat(gpu, slice(0, 16), 1.7)

    def played(spec: FleetSpec) -> set[str]:
        state, found = None, set()
        for window, now_ms in play(FleetIndex(spec), 10, change):
            findings, state = thermal.detect(window, state, now_ms)
            found |= {f.summary for f in findings}
        return found

    assert played(FleetSpec(tuple(nodes))) == set()
    assert played(FleetSpec(tuple(dataclasses.replace(n, pool="") for n in nodes)))


def test_boards_that_the_fleet_file_does_not_name_are_not_held_against_others() -> None:
    spec = FleetSpec(tuple(dataclasses.replace(n, sku="") for n in small_fleet(12).nodes))

    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["memory_clock_mhz"][:32] = 1593
        heat(gpu, slice(0, 32), 1.5)

    for drop in ((), ("memory_clock_mhz",)):
        state = None
        for window, now_ms in play(FleetIndex(spec), 10, change):
            held = tuple(
                dataclasses.replace(b, gpu={k: v for k, v in b.gpu.items() if k not in drop}) for b in window.buckets
            )
            findings, state = thermal.detect(dataclasses.replace(window, buckets=held), state, now_ms)
            assert findings == []


def test_inlets_that_are_read_less_often_than_gpus_count_in_between() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_temp_c"][:32] += 14  # a warm aisle that its sensors explain
        node["inlet_temp_c"][:4] += 14
        node["inlet_temp_c"][np.arange(16) % 3 != number % 3] = np.nan

    assert [f for f in run(change, count=20, nodes=16) if f.scope != "rack"] == []


def test_a_counter_of_another_unit_says_nothing() -> None:
    def nanoseconds(number: int, gpu: Columns, node: Columns) -> None:
        gpu["throttle_thermal_sw_us"][:] = number * 0.01 * 1e10  # 1 % of the time

    assert run(nanoseconds) == []


def test_no_value_stands_under_a_metric_of_another_unit_and_advice_fits_the_action() -> None:
    def slowed(number: int, gpu: Columns, node: Columns) -> None:
        if number >= 4:
            heat(gpu, slice(21, 22), 1.6)
            gpu["throttle_thermal_hw_us"][21] = number * 4e6

    reported = run(slowed)
    held = [e for f in reported for e in f.evidence if (e.metric or "").startswith("throttle")]
    assert {(e.metric, e.value) for e in held} == {("throttle_thermal_hw_us", None)}
    for finding in reported:
        assert finding.advice.startswith("Drain the node") == (finding.action is RecommendedAction.DRAIN)


@pytest.mark.parametrize("which", [slice(21, 22), slice(16, 24)])
def test_a_board_that_reads_no_power_and_no_limit_says_nothing_of_its_cooling(which: slice) -> None:
    """0 W of 0 W is what a driver without a sensor says, not what a heat sink does."""

    def change(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 4:
            gpu["power_w"][which] = gpu["power_limit_w"][which] = 0.0

    assert run(change, count=20) == []


def test_core_sensors_of_half_a_fleet_that_read_less_than_the_inlet_accuse_nobody() -> None:
    def change(_number: int, gpu: Columns, _node: Columns) -> None:
        gpu["gpu_temp_c"][:32] = 0.0

    assert run(change, count=20) == []

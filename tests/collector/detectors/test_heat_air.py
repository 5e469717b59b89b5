"""The heat model: fans of a node, the air of a rack, and HBM that is warmer than the core says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors.thermal import detector as thermal
from drover_collector.detectors.thermal.heat_model import HeatModel
from drover_collector.detectors.thermal.memory_heat import MemoryHeat
from drover_core.model.events import Finding, Severity

START_MS = 1_800_000_000_000
STEP_S = 10
RACKS, PER_RACK, GPUS = 4, 4, 8
NODES = RACKS * PER_RACK
LIMIT_W = 700.0
BAD = 5  # the second node of the second rack


@dataclass
class Hall:
    """Sixteen nodes in four racks, in whole degrees.

    `load` gives each node's share of the power limit at a second, `air` the degrees that each node's air is warmer by.
    """

    load: Callable[[float], np.ndarray]
    air: Callable[[float], np.ndarray]
    read: bool = False
    racks: int = RACKS
    count: int = NODES
    of_job: int = 0  # so many nodes have one job
    nodes: list[tuple[float, int]] = field(default_factory=list)  # (hour, node) that was hot
    rack: list[tuple[float, int]] = field(default_factory=list)
    gpus: list[tuple[float, int]] = field(default_factory=list)

    def play(self, hours: float) -> Hall:
        rng = np.random.default_rng(3)
        node = np.repeat(np.arange(self.count), GPUS)
        model = HeatModel(node, np.arange(self.count) // (self.count // self.racks), self.racks)
        resistance = 0.06 * (1 + 0.1 * rng.standard_normal(self.count * GPUS).clip(-2, 2))
        filtered = self.load(0.0)[node] * LIMIT_W
        model.layout.job = np.full(self.count, -1, np.int64)
        model.layout.job[: self.of_job] = 0
        before = model.rise
        for number in range(1, round(hours * 3600 / STEP_S) + 1):
            at_s = number * STEP_S
            power = LIMIT_W * self.load(at_s)[node] * (1 + 0.1 * rng.standard_normal(self.count * GPUS).clip(-2, 2))
            filtered = filtered + (1 - np.exp(-STEP_S / 45)) * (power - filtered)
            room = 24 + self.air(at_s)
            temp = np.round(room[node] + resistance * filtered + 0.12 * rng.standard_normal(self.count * GPUS))
            # An inlet sits before the fans: it does not feel that they have failed.
            inlet = np.full(self.count, 24.0 if self.read else np.nan)
            model.advance(START_MS + at_s * 1000, STEP_S * 1000, temp, power, np.full(len(node), LIMIT_W), inlet)
            if model.rise is not before:
                before = model.rise
                self.nodes += [(at_s / 3600, int(n)) for n in np.flatnonzero(model.rise.hot_nodes)]
                self.rack += [(at_s / 3600, int(r)) for r in np.flatnonzero(model.rise.hot_racks)]
                self.gpus += [(at_s / 3600, int(g)) for g in np.flatnonzero(model.rise.hot)]
        return self


def steady(share: float) -> Callable[[float], np.ndarray]:
    return lambda _: np.full(NODES, share)


def warmer(which: slice | int, by_c: float, hour: float = 2.0) -> Callable[[float], np.ndarray]:
    def air(at_s: float) -> np.ndarray:
        result = np.zeros(NODES)
        result[which] = by_c if at_s >= hour * 3600 else 0.0
        return result

    return air


@pytest.mark.parametrize("read", [True, False], ids=["inlet", "no inlet"])
def test_fans_that_fail_warm_all_gpus_of_their_node_and_are_found_within_half_an_hour(read: bool) -> None:
    hall = Hall(steady(0.8), warmer(BAD, 10.0), read).play(3.2)
    assert {n for _, n in hall.nodes} == {BAD}
    assert 2.0 < hall.nodes[0][0] <= 2.6
    assert hall.rack == hall.gpus == []
    assert hall.nodes[-1][0] > 3.0, "it stays while they have failed"


def test_the_air_of_a_rack_is_no_matter_of_its_nodes() -> None:
    hall = Hall(steady(0.7), warmer(slice(4, 8), 9.0)).play(3.2)
    assert {r for _, r in hall.rack} == {1}
    assert hall.nodes == hall.gpus == []


def test_gpus_at_rest_show_the_air_of_their_rack_and_no_fault_of_a_node() -> None:
    air = warmer(slice(4, 8), 9.0)
    hall = Hall(steady(0.1), lambda at_s: air(at_s) + 9.0 * (np.arange(NODES) == 12) * (at_s >= 7200)).play(2.7)
    assert {r for _, r in hall.rack} == {1}
    assert hall.rack[0][0] <= 2.6
    assert hall.nodes == hall.gpus == []


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_a_rack_of_two_nodes_is_hot_if_both_are(share: float) -> None:
    def air(at_s: float) -> np.ndarray:
        return np.where(np.isin(np.arange(NODES), [4, 5, 8]), 9.0 * (at_s >= 7200), 0.0)

    hall = Hall(steady(share), air, racks=NODES // 2).play(2.7)
    assert {r for _, r in hall.rack} == {2}
    assert hall.rack[0][0] <= 2.6


@pytest.mark.parametrize(("what", "which"), [("a room that warms", slice(0, NODES)), ("4 degC of one node", BAD)])
def test_a_room_and_small_differences_are_no_fault(what: str, which: slice | int) -> None:
    by_c = 6.0 if isinstance(which, slice) else 4.0
    hall = Hall(steady(0.7), warmer(which, by_c)).play(3.5)
    assert (hall.nodes, hall.rack, hall.gpus) == ([], [], []), what


def test_a_node_that_is_a_little_warmer_for_hours_and_much_for_minutes_is_no_fault() -> None:
    """A GPU that set the speed of its node's fans got a lighter job, and now the next hottest pauses for minutes."""

    def air(at_s: float) -> np.ndarray:
        result = np.zeros(NODES)
        result[BAD] = 4.0 if at_s >= 7200 else 0.0
        result[BAD] += 7.0 if 3.5 * 3600 <= at_s < 3.5 * 3600 + 300 else 0.0
        result[BAD + 4] = 11.0 if at_s >= 9000 else 0.0  # a fault of another node, so that something can be found
        return result

    hall = Hall(steady(0.7), air, read=True).play(3.75)
    assert {n for _, n in hall.nodes} == {BAD + 4}
    assert hall.nodes[0][0] <= 3.0, "it shows its size in each block, so nothing is found later than it was"


@pytest.mark.parametrize("read", [True, False], ids=["inlet", "no inlet"])
def test_fans_that_ran_at_full_for_an_hour_make_no_fault_of_the_usual_heat(read: bool) -> None:
    def air(at_s: float) -> np.ndarray:
        hour, result = at_s / 3600, np.zeros(NODES)
        result[BAD] = -12.0 if 1.5 <= hour < 2.75 else 0.0
        result[BAD + 1] = 10.0 if hour >= 4 else 0.0  # a fault of another node, so that something can be found
        return result

    hall = Hall(steady(0.8), air, read).play(4.75)
    assert {n for _, n in hall.nodes} == {BAD + 1}
    assert (hall.rack, hall.gpus) == ([], [])


def test_fans_that_lag_behind_jobs_that_come_and_go_are_no_fault() -> None:
    def load(at_s: float) -> np.ndarray:
        share = np.full(NODES, 0.7)
        share[BAD] = 0.2 if int(at_s / 720) % 2 else 0.95
        return share

    def air(at_s: float) -> np.ndarray:
        """Fans need four minutes to follow a job that begins."""
        result = np.zeros(NODES)
        result[BAD] = 12.0 * np.exp(-(at_s % 1440) / 120) if at_s % 1440 < 720 and at_s > 7200 else 0.0
        return result

    assert Hall(load, air, read=True).play(4.0).nodes == []


def test_nodes_whose_jobs_change_are_no_fault() -> None:
    rng = np.random.default_rng(8)
    hours, shares = np.sort(rng.uniform(0, 6, (NODES, 4))), rng.choice([0.1, 0.35, 0.6, 0.9], (NODES, 5))

    def load(at_s: float) -> np.ndarray:
        return np.array([shares[n][np.searchsorted(hours[n], at_s / 3600)] for n in range(NODES)])

    hall = Hall(load, lambda at_s: 3 * load(at_s)).play(6.0)
    assert (hall.nodes, hall.rack, hall.gpus) == ([], [], [])


def test_one_rack_has_nothing_to_be_compared_with() -> None:
    assert Hall(steady(0.7), warmer(slice(0, NODES), 8.0), racks=1).play(3.0).rack == []


def test_hbm_that_is_warmer_than_its_core_says_is_found() -> None:
    rng, node = np.random.default_rng(2), np.repeat(np.arange(4), 8)
    heat, found = MemoryHeat(node), []
    for number in range(1, 3 * 360):
        core = 55 + rng.standard_normal(32)
        apart = 6 + 3 * rng.random(32)
        apart[11] += 8 if number > 540 else 0
        apart[16:24] += 8 if number > 540 else 0  # a driver's update on one node: another sensor
        heat.advance(
            START_MS + number * 10_000, np.round(core + apart), np.round(core), np.full(32, 0.7), np.full(32, 0.4)
        )
        found += [(number, int(g)) for g in np.flatnonzero(heat.hot)]
    assert {g for _, g in found} == {11}
    assert found[0][0] <= 540 + 180


def test_hbm_that_was_hot_before_a_restart_stays_so_until_it_is_repaired() -> None:
    rng, heat = np.random.default_rng(2), MemoryHeat(np.repeat(np.arange(4), 8))
    hot = []
    for number in range(1, 5 * 360):
        if number == 900:
            kept, since_ms = heat.usual(11), int(heat.test.since_ms[11])
            heat = MemoryHeat(np.repeat(np.arange(4), 8))
            heat.restore(11, kept, since_ms)
        apart = 6 + 0.3 * rng.random(32)
        apart[11] += 8 if 540 < number < 1400 else 0
        heat.advance(START_MS + number * 10_000, 55 + apart, np.full(32, 55.0), np.full(32, 0.7), np.full(32, 0.4))
        hot += [number] if heat.hot.any() else []
    assert hot[0] <= 540 + 180 and hot == list(range(hot[0], hot[-1] + 1)), "it does not come and go"
    assert 1400 <= hot[-1] <= 1400 + 60


def test_hbm_that_is_hot_survives_two_restarts_in_a_row_and_nothing_is_kept_of_what_was_not_judged() -> None:
    kept = {"load": 0.7, "traffic": 0.4, "usual_c": 6.0, "warmer_c": 8.0}
    heat = MemoryHeat(np.zeros(8, np.int64))
    assert heat.usual(3) == {}
    heat.restore(3, kept, START_MS)
    assert heat.usual(3) == kept


def test_hbm_of_another_job_with_more_traffic_is_not_judged_at_first() -> None:
    heat = MemoryHeat(np.zeros(8, np.int64))
    for number in range(1, 3 * 360):
        traffic = np.full(8, 0.2)
        traffic[3] = 0.8 if number > 540 else 0.2
        memory = 60 + 10 * traffic
        heat.advance(START_MS + number * 10_000, memory, np.full(8, 55.0), np.full(8, 0.7), traffic)
        assert not heat.hot.any()


def play_thermal(change: Callable, buckets: int) -> list[Finding]:
    state, found = None, []
    for window, now_ms in play(small_fleet(16), buckets, change):
        findings, state = thermal.detect(window, state, now_ms)
        found += findings
    return found


def test_what_is_reported_of_a_nodes_air_of_a_racks_and_of_hbm() -> None:
    def change(number: int, gpu: dict[str, np.ndarray], node: dict[str, np.ndarray]) -> None:
        del node["inlet_temp_c"]
        gpu["memory_temp_c"] = gpu["gpu_temp_c"] + 8
        if number >= 500:
            gpu["gpu_temp_c"][24:32] += 13  # n03, in rack r00
            gpu["memory_temp_c"][24:32] += 13
            gpu["gpu_temp_c"][64:96] += 9  # rack r02
            gpu["memory_temp_c"][64:96] += 9
            gpu["memory_temp_c"][5] += 9

    found = play_thermal(change, 740)
    assert {(f.cause, f.scope, f.node, f.gpu, f.severity) for f in found} == {
        ("fan", "node", "n03", None, Severity.WARNING),
        ("inlet", "rack", None, None, Severity.WARNING),
        ("hbm", "gpu", "n00", 5, Severity.WARNING),
    }
    summary = {f.cause: f.summary for f in found}
    assert "Rack r02 gets hot air" in summary["inlet"]
    assert "has hot memory: its HBM is" in summary["hbm"]
    fan = next(f for f in found if f.cause == "fan")
    assert "the node's air is" in fan.evidence[0].text
    assert START_MS + 4_700_000 <= fan.since_ms <= START_MS + 5_400_000


@pytest.mark.parametrize(("of_job", "hot"), [(12, set()), (0, {0, 1, 2})])
def test_air_that_a_job_on_three_racks_changes_is_its_load_and_no_racks_matter(of_job: int, hot: set[int]) -> None:
    warm = np.where(np.arange(32) < 12, 8.0, 0.0)
    hall = Hall(
        lambda _: np.full(32, 0.8), lambda at_s: warm * (at_s >= 7200), racks=8, count=32, of_job=of_job
    ).play(3.5)  # fmt: skip
    assert {r for _, r in hall.rack} == hot

"""The simulated boards obey the laws they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.hardware import Hardware
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import (
    HW_THERMAL,
    POWER_CAP,
    SW_THERMAL,
    Physics,
    clock_at,
    draw,
)

START_MS = 1_767_225_600_000
INLET_C = 25.0


class Bench:
    """Boards of one rack under a load that is held fixed."""

    def __init__(self, activity: float, nodes: int = 8) -> None:
        self.hardware = Hardware(build_fleet(nodes, 1), 1)
        self.modifiers = Modifiers(self.hardware)
        self.physics = Physics(self.hardware, 1)
        self.activity = np.full(self.hardware.gpus, activity)

    def run(self, seconds: float, dt_s: float = 1.0) -> None:
        ones, held = np.ones(self.hardware.gpus), np.ones(self.hardware.gpus, bool)
        inlet = np.full(self.hardware.nodes, INLET_C)
        for _ in range(round(seconds / dt_s)):
            self.physics.advance(dt_s, held, ones, self.activity, 0 * ones, 0.4 * ones, inlet, self.modifiers)


def test_energy_is_the_integral_of_power() -> None:
    bench = Bench(0.8)
    before = bench.physics.energy_j.copy()
    total = np.zeros(bench.hardware.gpus)
    for _ in range(120):
        bench.run(1.5, 1.5)
        total += bench.physics.power_w * 1.5
    assert np.allclose(bench.physics.energy_j - before, total, rtol=1e-9)


def test_the_steady_temperature_is_inlet_plus_resistance_times_power() -> None:
    bench = Bench(0.7)
    bench.run(600)
    expected = INLET_C + bench.hardware.resistance * bench.physics.power_w
    assert np.allclose(bench.physics.core_c, expected, atol=0.05)
    assert np.all(bench.physics.hbm_c > bench.physics.core_c)


def test_the_step_length_does_not_change_where_it_goes() -> None:
    fine, coarse = Bench(0.75), Bench(0.75)
    for bench, dt_s in ((fine, 0.25), (coarse, 2.0)):
        bench.run(20, dt_s)
    assert np.allclose(fine.physics.core_c, coarse.physics.core_c, atol=1.0)
    for bench, dt_s in ((fine, 0.25), (coarse, 2.0)):
        bench.run(400, dt_s)
    assert np.allclose(fine.physics.core_c, coarse.physics.core_c, atol=0.05)
    assert np.allclose(fine.physics.energy_j, coarse.physics.energy_j, rtol=1e-3)


def test_a_core_warms_with_its_time_constant() -> None:
    bench = Bench(0.6)
    bench.run(600)
    steady = bench.physics.core_c.copy()
    bench.physics.core_c = steady - 20
    tau = bench.hardware.resistance * bench.hardware.heat_capacity
    bench.run(float(tau.mean()), float(tau.mean()) / 14)
    left = (steady - bench.physics.core_c) / 20
    assert np.allclose(left, np.exp(-tau.mean() / tau), atol=0.04)  # leakage adds a little
    assert 10 < tau.min() < tau.max() < 20


def test_power_stays_under_the_limit_and_the_clock_pays() -> None:
    bench = Bench(1.0)
    bench.run(60)
    assert np.all(bench.physics.power_w <= bench.modifiers.limit_w * 1.01)
    assert np.all(bench.physics.clock < 1) and np.all(bench.physics.reasons & POWER_CAP)
    held_us = bench.physics.held_power_us.copy()
    free = bench.physics.clock.copy()
    bench.modifiers.limit_w[:] = 450
    bench.run(60)
    assert np.all(bench.physics.power_w <= 450 * 1.01)
    assert np.all(bench.physics.clock < free - 0.1)
    assert np.allclose(bench.physics.held_power_us - held_us, 60e6)


def test_healthy_boards_of_one_sku_differ_as_much_as_published_at_most() -> None:
    bench = Bench(1.0, nodes=16)  # power-limited: differences show in the clock
    bench.run(300)
    done = bench.physics.clock * bench.hardware.speed  # work per time
    spread = (done.max() - done.min()) / np.median(done)
    assert 0.02 < spread < 0.22
    assert np.abs(done / np.median(done) - 1).mean() < 0.08
    slots = [bench.hardware.resistance[bench.hardware.gpu_slot == s].mean() for s in range(8)]
    assert max(slots) / min(slots) == pytest.approx(1.11 / 0.89, rel=0.05)


def test_heat_slows_the_clock_by_software_first_and_holds_the_operating_temperature() -> None:
    bench = Bench(0.8)
    bench.run(120)
    for step in range(90):  # the cooling fails within a minute and a half
        bench.modifiers.resistance[3] = 1 + 1.5 * step / 90
        bench.run(1)
    bench.run(300)
    physics = bench.physics
    assert physics.reasons[3] & SW_THERMAL and not physics.reasons[3] & HW_THERMAL
    assert physics.core_c[3] == pytest.approx(bench.hardware.operating_temp_c[3], abs=0.5)
    assert physics.clock[3] < physics.clock[4] - 0.1
    assert physics.held_thermal_sw_us[3] > 60e6 and physics.held_thermal_sw_us[4] == 0


def test_cooling_that_fails_at_once_needs_the_hardware_slowdown() -> None:
    bench = Bench(0.8)
    bench.run(120)
    bench.modifiers.resistance[3] = 6.0
    bench.run(300)
    assert bench.physics.held_thermal_hw_us[3] > 0
    bench.modifiers.resistance[3] = 1.0
    bench.run(300)
    assert bench.physics.reasons[3] == 0 and bench.physics.clock[3] == pytest.approx(bench.physics.clock[4], abs=0.05)


def test_clock_and_power_are_each_others_inverse() -> None:
    clocks = np.linspace(0.12, 1.0, 40)
    assert np.allclose(clock_at(draw(clocks)), clocks, atol=1e-4)


def test_a_slow_gpu_makes_its_peers_wait_at_full_utilisation() -> None:
    spec = build_fleet(32, 7)
    quiet = SimulatedFleet(spec, 7, [], START_MS)
    job = max(quiet.jobs, key=lambda j: len(j.members))
    node, slot = job.members[60]
    fault = Fault("straggler", "power_cap", node, slot, 0.5, None, 0.28)
    slow = SimulatedFleet(spec, 7, [fault], START_MS)
    culprit = int(slow.hardware.first_gpu[slow.hardware.number[node]]) + slot
    peers = slow.steps.gpus_of(job.id)
    peers = peers[peers != culprit]
    means: list[dict[str, np.ndarray]] = []
    for fleet in (quiet, slow):
        rows = []
        for _ in range(60):
            fleet.step(1.0)
            rows.append(fleet.gpu_columns())
        means.append({name: np.nanmean([r[name] for r in rows[20:]], axis=0) for name in rows[0] if "ber" not in name})
    before, after = means
    assert np.all(after["gpu_util_ratio"][peers] > 0.97)
    assert np.median(after["power_w"][peers]) < np.median(before["power_w"][peers]) - 30
    assert np.median(after["tensor_active_ratio"][peers]) < np.median(before["tensor_active_ratio"][peers]) * 0.9
    assert after["tensor_active_ratio"][culprit] > 1.2 * np.median(after["tensor_active_ratio"][peers])
    assert after["sm_active_ratio"][culprit] > 1.1 * np.median(after["sm_active_ratio"][peers])
    assert after["sm_clock_mhz"][culprit] / np.median(after["sm_clock_mhz"][peers]) == pytest.approx(0.73, abs=0.06)
    others = np.setdiff1d(np.flatnonzero(slow.steps.job_of < len(slow.jobs)), slow.steps.gpus_of(job.id))
    assert np.allclose(after["tensor_active_ratio"][others], before["tensor_active_ratio"][others], atol=0.02)


def test_the_same_seed_gives_the_same_fleet() -> None:
    def final(seed: int) -> dict[str, np.ndarray]:
        fleet = SimulatedFleet(build_fleet(8, seed), seed, [], START_MS)
        for _ in range(20):
            fleet.step(2.0)
        return {**fleet.gpu_columns(), **fleet.node_columns(), **fleet.link_columns()[1]}

    one, same, other = final(5), final(5), final(6)
    assert all(np.array_equal(one[name], same[name], equal_nan=True) for name in one)
    assert not np.array_equal(one["power_w"], other["power_w"])

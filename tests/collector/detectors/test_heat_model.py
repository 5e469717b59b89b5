"""The heat model: a rise of one GPU's thermal resistance is found at any load, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from drover_collector.detectors.thermal.heat_model import HeatModel
from drover_collector.detectors.thermal.rise_test import BLOCK_MS

START_MS = 1_800_000_000_000
STEP_S = 10
NODES, GPUS = 4, 8
LIMIT_W = 700.0
BAD = 11  # GPU 3 of the second node


@dataclass
class Room:
    """Four nodes of eight GPUs, in whole degrees: one time constant of 45 s, resistances that differ by 10 %.

    `load` gives each GPU's share of the power limit at a second; it moves by `moves` from bucket to bucket.
    """

    load: Callable[[float], np.ndarray]
    air: Callable[[float], float] = lambda _: 24.0
    rise: Callable[[float], float] = lambda _: 0.0  # of `bad`
    read: bool = True  # an inlet is read
    limit: Callable[[float], float] = lambda _: LIMIT_W
    seed: int = 1
    every: int = 1  # buckets between two reports
    bad: int = BAD
    fans: Callable[[float], float] = lambda _: 1.0  # what a watt heats, as a share, on the node of `bad`
    moves: float = 0.15
    in_front_c: float = 0.0  # that a GPU of slots 0 to 3 at its limit adds to the air of slots 4 to 7

    def play(self, hours: float) -> list[tuple[float, int]]:
        """Return (hour, GPU) of each block in which a GPU is hot."""
        rng = np.random.default_rng(self.seed)
        node = np.repeat(np.arange(NODES), GPUS)
        model = HeatModel(node, np.zeros(NODES, np.int64), 1)
        resistance = 0.06 * (1 + 0.1 * rng.standard_normal(NODES * GPUS).clip(-2, 2))
        filtered = self.load(0.0) * LIMIT_W
        found, before = [], model.rise
        for number in range(1, round(hours * 3600 / STEP_S) + 1):
            at_s = number * STEP_S
            power = LIMIT_W * self.load(at_s) * (1 + self.moves * rng.standard_normal(NODES * GPUS).clip(-2, 2))
            power = np.minimum(power, self.limit(at_s))
            filtered = filtered + (1 - np.exp(-STEP_S / 45)) * (power - filtered)
            grown = np.ones(NODES * GPUS)
            grown[self.bad] += self.rise(at_s)
            grown[node == self.bad // GPUS] *= self.fans(at_s)
            air = self.air(at_s) + 3.0 * filtered.reshape(NODES, GPUS).mean(axis=1)[node] / LIMIT_W
            temp = np.round(air + resistance * grown * filtered + 0.12 * rng.standard_normal(NODES * GPUS))
            in_front = filtered.reshape(NODES, GPUS)[:, :4] / LIMIT_W
            temp += np.round(np.concatenate([np.zeros((NODES, 4)), self.in_front_c * in_front], axis=1).ravel())
            inlet = np.full(NODES, np.round(self.air(at_s), 1) if self.read else np.nan)
            limit = np.full(NODES * GPUS, self.limit(at_s))
            if number % self.every:
                temp, power = np.full(len(temp), np.nan), np.full(len(power), np.nan)
            model.advance(START_MS + at_s * 1000, STEP_S * 1000, temp, power, limit, inlet)
            if model.rise is not before:
                before = model.rise
                found += [(at_s / 3600, int(g)) for g in np.flatnonzero(model.rise.hot)]
        return found


def steady(share: float) -> Callable[[float], np.ndarray]:
    return lambda _: np.full(NODES * GPUS, share)


def since(hour: float, rise: float) -> Callable[[float], float]:
    return lambda at_s: rise if at_s >= hour * 3600 else 0.0


@pytest.mark.parametrize("read", [True, False], ids=["inlet", "no inlet"])
@pytest.mark.parametrize("share", [0.9, 0.2], ids=["training", "inference"])
def test_a_rise_of_15_percent_is_found_within_half_an_hour(share: float, read: bool) -> None:
    found = Room(steady(share), rise=since(2.0, 0.15), read=read).play(3.0)
    assert {g for _, g in found} == {BAD}
    assert 2.0 < found[0][0] <= 2.5 + BLOCK_MS / 3_600_000  # blocks are of five minutes


@pytest.mark.parametrize("read", [True, False], ids=["inlet", "no inlet"])
def test_a_rise_of_10_percent_is_found_within_two_hours(read: bool) -> None:
    found = Room(steady(0.8), rise=since(2.0, 0.10), read=read).play(4.0)
    assert {g for _, g in found} == {BAD}
    assert 2.0 < found[0][0] <= 4.0


def test_a_rise_that_grows_over_two_hours_is_found() -> None:
    found = Room(steady(0.8), rise=lambda s: 0.3 * np.clip((s - 7200) / 7200, 0, 1)).play(5.0)
    assert {g for _, g in found} == {BAD}


@pytest.mark.parametrize("read", [True, False], ids=["inlet", "no inlet"])
def test_jobs_that_change_and_a_room_that_warms_are_no_fault(read: bool) -> None:
    """Five jobs on each node in eight hours, some light, in a room that warms by 4 degC and cools again."""
    rng = np.random.default_rng(5)
    hours = [np.sort(rng.uniform(0, 8, 5)) for _ in range(NODES)]
    shares = [rng.choice([0.08, 0.3, 0.7, 0.95], 6) for _ in range(NODES)]

    def load(at_s: float) -> np.ndarray:
        now = [shares[n][np.searchsorted(hours[n], at_s / 3600)] for n in range(NODES)]
        return np.repeat(np.array(now), GPUS)

    assert Room(load, air=lambda s: 24 + 4 * np.sin(s / 28_800 * np.pi), read=read).play(8) == []


def test_a_job_on_one_gpu_among_idle_ones_is_no_fault_at_first() -> None:
    """Nothing says what that load is like on this GPU, among idle neighbours."""

    def load(at_s: float) -> np.ndarray:
        shares = np.full(NODES * GPUS, 0.1)
        shares[BAD] = 0.9 if at_s >= 7200 else 0.1
        return shares

    assert Room(load).play(4.0) == []


def alone(others: float, mate: Callable[[float], float]) -> Callable[[float], np.ndarray]:
    """Loads of GPUs with a job each: those of the second node's slots 4 to 7 at .7, and slot 0's, before slot 4."""

    def load(at_s: float) -> np.ndarray:
        shares = np.full(NODES * GPUS, others)
        shares[12:16] = 0.7
        shares[8] = mate(at_s)
        return shares

    return load


@pytest.mark.parametrize("others", [0.1, 0.65], ids=["others rest", "others work"])
def test_a_neighbour_that_begins_to_work_is_no_fault_of_the_gpu_in_its_air(others: float) -> None:
    """700 W in a channel of 70 W/K are 10 degC."""
    begins = alone(others, lambda at_s: 0.95 if at_s >= 3 * 3600 else 0.1)
    assert Room(begins, in_front_c=9.0).play(5.5) == []


def test_a_bad_heat_sink_is_found_while_neighbours_come_and_go() -> None:
    """Their heat is learnt within hours: what is more than that is the GPU's own."""
    comes = alone(0.1, lambda at_s: 0.95 if at_s % 7200 < 3600 else 0.1)
    assert Room(comes, in_front_c=5.0).play(8.0) == []
    assert {g for _, g in Room(comes, in_front_c=5.0, rise=since(6.0, 0.3), bad=12).play(8.0)} == {12}


@pytest.mark.parametrize("rise", [0.0, 0.3], ids=["healthy", "a bad heat sink"])
def test_fans_that_ran_at_full_make_no_fault_of_the_usual_heat_of_the_busiest_gpu(rise: float) -> None:
    """A board sets its fans to full for an hour and more: that changes the busiest GPU by more degrees than others."""

    def load(at_s: float) -> np.ndarray:
        shares = np.full(NODES * GPUS, 0.35)
        shares[BAD] = 0.8
        return shares

    full = lambda at_s: 0.5 if 1.5 * 3600 <= at_s < 3.5 * 3600 else 1.0  # noqa: E731  # shorter than a def here
    found = Room(load, fans=full, rise=since(5.0, rise)).play(6.0)
    assert {g for _, g in found} == ({BAD} if rise else set())
    assert all(hour > 5 for hour, _ in found)


def test_what_began_while_the_neighbours_rested_is_found_when_they_work_again() -> None:
    """While they rest for an hour nothing says how warm the GPU should be. What it was then is not what was usual."""

    def load(at_s: float) -> np.ndarray:
        shares = np.full(NODES * GPUS, 0.5)
        if 4 * 3600 <= at_s < 5 * 3600:
            shares[8:16] = 0.1
        shares[BAD] = 0.8
        return shares

    assert {g for _, g in Room(load, rise=since(4.2, 0.3), moves=0.05).play(5.8)} == {BAD}


def test_a_changed_power_limit_is_no_fault() -> None:
    limited = lambda s: 500.0 if s < 7200 else 700.0  # noqa: E731  # shorter than a def here
    assert Room(steady(0.95), limit=limited).play(4.0) == []


def test_a_gpu_that_was_bad_from_the_start_has_no_past() -> None:
    assert Room(steady(0.8), rise=since(0.0, 0.3)).play(2.0) == []


def test_values_that_are_missing_judge_nothing() -> None:
    model = HeatModel(np.zeros(4, np.int64), np.zeros(1, np.int64), 1)
    nothing = np.full(4, np.nan)
    for number in range(1, 200):
        model.advance(START_MS + number * 10_000, 10_000, nothing, nothing, nothing, np.full(1, np.nan))
    assert not model.rise.hot.any() and np.isnan(model.rise.warmer_c).all()


def test_nodes_that_are_read_each_30_s_are_judged() -> None:
    found = Room(steady(0.8), rise=since(2.0, 0.2), every=3).play(3.5)
    assert {g for _, g in found} == {BAD}


def test_what_was_suspect_at_one_load_is_learnt_at_the_next() -> None:
    """A short rise, and then another load for hours: there a rise is found again."""

    def load(at_s: float) -> np.ndarray:
        return np.full(NODES * GPUS, 0.8 if at_s < 7800 else 0.4)

    def rise(at_s: float) -> float:
        return 0.3 if 6600 <= at_s < 7800 or at_s >= 8 * 3600 else 0.0

    found = Room(load, rise=rise).play(9.5)
    assert any(hour > 8 and g == BAD for hour, g in found)


def test_a_rise_as_the_job_slows_to_a_load_that_was_never_seen_is_found() -> None:
    """A GPU that gets hot slows its whole job: what it is like at that load must not be learnt then."""

    def load(at_s: float) -> np.ndarray:
        return np.full(NODES * GPUS, 0.85 if at_s < 3600 else 0.7)

    found = Room(load, rise=since(1.0, 0.4)).play(2.0)
    assert {g for _, g in found} == {BAD}
    assert Room(load).play(3.0) == []


def test_a_rise_within_the_first_hour_is_found_where_it_is_large() -> None:
    assert {g for _, g in Room(steady(0.8), rise=since(0.75, 0.4)).play(1.5)} == {BAD}
    assert Room(steady(0.8), rise=since(0.75, 0.08)).play(1.5) == [], "a neighbour's air may do as much"

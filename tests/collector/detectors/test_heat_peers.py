"""Heat against peers: fans that follow the load change all of a node alike; a heat sink changes one GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from drover_collector.detectors.thermal.heat_model import HeatModel
from drover_collector.detectors.thermal.peer_share import (
    LEAST_MATES,
    OF_GPUS,
    NodeMates,
    PeerShare,
    expected_of_nodes_c,
)

NODES, GPUS, BAD = 8, 8, 11
NODE = np.repeat(np.arange(NODES), GPUS)
Load = Callable[[int, np.random.Generator], np.ndarray]  # (block, noise) -> W of each GPU


def resistance(load_w: np.ndarray) -> np.ndarray:
    """Fans follow the load of the node: half of the flow at a third of the power (R goes with flow^-0.8)."""
    mean = np.bincount(NODE, load_w, NODES)[NODE] / GPUS
    return 0.06 * (0.4 + 0.6 * mean / 700) ** -0.8


def gpus(load: Load, blocks: int = 40, bad_from: int = 99, worse: float = 0.25, seed: int = 3) -> set[int]:
    """Return the GPUs that were called hot by their mates."""
    rng, test, mates = np.random.default_rng(seed), PeerShare(NODES * GPUS, OF_GPUS), NodeMates(NODE)
    share, offset = rng.normal(1, 0.08, NODES * GPUS), rng.normal(0, 1.5, NODES * GPUS)
    hot: set[int] = set()
    for block in range(blocks):
        watts = load(block, rng)
        own = share * np.where((np.arange(NODES * GPUS) == BAD) & (block >= bad_from), 1 + worse, 1.0)
        rise = np.round(offset + own * resistance(watts) * watts + rng.normal(0, 0.3, len(watts)))
        least = np.full(len(watts), 0.2)
        test.add_block(block, rise, mates.expected_c(test.usual(rise), watts), least, np.zeros(len(watts), bool))
        hot |= set(np.flatnonzero(test.hot).tolist())
    return hot


def steps(block: int, rng: np.random.Generator) -> np.ndarray:
    """A job at full load, and from block 12 on one at a load that was never seen."""
    return (600.0 if block < 12 else 260.0) * rng.normal(1, 0.02, NODES * GPUS)


def churn(block: int, rng: np.random.Generator) -> np.ndarray:
    """Each GPU has a job of its own, which changes each half hour."""
    own = np.random.default_rng(block // 6).uniform(150, 650, NODES * GPUS)
    return own * rng.normal(1, 0.03, NODES * GPUS)


@pytest.mark.parametrize("load", [steps, churn])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_healthy_gpus_whose_fans_follow_the_load_are_not_hot(load: Load, seed: int) -> None:
    assert gpus(load, blocks=60, seed=seed) == set()


@pytest.mark.parametrize("load", [steps, churn])
def test_a_bad_heat_sink_is_found_at_a_load_that_was_never_seen(load: Load) -> None:
    assert gpus(load, bad_from=14, worse=0.3) == {BAD}


def test_too_few_mates_at_about_the_same_load_say_nothing() -> None:
    watts = np.full(GPUS, 600.0)
    watts[LEAST_MATES:] = 100.0  # three at full load: each has two mates
    rise = 0.06 * watts + 10
    expected = NodeMates(np.zeros(GPUS, np.int64)).expected_c(rise, watts)
    assert np.isnan(expected[:LEAST_MATES]).all()
    assert not np.isnan(expected[LEAST_MATES:]).any()


def test_nodes_of_unequal_size_and_gpus_without_values_keep_their_places() -> None:
    node = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 2])
    rise = np.array([30.0, 30, 30, 60, 30, 30, 30, np.nan, 30, 30])
    expected = NodeMates(node).expected_c(rise, np.full(10, 500.0))
    assert expected[3] == pytest.approx(30.0)
    assert np.isnan(expected[4])
    assert expected[9] == pytest.approx(30.0)


def test_nodes_are_compared_with_nodes_of_their_board_and_load() -> None:
    rise = np.array([30.0, 30, 30, 45, 20, 20, 20])
    watts, board = np.full(7, 500.0), np.array([1, 1, 1, 1, 2, 2, 2])
    expected = expected_of_nodes_c(rise, watts, board)
    assert expected[:4] == pytest.approx(30.0)
    assert np.isnan(expected[4:]).all(), "three nodes are too few"


def nodes(worse: float, racks: np.ndarray | None = None, hot: tuple[int, ...] = (2,), since_s: int = 9000) -> HeatModel:
    """Play five hours of a fleet whose load falls at 2 h. Nodes `hot` lose flow at `since_s`. No inlet is read."""
    count = 12
    node, rng = np.repeat(np.arange(count), 4), np.random.default_rng(1)
    racks = np.arange(count) // 2 if racks is None else racks
    model = HeatModel(node, racks, int(racks.max()) + 1)
    model.layout.board = np.zeros(count, np.int64)
    share = rng.normal(1, 0.05, len(node))
    limit, inlet = np.full(len(node), 700.0), np.full(count, np.nan)
    for second in range(0, 5 * 3600, 30):
        watts = np.full(len(node), 600.0 if second < 7200 else 350.0) * rng.normal(1, 0.01, len(node))
        r = 0.06 * (0.4 + 0.6 * watts / 700) ** -0.8 * share
        r[np.isin(node, hot)] *= 1 + worse * (second >= since_s)
        temp = np.round(27 + r * watts + rng.normal(0, 0.3, len(node)))
        model.advance((second + 30) * 1000, 30_000, temp, watts, limit, inlet)
    return model


def test_a_node_that_loses_flow_is_found_against_nodes_as_busy_and_a_healthy_fleet_is_quiet() -> None:
    assert np.flatnonzero(nodes(0.45).rise.hot_nodes).tolist() == [2]
    quiet = nodes(0.0)
    assert not quiet.rise.hot_nodes.any() and not quiet.rise.hot.any() and not quiet.rise.hot_racks.any()


def test_what_all_nodes_of_a_rack_have_is_the_racks() -> None:
    racks = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    rise = nodes(0.5, racks, hot=(0, 1, 2)).rise
    assert np.flatnonzero(rise.hot_racks).tolist() == [0]
    assert not rise.hot_nodes.any()


def test_the_gpus_of_a_hot_node_are_warmer_by_it_where_they_have_no_past_at_their_load() -> None:
    """Found while it was built: the node was hot, no GPU of it could be judged, and so nothing was said."""
    rise = nodes(0.45, since_s=7200).rise
    assert rise.hot_nodes[2]
    assert (rise.warmer_c[8:12] >= 5).all()


def test_a_load_at_the_edge_of_a_step_does_not_change_its_mates_at_once() -> None:
    """Found on a stranger's fleet: a steady node was 5 degC too warm in each block in which it drew 1 W less."""
    watts = np.array([400.0, 420, 440, 460, 480, 600, 620, 640, 660, 680, 544.0])
    rise = np.where(watts < 544, 0.065, 0.052) * watts
    expected = []
    for own in np.arange(480.0, 620.0, 2.0):
        watts[-1], rise[-1] = own, 0.058 * own
        expected.append(expected_of_nodes_c(rise, watts, np.zeros(11, np.int64))[-1] / own)
    assert np.abs(np.diff(expected)).max() < 0.002, "of .013 degC/W between the two groups"

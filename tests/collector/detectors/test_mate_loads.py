"""What neighbours' changed loads may add to a GPU's heat."""

from __future__ import annotations

import numpy as np
import pytest

from drover_collector.detectors.thermal.mate_loads import DOUBT_C, SLOWEST, MateLoads

NODE = np.repeat(np.arange(1, 4), 4)  # node 0 has no GPU
LOAD = np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.8, 0.3, 0.3, 0.5, 0.5, 0.5, np.nan])


def learnt(blocks: int = 3) -> MateLoads:
    mates = MateLoads(NODE, 5)
    for _ in range(blocks):
        mates.add_block(LOAD)
    return mates


def doubt(mates: MateLoads, load: np.ndarray) -> np.ndarray:
    mates.add_block(load)
    return mates.doubt_c


def changed(by: dict[int, float]) -> np.ndarray:
    load = LOAD.copy()
    for gpu, more in by.items():
        load[gpu] += more
    return load


@pytest.mark.parametrize(
    ("what", "by", "doubted"),
    [
        ("nothing", {}, {}),
        ("a neighbour begins to work", {4: 0.6}, {5: 0.6, 6: 0.6, 7: 0.6}),
        ("a neighbour rests", {5: -0.7}, {4: 0.7, 6: 0.7, 7: 0.7}),
        ("two neighbours, the second by more", {5: -0.3, 4: 0.6}, {4: 0.3, 5: 0.6, 6: 0.6, 7: 0.6}),
        ("all of a node alike", {0: -0.5, 1: -0.5, 2: -0.5, 3: -0.5}, {}),
        ("replicas that wander", {0: 0.05, 1: -0.05}, {}),
        ("one whose load is not known", {11: 0.5}, {}),
    ],
)
def test_only_neighbours_that_change_apart_from_their_node_are_a_doubt(
    what: str, by: dict[int, float], doubted: dict[int, float]
) -> None:
    expected = np.zeros(len(NODE))
    for gpu, change in doubted.items():
        expected[gpu] = DOUBT_C * change
    assert doubt(learnt(), changed(by)) == pytest.approx(expected, abs=1e-9), what


def test_nothing_is_doubted_before_a_load_is_known_nor_long_after_it_changed() -> None:
    assert not doubt(MateLoads(NODE, 5), LOAD).any()
    mates, after = learnt(2 * SLOWEST), changed({4: 0.6})
    first = doubt(mates, after)[5]
    for _ in range(3 * SLOWEST):
        mates.add_block(after)
    assert first == pytest.approx(DOUBT_C * 0.6) and mates.doubt_c[5] == 0.0


def test_another_power_limit_is_no_other_load() -> None:
    mates = learnt()
    mates.rescale(np.array([5]), np.array([0.5]))
    assert not doubt(mates, np.where(np.arange(len(NODE)) == 5, 0.4, LOAD)).any()


def test_gpus_that_are_alone_and_fleets_without_any_have_no_neighbours() -> None:
    alone = MateLoads(np.arange(3), 3)
    alone.add_block(np.zeros(3))
    assert not doubt(alone, np.array([0.0, 0.9, 0.0])).any()
    assert doubt(MateLoads(np.zeros(0, np.int64), 2), np.zeros(0)).shape == (0,)

"""HBM against the node's other GPUs: nothing of a GPU's own past is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from drover_collector.detectors.thermal.memory_heat import MemoryHeat

NODES, GPUS, BAD, BLOCKS = 4, 8, 11, 30
NODE = np.repeat(np.arange(NODES), GPUS)
BLOCK_MS, BUCKET_MS = 300_000, 60_000
Work = Callable[[int, np.random.Generator], np.ndarray]  # (block, noise) -> share of full traffic of each GPU
Values = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def begins(block: int, rng: np.random.Generator) -> np.ndarray:
    """A light job, and from block 10 on one with a traffic and a load that no GPU had before."""
    return (0.2 if block < 10 else 0.7) * rng.normal(1, 0.02, NODES * GPUS)


def churn(block: int, rng: np.random.Generator) -> np.ndarray:
    """Each node has another job each 20 minutes."""
    own = np.random.default_rng(block // 4).uniform(0.15, 0.8, NODES)[NODE]
    return own * rng.normal(1, 0.02, NODES * GPUS)


def played(
    work: Work, seed: int, worse: float = 0.0, bad_from: int = 0, core_c: float = 0.0, sensor_c: float | None = None
) -> Iterator[Values]:
    """Yield memory, core, load and traffic, in whole degrees.

    Of the bad GPU: `worse`: R of its HBM; `core_c`: its core; `sensor_c`: what its sensor of HBM is off by.
    """
    rng = np.random.default_rng(seed)
    offset, pads = np.clip(rng.normal(0, 1.2, NODES * GPUS), -3, 3), rng.normal(1, 0.15, NODES * GPUS)
    offset[BAD] = offset[BAD] if sensor_c is None else sensor_c
    cooling = rng.normal(1, 0.08, NODES * GPUS)
    for block in range(BLOCKS):
        bad = (np.arange(NODES * GPUS) == BAD) & (block >= bad_from)
        for _ in range(BLOCK_MS // BUCKET_MS):
            traffic = work(block, rng)
            load = 0.25 + 0.6 * traffic
            sink = 30 + 20 * cooling * load
            core = sink + 18 * load + np.where(bad, core_c, 0.0)
            memory = 0.75 * core + 0.25 * sink + 18 * traffic * pads * np.where(bad, 1 + worse, 1.0) + 2 + offset
            yield np.round(memory + rng.normal(0, 0.3, len(load))), np.round(core), load, traffic


def hot(values: Iterator[Values], heat: MemoryHeat | None = None, first: int = 0) -> dict[int, int]:
    """Return GPU -> block at whose end it was first called hot."""
    heat, result = heat or MemoryHeat(NODE), {}
    for number, (memory, core, load, traffic) in enumerate(values):
        heat.advance(first + number * BUCKET_MS + 1, memory, core, load, traffic)
        for g in np.flatnonzero(heat.hot).tolist():
            result.setdefault(g, number * BUCKET_MS // BLOCK_MS - 1)
    return result


@pytest.mark.parametrize("work", [begins, churn])
@pytest.mark.parametrize("core_c", [0.0, 12.0])
def test_healthy_hbm_at_new_loads_and_under_a_core_that_warms_is_not_hot(work: Work, core_c: float) -> None:
    for seed in (1, 4):
        assert hot(played(work, seed, bad_from=8, core_c=core_c)) == {}


@pytest.mark.parametrize("work", [begins, churn])
@pytest.mark.parametrize("bad_from", [2, 10])
def test_a_bad_pad_is_found_at_a_load_that_is_new_and_in_the_first_half_hour(work: Work, bad_from: int) -> None:
    found = hot(played(work, 1, worse=1.8, bad_from=bad_from))
    assert set(found) == {BAD}
    # A light job warms its HBM too little; from the new job on it takes 30 minutes at most.
    assert found[BAD] <= (10 if work is begins else bad_from) + 6


def test_where_the_traffic_is_unknown_a_rise_of_less_than_10_degc_says_nothing() -> None:
    def blind(worse: float) -> set[int]:
        of_node = played(begins, 1, worse=worse, bad_from=12)
        return set(hot((memory, core, load, np.full(len(load), np.nan)) for memory, core, load, _ in of_node))

    assert blind(0.45) == set()  # 5.7 degC
    assert blind(1.2) == {BAD}


def even(_block: int, rng: np.random.Generator) -> np.ndarray:
    """One job for ever."""
    return 0.6 * rng.normal(1, 0.02, NODES * GPUS)


def test_a_core_that_is_cooled_well_again_makes_no_fault_of_its_hbm() -> None:
    """Its HBM is 10 degC warmer against the core than in the hour before, and no warmer than its mates say."""
    healthy, warm = list(played(even, 2)), list(played(even, 2, core_c=40.0))
    assert hot(iter(healthy[:50] + warm[:100] + healthy[50:])) == {}


def test_mates_whose_line_is_not_known_yet_do_not_end_what_was_hot_before_a_restart() -> None:
    heat, values = MemoryHeat(NODE), list(played(even, 2, worse=0.8, bad_from=14, sensor_c=-3.5))
    assert set(hot(iter(values), heat)) == {BAD}
    after = MemoryHeat(NODE)
    after.restore(BAD, heat.usual(BAD), heat.since_ms(BAD))
    for number, (memory, core, load, traffic) in enumerate(values[90:]):
        after.advance(number * BUCKET_MS + 1, memory, core, load, traffic)
        assert after.hot[BAD]


def test_hbm_that_only_its_mates_call_hot_stays_so_after_a_restart() -> None:
    before, values = MemoryHeat(NODE), list(played(begins, 1, worse=1.8, bad_from=10))
    hot(iter(values[:100]), before)
    assert before.hot[BAD] and before.by_peers[BAD]
    after = MemoryHeat(NODE)
    after.restore(BAD, before.usual(BAD), before.since_ms(BAD))
    assert after.since_ms(BAD) == before.since_ms(BAD)
    for number, (memory, core, load, traffic) in enumerate(values[100:], 100):
        after.advance(number * BUCKET_MS + 1, memory, core, load, traffic)
        assert after.hot[BAD]
    for number, (memory, core, load, traffic) in enumerate(list(played(begins, 1))[50:], len(values)):
        after.advance(number * BUCKET_MS + 1, memory, core, load, traffic)
    assert not after.hot.any(), "it is repaired"

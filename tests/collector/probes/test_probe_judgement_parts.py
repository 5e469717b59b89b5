"""Parts of the judgement of probes, and properties: order, unit, a better value, a further healthy board."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.probes.judging.groups import (
    fit,
    similarity,
    t_quantile,
    usual,
)
from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.measurements import Measurement
from drover_collector.store.repositories.probes import Key

H200 = Key(
    sku="NVIDIA H200", driver="570.1", power_limit_w=700, ecc=True, pcie_gen=5, pcie_width=16, nvlinks=18, mig=False,
    host="board A",
)  # fmt: skip
UNKNOWN = dataclasses.replace(H200, sku="a model that no table has")


def test_similarity_is_the_ratio_for_single_values_and_one_for_the_same() -> None:
    assert similarity(np.array([90.0]), np.array([100.0])) == pytest.approx(0.9)
    same = np.array([3.0, 1.0, 2.0])
    assert similarity(same, same[::-1]) == 1.0
    with pytest.raises(ValueError, match="positive"):
        similarity(np.array([0.0]), same)


@pytest.mark.parametrize(
    ("alpha", "freedom", "t"), [(0.001, 10, 4.144), (0.0005, 30, 3.646), (0.05, 6, 1.943), (0.01, 2, 6.965)]
)
def test_t_quantile_as_tabulated(alpha: float, freedom: float, t: float) -> None:
    assert t_quantile(alpha, freedom) == pytest.approx(t, abs=0.003)


@pytest.mark.parametrize("drop", [3.0, 4.0, 8.0])
def test_the_fit_stands_a_third_of_bad_ones_in_one_clump(drop: float) -> None:
    values = np.random.default_rng(5).normal(0, 0.01, 2000)
    values[:600] -= drop * 0.01
    found = fit(values, 0.01)
    assert abs(found.centre) < 0.002
    assert found.spread == pytest.approx(0.01, rel=0.12)


# --- properties

VALUES = st.lists(st.floats(100, 1000), min_size=1, max_size=24)


def measured(values: list[float], scale: float = 1.0) -> list[Measurement]:
    return [Measurement(f"n{k}", 0, "gemm_bf16", v * scale, UNKNOWN) for k, v in enumerate(values)]


@given(VALUES, st.randoms(use_true_random=False))
def test_order_changes_nothing(values: list[float], chance: random.Random) -> None:
    boards = measured(values)
    mixed = boards[:]
    chance.shuffle(mixed)
    assert judge(mixed) == judge(boards)


@given(VALUES, st.sampled_from([1e-3, 0.25, 7.0, 1e6]))
def test_the_unit_changes_nothing(values: list[float], scale: float) -> None:
    """Rounding may move a value that lies on the limit to the bit; none of those that are clear of it."""
    one, other = judge(measured(values)), judge(measured(values, scale))
    for a, b in zip(one.verdicts, other.verdicts, strict=True):
        assert a.ok == b.ok
        if a.worse is not None:
            assert b.worse == pytest.approx(a.worse, abs=1e-6)


@given(VALUES)
def test_a_better_value_never_has_a_worse_verdict(values: list[float]) -> None:
    rank = {False: 0, None: 1, True: 2}
    ordered = sorted(judge(measured(values)).verdicts, key=lambda v: v.measurement.value or 0.0)
    ranks = [rank[v.ok] for v in ordered]
    assert ranks == sorted(ranks)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=40), st.floats(-1, 1))
def test_adding_a_healthy_board_fails_no_other(places: list[float], new: float) -> None:
    """Boards within what never fails (the material difference), wherever in it, and one more of these."""
    half = usual("gemm_bf16").material / 2
    for these in (places, [*places, new]):
        assert not [v for v in judge(measured([500 * (1 + half * x) for x in these])).verdicts if v.ok is False]


@given(st.integers(0, 10_000), st.integers(4, 200), st.sampled_from([0.003, 0.01, 0.02]))
def test_adding_a_healthy_board_fails_only_who_was_at_the_limit(seed: int, size: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    values = (500 * np.exp(rng.normal(0, spread, size + 1))).tolist()
    before, after = judge(measured(values[:-1])), judge(measured(values))
    was = {v.measurement.node: v for v in before.verdicts}
    for verdict in after.verdicts:
        if verdict.ok is False and verdict.measurement.node in was and was[verdict.measurement.node].ok is not False:
            assert (was[verdict.measurement.node].worse or 0.0) > 0.5 * before.groups[0].detectable

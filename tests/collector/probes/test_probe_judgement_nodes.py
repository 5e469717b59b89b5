"""Matrices of pairs, collectives over groups of nodes, and histories: who, of several, is the faulty one."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.probes.judging.drift import drift
from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.measurements import End, Measurement, NoteKind, Verdict
from drover_collector.probes.judging.multi_node import Run, blame
from drover_collector.probes.judging.shifts import shift
from drover_collector.store.repositories.probes import Key

KEY = Key(sku="NVIDIA H100 80GB HBM3", driver="570.1", power_limit_w=700, ecc=True, nvlinks=18, mig=False)


Factors = dict[tuple[str, int, int], float]


def matrices(
    nodes: int, slow: Factors, gpus: int = 8, level: dict[tuple[int, int], float] | None = None
) -> list[Verdict]:
    """Verdicts on the pairs of `nodes`; `slow`: factor of a pair, one way; `level`: by position, by design."""
    rng = np.random.default_rng(4)
    measured = []
    for n in range(nodes):
        for a, b in permutations(range(gpus), 2):
            value = (level or {}).get((min(a, b), max(a, b)), 380.0) * float(np.exp(rng.normal(0, 0.004)))
            value *= slow.get((f"n{n}", a, b), 1.0)
            measured.append(Measurement(f"n{n}", a, "p2p", value, KEY, peer=b, spread=0.002, repeats=10))
    return list(judge(measured).verdicts)


def both(node: str, a: int, b: int, factor: float = 0.5) -> dict[tuple[str, int, int], float]:
    return {(node, a, b): factor, (node, b, a): factor}


def blamed(verdicts: list[Verdict]) -> set[tuple[tuple[str, int | None], ...]]:
    return {v.against for v in verdicts if v.ok is False}


# --- pairs


def test_healthy_pairs_all_pass() -> None:
    assert all(v.ok is True for v in matrices(4, {}))


def test_a_bad_pair_is_the_links_between_two() -> None:
    verdicts = matrices(4, both("n1", 2, 5))
    assert [(v.measurement.gpu, v.measurement.peer) for v in verdicts if v.ok is False] == [(2, 5), (5, 2)]
    assert blamed(verdicts) == {(("n1", 2), ("n1", 5))}
    assert "links between these two" in next(v.text for v in verdicts if v.ok is False)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_gpu_all_of_whose_pairs_are_slow_is_that_gpu(nodes: int) -> None:
    slow = {k: v for b in range(8) if b != 3 for k, v in both("n0", 3, b).items()}
    verdicts = matrices(nodes, slow)
    assert blamed(verdicts) == {(("n0", 3),)}
    assert sum(v.ok is False for v in verdicts) == 14
    assert "7 of the 7 pairs of GPU 3" in next(v.text for v in verdicts if v.ok is False)


@pytest.mark.parametrize("gpus", [3, 4, 6])
def test_a_bad_gpu_of_a_lone_small_node_is_named(gpus: int) -> None:
    slow = {k: v for b in range(gpus) if b != 1 for k, v in both("n0", 1, b).items()}
    verdicts = matrices(1, slow, gpus)
    if gpus == 3:  # two of three pairs are slow: the one GPU that both have, or something that they share
        assert {v.ok for v in verdicts if v.measurement.gpu == 1} == {None}
    else:
        assert blamed(verdicts) == {(("n0", 1),)}
        assert all(v.ok for v in verdicts if 1 not in (v.measurement.gpu, v.measurement.peer))


def test_a_gpu_that_only_sends_slowly_is_that_gpu() -> None:
    assert blamed(matrices(4, {("n0", 3, b): 0.7 for b in range(8) if b != 3})) == {(("n0", 3),)}


def test_a_gpu_and_a_pair_elsewhere_are_distinguished() -> None:
    slow = {k: v for b in range(8) if b != 3 for k, v in both("n0", 3, b).items()} | both("n0", 6, 7)
    assert blamed(matrices(4, slow)) == {(("n0", 3),), (("n0", 6), ("n0", 7))}


def test_all_pairs_of_a_node_are_what_they_share() -> None:
    slow = {("n2", a, b): 0.6 for a, b in permutations(range(8), 2)}
    verdicts = matrices(6, slow)
    assert blamed(verdicts) == {(("n2", None),)}


def test_links_that_differ_by_position_by_design_are_learnt() -> None:
    level = {(a, a + 1): 760.0 for a in range(0, 8, 2)}  # pairs with twice the links
    assert all(v.ok is True for v in matrices(12, {}, level=level))
    assert blamed(matrices(12, both("n4", 2, 3), level=level)) == {(("n4", 2), ("n4", 3))}


def test_one_node_whose_pairs_differ_much_is_not_judged() -> None:
    level = {(a, b): 60.0 for a in range(4) for b in range(4, 8)}
    assert not [v for v in matrices(1, {}, level=level) if v.ok is False]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.floats(1, 900)), max_size=30),
    st.randoms(),
)
def test_any_pairs_in_any_order_have_verdicts_that_agree(
    pairs: list[tuple[int, int, int, float]], chance: random.Random
) -> None:
    measured = list(
        {(n, a, b): Measurement(f"n{n}", a, "p2p", v, KEY, peer=b) for n, a, b, v in pairs if a != b}.values()
    )
    found = judge(measured)
    assert len(found.verdicts) == len(measured)
    chance.shuffle(measured)
    assert judge(measured) == found


# --- groups of nodes

LEAF = {f"n{k}": f"leaf{k // 8}" for k in range(32)}


def ring(nodes: list[str], bad: set[str], size: int = 4, rounds: int = 2) -> list[Run]:
    """Groups of `size`, shuffled again each round: as slow as the worst member."""
    rng = np.random.default_rng(8)
    runs = []
    for _ in range(rounds):
        order = [str(n) for n in rng.permutation(nodes)]
        for at in range(0, len(order), size):
            members = tuple(order[at : at + size])
            value = 380 * (0.6 if bad & set(members) else 1.0) * float(np.exp(rng.normal(0, 0.01)))
            runs.append(Run(members, "allreduce", value))
    return runs


NODES = sorted(LEAF)[:16]
ONE_LEAF = dict.fromkeys(NODES, "leaf0")


def test_a_few_rounds_of_groups_name_the_bad_node() -> None:
    found = blame(ring(NODES, {"n13"}, rounds=4), ONE_LEAF)
    assert {v.node for v in found.nodes if v.ok is False} == {"n13"}
    assert all(v.ok for v in found.nodes if v.node != "n13")
    assert not found.next_pairs


def test_one_round_names_the_suspects_and_what_to_run_next() -> None:
    found = blame(ring(NODES, {"n13"}, rounds=1), ONE_LEAF)
    suspects = next(v.suspects for v in found.nodes if v.node == "n13")
    assert len(suspects) == 4
    assert "n13" in suspects
    assert not [v for v in found.nodes if v.ok is False]
    assert {a for a, _ in found.next_pairs} == set(suspects)
    assert not {b for _, b in found.next_pairs} & set(suspects)


def test_next_pairs_settle_it() -> None:
    runs = ring(NODES, {"n13"}, rounds=1)
    pairs = [Run(pair, "allreduce", 200.0 if "n13" in pair else 380.0) for pair in blame(runs, ONE_LEAF).next_pairs]
    found = blame([*runs, *pairs], ONE_LEAF)
    assert {v.node for v in found.nodes if v.ok is False} == {"n13"}
    assert all(v.ok for v in found.nodes if v.node != "n13")


def test_a_group_that_hangs_counts_as_bad() -> None:
    runs = [
        dataclasses.replace(r, value=None, end=End.HUNG) if "n13" in r.nodes else r
        for r in ring(NODES, set(), rounds=4)
    ]
    assert {v.node for v in blame(runs, ONE_LEAF).nodes if v.ok is False} == {"n13"}


def test_a_slow_way_between_two_leaves_blames_no_node() -> None:
    across = [
        Run((f"n{a * 8 + k}", f"n{b * 8 + k}"), "allreduce", 300.0 * (0.5 if (a, b) == (1, 3) else 1.0 + 0.01 * k))
        for a, b in combinations(range(4), 2) for k in range(4)
    ]  # fmt: skip
    within = [
        Run((f"n{8 * a + k}", f"n{8 * a + k + 1}"), "allreduce", 380.0 + k) for a in range(4) for k in range(0, 8, 2)
    ]
    found = blame([*within, *across], LEAF)
    assert not [v for v in found.nodes if v.ok is False]
    assert len(found.ways) == 4
    assert all("the way between leaves leaf1, leaf3" in text for _, text in found.ways)


def test_too_few_groups_say_nothing() -> None:
    found = blame([Run(("a", "b"), "allreduce", 380.0), Run(("c", "d"), "allreduce", 150.0)], {})
    assert {v.ok for v in found.nodes} == {None}


@given(st.sets(st.sampled_from(NODES), max_size=3), st.integers(1, 4))
def test_no_good_node_is_ever_named(bad: set[str], rounds: int) -> None:
    found = blame(ring(NODES, bad, rounds=rounds), ONE_LEAF)
    assert {v.node for v in found.nodes if v.ok is False} <= bad
    assert not {v.node for v in found.nodes if v.ok is True} & bad


# --- histories


def history(values: list[float], key: Key = KEY) -> list[Measurement]:
    return [Measurement("n0", 2, "gemm_bf16", v, key, ts_ms=1000 * k) for k, v in enumerate(values)]


def noisy(levels: list[float], seed: int = 0) -> list[float]:
    return [
        float(v * np.exp(x))
        for v, x in zip(levels, np.random.default_rng(seed).normal(0, 0.003, len(levels)), strict=True)
    ]


def test_a_step_down_is_drift_and_its_time_is_reported() -> None:
    found = drift(history(noisy([790.0] * 10 + [750.0] * 3)))
    assert found.ok is False
    assert found.since_ms == 10_000
    assert found.worse == pytest.approx(0.05, abs=0.01)
    assert "since result 11 of 13" in found.text


def test_a_slow_decline_is_drift() -> None:
    assert drift(history(noisy([790.0 - 4 * k for k in range(16)]))).ok is False


def test_steady_or_better_is_none() -> None:
    assert drift(history(noisy([790.0] * 12))).ok is True
    assert drift(history(noisy([750.0] * 8 + [790.0] * 4))).ok is True


def test_one_bad_result_is_no_drift() -> None:
    assert drift(history(noisy([790.0] * 10 + [740.0]))).ok is True


def test_a_new_driver_begins_again() -> None:
    old, new = history([790.0] * 10), dataclasses.replace(KEY, driver="580.1")
    after = [dataclasses.replace(m, ts_ms=m.ts_ms + 10**6) for m in history([750.0] * 3, new)]
    found = drift([*old, *after])
    assert found.ok is None
    assert "under another" in found.text
    assert drift(
        [*old, *after[:3], *(dataclasses.replace(m, ts_ms=m.ts_ms + 10**7) for m in history([750.0] * 3, new))]
    ).ok


def test_latency_drifts_upwards() -> None:
    up = [dataclasses.replace(m, probe="launch") for m in history([6.0] * 10 + [9.5] * 3)]
    assert drift(up).ok is False
    assert drift([dataclasses.replace(m, value=12.0 - (m.value or 0)) for m in up]).ok is True


def test_false_drifts_keep_to_the_budget() -> None:
    false = sum(drift(history(noisy([790.0] * 20, seed))).ok is False for seed in range(1000))
    assert false <= 7  # 1 in 1,000 is the budget: more than 7 is chance once in 100,000


def test_a_change_of_the_detectable_size_is_reported_most_often() -> None:
    detectable = drift(history(noisy([790.0] * 20))).detectable
    assert detectable is not None
    hit = sum(
        drift(history(noisy([790.0] * 18 + [790.0 * (1 - detectable)] * 2, seed))).ok is False for seed in range(200)
    )
    assert hit >= 0.75 * 200


def test_a_history_is_of_one_gpu() -> None:
    with pytest.raises(ValueError, match="one GPU"):
        drift([*history([790.0]), dataclasses.replace(history([790.0])[0], gpu=5)])
    assert drift([]).ok is None


def boards(centre: float, driver: str, seed: int, count: int = 30, day: int = 0) -> list[Measurement]:
    draw = np.random.default_rng(1000 + seed).normal(0, 0.01, count)
    key = dataclasses.replace(KEY, driver=driver)
    return [
        Measurement(f"n{day}x{n}", 0, "gemm_bf16", centre * math.exp(d), key, ts_ms=day * 86_400_000)
        for n, d in enumerate(draw)
    ]


def test_a_configuration_that_gives_less_with_a_new_driver_is_a_note_and_no_board_fails() -> None:
    judged = judge([*boards(790.0, "570.1", 1), *boards(750.0, "580.1", 2, day=1)])
    (note,) = [note for note in judged.notes if note.kind is NoteKind.SHIFT]
    assert note.text.startswith(f"gemm_bf16 of {KEY.sku}, driver 580.1: 30 boards read 5.")
    assert "below what 30 gave with driver 570.1 (789.5 TFLOP/s); similarity 0.9" in note.text
    assert not [v for v in judged.verdicts if v.ok is False]


@pytest.mark.parametrize(("old", "new", "count"), [(790.0, 790.0, 30), (750.0, 790.0, 30), (790.0, 750.0, 7)])
def test_as_much_or_more_or_too_few_boards_are_none(old: float, new: float, count: int) -> None:
    judged = judge([*boards(old, "570.1", 1), *boards(new, "580.1", 2, count, day=1)])
    assert [note for note in judged.notes if note.kind is NoteKind.SHIFT] == []


def test_small_groups_of_one_distribution_are_not_distinguished() -> None:
    """Similarity alone would: two samples of eight boards may look unlike."""
    pairs = [(boards(790.0, "570.1", 2 * s, 8), boards(790.0, "580.1", 2 * s + 1, 8)) for s in range(300)]
    assert [s for s, (before, after) in enumerate(pairs) if shift(before, after) is not None] == []

"""Random histories of faults, people, schedulers, restarts, clocks and late events, on the real pipeline, engine,
decider and desk of actions: what must never be, by a model of the true world (testbed/acting_history.py says what).

    DROVER_HISTORIES=2000 pytest tests/collector/actions/test_acting_properties.py     # more of them
    pytest -s -k taken_out tests/collector/actions/test_acting_properties.py     # and that it finds each mend taken out
"""

from __future__ import annotations

import os

import pytest

from drover_collector.detectors import DETECTORS
from testbed.acting_history import FEW, Plan, play, random_plan, shrunk
from testbed.acting_mutations import MUTATIONS, Mutation

HISTORIES = int(os.environ.get("DROVER_HISTORIES", "20"))  # some 0.5 s each
AT_ONCE = 10
TRIES = 60  # histories until a mutation must have been found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, HISTORIES, AT_ONCE))
def test_no_history_shows_what_must_never_be(first: int) -> None:
    """Every tenth with all detectors: none of the others makes Drover act on what is well."""
    for seed in range(first, min(first + AT_ONCE, HISTORIES)):
        plan = random_plan(seed)
        if found := play(plan, FEW if seed % AT_ONCE else DETECTORS):
            pytest.fail(f"history {seed}: {found[0]}\nthe shortest that shows it: {shrunk(plan, found[0][0])}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_mend_that_is_taken_out_is_found(mutation: Mutation) -> None:
    for seed in range(TRIES):
        plan = random_plan(seed, mutation.episode)
        with mutation.applied():
            found = [text for text in play(plan) if text.startswith(mutation.found)]
        if found:
            assert play(plan) == [], "with the mend it is not so"
            print(f"{mutation.name}: history {seed} of {mutation.episode}: {found[0]}")
            return
    pytest.fail(f"not found in {TRIES} histories without: {mutation.name}")


def test_a_drain_that_was_held_is_not_done_after_its_node_was_booted_and_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("testbed.acting_history.BEFORE_SHOWN_MS", 0)
    plan = Plan("enforce", {"rack_nodes": 1}, (
        ("bob closes", 3, 0), ("wait", 0, 100), ("xid79", 4, 0), ("wait", 0, 40), ("reboot", 4, 0), ("wait", 0, 120),
        ("bob opens", 3, 0), ("wait", 0, 120),
    ))  # fmt: skip
    assert play(plan) == []


def test_two_steps_of_the_clock_back_let_no_more_nodes_go_than_an_hour_may() -> None:
    """Events were judged at the collector's start, which then lay two hours ahead."""
    steps = (("clock", 0, 1), ("mass", 11, 3), ("clock", 0, 1), ("xid119", 8, 0))
    assert play(Plan("enforce", {"per_hour": 2}, steps)) == []


def test_a_history_is_the_same_when_it_is_played_again() -> None:
    plan = random_plan(3)
    assert play(plan) == play(plan)
    assert random_plan(3) == plan != random_plan(4)


def test_the_shortest_history_keeps_what_shows_it() -> None:
    plan = Plan("enforce", {}, (("wait", 0, 40), ("xid119", 2, 0), ("job", 7, 0), ("wait", 0, 60), ("pass", 2, 0)))
    mend = next(m for m in MUTATIONS if "boot or reset" in m.name)
    with mend.applied():
        assert play(plan)[0].startswith("b: ")
        steps = [what for what, _, _ in shrunk(plan, "b").steps]
    assert steps == ["xid119", "pass"]

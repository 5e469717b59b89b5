"""A silent node that its scheduler still reaches is not dead: it is not drained, and it counts as any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.engine.node_state import Survey
from drover_collector.policy.decider import Decider, LiveFleet
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Decision,
    Incident,
    IncidentKind,
    RecommendedAction,
)
from testbed.deciding import OPEN, decide, fleet, incident, policy

INDEX = fleet(32)
HALF = dataclasses.replace(OPEN, rack_ratio=0.5)


def silent(node: str, *others: str) -> Incident:
    """`others`: detectors that have said something of the same incident."""
    found = incident(node, "silent", kind=IncidentKind.LIVENESS)
    return dataclasses.replace(found, scope="node", gpu=None, members=((node, None),), detectors=("liveness", *others))


def decider(answers: Mapping[str, bool], mode: str = "enforce") -> Decider:
    subject = Decider(INDEX, policy(mode, HALF), "enforce", LiveFleet())
    subject.answers = answers
    return subject


def findings(made: list[Decision]) -> dict[str, tuple[str, str]]:
    return {d.node: (d.outcome, d.wanted.value) for d in made}


@pytest.mark.parametrize(
    ("answers", "mode", "expected"),
    [
        ({"n003": True}, "enforce", ("act", "advise")),
        ({"n003": False}, "enforce", ("act", "drain")),
        ({}, "enforce", ("pending_approval", "drain")),
        ({"n003": True}, "observe", ("would_act", "advise")),
        ({}, "observe", ("would_act", "drain")),
    ],
)
def test_what_comes_of_a_silence_by_the_word_of_the_scheduler(
    answers: dict[str, bool], mode: str, expected: tuple[str, str]
) -> None:
    made, _ = decide(decider(answers, mode), [silent("n003")], 1000)
    assert findings(made) == {"n003": expected}
    assert answers.get("n003") is False or "scheduler" in made[0].rule, "it is said which"


def test_where_another_detector_asks_too_a_person_is_asked_and_other_faults_do_not_wait() -> None:
    subject = decider({"n003": True, "n001": True})
    assert findings(decide(subject, [silent("n003", "thermal")], 1000)[0]) == {"n003": ("pending_approval", "drain")}
    subject = decider({"n001": True})
    assert findings(decide(subject, [incident("n001")], 2000)[0]) == {"n001": ("act", "drain")}, (
        "an XID rests on no silence"
    )


def test_a_broken_upgrade_of_the_agents_drains_nobody_past_the_caps() -> None:
    """A case of the review: in a rack of 4, 2 may be out. A person has drained two, and an XID of the third is held."""
    rack = [f"n{n:03d}" for n in range(4)]
    for answers, expected in (
        (dict.fromkeys(rack, True), {"n002": ("held", "drain"), "n003": ("act", "advise")}),
        ({}, {"n002": ("held", "drain"), "n003": ("held", "drain")}),
    ):
        subject = decider(answers)
        subject.away = {"n000", "n001"}
        assert findings(decide(subject, [incident("n002"), silent("n003")], 1000)[0]) == expected
    upgraded = [silent(node) for node in rack]
    assert {what for what, _ in findings(decide(decider(dict.fromkeys(rack, True)), upgraded, 1000)[0]).values()} == {
        "act"
    }
    made, _ = decide(decider(dict.fromkeys(rack, True)), upgraded, 1000)
    assert {d.wanted for d in made} == {RecommendedAction.ADVISE}


def test_a_reporting_node_counts_as_in_service_and_one_without_a_word_as_missing_for_others() -> None:
    two = [silent("n000"), silent("n001")]
    assert findings(decide(decider({"n000": True, "n001": True}), [*two, incident("n002")], 1000)[0])["n002"] == (
        "act", "drain",
    )  # fmt: skip
    assert findings(decide(decider({}), [*two, incident("n002")], 1000)[0])["n002"] == ("held", "drain")
    assert findings(decide(decider({"n000": False, "n001": False}), [*two, incident("n002")], 1000)[0])["n002"] == (
        "held", "drain",
    )  # fmt: skip


def test_a_word_that_changes_is_decided_again_and_the_question_ends() -> None:
    subject, open_ = decider({}), [silent("n003")]
    assert findings(decide(subject, open_, 1000)[0]) == {"n003": ("pending_approval", "drain")}
    subject.answers = {"n003": True}
    assert findings(decide(subject, open_, 2000)[0]) == {"n003": ("act", "advise")}
    subject.answers = {"n003": False}
    assert findings(decide(subject, open_, 3000)[0]) == {"n003": ("act", "drain")}


def wanted_of(live: bool, survey: Survey | None) -> tuple[set[tuple[str, str]], Incident]:
    """Decisions on a node that is silent for 8 minutes, and its incident, of an engine in enforce mode."""
    index = small_fleet()
    enforce = dataclasses.replace(Policy.named("nvidia"), mode="enforce", guard=OPEN)
    engine = Engine(index, enforce, START_MS, ceiling="enforce", live=LiveFleet() if live else None)
    if survey is not None:
        engine.on_survey(survey)
    made, known = list[Decision](), dict[str, Incident]()

    def stopped(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        gpu["power_w"] *= 0.4 if number >= 4 else 1.0  # its job waits for it

    for number in range(50):
        bucket = training_bucket(index, number, stopped, silent=[2] if number >= 4 else [])
        outcome = engine.on_bucket(bucket, bucket.end_ms + LAG_MS)
        made += outcome.decisions
        known |= {i.id: i for i in outcome.incidents}
    (found,) = known.values()
    return {(d.outcome, d.wanted.value) for d in made}, found


def test_whole_path_of_a_silent_node() -> None:
    made, found = wanted_of(True, Survey(frozenset(), {"n02": True}))
    assert made == {("act", "advise")}
    assert (found.asked, found.action) == (RecommendedAction.DRAIN, RecommendedAction.ADVISE), (
        "what is found stays; what is done differs"
    )
    assert wanted_of(True, Survey(frozenset({"n02"}), {"n02": False}))[0] == {("act", "advise"), ("act", "drain")}
    assert wanted_of(True, None)[0] == {("act", "advise"), ("pending_approval", "drain")}
    recorded, found = wanted_of(False, None)
    assert recorded == {("act", "advise"), ("act", "drain")}, "a recorded fleet has no scheduler: as ever"
    assert found.action is RecommendedAction.DRAIN

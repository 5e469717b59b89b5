"""Nodes that people work on: nothing is done to them, and what happens there alarms nobody as a mass event."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from drover_collector.policy.decider import Decider
from drover_collector.probes.scheduling.planner import PlannedProbe
from drover_collector.probes.scheduling.requests import Asking
from drover_collector.probes.settings import ProbesConfig
from drover_core.model.events import ProbeReason, RecommendedAction
from testbed.deciding import OPEN, decide, fleet, incident, policy

WINDOW = "maintenance window: by anna until noon: firmware"
ALL = [f"n{n:03d}" for n in range(8)]


def decider(mode: str = "enforce", **limits: float) -> Decider:
    return Decider(fleet(8), policy(mode, replace(OPEN, **limits)), "enforce")  # type: ignore[arg-type]  # numbers


@pytest.mark.parametrize("mode", ["observe", "approve", "enforce"])
@pytest.mark.parametrize(
    "wanted", [RecommendedAction.ADVISE, RecommendedAction.PROBE, RecommendedAction.DRAIN, RecommendedAction.ISOLATE]
)
def test_whatever_is_wanted_is_held_with_its_reason_once(mode: str, wanted: RecommendedAction) -> None:
    subject = decider(mode)
    subject.maintenance = {"n001": WINDOW}
    wishes = [incident("n001", wanted=wanted), incident("n002")]
    made, _ = decide(subject, wishes, 1000)
    assert [(d.outcome, d.reason) for d in made if d.node == "n001"] == [("held", WINDOW)]
    assert [d.outcome for d in made if d.node == "n002"] != ["held"]
    assert decide(subject, wishes, 2000)[0] == []
    subject.maintenance = {}
    (after,), _ = decide(subject, wishes, 3000)
    assert (after.node, after.outcome != "held") == ("n001", True)


def test_when_it_is_over_the_guards_own_reason_is_shown() -> None:
    subject = decider(fleet_nodes=1)
    wishes = [incident("n002"), incident("n001")]
    (gone,), _ = decide(subject, wishes[:1], 1000)
    subject.maintenance = {"n001": WINDOW}
    (made,), _ = decide(subject, wishes, 1000)
    assert [(d.node, d.outcome) for d in (gone, made)] == [("n002", "act"), ("n001", "held")]
    subject.maintenance = {}
    (held,), _ = decide(subject, wishes, 2000)
    assert held.outcome == "held"
    assert "2 of 8 nodes of the fleet would be out" in held.reason


def test_a_node_that_goes_on_being_wanted_is_decided_when_it_is_over() -> None:
    subject = decider("approve")
    (asked,), _ = decide(subject, [incident("n001")], 1000)
    subject.maintenance = {"n001": WINDOW}
    assert asked.outcome == "pending_approval"
    assert decide(subject, [incident("n001")], 2000)[0] == [], "the question stands"


def test_many_of_them_are_no_mass_event_until_it_is_over() -> None:
    subject = decider(mass_nodes=3)
    subject.maintenance = dict.fromkeys(ALL[:5], WINDOW)
    wishes = [incident(node) for node in ALL[:5]]
    made, events = decide(subject, wishes, 1000)
    assert events == []
    assert {d.outcome for d in made} == {"held"}
    subject.maintenance = {}
    made, (event,) = decide(subject, wishes, 2000)
    assert event.cause == "mass_event"
    assert len(event.members) == 5
    assert not [d for d in made if d.outcome == "act"], "five that are still broken are a person's business"


def test_their_silence_is_no_gap_in_telemetry() -> None:
    subject = decider(gap_ratio=0.3, mass_nodes=2)
    here, gone = np.ones(8, np.bool_), np.ones(8, np.bool_)
    gone[:4] = False
    decide(subject, [], 1000, reporting=here)
    subject.maintenance = dict.fromkeys(ALL[:4], WINDOW)
    assert decide(subject, [], 11_000, reporting=gone)[1] == []
    other = decider(gap_ratio=0.3, mass_nodes=2)
    decide(other, [], 1000, reporting=here)
    (event,) = decide(other, [], 11_000, reporting=gone)[1]
    assert event.cause == "gap_in_telemetry"


def test_no_probe_is_asked_for_on_its_own_account() -> None:
    class Planned(Asking):
        def _look(self, now_ms: int) -> None: ...

        def _upkeep(self, now_ms: int) -> list[PlannedProbe]:
            return [PlannedProbe(node, ProbeReason.IDLE) for node in ALL[:3]]

    asked: list[str] = []

    class Desk:
        protection = SimpleNamespace(refused=lambda _: False)
        troubles: ClassVar[dict[str, str]] = {}

        @property
        def orders(self) -> Desk:
            return self

        def ask(self, node: str, *_: object, **__: object) -> str:
            asked.append(node)
            return node

    desk: Any = Desk()
    nothing: Any = None
    subject = Planned(
        nothing, fleet(8), ProbesConfig(admit=True), desk, lambda: True, dict, lambda: 0,
        maintained=lambda: {"n001": WINDOW},
    )  # fmt: skip
    subject._restored = True
    subject.step()
    assert asked == ["n000", "n002"]

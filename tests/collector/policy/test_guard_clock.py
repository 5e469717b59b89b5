"""A step of the collector's clock opens none of the guard's limits, forward or back, also after a restart."""

from __future__ import annotations

import dataclasses

import pytest

from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.policy.decider import PERSON_MS, Decider
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.guard_clock import ClockSteps
from drover_collector.store import Store
from drover_core.model.events import (
    Approval,
    Decision,
    Event,
    EventKind,
    Health,
    Incident,
    NodeOutage,
)
from testbed.collected import small_index
from testbed.deciding import OPEN, decide, fleet, folded, incident, policy
from testbed.loop import in_loop
from testbed.pipelines import T0, Clock, pipeline_of, running, until

INDEX = fleet(32)
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
STEPS = [HOUR_MS, 26 * HOUR_MS, -HOUR_MS, -26 * HOUR_MS]


class Site:
    """A decider, and a wall clock that somebody sets."""

    def __init__(self, mode: str = "enforce", guard: GuardLimits = OPEN, **more: float) -> None:
        self._policy = policy(mode, guard, **more)
        self.subject = Decider(INDEX, self._policy, "enforce")
        self.now_ms = T0
        self.open: list[Incident] = []
        self.made: list[Decision] = []
        self.steps: list[tuple[int, int]] = []

    def falls(self, node: str, cause: str = "xid_79") -> str:
        self.open.append(incident(node, cause, self.now_ms))
        return self.look().get(node, "")

    def look(self) -> dict[str, str]:
        made, _ = decide(self.subject, self.open, self.now_ms)
        self.made += made
        return {decision.node: decision.outcome for decision in made}

    def set(self, step_ms: int, restarted: bool = False) -> None:
        self.now_ms += step_ms
        self.steps.append((self.now_ms, step_ms))
        self.subject.clock_set(self.now_ms, step_ms)
        if restarted:
            duties = self.subject.duties
            self.subject = Decider(INDEX, self._policy, "enforce")
            for at_ms, by_ms in self.steps:
                self.subject.clock_set(at_ms, by_ms)
            self.subject.restore(self.made, self.open)
            self.subject.take_duties(duties)


@pytest.fixture(params=STEPS, ids=["+1 h", "+26 h", "-1 h", "-26 h"])
def step_ms(request: pytest.FixtureRequest) -> int:
    return int(request.param)


restarts = pytest.mark.parametrize("restarted", [False, True], ids=["goes on", "restarted"])


@restarts
def test_so_many_nodes_an_hour_whatever_the_clock_says(step_ms: int, restarted: bool) -> None:
    site = Site(guard=dataclasses.replace(OPEN, per_hour=2))
    assert [site.falls("n001", "a"), site.falls("n005", "b")] == ["act", "act"]
    site.now_ms += 5 * MINUTE_MS
    site.set(step_ms, restarted)
    assert site.falls("n009", "c") == "held"
    site.now_ms += 30 * MINUTE_MS
    assert site.look() == {}
    site.now_ms += HOUR_MS
    assert site.look() == {"n009": "act"}, "an hour of time is one"


def test_an_open_breaker_stays_open_and_closes_in_time(step_ms: int) -> None:
    site = Site(guard=dataclasses.replace(OPEN, mass_nodes=3, quiet_s=3600.0))
    for node in ("n001", "n005", "n009"):
        site.falls(node)
    site.now_ms += MINUTE_MS
    site.set(step_ms)
    assert site.falls("n013", "other") == "held"
    site.now_ms += 30 * MINUTE_MS
    assert site.look() == {}
    site.now_ms += HOUR_MS
    assert site.look()["n013"] == "act"


def test_nodes_at_once_are_seen_as_such_over_a_step(step_ms: int) -> None:
    site = Site(guard=dataclasses.replace(OPEN, mass_nodes=3))
    assert [site.falls("n001"), site.falls("n005")] == ["act", "act"]
    site.set(step_ms)
    assert site.falls("n009") == "held"


@restarts
def test_who_came_back_is_left_alone_for_as_long_as_ever(step_ms: int, restarted: bool) -> None:
    site = Site(guard=dataclasses.replace(OPEN, cooldown_s=600.0))
    site.subject.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, site.now_ms, "gone", "")})
    site.now_ms += MINUTE_MS
    site.set(step_ms, restarted)
    assert site.falls("n001") == "held"
    site.now_ms += 11 * MINUTE_MS
    assert site.look() == {"n001": "act"}


@restarts
def test_what_a_person_put_back_goes_out_only_after_asking_over_a_step(step_ms: int, restarted: bool) -> None:
    site = Site()
    site.subject.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, site.now_ms, "gone", "", by="anna")})
    site.now_ms += MINUTE_MS
    site.set(step_ms if abs(step_ms) > PERSON_MS else 5 * step_ms, restarted)
    assert site.falls("n001") == "pending_approval"


@pytest.mark.parametrize("step_ms", [HOUR_MS, 26 * HOUR_MS])
def test_a_question_and_its_answer_outlive_a_step_forward(step_ms: int) -> None:
    site = Site("approve", dataclasses.replace(OPEN, fleet_nodes=1), approval_expires_s=1800.0)
    site.falls("n001")
    (asked,) = site.made
    site.set(step_ms)
    assert site.look() == {}, "it waits"
    given = Approval(asked.id, site.now_ms, "anna", True, "yes")
    made, _ = site.subject.answer(
        given, {i.id: i for i in site.open}, folded(INDEX, site.open), lambda _: {}, site.now_ms
    )
    assert [d.outcome for d in made] == ["approved", "act"]


@pytest.mark.parametrize("step_ms", [-HOUR_MS, -26 * HOUR_MS])
def test_a_yes_is_no_longer_good_for_a_step_back(step_ms: int) -> None:
    site = Site("approve", dataclasses.replace(OPEN, fleet_nodes=1), approval_expires_s=1800.0)
    site.subject.take_duties({"n031": NodeOutage("n031", Health.DRAINED, site.now_ms, "x", "")})
    site.subject.policy = policy("approve", OPEN, approval_expires_s=1800.0)
    site.falls("n001")
    (asked,) = site.made
    site.subject.policy = policy("approve", dataclasses.replace(OPEN, fleet_nodes=1), approval_expires_s=1800.0)
    given = Approval(asked.id, site.now_ms + 1, "anna", True, "yes")
    known = {i.id: i for i in site.open}
    made, _ = site.subject.answer(given, known, folded(INDEX, site.open), lambda _: {}, site.now_ms + 2)
    assert [d.outcome for d in made] == ["approved", "held"]
    site.set(step_ms)
    site.look()
    site.now_ms += 31 * MINUTE_MS
    site.subject.policy = policy("approve", OPEN, approval_expires_s=1800.0)
    assert site.look() == {"n001": "pending_approval"}, "it is asked again"


def test_a_step_back_undoes_one_forward() -> None:
    steps = ClockSteps()
    steps.note(T0 + HOUR_MS, HOUR_MS)
    assert steps.now_of(T0 - 1) == T0 + HOUR_MS - 1
    assert steps.now_of(T0 + HOUR_MS) == T0 + HOUR_MS
    steps.note(T0 + 5 * MINUTE_MS, -HOUR_MS)
    assert steps.now_of(T0 - 1) == T0 - 1


class Machine:
    """Wall clock and time since boot."""

    def __init__(self) -> None:
        self.wall = Clock()
        self.boot_ms = 1_000_000

    def passes(self, ms: int, step_ms: int = 0) -> None:
        self.boot_ms += ms
        self.wall.now_ms += ms + step_ms


def judged(pipeline: Pipeline, machine: Machine, node: str, number: int) -> str:
    now_ms = machine.wall.now_ms
    event = Event(f"{node}/{number}", now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=now_ms)
    pipeline.store.events.write([event])
    pipeline.take_events([event])
    pipeline._judge.submit(pipeline.judge_events).result(120)
    return next(d.outcome for (_, at), d in pipeline.engine.decider.standing.items() if at == node)


@restarts
@in_loop
async def test_a_collector_whose_clock_is_set_counts_on_also_when_it_starts_again(
    store: Store, restarted: bool
) -> None:
    """In observe mode: what would be done has the same limits."""
    machine, index = Machine(), small_index(8)

    def made() -> Pipeline:
        pipeline = pipeline_of(store, index, machine.wall)
        pipeline._clock._boot_ms = lambda: machine.boot_ms
        limits = dataclasses.replace(OPEN, per_hour=2)
        pipeline.in_force.policy = dataclasses.replace(pipeline.policy, guard=limits)
        pipeline.engine.set_policy(pipeline.policy)
        return pipeline

    async with running(made()) as pipeline:
        assert [judged(pipeline, machine, node, 1) for node in ("n0", "n1")] == ["would_act", "would_act"]
        machine.passes(5_000, HOUR_MS)
        assert judged(pipeline, machine, "n2", 1) == "held"
        await until(lambda: len(store.audit.read(what="clock")) == 1, "the step is in the audit")
        assert store.audit.read(what="clock")[0].state == str(HOUR_MS)
    if restarted:
        machine.passes(5_000)
        async with running(made()) as pipeline:
            assert judged(pipeline, machine, "n3", 1) == "held"
            machine.passes(HOUR_MS)
            assert judged(pipeline, machine, "n4", 1) == "would_act"

"""Whatever comes: no cap is exceeded, what is held says why, what is well comes back, a restart changes no answer.
And faults of hundreds of nodes at once end with one question to a person, not with a drained fleet."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.actions.base import ForeignError, mark_of, own_mark
from drover_collector.actions.node_outage import is_out, seen
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.detectors._lib.examples import START_MS
from drover_collector.engine.engine import Engine
from drover_collector.policy.circuit_breaker import GAP, MASS, of_guard
from drover_collector.policy.decider import DISRUPTIVE, Decider
from drover_collector.policy.guard import GuardLimits, may_resume
from drover_core.model.events import (
    OUT_STAGES,
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    Event,
    EventKind,
    Health,
    Incident,
    NodeOutage,
    RecommendedAction,
)
from testbed.deciding import OPEN, decide, fleet, folded, incident, policy
from testbed.desks import action_of
from testbed.slurm_stand_in import SlurmStandIn

INDEX = fleet(12, per_rack=3, per_leaf=6, per_pool=8)
NAMES = [node.name for node in INDEX.nodes]
JOBS = {"7": set(NAMES[:5])}
CAUSES = ("xid_79", "remap_failed", "gpu_lost")

FIELDS = {
    "fleet_ratio": [0.0, 0.2, 0.5], "rack_ratio": [0.3, 0.7], "leaf_ratio": [0.2, 0.5], "pool_ratio": [0.25, 0.5],
    "job_ratio": [0.2, 0.5], "fleet_nodes": [1, 3], "pool_nodes": [1, 2], "rack_nodes": [1], "leaf_nodes": [2],
    "job_nodes": [1, 2], "min_healthy_ratio": [0.6], "per_hour": [1, 3], "cooldown_s": [900.0], "mass_nodes": [3],
}  # fmt: skip
# Few limits at a time: where all are tight, one hides the others.
limits = st.lists(
    st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(FIELDS[name]))),
    max_size=3,
).map(lambda chosen: dataclasses.replace(OPEN, **dict(chosen)))  # type: ignore[arg-type]  # each as its field has it
steps = st.lists(
    st.tuples(
        st.sampled_from(["fault", "fault", "fault", "end", "drained", "back", "answer", "refuse", "wait"]),
        st.integers(0, len(NAMES) - 1), st.sampled_from(CAUSES), st.integers(0, 25),
    ),
    min_size=8, max_size=30,
)  # fmt: skip


@dataclasses.dataclass
class Run:
    """A fleet that faults and people happen to, and what was decided of it."""

    subject: Decider
    now_ms: int = 0
    open: dict[str, Incident] = dataclasses.field(default_factory=dict)
    duties: dict[str, NodeOutage] = dataclasses.field(default_factory=dict)
    made: list[Decision] = dataclasses.field(default_factory=list)
    events: dict[str, Incident] = dataclasses.field(default_factory=dict)

    def step(self, what: str, number: int, cause: str, minutes: int) -> None:
        node = NAMES[number]
        self.now_ms += minutes * 60_000
        if what == "fault":
            found = incident(node, cause, self.now_ms, len(self.made), "7" if node in JOBS["7"] else None)
            if not any((i.node, i.cause) == (node, cause) for i in self.open.values()):
                self.open[found.id] = found
        elif what == "end":
            self.open = {id_: i for id_, i in self.open.items() if i.node != node}
        elif what == "drained" and node in self.subject.out():
            self._duty(node, Health.DRAINED)
        elif what == "back" and node in self.duties and self.duties[node].stage in OUT_STAGES:
            self.open = {id_: i for id_, i in self.open.items() if i.node != node}
            self._duty(node, Health.HEALTHY)
            assert node not in self.subject.out()  # a return is never held up
        elif what in ("answer", "refuse"):
            for decision in [d for d in self.subject.standing.values() if d.outcome == "pending_approval"][:1]:
                given_ = Approval(decision.id, self.now_ms, "anna", what == "answer", "why")
                fold = folded(INDEX, self.open.values(), self.duties)
                self._take(*self.subject.answer(given_, self.open, fold, lambda _: JOBS, self.now_ms))
        self._take(*decide(self.subject, list(self.open.values()), self.now_ms, JOBS))

    def _duty(self, node: str, stage: Health) -> None:
        self.duties[node] = NodeOutage(node, stage, self.now_ms, "i", "")
        self.subject.take_duties(self.duties)

    def _take(self, made: list[Decision], events: list[Incident]) -> None:
        self.made += made
        self.events |= {event.id: event for event in events}


def gone(run: Run) -> set[str]:
    """Nodes out of service, by what was decided and became of it, not by the decider's own count."""
    out = {node for node, duty in run.duties.items() if duty.stage in OUT_STAGES}
    for decision in run.made:
        duty = run.duties.get(decision.node)
        acted = decision.outcome in ("act", "would_act") and decision.incident_id in run.open
        if acted and (duty is None or duty.ts_ms < decision.ts_ms):
            out.add(decision.node)
    return out


def groups(guard: GuardLimits) -> list[tuple[str, set[str], int]]:
    """Each cap's group, its nodes, and how many of them may be out."""
    found = [("fleet", set(NAMES)), ("job", JOBS["7"])]
    for group in ("pool", "rack", "leaf"):
        for name in sorted({getattr(node, group) for node in INDEX.nodes}):
            found.append((group, {node.name for node in INDEX.nodes if getattr(node, group) == name}))
    limits = []
    for group, nodes in found:
        share, most = getattr(guard, f"{group}_ratio"), getattr(guard, f"{group}_nodes")
        limits.append((group, nodes, min(max(1, math.floor(round(share * len(nodes), 9))), most or len(nodes))))
    return limits


def over(run: Run, guard: GuardLimits) -> list[str]:
    """Groups with more out than may be."""
    out = gone(run)
    return [
        f"{sorted(out & nodes)} of {group}: {allowed} may be"
        for group, nodes, allowed in groups(guard)
        if len(out & nodes) > allowed
    ]


@given(limits, steps, st.sampled_from(["observe", "approve", "enforce"]))
def test_no_cap_is_exceeded_and_all_that_is_held_says_why(guard: GuardLimits, plan: list[tuple[str, int, str, int]],
                                                          mode: str) -> None:  # fmt: skip
    run = Run(Decider(INDEX, policy(mode, guard), "enforce"))
    left: list[tuple[int, str]] = []  # when which node went; what is decided of one that is out no longer counts
    for step in plan:
        before, out = len(run.made), gone(run)
        run.step(*step)
        assert over(run, guard) == []
        fresh = run.made[before:]
        for decision in [d for d in fresh if d.outcome in ("act", "would_act") and d.node not in out]:
            duty = run.duties.get(decision.node)
            assert duty is None or run.now_ms - duty.ts_ms >= guard.cooldown_s * 1000
            left.append((decision.ts_ms, decision.node))
            if mode == "approve":
                assert "approved by anna" in decision.reason
        if guard.per_hour:
            hour = {node for at_ms, node in left if run.now_ms - at_ms < 3_600_000}
            assert len(hour) <= guard.per_hour
        for id_, found in run.open.items():
            assert run.subject.standing[(id_, str(found.node))].reason
        assert all(d.reason for d in fresh)
        assert {d.wanted for d in fresh} <= {*DISRUPTIVE, RecommendedAction.NONE}  # nothing here ever puts a node back
        assert all(may_resume(name, run.duties.get(name)) for name in NAMES if name not in run.duties)


@given(limits, steps)
def test_a_restart_at_any_time_gives_the_same_answers(
    guard: GuardLimits, plan: list[tuple[str, int, str, int]]
) -> None:
    guard = dataclasses.replace(guard, mass_nodes=0)  # what joins a mass event is stored a little later: below
    run = Run(Decider(INDEX, policy("approve", guard), "enforce"))
    for step in plan:
        run.step(*step)
        again = Decider(INDEX, policy("approve", guard), "enforce")
        again.restore(run.made, [*run.open.values(), *run.events.values()])
        again.take_duties(run.duties)
        assert again.standing == run.subject.standing
        assert again.out() == run.subject.out()
        later_ms = run.now_ms + 1
        fold = folded(INDEX, run.open.values(), run.duties)
        assert (folded(INDEX, run.open.values(), again.duties).node == fold.node).all()
        assert decide(again, list(run.open.values()), later_ms, JOBS) == ([], [])


ANN = ("ann drains", "ann resumes")
PEOPLE = ["fault", "fault", "fault", "end", "back", "answer", *ANN, "ann drains", "wait"]
peopled = st.lists(
    st.tuples(
        st.sampled_from(PEOPLE), st.integers(0, len(NAMES) - 1), st.sampled_from(CAUSES), st.integers(0, 25),
    ),
    min_size=8, max_size=30,
)  # fmt: skip


@dataclasses.dataclass
class Shared(Run):
    """The same with people who close and open nodes themselves, all through a Slurm in memory: what is out is what
    Slurm says, and who closed it stands in its reason."""

    slurm: SlurmStandIn = dataclasses.field(default_factory=lambda: SlurmStandIn(*NAMES))

    def __post_init__(self) -> None:
        self.actuator = SlurmActuator(self.slurm, 10_000)

    def closed(self, ours: bool) -> dict[str, str]:
        """Nodes that are closed, by us or by others, with the reason."""
        held = self.slurm.held.items()
        return {n: s.reason for n, s in held if "DRAIN" in s.states and (mark_of(s.reason) is not None) is ours}

    def step(self, what: str, number: int, cause: str, minutes: int) -> None:
        if what == "back":
            self._back(NAMES[number])
        self._look()
        super().step("wait" if what in ("back", *ANN) else what, number, cause, minutes)

    def people(self, what: str, node: str) -> None:
        if what == "ann drains":  # also over Drover's drain, which is hers from then on
            self.slurm.drain_by(node, "ann", f"cables {len(self.made)}")
        elif what == "ann resumes":
            self.slurm.resume_by_hand(node)

    def _look(self) -> None:
        self.subject.away = self.actuator.survey(NAMES).closed
        for node, state in self.actuator.observe_all(NAMES).items():
            duty = self.duties.get(node)
            if duty is not None and is_out(duty) and (after := seen(duty, state, self.now_ms)) is not None:
                self.duties[node] = after
        self.subject.take_duties(self.duties)

    def _back(self, node: str) -> None:
        """What a passed validation does, and `drover resume --force`."""
        if may_resume(node, self.duties.get(node)) is not None:
            return
        duty = self.duties[node]
        self.open = {id_: i for id_, i in self.open.items() if i.node != node}
        with contextlib.suppress(ForeignError):
            self.actuator.do(action_of(Act.RESUME, node, own_mark(duty)), lambda: None)
            self.duties[node] = dataclasses.replace(duty, stage=Health.HEALTHY, ts_ms=self.now_ms)

    def _take(self, made: list[Decision], events: list[Incident]) -> None:
        super()._take(made, events)
        for d in made:
            if d.outcome != "act" or d.wanted not in DISRUPTIVE:
                continue
            act = Act(d.wanted.value)
            try:
                self.actuator.do(action_of(act, d.node, d.incident_id), lambda: None)
            except ForeignError as error:
                failed = Action(
                    d.id, d.id, d.incident_id, d.node, act, "slurm", ActionState.FAILED, d.ts_ms, f"{error}"
                )
                self.subject.take_failed([failed])
                continue
            if not is_out(self.duties.get(d.node)):
                self.duties[d.node] = NodeOutage(d.node, Health.DRAINING, d.ts_ms, d.incident_id, d.reason)
        self.subject.take_duties(self.duties)


@given(limits, peopled)
def test_what_others_closed_counts_for_every_cap_and_is_never_opened(
    guard: GuardLimits, plan: list[tuple[str, int, str, int]]
) -> None:
    run = Shared(Decider(INDEX, policy("enforce", guard), "enforce"))
    for step in plan:
        run.people(step[0], NAMES[step[1]])
        ours, theirs = run.closed(True), run.closed(False)
        run.step(*step)
        assert run.closed(False) == theirs, "whatever is decided and done, what others closed stays as they left it"
        out = {*run.closed(True), *theirs}
        for group, nodes, allowed in groups(guard):
            fresh = (run.closed(True).keys() - ours.keys()) & nodes
            assert not fresh or len(out & nodes) <= allowed, f"{sorted(fresh)} of {group}, where {allowed} may be out"
        for id_, found in run.open.items():
            assert run.subject.standing[(id_, str(found.node))].reason


MANY = fleet(500, per_rack=8, per_leaf=32, per_pool=250)
MASS_LIMITS = GuardLimits(per_hour=0)


def count_outcomes(decisions: list[Decision]) -> Counter[str]:
    return Counter(d.outcome for d in decisions)


def test_500_nodes_at_once_end_with_one_question_and_nothing_drained() -> None:
    subject = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    open_ = [incident(node.name) for node in MANY.nodes]
    made, events = decide(subject, open_, 1000)
    assert count_outcomes(made) == {"pending_approval": 1, "held": 500}
    (event,) = events
    assert (event.cause, event.scope, len(event.members)) == (MASS, "fleet", 500)
    assert "500 of 500 nodes" in event.summary
    assert all(f"mass event {event.id}" in d.reason for d in made if d.outcome == "held")
    for minute in range(1, 180, 3):
        assert decide(subject, open_, minute * 60_000) == ([], [])  # not even after its quiet time
    other = [*open_, incident("n003", "remap_failed")]
    assert count_outcomes(decide(subject, other, 200 * 60_000)[0]) == {"held": 1}  # nothing goes: too few are healthy


def test_one_after_the_other_only_as_many_go_as_open_the_breaker() -> None:
    subject = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    open_: list[Incident] = []
    made: list[Decision] = []
    versions: list[Incident] = []
    for n in range(250):
        open_.append(incident(MANY.nodes[n].name, at_ms=n * 100))
        decisions, events = decide(subject, open_, n * 100)
        made += decisions
        versions += events
    assert count_outcomes(made)["act"] == MASS_LIMITS.mass_nodes - 1
    assert count_outcomes(made)["pending_approval"] == 1
    assert len({event.id for event in versions}) == 1
    assert len(versions) <= 2 + 250 * 100 // 10_000
    final = decide(subject, open_, 100_000)[1]
    assert len(final[0].members) == 250


def test_a_gap_in_telemetry_is_no_fault_of_the_nodes() -> None:
    subject = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    reporting, silent = np.ones(500, bool), np.arange(500) >= 200
    assert decide(subject, [], 0, reporting=reporting) == ([], [])
    made, (event,) = decide(subject, [], 10_000, reporting=silent)
    assert (event.cause, count_outcomes(made)) == (GAP, {"pending_approval": 1})
    assert count_outcomes(decide(subject, [incident("n300")], 20_000, reporting=silent)[0]) == {"held": 1}
    after_ms = 10_000 + round(MASS_LIMITS.mass_window_s * 1000)
    made, (closed,) = decide(subject, [incident("n300")], after_ms, reporting=reporting)
    assert closed.closed_ms == after_ms
    assert count_outcomes(made) == {"expired": 1, "act": 1}


def answered(subject: Decider, open_: list[Incident], yes: bool) -> list[Decision]:
    asked = next(d for d in subject.standing.values() if d.outcome == "pending_approval")
    known = {i.id: i for i in open_}
    given_ = Approval(asked.id, 30_000, "anna", yes, "a firmware fault")
    made, (event,) = subject.answer(given_, known, folded(MANY, open_), lambda _: {}, 30_000)
    assert event.closed_ms == 30_000
    return made


def test_a_mass_event_that_a_person_lets_go_on_is_judged_by_the_caps() -> None:
    subject = Decider(MANY, policy("enforce", dataclasses.replace(MASS_LIMITS, min_healthy_ratio=0)), "enforce")
    open_ = [incident(node.name) for node in MANY.nodes]
    decide(subject, open_, 1000)
    assert [d.outcome for d in answered(subject, open_, True)] == ["approved"]
    assert count_outcomes(decide(subject, open_, 31_000)[0]) == {"act": 50}


def test_a_mass_event_that_a_person_refuses_leaves_its_nodes_alone() -> None:
    subject = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    open_ = [incident(node.name) for node in MANY.nodes]
    decide(subject, open_, 1000)
    assert count_outcomes(answered(subject, open_, False)) == {"rejected": 501}
    assert decide(subject, open_, 10_000_000) == ([], [])


def test_the_breaker_is_open_after_a_restart_too() -> None:
    first = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    open_ = [incident(node.name) for node in MANY.nodes[:20]]
    stored, events = decide(first, open_, 1000)
    second = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    second.restore(stored, [*open_, *events])
    assert decide(second, open_, 2000) == ([], [])
    assert count_outcomes(decide(second, [*open_, incident("n400", "remap_failed")], 3000)[0]) == {"held": 1}


def test_few_faults_with_one_cause_open_no_breaker() -> None:
    subject = Decider(MANY, policy("enforce", MASS_LIMITS), "enforce")
    for n in range(12):  # one an hour
        made, events = decide(subject, [incident(MANY.nodes[n * 40].name)], n * 3_600_000)
        assert (count_outcomes(made), events) == ({"act": 1}, [])


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_the_engine_with_500_dead_gpus_asks_once(mode: str) -> None:
    engine = Engine(MANY, policy(mode, MASS_LIMITS), START_MS, ceiling="enforce")
    events = [
        Event(f"{node.name}", START_MS, node.name, 0, EventKind.XID, "79", "GPU has fallen off the bus")
        for node in MANY.nodes
    ]
    outcome = engine.on_events(events, START_MS + 100)
    assert [i.cause for i in outcome.incidents if of_guard(i)] == [MASS]
    assert count_outcomes(list(outcome.decisions)) == {"pending_approval": 1, "held": 500}
    assert OPEN.mass_nodes == 0  # the other tests' limits are not these

"""What waits for a scheduler that is away: it counts for every cap no matter who asked for it, and ends with its mode.

A real engine and desk of actions; Slurm and the store in memory. With a real store: test_action_caps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.save_signal import SaveSignal
from drover_collector.api import actions as api_actions
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.ingest.stats import IngestStats
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy, Rule
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    ActionState,
    Approval,
    Audit,
    Decision,
    Event,
    EventKind,
    Finding,
    Health,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_proto import fleet_pb2 as pb
from testbed.acting_world import Quiet
from testbed.deciding import OPEN, fleet
from testbed.desks import dispatcher_of
from testbed.loop import in_loop
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import until

T0 = 1_800_000_000_000
INDEX = fleet(16)
NODES = [node.name for node in INDEX.nodes]
ONE_OUT = replace(Policy.named("nvidia"), mode="enforce", guard=replace(OPEN, fleet_nodes=1))
HELD = "2 of 16 nodes of the fleet would be out"


@dataclass
class Site:
    """What outlives a collector: store, Slurm, the clock."""

    store: Store
    slurm: SlurmStandIn = field(default_factory=lambda: SlurmStandIn(*NODES))
    now_ms: int = T0
    step: Callable[[str], None] = lambda _: None

    def collector(self, policy: Policy) -> Pipeline:
        outbox: Any = Quiet()
        made = Pipeline(
            INDEX,
            self.store,
            policy,
            outbox,
            PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce"),
        )
        actuator = SlurmActuator(self.slurm, 10_000)
        made.act_by(
            dispatcher_of(
                self.store, ActConfig(mode="enforce", validate=False), [actuator], lambda _: actuator,
                detection=ActionReview(made), now_ms=lambda: self.now_ms, look_s=0.02,
                step=lambda name: self.step(name),
            )
        )  # fmt: skip
        return made

    def falls(self, pipeline: Pipeline, node: str) -> Decision:
        """XID 79 on a GPU of it; returns what is decided."""
        self.now_ms += 1000
        event = Event(f"{node}/79", self.now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=self.now_ms)
        self.store.events.write([event])
        pipeline.take_events([event])
        pipeline._judge.submit(pipeline.judge_events).result(120)
        return next(d for (_, at), d in pipeline.engine.decider.standing.items() if at == node)

    def drained(self) -> set[str]:
        return {name for name, node in self.slurm.held.items() if "DRAIN" in node.states}


@pytest.fixture
def site(kept: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    monkeypatch.setattr("drover_collector.api.actions.WAIT_S", 0.0)
    yield Site(kept)


async def surveyed(pipeline: Pipeline) -> None:
    await until(lambda: pipeline.engine.decider.away is not None, "Slurm has said who is out")


def asked(pipeline: Pipeline, node: str) -> pb.ActReply:
    facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
    return api_actions.act_on_node(facts, pb.ActRequest(node=node, act="drain", why="fan"), "ann")


@in_loop
async def test_what_people_take_out_while_slurm_is_away_counts_for_what_drover_decides(site: Site) -> None:
    pipeline = site.collector(ONE_OUT)
    await pipeline.start()
    await surveyed(pipeline)
    site.slurm.away = True
    try:
        assert asked(pipeline, "n000").state == ActionState.INTENDED
        held = site.falls(pipeline, "n005")
        assert (held.outcome, held.reason[: len(HELD)]) == ("held", HELD)
        site.slurm.away = False
        await until(lambda: site.drained(), "Slurm is back")
        await until(lambda: not site.store.actions.intended(), "all is done")
    finally:
        await pipeline.stop()
    assert site.drained() == {"n000"}
    after = site.collector(ONE_OUT)  # the same for what a restart finds waiting
    site.slurm.away = True
    await after.start()
    try:
        assert site.falls(after, "n009").outcome == "held"
    finally:
        await after.stop()


@in_loop
async def test_what_observe_mode_only_said_holds_back_nothing_that_a_person_does(site: Site) -> None:
    """A policy in observe mode, settings that allow acts: one node would be out, and none is."""
    pipeline = site.collector(replace(ONE_OUT, mode="observe"))
    await pipeline.start()
    try:
        assert site.falls(pipeline, "n005").outcome == "would_act"
        facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
        look = api_actions.preview_act(facts, pb.ActRequest(node="n000", act="drain"), True)
        assert (look.hindrance, look.guard) == ("", "")
        asked(pipeline, "n000")
        await until(lambda: site.drained() == {"n000"}, "it is done")
        assert site.falls(pipeline, "n009").outcome == "held", "what is done counts for what is only said"
    finally:
        await pipeline.stop()


@in_loop
async def test_who_asks_while_anothers_wish_is_being_stored_is_held_by_it(site: Site) -> None:
    """Between the guard's word and the stored intent of one, the guard is asked for others."""
    pipeline = site.collector(ONE_OUT)
    await pipeline.start()
    await surveyed(pipeline)
    guards: list[str] = []

    def meanwhile(step: str) -> None:
        if step == "decided" and not guards:
            guards.append("")
            facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
            guards[0] = api_actions.preview_act(facts, pb.ActRequest(node="n001", act="drain"), True).guard
            guards.append(site.falls(pipeline, "n005").outcome)

    site.step = meanwhile
    try:
        asked(pipeline, "n000")
        assert HELD in guards[0]
        assert guards[1] == "held"
        await until(lambda: site.store.outages.current().get("n000") is not None, "it is out")
        with pytest.raises(RefusalError, match=HELD):
            asked(pipeline, "n001")
    finally:
        await pipeline.stop()
    assert site.drained() == {"n000"}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mode", ["observe", "approve"])
@in_loop
async def test_what_waits_is_not_done_when_the_mode_was_lowered_meanwhile(
    site: Site, mode: str, restarted: bool
) -> None:
    """At 3 a.m. somebody stops it by the policy's file; what a person asked for is done all the same."""
    policy = replace(ONE_OUT, guard=OPEN)
    pipeline = site.collector(policy)
    await pipeline.start()
    await surveyed(pipeline)
    site.slurm.away = True
    assert site.falls(pipeline, "n005").outcome == "act"
    asked(pipeline, "n000")
    await until(lambda: len(site.store.actions.intended()) == 2, "both wait for Slurm")
    desk = pipeline.dispatcher
    await until(lambda: desk is not None and "slurm" in desk.context.troubles, "Slurm was asked in vain")
    lowered = replace(policy, mode=mode)
    if restarted:
        await pipeline.stop()
        pipeline = site.collector(lowered)
        await pipeline.start()
    else:
        pipeline.in_force.policy = lowered
        pipeline.engine.set_policy(lowered)
        site.falls(pipeline, "n006")
    site.slurm.away = False
    await until(lambda: not site.store.actions.intended(), "nothing waits any more")
    await pipeline.stop()
    assert site.drained() == {"n000"}
    (drain,) = site.store.actions.newest(node="n005")
    assert (drain.action, drain.state) == (Act.DRAIN, ActionState.FAILED)
    assert "not done: " in drain.detail
    assert site.store.outages.current()["n000"].stage in (Health.DRAINING, Health.DRAINED)


@pytest.mark.parametrize("wanted", [RecommendedAction.ADVISE, RecommendedAction.WATCH])
@in_loop
async def test_a_drain_that_waits_is_not_done_when_the_policy_wants_less_of_its_incident_meanwhile(
    site: Site, wanted: RecommendedAction
) -> None:
    policy = replace(ONE_OUT, guard=OPEN)
    pipeline = site.collector(policy)
    await pipeline.start()
    await surveyed(pipeline)
    try:
        site.slurm.away = True
        assert site.falls(pipeline, "n005").outcome == "act"
        desk = pipeline.dispatcher
        # Asked in vain: a try that has passed its checks goes on to Slurm, whatever the policy says a moment later.
        await until(lambda: desk is not None and "slurm" in desk.context.troubles, "it waits for Slurm")
        milder = replace(policy, rules=(Rule(wanted, "they are mended here", xid=(79,)),))
        pipeline.in_force.policy = milder
        pipeline.engine.set_policy(milder)
        site.now_ms += 1000
        pipeline._judge.submit(pipeline._guarded, lambda: pipeline.engine._settle([], [], site.now_ms)).result(120)
        site.slurm.away = False
        await until(lambda: not [a for a in site.store.actions.intended() if a.action is Act.DRAIN], "it has ended")
    finally:
        await pipeline.stop()
    assert site.drained() == set()
    drain = next(a for a in site.store.actions.newest(node="n005") if a.action is Act.DRAIN)
    assert drain.state is ActionState.FAILED
    assert f"not done: the policy wants {wanted} now, not drain" in drain.detail


@in_loop
async def test_a_drain_for_silence_that_waits_is_not_done_when_slurm_comes_back_and_reaches_the_node(
    site: Site,
) -> None:
    """Slurm was away as the node's agent fell silent: its first answer counts, before anything else is judged."""
    pipeline = site.collector(replace(ONE_OUT, guard=OPEN))
    desk = pipeline.dispatcher
    assert desk is not None
    desk.context.actuators = replace(desk.context.actuators, nodes=tuple(NODES))
    well = site.slurm.held["n005"]
    site.slurm.held["n005"] = replace(well, states=frozenset({"DOWN", "NOT_RESPONDING"}))
    await pipeline.start()
    await until(lambda: pipeline.engine.decider.answers.get("n005") is False, "Slurm says that it is gone")
    silent = Finding(
        "liveness", IncidentKind.LIVENESS, "silent", "node", "n005", None, (("n005", None),), T0, T0, Severity.CRITICAL,
        0.99, RecommendedAction.DRAIN, "Node n005 has been silent for 5 min.", "Look at it.",
    )  # fmt: skip
    try:
        site.slurm.away = True
        pipeline._judge.submit(pipeline._guarded, lambda: pipeline.engine._settle([silent], [], site.now_ms)).result(
            120
        )
        await until(lambda: "slurm" in desk.context.troubles, "it waits for Slurm")
        site.slurm.held["n005"] = well
        site.slurm.away = False
        await until(lambda: not site.store.actions.intended(), "it has ended")
    finally:
        await pipeline.stop()
    assert site.drained() == set()
    drain = next(a for a in site.store.actions.newest(node="n005") if a.action is Act.DRAIN)
    assert drain.state is ActionState.FAILED
    assert "its scheduler reaches the node" in drain.detail


@in_loop
async def test_a_yes_that_comes_after_the_mode_was_lowered_begins_nothing(site: Site) -> None:
    """The question is from before a restart, and is decided again only with the first bucket."""
    policy = replace(ONE_OUT, guard=OPEN, mode="approve")
    pipeline = site.collector(policy)
    await pipeline.start()
    question = site.falls(pipeline, "n005")
    assert question.outcome == "pending_approval"
    await pipeline.stop()
    pipeline = site.collector(replace(policy, mode="observe"))
    await pipeline.start()
    try:
        answer = Approval(question.id, site.now_ms + 1, "ann", True, "go on")
        line = Audit("a1", site.now_ms + 1, "ann", "approve", question.incident_id, "go on", "")
        outcome = pipeline.answer(answer, line)
        assert [d.outcome for d in outcome.decisions] == ["approved", "would_act"]
    finally:
        await pipeline.stop()
    assert (site.drained(), site.store.actions.newest()) == (set(), [])


@in_loop
async def test_a_drain_that_waits_for_its_jobs_is_withdrawn_by_a_resume_also_after_a_restart(site: Site) -> None:
    site.slurm.start("n000", "7")
    site.slurm.save_signals = {"7": SaveSignal("USR1")}

    def act(pipeline: Pipeline, name: str, **more: float) -> pb.ActReply:
        facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
        return api_actions.act_on_node(facts, pb.ActRequest(node="n000", act=name, why="oops", **more), "ann")

    first = site.collector(ONE_OUT)
    await first.start()
    await surveyed(first)
    asked_ = act(first, "drain", save_s=300)
    await until(lambda: site.slurm.effects == ["signal 7 USR1"], "its job is asked")
    await first.stop()
    pipeline = site.collector(ONE_OUT)
    await pipeline.start()
    try:
        await until(lambda: bool(pipeline.dispatcher and pipeline.dispatcher.withdrawals.waiting("n000")), "it goes on")
        facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
        look = api_actions.preview_act(facts, pb.ActRequest(node="n000", act="resume"), True)
        assert (look.hindrance, look.safe) == ("", True)
        assert look.grounds[0].startswith("drain by ann waits")
        back = act(pipeline, "resume")
        assert (back.action_id, back.state) == (asked_.action_id, ActionState.DONE)
        assert back.detail.endswith("is withdrawn; n000 stays in service")
        site.now_ms += 301_000
        with pytest.raises(RefusalError, match="not taken out by Drover"):
            act(pipeline, "resume")
    finally:
        await pipeline.stop()
    assert (site.drained(), site.slurm.effects) == (set(), ["signal 7 USR1"])
    assert {(line.what, line.by, line.why) for line in site.store.audit.read(subject="n000")} == {
        ("drain", "ann", "oops"), ("resume", "ann", "oops"), ("resume (refused)", "ann", "oops"),
    }  # fmt: skip

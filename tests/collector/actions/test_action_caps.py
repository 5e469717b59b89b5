"""Who is out by others is unknown until the scheduler has answered: until then, and right before an effect, caps hold.

Rack r0 has n000 and n001, and one of them may be out. Real store, engine and desk of actions; Slurm in memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from drover_collector.actions import context
from drover_collector.actions import dispatcher as desks
from drover_collector.actions.actuators import Actuators
from drover_collector.actions.base import Actuator
from drover_collector.actions.command import CommandActuator
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.outage_store import OutageStore
from drover_collector.actions.settings import ActConfig, CommandConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import SlurmNode
from drover_collector.api import actions as api_actions
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.engine.node_state import Survey
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.decider import UNSEEN
from drover_collector.policy.gate import GateAnswer, gate_verdicts
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Decision,
    Event,
    EventKind,
)
from drover_proto import fleet_pb2 as pb
from testbed.deciding import OPEN, fleet
from testbed.desks import Detected, dispatcher_of
from testbed.loop import in_loop
from testbed.slurm_stand_in import SlurmStandIn
from testbed.waiting import until, wait_until

T0 = 1_800_000_000_000
PROGRAM = Path(__file__).resolve().parents[2] / "testbed" / "command_scheduler.py"
INDEX = fleet(4, per_rack=2)
NODES = [node.name for node in INDEX.nodes]
POLICY = replace(Policy.named("nvidia"), mode="enforce", guard=replace(OPEN, rack_ratio=0.5))
HELD = "2 of 2 nodes of rack r0 would be out (at most 1 may be; 1 node of the fleet is dead or out by others)"


class SlowSlurm(SlurmStandIn):
    """slurmctld takes a while for each question about nodes."""

    slow_s = 0.0

    def nodes(self, names: Sequence[str]) -> Mapping[str, SlurmNode]:
        time.sleep(self.slow_s)
        return super().nodes(names)


@dataclass
class Site:
    """What outlives a collector: store, Slurm, the clock."""

    store: Store
    slurm: SlowSlurm = field(default_factory=lambda: SlowSlurm(*NODES))
    now_ms: int = T0
    actuator: Actuator | None = None

    def collector(self) -> Pipeline:
        outbox = Outbox(self.store, [], "http://console", now_ms=lambda: self.now_ms)
        made = Pipeline(
            INDEX,
            self.store,
            POLICY,
            outbox,
            PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce"),
        )
        actuator = self.actuator or SlurmActuator(self.slurm, 10_000)
        made.act_by(
            dispatcher_of(
                self.store, ActConfig(mode="enforce", validate=False), [actuator], lambda _: actuator, nodes=NODES,
                detection=ActionReview(made), now_ms=lambda: self.now_ms, look_s=0.02,
            )
        )  # fmt: skip
        return made

    def error(self, node: str) -> Event:
        self.now_ms += 1000
        event = Event(f"{node}/79", self.now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=self.now_ms)
        self.store.events.write([event])
        return event

    def falls(self, pipeline: Pipeline, node: str) -> Decision:
        """XID 79 on a GPU of it; returns what is decided."""
        pipeline.take_events([self.error(node)])
        return decided(pipeline, node)

    def drained(self) -> dict[str, str]:
        return {name: node.reason for name, node in self.slurm.held.items() if "DRAIN" in node.states}


def decided(pipeline: Pipeline, node: str) -> Decision:
    pipeline._judge.submit(pipeline.judge_events).result(120)
    return next(d for (_, at), d in pipeline.engine.decider.standing.items() if at == node)


def asked(pipeline: Pipeline, node: str, act: str = "drain", force: bool = False) -> pb.ActReply:
    facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig())
    return api_actions.act_on_node(facts, pb.ActRequest(node=node, act=act, why="fan", force=force), "ann")


async def surveyed(pipeline: Pipeline) -> None:
    await until(lambda: pipeline.engine.decider.away is not None, "the scheduler has said who is out")


@pytest.fixture
def site(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    yield Site(store)


@in_loop
async def test_after_a_restart_no_node_is_closed_until_slurm_has_said_who_is_out(site: Site) -> None:
    """With an event that was stored and not judged, and a slurmctld that takes its time."""
    site.slurm.drain_by("n000", "root", "fan")
    site.error("n001")
    site.slurm.slow_s = 0.15
    pipeline = site.collector()
    await pipeline.start()
    try:
        first = decided(pipeline, "n001")
        assert (first.outcome, first.reason) == ("held", UNSEEN)
        site.slurm.slow_s = 0.0
        await surveyed(pipeline)
        assert pipeline.engine.decider.away == {"n000"}
        assert site.falls(pipeline, "n002").outcome == "act", "another rack: it is known now"
        await until(lambda: "n002" in site.drained(), "that one goes")
        assert site.drained().keys() == {"n000", "n002"}
    finally:
        await pipeline.stop()


@in_loop
async def test_while_slurmctld_is_down_at_the_start_nothing_is_closed_and_its_first_answer_counts(site: Site) -> None:
    site.slurm.drain_by("n000", "root", "fan")
    site.slurm.away = True
    pipeline = site.collector()
    await pipeline.start()
    try:
        assert site.falls(pipeline, "n001").reason == UNSEEN
        with pytest.raises(RefusalError, match="has not answered yet") as refused:
            asked(pipeline, "n001")
        assert "--force" in str(refused.value)
        site.slurm.away = False
        await surveyed(pipeline)
        with pytest.raises(RefusalError, match="2 of 2 nodes of rack r0"):
            asked(pipeline, "n001")
        assert asked(pipeline, "n001", force=True).state == "done", "a person may"
    finally:
        await pipeline.stop()


@in_loop
async def test_what_others_close_while_an_action_waits_holds_it_right_before_its_effect(site: Site) -> None:
    pipeline = site.collector()
    await pipeline.start()
    await surveyed(pipeline)
    try:
        site.slurm.away = True
        assert site.falls(pipeline, "n001").outcome == "act"
        await until(lambda: site.store.actions.intended(), "it waits for Slurm")
        site.slurm.drain_by("n000", "root", "fan")
        site.slurm.away = False

        def held() -> bool:
            return any(HELD in a.detail for a in site.store.actions.newest(node="n001"))

        await until(held, "the guard is asked again")
        assert site.drained() == {"n000": "fan"}
        gate = gate_verdicts(pipeline.engine.decider)["n001"]
        assert (gate.answer, HELD in gate.text) == (GateAnswer.HELD, True), (
            "nor do its prolog and health check drain it"
        )
        site.slurm.resume_by_hand("n000")
        pipeline.dispatcher._workers["slurm"]._reconciler.survey_first = True  # type: ignore[union-attr]  # as 15 s later
        await until(lambda: "n001" in site.drained(), "there is room again")
        await until(lambda: gate_verdicts(pipeline.engine.decider)["n001"].answer is GateAnswer.REFUSE, "it is out")
    finally:
        await pipeline.stop()


def test_what_a_thread_that_was_stopped_says_late_holds_no_gate_open(store: Store) -> None:
    """Nothing would ever end that note, and jobs would begin on the node whatever is decided."""
    outages, action = OutageStore(store), Action("a", "d", "i1", "n1", Act.DRAIN, "slurm", ActionState.INTENDED, T0)
    outages.add_closing(action)
    outages.note_held(action, HELD)
    assert outages.held == {"n1": HELD}
    outages.clear_closings()
    outages.note_held(action, HELD)
    assert outages.held == {}


@in_loop
async def test_of_two_that_wait_the_first_goes_and_not_the_second(site: Site) -> None:
    """Neither may wait for the other: the order of their intents decides."""
    pipeline = site.collector()
    await pipeline.start()
    await surveyed(pipeline)
    desk = pipeline.dispatcher
    assert desk is not None
    try:
        site.slurm.away = True
        made = [desk.drain("n000", desks.Act.DRAIN, "fan", "ann")]
        site.now_ms += 1
        made.append(desk.drain("n001", desks.Act.DRAIN, "fan", "ann"))
        site.slurm.away = False
        first = await in_thread(desk, made[0])
        assert first.state is ActionState.DONE
        assert site.drained().keys() == {"n000"}
    finally:
        await pipeline.stop()


@in_loop
async def test_of_two_schedulers_that_wait_for_room_the_first_goes_and_not_the_second(site: Site) -> None:
    """n000 is Slurm's, n001 another one's, and one of the two may be out: each counted the other as gone."""
    pipeline = site.collector()
    desk = pipeline.dispatcher
    assert desk is not None
    first = SlurmActuator(site.slurm, 10_000)
    second = SlurmActuator(site.slurm, 10_000)
    second.name = "slurm of the other pool"
    both = Actuators((first, second), lambda node: second if node == "n001" else first)
    desk.context.actuators = desk.context.surveys._actuators = both
    await pipeline.start()
    await surveyed(pipeline)
    try:
        site.slurm.away = True
        made = [desk.drain("n000", desks.Act.DRAIN, "fan", "ann")]
        site.now_ms += 1
        made.append(desk.drain("n001", desks.Act.DRAIN, "fan", "ann"))
        site.slurm.away = False
        assert (await in_thread(desk, made[0])).state is ActionState.DONE
        assert site.drained().keys() == {"n000"}
    finally:
        await pipeline.stop()


async def in_thread(desk: ActionDispatcher, action: Action) -> Action:
    await until(lambda: action.id in desk._outcomes, "its outcome")
    return desk._outcomes[action.id]


def test_an_old_answer_is_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.01,))
    slurm = SlurmStandIn("n1", "n2")
    slurm.drain_by("n2", "root", "fan")
    actuator = SlurmActuator(slurm, 10_000)
    surveys: list[Survey] = []
    desk = dispatcher_of(
        store, ActConfig(mode="enforce"), [actuator], lambda _: actuator, nodes=["n1", "n2"], look_s=0.02,
        detection=Detected(surveys=surveys),
    )  # fmt: skip
    desk.start()
    try:
        wait_until(lambda: [s.closed for s in surveys] == [{"n2"}], "who is out is known")
        slurm.away = True
        desk._workers["slurm"]._reconciler.survey_first = True
        wait_until(lambda: "slurm" in desk.context.troubles, "it is away")
        assert [s.closed for s in surveys] == [{"n2"}], "an answer stands for a while"
        monkeypatch.setattr(context, "STALE_S", 0.0)
        wait_until(lambda: [s.closed for s in surveys] == [{"n2"}, None], "it is too old")
        monkeypatch.setattr(context, "STALE_S", 180.0)
        slurm.away = False
        wait_until(lambda: [s.closed for s in surveys] == [{"n2"}, None, {"n2"}], "it has answered again")
    finally:
        desk.stop()


@in_loop
async def test_a_program_of_the_operators_has_no_such_answer_and_holds_nothing(site: Site, tmp_path: Path) -> None:
    words = (sys.executable, str(PROGRAM), str(tmp_path))
    site.actuator = CommandActuator(CommandConfig(words))
    pipeline = site.collector()
    await pipeline.start()
    try:
        assert site.falls(pipeline, "n001").outcome == "act"
        await until(lambda: (tmp_path / "n001.json").exists(), "it is drained")
    finally:
        await pipeline.stop()

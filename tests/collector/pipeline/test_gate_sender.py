"""What agents are sent for their nodes' gates: after the Welcome, with each change, and again each minute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_collector.actions.actuators import Actuators, make_actuators
from drover_collector.actions.context import ActionContext
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.outage_store import OutageStore
from drover_collector.actions.settings import ActConfig, KubernetesConfig, SlurmConfig
from drover_collector.notify import Outbox
from drover_collector.pipeline import gate_sender
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.gate_sender import GateSender
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.gate import GateAnswer, in_mode, of_outages
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import Health, NodeOutage
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import hello, index_of
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.pipelines import T0, Clock, pipeline_of, running, xid


class Stream:
    """An agent's stream, or one that takes nothing now."""

    def __init__(self, node: str, takes: bool = True) -> None:
        self.node, self.takes = node, takes
        self.got: list[tuple[str, str]] = []
        self.whole: list[pb.GateVerdict] = []

    def try_send(self, message: pb.CollectorMessage) -> bool:
        if self.takes:
            self.got.append((message.gate_verdict.answer, message.gate_verdict.mode))
            self.whole.append(message.gate_verdict)
        return self.takes


@in_loop
async def test_each_stream_gets_a_verdict_then_changes_and_repeats(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with running(pipeline_of(store, index_of(), clock)) as pipeline:
        one, two, slow = Stream("n1"), Stream("n2"), Stream("n3", takes=False)
        streams = [one, two, slow]
        sender = GateSender(pipeline, lambda: streams)
        await sender.send_due()
        await sender.send_due()
        assert (one.got, two.got, slow.got) == ([("pass", "observe")], [("pass", "observe")], [])
        slow.takes = True
        pipeline.take_events([xid(1)])
        await pipeline.in_engine_thread(pipeline.judge_events)
        await sender.send_due()
        assert (one.got[1:], two.got[1:], slow.got) == ([("observe", "observe")], [], [("pass", "observe")])
        streams[1] = again = Stream("n2")  # it has connected again
        await sender.send_due()
        assert (one.got[2:], again.got) == ([], [("pass", "observe")])
        later_s = gate_sender.time.monotonic() + 61.0
        monkeypatch.setattr(gate_sender.time, "monotonic", lambda: later_s)
        await sender.send_due()
        assert one.got[2:] == [("observe", "observe")]


@in_loop
async def test_one_that_does_not_judge_says_nothing(store: Store) -> None:
    """Then the gates know that nobody answers."""

    stream = Stream("n1")
    await GateSender(pipeline_of(store, index_of(), Clock()), lambda: [stream]).send_due()
    assert stream.got == []


@in_loop
@pytest.mark.parametrize(("ceiling", "sent"), [("enforce", ("refuse", "slurm")), ("observe", ("observe", "slurm"))])
async def test_of_a_node_that_is_out_the_gate_learns_which_scheduler_has_closed_it(
    ceiling: str, sent: tuple[str, str], store: Store
) -> None:
    """That one says so too, and knows first when the node is back. In observe mode no gate refuses anything."""
    store.outages.write([NodeOutage("n1", Health.VALIDATING, T0, "inc1", "xid_79 on n1")])
    options = PipelineOptions(lag_ms=7000, now_ms=Clock(), ceiling=ceiling)
    policy = replace(Policy.load(), mode="enforce")
    pipeline = Pipeline(index_of(), store, policy, Outbox(store, [], "http://console", now_ms=Clock()), options)
    slurm = Actuators(scheduler=lambda node: "slurm" if node == "n1" else "kubernetes")
    context = ActionContext(store, ActConfig(), slurm, OutageStore(store), ActionReview(pipeline))
    pipeline.act_by(ActionDispatcher(context))
    async with running(pipeline):
        stream = Stream("n1")
        await GateSender(pipeline, lambda: [stream]).send_due()
        assert [(message.answer, message.closed_by) for message in stream.whole] == [sent]


@pytest.mark.parametrize(
    ("by", "ceiling", "answer"),
    [
        ("ann", "enforce", GateAnswer.REFUSE), ("drover", "enforce", GateAnswer.OBSERVE),
        ("ann", "observe", GateAnswer.OBSERVE),  # nobody sees any more whether the node is back
    ],
)  # fmt: skip
def test_what_a_person_drained_is_refused_whatever_the_policys_mode(by: str, ceiling: str, answer: GateAnswer) -> None:
    """`drover drain` acts under a policy that observes. So does the gate, for a pod that was bound a moment before."""
    outage = NodeOutage("n1", Health.DRAINING, T0, "", "smells burnt", by)
    assert in_mode(of_outages({"n1": outage})["n1"], "observe", ceiling).answer is answer


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_a_nodes_scheduler_is_known_in_observe_mode_too(mode: str) -> None:
    """What was drained before the mode was set is out of service still."""
    config = ActConfig(
        mode=mode, slurm=SlurmConfig(enabled=True, pools=("p",)),
        kubernetes=KubernetesConfig(enabled=True, pools=("q",)),
    )  # fmt: skip
    actuators = make_actuators(config, index_of().spec)
    assert (actuators.scheduler("n1"), actuators.scheduler("elsewhere")) == ("slurm", "")


@in_loop
async def test_it_goes_over_a_real_stream_after_the_welcome(store: Store) -> None:
    async with Collector(store) as collector, running(pipeline_of(store, collector.index, Clock())) as pipeline:
        sender = GateSender(pipeline, collector.ingest.streams)
        await sender.send_due()
        async with collector.agent(hello()) as agent:
            await sender.send_due()
            message = await agent.read("gate_verdict")
            assert message.gate_verdict.answer == "pass"

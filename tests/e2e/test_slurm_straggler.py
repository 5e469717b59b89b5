"""A straggler from suspicion to return with a real Slurm: probed over its agent's stream, confirmed, drained once the
job that runs there has ended, validated, repaired, resumed; and an innocent one, which is cleared and stays in service.
Needs root and Slurm.

As in test_probe_path.py only the clock of telemetry is not real.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, SpoolConfig
from drover_collector.actions.base import Actuator, NodeState
from drover_collector.actions.node_outage import gpu_hours_lost
from drover_collector.actions.settings import ActConfig, SlurmConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol, SlurmNode
from drover_collector.app import begin_acting, make_probes
from drover_collector.engine.node_state import NodeNow
from drover_collector.notify import Outbox
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    ActionState,
    Event,
    EventKind,
    Health,
    Incident,
    IncidentKind,
    ProbeReason,
    ProbeResult,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import JobSpec
from drover_proto import telemetry_pb2 as pb
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.live_fleet import NodeAgent
from drover_simulator.probing import Prober
from drover_simulator.readings import inventory
from testbed.deciding import policy
from testbed.desks import dispatcher_of
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.simulated_buckets import START_MS, Recording, record
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.waiting import until

pytestmark = pytest.mark.system

NODE, GPU = "r01n02", 5
MINUTES = 6.0
HOUR_MS = 3_600_000
SLOW_S = 300.0  # Slurm's commands, on a machine that has other work


@pytest.fixture(scope="module")
def ran() -> tuple[SimulatedFleet, Recording]:
    """A job on four nodes with one GPU whose memory is slow; it has just ended."""
    spec = build_fleet(4, 1001)
    members = tuple((node.name, gpu) for node in spec.nodes for gpu in range(node.gpus))
    job = JobSpec("train", START_MS, START_MS + round(MINUTES * 60_000) - 1000, members)
    fleet = SimulatedFleet(spec, 1001, [Fault("straggler", "hbm", NODE, GPU, 120.0, None, 0.6)], START_MS, [job])
    return fleet, record(1001, MINUTES, made=fleet)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), [NODE]) as made:
        yield made


class JobStarts(Prober):
    """Its first probes are done when Slurm starts a job there, before anybody knows what they have shown."""

    def __init__(self, fleet: SimulatedFleet, slurm: Slurm) -> None:
        super().__init__(fleet, 1001)
        self.slurm, self.job = slurm, ""

    @property
    def end(self) -> Path:
        """The job ends when this file is there."""
        return self.slurm.folder / "end"

    def answer(self, node: str, request: pb.ProbeRequest) -> list[ProbeResult]:
        found = super().answer(node, request)
        if not self.job:
            script = f"while [ ! -e {self.end} ]; do sleep 0.1; done; echo trained to its end"
            self.job = self.slurm.submit(script, "-w", node)
            self.slurm.wait_for(self.job, "RUNNING")
        return found


class Beyond(ActionReview):
    """Knows values of every GPU after the end of the recording."""

    def __init__(self, pipeline: Pipeline, collector: Collector) -> None:
        super().__init__(pipeline)
        self._collector = collector

    def node_now(self, node: str) -> NodeNow:
        del node
        now_ms = self._collector.now_ms + 1
        return NodeNow(now_ms, (now_ms,) * 8)


class Site:
    """A collector in enforce mode that has judged the recording, and the agent of the suspected node."""

    def __init__(self, collector: Collector, recording: Recording, slurm: Slurm, agent: NodeAgent) -> None:
        self.slurm, self.agent = Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf")), agent
        self.collector, self.recording, self.store = collector, recording, collector.store
        self.pipeline = Pipeline(
            recording.index, self.store, policy("enforce"), Outbox(self.store, [], "http://127.0.0.1:8501"),
            PipelineOptions(lag_ms=7000, now_ms=lambda: collector.now_ms, ceiling="enforce"),
        )  # fmt: skip
        actuator = SlurmActuator(self.slurm, 10_000)

        def actuator_of(node: str) -> Actuator | None:
            return actuator if node == NODE else None

        self.probes = make_probes(
            self.pipeline, ProbesConfig(confirm=True, most_at_once=4), ActConfig(), collector.ingest.stream, actuator_of
        )
        self.desk = dispatcher_of(
            self.store, ActConfig(mode="enforce"), [actuator], actuator_of, now_ms=lambda: collector.now_ms, look_s=0.2,
            detection=Beyond(self.pipeline, collector), validator=self.probes.service.orders,
        )  # fmt: skip
        begin_acting(self.pipeline, self.probes, self.desk)
        self.looks = 0  # at what is out, that have ended
        look = actuator.observe_all

        def counted(nodes: Sequence[str]) -> Mapping[str, NodeState]:
            found = look(nodes)
            self.looks += 1
            return found

        actuator.observe_all = counted  # type: ignore[method-assign]  # the same, and counted
        self.probes.service.runtime.poll_s = 0.05
        collector.on_probes = self.probes.service.orders.take_results

    async def judged(self) -> Incident:
        await self.pipeline.start()
        for bucket in self.recording.buckets:
            self.collector.now_ms = bucket.end_ms + 7000
            await asyncio.to_thread(self.pipeline.judge_bucket, bucket)
        suspect = self.incident()
        assert (suspect.kind, suspect.cause, suspect.action) == (IncidentKind.STRAGGLER, "hbm", RecommendedAction.PROBE)
        return suspect

    def incident(self) -> Incident:
        (found,) = [i for i in self.pipeline.incidents.values() if (i.node, i.gpu) == (NODE, GPU)]
        return found

    async def fatal_xid(self) -> None:
        now_ms = self.collector.now_ms
        event = Event(f"{NODE}/79", now_ms, NODE, 2, EventKind.XID, "79", "fell off the bus", received_ms=now_ms)
        self.store.events.write([event])
        self.pipeline.take_events([event])
        judge = self.pipeline._judge
        await asyncio.to_thread(lambda: judge.submit(self.pipeline.judge_events).result(SLOW_S))

    def node(self) -> SlurmNode:
        return self.slurm.nodes([NODE])[NODE]

    async def stage(self, stage: Health) -> None:
        outages = self.desk.context.outages
        await until(lambda: NODE in outages.current and outages.current[NODE].stage is stage, f"{stage}", SLOW_S)


@contextlib.asynccontextmanager
async def site(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, folder: Path, prober: Prober
) -> AsyncIterator[Site]:
    fleet, recording = ran
    async with Collector(store, now_ms=START_MS, index=recording.index) as collector:
        config = AgentConfig(
            node=NODE, collectors=(f"127.0.0.1:{collector.port}",), hardware="simulated", kmsg_enabled=False,
            spool=SpoolConfig(dir=str(folder / "spool")),
        )  # fmt: skip
        agent = NodeAgent(config, NODE, inventory(fleet.hardware, fleet.hardware.number[NODE]))
        agent.prober = prober
        made = Site(collector, recording, slurm, agent)
        running = [asyncio.create_task(made.probes.service.run()), asyncio.create_task(agent.run())]
        try:
            await until(lambda: collector.ingest.stream(NODE), "the agent's stream")
            yield made
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await made.pipeline.stop()


@in_loop
async def test_an_innocent_node_is_cleared_and_stays_in_service(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, tmp_path: Path
) -> None:
    healthy = SimulatedFleet(ran[0].spec, 1001, [], START_MS, [])
    async with site(store, ran, slurm, tmp_path, Prober(healthy, 1001)) as at:
        suspect = await at.judged()
        (order,) = await asyncio.to_thread(at.probes.asking.step)
        await until(lambda: store.probes.orders.versions(order)[-1].state == "done", "the order's end")
        await until(lambda: at.incident().closed_ms is not None, "it is cleared")
        assert at.incident().id == suspect.id
        assert at.incident().timeline[-1].text.startswith(f"cleared by a probe: GPU {GPU} of {NODE}: ")
    assert store.actions.newest() == []
    assert "DRAIN" not in at.node().states


@in_loop
async def test_a_straggler_is_drained_when_its_job_has_ended_then_repaired_validated_and_resumed(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, tmp_path: Path
) -> None:
    prober = JobStarts(ran[0], slurm)
    async with site(store, ran, slurm, tmp_path, prober) as at:
        suspect = await at.judged()
        assert "DRAIN" not in at.node().states, "a suspicion drains nothing"
        (order,) = await asyncio.to_thread(at.probes.asking.step)
        assert store.probes.orders.versions(order)[0].why is ProbeReason.CONFIRM
        await at.stage(Health.DRAINING)
        looks = at.looks
        await until(lambda: at.looks >= looks + 5, "it is looked at again and again", SLOW_S)
        assert at.node().states >= {"DRAIN", "MIXED"}, "closed, with its job"
        assert slurm.states()[prober.job] == "RUNNING"
        assert at.desk.context.outages.current[NODE].stage is Health.DRAINING
        assert [o.why for o in store.probes.orders.newest(NODE)] == [ProbeReason.CONFIRM], (
            "nothing is probed while the job runs"
        )
        prober.end.touch()
        await at.stage(Health.REPAIR)  # drained, and validated while the GPU is still slow
        ended = slurm.command("scontrol", "show", "job", prober.job)
        assert re.search(r"JobState=COMPLETED .*Restarts=0 .*ExitCode=0:0", ended, re.DOTALL), ended
        assert (slurm.folder / f"{prober.job}.out").read_text() == "trained to its end\n"
        proved = at.incident()
        assert (proved.id, proved.severity, proved.action) == (suspect.id, Severity.CRITICAL, RecommendedAction.DRAIN)
        assert "DRAIN" in at.node().states
        assert at.node().reason.startswith(f"drover:{suspect.id}: ")
        assert f"GPU {GPU} of {NODE}" in at.desk.context.outages.current[NODE].reason
        stages = [duty.stage for duty in store.outages.history(NODE)]
        assert stages == [Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR]
        at.collector.now_ms += HOUR_MS  # the repair
        at.agent.prober = Prober(SimulatedFleet(ran[0].spec, 1001, [], START_MS, []), 1001)
        await asyncio.to_thread(at.desk.resume, NODE, "GPU replaced", "ann", False)
        await at.stage(Health.HEALTHY)
        assert "DRAIN" not in at.node().states
        assert at.desk.context.outages.current[NODE].reason.startswith("passed its validation: ")
        await until(lambda: at.incident().closed_ms is not None, "its incident is over")
        lost = gpu_hours_lost(store.outages.history(NODE), 8, at.collector.now_ms)
        assert lost == pytest.approx(8.0, abs=0.5), "eight GPUs for the hour of the repair"
        at.collector.now_ms += 3 * HOUR_MS
        await at.fatal_xid()  # another fault of the same node, three hours later
        await until(
            lambda: at.desk.context.outages.current[NODE].stage is not Health.HEALTHY, "it is out again", SLOW_S
        )
        again = next(d for d in store.outages.history(NODE) if d.stage is Health.DRAINING and d.returns)
        assert again.returns == 1
        assert again.reason.startswith("out again 0.1 days after it came back: xid/xid_79: ")
        assert again.incident_id not in ("", suspect.id)
        assert at.node().reason.startswith(f"drover:{again.incident_id}: ")
    assert [(a.action, a.state) for a in store.actions.newest(node=NODE)][:3] == [
        (Act.DRAIN, ActionState.DONE), (Act.RESUME, ActionState.DONE), (Act.DRAIN, ActionState.DONE),
    ]  # fmt: skip

"""Probes of nodes in service, in a preemptible job of a real Slurm: the node is held before anything runs there, and a
user's job has it when the probe has let go. Real agent, probe service and probe, on the CPU. Needs root and Slurm.

Then suspicion to return through the same parts: the node's GPUs are simulated there (testbed/probe_gpus.py), and, as
in test_probe_path.py, the clock of telemetry is not real.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_cli.doctor import probe_jobs
from drover_cli.doctor.finding import FindingState
from drover_collector.actions.base import Actuator
from drover_collector.actions.settings import ActConfig, SlurmConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_collector.app import begin_acting, make_probes
from drover_collector.config import CollectorConfig
from drover_collector.engine.node_state import NodeNow
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.probes.context import NodeAccess, ProbeRuntime
from drover_collector.probes.scheduling.protection import Protection
from drover_collector.probes.scheduling.slurm_holds import NAME, SlurmHolds
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import HoldConfig, ProbesConfig
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    ActionState,
    Health,
    Incident,
    IncidentKind,
    ProbeOrder,
    ProbeReason,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import FleetSpec, JobSpec, NodeSpec
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
from testbed.nvml import FakeNvml, build
from testbed.probe_gpus import write
from testbed.probe_service import reporting, serving
from testbed.simulated_buckets import START_MS, Recording, record
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.waiting import until

pytestmark = pytest.mark.system

NODE, GPU = "r01n02", 5
MINUTES = 6.0
PROBE_GPUS = Path(__file__).resolve().parents[1] / "testbed/probe_gpus.py"
SLOW_S = 300.0  # Slurm's queue and the import of torch, on a machine that has other work
INDEX = FleetIndex(FleetSpec((NodeSpec(NODE, "r1", "l1", "train", "H200", 1),), (), "probed"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), [NODE], probes=True) as made:
        yield made


def test_doctor_asks_slurm_which_partition_gives_way(slurm: Slurm) -> None:
    before = slurm.command("squeue", "--noheader", "--states=all")

    def bad(partition: str) -> list[str]:
        hold = HoldConfig(partition=partition, conf=f"{slurm.folder}/slurm.conf")
        found = probe_jobs.slurm(CollectorConfig(probes=ProbesConfig(slurm=hold)), INDEX.spec)
        return [each.text for each in found if each.state in (FindingState.BAD, FindingState.WARN)]

    assert bad("probes") == []
    (text,) = bad("all")
    assert "give way to nobody of probes: PriorityTier 1 of all is not below theirs" in text
    taken, there = bad("prbes")
    assert "Slurm would take no job --partition=prbes" in taken
    assert there == "Slurm has no partition prbes (it has all, probes)"
    assert slurm.command("squeue", "--noheader", "--states=all") == before


def holds(conf: str) -> HoldConfig:
    agent = shutil.which("drover-agent", path=str(Path(sys.executable).parent))
    assert agent is not None
    return HoldConfig(partition="probes", conf=conf, agent=agent)


class Site:
    def __init__(self, collector: Collector, slurm: Slurm, log: Path) -> None:
        self.store, self.slurm, self.log = collector.store, slurm, log
        conf = f"{slurm.folder}/slurm.conf"
        actuator = SlurmActuator(Scontrol(SlurmConfig(conf=conf)), 10_000)
        self.desk = ProbeOrderService(
            self.store,
            INDEX,
            ProbesConfig(),
            NodeAccess(stream=collector.ingest.stream),
            ProbeRuntime(leading=lambda: True, now_ms=lambda: collector.now_ms, poll_s=0.2),
            Protection(lambda _: actuator, lambda _: True, SlurmHolds(holds(conf)), now_ms=lambda: collector.now_ms),
        )
        collector.on_probes = self.desk.orders.take_results

    async def ask(self, *probes: str) -> str:
        return await asyncio.to_thread(lambda: self.desk.orders.ask(NODE, ProbeReason.IDLE, probes=probes))

    def newest(self, order: str) -> ProbeOrder:
        return self.store.probes.orders.versions(order)[-1]

    async def ended(self, order: str) -> ProbeOrder:
        await until(lambda: self.newest(order).state in ("done", "failed"), "the order's end", SLOW_S)
        return self.newest(order)

    def job_of(self, order: str) -> str:
        """State of the job that held the node."""
        lines = self.slurm.command("squeue", "--noheader", "--states=all", "--format=%j %T").splitlines()
        return dict(line.split() for line in lines).get(f"{NAME}{order}", "none")

    async def job(self, order: str, state: str) -> None:
        await until(lambda: self.job_of(order) == state, f"its job is {state}", SLOW_S)


@contextlib.asynccontextmanager
async def site(store: Store, slurm: Slurm, folder: Path) -> AsyncIterator[Site]:
    async with Collector(store, index=INDEX) as collector:
        made = Site(collector, slurm, folder / "service.log")
        running = asyncio.create_task(made.desk.run())
        spool = folder / "spool"
        (spool / "probes").mkdir(parents=True, mode=0o700)
        try:
            with (
                reporting(NODE, spool, f"127.0.0.1:{collector.port}", folder / "agent.log"),
                serving(spool / "probes", made.log),
            ):
                await until(lambda: collector.ingest.stream(NODE), "the agent's stream")
                yield made
        finally:
            running.cancel()
            await asyncio.wait([running])


@in_loop
async def test_a_probe_waits_behind_a_users_job_and_the_next_one_preempts_it_and_finds_nothing_of_it(
    store: Store, slurm: Slurm, tmp_path: Path
) -> None:
    async with site(store, slurm, tmp_path) as at:
        users = slurm.submit("sleep 600")
        await until(lambda: slurm.states().get(users) == "RUNNING", "a user's job runs", SLOW_S)
        first = await at.ask("launch")
        await at.job(first, "PENDING")
        await until(lambda: at.newest(first).detail.endswith(" is pending"), "its detail says so", SLOW_S)
        assert at.newest(first).state == "asked"
        slurm.command("scancel", users)
        assert (await at.ended(first)).state == "done"
        (figure, _) = store.probes.results.of_order(first)
        assert figure.result.value and figure.result.value > 0
        await at.job(first, "COMPLETED")
        order = await at.ask("soak")  # a minute of load
        await until(lambda: at.newest(order).state == "sent", "it is sent", SLOW_S)
        assert at.newest(order).protection == "job"
        assert at.job_of(order) == "RUNNING"
        await until(lambda: "soak: " in at.log.read_text(), "it is under load", SLOW_S)
        seen = tmp_path / "seen"
        users = slurm.submit(f"grep -c drover-probe-{order} /proc/net/unix > {seen}; true")
        end = await at.ended(order)
        assert end.state == "failed"
        assert end.detail.startswith("stopped in soak: gave way during soak, ")
        assert end.detail.endswith(": the scheduler wants the node back")
        await until(lambda: slurm.states().get(users) == "COMPLETED", "the user's job has run", SLOW_S)
        assert seen.read_text() == "0\n", "its first line ran when the probe had let go of the node"
        assert at.job_of(order) == "PREEMPTED"
        assert [v.passed for v in store.probes.verdicts.read(request=order)] == [None]


# ---- from suspicion to return


@pytest.fixture(scope="module")
def ran() -> tuple[SimulatedFleet, Recording]:
    """A job on four nodes with one GPU whose memory is slow; it has just ended."""
    spec = build_fleet(4, 1001)
    members = tuple((node.name, gpu) for node in spec.nodes for gpu in range(node.gpus))
    job = JobSpec("train", START_MS, START_MS + round(MINUTES * 60_000) - 1000, members)
    fleet = SimulatedFleet(spec, 1001, [Fault("straggler", "hbm", NODE, GPU, 120.0, None, 0.6)], START_MS, [job])
    return fleet, record(1001, MINUTES, made=fleet)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    """Eight that nobody holds."""
    folder = tmp_path_factory.mktemp("nvml")
    fake = FakeNvml(folder / "nvml.script", build(folder))
    fake.healthy(8)
    for gpu in range(8):
        fake.hold(gpu)
    return fake


class ProbedAgent(NodeAgent):
    """Its probes are those of a real agent: its desk hands them to the probe service."""

    def add_probe_request(self, request: pb.ProbeRequest) -> None:
        Agent.add_probe_request(self, request)


class Beyond(ActionReview):
    """Knows values of every GPU after the end of the recording."""

    def __init__(self, pipeline: Pipeline, collector: Collector) -> None:
        super().__init__(pipeline)
        self._collector = collector

    def node_now(self, node: str) -> NodeNow:
        del node
        now_ms = self._collector.now_ms + 1
        return NodeNow(now_ms, (now_ms,) * 8)


class Acting:
    """A collector in enforce mode that has judged the recording."""

    def __init__(self, collector: Collector, recording: Recording, slurm: Slurm) -> None:
        self.collector, self.recording, self.store = collector, recording, collector.store
        conf = f"{slurm.folder}/slurm.conf"
        self.slurm = Scontrol(SlurmConfig(conf=conf))
        self.pipeline = Pipeline(
            recording.index, self.store, policy("enforce"), Outbox(self.store, [], "http://127.0.0.1:8501"),
            PipelineOptions(lag_ms=7000, now_ms=lambda: collector.now_ms, ceiling="enforce"),
        )  # fmt: skip
        actuator = SlurmActuator(self.slurm, 10_000)
        act = ActConfig(mode="enforce", validate_level="quick", slurm=SlurmConfig(enabled=True, conf=conf))

        def actuator_of(node: str) -> Actuator | None:
            return actuator if node == NODE else None

        self.probes = make_probes(
            self.pipeline, ProbesConfig(confirm=True, most_at_once=4, slurm=holds(conf)), act, collector.ingest.stream,
            actuator_of,
        )  # fmt: skip
        self.desk = dispatcher_of(
            self.store, act, [actuator], actuator_of, detection=Beyond(self.pipeline, collector),
            now_ms=lambda: collector.now_ms, look_s=0.2, validator=self.probes.service.orders,
        )  # fmt: skip
        begin_acting(self.pipeline, self.probes, self.desk)
        self.probes.service.runtime.poll_s = 0.2
        collector.on_probes = self.probes.service.orders.take_results

    async def suspected(self) -> str:
        """The order that it makes Drover ask for."""
        await self.pipeline.start()
        for bucket in self.recording.buckets:
            self.collector.now_ms = bucket.end_ms + 7000
            await asyncio.to_thread(self.pipeline.judge_bucket, bucket)
        assert (self.incident().kind, self.incident().action) == (IncidentKind.STRAGGLER, RecommendedAction.PROBE)
        (order,) = await asyncio.to_thread(self.probes.asking.step)
        return order

    def incident(self) -> Incident:
        (found,) = [i for i in self.pipeline.incidents.values() if (i.node, i.gpu) == (NODE, GPU)]
        return found

    def drained(self) -> bool:
        return "DRAIN" in self.slurm.nodes([NODE])[NODE].states

    async def stage(self, stage: Health) -> None:
        outages = self.desk.context.outages
        await until(lambda: NODE in outages.current and outages.current[NODE].stage is stage, f"{stage}", SLOW_S)


@contextlib.asynccontextmanager
async def acting(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, folder: Path, gpus: FakeNvml, figures: Path
) -> AsyncIterator[Acting]:
    fleet, recording = ran
    probes = folder / "spool/probes"
    probes.mkdir(parents=True, mode=0o700)
    program = (sys.executable, str(PROBE_GPUS), str(figures))
    async with Collector(store, now_ms=START_MS, index=recording.index) as collector:
        config = AgentConfig(
            node=NODE, collectors=(f"127.0.0.1:{collector.port}",), hardware="simulated", kmsg_enabled=False,
            spool=SpoolConfig(dir=str(folder / "spool")),
        )  # fmt: skip
        agent = ProbedAgent(config, NODE, inventory(fleet.hardware, fleet.hardware.number[NODE]))
        made = Acting(collector, recording, slurm)
        running = [asyncio.create_task(made.probes.service.run()), asyncio.create_task(agent.run())]
        try:
            with serving(probes, folder / "service.log", program, gpus.env()):
                await until(lambda: collector.ingest.stream(NODE), "the agent's stream")
                yield made
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await made.pipeline.stop()


@in_loop
async def test_an_innocent_node_is_cleared_and_stays_in_service(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, gpus: FakeNvml, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    write(figures, Prober(SimulatedFleet(ran[0].spec, 1001, [], START_MS, []), 1001), NODE)
    async with acting(store, ran, slurm, tmp_path, gpus, figures) as at:
        order = await at.suspected()
        await until(
            lambda: store.probes.orders.versions(order)[-1].state in ("done", "failed"), "the order's end", SLOW_S
        )
        end = store.probes.orders.versions(order)[-1]
        assert (end.state, end.detail, end.protection) == ("done", "", "job")
        await until(lambda: at.incident().closed_ms is not None, "it is cleared")
        assert at.incident().timeline[-1].text.startswith(f"cleared by a probe: GPU {GPU} of {NODE}: ")
        assert not at.drained()
    assert store.actions.newest() == []


@in_loop
async def test_a_straggler_is_confirmed_in_a_job_drained_validated_and_resumed(
    store: Store, ran: tuple[SimulatedFleet, Recording], slurm: Slurm, gpus: FakeNvml, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    write(figures, Prober(ran[0], 1001), NODE)
    async with acting(store, ran, slurm, tmp_path, gpus, figures) as at:
        order = await at.suspected()
        suspect = at.incident()
        assert not at.drained(), "a suspicion drains nothing"
        await until(lambda: at.incident().action is RecommendedAction.DRAIN, "it is confirmed", SLOW_S)
        # The node is repaired before its validation: without a fault there it passes.
        write(figures, Prober(SimulatedFleet(ran[0].spec, 1001, [], START_MS, []), 1001), NODE)
        assert store.probes.orders.versions(order)[-1].protection == "job"
        assert (at.incident().id, at.incident().severity) == (suspect.id, Severity.CRITICAL)
        await at.stage(Health.HEALTHY)
        assert not at.drained()
        stages = [duty.stage for duty in store.outages.history(NODE)]
        assert stages == [Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.HEALTHY]
        (validation,) = [o for o in store.probes.orders.newest(NODE) if o.why is ProbeReason.VALIDATE]
        assert (validation.state, validation.protection) == ("done", "drained")
    acts = [(a.action, a.state) for a in store.actions.newest(node=NODE)]
    assert acts == [(Act.DRAIN, ActionState.DONE), (Act.RESUME, ActionState.DONE)]

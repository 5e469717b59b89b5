"""Suspicion to proof with the real parts: engine, desk and store, a real gRPC stream, agents of a simulated fleet.

Only the clock of telemetry is not real: buckets of a simulated fleet are judged as fast as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, SpoolConfig
from drover_collector.actions.settings import ActConfig
from drover_collector.app import make_probes
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store
from drover_core.model.events import (
    Health,
    Incident,
    IncidentKind,
    ProbeReason,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import JobSpec
from drover_simulator.fault import Fault
from drover_simulator.fleet import SimulatedFleet, build_fleet
from drover_simulator.live_fleet import NodeAgent
from drover_simulator.probing import Prober
from drover_simulator.readings import inventory
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.simulated_buckets import START_MS, Recording, record
from testbed.waiting import until

NODE, GPU = "r01n02", 5
MINUTES = 6.0
CONFIG = ProbesConfig(confirm=True, most_at_once=4)


@pytest.fixture(scope="module")
def ran() -> tuple[SimulatedFleet, Recording]:
    """A job on four nodes with one GPU whose memory is slow; it has just ended."""
    spec = build_fleet(4, 1001)
    members = tuple((node.name, gpu) for node in spec.nodes for gpu in range(node.gpus))
    job = JobSpec("train", START_MS, START_MS + round(MINUTES * 60_000) - 1000, members)
    fault = Fault("straggler", "hbm", NODE, GPU, 120.0, None, 0.6)
    fleet = SimulatedFleet(spec, 1001, [fault], START_MS, [job])
    return fleet, record(1001, MINUTES, made=fleet)


class Site:
    """A collector that has judged the recording."""

    def __init__(self, collector: Collector, fleet: SimulatedFleet, recording: Recording) -> None:
        self.collector, self.fleet, self.recording = collector, fleet, recording
        store = collector.store
        self.pipeline = Pipeline(
            recording.index,
            store,
            Policy.load(),
            Outbox(store, [], "http://127.0.0.1:8501"),
            PipelineOptions(lag_ms=7000, now_ms=lambda: collector.now_ms),
        )
        self.probes = make_probes(self.pipeline, CONFIG, ActConfig(), collector.ingest.stream)
        self.probes.service.runtime.poll_s = 0.05
        collector.on_probes = self.probes.service.orders.take_results

    async def judged(self) -> Incident:
        await self.pipeline.start()
        for bucket in self.recording.buckets:
            self.collector.now_ms = bucket.end_ms + 7000
            await asyncio.to_thread(self.pipeline.judge_bucket, bucket)
        return self.incident()

    def incident(self) -> Incident:
        (found,) = [i for i in self.pipeline.incidents.values() if (i.node, i.gpu) == (NODE, GPU)]
        return found


@contextlib.asynccontextmanager
async def site(store: Store, ran: tuple[SimulatedFleet, Recording]) -> AsyncIterator[Site]:
    fleet, recording = ran
    async with Collector(store, now_ms=START_MS, index=recording.index) as collector:
        made = Site(collector, fleet, recording)
        running = asyncio.ensure_future(made.probes.service.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])
            await made.pipeline.stop()


@contextlib.asynccontextmanager
async def agents(of: Site, folder: Path, prober: Prober, *names: str) -> AsyncIterator[None]:
    """Agents of these nodes, with their spools and streams."""
    made = []
    for name in names:
        config = AgentConfig(
            node=name, collectors=(f"127.0.0.1:{of.collector.port}",), hardware="simulated", kmsg_enabled=False,
            spool=SpoolConfig(dir=str(folder / name)),
        )  # fmt: skip
        agent = NodeAgent(config, name, inventory(of.fleet.hardware, of.fleet.hardware.number[name]))
        agent.prober = prober
        made.append(asyncio.create_task(agent.run()))
    try:
        await until(lambda: all(of.collector.ingest.stream(name) for name in names), "the agents' streams")
        yield
    finally:
        for task in made:
            task.cancel()
        await asyncio.wait(made)


@in_loop
async def test_a_straggler_is_confirmed_by_a_probe(
    store: Store, ran: tuple[SimulatedFleet, Recording], tmp_path: Path
) -> None:
    async with site(store, ran) as at:
        suspect = await at.judged()
        assert (suspect.kind, suspect.cause, suspect.action) == (IncidentKind.STRAGGLER, "hbm", RecommendedAction.PROBE)
        assert at.pipeline.engine.health_of(NODE, GPU)[0] is Health.SUSPECT
        async with agents(at, tmp_path, Prober(at.fleet, 1001), NODE):
            (order,) = await asyncio.to_thread(at.probes.asking.step)
            assert store.probes.orders.versions(order)[0].why is ProbeReason.CONFIRM
            await until(lambda: store.probes.orders.versions(order)[-1].state == "done", "the order's end")
        proved = at.incident()
        assert proved.id == suspect.id
        assert (proved.severity, proved.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)
        assert proved.confidence >= 0.95
        assert at.pipeline.engine.health_of(NODE, GPU)[0] is Health.CONFIRMED
        assert [d.wanted for d in store.decisions.of_incident(proved.id)][-1] is RecommendedAction.DRAIN
        verdicts = {v.gpu: v.passed for v in store.probes.verdicts.read(request=order)}
        assert verdicts == {None: False} | {g: g != GPU for g in range(8)}


@in_loop
async def test_an_innocent_gpu_is_cleared_and_not_drained(
    store: Store, ran: tuple[SimulatedFleet, Recording], tmp_path: Path
) -> None:
    healthy = SimulatedFleet(ran[0].spec, 1001, [], START_MS, [])
    async with site(store, ran) as at:
        suspect = await at.judged()
        async with agents(at, tmp_path, Prober(healthy, 1001), NODE):
            order = await asyncio.to_thread(
                at.probes.service.orders.ask, NODE, ProbeReason.CONFIRM, incident_id=suspect.id
            )
            await until(lambda: store.probes.orders.versions(order)[-1].state == "done", "the order's end")
        cleared = at.incident()
        assert cleared.closed_ms is not None
        assert cleared.timeline[-1].text.startswith("cleared by a probe: GPU 5 of r01n02: ")
        assert at.pipeline.engine.health_of(NODE, GPU)[0] is Health.HEALTHY
        last = at.recording.buckets[-1]
        again = replace(last, start_ms=last.start_ms + last.length_ms)
        await asyncio.to_thread(at.pipeline.judge_bucket, again)
        assert at.incident().closed_ms is not None
        assert RecommendedAction.DRAIN not in {d.wanted for d in store.decisions.of_incident(suspect.id)}
        assert store.incidents.history(suspect.id)[-1].closed_ms is not None


@in_loop
async def test_a_node_that_never_answers_leaves_a_suspect(
    store: Store, ran: tuple[SimulatedFleet, Recording], tmp_path: Path
) -> None:
    async with site(store, ran) as at:
        suspect = await at.judged()
        (order,) = await asyncio.to_thread(at.probes.asking.step)
        assert await asyncio.to_thread(at.probes.asking.step) == []  # it is under way
        at.collector.now_ms += round(CONFIG.wait_s * 1000)
        await until(lambda: store.probes.orders.versions(order)[-1].state == "failed", "the order's end")
        assert store.probes.orders.versions(order)[-1].detail == f"expired: not sent within 900 s, {NODE} has no stream"
        after = at.incident()
        assert (after.closed_ms, after.action, after.severity) == (None, RecommendedAction.PROBE, suspect.severity)
        assert after.timeline[-1].text.startswith(f"a probe gave no verdict: {NODE}: not judged, expired")

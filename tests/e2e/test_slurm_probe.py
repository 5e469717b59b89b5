"""Probes of nodes in service, in a preemptible job of a real Slurm: the node is held before anything runs there, and a
user's job has it when the probe has let go. Real agent, probe service and probe, on the CPU. Needs root and Slurm."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from drover_collector.actions.scontrol import Scontrol
from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm import SlurmActuator
from drover_collector.fleet_index import FleetIndex
from drover_collector.probes.desk import ProbeDesk
from drover_collector.probes.holding import NAME, SlurmHolds
from drover_collector.probes.protection import Protection
from drover_collector.probes.settings import HoldConfig, ProbesConfig
from drover_collector.store import Store
from drover_proto.events import ProbeOrder, ProbeReason
from drover_proto.fleet import FleetSpec, NodeSpec
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.probe_service import reporting, serving
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

NODE = "gpu01"
SLOW_S = 60.0  # Slurm's queue and the import of torch, on a machine that has other work
INDEX = FleetIndex(FleetSpec((NodeSpec(NODE, "r1", "l1", "train", "H200", 1),), (), "probed"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), [NODE], probes=True) as made:
        yield made


class Site:
    def __init__(self, collector: Collector, slurm: Slurm, log: Path) -> None:
        self.store, self.slurm, self.log = collector.store, slurm, log
        conf = f"{slurm.folder}/slurm.conf"
        agent = shutil.which("drover-agent", path=str(Path(sys.executable).parent))
        assert agent is not None
        self.config = HoldConfig(partition="probes", conf=conf, agent=agent)
        actuator = SlurmActuator(Scontrol(SlurmConfig(conf=conf)), 10_000)
        self.desk = ProbeDesk(
            self.store, INDEX, ProbesConfig(), stream=collector.ingest.stream, leading=lambda: True,
            now_ms=lambda: collector.now_ms, poll_s=0.2,
            protection=Protection(
                lambda _: actuator, lambda _: True, SlurmHolds(self.config), now_ms=lambda: collector.now_ms
            ),
        )  # fmt: skip
        collector.on_probes = self.desk.take_results

    async def ask(self, *probes: str) -> str:
        return await asyncio.to_thread(lambda: self.desk.ask(NODE, ProbeReason.IDLE, probes=probes))

    def newest(self, order: str) -> ProbeOrder:
        return self.store.probe_order(order)[-1]

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
async def test_a_users_job_preempts_the_probe_and_finds_nothing_of_it(
    store: Store, slurm: Slurm, tmp_path: Path
) -> None:
    async with site(store, slurm, tmp_path) as at:
        order = await at.ask("soak")  # a minute of load
        await until(lambda: at.newest(order).state == "sent", "it is sent", SLOW_S)
        assert at.newest(order).protection.startswith("job ")
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
        assert [v.passed for v in store.probe_verdicts(request=order)] == [None]


@in_loop
async def test_it_waits_behind_a_users_job_and_its_own_ends_with_the_probe(
    store: Store, slurm: Slurm, tmp_path: Path
) -> None:
    async with site(store, slurm, tmp_path) as at:
        users = slurm.submit("sleep 600")
        await until(lambda: slurm.states().get(users) == "RUNNING", "a user's job runs", SLOW_S)
        order = await at.ask("launch")
        await at.job(order, "PENDING")
        await until(lambda: at.newest(order).detail.endswith(" is pending"), "it is told", SLOW_S)
        assert at.newest(order).state == "asked"
        slurm.command("scancel", users)
        assert (await at.ended(order)).state == "done"
        (figure, _) = store.probe_results(order)
        assert figure.result.value and figure.result.value > 0
        await at.job(order, "COMPLETED")


@in_loop
async def test_on_a_drained_node_no_job_is_needed(store: Store, slurm: Slurm, tmp_path: Path) -> None:
    slurm.command("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=fans")
    try:
        async with site(store, slurm, tmp_path) as at:
            order = await at.ask("launch")
            end = await at.ended(order)
            assert (end.state, end.protection) == ("done", "drained")
            assert at.job_of(order) == "none"
    finally:
        slurm.command("scontrol", "update", f"nodename={NODE}", "state=resume")

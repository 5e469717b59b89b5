"""A whole agent on a stand-in of NVML, with collectors that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Scope
from drover_core.model.events import EventKind
from testbed.clock import MovableClock
from testbed.telemetry_server import TelemetryServer
from testbed.waiting import until

GPUS = [Entity(Scope.GPU, f"16540230{slot:05d}", slot) for slot in range(2)]
NODE = Entity(Scope.NODE, "n1")
THINGS = [*GPUS, NODE]
FIRST = GPUS[0].key


@dataclass
class Node:
    """One node whose seconds pass as fast as the test wants."""

    nvml: ClassVar[NvmlSource]  # what it reads; of the test that runs
    agent: Agent
    clock: MovableClock
    read_ms: list[int] = field(default_factory=list)  # time of each second's readings
    xids: int = 0

    def second(self) -> None:
        """A second later: readings on the second, as the sampler gives them."""
        now_ms = self.clock.now_ms()
        self.clock.pass_time((1000 - now_ms % 1000) / 1000)
        ts_ms = self.clock.now_ms() // 1000 * 1000
        self.agent.accept(ts_ms, Reading(rows=[*self.nvml.read(ts_ms).rows, (NODE, {"load1": 1.0})]))
        self.read_ms.append(ts_ms)

    def xid(self) -> str:
        """Another one that nothing merges with those before."""
        self.xids += 1
        code = f"xid {self.xids}"
        event = NodeEvent(self.clock.now_ms(), 0, EventKind.XID, code, code, "kmsg")
        self.agent.accept(self.clock.now_ms(), Reading(events=[event]))
        return code

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.agent.run())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def delivered(self, *servers: TelemetryServer) -> None:
        """Wait until each row read stands at a collector, under its own time or, after a jump, the one next to it."""
        self.agent.flush()
        wanted = Counter((thing.key, ts_ms) for thing in THINGS for ts_ms in self.read_ms)

        def all_there() -> bool:
            found = Counter((key, ts_ms // 1000 * 1000) for key, ts_ms in {k for s in servers for k in s.rows})
            return found == wanted

        await until(all_there, f"{sum(wanted.values())} rows, found {[len(server.rows) for server in servers]}")
        assert all(not server.broken for server in servers), servers


def node(folder: Path, *addresses: str, clock: MovableClock | None = None, **spool: int) -> Node:
    clock = clock or MovableClock()
    settings = SpoolConfig(dir=str(folder), **spool)
    config = AgentConfig(node="n1", collectors=addresses, hardware="none", kmsg_enabled=False, spool=settings)
    return Node(Agent(config, "n1", clock=clock), clock)


async def start_at(address: str, server: TelemetryServer) -> None:
    await server.start(int(address.rpartition(":")[2]))

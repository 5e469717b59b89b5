"""An agent with readings made up, against a server that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_core.metrics.catalog import Scope
from drover_core.model.events import EventKind

GPU = Entity(Scope.GPU, "SN0", 0, uuid="GPU-0", serial="SN0", pci="0000:3b:00.0", model="H100")
NODE = Entity(Scope.NODE, "n1")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def settings(folder: Path, *addresses: str) -> AgentConfig:
    return AgentConfig(node="n1", collectors=addresses, spool=SpoolConfig(dir=str(folder / "spool")))


def power(ts_ms: int, watts: float = 500.0) -> tuple[int, Reading]:
    return ts_ms, Reading(rows=[(GPU, {"power_w": watts}), (NODE, {"load1": 1.0})])


def xid(code: str, source: str = "simulation", message: str = "") -> Reading:
    return Reading(events=[NodeEvent(now_ms(), 0, EventKind.XID, code, message or f"Xid {code}", source)])


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    """The agent, streaming; stopped at the end as SIGTERM does."""
    task = asyncio.create_task(agent.run())
    await asyncio.sleep(0)  # it has begun
    try:
        yield agent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

"""Agents in a process of its own: the real spool and uplink, fed with made-up rows. Each keeps a journal too.

A journal line is written after the spool has what it says: `B TS ...` rows of a batch, `E TEXT` an event, `A LANE SEQ`
an acknowledgement.

    python -m durability.agents FOLDER ADDRESS NODES PERIOD_S
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from drover_agent.clock import Clock
from drover_agent.config import AgentConfig, SpoolConfig, TlsConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.uplink import stream as uplink
from drover_core.metrics.catalog import Scope
from drover_core.model.events import EventKind
from drover_proto import telemetry_pb2 as pb
from durability.content import GPUS, METRICS, name, values

EVENT_EVERY = 10  # ticks
# A collector that is killed every other second would else be without agents most of the time.
PAUSES_S = 0.05, 0.3
READY = "agents run"


class Journaled:
    """An agent and its journal."""

    def __init__(
        self,
        folder: Path,
        node: str,
        addresses: tuple[str, ...],
        *,
        tls: TlsConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.node = node
        self._entities = [
            Entity(Scope.GPU, f"{node}-S{gpu}", gpu, uuid=f"GPU-{node}-{gpu}", serial=f"{node}-S{gpu}")
            for gpu in range(GPUS)
        ]
        self._journal: TextIO = (folder / f"{node}.journal").open("a")
        self._waiting: list[int] = []  # accepted, not in the spool yet
        self._ticks = 0
        spool = SpoolConfig(dir=str(folder / node))
        config = AgentConfig(
            node=node, collectors=addresses, batch_s=1.0, hardware="none", kmsg_enabled=False, spool=spool,
            tls=tls or TlsConfig(),
        )  # fmt: skip
        self.agent = Agent(config, node, {}, clock=clock)
        self._wrap(self.agent.spool)

    def _wrap(self, spool: Any) -> None:
        add_batch, add_record, ack = spool.add_batch, spool.add_record, spool.ack

        def batch(ts_ms: int, blocks: Any) -> None:
            add_batch(ts_ms, blocks)
            noted, self._waiting = self._waiting, []
            spool.call_when_stored(lambda: self._note("B", *noted))

        def record(ts_ms: int, record_: pb.Record) -> None:
            add_record(ts_ms, record_)
            if record_.HasField("event") and record_.event.code == "oom":
                spool.call_when_stored(lambda: self._note("E", record_.event.message))

        def acknowledged(lane: int, seq: int) -> Any:
            if seq > spool.held.get(lane, 0):
                self._note("A", lane, seq)
            return ack(lane, seq)

        spool.add_batch, spool.add_record, spool.ack = batch, record, acknowledged

    def _note(self, *words: object) -> None:
        self._journal.write(" ".join(map(str, words)) + "\n")
        self._journal.flush()  # to the kernel: it stays when this process is killed

    def tick(self, ts_ms: int) -> None:
        rows: list[tuple[Entity, Mapping[str, float]]] = [
            (entity, dict(zip(METRICS, map(float, values(self.node, gpu, ts_ms)), strict=True)))
            for gpu, entity in enumerate(self._entities)
        ]
        self.agent.accept(ts_ms, Reading(rows=rows))
        self._waiting.append(ts_ms)
        self._ticks += 1
        if self._ticks % EVENT_EVERY == 0:
            text = f"{self.node} at {ts_ms}"
            self.agent.accept(ts_ms, Reading(events=[NodeEvent(ts_ms, None, EventKind.KERNEL, "oom", text, "kmsg")]))


async def run(folder: Path, address: str, nodes: int, period_s: float) -> None:
    """Until SIGTERM; then what waits is delivered first."""
    uplink.FIRST_PAUSE_S, uplink.LONGEST_PAUSE_S = PAUSES_S
    agents = [Journaled(folder, name(number), (address,)) for number in range(nodes)]
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    tasks = [asyncio.create_task(agent.agent.run()) for agent in agents]
    print(READY, flush=True)
    last_ms = 0
    while not stopping.is_set():
        last_ms = max(last_ms + 1, time.time_ns() // 1_000_000)
        for agent in agents:
            agent.tick(last_ms)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(period_s):
                await stopping.wait()
    for agent in agents:
        agent.agent.flush()
    await asyncio.gather(*(agent.agent._uplink.delivered() for agent in agents))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))

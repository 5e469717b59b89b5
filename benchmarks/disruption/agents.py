"""The fleet of `chaos.py` in one process: real agents (spool, uplink, TLS) that send made-up rows, each with a journal.

It obeys commands, a JSON object a line on stdin, and answers each with one on stdout.

    python -m disruption.agents FOLDER CERTIFICATES ADDRESSES NODE...
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from durability.agents import READY, Journaled

from drover_agent.clock import SystemClock
from drover_agent.config import TlsConfig
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.uplink import stream as uplink
from drover_core.model.events import EventKind

PERIOD_S = 0.25  # between two rows of a GPU
# As shipped 60, 60 and 30 s: a run of ten minutes has no time for them. They bound how long a dead connection is kept.
ACK_LIMIT_S, RENEWAL_CHECK_S, LONGEST_PAUSE_S = 15.0, 1.0, 2.0


class Shifted(SystemClock):
    """The machine's clock, and how wrong this node's is."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + round(self.ahead_s * 1000)


class Steered:
    """One node's agent, and its clock."""

    def __init__(self, folder: Path, certificates: Path | None, addresses: tuple[str, ...], node: str) -> None:
        self.clock = Shifted()
        base = certificates / node if certificates is not None else None
        tls = TlsConfig() if certificates is None else TlsConfig(f"{certificates}/ca.pem", f"{base}.pem", f"{base}.key")
        self.journaled = Journaled(folder, node, addresses, tls=tls, clock=self.clock)
        self.newest_ms = 0

    @property
    def agent(self) -> Any:
        return self.journaled.agent

    def tick(self) -> None:
        now_ms = self.clock.now_ms()
        if now_ms == self.newest_ms:
            now_ms += 1
        self.newest_ms = now_ms
        self.journaled.tick(now_ms)


class Fleet:
    def __init__(self, folder: Path, certificates: Path | None, addresses: tuple[str, ...], nodes: list[str]) -> None:
        self.folder, self.certificates, self.addresses = folder, certificates, addresses
        self.agents = {node: Steered(folder, certificates, addresses, node) for node in nodes}
        self.rival: Steered | None = None
        self.tasks = [asyncio.create_task(agent.agent.run()) for agent in self.agents.values()]
        self.eaten: list[bytearray] = []
        self.stopping = asyncio.Event()

    def every(self) -> list[Steered]:
        return [*self.agents.values(), *([self.rival] if self.rival else [])]

    def obey(self, do: str, node: str = "", **words: Any) -> dict[str, Any]:
        if do == "pending":
            return {name: agent.agent.spool.pending() for name, agent in self.agents.items()}
        if do == "connected":
            return {name: agent.agent.connected_to for name, agent in self.agents.items()}
        if do == "clock":
            self.agents[node].clock.ahead_s = float(words["ahead_s"])
        elif do == "clock wrong":
            return {"wrong": self.agents[node].agent._self_reports.clock_wrong}
        elif do == "xid":
            agent = self.agents[node]
            text = f"Xid (PCI:0000:3b:00): {words['code']}, by the chaos run"
            event = NodeEvent(agent.clock.now_ms(), 0, EventKind.XID, words["code"], text, "kmsg")
            agent.agent.accept(event.ts_ms, Reading(events=[event]))
        elif do == "rival":
            home = self.folder / "rival"
            home.mkdir(exist_ok=True)
            self.rival = Steered(home, self.certificates, self.addresses, node)
            self.tasks.append(asyncio.create_task(self.rival.agent.run()))
        elif do == "rival ends":
            self.rival = None
            self.tasks.pop().cancel()
        elif do == "eat":
            self.eaten.append(bytearray(os.urandom(1 << 20)) * int(words["mib"]))
        return {}


async def run(fleet: Fleet) -> None:
    """Until SIGTERM; then what waits is delivered first."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, fleet.stopping.set)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def listen() -> None:
        while line := await lines.readline():
            print(json.dumps(fleet.obey(**json.loads(line))), flush=True)

    listening = asyncio.create_task(listen())
    print(READY, flush=True)
    while not fleet.stopping.is_set():
        for task in fleet.tasks:
            if task.done():
                task.result()  # an agent that has ended: a defect, which ends the run
        for agent in fleet.every():
            agent.tick()
        try:
            async with asyncio.timeout(PERIOD_S):
                await fleet.stopping.wait()
        except TimeoutError:
            continue
    for agent in fleet.agents.values():
        agent.agent.flush()
    await asyncio.gather(*(agent.agent._uplink.delivered() for agent in fleet.agents.values()))
    for task in (*fleet.tasks, listening):
        task.cancel()
    await asyncio.gather(*fleet.tasks, return_exceptions=True)


async def main(folder: Path, certificates: Path | None, addresses: tuple[str, ...], nodes: list[str]) -> None:
    uplink.ACK_LIMIT_S, uplink.RENEWAL_CHECK_S, uplink.LONGEST_PAUSE_S = ACK_LIMIT_S, RENEWAL_CHECK_S, LONGEST_PAUSE_S
    await run(Fleet(folder, certificates, addresses, nodes))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    where = None if sys.argv[2] == "-" else Path(sys.argv[2])
    asyncio.run(main(Path(sys.argv[1]), where, tuple(sys.argv[3].split(",")), sys.argv[4:]))

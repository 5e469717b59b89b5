"""A kernel log for tests: lines as /dev/kmsg gives them, and a machine whose clocks a test moves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from drover_agent.app import NodeRuntime
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg.clock import Clocks, system_clocks
from drover_agent.sources.kmsg.reader import KmsgReader
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.spool import Spool
from drover_proto import telemetry_pb2 as pb
from testbed.waiting import wait_until

HOUR_US = 3_600_000_000


def xid(seq: int, code: int, bus: int = 0x3B, *, facility: int = 0, us: int | None = None) -> bytes:
    when = system_clocks().awake_us if us is None else us
    return f"{facility << 3 | 4},{seq},{when},-;NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, pid=1\n".encode()


def text(seq: int, us: int, line: str) -> bytes:
    return f"6,{seq},{us},-;{line}\n".encode()


def events_of(spool: AsyncSpool | Spool) -> list[pb.Event]:
    found, after = [], 0
    while record := spool.next(pb.EVENTS, after):
        after = record.seq
        parsed = pb.Record.FromString(record.body)
        if parsed.HasField("event"):
            found.append(parsed.event)
    return found


def codes(node: NodeRuntime) -> list[str]:
    return [event.code for event in events_of(node.agent.spool)]


@contextlib.asynccontextmanager
async def node(folder: Path, log: Path, *, hardware: str = "none", **settings: bool) -> AsyncIterator[NodeRuntime]:
    """An agent; with hardware `nvml` one that reads GPUs too."""
    config = AgentConfig(
        node="n1",
        collectors=("127.0.0.1:1",),
        hardware=hardware,
        kmsg_path=str(log),
        spool=SpoolConfig(dir=str(folder / "spool")),
        **settings,  # type: ignore[arg-type]  # only switches are passed
    )
    found = NodeRuntime(config)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if found._nvml:
            found._nvml.nvml.close()  # or the next test of this process finds NVML open


class Machine:
    """A machine whose clocks a test moves, and its kernel log in a file."""

    def __init__(self, folder: Path) -> None:
        self.clocks = Clocks(1_800_000_000_000_000, 10 * HOUR_US, 0)
        self.log = folder / "kmsg"
        self.log.touch()
        self.state = folder / "kmsg.json"
        self.seq = 0
        self.written: dict[str, int] = {}  # text -> wall time in ms
        self.seen: list[NodeEvent] = []

    def write(self, line: str) -> None:
        self.seq += 1
        self.written[line] = self.clocks.wall_us // 1000
        with self.log.open("ab") as file:
            file.write(text(self.seq, self.clocks.awake_us, line))

    def passes(self, awake_s: float = 0, asleep_s: float = 0) -> None:
        now, awake, asleep = self.clocks, int(awake_s * 1e6), int(asleep_s * 1e6)
        self.clocks = Clocks(now.wall_us + awake + asleep, now.awake_us + awake, now.slept_us + asleep)

    def sleeps(self, seconds: float, *, length: bool = False) -> None:
        self.write(f"PM: suspend entry (deep) {self.seq}")
        self.passes(2, seconds)
        if length:
            self.write(f"PM: Timekeeping suspended for {seconds:.3f} seconds")
        self.write(f"PM: suspend exit {self.seq}")

    @contextlib.contextmanager
    def read(self, *, wait_for: int, boot: str = "b", meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A run of a reader, which goes on where the last one of this boot stopped. `meanwhile` is called each time
        that it hands over events, before they are taken."""
        self.seen = []
        ended = threading.Event()

        def take(events: list[NodeEvent]) -> None:
            meanwhile()
            self.seen.extend(events)

        reader = KmsgReader(
            self.log, boot, self.state, lambda pci, uuid: 0, take, clocks=lambda: self.clocks, caught_up=ended.set
        )
        thread = threading.Thread(target=reader.run, daemon=True)
        thread.start()
        try:
            yield
            wait_until(lambda: len(self.seen) >= wait_for and ended.is_set(), "the lines")
        finally:
            reader.stop()
            thread.join()

    def wrong_by_s(self) -> dict[str, float]:
        return {event.code: (event.ts_ms - self.written[event.message]) / 1000 for event in self.seen}


def line(code: int) -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1"


def close_to_zero(errors: dict[str, float]) -> bool:
    return all(abs(error) <= 3 for error in errors.values())

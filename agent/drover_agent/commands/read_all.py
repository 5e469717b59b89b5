"""Every source of this node, read a few times: what `once`, `check` and `sources` show.

A source that does not answer is named and left behind, so that each of them ends within LIMIT_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drover_agent.clock import SystemClock
from drover_agent.config import AgentConfig
from drover_agent.polled_sources import POLLED, Off
from drover_agent.sampling.abandonable_worker import Guard, ReadOutcome, Worker
from drover_agent.sources.base import Reading, Source
from drover_agent.sources.gpus import Gpus

LIMIT_S = 9.0  # for all readings together
READ_LIMIT_S = 3.0  # for one
READINGS = 2
BETWEEN_S = 1.0  # rates need two readings
# They wait for others to report to them: opening their socket would keep a running agent from it.
PASSIVE = frozenset({"steps"})


@dataclass(slots=True)
class SourceReading:
    """What one source gave.

    Attributes:
        slot: the GPU that it reads, if it reads one.
        seconds, cpu_s: of each reading that returned: how long it took, and how much of that on a CPU.
        error: why the last reading failed, or why there is none; "" otherwise.
        hung: a reading has not returned.
        off: the settings turn it off.
    """

    name: str
    interval_s: float
    slot: int | None = None
    readings: list[Reading] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    error: str = ""
    hung: bool = False
    off: bool = False


class _Looked:
    """A source behind its guard, with what it gave."""

    def __init__(self, source: Source) -> None:
        self.name, self.interval_s = source.name, source.interval_s
        self.look = SourceReading(source.name, source.interval_s, getattr(source, "slot", None))
        self._source = source
        self.guard = Guard(self)

    def read(self, now_ms: int) -> Reading:
        began = time.thread_time()
        reading = self._source.read(now_ms)
        self.look.cpu_s.append(time.thread_time() - began)
        return reading

    def close(self) -> None:
        self._source.close()

    async def take(self, limit_s: float) -> None:
        if self.guard.busy:
            return
        outcome = await self.guard.read(SystemClock().now_ms(), limit_s)
        if outcome is None:
            self.look.hung, self.look.error = True, f"did not answer within {limit_s:g} s"
            return
        self.look.seconds.append(outcome.seconds)
        if outcome.reading is None:
            self.look.error = f"{type(outcome.error).__name__}: {outcome.error}"
        else:
            self.look.error = ""
            self.look.readings.append(outcome.reading)


async def look(config: AgentConfig) -> list[SourceReading]:
    """Read all sources that these settings turn on, but the PASSIVE ones.

    Raises:
        ImportError: simulated hardware is asked for, and the extra `simulation` is not installed.
    """
    deadline = time.monotonic() + LIMIT_S

    def limit_s() -> float:
        return min(READ_LIMIT_S, max(deadline - time.monotonic(), 0.1))

    gpus = Gpus()
    made = [
        make(config, gpus)
        for name, (hardware, make) in POLLED.items()
        if config.hardware in hardware and name not in PASSIVE
    ]
    others = [_Looked(source) for source in made if not isinstance(source, Off)]
    found = [SourceReading(source.name, source.interval_s, off=True) for source in made if isinstance(source, Off)]
    nvml = _Nvml(config.node_name, gpus) if config.hardware in ("auto", "nvml") else None
    devices: list[_Looked] = []
    if nvml:
        devices = await nvml.open(limit_s())
        found.append(nvml.look)
    for number in range(READINGS):
        if number:
            await asyncio.sleep(BETWEEN_S)
        for group in (devices, others):  # the others may ask who the GPUs are
            await asyncio.gather(*(one.take(limit_s()) for one in group))
    for one in others:
        one.guard.close()
    if nvml and not any(device.look.hung for device in devices):
        await nvml.close(limit_s())
    return found + [one.look for one in (*devices, *others)]


class _Nvml:
    """NVML's own opening and closing, which may hang like every call into the driver."""

    def __init__(self, node: str, gpus: Gpus) -> None:
        from drover_agent.sources.nvml.source import NvmlSource  # a node without GPUs does without ctypes' tables

        self._nvml = NvmlSource(node, gpus)
        self._worker = Worker("nvml:open")
        self.look = SourceReading(self._nvml.name, self._nvml.interval_s)

    async def open(self, limit_s: float) -> list[_Looked]:
        """The GPUs, to be read each by itself."""
        outcome = await self._within(limit_s, lambda: self._nvml.open(SystemClock().now_ms()))
        if outcome is None:
            self.look.hung, self.look.error = True, f"opening NVML did not return within {limit_s:g} s"
            return []
        self.look.seconds.append(outcome.seconds)
        if outcome.reading is None:
            self.look.error = f"{type(outcome.error).__name__}: {outcome.error}"
        else:
            self.look.readings.append(outcome.reading)
        return [_Looked(device) for device in self._nvml.devices]

    async def close(self, limit_s: float) -> None:
        if not self.look.hung:
            await self._within(limit_s, self._close)

    def _close(self) -> Reading:
        self._nvml.close()
        return Reading()

    async def _within(self, limit_s: float, call: Callable[[], Reading]) -> ReadOutcome | None:
        running = self._worker.submit(call)
        done, _ = await asyncio.wait([running], timeout=limit_s)
        return running.result() if done else None

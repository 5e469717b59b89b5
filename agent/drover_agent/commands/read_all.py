"""Read every source of this node twice, for the commands `once`, `check` and `sources`.

A source that does not answer is named and left behind, so that each command ends within LIMIT_S.
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
# Sources that wait for others to report: opening their socket would take it from a running agent.
PASSIVE = frozenset({"steps"})


@dataclass(slots=True)
class SourceReading:
    """What one source gave.

    Attributes:
        slot: the GPU that it reads, if it reads one.
        seconds, cpu_s: of each reading that returned: its duration, and the part of it on a CPU.
        error: why the last reading failed or did not take place; "" otherwise.
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


class _GuardedSource:
    """A source that is read in its own thread, and what it gave."""

    def __init__(self, source: Source) -> None:
        self.name, self.interval_s = source.name, source.interval_s
        self.result = SourceReading(source.name, source.interval_s, getattr(source, "slot", None))
        self._source = source
        self.guard = Guard(self)

    def read(self, now_ms: int) -> Reading:
        began = time.thread_time()
        reading = self._source.read(now_ms)
        self.result.cpu_s.append(time.thread_time() - began)
        return reading

    def close(self) -> None:
        self._source.close()

    async def take(self, limit_s: float) -> None:
        if self.guard.busy:
            return
        outcome = await self.guard.read(SystemClock().now_ms(), limit_s)
        if outcome is None:
            self.result.hung, self.result.error = True, f"did not answer within {limit_s:g} s"
            return
        self.result.seconds.append(outcome.seconds)
        if outcome.reading is None:
            self.result.error = f"{type(outcome.error).__name__}: {outcome.error}"
        else:
            self.result.error = ""
            self.result.readings.append(outcome.reading)


async def read_all_sources(config: AgentConfig) -> list[SourceReading]:
    """Read all sources that these settings turn on, except the PASSIVE ones.

    Raises:
        SettingsError: hardware is simulated, and the simulator is not installed.
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
    others = [_GuardedSource(source) for source in made if not isinstance(source, Off)]
    found = [SourceReading(source.name, source.interval_s, off=True) for source in made if isinstance(source, Off)]
    nvml = _Nvml(config.node_name, gpus) if config.hardware in ("auto", "nvml") else None
    devices: list[_GuardedSource] = []
    if nvml:
        devices = await nvml.open(limit_s())
        found.append(nvml.result)
    for number in range(READINGS):
        if number:
            await asyncio.sleep(BETWEEN_S)
        for group in (devices, others):  # the others need to know the GPUs
            await asyncio.gather(*(one.take(limit_s()) for one in group))
    for one in others:
        one.guard.close()
    if nvml and not any(device.result.hung for device in devices):
        await nvml.close(limit_s())
    return found + [one.result for one in (*devices, *others)]


class _Nvml:
    """Opens and closes NVML, which may hang like every call into the driver."""

    def __init__(self, node: str, gpus: Gpus) -> None:
        from drover_agent.sources.nvml.source import NvmlSource  # not loaded on a node without GPUs

        self._nvml = NvmlSource(node, gpus)
        self._worker = Worker("nvml:open")
        self.result = SourceReading(self._nvml.name, self._nvml.interval_s)

    async def open(self, limit_s: float) -> list[_GuardedSource]:
        """Open NVML and return its GPUs, each a source."""
        outcome = await self._within(limit_s, lambda: self._nvml.open(SystemClock().now_ms()))
        if outcome is None:
            self.result.hung, self.result.error = True, f"opening NVML did not return within {limit_s:g} s"
            return []
        self.result.seconds.append(outcome.seconds)
        if outcome.reading is None:
            self.result.error = f"{type(outcome.error).__name__}: {outcome.error}"
        else:
            self.result.readings.append(outcome.reading)
        return [_GuardedSource(device) for device in self._nvml.devices]

    async def close(self, limit_s: float) -> None:
        if not self.result.hung:
            await self._within(limit_s, self._close)

    def _close(self) -> Reading:
        self._nvml.close()
        return Reading()

    async def _within(self, limit_s: float, call: Callable[[], Reading]) -> ReadOutcome | None:
        running = self._worker.submit(call)
        done, _ = await asyncio.wait([running], timeout=limit_s)
        return running.result() if done else None

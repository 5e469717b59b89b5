"""Build and run the agent of one real node: its sources, the watchers of XIDs and the kernel log, and what sends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.polled_sources import build_sources
from drover_agent.runtime.agent import Agent, Readers, boot_id
from drover_agent.runtime.gate_file import GateFile
from drover_agent.runtime.kernel_log import KernelLogWatcher
from drover_agent.runtime.systemd_notify import Notifier, SystemdReporter, run_reporting
from drover_agent.sampling.scheduler import Sampler
from drover_agent.sources.base import Reading
from drover_agent.sources.gpus import Gpus

if TYPE_CHECKING:
    from drover_agent.page.server import PageServer
    from drover_agent.runtime.nvml import NvmlRuntime

log = logging.getLogger(__name__)

NO_GPU_WANTED = "hardware is set to none in the agent's settings"
STARTED_S = 10.0  # by then sources have been read and a collector is connected
NEW_OBJECTS = 5_000  # until the garbage collector runs: what a tick creates is freed without it


class NodeRuntime:
    """Everything that `drover-agent run` does on one node.

    Raises (at construction):
        SpoolError, SettingsError: see `Agent` and `build_sources`.
    """

    def __init__(self, config: AgentConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock: Clock = clock or SystemClock()
        self.gpus = Gpus()
        sources = build_sources(config, self.gpus)
        self._page = self._make_page()
        gate = GateFile(config.gate, config.node_name, boot_id(Path(config.proc_root))) if config.gate.file else None
        watch = None if self._page is None else self._page.values.take
        self.agent = Agent(config, config.node_name, clock=self._clock, readers=Readers(gate, watch))
        if gate is not None:
            gate.write()
        self._kernel_log: KernelLogWatcher | None = None
        if config.kmsg_enabled and config.hardware != "simulated":
            self._kernel_log = KernelLogWatcher(config, self.agent, self.gpus, self._clock)
        self.sampler = Sampler(
            self.agent.accept,
            config.interval_s,
            self._clock,
            node=config.node_name,
            unscheduled={"kmsg": self._kernel_log.outcome} if self._kernel_log else None,
        )
        for source in sources:
            self.sampler.add(source)
        self._nvml: NvmlRuntime | None = None
        if config.hardware in ("auto", "nvml"):
            from drover_agent.runtime.nvml import NvmlRuntime  # nvidia-ml-py, only where GPUs are read

            self._nvml = NvmlRuntime(self.agent, self.sampler, self.gpus, self._clock, self.agent.spool.folder)

    def _make_page(self) -> PageServer | None:
        if not self.config.page.listen:
            return None
        from drover_agent.page.server import PageServer  # 2 MB, only where it is on

        return PageServer(self.config.page, self.config.node_name, self._clock)

    @property
    def driver_closed(self) -> bool:
        """Whether NVML is not open: there is no driver, it does not work, or an operator has it released."""
        return self._nvml is not None and not self._nvml.nvml.session.open

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            RestartNeeded: only a new process can use the driver again (`restart.restart_in_place`).
        """
        jobs: list[Callable[[], Awaitable[None]]] = [self.agent.run, self.sampler.run]
        if self._nvml:
            jobs += [self._nvml.run, self._nvml.watch_xids]
        elif self.config.hardware == "none":
            self.agent.accept(self._clock.now_ms(), Reading(inventory={"no_gpu_reason": NO_GPU_WANTED}))
        if self._kernel_log:
            jobs.append(self._read_kernel_log)
        tasks = [asyncio.ensure_future(job()) for job in jobs]
        try:
            await _wait_for_failure(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.sampler.close()
            if self._page is not None:
                self._page.close()

    async def _read_kernel_log(self) -> None:
        assert self._kernel_log is not None
        await self._kernel_log.run(self._nvml.gpus_known if self._nvml else lambda: True)

    def status(self) -> str:
        """Return one line for `systemctl status`: what is read, and whether it reaches a collector."""
        count = len(self.gpus.all())
        waiting, size = self.agent.spool.pending()
        gpus = f"{count or 'no'} GPU{'' if count == 1 else 's'}"
        if count and self.driver_closed:
            gpus += ", none of them read: NVML is not open"
        to = f"sending to {self.agent.connected_to}" if self.agent.connected_to else "no collector"
        parts = [gpus, to, f"{waiting} messages ({size / 1e6:.1f} MB) wait"]
        if self.agent.clock_offset_s is not None:
            parts.append(f"clock {self.agent.clock_offset_s:+.3f} s from the collector's")
        if hung := [name for name, stats in self.sampler.stats.items() if stats.hung]:
            parts.append(f"no answer from {', '.join(hung)}")
        return "; ".join(parts)


async def _wait_for_failure(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Raise what ends one of the tasks: an agent without one of its parts would look healthy."""
    running = set(tasks)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def serve(config: AgentConfig) -> int:
    """Run until SIGTERM or SIGINT, and report to systemd if it started this process. Return the exit code."""
    node = NodeRuntime(config)
    reporter = SystemdReporter(Notifier(), SystemClock(), config.interval_s, lambda: node.sampler.ticks, node.status)
    work = asyncio.create_task(node.run())

    def stop() -> None:
        reporter.report_stopping()
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.call_later(STARTED_S, keep_what_lives)
    try:
        await run_reporting(reporter, work)
    except asyncio.CancelledError:
        log.info("Stopped.")
    return 0


def keep_what_lives() -> None:
    """Free what only the start needed, and exclude from garbage collection what lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc only
        trim(0)

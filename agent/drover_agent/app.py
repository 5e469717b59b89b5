"""One real node: its sources, the watchers of XIDs and of the kernel log, and the agent that tells what they give."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.polled_sources import polled
from drover_agent.runtime.agent import Agent, boot_id
from drover_agent.sampling.scheduled_source import ANSWERED, FAILED
from drover_agent.sampling.scheduler import Sampler
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.kmsg.reader import KmsgReader

if TYPE_CHECKING:
    from drover_agent.runtime.nvml import NvmlRuntime

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between attempts to reach a kernel log that is not there
IDENTITY_LIMIT_S = 5.0  # the kernel log waits this long for the GPUs' addresses, so that its lines find their slots
DELIVER_LOOK_S = 0.5  # how often a reader that waits for the agent looks whether it ends
NO_GPU_WANTED = "hardware is set to none in the agent's settings"


class NodeRuntime:
    """Everything that `drover-agent run` does on one node.

    Raises (at construction):
        SpoolError, ImportError: see Agent and `sources.polled`.
    """

    def __init__(self, config: AgentConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock: Clock = clock or SystemClock()
        self.gpus = Gpus()
        sources = polled(config, self.gpus)
        self.agent = Agent(config, config.node_name, clock=self._clock)
        self.sampler = Sampler(self.agent.accept, config.interval_s, self._clock, node=config.node_name)
        for source in sources:
            self.sampler.add(source)
        self._nvml: NvmlRuntime | None = None
        if config.hardware in ("auto", "nvml"):
            from drover_agent.runtime.nvml import NvmlRuntime  # nvidia-ml-py, only where GPUs are read

            self._nvml = NvmlRuntime(self.agent, self.sampler, self.gpus, self._clock, self.agent.spool.folder)
        self._kmsg: KmsgReader | None = None
        self._log_trouble: str | None = None  # why the kernel log cannot be read, "" for nothing, None: not tried yet
        if self._reads_log:
            self.sampler.beside["kmsg"] = self._log_outcome

    @property
    def _reads_log(self) -> bool:
        return self.config.kmsg_enabled and self.config.hardware != "simulated"

    def _log_outcome(self) -> int | None:
        """Of the kernel log now; None before it was tried."""
        if self._log_trouble is None:
            return None
        return FAILED if self._log_trouble else ANSWERED

    @property
    def driver_closed(self) -> bool:
        """Whether NVML is not open: there is no driver, it does not work, or an operator has it released."""
        return self._nvml is not None and not self._nvml.nvml.session.open

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            RestartNeeded: only a new process can use the driver again (`restart.restart_in_place`).
        """
        jobs = [self.agent.run, self.sampler.run]
        if self._nvml:
            jobs += [self._nvml.tend, self._nvml.watch_xids]
        elif self.config.hardware == "none":
            self.agent.accept(self._clock.now_ms(), Reading(inventory={"no_gpu_reason": NO_GPU_WANTED}))
        if self._reads_log:
            jobs.append(self._run_kmsg)
        tasks = [asyncio.create_task(job()) for job in jobs]
        try:
            await self._watch(tasks)
        finally:
            if self._kmsg:
                self._kmsg.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.sampler.close()

    async def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until one of them fails; an agent that goes on without a part of itself would look healthy."""
        running = set(tasks)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _run_kmsg(self) -> None:
        """Read the kernel log in a thread of its own; without it the agent goes on, says so and tries again."""
        await self._gpus_known()
        loop = asyncio.get_running_loop()
        path = Path(self.config.kmsg_path)
        reader = KmsgReader(
            path,
            boot_id(Path(self.config.proc_root)),
            self.agent.spool.folder / "kmsg.json",
            self.slot_of,
            lambda events: self._hand_over(loop, events),
            accept_user_facility=self.config.kmsg_accept_user_facility,
            caught_up=lambda: loop.call_soon_threadsafe(self._tell_log, path, ""),
        )
        self._kmsg = reader
        while not reader.stopped:
            ended: asyncio.Future[Exception | None] = loop.create_future()
            threading.Thread(target=_read_log, args=(reader, loop, ended), name="kmsg", daemon=True).start()
            if error := await ended:
                text = _why(error)
                if text != self._log_trouble:
                    log.error("%s: %s; no events come from the kernel log", path, text, exc_info=_unforeseen(error))
                self._tell_log(path, text)
                await self._clock.sleep(RETRY_S)

    def _tell_log(self, path: Path, trouble: str) -> None:
        """Whether the kernel log can be read, as an event when it changes, and for the inventory."""
        if trouble != self._log_trouble:
            if trouble:
                self.agent.tell("kmsg_unreadable", f"{path}: {trouble}")
            elif self._log_trouble:
                self.agent.tell("kmsg_back", f"{path} can be read again")
        self._log_trouble = trouble
        state = f"not read: {trouble}" if trouble else "read"
        self.agent.accept(self._clock.now_ms(), Reading(inventory={"host.kernel_log": state}))

    def _hand_over(self, loop: asyncio.AbstractEventLoop, events: list[NodeEvent]) -> None:
        """Give events of the reader's thread to the agent and wait, so that the reader's place is never ahead of the
        spool: however long, for the loop stands still when the machine was paused or its disk hangs."""
        accepted: Future[None] = Future()

        def accept() -> None:
            try:
                self.agent.accept(self._clock.now_ms(), Reading(events=events))
                self.agent.spool.when_kept(lambda: accepted.set_result(None))
            except Exception as error:  # noqa: BLE001  # the reader's thread tells it
                accepted.set_exception(error)

        loop.call_soon_threadsafe(accept)
        while self._kmsg and not self._kmsg.stopped:
            if accepted in wait([accepted], DELIVER_LOOK_S).done:
                return accepted.result()
        raise InterruptedError("the agent ends")

    async def _gpus_known(self) -> None:
        """Return when every GPU has told its address, or after IDENTITY_LIMIT_S."""
        if self._nvml is None:
            return
        until = self._clock.monotonic() + IDENTITY_LIMIT_S
        while self._clock.monotonic() < until and not self._nvml.known():
            await self._clock.sleep(0.05)

    def slot_of(self, pci: str, uuid: str) -> int | None:
        """The GPU at a PCI address (as `normal_pci` writes it) or with a UUID; None for any other device."""
        found = self.gpus.find(pci=pci, uuid=uuid)
        return found.gpu if found else None


def _read_log(reader: KmsgReader, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[Exception | None]) -> None:
    """The work of the kernel log's thread; how it ended is the result of `ended`."""
    error: Exception | None = None
    try:
        reader.run()
    except Exception as caught:  # noqa: BLE001  # told by who waits for `ended`
        error = caught

    def end() -> None:
        if not ended.done():
            ended.set_result(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
        loop.call_soon_threadsafe(end)


def _why(error: Exception) -> str:
    """Why the kernel log cannot be read, and what helps."""
    text = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    if isinstance(error, PermissionError):
        return f"{text}; give the agent CAP_SYSLOG"
    if isinstance(error, FileNotFoundError):
        return f"{text}; give the container the host's /dev/kmsg, or set kmsg_enabled = false"
    return text


def _unforeseen(error: Exception) -> Exception | None:
    """What deserves a traceback."""
    return None if isinstance(error, OSError) else error

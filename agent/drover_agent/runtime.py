"""One real node: its sources, the watchers of XIDs and of the kernel log, and the agent that tells what they give."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from drover_agent.agent import Agent, boot_id
from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.sampler import READ_LIMIT_S, Sampler
from drover_agent.sources import polled
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.kmsg import KmsgReader
from drover_agent.sources.nvml import NvmlSource
from drover_agent.watchdog import Outcome, Worker

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between attempts to reach a driver or a kernel log that is not there
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
        self.sampler = Sampler(self.agent.accept, config.interval_s, self._clock)
        for source in sources:
            self.sampler.add(source)
        self._nvml = NvmlSource(config.node_name, self.gpus) if config.hardware in ("auto", "nvml") else None
        self._no_gpu_reason = ""
        self._kmsg: KmsgReader | None = None
        self._log_trouble: str | None = None  # why the kernel log cannot be read, "" for nothing, None: not tried yet

    async def run(self) -> None:
        """Until cancelled."""
        jobs = [self.agent.run, self.sampler.run]
        if self._nvml:
            jobs.append(self._run_nvml)
        elif self.config.hardware == "none":
            self.agent.accept(self._clock.now_ms(), Reading(inventory={"no_gpu_reason": NO_GPU_WANTED}))
        if self.config.kmsg_enabled and self.config.hardware != "simulated":
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

    async def _run_nvml(self) -> None:
        """Open NVML, again and again until there is a GPU; then read its devices and wait for XIDs."""
        assert self._nvml is not None
        worker = Worker("nvml:open")
        nvml = self._nvml
        while not nvml.devices:
            now_ms = self._clock.now_ms()
            outcome = await self._watched(worker.submit(partial(nvml.open, now_ms)))
            if outcome.reading is not None:
                self._tell_open(now_ms, outcome.reading)
            else:
                log.error("NVML could not be opened", exc_info=outcome.error)
            if not nvml.devices:
                await self._clock.sleep(RETRY_S)
        for device in nvml.devices:
            self.sampler.add(device)
        await self._watch_xids(Worker("nvml:xids"))

    async def _watched(self, opening: asyncio.Future[Outcome]) -> Outcome:
        """Wait for NVML to open, and tell when it does not return."""
        done, _ = await asyncio.wait([opening], timeout=READ_LIMIT_S)
        if not done:
            self.agent.tell("driver_hung", f"opening NVML did not return within {READ_LIMIT_S:g} s")
            await asyncio.wait([opening])
            self.agent.tell("driver_back", "opening NVML returned")
        return opening.result()

    def _tell_open(self, now_ms: int, reading: Reading) -> None:
        reason = reading.inventory.get("no_gpu_reason", "")
        if reason and reason != self._no_gpu_reason and not any(e.code == "driver_missing" for e in reading.events):
            self.agent.tell("driver_missing", reason)
        self._no_gpu_reason = reason or self._no_gpu_reason
        self.agent.accept(now_ms, reading)

    async def _watch_xids(self, worker: Worker) -> None:
        """The watcher's read waits by itself; a hang in it is one of the driver, which the devices' reads tell."""
        assert self._nvml is not None
        while (watcher := self._nvml.xids) is not None:
            outcome = await worker.submit(partial(watcher.read, self._clock.now_ms()))
            if outcome.reading is None:
                log.error("waiting for XIDs failed", exc_info=outcome.error)
                await self._clock.sleep(1.0)
            elif outcome.reading.events:
                self.agent.accept(self._clock.now_ms(), outcome.reading)

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
                text = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
                if isinstance(error, PermissionError):
                    text += "; give the agent CAP_SYSLOG"
                elif isinstance(error, FileNotFoundError):
                    text += "; give the container the host's /dev/kmsg, or set kmsg_enabled = false"
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
                accepted.set_result(None)
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
        while self._clock.monotonic() < until and not self._no_gpu_reason:
            if self._nvml.devices and all(device.entity.pci for device in self._nvml.devices):
                return
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


def _unforeseen(error: Exception) -> Exception | None:
    """What deserves a traceback."""
    return None if isinstance(error, OSError) else error

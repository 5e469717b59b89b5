"""Keep NVML open while there is a driver, release it at an operator's request, and wait for XIDs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drover_agent.clock import Clock
from drover_agent.runtime.agent import Agent
from drover_agent.runtime.driver_release import ReleaseRequests, Request
from drover_agent.runtime.restart import RestartNeeded, restarted_for
from drover_agent.sampling.abandonable_worker import ReadOutcome, Worker, measured
from drover_agent.sampling.scheduler import READ_LIMIT_S, Sampler
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.source import NvmlSource
from drover_core.times import iso

log = logging.getLogger(__name__)

REQUEST_MS = 3_000  # between two reads of release requests: each wakes a thread and the loop
REQUEST_LIMIT_S = 0.2  # to wait for such a read; a slower one counts when it is done
XIDS_RETRY_S = 1.0  # after an unexpected error


class NvmlRuntime:
    """NVML of one node. Run `run` and `watch_xids` concurrently."""

    def __init__(self, agent: Agent, sampler: Sampler, gpus: Gpus, clock: Clock, folder: Path) -> None:
        """`folder`: where requests to release the driver are read."""
        self.nvml = NvmlSource(agent.node, gpus)
        self._agent, self._sampler, self._clock = agent, sampler, clock
        self._requests = ReleaseRequests(folder)
        self._sampled = 0
        self._restarted_in_vain = ""  # the reason why this process was restarted without success

    async def run(self) -> None:
        """Keep NVML open until cancelled.

        Raises:
            RestartNeeded: this process can no longer use the driver.
        """
        worker = Worker("nvml:open")
        disk = Worker("nvml:requests")  # the spool's folder may be on a disk that hangs (decision 18)
        reading: asyncio.Future[Request | None] | None = None
        request: Request | None = None
        last_read = -1
        while True:
            now_ms = self._clock.now_ms()
            if reading is None and (request or now_ms // REQUEST_MS != last_read):
                last_read = now_ms // REQUEST_MS
                reading = disk.start(partial(self._requests.read, now_ms))
            if reading is not None and await self._clock.within(reading, REQUEST_LIMIT_S):
                found, reading = reading.result(), None
                if found != request:
                    request = found
                    self.nvml.release(request.until_ms if request else 0)
            if self.nvml.due(now_ms):
                await self._open_or_close(worker, now_ms)
            if request and reading is None and (answer := self._answer(request)):
                disk.start(answer)
            await self._clock.second()

    async def _open_or_close(self, worker: Worker, now_ms: int) -> None:
        outcome = await self._wait_for_driver(worker.submit(partial(self.nvml.tend, now_ms)))
        if outcome.reading is not None:
            self._agent.accept(now_ms, outcome.reading)
        else:
            log.error("Opening NVML failed.", exc_info=outcome.error)
        for device in self.nvml.devices[self._sampled :]:
            self._sampler.add(device)
        self._sampled = len(self.nvml.devices)
        if self._restart_helps():
            raise RestartNeeded(self.nvml.restart)

    async def _wait_for_driver(self, opening: asyncio.Future[ReadOutcome]) -> ReadOutcome:
        """Wait for NVML to open or close, and report a call that does not return."""
        if not await self._clock.within(opening, READ_LIMIT_S):
            self._agent.report("driver_hung", f"opening or closing NVML did not return within {READ_LIMIT_S:g} s")
            await asyncio.wait([opening])
            self._agent.report("driver_back", "opening or closing NVML returned")
            reading = opening.result().reading
            if self.nvml.reason and reading is not None and not reading.events:
                self._agent.report("driver_missing", self.nvml.reason)  # the call has returned, and there is no driver
        return opening.result()

    def _restart_helps(self) -> bool:
        """Return True once for each reason: an agent that restarts in a loop reports nothing of its node."""
        if not self.nvml.restart or self.nvml.restart == self._restarted_in_vain:
            return False
        if not restarted_for(self.nvml.restart):
            return True
        self._restarted_in_vain = self.nvml.restart
        log.error("A restart did not help: %s", self.nvml.restart)
        return False

    def _answer(self, request: Request) -> Callable[[], None] | None:
        """Return the call that answers a request, None while the driver is being closed."""
        if not self.nvml.session.open:
            text = f"the agent has released the NVIDIA driver until {iso(request.until_ms)}"
            return partial(self._requests.answer, request, released=True, text=text)
        if self.nvml.stuck:
            return partial(self._requests.answer, request, released=False, text=self.nvml.stuck)
        return None

    async def watch_xids(self) -> None:
        """Wait for XIDs in a thread, which wakes the event loop only if there are any.

        A hang in that thread is one of the driver, which the reads of the devices report.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[ReadOutcome] = asyncio.Queue()
        taken, ended = threading.Event(), threading.Event()

        def watch() -> None:
            while not ended.is_set():
                outcome = measured(partial(self.nvml.xids.read, self._clock.now_ms()))
                if outcome.reading is not None and not outcome.reading.events:
                    continue
                taken.clear()
                if ended.is_set():
                    return
                try:
                    loop.call_soon_threadsafe(arrived.put_nowait, outcome)
                except RuntimeError:  # the loop is closed: the agent has ended
                    return
                taken.wait()

        threading.Thread(target=watch, name="nvml:xids", daemon=True).start()
        try:
            while True:
                outcome = await arrived.get()
                if outcome.reading is not None:
                    self._agent.accept(self._clock.now_ms(), outcome.reading)
                else:
                    log.error("Waiting for XIDs failed.", exc_info=outcome.error)
                    await self._clock.sleep(XIDS_RETRY_S)
                taken.set()
        finally:
            ended.set()
            taken.set()

    def gpus_known(self) -> bool:
        """Return whether the address of every GPU is known, or there is no GPU."""
        if self.nvml.reason:
            return True
        return bool(self.nvml.devices) and all(device.entity.pci for device in self.nvml.devices)

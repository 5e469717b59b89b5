"""Keeps NVML open while there is a driver, lets go of it when an operator asks, and waits for XIDs."""

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

LOOK_MS = 3_000  # between looks for a request: it wakes a thread and the loop
LOOK_LIMIT_S = 0.2  # that a look for a request is waited for; a slower one counts when it is done
XIDS_AGAIN_S = 1.0  # after a failure that nobody foresaw


class NvmlRuntime:
    """NVML's part of a node. Run `tend` and `watch_xids` side by side."""

    def __init__(self, agent: Agent, sampler: Sampler, gpus: Gpus, clock: Clock, folder: Path) -> None:
        """`folder`: where requests to release the driver are looked for."""
        self.nvml = NvmlSource(agent.node, gpus)
        self._agent, self._sampler, self._clock = agent, sampler, clock
        self._requests = ReleaseRequests(folder)
        self._sampled = 0
        self._useless = ""  # why this process was started anew, in vain

    async def tend(self) -> None:
        """Until cancelled.

        Raises:
            RestartNeeded: this process can use the driver no more.
        """
        worker = Worker("nvml:open")
        disk = Worker("nvml:requests")  # the spool's folder may be on a disk that hangs (decision 18)
        looking: asyncio.Future[Request | None] | None = None
        asked: Request | None = None
        looked = -1
        while True:
            now_ms = self._clock.now_ms()
            if looking is None and (asked or now_ms // LOOK_MS != looked):
                looked = now_ms // LOOK_MS
                looking = disk.start(partial(self._requests.wanted, now_ms))
            if looking is not None and await self._clock.within(looking, LOOK_LIMIT_S):
                request, looking = looking.result(), None
                if request != asked:
                    asked = request
                    self.nvml.release(request.until_ms if request else 0)
            if self.nvml.due(now_ms):
                outcome = await self._watched(worker.submit(partial(self.nvml.tend, now_ms)))
                if outcome.reading is not None:
                    self._agent.accept(now_ms, outcome.reading)
                else:
                    log.error("NVML could not be opened", exc_info=outcome.error)
                for device in self.nvml.devices[self._sampled :]:
                    self._sampler.add(device)
                self._sampled = len(self.nvml.devices)
                if self._is_new_start_of_use():
                    raise RestartNeeded(self.nvml.restart)
            if asked and looking is None and (answer := self._answer(asked)):
                disk.start(answer)
            await self._clock.second()

    async def _watched(self, opening: asyncio.Future[ReadOutcome]) -> ReadOutcome:
        """Wait for NVML to open or close, and tell when it does not return."""
        if not await self._clock.within(opening, READ_LIMIT_S):
            self._agent.tell("driver_hung", f"opening or closing NVML did not return within {READ_LIMIT_S:g} s")
            await asyncio.wait([opening])
            self._agent.tell("driver_back", "opening or closing NVML returned")
            reading = opening.result().reading
            if self.nvml.reason and reading is not None and not reading.events:
                self._agent.tell("driver_missing", self.nvml.reason)  # as before: the call is back, the driver is not
        return opening.result()

    def _is_new_start_of_use(self) -> bool:
        """Once for each reason: an agent that starts again and again tells nothing of its node."""
        if not self.nvml.restart or self.nvml.restart == self._useless:
            return False
        if not restarted_for(self.nvml.restart):
            return True
        self._useless = self.nvml.restart
        log.error("a new start changed nothing: %s", self.nvml.restart)
        return False

    def _answer(self, request: Request) -> Callable[[], None] | None:
        """What tells the operator how it stands."""
        if not self.nvml.session.open:
            text = f"the agent holds nothing of the NVIDIA driver until {iso(request.until_ms)}"
            return partial(self._requests.answer, request, released=True, text=text)
        if self.nvml.stuck:
            return partial(self._requests.answer, request, released=False, text=self.nvml.stuck)
        return None

    async def watch_xids(self) -> None:
        """In a thread of its own, which wakes the event loop for XIDs only. A hang there is one of the driver, which
        the devices' reads tell."""
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
                    log.error("waiting for XIDs failed", exc_info=outcome.error)
                    await self._clock.sleep(XIDS_AGAIN_S)
                taken.set()
        finally:
            ended.set()
            taken.set()

    def known(self) -> bool:
        """Whether every GPU has told its address, or there is none."""
        if self.nvml.reason:
            return True
        return bool(self.nvml.devices) and all(device.entity.pci for device in self.nvml.devices)

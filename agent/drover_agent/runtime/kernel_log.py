"""Read the kernel log in a thread, and pass its events to the agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from drover_agent.clock import Clock
from drover_agent.config import AgentConfig
from drover_agent.runtime.agent import Agent, boot_id
from drover_agent.sampling.scheduled_source import ANSWERED, FAILED
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.kmsg.reader import KmsgReader

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between tries to open a kernel log that cannot be read
GPUS_LIMIT_S = 5.0  # to wait for the GPUs' addresses, so that the log's lines find their slots
STOP_CHECK_S = 0.5  # how often the reader's thread checks for the end while it waits for the agent


class KernelLogWatcher:
    """The kernel log of one node. If it cannot be read, the agent runs without, reports that, and tries again."""

    def __init__(self, config: AgentConfig, agent: Agent, gpus: Gpus, clock: Clock) -> None:
        self._config = config
        self._agent = agent
        self._gpus = gpus
        self._clock = clock
        self._reader: KmsgReader | None = None
        self._trouble: str | None = None  # why it cannot be read; "": it is read; None: not tried yet

    def outcome(self) -> int | None:
        """Return ANSWERED or FAILED, None before the first try."""
        if self._trouble is None:
            return None
        return FAILED if self._trouble else ANSWERED

    async def run(self, gpus_known: Callable[[], bool]) -> None:
        """Read until cancelled."""
        await self._wait_for_gpus(gpus_known)
        loop = asyncio.get_running_loop()
        path = Path(self._config.kmsg_path)
        reader = self._reader = KmsgReader(
            path,
            boot_id(Path(self._config.proc_root)),
            self._agent.spool.folder / "kmsg.json",
            self.slot_of,
            lambda events: self._deliver(loop, events),
            accept_user_facility=self._config.kmsg_accept_user_facility,
            caught_up=lambda: loop.call_soon_threadsafe(self._report, path, ""),
        )
        try:
            while not reader.stopped:
                ended: asyncio.Future[Exception | None] = loop.create_future()
                threading.Thread(target=_read, args=(reader, loop, ended), name="kmsg", daemon=True).start()
                if error := await ended:
                    text = describe_error(error)
                    if text != self._trouble:
                        traceback = None if isinstance(error, OSError) else error
                        log.error("%s: %s. No events are read from the kernel log.", path, text, exc_info=traceback)
                    self._report(path, text)
                    await self._clock.sleep(RETRY_S)
        finally:
            reader.stop()

    def slot_of(self, pci: str, uuid: str) -> int | None:
        """Return the slot of the GPU at a PCI address (as `normal_pci` writes it) or with a UUID; None: not a GPU."""
        found = self._gpus.find(pci=pci, uuid=uuid)
        return found.gpu if found else None

    def _report(self, path: Path, trouble: str) -> None:
        """Store whether the log can be read: an event if that has changed, and a line of the inventory."""
        if trouble != self._trouble:
            if trouble:
                self._agent.report("kmsg_unreadable", f"{path}: {trouble}")
            elif self._trouble:
                self._agent.report("kmsg_back", f"{path} can be read again")
        self._trouble = trouble
        state = f"not read: {trouble}" if trouble else "read"
        self._agent.accept(self._clock.now_ms(), Reading(inventory={"host.kernel_log": state}))

    def _deliver(self, loop: asyncio.AbstractEventLoop, events: list[NodeEvent]) -> None:
        """Pass events from the reader's thread to the agent, and wait until they are stored.

        So the reader's position is never ahead of the spool. The wait has no limit: the loop may stand still while the
        machine is paused or its disk hangs.

        Raises:
            InterruptedError: the agent stops.
        """
        stored: Future[None] = Future()

        def accept() -> None:
            try:
                self._agent.accept(self._clock.now_ms(), Reading(events=events))
                self._agent.spool.call_when_stored(lambda: stored.set_result(None))
            except Exception as error:  # noqa: BLE001  # raised in the reader's thread
                stored.set_exception(error)

        loop.call_soon_threadsafe(accept)
        while self._reader and not self._reader.stopped:
            if stored in wait([stored], STOP_CHECK_S).done:
                return stored.result()
        raise InterruptedError("the agent stops")

    async def _wait_for_gpus(self, gpus_known: Callable[[], bool]) -> None:
        until_s = self._clock.monotonic() + GPUS_LIMIT_S
        while not gpus_known() and self._clock.monotonic() < until_s:
            await self._clock.sleep(0.05)


def _read(reader: KmsgReader, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[Exception | None]) -> None:
    """Read in this thread, and set `ended` to the error that ended it, or None."""
    error: Exception | None = None
    try:
        reader.run()
    except Exception as caught:  # noqa: BLE001  # logged where `ended` is awaited
        error = caught

    def end() -> None:
        if not ended.done():
            ended.set_result(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
        loop.call_soon_threadsafe(end)


def describe_error(error: Exception) -> str:
    """Return why the kernel log cannot be read, and what to do."""
    text = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    if isinstance(error, PermissionError):
        return f"{text}; give the agent CAP_SYSLOG"
    if isinstance(error, FileNotFoundError):
        return f"{text}; give the container the host's /dev/kmsg, or set kmsg_enabled = false"
    return text

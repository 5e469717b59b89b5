"""Which part a collector has: the active one detects and acts, a standby waits to take over, others only ingest.

All of them ingest and answer the Fleet API. `Leadership` keeps the lease in one task and switches the pipeline in
another, so that a slow start of detection does not lose the lease. Each effect checks the lease for itself, through
the store's fence: a process that was stopped and wakes up finds its time over before it acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.store import StoreError

log = logging.getLogger(__name__)

FOLLOW_S = 5.0  # how often one that does not detect reads what the active one found


def holder() -> str:
    """Return a name for this process that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Leadership:
    """Keeps the lease, and leads or follows by it. `start`, then `run` until cancelled, then `stop`.

    Args:
        pipeline: has the lease to keep.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        lease = pipeline.lease.lease
        if lease is None:
            raise ValueError("the pipeline has no lease to keep")
        self._pipeline, self._lease, self._may_lead = pipeline, lease, pipeline.lease.may_lead
        self._steps = ThreadPoolExecutor(1, "lease")  # its own: waits behind nothing else
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to detect if no other collector does; else take in what the active one found.

        Raises:
            StoreError: the store cannot be read.
        """
        if self._may_lead and await self._in_thread(self._lease.step):
            async with self._keeping():  # to take up a long history may take longer than the lease lasts
                await self._lead()
        else:
            await self._pipeline.follow()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._may_lead:
                group.create_task(self._keep())
            group.create_task(self._switch())

    async def stop(self) -> None:
        """End detection, store its outcomes, and let another collector take over at once."""
        try:
            async with self._keeping():  # the end may take longer than the lease lasts
                await self._pipeline.stop()
        finally:
            with contextlib.suppress(StoreError):
                await self._in_thread(self._lease.release)
            self._steps.shutdown()

    @contextlib.asynccontextmanager
    async def _keeping(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _keep(self) -> None:
        while True:
            before = self._lease.holds()
            try:
                await self._in_thread(self._lease.step)
            except StoreError as error:
                log.warning("the lease: %s", error)
            if self._lease.holds() != before:
                self._changed.set()
            await asyncio.sleep(self._lease.every_s)

    async def _switch(self) -> None:
        """Lead while the lease is held, follow while it is not."""
        while True:
            if self._may_lead and self._lease.holds():
                await self._lead_while_held()
            else:
                if self._pipeline.leading:  # the lease was lost before judging began
                    await self._give_up()
                with contextlib.suppress(StoreError):  # ingest reports it: it writes to the same store
                    await self._pipeline.follow()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), FOLLOW_S)
                self._changed.clear()

    async def _lead_while_held(self) -> None:
        try:
            await self._lead()
        except StoreError as error:
            log.warning("detection does not start; it is tried again: %s", error)
            await asyncio.sleep(self._lease.every_s)
            return
        judging = asyncio.create_task(self._pipeline.run())
        try:
            while self._lease.holds() and not judging.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._lease.every_s)
                self._changed.clear()
        finally:
            judging.cancel()
            await asyncio.wait([judging])
        await self._give_up()

    async def _give_up(self) -> None:
        log.warning("this collector is not the active one any more; it continues to ingest")
        await self._pipeline.give_up()

    async def _lead(self) -> None:
        if not self._pipeline.leading:
            log.info("this collector is the active one, by lease %d", self._lease.token)
            await self._pipeline.start()

    async def _in_thread(self, call: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._steps, call)

"""Which part this collector has: the active one detects and acts, a standby waits for it to go, others only ingest.

All of them ingest and answer the Fleet API. `Leadership` keeps the lease in one task and switches the pipeline in
another, so that a slow start of detection does not lose the lease on the way. Each effect asks `holds` for itself,
through the store's fence: a process that was stopped and wakes up finds its time over before it acts.
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

from drover_collector.pipeline.engine_thread import LeaseState
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.store import FileLease, Lease, StoreError

log = logging.getLogger(__name__)

ACTIVE, STANDBY, INGEST = "active", "standby", "ingest"
FOLLOW_S = 5.0  # how often one that does not detect reads what the active one found


def holder() -> str:
    """A name for this process that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Leadership:
    """`start`, then `run` until cancelled, then `stop`.

    Args:
        may_lead: False for a collector that only ingests.
    """

    def __init__(self, pipeline: Pipeline, lease: Lease | FileLease, *, may_lead: bool = True) -> None:
        self._pipeline = pipeline
        self._lease = lease
        self._may_lead = may_lead
        self._steps = ThreadPoolExecutor(1, "lease")  # its own: waits behind nothing else
        self._changed = asyncio.Event()
        pipeline.store.fence.use(self._fence)
        pipeline.role = self.role
        pipeline.lease = self.lease

    def role(self) -> str:
        if not self._may_lead:
            return INGEST
        return ACTIVE if self._pipeline.leading and self._lease.holds() else STANDBY

    def lease(self) -> LeaseState:
        if isinstance(self._lease, FileLease):
            return LeaseState(self._lease.holder, 0.0, None)
        return LeaseState(self._lease.holder, self._lease.ttl_s, self._lease.left_s() if self._may_lead else None)

    async def start(self) -> None:
        """Detection begins if nobody else detects; else what the active one found is taken up.

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
        """Ends detection, stores what came of it, and lets another take over at once."""
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
        """Leads while the lease is held, follows while it is not."""
        while True:
            if self._may_lead and self._lease.holds():
                await self._lead_while_held()
            else:
                if self._pipeline.leading:  # the lease was lost before judging began
                    await self._give_up()
                with contextlib.suppress(StoreError):  # told by ingest, which writes to the same store
                    await self._pipeline.follow()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), FOLLOW_S)
                self._changed.clear()

    async def _lead_while_held(self) -> None:
        try:
            await self._lead()
        except StoreError as error:
            log.warning("detection does not start, tried again: %s", error)
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
        log.warning("this collector is not the active one any more; it goes on taking in")
        await self._pipeline.give_up()

    async def _lead(self) -> None:
        if not self._pipeline.leading:
            log.info("this collector is the active one, by lease %d", self._lease.token)
            await self._pipeline.start()

    def _fence(self) -> str:
        """A word for the server's log.

        Raises:
            StoreError: another may be the active one.
        """
        if not self._lease.holds():
            raise StoreError("this collector is not the active one any more")
        return f"drover {self._lease.holder} {self._lease.token}"

    async def _in_thread(self, call: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._steps, call)

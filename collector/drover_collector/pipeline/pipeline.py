"""What happens with data once it is in: events and closed buckets are judged, what comes of it is stored and told.

All calls into the engine happen in one thread, in order (`pipeline_judging.py`), all writes of its outcomes in another
(`pipeline_saving.py`), and reads of buckets in others, so that an event does not wait for a slow read. The gRPC servers
run in the event loop and wait for none of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import numpy as np

from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.pipeline.engine_thread import EngineThread
from drover_collector.store import StoreError
from drover_core.times import iso

log = logging.getLogger(__name__)

MAX_BEHIND = 30  # buckets; further behind, the oldest are left out
PAST = "Telemetry is judged in a moment: the minutes before the start are being read. Events are judged already."
LATE_S = 0.5  # at a stretch, of each second: for rollups of what came late or was left out


class Pipeline(EngineThread):
    """What judges, and its tasks. `start`, then `run` until cancelled, then `stop`.

    Attributes:
        spoke_ms: node -> when its agent's newest message came, of agents that are connected here.
    """

    spoke_ms: Callable[[], Mapping[str, int]] = dict

    async def start(self) -> None:
        """Takes up the history: open incidents, the newest buckets and events, messages not yet delivered.

        Raises:
            StoreError: the store cannot be read.
        """
        loop = self._arrivals.loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._judge, self._restore)
        self.leading = True
        self._arrivals.arrived.set()  # for events that a crash left unjudged

    async def follow(self) -> None:
        """Instead of `start` and `run`: takes in what another collector found, and who reports.

        Raises:
            StoreError: the store cannot be read.
        """
        loop = self._arrivals.loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._judge, self._follow)

    async def give_up(self) -> None:
        """After `run`: another may judge. What is not stored is dropped; events that wait rest in the store."""
        self.leading = False
        loop = asyncio.get_running_loop()
        if self.desk is not None:
            await loop.run_in_executor(None, self.desk.stop)
        await loop.run_in_executor(self._judge, self._forget)
        await loop.run_in_executor(None, self.outbox.stop)

    async def run(self) -> None:
        """Until cancelled; what goes wrong with one tick or event is logged and counted, and the next goes on."""
        async with asyncio.TaskGroup() as group:
            works = [self._run_heartbeat, self._run_events, self._run_buckets]
            if self.store.shared:
                works.append(lambda: self._looks.run(self._arrivals.put, self.ticks.store_failed))
            for work in works:
                group.create_task(self._keep_on(work))

    async def stop(self) -> None:
        """Judges the events that wait, stores what is unsaved, ends deliveries. The store stays open."""
        loop = asyncio.get_running_loop()
        if self.leading:
            await loop.run_in_executor(self._judge, self.judge_events)
            await loop.run_in_executor(None, self.saving.stop)
            if self.desk is not None:
                await loop.run_in_executor(None, self.desk.stop)
            await loop.run_in_executor(None, self.outbox.stop)
            self.leading = False
        self._judge.shutdown()

    async def _keep_on(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # a defect must neither end detection nor go unseen
                self.ticks.failed(error, self.now_ms())
                await asyncio.sleep(self._wake_s)

    async def _run_events(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrivals.arrived.wait()
            self._arrivals.arrived.clear()
            await loop.run_in_executor(self._judge, self.judge_events)

    async def _run_heartbeat(self) -> None:
        while True:
            self.pauses.notice(self.now_ms())
            await asyncio.sleep(self._wake_s)

    async def take_up_past(self) -> None:
        """What the detectors knew before the start. Events are judged meanwhile; buckets wait for it."""
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        while self.past is not None and self.past.steps:
            self.ticks.troubles["past"] = PAST
            step = self.past.steps.popleft()
            try:
                work = await asyncio.to_thread(step)
            except StoreError as error:
                self.past.steps.appendleft(step)
                self.ticks.store_failed(error)
                await loop.run_in_executor(self._judge, self.judge_nothing)
                await asyncio.sleep(self._wake_s)
                continue
            await loop.run_in_executor(self._judge, work, self.engine)
        if self.past is not None:
            self.newest, self.past = self.past.newest, None
            log.info("the last minutes are taken up, within %.1f s", time.perf_counter() - began)
        self.ticks.troubles.pop("past", None)

    async def _run_buckets(self) -> None:
        await self.take_up_past()
        while True:
            now_ms = self.now_ms()
            self.pauses.notice(now_ms)
            due_ms = self.next_ms + BUCKET_MS + self.lag_ms
            if now_ms < due_ms:
                if due_ms - now_ms > 2 * BUCKET_MS + self.lag_ms:
                    self._clock_went_back(now_ms)
                if due_ms - now_ms > LATE_S * 2000:
                    await self._roll(lambda: self.store.rollups.roll_up_late(LATE_S))
                await asyncio.sleep(min(self._wake_s, (due_ms - now_ms) / 1000))
                continue
            self.busy = True
            try:
                await self._tick(now_ms, due_ms)
            finally:
                self.busy = False

    async def _tick(self, now_ms: int, due_ms: int) -> None:
        behind = (now_ms - due_ms) // BUCKET_MS
        if behind > MAX_BEHIND:
            skip = behind - MAX_BEHIND
            log.warning("%d buckets behind; %d from %s on are left out", behind, skip, iso(self.next_ms))
            self.ticks.skipped += skip
            self.next_ms += skip * BUCKET_MS
        if behind > 1:
            self.ticks.troubles["behind"] = f"Detection is {behind * BUCKET_MS // 1000} s behind; it is catching up."
        else:
            self.ticks.troubles.pop("behind", None)
        start_ms = self.next_ms
        self.next_ms += BUCKET_MS
        if self.pauses.stood_still(start_ms):
            log.info("bucket %s left out: this collector was not listening then", iso(start_ms))
            return
        began = time.perf_counter()
        try:
            bucket = await asyncio.to_thread(self.store.buckets.read_closing, self.index, start_ms)
            bucket = replace(bucket, late=self._late(bucket))
            self._told = await asyncio.to_thread(self._inventories.news, now_ms)
        except StoreError as error:
            self.ticks.store_failed(error)
            await asyncio.get_running_loop().run_in_executor(self._judge, self.judge_nothing)
            return
        except Exception as error:  # noqa: BLE001  # nor may one unreadable bucket
            self.ticks.failed(error, self.now_ms())
            return
        read = time.perf_counter()
        self.ticks.read_seconds += read - began
        await asyncio.get_running_loop().run_in_executor(self._judge, self.judge_bucket, bucket)
        self.ticks.judge_seconds += time.perf_counter() - read
        self.ticks.seconds = time.perf_counter() - began
        await self._roll(self.store.rollups.roll_up)

    def _late(self, bucket: Bucket) -> frozenset[str]:
        """Nodes without a row in it whose agents have sent something since it was over."""
        rows = bucket.node_rows + np.bincount(self.index.gpu_node, bucket.gpu_rows, self.index.node_count)
        spoke, nodes = self.spoke_ms(), self.index.nodes
        away = (nodes[n].name for n in np.flatnonzero(rows == 0).tolist())
        return frozenset(name for name in away if spoke.get(name, 0) >= bucket.end_ms)

    async def _roll(self, work: Callable[[], object]) -> None:
        """Rollups; what fails is marked, and made later."""
        began = time.perf_counter()
        try:
            await asyncio.to_thread(work)
        except StoreError as error:
            self.ticks.store_failed(error)
        finally:
            self.ticks.roll_seconds += time.perf_counter() - began

    def _clock_went_back(self, now_ms: int) -> None:
        self.next_ms = now_ms // BUCKET_MS * BUCKET_MS
        self.ticks.troubles["clock"] = f"The collector's clock went back at {iso(now_ms)}; check its time service."
        log.warning("the clock went back; going on with the bucket of %s", iso(self.next_ms))

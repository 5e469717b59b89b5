"""The task that reads closed buckets in order and has each one judged. Reads have threads of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from drover_collector.detectors._lib.inventory import InventoryReport
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.pipeline.restore import Inventories, Past
from drover_collector.pipeline.stats import Ticks
from drover_collector.store import Store, StoreError
from drover_core.times import iso

log = logging.getLogger(__name__)

MAX_BEHIND = 30  # buckets; further behind, the oldest are left out
PAUSE_MS = 5_000  # a loop that wakes every second was away for this long: the process stood still
SETTLE_MS = 30_000  # after that, agents need this long to reconnect
LATE_S = 0.5  # of each second: for rollups of data that came late or was left out
PAST = "Telemetry is not judged yet: the minutes before the start are being read. Events are judged already."


class BucketJudge(Protocol):
    """The thread that owns the engine: `pipeline.Pipeline`."""

    @property
    def engine(self) -> Engine: ...

    def in_engine_thread(self, call: Callable[..., object], *args: object) -> Awaitable[object]:
        """Make a call in the engine's thread."""

    def judge_bucket(self, bucket: Bucket, inventories: Sequence[InventoryReport]) -> None:
        """Judge a bucket with the inventories that changed. In the engine's thread."""

    def judge_nothing(self) -> None:
        """Note that there is no bucket. In the engine's thread."""


class Pauses:
    """When this process last stood still: it received nothing then, and that is no silence of the nodes.

    Call `notice` every second.
    """

    def __init__(self, now_ms: int) -> None:
        self.awake_ms = now_ms
        self.newest: tuple[int, int] | None = None  # from, to

    def notice(self, now_ms: int) -> None:
        if now_ms - self.awake_ms > PAUSE_MS:
            self.newest = (self.awake_ms, now_ms)
            log.warning("this process stood still from %s to %s", iso(self.awake_ms), iso(now_ms))
        self.awake_ms = now_ms

    def stood_still(self, start_ms: int) -> bool:
        """Return whether this process may have missed data of a bucket: it stood still, or agents were reconnecting."""
        if self.newest is None:
            return False
        paused_ms, resumed_ms = self.newest
        return start_ms + BUCKET_MS > paused_ms and start_ms < resumed_ms + SETTLE_MS


@dataclass(frozen=True, slots=True)
class BucketTiming:
    """
    Attributes:
        lag_ms: a bucket is read so long after its end, for data that is under way.
        wake_s: at most this long between two looks at the clock.
        spoke_ms: node -> when the newest message of its agent came, here or to another collector of the store.
    """

    lag_ms: int
    wake_s: float = 1.0
    spoke_ms: Callable[[], Mapping[str, int]] = dict


class BucketLoop:
    """
    Attributes:
        next_ms: start of the next bucket.
        newest: the last bucket that was judged, or the newest of the past.
        past: of before the start, until it is taken up.
        busy: a bucket is being read or judged.
    """

    def __init__(
        self, store: Store, index: FleetIndex, ticks: Ticks, now_ms: Callable[[], int], timing: BucketTiming
    ) -> None:
        self.lag_ms, self.wake_s, self.spoke_ms = timing.lag_ms, timing.wake_s, timing.spoke_ms
        self.inventories = Inventories(store)
        self.next_ms = now_ms() // BUCKET_MS * BUCKET_MS  # a replay of an export begins with this one too
        self.newest: Bucket | None = None
        self.past: Past | None = None
        self.busy = False
        self.pauses = Pauses(now_ms())
        self._store, self._index, self._ticks, self._now_ms = store, index, ticks, now_ms

    async def run(self, judge: BucketJudge) -> None:
        """Take up the past, then judge each bucket when it is due. Until cancelled."""
        await self.take_up_past(judge)
        while True:
            now_ms = self._now_ms()
            self.pauses.notice(now_ms)
            due_ms = self.next_ms + BUCKET_MS + self.lag_ms
            if now_ms < due_ms:
                if due_ms - now_ms > 2 * BUCKET_MS + self.lag_ms:
                    self._go_back(now_ms)
                if due_ms - now_ms > LATE_S * 2000:
                    await self._roll_up(lambda: self._store.rollups.roll_up_late(LATE_S))
                await asyncio.sleep(min(self.wake_s, (due_ms - now_ms) / 1000))
                continue
            self.busy = True
            try:
                await self.tick(judge, now_ms, due_ms)
            finally:
                self.busy = False

    async def take_up_past(self, judge: BucketJudge) -> None:
        """Give the detectors what they knew before the start. Events are judged meanwhile; buckets wait for it."""
        began = time.perf_counter()
        while self.past is not None and self.past.steps:
            self._ticks.troubles["past"] = PAST
            step = self.past.steps.popleft()
            try:
                work = await asyncio.to_thread(step)
            except StoreError as error:
                self.past.steps.appendleft(step)
                self._ticks.store_failed(error)
                await judge.in_engine_thread(judge.judge_nothing)
                await asyncio.sleep(self.wake_s)
                continue
            await judge.in_engine_thread(work, judge.engine)
        if self.past is not None:
            self.newest, self.past = self.past.newest, None
            log.info("the last minutes are taken up, within %.1f s", time.perf_counter() - began)
        self._ticks.troubles.pop("past", None)

    async def tick(self, judge: BucketJudge, now_ms: int, due_ms: int) -> None:
        """Read the next bucket and have it judged."""
        self._note_backlog((now_ms - due_ms) // BUCKET_MS)
        start_ms = self.next_ms
        self.next_ms += BUCKET_MS
        if self.pauses.stood_still(start_ms):
            log.info("bucket %s left out: this collector received nothing then", iso(start_ms))
            return
        began = time.perf_counter()
        try:
            bucket = await asyncio.to_thread(self._store.buckets.read_closing, self._index, start_ms)
            bucket = replace(bucket, late=self._late(bucket))
            inventories = await asyncio.to_thread(self.inventories.changed, now_ms)
        except StoreError as error:
            self._ticks.store_failed(error)
            await judge.in_engine_thread(judge.judge_nothing)
            return
        except Exception as error:  # noqa: BLE001  # one unreadable bucket must not end detection
            self._ticks.failed(error, self._now_ms())
            return
        read = time.perf_counter()
        self._ticks.read_seconds += read - began
        await judge.in_engine_thread(judge.judge_bucket, bucket, inventories)
        self._ticks.judge_seconds += time.perf_counter() - read
        self._ticks.seconds = time.perf_counter() - began
        await self._roll_up(self._store.rollups.roll_up)

    def _note_backlog(self, behind: int) -> None:
        """Skip the oldest buckets if too many wait. `behind`: how many are due, beyond the next."""
        if behind > MAX_BEHIND:
            skip = behind - MAX_BEHIND
            log.warning("%d buckets behind; %d from %s on are left out", behind, skip, iso(self.next_ms))
            self._ticks.skipped += skip
            self.next_ms += skip * BUCKET_MS
        if behind > 1:
            self._ticks.troubles["behind"] = f"Detection is {behind * BUCKET_MS // 1000} s behind; it is catching up."
        else:
            self._ticks.troubles.pop("behind", None)

    def _late(self, bucket: Bucket) -> frozenset[str]:
        """Return the nodes without a row in a bucket whose agents have sent something since its end.

        By a clock here that is ahead, all rows are late, and no node is silent for it.
        """
        rows = bucket.node_rows + np.bincount(self._index.gpu_node, bucket.gpu_rows, self._index.node_count)
        if rows.all():
            return frozenset()
        spoke, nodes = self.spoke_ms(), self._index.nodes
        away = (nodes[n].name for n in np.flatnonzero(rows == 0).tolist())
        return frozenset(name for name in away if spoke.get(name, 0) >= bucket.end_ms)

    async def _roll_up(self, work: Callable[[], object]) -> None:
        """Make rollups. The store notes which of them fail, and makes those later."""
        began = time.perf_counter()
        try:
            await asyncio.to_thread(work)
        except StoreError as error:
            self._ticks.store_failed(error)
        finally:
            self._ticks.roll_seconds += time.perf_counter() - began

    def _go_back(self, now_ms: int) -> None:
        self.next_ms = now_ms // BUCKET_MS * BUCKET_MS
        self._ticks.troubles["clock"] = f"The collector's clock went back at {iso(now_ms)}; check its time service."
        log.warning("the clock went back; going on with the bucket of %s", iso(self.next_ms))

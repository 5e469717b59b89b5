"""A pipeline around a real store, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.pipeline.bucket_loop import PAUSE_MS
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import Event, EventKind

T0 = 1_800_000_000_000
LAG_MS = 7000


class Clock:
    def __init__(self, now_ms: int = T0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def pipeline_of(store: Store, index: FleetIndex, clock: Clock) -> Pipeline:
    outbox = Outbox(store, [], "http://console", now_ms=clock)
    return Pipeline(index, store, Policy.load(), outbox, PipelineOptions(lag_ms=LAG_MS, now_ms=clock, wake_s=0.005))


@contextlib.asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    await pipeline.start()
    task = asyncio.create_task(pipeline.run())
    try:
        yield pipeline
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pipeline.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"not within 300 s: {what}"
        await asyncio.sleep(0.005)


async def advance(pipeline: Pipeline, clock: Clock, to_ms: int) -> None:
    """Move the clock as real time does, in steps shorter than a pause, and let every bucket be judged."""
    while clock.now_ms < to_ms:
        clock.now_ms = min(to_ms, clock.now_ms + PAUSE_MS - 1000)
        await until(lambda: pipeline.buckets.pauses.awake_ms == clock.now_ms, "the heartbeat saw the time")
    due = (to_ms - LAG_MS) // BUCKET_MS * BUCKET_MS
    if due > T0:
        await until(lambda: pipeline.buckets.next_ms >= due and not pipeline.buckets.busy, "all due buckets judged")


def xid(number: int, node: str = "n1", ts_ms: int = T0 + 1000) -> Event:
    return Event(
        f"{node}/spool/{number}", ts_ms, node, 1, EventKind.XID, "79", "GPU has fallen off the bus.", "kmsg",
        received_ms=ts_ms,
    )  # fmt: skip

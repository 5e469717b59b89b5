"""The room for what waits is kept though many streams ask for it in the same moment."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from drover_collector.ingest.limits import Limits
from drover_collector.ingest.session import Session
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, hello
from testbed.ingest import EVENTS, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until

LARGE = batch(1, block([(T0 + n, 1, (300.0, 50.0)) for n in range(2_000)]))
STREAMS = 12


@in_loop
async def test_many_at_once_do_not_overfill_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()
    send = Session.send

    async def slowly(session: Session, message: pb.CollectorMessage) -> None:
        if message.WhichOneof("kind") == "backoff":
            await answered.wait()
        await send(session, message)

    monkeypatch.setattr(Session, "send", slowly)
    size = len(LARGE.SerializeToString())
    limits = Limits(flush_s=60, waiting_bytes=3 * size, flush_bytes=100 * size)
    async with Collector(store, limits) as collector, contextlib.AsyncExitStack() as stack:
        stats = collector.ingest.stats
        agents = [await stack.enter_async_context(collector.agent(hello(f"n{n}"))) for n in range(STREAMS)]
        await asyncio.gather(*(agent.send(batch=LARGE) for agent in agents))
        await until(lambda: stats.backoffs >= STREAMS - 2)  # all but the first two are asked to hold back
        answered.set()
        async with collector.agent(hello("n99")) as other:
            await other.send(record=event(1))
            await other.until_held(EVENTS, 1)
        assert 2 * size < stats.waiting_bytes < 6 * size

"""A store that accepts nothing: events are still judged, and notified once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from drover_collector.ingest.limits import Limits
from drover_collector.notify import Outbox
from drover_collector.notify import delivery_recorder as clerk
from drover_collector.notify.receivers.webhook import Delivery
from drover_collector.pipeline import outcome_writer as pipeline_saving
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import Store, StoreError
from drover_core.model.events import Severity
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.ingest import EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until

QUICK = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, judge_s=0.05, backoff_ms=10)


class Disk:
    """Says no to every write of a store while it is full, or keeps it waiting while it hangs."""

    def __init__(self, store: Store, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.free = threading.Event()
        self.free.set()
        for part in (*vars(store).values(), *vars(store.probes).values()):
            for name in [name for name in dir(part) if name.startswith("write")]:
                patch.setattr(part, name, self._guarded(getattr(part, name)))

    def _guarded(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            if not self.free.wait(120):
                raise StoreError("hangs")
            if self.full and (not args or args[0]):
                raise StoreError("no space left on device")
            return write(*args)

        return guarded


class Webhook:
    """A receiver in memory."""

    name, kind, min_severity, repeat_s = "ops", "webhook", Severity.WARNING, None

    def __init__(self) -> None:
        self.ids: list[str] = []

    def deliver(self, id_: str, _body: bytes, _now_ms: int) -> Any:
        self.ids.append(id_)
        return Delivery(True, "delivered")

    def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def judging(collector: Collector, webhook: Webhook) -> AsyncIterator[Pipeline]:
    """The pipeline behind a collector's ingest."""
    outbox = Outbox(collector.store, [webhook], "http://console", now_ms=lambda: collector.now_ms)
    pipeline = Pipeline(
        index_of(),
        collector.store,
        Policy.load(),
        outbox,
        PipelineOptions(lag_ms=7000, now_ms=lambda: collector.now_ms, wake_s=0.005),
    )
    await pipeline.start()
    listeners = collector.ingest._context.listeners
    listeners.on_stored, listeners.on_unstored = pipeline.take_events, pipeline.take_unstored
    task = asyncio.create_task(pipeline.run())
    try:
        yield pipeline
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pipeline.stop()


@in_loop
async def test_a_full_disk_keeps_no_alarm_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, webhook = Disk(store, monkeypatch), Webhook()
    for module in (pipeline_saving, clerk):
        monkeypatch.setattr(module, "RETRY_S", 0.02)
    limits = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, judge_s=0.05, backoff_ms=10, waiting_bytes=5000)
    async with Collector(store, limits) as collector, judging(collector, webhook) as pipeline:
        judged: list[str] = []
        judge = pipeline.engine.on_events

        def counted(events: Any, now_ms: int) -> Any:
            judged.extend(e.id for e in events)
            return judge(events, now_ms)

        monkeypatch.setattr(pipeline.engine, "on_events", counted)
        disk.full = True
        async with collector.agent(hello()) as agent:
            for seq in range(1, 30):  # more than there is room for, before the alarm on the same stream
                await agent.send(batch=batch(seq, block([(T0 + seq, 1, (100.0, 50.0))] * 5)))
            await agent.send(record=event(1, gpu=1))
            await until(lambda: pipeline.incidents, "the incident is shown")
            await until(lambda: webhook.ids, "the webhook is called")
            stats = collector.ingest.stats
            assert stats.dropped > 0
            assert stats.waiting_bytes < 8000
            assert store.incidents.newest("open") == []
            assert store.events.read(0, T0 * 2) == []
            assert agent.held == {EVENTS: 0, LIVE: 0, pb.BACKFILL: 0}  # nothing is acknowledged that is not stored
            assert any("1 events are judged, but not stored yet" in text for text in stats.notices())
            assert any("no space left" in text for text in pipeline.troubles())
            async with collector.agent(hello()) as again:  # as an agent does that gets no Ack
                await again.send(record=event(1, gpu=1))
                await again.send(record=event(2, gpu=2))
                await until(lambda: len(judged) == 2)
                disk.full = False
                await again.until_held(EVENTS, 2)
        assert judged == ["n0/s1/1", "n0/s1/2"]
        assert len(store.events.read(0, T0 * 2)) == 2
        await until(lambda: pipeline.waiting_outcomes == 0, "tried again by itself")
        assert {i.id for i in store.incidents.newest("open")} == set(pipeline.incidents)
        await until(lambda: len(webhook.ids) == len(pipeline.incidents))
        assert len(set(webhook.ids)) == len(webhook.ids)

        def outbox_states() -> dict[str, str]:
            return {row.id: row.state for i in pipeline.incidents for row in store.outbox.of_incidents(i)}

        # The courier notes a delivery after it; the caretaker forgets a trouble in its next round.
        await until(lambda: outbox_states() == dict.fromkeys(webhook.ids, "delivered"), "the deliveries are noted")
        await until(lambda: stats.notices() == [], "no trouble is left")


@in_loop
async def test_no_event_is_stored_before_what_its_agent_said_before_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, the collector would acknowledge both: events show how far their lane is stored."""

    def full(_: object) -> None:
        raise StoreError("no space left on device")

    held = pb.Holding(gpu=0, job="train-7", from_ms=T0)
    with monkeypatch.context() as patched:
        patched.setattr(store.jobs, "write_holdings", full)
        async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
            await agent.send(record=pb.Record(seq=1, holding=held))
            await agent.send(record=event(2))
            await until(lambda: collector.events, "the event is judged")
            await until(lambda: collector.ingest.stats.store_failures > 2, "tried again")
    assert store.offsets.read() == {}
    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        assert agent.held[EVENTS] == 0
        await agent.send(record=pb.Record(seq=1, holding=held))
        await agent.send(record=event(2))
        await agent.until_held(EVENTS, 2)
        assert [(h.gpu, h.job) for h in store.jobs.holdings(T0, T0 + 1)] == [(0, "train-7")]


@in_loop
async def test_a_store_that_hangs_keeps_no_alarm_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(store, monkeypatch)
    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        disk.free.clear()
        await agent.send(record=event(1))
        await agent.send(record=event(2))
        await until(lambda: len(collector.events) == 2)
        assert agent.held[EVENTS] == 0
        disk.free.set()
        await agent.until_held(EVENTS, 2)
        assert [e.id for e in collector.events] == ["n0/s1/1", "n0/s1/2"]


@in_loop
async def test_while_the_store_hangs_later_incidents_are_judged_notified_and_stored_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, webhook = Disk(store, monkeypatch), Webhook()
    monkeypatch.setattr(pipeline_saving, "PATIENCE_S", 0.02)
    judged: list[str] = []
    write_judged = store.events.write_judged

    def noting(events: Any) -> None:
        judged.extend(e.id for e in events)
        write_judged(events)

    monkeypatch.setattr(store.events, "write_judged", noting)
    async with Collector(store, QUICK) as collector, judging(collector, webhook) as pipeline:
        async with collector.agent(hello()) as agent:
            disk.free.clear()
            for number in (1, 2):
                await agent.send(record=event(number, gpu=number))
                await until(lambda number=number: len(webhook.ids) == number, "the webhook is called")
                await until(lambda number=number: len(pipeline.incidents) == number, "the incident is shown")
            assert pipeline.waiting_outcomes >= 2  # a tick's too
            assert any("what detection finds waits to be stored" in text for text in pipeline.troubles())
            assert store.incidents.newest("open") == []
            disk.free.set()
            await agent.until_held(EVENTS, 2)
        await until(lambda: pipeline.waiting_outcomes == 0, "all is stored")
        assert {i.id for i in store.incidents.newest("open")} == set(pipeline.incidents)
        await until(lambda: pipeline.troubles() == [], "no trouble is left")
        assert len(webhook.ids) == len(set(webhook.ids)) == 2, "each is sent once"

        def states() -> dict[str, str]:
            return {row.id: row.state for i in pipeline.incidents for row in store.outbox.of_incidents(i)}

        await until(lambda: states() == dict.fromkeys(webhook.ids, "delivered"), "the deliveries are noted")
        assert judged == ["n0/s1/1", "n0/s1/2"], "noted as judged, in order, once each"


@in_loop
async def test_alarms_beyond_the_room_are_judged_and_left_with_their_agents(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(store, monkeypatch)
    limits = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, backoff_ms=10, record_bytes=20_000)
    async with Collector(store, limits) as collector:
        disk.full = True
        async with collector.agent(hello()) as agent:
            for seq in range(1, 201):
                await agent.send(record=event(seq))
            await until(lambda: len(collector.events) == 200)
            assert collector.ingest.stats.waiting_bytes <= 20_000
            disk.full = False
            await agent.ended()
        async with collector.agent(hello()) as agent:
            assert agent.held[EVENTS] < 200
            for seq in range(agent.held[EVENTS] + 1, 201):
                await agent.send(record=event(seq))
            await agent.until_held(EVENTS, 200)
        assert len(store.events.read(0, T0 * 2, limit=500)) == 200
        assert sorted(e.id for e in collector.events) == sorted(f"n0/s1/{seq}" for seq in range(1, 201))


@in_loop
async def test_telemetry_goes_on_as_soon_as_the_store_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(store, monkeypatch)
    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        disk.full = True
        await agent.send(batch=batch(1, GOOD))
        await until(lambda: collector.ingest.stats.store_failures > 1)
        disk.full = False
        await agent.until_held(LIVE, 1)
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2

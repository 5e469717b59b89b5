"""Leading and following in one process, with a lease that the test gives and takes. The store is one on a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox, ReceiverOptions, Webhook
from drover_collector.notify.receivers.webhook import Delivery
from drover_collector.pipeline.leadership import Leadership
from drover_collector.pipeline.lease import ACTIVE, INGEST, STANDBY, LeaderLease
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import FileLease, Store, StoreError
from drover_core.model.events import Event, EventKind, Severity
from testbed.collected import small_index
from testbed.loop import in_loop
from testbed.waiting import until

T0 = 1_800_000_000_000
LAG_MS = 7000


class Given(FileLease):
    """A lease that is held when the test says so."""

    every_s = 0.01

    def __init__(self, held: bool = True) -> None:
        self.held = held

    def holds(self) -> bool:
        return self.held

    def step(self) -> bool:
        return self.held


class Receiver(Webhook):
    def __init__(self) -> None:
        super().__init__(ReceiverOptions("ops", Severity.INFO, 1), "http://nowhere", b"x" * 32)
        self.got: list[str] = []

    def deliver(self, message_id: str, body: bytes, now_ms: int) -> Delivery:
        self.got.append(message_id)
        return Delivery(True)


def made(store: Store, lease: Given, receiver: Receiver, *, may_lead: bool = True) -> tuple[Pipeline, Leadership]:
    now = lambda: T0 + 1500  # noqa: E731  # short, and used twice below
    index: FleetIndex = small_index()
    outbox = Outbox(store, [receiver], "http://console", now_ms=now)
    leader = LeaderLease(lease, may_lead=may_lead)
    store.fence.use(leader.fence)
    options = PipelineOptions(lag_ms=LAG_MS, now_ms=now, wake_s=0.005, lease=leader)
    pipeline = Pipeline(index, store, Policy.load(), outbox, options)
    return pipeline, Leadership(pipeline)


def role_of(leadership: Leadership) -> str:
    pipeline = leadership._pipeline
    return pipeline.lease.role(pipeline.leading)


@contextlib.asynccontextmanager
async def collector(
    store: Store, lease: Given, receiver: Receiver, *, may_lead: bool = True
) -> AsyncIterator[tuple[Pipeline, Leadership]]:
    pipeline, leadership = made(store, lease, receiver, may_lead=may_lead)
    await leadership.start()
    async with running_of(leadership):
        yield pipeline, leadership


@contextlib.asynccontextmanager
async def running_of(leadership: Leadership) -> AsyncIterator[None]:
    running = asyncio.create_task(leadership.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await leadership.stop()


def xid(number: int, node: str = "n1") -> Event:
    return Event(
        f"{node}/spool/{number}", T0 + 1000, node, 1, EventKind.XID, "79", "GPU has fallen off the bus.", "kmsg",
        received_ms=T0 + 1000,
    )  # fmt: skip


@in_loop
async def test_what_another_collector_took_in_is_judged_once(store: Store) -> None:
    receiver = Receiver()
    async with collector(store, Given(), receiver) as (pipeline, leadership):
        assert role_of(leadership) == ACTIVE
        store.events.write([xid(1)])  # nobody wakes this pipeline
        await until(lambda: len(pipeline.incidents) == 1, "the event is found in the store")
        await until(lambda: len(receiver.got) == 1, "it is sent")
        pipeline.take_events([xid(1)])  # the agent sent it again, here
        store.events.write([xid(1)])
        store.events.write([xid(1, "n2")])
        await until(lambda: len(pipeline.incidents) == 2, "the next one")
        assert len(store.incidents.history(next(iter(pipeline.incidents)))) == 1
    assert store.events.unjudged(T0 + 1500, 10) == []


@in_loop
async def test_without_the_lease_nothing_is_written_and_nothing_sent(store: Store) -> None:
    receiver, lease = Receiver(), Given()
    async with collector(store, lease, receiver) as (pipeline, leadership):
        store.events.write([xid(1)])
        await until(lambda: len(pipeline.incidents) == len(receiver.got) == 1, "it is sent")
        await until(lambda: not store.events.unjudged(T0 + 1500, 10), "the store has that it is judged")
        [incident] = pipeline.incidents.values()
        lease.held = False
        assert role_of(leadership) == STANDBY
        with pytest.raises(StoreError, match="not the active one"):
            store.incidents.write([incident])
        with pytest.raises(StoreError, match="not the active one"):
            store.events.write_judged([xid(1)])
        with pytest.raises(StoreError, match="not the active one"):
            store.retention.make_room(T0 + 1500, max_bytes=1)
        await until(lambda: not pipeline.leading, "it gives up")
        store.events.write([xid(1, "n2")])
        await until(lambda: len(pipeline.incidents) == 1, "it follows")
        assert len(store.events.unjudged(T0 + 1500, 10)) == 1
        lease.held = True
        await until(lambda: len(pipeline.incidents) == 2, "what came meanwhile is judged")
        await until(lambda: len(receiver.got) == 2, "and sent")
        assert len(set(receiver.got)) == 2


@in_loop
async def test_a_follower_shows_what_the_active_one_found(store: Store, store_url: str) -> None:
    active_gets, standby_gets = Receiver(), Receiver()
    other = Store.open(store_url, retention_days=3650)
    try:
        async with (
            collector(store, Given(), active_gets) as (active, _),
            collector(other, Given(held=False), standby_gets) as (standby, leadership),
        ):
            assert role_of(leadership) == STANDBY
            standby.take_events([xid(1)])
            other.events.write([xid(1)])
            await until(lambda: len(active.incidents) == 1, "the active one judges it")
            await standby.follow()
            assert {i.id for i in standby.incidents.values()} == {i.id for i in active.incidents.values()}
            assert standby.engine.health_of("n1", 1) == active.engine.health_of("n1", 1)
        assert standby_gets.got == []
    finally:
        other.close()


@in_loop
async def test_one_that_only_ingests_never_leads(store: Store) -> None:
    lease = Given()
    async with collector(store, lease, Receiver(), may_lead=False) as (pipeline, leadership):
        assert role_of(leadership) == INGEST
        await pipeline.follow()
        assert not pipeline.leading


@in_loop
async def test_the_lease_is_kept_while_a_long_history_is_taken_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = threading.Event()

    class Counted(Given):
        steps = 0

        def step(self) -> bool:
            self.steps += 1
            if self.steps > 2:
                renewed.set()
            return self.held

    pending = store.outbox.pending
    monkeypatch.setattr(store.outbox, "pending", lambda: pending() if renewed.wait(120) else [])
    _, leadership = made(store, Counted(), Receiver())
    await leadership.start()
    async with running_of(leadership):
        assert renewed.is_set()


@in_loop
async def test_one_that_lost_the_lease_before_it_judged_begins_again(store: Store) -> None:
    lease, receiver = Given(), Receiver()
    pipeline, leadership = made(store, lease, receiver)
    await leadership.start()
    lease.held = False
    async with running_of(leadership):
        await until(lambda: not pipeline.leading, "it gives up")
        store.events.write([xid(1)])
        lease.held = True
        await until(lambda: len(receiver.got) == 1, "it leads again")

"""What one agent may take, and that all that is kept of agents is bounded."""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest

from drover_collector.ingest.limits import (
    ALLOWANCES,
    AgentAllowance,
    AllowanceTable,
    Limits,
    MemoryBudget,
    RateLimitedLogger,
    RecentlyUsed,
    TokenBucket,
)
from drover_collector.ingest.offsets import SPOOLS, UNKNOWN_SPOOLS, LaneOffsets
from drover_collector.store import Store, StoreError
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.ingest import BACKFILL, EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until

NAMES = 100_000  # invented ones, over time


def test_one_agent_gets_a_share_of_the_room_and_many_greedy_ones_leave_some() -> None:
    room, limits = MemoryBudget(1000), Limits()
    greedy = [AgentAllowance(limits) for _ in range(50)]
    while any(room.fits(account) for account in greedy):
        for account in greedy:
            if room.fits(account):
                room.grow(account, 1)
    assert room.used < 1000
    honest = AgentAllowance(limits)
    assert room.fits(honest)
    alone, one = MemoryBudget(1000), AgentAllowance(limits)
    while alone.fits(one):
        alone.grow(one, 1)
    assert one.waiting <= 1000 / 4


def test_honest_agents_are_never_slowed() -> None:
    account = AgentAllowance(Limits())
    for _ in range(600):  # ten minutes after an outage: all at once, 16 GPUs in 7 parts
        assert account.take_message(10_000, 600, 0) == 0
    for _ in range(1000):  # a storm of kernel messages
        assert account.take_message(300, 0, 1) == 0


def test_who_sends_more_than_it_should_must_wait() -> None:
    assert sum(AgentAllowance(Limits()).take_message(100, 1_000_000, 0) for _ in range(1)) > 10
    events = AgentAllowance(Limits())
    assert max(events.take_message(100, 0, 1) for _ in range(5000)) > 1
    messages = AgentAllowance(Limits())
    assert max(messages.take_message(1, 0, 0) for _ in range(15_000)) > 1


def test_a_bucket_pays_back_at_its_rate() -> None:
    bucket = TokenBucket(10, 20)
    assert bucket.take(20) == 0
    assert 0 < bucket.take(10) <= 1
    assert not bucket.take_if_available(1)


@in_loop
async def test_a_greedy_agent_is_slowed_alone(store: Store) -> None:
    limits = Limits(flush_s=0.01, rows_per_s=10, burst_s=10)
    async with Collector(store, limits) as collector, collector.agent(hello("n0")) as greedy:
        rows = [(T0 - second * 1000, 1, (100.0, 50.0)) for second in range(3000)]  # its second is read in 5 minutes
        await greedy.send(batch=batch(1, block(rows)))
        await greedy.read("backoff")
        await greedy.send(batch=batch(2, block(rows)))
        async with collector.agent(hello("n1")) as honest:
            await honest.send(batch=batch(1, GOOD))
            await honest.until_held(LIVE, 1)
            assert honest.backoffs == 0
        assert collector.ingest.stats.slowed == 1
        async with collector.agent(hello("n0")) as again:  # a new stream is no way to more
            await again.send(batch=batch(3, GOOD))
            await again.read("backoff")


@in_loop
async def test_backoff_to_all_when_the_store_lags(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    write = store.samples.write

    def slow(samples: object) -> None:
        free.wait(120)
        write(samples)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(store.samples, "write", slow)
    limits = Limits(flush_s=0.01, waiting_bytes=20_000, backoff_ms=10)
    async with (
        Collector(store, limits) as collector,
        collector.agent(hello("n0")) as one,
        collector.agent(hello("n1")) as two,
    ):
        for seq in range(1, 200):
            await one.send(batch=batch(seq, GOOD))
            await two.send(batch=batch(seq, GOOD))
        await one.read("backoff")
        await two.read("backoff")
        assert collector.ingest.stats.waiting_bytes <= 20_000
        free.set()  # it was only slow: nothing is left with the agents, and no stream ends
        await one.until_held(LIVE, 199)
        await two.until_held(LIVE, 199)
        assert collector.ingest.stats.dropped == 0


@in_loop
async def test_samples_denser_than_anything_honest_are_refused(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, block([(T0 + ms, 1, (100.0, 50.0)) for ms in range(1000)])))
        await agent.send(batch=batch(2, block([(T0 + 20 * n, 2, (100.0, 50.0)) for n in range(50)])))
        await agent.send(batch=batch(3, block([(T0 - n * 3_600_000, 3, (100.0, 50.0)) for n in range(20)])))
        await agent.until_held(LIVE, 3)
        assert agent.rejected == {(LIVE, 1): "more than 50 samples of one gpu within a second"}
        assert store.buckets.read(index_of(), T0).gpu_rows[:3].tolist() == [0, 50, 1]


@in_loop
async def test_a_hello_with_too_many_things(store: Store) -> None:
    message = hello()
    for number in range(2000):
        message.entities.add(index=100 + number, scope=pb.GPU, key=f"X{number}")
    async with Collector(store, Limits(entities=1000)) as collector, collector.agent() as agent:
        await agent.send(hello=message)
        code, details = await agent.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "a Hello with 2005 entities; at most 1000 are allowed"


@in_loop
async def test_new_entities_are_bounded(store: Store) -> None:
    """A new set of GPUs with every Hello would fill the memory of the store's placements."""
    async with Collector(store, Limits(fresh_entities=40, fresh_per_s=0.001)) as collector:
        for number in range(100):
            message = hello()
            for entity in message.entities[1:]:
                entity.key = f"{entity.key}-{number}"
            async with collector.agent() as agent:
                await agent.send(hello=message)
                try:
                    await agent.call.read()
                except grpc.RpcError:
                    break
        assert number == 9  # 1 + 4 first, then 4 new ones each time
        assert collector.ingest.stats.rejected == {"too many entities": 1}
        async with collector.agent() as agent:  # those that it had last are taken
            for entity in (message := hello()).entities[1:]:
                entity.key = f"{entity.key}-8"
            await agent.send(hello=message)
            await agent.read("welcome")


@in_loop
async def test_many_hellos_are_slowed(store: Store) -> None:
    async with Collector(store, Limits(hellos=3, hellos_per_s=20)) as collector, collector.agent(hello()) as agent:
        for _ in range(20):
            await agent.send(hello=hello())
            await agent.read("welcome")
        assert collector.ingest.stats.slowed > 10


def test_accounts_of_invented_names_are_forgotten() -> None:
    accounts = AllowanceTable(Limits())
    kept = accounts.activate("kept")
    for number in range(NAMES):
        accounts.activate(f"x{number}")
        accounts.deactivate(f"x{number}")
    assert len(accounts) == ALLOWANCES + 1
    assert accounts.activate("kept") is kept


def test_positions_of_invented_names_are_forgotten(store: Store) -> None:
    positions = LaneOffsets(store, {"n0": 0})
    positions.advance(("n0", "s1"), LIVE, 7)
    for number in range(NAMES):
        positions.advance((f"x{number}", "s"), LIVE, 1)
    for number in range(100):
        positions.advance(("n0", f"t{number}"), EVENTS, 1)
    assert len(positions) == UNKNOWN_SPOOLS + SPOOLS
    assert len(positions._spools) == UNKNOWN_SPOOLS + 1
    assert len(positions.take_unsaved()) == UNKNOWN_SPOOLS + SPOOLS
    assert positions.get(("n0", "t99")) == {EVENTS: 1}


def test_what_could_not_be_noted_is_noted_the_next_time(store: Store) -> None:
    positions = LaneOffsets(store, {"n0": 0})
    positions.advance(("n0", "s1"), LIVE, 7)
    taken = positions.take_unsaved()
    assert positions.take_unsaved() == {}
    positions.give_back(taken)
    assert positions.take_unsaved() == {("n0", "s1"): {LIVE: 7}}


def test_log_lines_about_invented_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    logger = RateLimitedLogger()
    for number in range(NAMES):
        logger.warning((f"x{number}", "not allowed"), "%s: refused", f"x{number}")
        logger.warning((f"x{number}", "not allowed"), "%s: refused", f"x{number}")
    assert 100 < len(caplog.records) < 1000
    assert len(logger._logged) <= 20_000


def test_recent_forgets_the_oldest() -> None:
    recent: RecentlyUsed[int, int] = RecentlyUsed(3)
    for number in (1, 2, 3, 1, 4):
        recent[number] = number
    assert [key for key, _ in recent.items()] == [3, 1, 4]
    assert (2 in recent, recent.get(3), recent.pop(3), recent.get(3)) == (False, 3, 3, None)


@in_loop
async def test_statistics_of_invented_names_are_bounded(store: Store) -> None:
    async with Collector(store, Limits(unknown_nodes=5, flush_s=0.01)) as collector:
        for number in range(20):
            message = hello()
            message.node = f"x{number}"
            del message.entities[:]
            async with collector.agent(message) as agent:
                await agent.send(record=event(1))
                await agent.until_held(EVENTS, 1)
        stats = collector.ingest.stats
        assert len(stats.last_seen) <= 6
        assert len(stats.agent_versions) <= 6
        assert len(stats.unknown_nodes) <= 6


@in_loop
async def test_a_large_inventory_is_left_out(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello(inventory={"x": "y" * 70_000})):
        assert dict(collector.ingest.stats.rejected) == {"oversize": 1}
        assert store.inventories.newest("n0") == {}


@in_loop
async def test_refused_messages_count_as_waiting_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_samples: object) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(store.samples, "write", full)
    limits = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, backoff_ms=10, waiting_bytes=50_000)
    async with Collector(store, limits) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await until(lambda: collector.ingest.stats.trouble != "")
        for seq in range(2, 1000):
            await agent.send(batch=batch(seq, pb.Block(schema=44)))
        await until(lambda: collector.ingest.stats.dropped > 100)
        assert len(collector.ingest._writer._queue) <= 50_000 / 512
        assert agent.held.get(BACKFILL, 0) == 0
        monkeypatch.undo()


def test_entities_are_counted_when_they_are_new() -> None:
    account = AgentAllowance(Limits(fresh_entities=10, fresh_per_s=0.001))
    ids = np.arange(8, dtype=np.uint64)
    assert account.register_entities(ids)
    assert account.register_entities(ids)
    assert account.register_entities(ids[:2])
    assert not account.register_entities(ids + np.uint64(100))

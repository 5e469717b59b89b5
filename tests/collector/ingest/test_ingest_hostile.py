"""Agents that are broken or hostile, and defects of our own: what they cost, and that nobody else pays."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import pytest

from drover_collector.auth.identity import Identity, Role
from drover_collector.ingest import admission
from drover_collector.ingest import session as session_module
from drover_collector.ingest.decode import MAX_BLOCKS
from drover_collector.ingest.limits import MESSAGE_BYTES, AgentAllowance, Limits
from drover_collector.ingest.offsets import SPOOLS
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.ingest import EVENTS, GOOD, LIVE, QUICK, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until


def named(node: str) -> pb.Hello:
    message = hello()
    message.node = node
    return message


@in_loop
async def test_an_agent_that_reads_nothing_keeps_nobody_waiting(store: Store) -> None:
    wordy = hello("n0")
    wordy.schemas.add(id=2, scope=pb.GPU).columns.add(metric=1, type="?", name="x" * 1000)
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535))
    async with Collector(store) as collector, collector.agent(wordy, small) as mute:
        for seq in range(1, 2000):  # each is refused with a long sentence that the agent leaves in the connection
            await mute.send(batch=batch(seq, pb.Block(schema=2, rows=1)))
            if seq % 100 == 0:
                await until(lambda: collector.ingest.stats.waiting_bytes == 0)
        async with collector.agent(hello("n1")) as other:
            await other.send(batch=batch(1, GOOD))
            await other.send(record=event(1))
            await other.until_held(LIVE, 1)
            await other.until_held(EVENTS, 1)
        await until(lambda: collector.ingest.stats.connected == 1)
    await until(lambda: collector.ingest.stats.connected == 0)


@in_loop
async def test_who_takes_no_answer_is_let_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SEND_S", 0.05)
    written = asyncio.Event()

    class Mute:
        def try_write(self, _message: bytes) -> bool:
            return False

        async def write(self, _message: object) -> None:
            written.set()
            await asyncio.Event().wait()

    made: list[session_module.Session] = []

    async def stream() -> None:
        made.append(session_module.Session(Mute(), AgentAllowance(Limits())))
        await asyncio.Event().wait()

    reader = asyncio.create_task(stream())
    await until(lambda: made)
    sender = asyncio.create_task(made[0].acks.send(made[0].stream, {LIVE: 1}, T0))
    await asyncio.wait_for(written.wait(), 120)
    await asyncio.wait_for(asyncio.wait({reader, sender}), 120)
    assert reader.cancelled()
    assert "did not read an answer" in str(made[0].closed)


@in_loop
async def test_a_stream_without_a_hello_ends(store: Store) -> None:
    async with Collector(store, Limits(hello_s=0.05, check_s=0.01)) as collector, collector.agent() as agent:
        code, details = await agent.ended()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details == "no Hello arrived within 0.05 s"


@in_loop
async def test_streams_of_one_certificate_that_say_nothing_are_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "caller", lambda: Identity(Role.AGENT, "n0"))
    async with Collector(store, Limits(pending_streams=2)) as collector, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(collector.agent(hello()))  # one that has spoken does not count
        mute = [await stack.enter_async_context(collector.agent()) for _ in range(2)]
        await until(lambda: len(collector.ingest._pending) == 2)
        async with collector.agent() as third:
            code, details = await third.ended()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details.startswith("2 streams of drover://agent/n0 have not begun with a Hello")
        mute[0].call.cancel()
        await until(lambda: len(collector.ingest._pending) == 1)
        await stack.enter_async_context(collector.agent(hello()))
        mute[1].call.cancel()
        await until(lambda: not collector.ingest._pending)
        assert not collector.ingest._pending._by_certificate


@in_loop
async def test_who_has_not_said_who_it_is_sends_no_more_than_a_hello(store: Store) -> None:
    """Sixteen streams of one certificate may wait for theirs, and each holds what it was sent of its message."""
    large = bytes(6 << 20)
    async with Collector(store) as collector:
        async with collector.agent() as nameless:
            await nameless.call.write(large)
            code, why = await nameless.ended()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in why
        async with collector.agent(hello()) as named_one:
            await named_one.call.write(large)
            await named_one.send(batch=batch(1, GOOD))
            await named_one.until_held(LIVE, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "n0\nERROR all is lost"},
        {"node": "n\x00"},
        {"node": "n 0"},
        {"spool_id": "s" * 300},
        {"inventory": {"x": "y" * 20_000}},
    ],
)
@in_loop
async def test_hellos_of_nobody(store: Store, fields: dict[str, Any]) -> None:
    message = hello()
    message.MergeFrom(pb.Hello(**fields))
    async with Collector(store, Limits(hello_bytes=10_000)) as collector, collector.agent() as agent:
        await agent.send(hello=message)
        code, _ = await agent.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert collector.ingest.stats.last_seen == {}


@in_loop
async def test_nodes_that_nobody_knows_are_bounded(store: Store) -> None:
    async with Collector(store, Limits(unknown_nodes=2)) as collector:
        async with collector.agent(named("x1")), collector.agent(named("x2")):
            async with collector.agent() as third:
                await third.send(hello=named("x3"))
                code, details = await third.ended()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "fleet.toml has neither node 'x3'" in details
            async with collector.agent(hello("n0")):
                pass
            assert collector.ingest.stats.unknown_nodes == {"x1", "x2"}
        await until(lambda: collector.ingest.stats.connected == 0)
        async with collector.agent(named("x3")):  # those that left make room
            assert collector.ingest.stats.unknown_nodes == {"x3"}
            assert set(collector.ingest.stats.last_seen) == {"n0", "x3"}


@in_loop
async def test_metrics_that_nobody_knows_are_bounded(store: Store) -> None:
    message = hello()
    for number in range(3000):
        message.schemas[0].columns.add(metric=60_000, type="B", name=f"u{number}" + "x" * 300)
    async with Collector(store) as collector, collector.agent(message) as agent:
        assert len(agent.welcome.ignored) == 1000
        assert len(collector.ingest.stats.unknown_metrics) == 1000
        assert max(map(len, collector.ingest.stats.unknown_metrics)) == 256


@in_loop
async def test_a_batch_of_countless_blocks_is_refused(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, *[pb.Block(schema=1)] * (MAX_BLOCKS + 1)))
        await agent.send(batch=batch(2, GOOD))
        await agent.until_held(LIVE, 2)
        assert "at most 4096 are allowed" in agent.rejected[LIVE, 1]


@in_loop
async def test_what_waits_counts_with_the_hello_that_it_needs(store: Store) -> None:
    """A Hello before every batch would otherwise fill the memory with dictionaries that nobody counts."""
    async with Collector(store, Limits(flush_s=30)) as collector, collector.agent(hello()) as agent:
        big = hello(inventory={"x": "y" * 50_000})
        for seq in range(1, 4):
            await agent.send(hello=big)
            await agent.send(batch=batch(seq, GOOD))
        await until(lambda: collector.ingest.stats.waiting_bytes > 150_000)
        assert collector.ingest.stats.waiting_bytes < 170_000


@in_loop
async def test_spool_after_spool_is_forgotten(store: Store) -> None:
    async with Collector(store) as collector:
        for number in range(SPOOLS + 5):
            async with collector.agent(hello(spool=f"s{number}")) as agent:
                await agent.send(batch=batch(1, GOOD))
                await agent.until_held(LIVE, 1)
            await until(lambda: not collector.ingest.stats.connected)  # else the next one is a rival of this one
        assert collector.ingest._writer.offsets.keys() == [("n0", f"s{n}") for n in range(5, SPOOLS + 5)]


@in_loop
async def test_a_schema_sent_again_under_the_same_number(store: Store) -> None:
    async with Collector(store, Limits(flush_s=0.2)) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, block([(T0, 1, (300.0, 50.0))])))
        await agent.send(hello=hello(metrics=("gpu_temp_c", "power_w")))
        await agent.send(batch=batch(2, block([(T0, 2, (51.0, 301.0))], metrics=("gpu_temp_c", "power_w"))))
        await agent.until_held(LIVE, 2)
        found = store.buckets.read(index_of(), T0)
        assert found.gpu["power_w"][:2].tolist() == [300.0, 301.0]
        assert found.gpu["gpu_temp_c"][:2].tolist() == [50.0, 51.0]


@in_loop
async def test_a_resent_event_that_fails_us_takes_no_other_with_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at together with all that came: that was let go, and acknowledged by what came after it."""
    asked = store.events.read

    def events(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a defect")

    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        await agent.send(record=event(1))
        await agent.until_held(EVENTS, 1)
        monkeypatch.setattr(store.events, "read", events)
        await agent.send(records=pb.Records(records=[event(1), event(2, gpu=1)]))
        await until(lambda: collector.ingest.stats.defects > 0)
        await agent.send(record=event(3, gpu=2))
        await agent.until_held(EVENTS, 3)
        assert agent.rejected == {(EVENTS, 1): "this collector failed on it (RuntimeError); see its log"}
    monkeypatch.setattr(store.events, "read", asked)
    assert {e.id for e in store.events.read(0, T0 * 2)} == {"n0/s1/1", "n0/s1/2", "n0/s1/3"}


@pytest.mark.parametrize("where", ["offsets.advance", "_count", "_save_offsets", "events._hand_on"])
@in_loop
async def test_a_defect_ends_no_writer_and_is_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    limits = Limits(flush_s=0.01, retry_s=0.01, seqs_every_s=0)
    async with Collector(store, limits) as collector:
        writers: Any = collector.ingest._writer
        part, _, where = where.rpartition(".")
        writers = getattr(writers, part) if part else writers
        right = getattr(writers, where)
        with monkeypatch.context() as patched:

            def wrong(*_: Any) -> Any:
                raise RuntimeError("a defect")

            patched.setattr(writers, where, wrong)
            async with collector.agent(hello()) as agent:
                await agent.send(batch=batch(1, GOOD))
                await agent.send(record=event(1))
                await until(lambda: collector.ingest.stats.defects > 0)
                await until(lambda: collector.ingest.stats.waiting_bytes == 0)
        assert getattr(writers, where) == right
        assert collector.ingest.stats.defect.endswith(": RuntimeError")
        async with collector.agent(hello()) as agent:  # as an agent does that gets no Ack
            await agent.send(batch=batch(1, GOOD))
            await agent.send(record=event(1))
            await agent.until_held(LIVE, 1)
            await agent.until_held(EVENTS, 1)
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2


@in_loop
async def test_a_store_that_hangs_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    write = store.samples.write

    def stuck(samples: Any) -> None:
        free.wait(120)
        write(samples)

    monkeypatch.setattr(store.samples, "write", stuck)
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await until(lambda: "telemetry" in collector.ingest.stats.writing)
        await agent.send(record=event(1))
        await agent.until_held(EVENTS, 1)
        free.set()
        await agent.until_held(LIVE, 1)
        assert collector.ingest.stats.writing == {}


@in_loop
async def test_a_trouble_of_one_writer_is_not_hidden_by_the_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drover_collector.store import StoreError

    def full(_samples: Any) -> None:
        raise StoreError("no space left on device")

    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        with monkeypatch.context() as patched:
            patched.setattr(store.samples, "write", full)
            await agent.send(batch=batch(1, GOOD))
            await until(lambda: collector.ingest.stats.trouble != "")
            await agent.send(record=event(1))
            await agent.until_held(EVENTS, 1)
            assert collector.ingest.stats.troubles == {"telemetry": "no space left on device"}
        await agent.until_held(LIVE, 1)
        assert collector.ingest.stats.troubles == {}


@in_loop
async def test_what_unpacks_to_more_than_a_message_may_have_ends_its_stream(store: Store) -> None:
    gzip = grpc.Compression.Gzip
    huge = (("grpc.max_send_message_length", -1),)
    async with Collector(store) as collector, collector.agent(hello(), compression=gzip) as good:
        async with collector.agent(options=huge, compression=gzip) as hostile:
            await hostile.call.write(bytes(4 * MESSAGE_BYTES))  # some 70 kB on the wire
            code, why = await hostile.ended()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in why
        await good.send(batch=batch(1, GOOD))
        await good.until_held(LIVE, 1)
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2

"""Two agents that claim one node, and one agent that comes again."""

from __future__ import annotations

import time

import grpc
import pytest

from drover_collector.ingest import ownership as ownership
from drover_collector.ingest.limits import Limits
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, gpu_key, hello, index_of
from testbed.ingest import GOOD, LIVE, QUICK, Collector
from testbed.loop import in_loop
from testbed.waiting import until


def hello_of(spool: str, boot: str) -> pb.Hello:
    return hello(spool=spool, boot_id=boot)


@in_loop
async def test_a_second_agent_is_refused_while_the_first_speaks(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with Collector(store) as collector, collector.agent(hello_of("s1", "b1")) as first:
        await first.send(batch=batch(1, GOOD))
        await first.until_held(LIVE, 1)
        before = store.buckets.read(index_of(), T0)
        for spool, boot in (("s2", "b1"), ("s1", "b2"), ("s2", "b2"), ("s2", "b2")):
            async with collector.agent() as second:
                await second.send(hello=hello_of(spool, boot))
                code, details = await second.ended()
                assert code is grpc.StatusCode.ALREADY_EXISTS
                assert "node 'n0' is already reported by another agent" in details
                assert "Stop one of the two" in details
        stats = collector.ingest.stats
        assert stats.rejected["second agent"] == 4
        assert stats.replaced == 0
        assert stats.notices() == ["Two agents report as node n0. The newer one is refused."]
        assert sum("another agent" in record.getMessage() for record in caplog.records) == 1
        await first.send(batch=batch(2, GOOD))  # the first never noticed
        await first.until_held(LIVE, 2)
        after = store.buckets.read(index_of(), T0)
        assert after.gpu["power_w"][0] == before.gpu["power_w"][0] == 300.0
        assert after.gpu_rows.tolist() == before.gpu_rows.tolist()
        assert list(store.offsets.read()) == [] or set(store.offsets.read()) == {("n0", "s1")}


@in_loop
async def test_the_second_agent_takes_over_when_the_first_is_silent(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello_of("s1", "b1")) as first:
        (session,) = collector.ingest._handshakes.nodes.owners()
        session.last_message_s = time.monotonic() - Limits().alive_s - 1  # as after a power cut
        async with collector.agent(hello_of("s2", "b2")) as second:
            code, details = await first.ended()
            assert code is grpc.StatusCode.ABORTED
            assert "this one had sent nothing for 41 s" in details
            await second.send(batch=batch(1, GOOD))
            await second.until_held(LIVE, 1)
        assert collector.ingest.stats.replaced == 1
        assert collector.ingest.stats.notices() == []


@in_loop
async def test_the_second_agent_takes_over_when_the_first_has_left(store: Store) -> None:
    async with Collector(store) as collector:
        async with collector.agent(hello_of("s1", "b1")):
            pass
        await until(lambda: collector.ingest.stats.connected == 0)
        async with collector.agent(hello_of("s2", "b2")) as second:
            await second.send(batch=batch(1, GOOD))
            await second.until_held(LIVE, 1)


@in_loop
async def test_the_same_agent_replaces_its_older_stream_and_resends_once(store: Store) -> None:
    """A half-open connection: the batch that waits on the older stream comes again on the newer one."""
    async with Collector(store, Limits(flush_s=0.2)) as collector, collector.agent(hello_of("s1", "b1")) as older:
        await older.send(batch=batch(1, GOOD))
        await until(lambda: collector.ingest.stats.waiting_bytes > 0)
        async with collector.agent(hello_of("s1", "b1")) as newer:
            assert (await older.ended())[0] is grpc.StatusCode.ABORTED
            await newer.send(batch=batch(1, GOOD))
            await newer.until_held(LIVE, 1)
            assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2


@in_loop
async def test_two_agents_with_one_spool_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MAX_RECONNECTS", 3)
    async with Collector(store, QUICK) as collector:
        async with collector.agent(hello_of("s1", "b1")), collector.agent(hello_of("s1", "b1")):
            assert collector.ingest.stats.notices() == []
            async with collector.agent(hello_of("s1", "b1")), collector.agent(hello_of("s1", "b1")):
                (text,) = collector.ingest.stats.notices()
        assert "two agents share one spool" in text


@in_loop
async def test_a_gpu_that_its_node_reports_cannot_be_claimed_by_another(store: Store) -> None:
    thief = hello("n1")
    thief.entities[1].key = thief.entities[1].serial = gpu_key(0, 0)
    async with Collector(store) as collector:
        async with collector.agent(hello("n0")) as owner:
            await owner.send(batch=batch(1, GOOD))
            await owner.until_held(LIVE, 1)
            async with collector.agent(thief) as other:
                await other.send(batch=batch(1, block([(T0, 1, (999.0, 99.0)), (T0 + 1500, 1, (999.0, 99.0))])))
                await other.send(batch=batch(2, block([(T0, 2, (200.0, 40.0))])))
                await other.until_held(LIVE, 2)
                assert "belongs to another node: 'n0' reports it now" in other.rejected[LIVE, 1]
                (notice,) = collector.ingest.stats.notices()
                assert notice.startswith("Data was refused within 5 min, of n1: entity 1:")
            await owner.send(hello=hello("n0"))  # sent again, it is the owner's still
            await owner.send(batch=batch(2, block([(T0 + 2000, 1, (320.0, 50.0))])))
            await owner.until_held(LIVE, 2)
            assert owner.rejected == {}
            found = store.buckets.read(index_of(), T0)
            assert found.gpu["power_w"][[0, 4, 5]].tolist()[::2] == [310.0, 200.0]
            assert found.gpu_rows[[0, 4, 5]].tolist() == [3, 0, 1]
        await until(lambda: collector.ingest.stats.connected == 0)
        async with collector.agent(thief) as mover:  # a card that was moved
            await mover.send(batch=batch(3, block([(T0 + 10_000, 1, (250.0, 50.0))])))
            await mover.until_held(LIVE, 3)
            assert mover.rejected == {}
        assert store.buckets.read(index_of(), T0 + 10_000).gpu_rows[[0, 4]].tolist() == [0, 1]
        await until(lambda: collector.ingest.stats.connected == 0)
        assert collector.ingest._handshakes.gpus._owners == {}

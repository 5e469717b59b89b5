"""Resends, disorder and odd sequences: no answer changes, and nothing is lost. Read back from the real store."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from drover_collector.ingest import offsets as offsets
from drover_collector.ingest.limits import Limits
from drover_collector.store import Store
from drover_collector.store.repositories.offsets import OffsetTable
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Absence, Holding
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import GPUS, T0, batch, block, gpu_key, hello, index_of
from testbed.ingest import BACKFILL, EVENTS, LIVE, QUICK, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until


def made(seq: int, lane: pb.Lane.ValueType = LIVE) -> pb.Batch:
    """Two seconds of all GPUs of n0, with values of its own."""
    rows = [
        (T0 + 2000 * seq + ms, slot + 1, (100.0 + seq + slot / 10, None if slot == 2 else 40.0 + seq))
        for ms in (0, 1000)
        for slot in range(GPUS)
    ]
    return batch(seq, block(rows), lane=lane)


def answers(store: Store) -> dict[str, Any]:
    """What the console asks, all of it."""
    found = [store.buckets.read(index_of(), T0 + ms) for ms in range(0, 60_000, 10_000)]
    return {
        "rows": [bucket.gpu_rows.tolist() for bucket in found],
        "power": [repr(bucket.gpu["power_w"].tolist()) for bucket in found if "power_w" in bucket.gpu],
        "temp": [repr(bucket.gpu["gpu_temp_c"].tolist()) for bucket in found if "gpu_temp_c" in bucket.gpu],
        "latest": store.samples.latest_values("n0", T0 + 60_000),
        "gpus": [(row.gpu, row.serial) for row in store.entities.gpus_of("n0")],
        "events": sorted((e.id, e.ts_ms, e.code) for e in store.events.read(0, T0 * 2)),
        "absences": store.absences.current("n0"),
        "holdings": store.jobs.holdings(0, T0 * 2),
    }


def records() -> list[pb.Record]:
    return [
        event(1, gpu=1),
        pb.Record(seq=2, absence=pb.Absence(gpu=1, metric="power_w", reason="lost", from_ms=T0)),
        pb.Record(seq=3, absence=pb.Absence(gpu=1, metric="power_w", reason="lost", from_ms=T0, to_ms=T0 + 5)),
        pb.Record(seq=4, holding=pb.Holding(gpu=2, job="j1", from_ms=T0)),
        pb.Record(seq=5, absence=pb.Absence(gpu=1, metric="gpu_temp_c", reason="lost", from_ms=T0)),
        event(6, T0 + 3000, gpu=2, code="48"),
    ]


async def send_all(agent: Any, order: list[int]) -> None:
    for seq in order:
        await agent.send(batch=made(seq))
    for record in records():
        await agent.send(record=record)
    await agent.until_held(LIVE, max(order))
    await agent.until_held(EVENTS, 6)


@in_loop
async def test_whatever_is_resent_in_whatever_order_the_answers_are_the_same(store: Store) -> None:
    async with Collector(store, QUICK) as collector:
        async with collector.agent(hello()) as agent:
            await send_all(agent, [1, 2, 3, 4, 5])
        expected = answers(store)
        assert sum(map(sum, expected["rows"])) == 5 * 2 * GPUS
        assert len(expected["events"]) == 2
        assert expected["absences"] == [Absence("n0", 1, "gpu_temp_c", "lost", T0)]  # those that go on
        assert expected["holdings"] == [Holding("n0", 2, "j1", T0)]
        for order in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3, 3, 5, 1, 5, 2, 4]):
            async with collector.agent(hello()) as agent:
                await send_all(agent, order)
                assert answers(store) == expected
    async with Collector(store, QUICK) as collector:  # after a restart, in one insert with itself
        async with collector.agent(hello()) as agent:
            await send_all(agent, [5, 1, 2, 1, 3, 4])
        assert answers(store) == expected
        assert collector.events == []


@in_loop
async def test_a_lost_ack_and_the_same_batch_on_two_streams(store: Store) -> None:
    """The older stream's batches wait in the same insert as their resend on the newer one."""
    async with Collector(store, Limits(flush_s=0.2)) as collector, collector.agent(hello()) as older:
        for seq in (1, 2, 3):
            await older.send(batch=made(seq))
        await older.send(record=event(1, gpu=1))
        await until(lambda: collector.ingest.stats.waiting_bytes > 0)
        async with collector.agent(hello()) as newer:
            await send_all(newer, [1, 2, 3])
        found = answers(store)
        assert sum(map(sum, found["rows"])) == 3 * 2 * GPUS
        assert len(found["events"]) == 2
        assert [e.id for e in collector.events] == ["n0/s1/1", "n0/s1/6"]


@pytest.mark.parametrize("order", list(itertools.permutations(["live 3", "backfill 9", "live 4"])))
@in_loop
async def test_lanes_in_any_order(store: Store, order: tuple[str, ...]) -> None:
    """The same time may come on both lanes; each keeps its own position."""
    async with Collector(store, QUICK) as collector, collector.agent(hello()) as agent:
        for word in order:
            lane, seq = word.split()
            content = made({"3": 3, "9": 3, "4": 4}[seq])
            content.seq, content.lane = int(seq), BACKFILL if lane == "backfill" else LIVE
            await agent.send(batch=content)
        await agent.until_held(LIVE, 4)
        await agent.until_held(BACKFILL, 9)
        assert sum(map(sum, answers(store)["rows"])) == 2 * 2 * GPUS
        assert agent.held == {EVENTS: 0, LIVE: 4, BACKFILL: 9}


@pytest.mark.parametrize("jump", [2**63, 2**64 - 1, 2**32 + 7])
@in_loop
async def test_a_sequence_that_jumps_wedges_nothing(store: Store, jump: int) -> None:
    far = made(2)
    far.seq = jump
    async with Collector(store, QUICK) as collector:
        async with collector.agent(hello()) as agent:
            await agent.send(batch=made(1))
            await agent.send(batch=far)
            await agent.send(record=event(jump, T0 + 1))
            await agent.until_held(LIVE, jump)
            await agent.until_held(EVENTS, jump)
            await agent.send(batch=made(3))  # lower than what is held: stored all the same
            await agent.send(record=event(4, T0 + 2000, code="48"))
            await until(lambda: sum(map(sum, answers(store)["rows"])) == 3 * 2 * GPUS)
            await until(lambda: len(store.events.read(0, T0 * 2)) == 2)
        assert agent.rejected == {}
    async with Collector(store, QUICK) as collector:
        async with collector.agent(hello()) as agent:
            assert (agent.held[LIVE], agent.held[EVENTS]) == (jump, jump)  # a wise agent begins a new spool
        await until(lambda: collector.ingest.stats.connected == 0)
        async with collector.agent(hello(spool="s2")) as fresh:
            assert fresh.held == {EVENTS: 0, LIVE: 0, BACKFILL: 0}
            await fresh.send(batch=made(4))
            await fresh.until_held(LIVE, 4)


@in_loop
async def test_a_spool_out_of_a_backup_gives_its_sequences_out_again(store: Store) -> None:
    """Other events under sequences that are held are stored and judged; true resends are not."""
    async with Collector(store, QUICK) as collector:
        async with collector.agent(hello()) as agent:
            for seq in (1, 2, 3):
                await agent.send(record=event(seq, T0 + seq, code=str(40 + seq)))
                await agent.send(batch=made(seq))
            await agent.until_held(EVENTS, 3)
            await agent.until_held(LIVE, 3)
        async with collector.agent(hello()) as agent:
            await agent.send(record=event(2, T0 + 2, code="42"))  # the same
            for _ in range(2):
                await agent.send(record=event(2, T0 + 9000, code="79"))  # another
            await agent.send(record=pb.Record(seq=3, holding=pb.Holding(gpu=2, job="j9", from_ms=T0)))
            content = made(4)
            content.seq = 2
            await agent.send(batch=content)
            await agent.send(record=event(4, T0 + 9500, code="94"))
            await agent.until_held(EVENTS, 4)
            await until(lambda: sum(map(sum, answers(store)["rows"])) == 4 * 2 * GPUS)
        assert sorted(e.code for e in store.events.read(0, T0 * 2)) == ["41", "42", "43", "79", "94"]
        assert sorted(e.code for e in collector.events) == ["41", "42", "43", "79", "94"]
        assert store.jobs.holdings(0, T0 * 2) == [Holding("n0", 2, "j9", T0)]
        assert store.offsets.read()["n0", "s1"][EVENTS] in (3, 4)


@in_loop
async def test_schemas_that_change_in_midstream(store: Store) -> None:
    """Each batch is read by the Hello before it; what a newer agent adds is skipped, what it leaves out is absent."""
    power, clock = BY_NAME["power_w"], BY_NAME["sm_clock_mhz"]
    newer = hello(metrics=("sm_clock_mhz",))
    newer.schemas[0].columns.add(metric=60_001, type="q", name="from_the_future")
    mistyped = hello()
    mistyped.schemas[0].columns[0].type = "q"
    async with Collector(store, Limits(flush_s=0.1)) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, block([(T0, 1, (300.0, 50.0))])))
        await agent.send(hello=newer)
        row = block([(T0 + 1000, 1, (1410.0,))], ("sm_clock_mhz",))
        row.body += (7).to_bytes(8, "little")
        row.presence = b"\x03"
        await agent.send(batch=batch(2, row))
        await agent.send(hello=mistyped)
        await agent.send(batch=batch(3, block([(T0 + 2000, 1, (300.0, 50.0))])))
        await agent.send(hello=hello(metrics=("power_w",)))
        await agent.send(batch=batch(4, block([(T0 + 3000, 1, (301.0,))], ("power_w",))))
        await agent.until_held(LIVE, 4)
        assert list(agent.rejected) == [(LIVE, 3)]
        assert f"metric {power.id} (power_w) is sent as gpu 'q'" in agent.rejected[LIVE, 3]
        assert store.samples.latest_values("n0", T0 + 4000)[Scope.GPU, 0, None] == {
            "power_w": (301.0, T0 + 3000), "gpu_temp_c": (50.0, T0), clock.name: (1410.0, T0 + 1000),
        }  # fmt: skip
        assert collector.ingest.stats.unknown_metrics == {"from_the_future"}
        assert [row.serial for row in store.entities.gpus_of("n0")] == [gpu_key(0, slot) for slot in range(1)]


@in_loop
async def test_an_agent_that_comes_from_another_collector_of_the_store_gets_the_offsets_of_that_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "shared", True)
    async with Collector(store) as collector:
        store.offsets.write({("n0", "s1"): {LIVE: 7}})  # meanwhile, by the other
        async with collector.agent(hello()) as agent:
            assert agent.held[LIVE] == 7


@in_loop
async def test_a_store_that_hangs_keeps_no_agent_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "shared", True)
    monkeypatch.setattr(offsets, "REFRESH_S", 0.05)
    answers_now, asked = threading.Event(), []

    def hang(_table: OffsetTable, keys: set[tuple[str, str]]) -> dict[tuple[str, str], dict[int, int]]:
        asked.append(set(keys))
        assert answers_now.wait(120)
        return {key: {LIVE: 7} for key in keys}

    monkeypatch.setattr(OffsetTable, "noted", hang)
    async with Collector(store) as collector:
        try:
            async with collector.agent(hello()) as agent, collector.agent(hello("n1")) as other:
                assert agent.held[LIVE] == other.held[LIVE] == 0
                assert len(asked) == 1, "one thread hangs, not one for each agent"
                answers_now.set()
                positions = collector.ingest._writer.offsets
                await until(
                    lambda: [positions.get(key).get(LIVE) for key in (("n0", "s1"), ("n1", "s1"))] == [7, 7],
                    "both are known",
                )
        finally:
            answers_now.set()

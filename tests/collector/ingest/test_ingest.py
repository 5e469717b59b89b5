"""Agents over real gRPC into a real store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from drover_collector.ingest.limits import Limits
from drover_collector.ingest.parse_records import ParsedRecord, RecordSource, parse_record
from drover_collector.store import ProbeRow, Store, StoreError
from drover_collector.store.repositories.probes import Key
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Absence,
    Event,
    EventKind,
    Holding,
    ProbeResult,
    to_json,
)
from drover_core.model.kinds import BOOT_ID
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.ingest import BACKFILL, EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until


@in_loop
async def test_samples_are_stored_before_they_are_acknowledged(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        assert (agent.welcome.protocol, agent.welcome.ts_ms, agent.held) == (
            1,
            T0 + 2000,
            {EVENTS: 0, LIVE: 0, BACKFILL: 0},
        )
        await agent.send(batch=batch(1, GOOD))
        await agent.send(batch=batch(5, block([(T0 + 2000, 2, (200.0, 40.0))]), lane=BACKFILL))
        await agent.until_held(LIVE, 1)
        await agent.until_held(BACKFILL, 5)
        assert agent.held == {EVENTS: 0, LIVE: 1, BACKFILL: 5}
        assert agent.rejected == {}
        bucket = store.buckets.read(index_of(), T0)
        assert bucket.gpu["power_w"][:2].tolist() == [300.0, 200.0]
        assert bucket.gpu["gpu_temp_c"][:2].tolist() == [50.0, 40.0]
        assert bucket.gpu_rows[:2].tolist() == [2, 1]
        assert [row.serial for row in store.entities.gpus_of("n0")] == ["S0-0", "S0-1"]
        stats = collector.ingest.stats
        assert (stats.batches, stats.rows, stats.samples, stats.rejected_total) == (2, 3, 5, 0)
        assert (stats.connected, stats.waiting_bytes) == (1, 0)
        assert stats.last_seen["n0"] == T0 + 2000
        assert stats.agent_versions == {"n0": "test"}
    await until(lambda: collector.ingest.stats.connected == 0)


@in_loop
async def test_a_resend_changes_nothing_and_is_acknowledged(store: Store) -> None:
    async with Collector(store) as collector:
        for _ in range(2):
            async with collector.agent(hello()) as agent:
                await agent.send(batch=batch(1, GOOD))
                await agent.send(record=event(1))
                await agent.read("ack")
                await agent.until_held(LIVE, 1)
                await agent.until_held(EVENTS, 1)
        before = store.buckets.read(index_of(), T0)
        assert before.gpu_rows[0] == 2
        assert before.gpu["power_w"][0] == 300.0
        assert len(store.events.read(0, T0 + 10_000)) == 1
        assert len(collector.events) == 1
        assert collector.ingest.stats.events == 1


@in_loop
async def test_a_restarted_collector_knows_what_it_holds(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(7, GOOD))
        await agent.send(record=event(3))
        await agent.until_held(LIVE, 7)
        await agent.until_held(EVENTS, 3)
    async with Collector(store) as collector:
        async with collector.agent(hello()) as agent:
            assert agent.held == {EVENTS: 3, LIVE: 7, BACKFILL: 0}
            await agent.send(record=event(3))
            await agent.send(record=event(4))
            await agent.until_held(EVENTS, 4)
            assert [e.id for e in collector.events] == ["n0/s1/4"]
        async with collector.agent(hello(spool="s2")) as agent:
            assert agent.held == {EVENTS: 0, LIVE: 0, BACKFILL: 0}


@in_loop
async def test_bad_batches_are_refused_with_their_reason_and_the_stream_goes_on(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with Collector(store, Limits(flush_s=0.01, batch_bytes=4000)) as collector, collector.agent(hello()) as agent:
        await agent.call.write(b"\xff\xff junk \xff")
        await agent.send(batch=batch(1, pb.Block(schema=1, rows=3, body=b"x")))
        await agent.send(batch=batch(2, block([(T0, 1, (1.0, 1.0))] * 400)))
        await agent.send(batch=batch(3, pb.Block(schema=44, rows=1)))
        await agent.send(batch=batch(4, block([(T0, 44, (1.0, 1.0))])))
        await agent.send(batch=batch(5, GOOD, lane=EVENTS))
        await agent.send(batch=batch(6, pb.Block(schema=44, rows=1)))
        await agent.send(batch=batch(9, GOOD))
        await agent.until_held(LIVE, 9)
        while len(agent.rejected) < 6:
            await agent.read()
        reasons = {seq: reason for (_, seq), reason in agent.rejected.items()}
        assert reasons[1].startswith("3 rows of schema 1 take")
        assert "at most 4000 are allowed" in reasons[2]
        assert reasons[3] == "schema 44 is not in the Hello"
        assert reasons[4] == "entity 44 is not in the Hello"
        assert "LIVE and BACKFILL are allowed" in reasons[5]
        stats = collector.ingest.stats
        assert dict(stats.rejected) == {
            "junk": 1, "bad size": 1, "oversize": 1, "unknown schema": 2, "bad entity": 1, "bad lane": 1,
        }  # fmt: skip
        assert stats.batches == 1
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2
        assert sum("schema 44" in record.message for record in caplog.records) == 1  # logged once


@in_loop
async def test_a_batch_for_another_node(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello("n0")) as agent:
        await agent.send(hello=hello("n1"))
        await agent.send(batch=batch(50, GOOD))
        await agent.send(record=event(51))
        while len(agent.rejected) < 2:
            await agent.read()
        assert set(agent.rejected.values()) == {
            "data for node 'n1' on the stream of 'n0'; use one stream for each node"
        }
        assert agent.held == {EVENTS: 0, LIVE: 0, BACKFILL: 0}  # the other's numbers move nothing
        await agent.send(hello=hello("n0"))
        await agent.send(batch=batch(1, GOOD))
        await agent.until_held(LIVE, 1)
        assert dict(collector.ingest.stats.rejected) == {"another node": 2}
        assert store.buckets.read(index_of(), T0).gpu_rows.sum() == 2
        assert collector.events == []


@in_loop
async def test_before_hello(store: Store) -> None:
    """What is none is not parsed, and ends its stream: agents begin each stream with one."""
    async with Collector(store) as collector:
        for raw in (pb.AgentMessage(batch=batch(1, GOOD)).SerializeToString(), b"", b"\x0a\xff junk"):
            async with collector.agent() as agent:
                await agent.call.write(raw)
                code, details = await agent.ended()
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert details == "the stream did not begin with a Hello"
        assert collector.ingest.stats.rejected["no hello"] == 3
        async with collector.agent(hello()):
            pass


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (hello(protocol=2), grpc.StatusCode.FAILED_PRECONDITION, "speaks protocol 1, the agent 2; update the older"),
        (hello(spool_id="a/b"), grpc.StatusCode.INVALID_ARGUMENT, "is invalid"),
    ],
)
@in_loop
async def test_hellos_that_cannot_be(store: Store, message: pb.Hello, code: grpc.StatusCode, words: str) -> None:
    async with Collector(store) as collector, collector.agent() as agent:
        await agent.send(hello=message)
        found = await agent.ended()
        assert found[0] is code
        assert words in found[1]


@in_loop
async def test_the_newer_stream_of_a_node_wins(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as older:
        async with collector.agent(hello()) as newer:
            code, details = await older.ended()
            assert code is grpc.StatusCode.ABORTED
            assert "the same agent opened a newer stream for node 'n0'" in details
            await newer.send(batch=batch(1, GOOD))
            await newer.until_held(LIVE, 1)
        assert collector.ingest.stats.replaced == 1


@in_loop
async def test_unknown_nodes_and_metrics_are_kept_and_reported(store: Store) -> None:
    message = hello("n77")
    message.schemas[0].columns.add(metric=60_001, type="B", name="from_the_future")
    async with Collector(store) as collector, collector.agent(message) as agent:
        assert list(agent.welcome.ignored) == ["from_the_future"]
        made = pb.Block(schema=1, rows=1, presence=b"\x07", body=GOOD.body[:14] + b"\x01")
        await agent.send(batch=batch(1, made))
        await agent.until_held(LIVE, 1)
        stats = collector.ingest.stats
        assert stats.unknown_nodes == {"n77"}
        assert stats.unknown_metrics == {"from_the_future"}
        assert store.samples.latest_values("n77", T0 + 1)[Scope.GPU, 0, None] == {
            "power_w": (300.0, T0), "gpu_temp_c": (50.0, T0),
        }  # fmt: skip


@in_loop
async def test_impossible_values_are_absent_and_counted(store: Store) -> None:
    body = GOOD.body[:8] + b"\x01\x00" + b"\xff\xff" + GOOD.body[12:14]  # 6553.5 W
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, pb.Block(schema=1, rows=1, presence=b"\x03", body=body)))
        await agent.until_held(LIVE, 1)
        assert agent.rejected == {}
        assert collector.ingest.stats.out_of_range == {"power_w": 1}
        assert store.samples.latest_values("n0", T0 + 1)[Scope.GPU, 0, None] == {"gpu_temp_c": (50.0, T0)}


@in_loop
async def test_records_are_stored_and_events_handed_on(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello(inventory={"driver": "580"})) as agent:
        stored_first: list[int] = []
        collector.events = _Checked(lambda e: stored_first.append(len(store.events.read(0, T0 * 2, limit=99))))
        collector.ingest._context.listeners.on_stored = collector.events.extend
        await agent.send(record=event(1, gpu=3, message="Xid"))
        await agent.send(
            record=pb.Record(seq=2, absence=pb.Absence(gpu=3, metric="power_w", reason="lost", from_ms=T0))
        )
        await agent.send(record=pb.Record(seq=3, holding=pb.Holding(gpu=2, job="j1", from_ms=T0)))
        await agent.send(record=event(4, kind="gossip"))
        await agent.send(record=pb.Record(seq=5, absence=pb.Absence(metric="no_such", reason="lost", from_ms=T0)))
        await agent.send(record=pb.Record(seq=6))
        await agent.until_held(EVENTS, 6)
        while len(agent.rejected) < 3:
            await agent.read()
        assert collector.events == [
            Event("n0/s1/1", T0 + 1000, "n0", 3, EventKind.XID, "79", "Xid", "kmsg", received_ms=T0 + 2000)
        ]
        assert stored_first and stored_first[0] >= 1
        assert store.absences.current("n0") == [Absence("n0", 3, "power_w", "lost", T0)]
        assert store.jobs.holdings(T0, T0 + 1) == [Holding("n0", 2, "j1", T0)]
        assert "an event of kind 'gossip'" in agent.rejected[EVENTS, 4]
        assert "'no_such'" in agent.rejected[EVENTS, 5]
        await until(lambda: store.inventories.newest("n0") == {"driver": "580"})


@in_loop
async def test_the_boot_that_a_node_is_in_is_kept_with_its_inventory(store: Store) -> None:
    """A return to service may need a newer one; an agent that knows none says nothing of it."""
    async with Collector(store) as collector:
        for n, boot in enumerate(("", "A", "A", "B")):
            collector.now_ms = T0 + 1000 * n
            async with collector.agent(hello(inventory={"driver": "580"}, boot_id=boot)):
                inventory = {"driver": "580"} | ({BOOT_ID: boot} if boot else {})
                await until(lambda inventory=inventory: store.inventories.newest("n0") == inventory)
    assert store.inventories.boots("n0", T0 + 1500) == [(T0 + 1000, "A"), (T0 + 3000, "B")]
    assert store.inventories.boots("n0", 0) == [(T0, ""), (T0 + 1000, "A"), (T0 + 3000, "B")]
    assert store.inventories.boots("n1", 0) == []


@in_loop
async def test_a_probes_result_is_stored_with_what_its_gpu_was(store: Store) -> None:
    facts = {"driver_version": "580", "gpu3.model": "NVIDIA H200", "gpu3.serial": "S", "gpu3.power_limit_set_w": "700"}
    store.inventories.write([("n0", T0, facts)])
    result = ProbeResult("r1/0", "n7", 3, "gemm_bf16", T0, None, 790.0, "TFLOP/s", request="r1")
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.send(record=pb.Record(seq=1, probe_result=pb.ProbeResult(request_id="r1", json=to_json(result))))
        await agent.send(record=pb.Record(seq=2, probe_result=pb.ProbeResult(request_id="r1", json="{}")))
        far = to_json(replace(result, gpu=999))
        await agent.send(record=pb.Record(seq=3, probe_result=pb.ProbeResult(request_id="r1", json=far)))
        await agent.until_held(EVENTS, 3)
        while len(agent.rejected) < 2:
            await agent.read()
        assert "an invalid probe result: ProbeResult" in agent.rejected[EVENTS, 2]
        assert "of GPU 999" in agent.rejected[EVENTS, 3]
        expected = replace(result, node="n0")
        assert collector.probes == [expected]
        key = Key("NVIDIA H200", "580", 700.0)
        assert store.probes.results.of_order("r1") == [ProbeRow(expected, key, "S", "", collector.now_ms)]


def test_an_agent_reports_results_of_its_own_node_alone() -> None:
    json = to_json(ProbeResult("r1/0", "n7", 3, "gemm_bf16", -5, None, 790.0, "TFLOP/s"))
    taken = parse_record(pb.Record(seq=1, probe_result=pb.ProbeResult(json=json)), RecordSource("n0", "s1", T0, T0, 0))
    assert isinstance(taken, ParsedRecord) and taken.probe
    assert (taken.probe.node, taken.probe.ts_ms, taken.probe.value) == ("n0", T0, 790.0)


class _Checked(list[Event]):
    def __init__(self, check: Any) -> None:
        super().__init__()
        self._check = check

    def extend(self, events: Any) -> None:
        self._check(events)
        super().extend(events)


MINUTES = 60_000


# The agent's clock and the event's time; whether it is of before the agent's start; whether its clock is suspect, and
# the time that is stored.
TIMES = {
    "of now": (T0 + 2000, T0 + 1000, False, False, T0 + 1000),
    "waited in the spool; the clock is right": (T0 + 2000, T0 - 30 * MINUTES, False, False, T0 - 30 * MINUTES),
    "from the future": (T0 + 2000, T0 + 5 * MINUTES, False, True, T0 + 5 * MINUTES),
    "the clock is behind": (T0 - 3 * MINUTES, T0 - 3 * MINUTES, False, True, T0 - 3 * MINUTES),
    "a line of before the agent's start": (T0 + 2000, 5, True, False, 5),
    "a time that the store cannot hold": (T0 + 2000, 2**62, False, True, T0 + 2000),
}


@in_loop
async def test_no_event_is_refused_for_its_time(store: Store) -> None:
    async with Collector(store) as collector:
        for number, (case, (clock_ms, ts_ms, backlog, suspect, stored_ms)) in enumerate(TIMES.items(), 1):
            message = hello(spool=f"s{number}")
            message.ts_ms = clock_ms
            async with collector.agent(message) as agent:
                await agent.send(record=event(1, ts_ms, backlog=backlog))
                await agent.until_held(EVENTS, 1)
            assert agent.rejected == {}, case
            (found,) = (e for e in store.events.read(0, T0 * 2) if e.id == f"n0/s{number}/1")
            assert (found.ts_ms, found.clock_suspect, found.received_ms) == (stored_ms, suspect, T0 + 2000), case
            assert collector.events[number - 1 :] == [found], case


@pytest.mark.parametrize(
    ("ts_ms", "read_ms", "suspect"),
    [
        (MINUTES, 10 * MINUTES - 500, False),
        (MINUTES, 0, True),
        (MINUTES, MINUTES + 500, True),
        (-MINUTES, -500, False),
        (13 * MINUTES, 10 * MINUTES - 500, True),
    ],
    ids=["its reader stood still", "an older agent", "the clock was set back", "waited in the spool", "of the future"],
)
def test_an_event_that_is_read_late_is_not_one_of_a_wrong_clock(ts_ms: int, read_ms: int, suspect: bool) -> None:
    """Of a stream that began at T0 with the right time; now is 10 minutes later. What counts as of a wrong clock counts
    as of now, and would take a node out again that was mended meanwhile."""
    record = event(1, T0 + ts_ms, **({"told_ms": T0 + read_ms} if read_ms else {}))
    taken = parse_record(record, RecordSource("n0", "s1", T0 + 10 * MINUTES, T0, 0))
    assert isinstance(taken, ParsedRecord)
    assert taken.event is not None
    assert (taken.event.ts_ms, taken.event.clock_suspect) == (T0 + ts_ms, suspect)


HOURS = 60 * MINUTES
UP = 100 * HOURS  # of the node, at its Hello


# The boot of the error, how long ago it was, its time and the node's clock, both against now; whether it is history,
# and whether its clock is suspect.
AGES = {
    "fresh": ("b1", 2_000, -2_000, 0, False, False),
    "a short outage": ("b1", 30 * MINUTES, -30 * MINUTES, 0, False, False),
    "an outage of a night": ("b1", 9 * HOURS, -9 * HOURS, 0, True, False),
    "a night, and booted since": ("b0", 9 * HOURS, -9 * HOURS, 0, True, False),
    "minutes, and booted since": ("b0", 10 * MINUTES, -10 * MINUTES, 0, True, False),
    "its clock was of 2024 until just now": ("b1", 2 * MINUTES, -1_000 * 24 * HOURS, 0, False, True),
    "its clock was set by two hours since": ("b1", 2 * MINUTES, -2 * HOURS, 0, False, True),
    "its clock is two hours behind": ("b1", 2 * MINUTES, -2 * HOURS, -2 * HOURS, False, True),
    "behind, and of the night": ("b1", 9 * HOURS, -11 * HOURS, -2 * HOURS, True, False),
    "of the night, with the clock of now": ("b1", 9 * HOURS, -2_000, 0, True, False),
    "its clock was ahead until just now": ("b1", 2_000, 5 * HOURS, 0, False, True),
}


@in_loop
async def test_the_age_of_an_error_goes_by_its_boot_and_the_time_since_then(store: Store) -> None:
    """No step of a wall clock makes history of a fresh fault, nor a fresh one of history."""
    async with Collector(store, now_ms=T0 + 2000) as collector:
        for number, (case, (boot, ago_ms, ts_ms, node_ms, backlog, suspect)) in enumerate(AGES.items(), 1):
            message = hello(spool=f"s{number}", boot_id="b1", up_ms=UP, ts_ms=T0 + 2000 + node_ms)
            async with collector.agent(message) as agent:
                times = {"up_ms": UP - ago_ms, "told_ms": T0 + 2000 + ts_ms}
                await agent.send(record=event(1, T0 + 2000 + ts_ms, boot_id=boot, **times))
                await agent.until_held(EVENTS, 1)
            (found,) = collector.events[number - 1 :]
            assert (found.backlog, found.clock_suspect, found.boot) == (backlog, suspect, boot), case
            assert [e for e in store.events.read(0, T0 * 2) if e.id == f"n0/s{number}/1"] == [found], case


@in_loop
async def test_only_errors_of_an_earlier_boot_are_history(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello(boot_id="b1", up_ms=UP)) as agent:
        for seq, code in enumerate(("agent_stopped", "gpu_back", "gpu_lost", "driver_hung"), 1):
            await agent.send(record=event(seq, kind="lifecycle", code=code, boot_id="b0", up_ms=5))
        await agent.until_held(EVENTS, 4)
        assert [(e.code, e.backlog) for e in collector.events] == [
            ("agent_stopped", False), ("gpu_back", False), ("gpu_lost", True), ("driver_hung", True),
        ]  # fmt: skip


@in_loop
async def test_a_failing_store_loses_nothing_and_holds_agents_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True
    write = store.samples.write

    def sometimes(samples: Any) -> None:
        if broken:
            raise StoreError("no space left on device")
        write(samples)

    monkeypatch.setattr(store.samples, "write", sometimes)
    limits = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, waiting_bytes=2000)
    async with Collector(store, limits) as collector:
        async with collector.agent(hello()) as agent:
            for seq in range(1, 9):
                await agent.send(batch=batch(seq, block([(T0 + seq, 1, (100.0 + seq, 50.0))] * 5)))
            await agent.read("backoff")
            await until(lambda: collector.ingest.stats.dropped > 0 and collector.ingest.stats.store_failures > 2)
            assert collector.ingest.stats.trouble == "no space left on device"
            assert collector.ingest.stats.waiting_bytes < 3000
            assert agent.held[LIVE] == 0
            broken = False
            code, details = await agent.ended()  # what was left with the agent is sent again on a new stream
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "the store accepts data again" in details
        async with collector.agent(hello()) as agent:
            assert agent.held[LIVE] < 8  # nothing is acknowledged that came after a batch that was dropped
            for seq in range(agent.held[LIVE] + 1, 9):
                await agent.send(batch=batch(seq, block([(T0 + seq, 1, (100.0 + seq, 50.0))] * 5)))
            await agent.until_held(LIVE, 8)
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 8
        assert collector.ingest.stats.trouble == ""
        assert collector.ingest.stats.waiting_bytes == 0


@in_loop
async def test_what_cannot_be_stored_is_refused_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that one batch meets must not stop the others."""
    write = store.samples.write

    def choosy(samples: Any) -> None:
        if 666 in samples.columns["power_w"][0]:
            raise RuntimeError("a defect")
        write(samples)

    monkeypatch.setattr(store.samples, "write", choosy)
    async with Collector(store, Limits(flush_s=0.2)) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, block([(T0, 1, (100.0, 50.0))])))
        await agent.send(batch=batch(2, block([(T0, 2, (66.6, 50.0))])))
        await agent.send(batch=batch(3, block([(T0, 3, (100.0, 50.0))])))
        await agent.until_held(LIVE, 3)
        assert agent.rejected == {(LIVE, 2): "this collector failed on it (RuntimeError); see its log"}
        assert store.buckets.read(index_of(), T0).gpu_rows[:3].tolist() == [1, 0, 1]
        assert collector.ingest.stats.rejected == {"collector error": 1}


@in_loop
async def test_the_last_words_of_a_stream_are_acknowledged(store: Store) -> None:
    async with Collector(store, Limits(flush_s=0.2)) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await agent.call.done_writing()
        await agent.until_held(LIVE, 1)
        assert (await agent.ended())[0] is grpc.StatusCode.OK


@in_loop
async def test_what_was_taken_in_is_stored_at_a_stop(store: Store) -> None:
    async with Collector(store, Limits(flush_s=30)) as collector, collector.agent(hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await until(lambda: collector.ingest.stats.waiting_bytes > 0)
    assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2
    assert store.offsets.read()["n0", "s1"][LIVE] == 1

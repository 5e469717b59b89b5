"""An agent that is killed sends again what its spool holds: an XID is stored once and judged once."""

from __future__ import annotations

from pathlib import Path

from drover_agent.config import SpoolConfig
from drover_agent.spool.spool import Spool
from drover_collector.engine.engine import Engine
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import Severity
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, hello, index_of
from testbed.ingest import EVENTS, QUICK, Collector, event
from testbed.loop import in_loop


def start(folder: Path) -> tuple[str, list[pb.Record]]:
    """An agent's start after a kill: nothing of what a collector acknowledged is known; its spool's id, and what waits
    in it."""
    spool = Spool(SpoolConfig(dir=str(folder)), T0)
    try:
        found, after = [], 0
        while waiting := spool.next(EVENTS, after):
            after = waiting.seq
            found.append(pb.Record.FromString(waiting.body))
        return spool.id, found
    finally:
        spool.close()


def put(folder: Path, record: pb.Record) -> None:
    spool = Spool(SpoolConfig(dir=str(folder)), T0)
    spool.add_record(record.event.ts_ms, record)
    spool.sync_events()
    spool.close()


@in_loop
async def test_what_an_agent_killed_before_the_ack_sends_again_is_taken_once(store: Store, tmp_path: Path) -> None:
    """Its stream, the collector or both begin again; the id of an event is node, spool and sequence."""
    put(tmp_path, event(0, gpu=1))
    engine = Engine(index_of(), Policy.load(), T0)
    found, ids = [], set()
    for collector_runs in range(2):
        async with Collector(store, QUICK) as collector:
            for _ in range(2):
                id_, waiting = start(tmp_path)
                async with collector.agent(hello(spool=id_)) as agent:
                    for record in waiting:
                        await agent.send(record=record)
                    await agent.until_held(EVENTS, waiting[-1].seq)
                ids.add(f"n0/{id_}/{waiting[-1].seq}")
            assert len(collector.events) == (1 if collector_runs == 0 else 0)
            found += engine.on_events(collector.events, T0 + 2000).incidents
    assert len(ids) == 1
    assert {e.id for e in store.events.read(0, T0 * 2)} == ids
    assert [(i.severity, i.gpu) for i in found] == [(Severity.CRITICAL, 1)]


@in_loop
async def test_a_line_that_was_put_into_the_spool_twice_is_one_incident(store: Store, tmp_path: Path) -> None:
    """Killed between the spool and the place in the kernel log: the line is read again, its time computed again."""
    engine = Engine(index_of(), Policy.load(), T0)
    put(tmp_path, event(0, gpu=1))
    async with Collector(store, QUICK) as collector:
        found = []
        for ts_ms in (T0 + 1000, T0 + 1004):
            if ts_ms > T0 + 1000:
                put(tmp_path, event(0, ts_ms, gpu=1))
            id_, waiting = start(tmp_path)
            collector.now_ms = ts_ms + 1_800_000 * (ts_ms - T0 - 1000 > 0)
            async with collector.agent(hello(spool=id_)) as agent:
                for record in waiting:
                    await agent.send(record=record)
                await agent.until_held(EVENTS, waiting[-1].seq)
            found.append(engine.on_events(collector.events[len(found) :], collector.now_ms))
        assert len(store.events.read(0, T0 * 2)) == len(collector.events) == 2
    first, second = found
    (incident,) = first.incidents
    assert {i.id for i in second.incidents} <= {incident.id}
    assert not second.decisions

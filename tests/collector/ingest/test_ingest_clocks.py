"""A collector whose own clock is wrong: what it would refuse for its time waits with the agents."""

from __future__ import annotations

import pytest

from drover_collector.ingest.clock_skew import REPORT_AGAIN_S
from drover_collector.ingest.limits import Limits
from drover_collector.store import Store
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.ingest import EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until

DAY_MS = 86_400_000
QUICK = Limits(flush_s=0.01, retry_s=0.01, check_s=0.01, backoff_ms=10)


@pytest.mark.parametrize("days", [-2, 4000])
@in_loop
async def test_nothing_is_lost_to_a_collector_whose_clock_is_wrong_until_it_is_set(store: Store, days: int) -> None:
    """As of a machine whose battery is empty, until its time service is there."""
    async with Collector(store, QUICK, now_ms=T0 + days * DAY_MS) as collector:
        stats = collector.ingest.stats
        async with collector.agent(hello(ts_ms=T0)) as agent:
            await agent.send(batch=batch(1, GOOD))
            await agent.send(record=event(1))
            await agent.until_held(EVENTS, 1)
            assert (agent.held[LIVE], agent.rejected) == (0, {})
            assert [e.clock_suspect for e in collector.events] == [True]
            assert any("1 of 1 agents report another day" in text for text in stats.notices())
            collector.now_ms = T0 + 2000
            await until(lambda: not stats.clock_doubt, "it is set")
            code, text = await agent.ended()
            assert (code.name, "resend" in text) == ("UNAVAILABLE", True)
        async with collector.agent(hello(ts_ms=T0 + 2000)) as agent:
            await agent.send(batch=batch(1, GOOD))
            await agent.until_held(LIVE, 1)
        assert stats.rejected == {}
        assert store.buckets.read(index_of(), T0).gpu_rows[0] == 2


@in_loop
async def test_an_agent_of_another_day_among_others_is_refused_alone(store: Store) -> None:
    wrong = T0 + 2 * DAY_MS
    async with (
        Collector(store, QUICK, now_ms=T0 + 2000) as collector,
        collector.agent(hello(ts_ms=T0)) as right,
        collector.agent(hello("n1", ts_ms=wrong)) as other,
    ):
        await other.send(batch=batch(1, block([(wrong, 1, (300.0, 50.0))])))
        await other.until_held(LIVE, 1)
        assert "check the node's clock" in other.rejected[LIVE, 1]
        await right.send(batch=batch(1, GOOD))
        await right.until_held(LIVE, 1)
        assert collector.ingest.stats.clock_doubt == ""


@in_loop
async def test_events_of_streams_that_were_open_when_the_clock_was_set_are_not_suspect(store: Store) -> None:
    async with (
        Collector(store, QUICK, now_ms=T0 + 3_600_000) as collector,
        collector.agent(hello(ts_ms=T0)) as agent,
    ):
        await agent.send(record=event(1))
        await agent.until_held(EVENTS, 1)
        collector.now_ms = T0 + 2000
        session = collector.ingest.stream("n0")
        assert session is not None
        await until(lambda: abs(session.clock.offset_ms) < 60_000, "it is noticed")
        await agent.send(record=event(2, T0 + 1500))
        await agent.until_held(EVENTS, 2)
    assert [e.clock_suspect for e in collector.events] == [True, False]


@in_loop
async def test_an_agent_that_had_another_time_is_asked_again(store: Store) -> None:
    """Its clock may have been set since: it reported its time when the stream began."""
    async with (
        Collector(store, QUICK, now_ms=T0) as collector,
        collector.agent(hello(ts_ms=T0)),
        collector.agent(hello("n1", "s2", ts_ms=T0 - DAY_MS * 700)) as wrong,
    ):
        stats, clocks = collector.ingest.stats, collector.ingest._clocks
        assert stats.clock_votes == (2, 1)
        boot_s = clocks._boot_s
        clocks._boot_s = lambda: boot_s() + REPORT_AGAIN_S
        collector.now_ms += round(REPORT_AGAIN_S * 1000)  # nobody set it
        code, text = await wrong.ended()
        assert (code.name, "compare them again" in text) == ("UNAVAILABLE", True)
        await until(lambda: stats.clock_votes == (1, 1), "it is gone")
        async with collector.agent(hello("n1", "s2", ts_ms=collector.now_ms)):
            assert stats.clock_votes == (2, 2)

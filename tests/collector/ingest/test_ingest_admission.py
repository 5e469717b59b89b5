"""Many agents that connect at once: a few are worked on at a time, and none is turned away that could have waited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from drover_collector.ingest import admission as admission
from drover_collector.ingest.admission import (
    FIRST_PER_S,
    MAX_WAIT_S,
    NOTIFY_S,
    STUCK_S,
    TURN,
    Admission,
    RetryLaterError,
)
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.session import Session
from drover_collector.ingest.stats import IngestStats
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, hello, index_of
from testbed.ingest import EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop
from testbed.waiting import until

SIZE = 1000  # of a Hello


@dataclass(eq=False)
class Waiter:
    """Stands for a session: what admission asks of it."""

    patient: bool = True
    notified: list[pb.Backoff] = field(default_factory=list)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "x"), *(((TURN, "1"),) if self.patient else ()))

    async def send(self, message: pb.CollectorMessage) -> None:
        self.notified.append(message.backoff)


class Queue:
    """Admission with a clock that is moved by hand."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 100.0
        self.stats = IngestStats()
        self.admission = Admission(self.stats, Limits(**limits), lambda: self.now_s, lambda: 0.5)  # type: ignore[arg-type]  # numbers
        self.entered: list[Waiter] = []

    def come(self, waiter: Waiter) -> asyncio.Task[None]:
        async def enter() -> None:
            await self.admission.enter(cast("Session", waiter), SIZE)
            self.entered.append(waiter)

        return asyncio.create_task(enter())

    def leave(self, waiter: Waiter) -> None:
        self.admission.leave(cast("Session", waiter))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@in_loop
async def test_a_few_at_a_time_in_the_order_in_which_they_came() -> None:
    queue, waiters = Queue(openings=2), [Waiter() for _ in range(6)]
    tasks = [queue.come(waiter) for waiter in waiters]
    await settle()
    assert queue.entered == waiters[:2]
    assert (queue.admission.waiting, queue.stats.openings_waiting) == (4, 4)
    tasks[2].cancel()  # its agent has left
    queue.leave(waiters[0])
    await settle()
    assert queue.entered == [waiters[0], waiters[1], waiters[3]]
    for waiter in (waiters[1], waiters[3], waiters[4], waiters[5]):
        queue.leave(waiter)
        await settle()
    assert queue.entered == [waiters[0], waiters[1], waiters[3], waiters[4], waiters[5]]
    assert (queue.admission.waiting, queue.stats.openings_waiting, queue.stats.turned_away) == (0, 0, 0)
    late = queue.come(Waiter())
    await settle()
    assert late.done()


@in_loop
async def test_an_opening_lets_what_is_ready_go_first() -> None:
    queue, first, second, order = Queue(openings=1), Waiter(), Waiter(), []
    queue.come(first)
    waiting = queue.come(second)
    await settle()
    waiting.add_done_callback(lambda _: order.append("opening"))
    queue.leave(first)
    for n in range(3):  # messages of open streams that came meanwhile
        asyncio.get_running_loop().call_soon(order.append, n)
    await settle()
    assert order == [0, 1, 2, "opening"]


@in_loop
async def test_one_whose_turn_came_as_it_left_makes_room_for_the_next() -> None:
    queue, waiters = Queue(openings=1), [Waiter() for _ in range(3)]
    tasks = [queue.come(waiter) for waiter in waiters]
    await settle()
    tasks[1].cancel()
    queue.leave(waiters[0])
    queue.admission.tick()  # its turn, before its task saw that it was cancelled
    await settle()
    assert queue.entered == [waiters[0], waiters[2]]


@in_loop
async def test_who_will_wait_for_long_is_notified_and_who_cannot_wait_reconnects() -> None:
    queue = Queue(openings=1)
    first, many = Waiter(), [Waiter() for _ in range(round(FIRST_PER_S * (MAX_WAIT_S + 10)))]
    for waiter in (first, *many):
        queue.come(waiter)
    await settle()
    notified = [n for n, waiter in enumerate(many) if waiter.notified]
    assert min(notified) / FIRST_PER_S == pytest.approx(NOTIFY_S, rel=0.02)
    assert notified == list(range(min(notified), len(many)))
    backoff = many[-1].notified[0]
    assert (backoff.turn, backoff.wait_ms / 1000) == (True, pytest.approx(MAX_WAIT_S + 10, rel=0.02))
    old = queue.come(Waiter(patient=False))
    await settle()
    error = old.exception()
    assert isinstance(error, RetryLaterError)
    assert error.wait_s == pytest.approx(MAX_WAIT_S + 10, rel=0.02)  # within half of it more or less
    assert queue.stats.turned_away == 1


@in_loop
async def test_who_waits_for_longer_than_was_expected_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start the rate is a guess: an agent without an answer gives up within a minute."""
    monkeypatch.setattr(admission, "NOTIFY_S", 0.05)
    queue, second = Queue(openings=1), Waiter()
    queue.come(Waiter())
    waiting = queue.come(second)
    await settle()
    assert not second.notified
    await until(lambda: bool(second.notified), "it is notified")
    assert second.notified[0].turn
    waiting.cancel()


@in_loop
async def test_those_that_take_long_count_in_the_rate() -> None:
    """They were let by: others would expect hours, or be turned away, though eight go in each two seconds."""
    queue = Queue(openings=8)
    for _ in range(400):
        queue.come(Waiter())
    await settle()
    for _ in range(30):
        queue.now_s += STUCK_S + 0.5
        queue.admission.tick()
        await settle()
    assert queue.stats.openings_per_s == pytest.approx(8 / (STUCK_S + 0.5), rel=0.05)


@in_loop
async def test_the_rate_is_what_was_measured() -> None:
    queue, waiters = Queue(openings=1), [Waiter() for _ in range(600)]
    for waiter in waiters:
        queue.come(waiter)
    await settle()
    assert queue.admission.expected_s(500) == 500 / FIRST_PER_S
    for second in range(30):
        for waiter in waiters[10 * second : 10 * second + 10]:
            queue.leave(waiter)
            await settle()
        queue.now_s += 1
        queue.admission.tick()
    assert queue.admission.expected_s(500) == pytest.approx(50, rel=0.05)
    assert queue.stats.openings_per_s == pytest.approx(10, rel=0.05)


@in_loop
async def test_what_waits_is_bounded() -> None:
    queue = Queue(openings=1, openings_waiting=3)
    tasks = [queue.come(Waiter()) for _ in range(5)]
    await settle()
    assert [isinstance(t.exception(), RetryLaterError) if t.done() else None for t in tasks] == [
        False, None, None, None, True,
    ]  # fmt: skip
    small = Queue(openings=1, openings_bytes=2 * SIZE)
    tasks = [small.come(Waiter()) for _ in range(4)]
    await settle()
    assert [t.done() for t in tasks] == [True, False, False, True]


@in_loop
async def test_one_that_takes_long_holds_nobody_else_up() -> None:
    queue, slow, other = Queue(openings=1), Waiter(), Waiter()
    queue.come(slow)
    queue.come(other)
    await settle()
    queue.now_s += STUCK_S + 1
    queue.admission.tick()
    await settle()
    assert queue.entered == [slow, other]


# ---- over real gRPC


@in_loop
async def test_a_storm_of_agents_is_welcomed_to_the_last_and_open_streams_go_on(store: Store) -> None:
    names = [f"n{n}" for n in range(60)]
    async with Collector(store, Limits(flush_s=0.01, openings=2), index=index_of(60)) as collector:
        async with collector.agent(hello("n0")) as before, asyncio.TaskGroup() as group:

            async def come(name: str) -> None:
                async with collector.agent(hello(name)) as agent:
                    await agent.send(batch=batch(1, GOOD))
                    await agent.until_held(LIVE, 1)

            for name in names[1:]:
                group.create_task(come(name))
            for seq in range(1, 6):
                await before.send(batch=batch(seq, GOOD))
                await before.until_held(LIVE, seq)
        stats = collector.ingest.stats
        assert (stats.turned_away, stats.openings_waiting, stats.rejected_total) == (0, 0, 0)


@in_loop
async def test_an_old_agent_that_would_wait_too_long_is_asked_to_reconnect_later(store: Store) -> None:
    async with Collector(store, Limits(openings=1, openings_waiting=0)) as collector:
        collector.ingest._admission._inside[cast("Session", Waiter())] = 1e12  # one that takes its time
        async with collector.agent() as agent:
            await agent.send(hello=hello("n0"))
            message = await agent.read("backoff")
            assert not message.backoff.turn
            assert message.backoff.wait_ms >= 500
            code, text = await agent.ended()
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "come again in" in text


@in_loop
async def test_a_hello_that_waited_makes_no_wrong_clock(store: Store) -> None:
    """What an agent waits for its turn is not taken for its clock: all its events would be marked, also those that it
    read while it waited."""
    async with Collector(store, Limits(flush_s=0.01, openings=1)) as collector:
        blocker = cast("Session", Waiter())
        collector.ingest._admission._inside[blocker] = 1e12
        async with collector.agent() as agent:
            came_ms = collector.now_ms
            await agent.send(hello=hello("n0", ts_ms=came_ms))
            await until(lambda: collector.ingest.stats.openings_waiting == 1)
            collector.now_ms += 90_000
            collector.ingest._admission.leave(blocker)
            await agent.read("welcome")
            await agent.send(record=event(1, came_ms + 5_000, told_ms=came_ms + 5_000))
            await agent.send(record=event(2, collector.now_ms))
            await agent.until_held(EVENTS, 2)
        assert [e.clock_suspect for e in collector.events] == [False, False]


@in_loop
async def test_the_time_for_a_hello_goes_on_while_it_is_worked_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector(store, Limits(hello_s=0.05, check_s=0.02)) as collector, collector.agent() as agent:

        async def stuck(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(collector.ingest._handshakes, "handle", stuck)
        await agent.send(hello=hello())
        code, text = await agent.ended()
        assert (code, text) == (grpc.StatusCode.DEADLINE_EXCEEDED, "its Hello took more than 0.05 s")


@in_loop
async def test_records_come_together(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello("n0")) as agent:
        assert agent.welcome.records
        holding = pb.Record(seq=2, holding=pb.Holding(gpu=0, job="j", from_ms=T0))
        bad = pb.Record(seq=3, event=pb.Event(ts_ms=T0, kind="none"))
        several = pb.Records(records=[event(1), holding, bad, event(4, T0 + 1500)])
        await agent.send(records=several)
        await agent.until_held(EVENTS, 4)
        assert list(agent.rejected) == [(EVENTS, 3)]
        await agent.send(records=several)  # a resend
        await agent.send(records=pb.Records())
        await agent.send(record=event(5, T0 + 1600))
        await agent.until_held(EVENTS, 5)
        assert [e.id.rpartition("/")[2] for e in collector.events] == ["1", "4", "5"]
        assert store.jobs.at(collector.index, T0 + 1)[1] == ("j",)

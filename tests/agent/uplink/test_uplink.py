"""The agent against a real gRPC server that acknowledges, refuses, drops and forgets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from drover_agent.clock import SystemClock
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity, Reading
from drover_agent.uplink import stream as uplink
from drover_core.metrics.catalog import Absent, Scope
from drover_proto import telemetry_pb2 as pb
from testbed.telemetry_server import TelemetryServer, play
from testbed.uplinks import GPU, now_ms, power, running, settings, xid
from testbed.waiting import until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_everything_arrives_once_and_the_spool_is_empty(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        async with running(Agent(settings(tmp_path, await server.start()), "n1", {"driver": "570"})) as agent:
            start = now_ms()
            for second in range(30):
                agent.accept(*power(start + second * 1000, 400.0 + second))
            agent.accept(start, xid("79"))
            agent.accept(start, Reading(holdings=[(0, "job-7")]))
            agent.flush()
            await until(lambda: len(server.rows) == 60, "all rows")
            await until(lambda: agent.spool.pending()[0] == 0, "all acknowledged")
            assert server.rows["SN0", start + 7_000] == {"power_w": 407.0}
            assert server.rows["n1", start]["load1"] == 1.0
            assert "spool_bytes" in server.rows["n1", start + 29_000]
            assert server.codes() == ["agent_started", "79"]
            assert [(h.gpu, h.job) for h in server.holdings] == [(0, "job-7")]
            hello = server.hellos[-1]
            assert (hello.node, hello.inventory["driver"], hello.protocol) == ("n1", "570", 1)
            assert hello.boot_id == BOOT_ID
            assert {event.boot_id for event in server.events.values()} == {BOOT_ID}
            assert all(abs(hello.up_ms - event.up_ms) < 60_000 for event in server.events.values()), (
                "of the same seconds"
            )
            reported = {e.key: e for e in hello.entities}
            assert (reported["SN0"].gpu, reported["SN0"].pci, reported["SN0"].scope) == (0, "0000:3b:00.0", pb.GPU)
        await until(lambda: server.codes()[-1] == "agent_stopped", "the last word")
        assert (server.repeated_rows, server.broken) == (0, [])

    play(scenario())


def test_an_outage_is_filled_in_newest_first_and_live_data_does_not_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        start = now_ms() - 600_000
        agent = Agent(settings(tmp_path, await server.start()), "n1")
        for second in range(0, 600, 10):
            agent.accept(*power(start + second * 1000))
        async with running(agent):
            await until(lambda: len(server.rows) == 2 * 59, "the backlog")
            agent.accept(*power(now_ms()))
            agent.flush()
            await until(lambda: len(server.rows) == 2 * 61, "what is new")
        lanes = [lane for lane, _ in server.order if lane != pb.EVENTS]
        assert lanes[0] == pb.LIVE
        assert lanes.count(pb.BACKFILL) > 40
        backfilled = [ts for key, ts in server.rows if key == "SN0"]
        young = [ts for ts in backfilled if ts > now_ms() - 70_000]
        old = [ts for ts in backfilled if ts not in young]
        assert old == sorted(old, reverse=True)
        assert server.broken == []

    play(scenario())


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_collector_that_comes_later_and_drops_gets_everything(tmp_path: Path, code: grpc.StatusCode) -> None:
    async def scenario() -> None:
        first = TelemetryServer()
        address = await first.start()
        await first.stop()
        agent = Agent(settings(tmp_path, address), "n1")
        start = now_ms() - 30_000
        for second in range(30):
            agent.accept(*power(start + second * 1000))
        agent.flush()
        server = TelemetryServer(drop_after=3, drop_code=code)
        async with running(agent):
            agent.accept(now_ms(), xid("48"))
            await server.start(int(address.rpartition(":")[2]))
            await until(lambda: len(server.rows) == 60, "all rows")
            await until(lambda: agent.spool.pending()[0] == 0, "all acknowledged")
        assert server.streams >= 2
        assert server.codes() == ["agent_started", "48", "agent_stopped"]
        assert server.broken == []

    play(scenario())


def test_the_next_collector_is_used_when_one_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        gone, server = TelemetryServer(), TelemetryServer()
        dead = await gone.start()
        await gone.stop()
        address = await server.start()
        async with running(Agent(settings(tmp_path, dead, address), "n1")) as agent:
            await until(lambda: agent.connected_to == address, "the second address")
            agent.accept(now_ms(), xid("79"))
            await until(lambda: "79" in server.codes())

    play(scenario())


def test_what_is_refused_is_dropped_counted_and_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer(refuse=lambda lane, seq: "impossible" if (lane, seq) == (pb.LIVE, 2) else "")
        async with running(Agent(settings(tmp_path, await server.start()), "n1")) as agent:
            start = now_ms()
            for second in range(4):
                agent.accept(*power(start + second))
                agent.flush()
            await until(lambda: agent.spool.pending()[0] == 0)
            agent.flush()
            await until(lambda: "batch_rejected" in server.codes())
        refusal = next(e for e in server.events.values() if e.code == "batch_rejected")
        assert (refusal.count, "impossible" in refusal.message) == (1, True)
        assert len(server.rows) == 6
        assert server.order.count((pb.LIVE, 2)) == 1

    play(scenario())


class HeldClock(SystemClock):
    """The machine's clock, with a steady time that stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.steady_s = 100.0

    def monotonic(self) -> float:
        return self.steady_s


def test_backoff_is_honoured_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = HeldClock()
        backoff = pb.CollectorMessage(backoff=pb.Backoff(wait_ms=20_000, reason="busy"))
        server = TelemetryServer(after_welcome=[backoff], acks=False)
        lanes = lambda: {lane for lane, *_ in server.order}  # noqa: E731  # short, and used only here
        async with running(Agent(settings(tmp_path, await server.start()), "n1", clock=clock)) as agent:
            await until(lambda: agent._uplink._pause_until_s > 0, "the backoff")
            agent.accept(now_ms(), Reading(rows=[(Entity(Scope.GPU, "SN1", 0), {"power_w": 1.0})]))
            agent.accept(now_ms(), xid("79"))
            agent.flush()
            await until(lambda: agent.spool.next(pb.LIVE, 0))
            await until(lambda: pb.EVENTS in lanes(), "the event, which telemetry does not hold back")
            agent.accept(now_ms(), Reading(inventory={"driver": "571"}))
            await until(lambda: len(server.hellos) == 2, "a Hello, which is sent nevertheless")
            assert pb.LIVE not in lanes()
            clock.steady_s += 21
            agent._uplink.wake()
            await until(lambda: pb.LIVE in lanes(), "sending goes on")

    play(scenario())


def test_a_backoff_in_place_of_a_welcome_and_a_foreign_server_are_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uplink, "LONGEST_PAUSE_S", 0.02)

    async def scenario() -> None:
        backoff = pb.CollectorMessage(backoff=pb.Backoff(wait_ms=1, reason="full"))
        server = TelemetryServer(instead_of_welcome=backoff)
        async with running(Agent(settings(tmp_path, await server.start()), "n1")) as agent:
            await until(lambda: server.streams >= 1)
            server.instead_of_welcome = pb.CollectorMessage(ack=pb.Ack())
            await until(lambda: server.streams >= 2)
            server.instead_of_welcome = pb.CollectorMessage(welcome=pb.Welcome(protocol=9))
            await until(lambda: server.streams >= 3)
            server.instead_of_welcome = None
            await until(lambda: agent.connected_to is not None)

    play(scenario())


def test_who_is_asked_to_wait_for_its_turn_keeps_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A try given up would cost the collector another handshake when it has least time for it."""
    monkeypatch.setattr(uplink, "WELCOME_LIMIT_S", 0.02)

    async def scenario() -> None:
        turn = pb.CollectorMessage(backoff=pb.Backoff(wait_ms=90_000, reason="many agents connect", turn=True))
        server = TelemetryServer(before_welcome=[turn])
        agent = Agent(settings(tmp_path, await server.start()), "n1")
        limits: list[float] = []
        limited = uplink._limited

        async def noted(waiting: Awaitable[object], otherwise: str, limit_s: float) -> object:
            if otherwise == "no Welcome":
                limits.append(limit_s)
            return await limited(waiting, otherwise, max(limit_s, 10.0))

        monkeypatch.setattr(uplink, "_limited", noted)
        async with running(agent):
            await until(lambda: agent.connected_to is not None, "the Welcome, on the same stream")
        assert server.streams == 1
        assert limits[0] <= 0.02
        assert limits[1:] == [90.0 + uplink.TURN_MARGIN_S]

    play(scenario())


def test_each_try_without_a_welcome_waits_longer_and_not_all_alike() -> None:
    chance = random.Random(1)
    longest = [90, 180, 240, 240]
    for tries, limit_s in enumerate(longest):
        found = [uplink.welcome_limit_s(tries, chance) for _ in range(200)]
        assert 0.8 * limit_s <= min(found) < 0.85 * limit_s
        assert 0.95 * limit_s < max(found) <= limit_s
    assert uplink.welcome_limit_s(10**9, chance) <= 240


def test_a_collector_that_is_busy_is_not_called_before_its_time(tmp_path: Path) -> None:
    """The other one is asked at once; when both are busy, the one that will be ready first."""

    async def scenario() -> None:
        clock, called = HeldClock(), list[tuple[str, float]]()
        agent = Agent(settings(tmp_path, "a:1", "b:1"), "n1", clock=clock)
        link, asked = agent._uplink, {"a:1": 100.0, "b:1": 40.0}

        async def stream(address: str) -> None:
            called.append((address, clock.steady_s))
            raise uplink.BusyError(asked[address], "full")

        async def sleep(seconds: float) -> None:
            clock.steady_s += seconds
            if len(called) == 4:
                raise asyncio.CancelledError
            await asyncio.sleep(0)

        clock.sleep = sleep  # type: ignore[method-assign]  # to be watched
        link._stream = stream  # type: ignore[method-assign]  # to be watched
        task = asyncio.create_task(link.run())
        await asyncio.wait({task}, timeout=120)
        agent.spool.close()
        first_s = called[0][1]
        assert [address for address, _ in called] == ["a:1", "b:1", "b:1", "b:1"]
        assert called[1][1] - first_s <= 2 * uplink.FIRST_PAUSE_S
        assert called[2][1] - called[1][1] == pytest.approx(40.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("together", [True, False], ids=["new-collector", "old-collector"])
def test_records_that_wait_leave_together_where_the_collector_takes_that(tmp_path: Path, together: bool) -> None:
    async def scenario() -> None:
        server = TelemetryServer(together=together)
        agent = Agent(settings(tmp_path, await server.start()), "n1")
        agent.accept(now_ms(), Reading(holdings=[(gpu, f"job-{gpu}") for gpu in range(100)]))
        async with running(agent):
            await until(lambda: len(server.holdings) == 100, "all of them")
            await until(lambda: agent.spool.pending()[0] == 0, "all acknowledged")
        reported = [kind for kind in server.messages if kind.startswith("record")]
        assert sorted((h.gpu, h.job) for h in server.holdings) == [(gpu, f"job-{gpu}") for gpu in range(100)]
        assert len(reported) < 20 if together else reported == ["record"] * len(reported)
        assert server.broken == []

    play(scenario())


def test_new_columns_and_entities_are_reported_before_they_are_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        async with running(Agent(settings(tmp_path, await server.start()), "n1")) as agent:
            start = now_ms()
            for number in range(12):
                late = Entity(Scope.GPU, f"SN{number}", number)
                values = {"power_w": 1.0, "gpu_temp_c": 40.0, "sm_clock_mhz": 1980.0}
                some = dict(list(values.items())[: number % 3 + 1])
                agent.accept(start + number, Reading(rows=[(late, some)]))
                agent.flush()
                if number == 4:
                    await until(lambda: server.hellos, "the first of them are reported")
            await until(lambda: len(server.rows) == 12)
        assert server.broken == []
        assert server.rows["SN2", start + 2] == {"power_w": 1.0, "gpu_temp_c": 40.0, "sm_clock_mhz": 1980.0}
        assert server.streams == 1
        assert len(server.hellos) > 1

    play(scenario())


def test_batches_of_an_earlier_run_keep_their_meaning(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        await server.stop()
        start = now_ms() - 20_000
        async with running(Agent(settings(tmp_path, address), "n1")) as first:
            first.accept(start, Reading(rows=[(GPU, {"power_w": 333.0, "gpu_temp_c": 50.0})]))
        other = replace(GPU, key="SN9", serial="SN9")
        second = Agent(settings(tmp_path, address), "n1")
        second.accept(start + 10_000, Reading(rows=[(other, {"sm_clock_mhz": 1200.0})]))
        second.flush()
        server = TelemetryServer()
        await server.start(int(address.rpartition(":")[2]))
        async with running(second):
            await until(lambda: len(server.rows) == 2)
        assert server.rows["SN0", start] == {"power_w": 333.0, "gpu_temp_c": 50.0}
        assert server.rows["SN9", start + 10_000] == {"sm_clock_mhz": 1200.0}
        assert server.broken == []
        assert server.codes() == ["agent_started", "agent_stopped", "agent_started", "agent_stopped"]

    play(scenario())


def test_absence_is_reported_as_intervals_also_over_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        start = now_ms() - 40_000

        def lacks(reason: Absent) -> Reading:
            return Reading(rows=[(GPU, {"power_w": 1.0})], absent=[(GPU, "memory_temp_c", reason)])

        async with running(Agent(settings(tmp_path, address), "n1")) as agent:
            agent.accept(start, lacks(Absent.ERROR))
            agent.accept(start + 1, lacks(Absent.ERROR))
            agent.accept(start + 2, lacks(Absent.LOST))
            agent.flush()
            agent.accept(start + 3, Reading(rows=[(GPU, {"power_w": 70_000.0})]))
            agent.flush()
            await until(lambda: len(server.absences) == 3)
        async with running(Agent(settings(tmp_path, address), "n1")) as agent:
            agent.accept(start + 5, Reading(rows=[(GPU, {"power_w": 2.0, "memory_temp_c": 60.0})]))
            agent.flush()
            await until(lambda: len(server.absences) == 5)
        reported = {
            (a.metric, a.reason, a.from_ms - start, a.to_ms - start if a.HasField("to_ms") else None)
            for a in server.absences
        }
        assert reported == {
            ("memory_temp_c", "error", 0, 2),
            ("memory_temp_c", "lost", 2, None),
            ("power_w", "out-of-range", 3, None),
            ("memory_temp_c", "lost", 2, 5),
            ("power_w", "out-of-range", 3, 5),
        }
        assert server.rows["SN0", start + 3] == {}

    play(scenario())


def test_a_collector_that_lost_its_last_data_gets_it_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        agent = Agent(settings(tmp_path, address), "n1")
        async with running(agent):
            start = now_ms()
            for number in range(5):
                agent.accept(start + number, power(0)[1])
                agent.flush()
            await until(lambda: agent.spool.pending()[0] == 0 and len(server.rows) == 10)
            await server.stop()
            server = TelemetryServer()
            server.held[agent.spool.id, pb.LIVE] = 2
            await server.start(int(address.rpartition(":")[2]))
            await until(lambda: len(server.rows) == 6, "batches 3 to 5 again")

    play(scenario())


def test_a_collector_that_holds_more_than_was_sent_leads_to_a_new_spool_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        agent = Agent(settings(tmp_path, await server.start()), "n1")
        copied = agent.spool.id
        server.held[copied, pb.LIVE] = 10**9
        agent.accept(*power(now_ms()))
        agent.flush()
        async with running(agent):
            await until(lambda: len(server.rows) == 2)
        assert agent.spool.id != copied

    play(scenario())


def test_the_clock_offset_is_measured_and_a_wrong_clock_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer(clock_ahead_ms=3_600_000)
        async with running(Agent(settings(tmp_path, await server.start()), "n1")) as agent:
            await until(lambda: agent.connected_to is not None)
            ts_ms = now_ms()
            agent.accept(*power(ts_ms))
            agent.flush()
            await until(lambda: ("n1", ts_ms) in server.rows)
            await until(lambda: "clock_wrong" in server.codes())
        assert server.rows["n1", ts_ms]["clock_offset_s"] == pytest.approx(-3600, abs=5)

    play(scenario())

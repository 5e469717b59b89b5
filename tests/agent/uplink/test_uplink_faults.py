"""The uplink and the agent around it when collectors and clocks misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from pathlib import Path

import pytest

from drover_agent.clock import SystemClock
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity
from drover_agent.telemetry.absences import Absences
from drover_agent.uplink.stream import Uplink
from drover_core.metrics.catalog import Absent, Scope
from drover_proto import telemetry_pb2 as pb
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

DAY_MS = 86_400_000


class PausesNoted(SystemClock):
    """The machine's clock, on which pauses take no time and are noted; it can be moved."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.moved_ms = 0
        self.moved_s = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + self.moved_ms

    def monotonic(self) -> float:
        return super().monotonic() + self.moved_s

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)


def settings(folder: Path, *addresses: str) -> AgentConfig:
    return AgentConfig(node="n1", collectors=addresses, spool=SpoolConfig(dir=str(folder / "spool")))


@contextlib.asynccontextmanager
async def uplink(config: AgentConfig, clock: PausesNoted):  # type: ignore[no-untyped-def]  # a generator of nothing
    agent = Agent(config, "n1")
    agent.report("agent_started", "for something to send")
    await agent.spool.wait_stored()
    task = asyncio.create_task(Uplink(config, agent.spool, agent, clock).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        agent.spool.close()


def test_a_collector_that_welcomes_and_takes_nothing_is_asked_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)

    async def scenario() -> None:
        clock = PausesNoted()
        server = TelemetryServer(instead_of_welcome=pb.CollectorMessage(welcome=pb.Welcome(protocol=1)))
        async with uplink(settings(tmp_path, await server.start()), clock):
            await until(lambda: len(clock.pauses) >= 8, "eight attempts")
        assert clock.pauses[7] > 20
        assert clock.pauses == sorted(clock.pauses)

    play(scenario())


def test_the_same_trouble_of_two_collectors_is_logged_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock, gone = PausesNoted(), [TelemetryServer(), TelemetryServer()]
        addresses = [await server.start() for server in gone]
        for server in gone:
            await server.stop()
        async with uplink(settings(tmp_path, *addresses), clock):
            await until(lambda: len(clock.pauses) >= 8, "eight attempts")

    with caplog.at_level(logging.WARNING, "drover_agent.uplink.stream"):
        play(scenario())
    assert len(caplog.messages) == 2


def test_a_connection_that_is_cut_is_no_matter_of_certificates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unlike one that ends before a Welcome, perhaps for want of them."""

    async def scenario() -> None:
        server = TelemetryServer()
        host, _, port = (await server.start()).rpartition(":")
        open_: list[asyncio.StreamWriter] = []
        passing: list[asyncio.Task[None]] = []

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65_536):
                    writer.write(data)
            writer.close()

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner = await asyncio.open_connection(host, int(port))
            open_.extend((writer, inner))
            ways = [asyncio.create_task(pass_on(*way)) for way in ((reader, inner), (inner_reader, writer))]
            passing.extend(ways)

        between = await asyncio.start_server(meet, "127.0.0.1", 0)
        address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
        async with uplink(settings(tmp_path, address), PausesNoted()):
            await until(lambda: server.events, "the stream is open")
            for writer in open_:
                writer.close()
            await until(lambda: caplog.messages, "its end is reported")
        between.close()
        await asyncio.gather(*passing)

    with caplog.at_level(logging.WARNING, "drover_agent.uplink.stream"):
        play(scenario())
    assert "unavailable: " in caplog.messages[0]
    assert "certificates" not in caplog.messages[0]


def test_a_clock_that_is_set_back_does_not_silence_reports(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = PausesNoted()
        agent = Agent(settings(tmp_path, "127.0.0.1:1"), "n1", clock=clock)
        clock.moved_ms = 365 * DAY_MS
        for moved_ms in (365 * DAY_MS, 0):
            clock.moved_ms = moved_ms
            clock.moved_s += 60.0
            agent.count_rejection(pb.LIVE, 1, "impossible")
            agent.flush()
        assert agent.spool.events.next_seq - 1 == 2
        agent.spool.close()

    asyncio.run(scenario())


def test_a_refused_backlog_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        agent = Agent(settings(tmp_path, "127.0.0.1:1"), "n1")
        for seq in range(1, 1001):
            agent.count_rejection(pb.BACKFILL, seq, "unknown node n1")
        agent.spool.close()

    asyncio.run(scenario())
    assert len(caplog.messages) == 1


def test_an_absence_that_was_not_kept_before_the_end_is_reported_by_the_next_run(tmp_path: Path) -> None:
    path, gpu = tmp_path / "absences.json", Entity(Scope.GPU, "SN0", 0)
    killed = Absences(path)
    killed.add_missing(gpu, "power_w", Absent.LOST, 1)
    assert len(killed.take_changes(0.0)) == 1  # and the power goes before the records of it are written
    again = Absences(path)
    again.add_missing(gpu, "power_w", Absent.LOST, 2)
    assert len(again.take_changes(0.0)) == 1
    path.write_bytes(again.dump())
    third = Absences(path)
    third.add_missing(gpu, "power_w", Absent.LOST, 3)
    assert third.take_changes(0.0) == []

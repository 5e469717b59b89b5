"""The agent's core while collectors are away, silent, dead, replaced, or acknowledge what was never sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.nvml.source import NvmlSource
from drover_agent.spool import async_spool as outbox
from drover_agent.uplink import stream as uplink
from drover_core.metrics.catalog import Absent
from drover_proto import telemetry_pb2 as pb
from testbed.core_node import FIRST, GPUS, Node, node, start_at
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until


@pytest.fixture(autouse=True)
def gpus(fake_nvml: FakeNvml) -> Iterator[None]:
    fake_nvml.healthy(len(GPUS))
    Node.nvml = NvmlSource("n1")
    yield
    Node.nvml.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no disk that hangs."""
    monkeypatch.setattr(outbox, "DISK_LIMIT_S", 30.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uplink's limits, short enough to wait for."""
    for name in ("ANSWER_LIMIT_S", "WELCOME_LIMIT_S", "ACK_LIMIT_S", "CHECK_S"):
        monkeypatch.setattr(uplink, name, 0.3)


def test_collector_away_for_an_hour(tmp_path: Path) -> None:
    """The node's newest seconds are there at once when the collector is back, the hour follows newest first; nothing is
    missing, nothing twice, and the agent's memory stays bounded meanwhile."""

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        one = node(tmp_path, address)
        async with one.running():
            one.second()
            await one.delivered(server)
            await server.stop()
            codes = []
            for second in range(3600):
                one.second()
                if second % 600 == 300:
                    codes.append(one.xid())
                if second % 60 == 0:
                    await one.agent.spool.wait_stored()
                assert one.agent.spool.telemetry.size <= outbox.CACHE_BYTES
            back = TelemetryServer(held=server.held, rows=server.rows)
            await start_at(address, back)
            one.clock.pass_time(uplink.LONGEST_PAUSE_S)  # of the pause between attempts
            newest = one.read_ms[-1]
            await one.delivered(back)
            await until(lambda: one.agent.spool.pending()[0] == 0)
        lanes = [lane for lane, _ in back.order if lane != pb.EVENTS]
        assert lanes[0] == pb.LIVE
        assert lanes.count(pb.BACKFILL) > 600
        assert back.repeated_rows == 0
        assert [code for code in back.codes() if code in codes] == codes
        arrival = [ts_ms for key, ts_ms in back.rows if key == FIRST and ts_ms > one.read_ms[0]]
        live = [ts_ms for ts_ms in arrival if ts_ms > newest - 20_000]
        old = [ts_ms for ts_ms in arrival if ts_ms <= newest - 80_000]
        assert arrival.index(live[-1]) < arrival.index(old[0])
        batches = [first for first, last in back.spans if last <= newest - 80_000]
        assert batches == sorted(batches, reverse=True), "newest first"

    play(scenario())


def test_thousands_of_agents_do_not_return_in_the_same_second() -> None:
    """12,500 agents that lost their collector some minutes ago come back over half a minute, not at once."""
    chance, arrivals = random.Random(7), Counter[int]()
    for _ in range(12_500):
        at_s, attempt = 0.0, 0
        while at_s < 300:
            attempt += 1
            at_s += uplink.pause_s(attempt, chance)
            assert uplink.pause_s(attempt, chance) <= uplink.LONGEST_PAUSE_S
        arrivals[int(at_s - 300)] += 1
    assert max(arrivals.values()) < 12_500 / 10
    assert max(arrivals) >= 25


@pytest.mark.parametrize("silent", ["socket", "welcome", "ack"])
def test_collector_that_never_answers(tmp_path: Path, quick: None, silent: str) -> None:
    """One warning that names the address and what it does not do; the next collector gets everything."""

    async def scenario() -> None:
        async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read()

        good, bad, plain = TelemetryServer(), TelemetryServer(acks=False), None
        if silent == "socket":
            plain = await asyncio.start_server(mute, "127.0.0.1", 0)
            address = f"127.0.0.1:{plain.sockets[0].getsockname()[1]}"
        else:
            bad.welcomes = silent == "ack"
            address = await bad.start()
        one = node(tmp_path, address, await good.start())
        async with one.running():
            one.second()
            code = one.xid()
            await one.delivered(good)
            await until(lambda: code in good.codes())
        assert good.repeated_rows == 0
        if plain:
            plain.close()

    play(scenario())


def test_connection_that_is_dead_and_does_not_say_so(tmp_path: Path, quick: None) -> None:
    """A cable pulled, a firewall that forgot: after ACK_LIMIT_S the agent connects again, and nothing is missing."""

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        way = _Way(address)
        one = node(tmp_path, await way.start())
        async with one.running():
            one.second()
            await one.delivered(server)
            way.dead = True
            one.second()
            code = one.xid()
            one.agent.flush()
            one.clock.pass_time(1.0)
            await until(lambda: one.agent.connected_to is None, "it is given up")
            way.dead = False
            await one.delivered(server)
            await until(lambda: code in server.codes())
        assert server.repeated_rows == 0
        assert way.connections >= 2
        await way.stop()

    play(scenario())


def test_name_that_does_not_resolve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the name; the next collector is used."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, "no-such-collector.invalid:7301", await server.start())
        async with one.running():
            one.second()
            await one.delivered(server)

    play(scenario())
    assert [m for m in caplog.messages if "no-such-collector.invalid" in m]


def test_failover(tmp_path: Path) -> None:
    """The collector dies: the other one of the pair has the node within seconds; together they miss nothing."""

    async def scenario() -> None:
        first, second = TelemetryServer(), TelemetryServer()
        second.held, second.rows = first.held, first.rows  # one store behind both
        addresses = await first.start(), await second.start()
        one = node(tmp_path, *addresses)
        async with one.running():
            for _ in range(12):
                one.second()
            await one.delivered(first)
            assert one.agent.connected_to == addresses[0]
            await first.stop()
            one.second()
            code = one.xid()
            await one.delivered(second)
            await until(lambda: code in second.codes())
            assert one.agent.connected_to == addresses[1]
        assert second.repeated_rows == 0

    play(scenario())


def test_acknowledgement_lost_and_agent_killed(tmp_path: Path) -> None:
    """The collector stored it, its Ack did not arrive, the agent was killed: nothing is stored twice."""

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        one = node(tmp_path, address)
        async with one.running():
            for _ in range(12):
                one.second()
            await one.delivered(server)
            one.agent._uplink._take = lambda *_: None  # type: ignore[method-assign]  # the Ack that does not arrive
            one.second()
            one.xid()
            await one.delivered(server)
            await until(lambda: one.xids and "xid 1" in server.codes())
            assert one.agent.spool.pending()[0] > 0
            codes = server.codes()
            one.agent._goodbye = _nothing  # type: ignore[method-assign]  # killed
        two = node(tmp_path, address, clock=one.clock)
        two.read_ms = one.read_ms
        async with two.running():
            two.second()
            await two.delivered(server)
        assert server.repeated_rows == 0
        assert server.codes()[: len(codes)] == codes

    play(scenario())


def test_a_collector_whose_store_was_replaced(tmp_path: Path) -> None:
    """It knows again at once what is absent and who holds which GPU, though both were sent long ago."""

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        one = node(tmp_path, address)
        absent = [(GPUS[0], "nvlink_effective_ber", Absent.UNSUPPORTED)]
        async with one.running():
            began_ms = one.clock.now_ms()
            one.agent.accept(began_ms, Reading(absent=absent, holdings=[(0, "job 1"), (1, "job 2")]))
            one.agent.accept(began_ms + 1, Reading(holdings=[(1, None)]))
            one.second()
            await one.delivered(server)
            await until(lambda: (len(server.absences), len(server.holdings)) == (1, 3))
            while one.agent.spool.status.has_all_events:  # what is acknowledged goes in the end
                one.clock.pass_time(600)
                one.xid()
                one.agent.flush()
                await one.agent.spool.wait_stored()
                await until(lambda: one.agent.spool.pending()[0] == 0)
            await server.stop()
            fresh = TelemetryServer()
            await start_at(address, fresh)
            one.clock.pass_time(uplink.LONGEST_PAUSE_S)
            await until(lambda: len(fresh.holdings) >= 2)
            one.agent.flush()
            await until(lambda: fresh.absences)
        found = [(absence.gpu, absence.metric, absence.reason, absence.from_ms) for absence in fresh.absences]
        assert found == [(0, "nvlink_effective_ber", "unsupported", began_ms)]
        assert [(h.gpu, h.job, h.from_ms) for h in fresh.holdings] == [(0, "job 1", began_ms), (1, "", began_ms + 1)]

    play(scenario())


def test_acknowledgement_of_what_was_never_sent(tmp_path: Path) -> None:
    """One warning; the stream begins again, and nothing that waits is taken for held."""

    async def scenario() -> None:
        server = TelemetryServer()
        held = [pb.LaneSeq(lane=lane, seq=10**12) for lane in (pb.EVENTS, pb.LIVE)]
        server.after_welcome = [pb.CollectorMessage(ack=pb.Ack(held=held, ts_ms=server._now_ms()))]
        one = node(tmp_path, await server.start())
        one.second()
        async with one.running():
            await until(lambda: server.streams > 1)
            server.after_welcome = []
            one.second()
            await one.delivered(server)

    play(scenario())


async def _nothing() -> None: ...


class _Way:
    """A TCP way to a collector that can go dead: it takes everything and passes nothing on."""

    def __init__(self, address: str) -> None:
        self._to = address.rpartition(":")
        self.dead = False
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        onward = await asyncio.open_connection(self._to[0], int(self._to[2]))
        for source, sink in ((reader, onward[1]), (onward[0], writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        died = False
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                died = died or self.dead  # what was swallowed once leaves no whole stream behind
                if not died:
                    sink.write(data)
                    await sink.drain()
            sink.close()

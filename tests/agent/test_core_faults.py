"""What an operator sees when things around the agent fail: spool, uplink and clock, over real gRPC and a real folder.

Each docstring says what the user sees. The sampler is played: `Node.second` gives one second's readings, those of two
GPUs by nvidia-ml-py on the C stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from drover_agent import outbox, packing, uplink
from drover_agent.agent import Agent
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.frames import MAGIC
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.sources.nvml import NvmlSource
from drover_collector.records import MAX_TEXT
from drover_proto import telemetry_pb2 as pb
from drover_proto.catalog import Absent, Scope
from drover_proto.events import EventKind
from testbed.clock import MovableClock
from testbed.disks import BadDisk
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

GPUS = [Entity(Scope.GPU, f"16540230{slot:05d}", slot) for slot in range(2)]
NODE = Entity(Scope.NODE, "n1")
THINGS = [*GPUS, NODE]
FIRST = GPUS[0].key


@dataclass
class Node:
    """One node whose seconds pass as fast as the test wants."""

    nvml: ClassVar[NvmlSource]  # what it reads; of the test that runs
    agent: Agent
    clock: MovableClock
    told: list[int] = field(default_factory=list)  # time of each second's readings
    xids: int = 0

    def second(self) -> None:
        """A second later: readings on the second, as the sampler gives them."""
        now_ms = self.clock.now_ms()
        self.clock.pass_time((1000 - now_ms % 1000) / 1000)
        ts_ms = self.clock.now_ms() // 1000 * 1000
        self.agent.accept(ts_ms, Reading(rows=[*self.nvml.read(ts_ms).rows, (NODE, {"load1": 1.0})]))
        self.told.append(ts_ms)

    def xid(self) -> str:
        """Another one that nothing merges with those before."""
        self.xids += 1
        code = f"xid {self.xids}"
        event = NodeEvent(self.clock.now_ms(), 0, EventKind.XID, code, code, "kmsg")
        self.agent.accept(self.clock.now_ms(), Reading(events=[event]))
        return code

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.agent.run())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def delivered(self, *servers: TelemetryServer) -> None:
        """Wait until each row told stands at a collector, under its own time or, after a jump, one beside it."""
        self.agent.flush()
        wanted = Counter((thing.key, ts_ms) for thing in THINGS for ts_ms in self.told)

        def all_there() -> bool:
            found = Counter((key, ts_ms // 1000 * 1000) for key, ts_ms in {k for s in servers for k in s.rows})
            return found == wanted

        await until(all_there, f"{sum(wanted.values())} rows, found {[len(server.rows) for server in servers]}")
        assert all(not server.broken for server in servers), servers


def node(folder: Path, *addresses: str, clock: MovableClock | None = None, **spool: int) -> Node:
    clock = clock or MovableClock()
    settings = SpoolConfig(dir=str(folder), **spool)
    config = AgentConfig(node="n1", collectors=addresses, hardware="none", kmsg_enabled=False, spool=settings)
    return Node(Agent(config, "n1", clock=clock), clock)


async def gone() -> str:
    """An address at which nobody listens."""
    server = TelemetryServer()
    address = await server.start()
    await server.stop()
    return address


async def start_at(address: str, server: TelemetryServer) -> None:
    await server.start(int(address.rpartition(":")[2]))


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
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    bad = BadDisk(monkeypatch)
    yield bad
    bad.mend()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uplink's limits, short enough to wait for."""
    for name in ("ANSWER_LIMIT_S", "WELCOME_LIMIT_S", "ACK_LIMIT_S", "LOOK_S"):
        monkeypatch.setattr(uplink, name, 0.3)


# ---- the disk


def test_disk_full(tmp_path: Path, disk: BadDisk) -> None:
    """`spool_unwritable` with the reason; telemetry and XIDs go on arriving; with room again all is on disk."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start())
        async with one.running():
            one.second()
            await one.delivered(server)
            disk.refuse(errno.ENOSPC, "No space left on device")
            for _ in range(20):
                one.second()
            told = one.xid()
            await one.delivered(server)
            await until(lambda: told in server.codes())
            for _ in range(6):  # the report comes with the next batch
                one.second()
            await until(lambda: "spool_unwritable" in server.codes())
            disk.mend()
            one.agent.flush()
            await until(lambda: one.agent.spool.trouble is None, "the disk takes data again")
        assert server.codes().count("spool_unwritable") == 1
        text = next(e.message for e in server.events.values() if e.code == "spool_unwritable")
        assert "No space left on device" in text
        assert "spool_dropped" not in server.codes()
        assert server.repeated_rows == 0

    play(scenario())


@pytest.mark.system
def test_disk_full_on_a_real_file_system(tmp_path: Path) -> None:
    """A spool on a 2 MB file system that something else fills: nothing stops, and a restart finds what was kept."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], check=True)

    async def scenario() -> None:
        address, server = await gone(), TelemetryServer()
        one = node(tmp_path / "spool", address)
        filler = tmp_path / "filler"
        async with one.running():
            one.second()
            await one.agent.spool.kept()
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            for _ in range(60):
                one.second()
            told = one.xid()
            await until(lambda: one.agent.spool.trouble)
            assert "No space left" in str(one.agent.spool.trouble)
            filler.unlink()
            one.agent.flush()
            await until(lambda: one.agent.spool.trouble is None)
        told_before = one.told
        two = node(tmp_path / "spool", address, clock=one.clock)
        two.told = told_before
        await start_at(address, server)
        async with two.running():
            await two.delivered(server)
            await until(lambda: told in server.codes())
        assert "spool_unwritable" in server.codes()

    try:
        play(scenario())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_disk_that_hangs_for_ever(tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spool_unwritable: the disk does not answer`; no tick is late, telemetry and XIDs go on arriving from memory,
    also over a new stream; when the disk answers nothing was lost."""
    monkeypatch.setattr(outbox, "DISK_LIMIT_S", 0.1)

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        one = node(tmp_path, address)
        async with one.running():
            one.second()
            await one.delivered(server)
            disk.hang()
            for _ in range(30):
                one.second()
            told = one.xid()
            await one.delivered(server)
            await until(lambda: told in server.codes())
            one.agent.flush()
            await until(lambda: "spool_unwritable" in server.codes())
            await server.stop()
            for _ in range(10):
                one.second()
            held = server.held
            fresh = TelemetryServer(held=held, rows=server.rows)
            await start_at(address, fresh)
            await one.delivered(fresh)
            disk.mend()
            await until(lambda: not one.agent.spool.hangs)
        assert fresh.repeated_rows == 0
        text = next(e.message for e in server.events.values() if e.code == "spool_unwritable")
        assert "does not answer" in text

    play(scenario())


def test_stopped_while_the_disk_hangs(tmp_path: Path) -> None:
    """SIGTERM ends the process all the same, as it would with a healthy disk, and says what became of its data."""
    spool = tmp_path / "spool"
    spool.mkdir()
    os.mkfifo(spool / "dictionary.json.new")  # to open it for writing waits for a reader, who never comes
    settings = {"spool.dir": spool, "hardware": "none", "kmsg_enabled": "false", "node": "n1", "batch_s": "1"}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "drover_agent.main", "run", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr
        deadline = threading.Timer(60, agent.kill)
        deadline.start()
        try:
            assert any("the disk did not answer" in line for line in agent.stderr)
            agent.terminate()
            assert "is lost" in agent.communicate()[1]
            assert agent.returncode == 0
        finally:
            deadline.cancel()
            agent.kill()


@pytest.mark.parametrize("harm", ["cut", "flipped", "garbage", "empty"])
def test_spool_file_damaged(tmp_path: Path, harm: str) -> None:
    """`spool_dropped` names the file and what is missing of it; every other row and event arrives."""

    async def scenario() -> None:
        address, server = await gone(), TelemetryServer()
        one = node(tmp_path, address)
        for _ in range(120):
            one.second()
        codes = [one.xid() for _ in range(20)]
        one.agent.flush()
        await one.agent.spool.kept()
        one.agent.spool.close()  # without a goodbye, as a power cut
        _damage(tmp_path, harm)
        two = node(tmp_path, address, clock=one.clock)
        two.xids = one.xids
        await start_at(address, server)
        async with two.running():
            two.second()
            two.agent.flush()
            told = two.xid()
            await until(lambda: told in server.codes(), "the newest event")
            await until(lambda: two.agent.spool.pending()[0] == 0, "all that is whole")
            if harm != "empty":  # of a file without a byte nothing says that it had any
                await until(lambda: "spool_dropped" in server.codes())
                loss = next(e.message for e in server.events.values() if e.code == "spool_dropped")
                assert "telemetry-" in loss
                assert "events-" in loss
        found = [code for code in server.codes() if code in codes]
        rows = {ts_ms for key, ts_ms in server.rows if key == FIRST and ts_ms in one.told}
        if harm in ("garbage", "empty"):
            assert (found, rows) == ([], set())
        else:
            assert found == [code for code in codes if code in found]
            assert len(codes) // 3 < len(found) < len(codes)
            assert len(one.told) // 3 < len(rows) < len(one.told)
        if harm == "flipped":
            assert len(found) == len(codes) - 1
            assert len(one.told) - len(rows) <= 6, "no more than one batch"
        assert server.broken == []

    play(scenario())


def _damage(folder: Path, harm: str) -> None:
    for path in (max(folder.glob("telemetry-*")), max(folder.glob("events-*"))):
        content = bytearray(path.read_bytes())
        middle = content.find(MAGIC, len(content) // 2) + 20  # in a record
        if harm == "cut":
            del content[middle:]
        elif harm == "flipped":
            content[middle] ^= 0x10
        elif harm == "garbage":
            content[:] = random.Random(1).randbytes(len(content))
        else:
            content.clear()
        path.write_bytes(content)


def test_spool_damaged_in_hundreds_of_places(tmp_path: Path) -> None:
    """One `spool_dropped` that a collector takes: some of the places, and how many more there are."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start())
        one.agent.spool._losses.damage = tuple(f"telemetry-{number:020}.seg: {'x' * 100}" for number in range(500))
        async with one.running():
            one.second()
            one.agent.flush()
            await until(lambda: "spool_dropped" in server.codes())
        text = next(event.message for event in server.events.values() if event.code == "spool_dropped")
        assert len(text) < MAX_TEXT
        assert "480 more" in text

    play(scenario())


def test_event_with_a_text_that_is_none(tmp_path: Path) -> None:
    """A file name with bytes that are no text, or a line without end: the event arrives, cut and readable."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start())
        async with one.running():
            one.agent.tell("kmsg_unreadable", "/dev/\udcff" + "x" * 100_000)
            await until(lambda: "kmsg_unreadable" in server.codes())
        text = next(event.message for event in server.events.values() if event.code == "kmsg_unreadable")
        assert text.startswith("/dev/?xxx")
        assert len(text) < MAX_TEXT

    play(scenario())


@pytest.mark.parametrize("name", ["id", "backfill.json", "dictionary.json", "absences.json"])
def test_state_file_of_another_version_or_damaged(tmp_path: Path, name: str) -> None:
    """The agent starts and delivers; batches that cannot be understood any more are counted in `batch_rejected`."""

    async def scenario() -> None:
        address, server = await gone(), TelemetryServer()
        one = node(tmp_path, address)
        for _ in range(20):
            one.second()
        told = one.xid()
        one.agent.flush()
        await one.agent.spool.kept()
        one.agent.spool.close()
        (tmp_path / name).write_text('{"version": 99, "more": [1, 2')
        two = node(tmp_path, address, clock=one.clock)
        two.second()
        await start_at(address, server)
        async with two.running():
            await until(lambda: told in server.codes())
            two.agent.flush()
            await until(lambda: (FIRST, two.told[-1]) in server.rows)
        rows = {ts_ms for key, ts_ms in server.rows if key == FIRST}
        assert rows == set(two.told if name == "dictionary.json" else one.told + two.told)

    play(scenario())


# ---- collectors


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
                    await one.agent.spool.kept()
                assert one.agent.spool.telemetry.size <= outbox.CACHE_BYTES
            back = TelemetryServer(held=server.held, rows=server.rows)
            await start_at(address, back)
            one.clock.pass_time(uplink.LONGEST_PAUSE_S)  # of the pause between attempts
            newest = one.told[-1]
            await one.delivered(back)
            await until(lambda: one.agent.spool.pending()[0] == 0)
        lanes = [lane for lane, _ in back.order if lane != pb.EVENTS]
        assert lanes[0] == pb.LIVE
        assert lanes.count(pb.BACKFILL) > 600
        assert back.repeated_rows == 0
        assert [code for code in back.codes() if code in codes] == codes
        arrival = [ts_ms for key, ts_ms in back.rows if key == FIRST and ts_ms > one.told[0]]
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
            told = one.xid()
            await one.delivered(good)
            await until(lambda: told in good.codes())
        assert good.repeated_rows == 0
        if plain:
            plain.close()

    play(scenario())


def test_connection_that_is_dead_and_does_not_say_so(tmp_path: Path, quick: None) -> None:
    """A cable pulled, a firewall that forgot: after ACK_LIMIT_S the agent connects anew, and nothing is missing."""

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
            told = one.xid()
            one.agent.flush()
            one.clock.pass_time(1.0)
            await until(lambda: one.agent.connected_to is None, "it is given up")
            way.dead = False
            await one.delivered(server)
            await until(lambda: told in server.codes())
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
            told = one.xid()
            await one.delivered(second)
            await until(lambda: told in second.codes())
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
        two.told = one.told
        async with two.running():
            two.second()
            await two.delivered(server)
        assert server.repeated_rows == 0
        assert server.codes()[: len(codes)] == codes

    play(scenario())


def test_a_collector_whose_store_was_replaced(tmp_path: Path) -> None:
    """It knows again at once what is absent and who holds which GPU, though both were told long ago."""

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
            while one.agent.spool.has_all_events:  # what is acknowledged goes in the end
                one.clock.pass_time(600)
                one.xid()
                one.agent.flush()
                await one.agent.spool.kept()
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
            await until(lambda: server.streams > 1, limit_s=60)
            server.after_welcome = []
            one.second()
            await one.delivered(server)

    play(scenario())


# ---- the clock


def test_clock_jumps_an_hour_back_and_forward(tmp_path: Path) -> None:
    """`clock_wrong` once, with the offset; no second is lost or stored twice, though its times come a second time; once
    more after the clock was right again and jumps again."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start())
        # The collector's clock is right: it passes as the node's does, but does not jump.
        jumped = 0.0
        server._now_ms = lambda: one.clock.now_ms() - round(jumped * 1000)  # type: ignore[method-assign]  # stands in for it

        async def seconds(count: int) -> None:
            for _ in range(count):
                one.second()
            await one.delivered(server)
            one.agent.flush()

        async with one.running():
            await seconds(30)
            for jump, wrong in ((-3600, 1), (3500, 1), (100, 1), (-20, 2), (20, 2), (3600, 3), (-3600, 3)):
                one.clock.jump(jump)
                jumped += jump
                await seconds(30)
                await seconds(30)
                await until(lambda wrong=wrong: server.codes().count("clock_wrong") == wrong, f"{wrong} told")
        assert server.repeated_rows == 0
        assert one.agent.packer.late_rows == 0
        assert server.codes().count("clock_wrong") == 3
        assert "-3600" in next(e.message for e in server.events.values() if e.code == "clock_wrong")
        assert len(one.told) > len(set(one.told)), "times came a second time"

    play(scenario())


def test_clock_set_back_by_a_second_each_day_for_months(tmp_path: Path) -> None:
    """Each second is stored, and no row's time strays from its own by more than a tenth of a second."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start())
        async with one.running():
            for _ in range(packing.SHIFTS + 20):
                one.clock.pass_time(86_400)
                for _ in range(4):
                    one.second()
                one.clock.jump(-1)
                for _ in range(4):
                    one.second()
                one.agent.flush()
                await until(lambda: one.agent.spool.pending()[0] == 0, "the day's rows")
            await one.delivered(server)
        assert server.repeated_rows == 0
        assert 0 < max(ts_ms % 1000 for _, ts_ms in server.rows) < packing.SHIFTS

    play(scenario())


def test_suspended_machine(tmp_path: Path) -> None:
    """A gap of an hour, no row lost or doubled around it, no batch that spans it, no loss told; the stream goes on."""

    async def scenario() -> None:
        server = TelemetryServer()
        one = node(tmp_path, await server.start(), max_age_s=600)
        server._now_ms = one.clock.now_ms  # type: ignore[method-assign]  # it did not sleep
        async with one.running():
            for _ in range(13):
                one.second()
            one.clock.jump(3600)  # the steady clock stood still
            for _ in range(13):
                one.second()
            await one.delivered(server)
            one.agent.flush()
            await until(lambda: one.agent.spool.pending()[0] == 0)
        gaps = [b - a for a, b in zip(one.told, one.told[1:], strict=False) if b - a > 1500]
        assert len(gaps) == 1
        assert server.streams == 1
        assert server.repeated_rows == 0
        assert not {"clock_wrong", "spool_dropped"} & set(server.codes())
        assert all(last - first < 10_000 for first, last in server.spans)

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

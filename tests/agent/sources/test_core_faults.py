"""What an operator sees when things around the agent fail: spool, uplink and clock, over real gRPC and a real folder.

Each docstring says what the user sees. The sampler is played: `Node.second` gives one second's readings, those of two
GPUs by nvidia-ml-py on the C stand-in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.sources.nvml.source import NvmlSource
from drover_agent.spool import async_spool as outbox
from drover_agent.spool.record_format import MAGIC
from drover_agent.telemetry import batcher as packing
from drover_collector.ingest.parse_records import MAX_TEXT
from testbed.core_node import FIRST, GPUS, Node, node, start_at
from testbed.disks import BadDisk
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until


async def gone() -> str:
    """An address at which nobody listens."""
    server = TelemetryServer()
    address = await server.start()
    await server.stop()
    return address


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
            code = one.xid()
            await one.delivered(server)
            await until(lambda: code in server.codes())
            for _ in range(6):  # the report comes with the next batch
                one.second()
            await until(lambda: "spool_unwritable" in server.codes())
            disk.mend()
            one.agent.flush()
            await until(lambda: one.agent.spool.status.trouble is None, "the disk takes data again")
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
            await one.agent.spool.wait_stored()
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            for _ in range(60):
                one.second()
            code = one.xid()
            await until(lambda: one.agent.spool.status.trouble)
            assert "No space left" in str(one.agent.spool.status.trouble)
            filler.unlink()
            one.agent.flush()
            await until(lambda: one.agent.spool.status.trouble is None)
        read_before = one.read_ms
        two = node(tmp_path / "spool", address, clock=one.clock)
        two.read_ms = read_before
        await start_at(address, server)
        async with two.running():
            await two.delivered(server)
            await until(lambda: code in server.codes())
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
            code = one.xid()
            await one.delivered(server)
            await until(lambda: code in server.codes())
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
            await until(lambda: not one.agent.spool.is_hung)
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
            assert any("disk has not answered" in line for line in agent.stderr)
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
        await one.agent.spool.wait_stored()
        one.agent.spool.close()  # without a goodbye, as a power cut
        _damage(tmp_path, harm)
        two = node(tmp_path, address, clock=one.clock)
        two.xids = one.xids
        await start_at(address, server)
        async with two.running():
            two.second()
            two.agent.flush()
            code = two.xid()
            await until(lambda: code in server.codes(), "the newest event")
            await until(lambda: two.agent.spool.pending()[0] == 0, "all that is whole")
            if harm != "empty":  # of a file without a byte nothing says that it had any
                await until(lambda: "spool_dropped" in server.codes())
                loss = next(e.message for e in server.events.values() if e.code == "spool_dropped")
                assert "telemetry-" in loss
                assert "events-" in loss
        found = [code for code in server.codes() if code in codes]
        rows = {ts_ms for key, ts_ms in server.rows if key == FIRST and ts_ms in one.read_ms}
        if harm in ("garbage", "empty"):
            assert (found, rows) == ([], set())
        else:
            assert found == [code for code in codes if code in found]
            assert len(codes) // 3 < len(found) < len(codes)
            assert len(one.read_ms) // 3 < len(rows) < len(one.read_ms)
        if harm == "flipped":
            assert len(found) == len(codes) - 1
            assert len(one.read_ms) - len(rows) <= 6, "no more than one batch"
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
        one.agent.spool._counts.losses.damage = tuple(
            f"telemetry-{number:020}.seg: {'x' * 100}" for number in range(500)
        )
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
            one.agent.report("kmsg_unreadable", "/dev/\udcff" + "x" * 100_000)
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
        code = one.xid()
        one.agent.flush()
        await one.agent.spool.wait_stored()
        one.agent.spool.close()
        (tmp_path / name).write_text('{"version": 99, "more": [1, 2')
        two = node(tmp_path, address, clock=one.clock)
        two.second()
        await start_at(address, server)
        async with two.running():
            await until(lambda: code in server.codes())
            two.agent.flush()
            await until(lambda: (FIRST, two.read_ms[-1]) in server.rows)
        rows = {ts_ms for key, ts_ms in server.rows if key == FIRST}
        assert rows == set(two.read_ms if name == "dictionary.json" else one.read_ms + two.read_ms)

    play(scenario())


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
                await until(lambda wrong=wrong: server.codes().count("clock_wrong") == wrong, f"{wrong} reported")
        assert server.repeated_rows == 0
        assert one.agent.batcher.late_rows == 0
        assert server.codes().count("clock_wrong") == 3
        assert "-3600" in next(e.message for e in server.events.values() if e.code == "clock_wrong")
        assert len(one.read_ms) > len(set(one.read_ms)), "times came a second time"

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
    """A gap of an hour: no row lost or doubled, no batch that spans it, no loss reported; the stream goes on."""

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
        gaps = [b - a for a, b in zip(one.read_ms, one.read_ms[1:], strict=False) if b - a > 1500]
        assert len(gaps) == 1
        assert server.streams == 1
        assert server.repeated_rows == 0
        assert not {"clock_wrong", "spool_dropped"} & set(server.codes())
        assert all(last - first < 10_000 for first, last in server.spans)

    play(scenario())

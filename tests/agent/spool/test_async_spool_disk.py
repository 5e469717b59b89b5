"""The spool while its disk hangs, refuses or lies, and what memory has no room for."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.spool import async_spool
from drover_agent.spool.messages import Outgoing
from drover_proto import telemetry_pb2 as pb
from testbed.disks import BadDisk
from testbed.loop import in_loop
from testbed.spool_lanes import batch, drain, event, names, open_spool, ready
from testbed.waiting import until


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    bad = BadDisk(monkeypatch)
    yield bad
    bad.mend()


@in_loop
async def test_nothing_may_be_sent_before_it_is_on_disk(tmp_path: Path, disk: BadDisk) -> None:
    spool = open_spool(tmp_path)
    disk.hang()
    batch(spool, 1)
    event(spool, "79")
    await until(lambda: disk.waiting, "the write")
    assert (ready(spool, pb.LIVE), ready(spool, pb.EVENTS)) == ([], [])
    disk.mend()
    await spool.wait_stored()
    assert (ready(spool, pb.LIVE), ready(spool, pb.EVENTS)) == (["1"], ["79"])
    spool.close()


@in_loop
async def test_a_disk_that_hangs_holds_one_thread_and_nothing_back(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.05)
    woken: list[int] = []
    spool = open_spool(tmp_path, on_ready=lambda: woken.append(1))
    disk.hang()
    before = set(threading.enumerate())
    batch(spool, 0)
    event(spool, "0")
    await until(lambda: spool.is_hung)
    for number in range(1, 20):
        batch(spool, number)
        event(spool, str(number))
        spool.tidy()
        await spool.wait_stored()
    everything = [str(number) for number in range(20)]
    assert ready(spool, pb.LIVE) == everything
    assert ready(spool, pb.EVENTS) == everything
    assert spool.status.trouble
    assert "does not answer" in spool.status.trouble
    assert await spool.apply_welcome({pb.LIVE: 3}), "a stream can begin"
    assert ready(spool, pb.LIVE) == everything[3:]
    assert len(set(threading.enumerate()) - before) == 1
    assert disk.waiting == 1
    disk.mend()
    await until(lambda: spool.status.trouble is None and not spool.is_hung, "it answers again")
    await spool.wait_stored()
    spool.close()
    again = open_spool(tmp_path)
    assert names(await drain(again, pb.LIVE, 20)) == everything
    assert names(await drain(again, pb.EVENTS, 20)) == everything
    again.close()


@in_loop
async def test_while_the_disk_hangs_memory_is_bounded_and_what_nobody_holds_is_counted(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.05)
    monkeypatch.setattr(async_spool, "MEMORY_BYTES", 100_000)
    spool = open_spool(tmp_path)
    disk.hang()
    batch(spool, 0)
    await until(lambda: spool.is_hung)
    for number in range(1, 500):
        batch(spool, number, size=1_000)
        if number < 200:
            spool.ack(pb.LIVE, number + 1)
        assert spool.telemetry.size <= 100_000 + 2_000
    left = ready(spool, pb.LIVE)
    losses = spool.take_losses()
    assert losses
    assert losses.telemetry == 300 - len(left) > 0
    assert left[-1] == "499"
    disk.mend()
    await until(lambda: not spool.is_hung)
    spool.close()


@in_loop
async def test_a_stream_that_begins_while_the_disk_hangs_gets_what_memory_has(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something between is lost, for then there is nothing to be read before it."""
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.05)
    monkeypatch.setattr(async_spool, "MEMORY_BYTES", 10_000)
    spool = open_spool(tmp_path)
    batch(spool, 0)
    await spool.wait_stored()
    disk.hang()
    for number in range(1, 50):
        batch(spool, number, size=1_000)
    await until(lambda: spool.is_hung)
    assert await spool.apply_welcome({pb.LIVE: 1})
    left = ready(spool, pb.LIVE)
    assert left == [str(number) for number in range(50 - len(left), 50)]
    assert len(left) > 5
    disk.mend()
    await until(lambda: not spool.is_hung)
    spool.close()


@in_loop
async def test_a_disk_that_hangs_for_ever_does_not_keep_the_agent_from_ending(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.05)
    spool = open_spool(tmp_path)
    disk.hang()
    event(spool, "79")
    await until(lambda: spool.is_hung)
    spool.close()
    assert disk.waiting == 1, "it returned although the disk did not"


@in_loop
async def test_a_file_of_state_that_is_refused_is_tried_again_and_is_there_before_its_batch(
    tmp_path: Path, disk: BadDisk
) -> None:
    spool = open_spool(tmp_path)
    disk.refuse(errno.ENOSPC, "No space left on device")
    spool.write_file("dictionary.json", b"old", before_records=True)
    batch(spool, 1)
    await spool.wait_stored()
    assert not (tmp_path / "dictionary.json").exists()
    spool.write_file("dictionary.json", b"new", before_records=True)
    disk.mend()
    spool.tidy()
    await until(lambda: (tmp_path / "dictionary.json").exists())
    assert (tmp_path / "dictionary.json").read_bytes() == b"new"
    spool.close()


@in_loop
async def test_a_fault_in_the_writing_itself_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = open_spool(tmp_path)
    write = async_spool.write

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(async_spool, "write", broken)
    event(spool, "79")
    batch(spool, 1)
    await spool.wait_stored()
    assert (ready(spool, pb.EVENTS), ready(spool, pb.LIVE)) == (["79"], ["1"])
    assert "a fault" in str(spool.status.trouble)
    assert "a fault" in caplog.text
    monkeypatch.setattr(async_spool, "write", write)
    event(spool, "31")
    await spool.wait_stored()
    assert ready(spool, pb.EVENTS) == ["79", "31"]
    assert spool.status.trouble is None
    spool.close()
    again = open_spool(tmp_path)
    assert names(await drain(again, pb.EVENTS, 2)) == ["79", "31"], "written when it works again"
    assert names(await drain(again, pb.LIVE, 1)) == ["1"]
    again.close()


@in_loop
async def test_a_fault_in_the_reading_stops_no_lane_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_spool(tmp_path)
    event(before, "79")
    await before.wait_stored()
    before.close()
    spool = open_spool(tmp_path)
    read = async_spool.read

    def broken(*_: object) -> list[Outgoing]:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(async_spool, "read", broken)
    assert ready(spool, pb.EVENTS) == []
    await until(lambda: "a fault" in caplog.text)
    monkeypatch.setattr(async_spool, "read", read)
    assert names(await drain(spool, pb.EVENTS, 1)) == ["79"]
    spool.close()


@in_loop
async def test_what_memory_has_no_room_for_is_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_spool, "CACHE_BYTES", 5_000)
    spool = open_spool(tmp_path)
    for number in range(300):
        batch(spool, number, size=1_000)
    await spool.wait_stored()
    assert len(spool.telemetry.records) < 6
    assert spool.pending()[0] == 300
    first = await drain(spool, pb.LIVE, 300)
    assert names(first) == [str(number) for number in range(300)]
    spool.ack(pb.LIVE, first[199][0])
    await until(lambda: spool.pending()[0] == 100, "what is held is no longer counted")
    spool.ack(pb.LIVE, first[-1][0])
    await until(lambda: spool.pending()[0] == 0)
    assert await spool.apply_welcome({pb.LIVE: first[149][0]}), "a collector that lost some"
    assert names(await drain(spool, pb.LIVE, 150)) == [str(number) for number in range(150, 300)]
    spool.close()

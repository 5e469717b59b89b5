"""The spool as the event loop sees it: nothing waits for the disk, and nothing is sent before it is there."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drover_agent.clock import SystemClock
from drover_agent.config import SpoolConfig
from drover_agent.spool import async_spool
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.backfill import BackfillPlan
from drover_agent.spool.disk_thread import DiskThread
from drover_proto import telemetry_pb2 as pb
from testbed.clock import ManualClock
from testbed.disks import BadDisk
from testbed.loop import in_loop
from testbed.spool_lanes import NOW, batch, drain, event, name, names, open_spool, ready
from testbed.waiting import until

MINUTE = 60_000


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    bad = BadDisk(monkeypatch)
    yield bad
    bad.mend()


@in_loop
async def test_after_an_outage_the_backlog_is_read_newest_first_while_live_goes_on(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(200):
        batch(spool, number, NOW - (200 - number) * MINUTE)
    batch(spool, 1000, NOW - 2_000)
    await spool.wait_stored()
    assert await spool.apply_welcome({})
    assert ready(spool, pb.LIVE) == ["1000"]
    sent = await drain(spool, pb.BACKFILL, 200)
    assert names(sent) == [str(number) for number in range(199, -1, -1)]
    assert [seq for seq, _ in sent] == sorted(seq for seq, _ in sent)
    spool.ack(pb.BACKFILL, sent[-1][0])
    await until(lambda: spool.pending()[0] == 1)
    spool.close()


@in_loop
async def test_a_refused_batch_is_not_sent_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(3):
        batch(spool, number)
    await spool.wait_stored()
    spool.reject(pb.LIVE, 2)
    assert ready(spool, pb.LIVE) == ["0", "2"]
    spool.close()


@in_loop
async def test_a_copied_spool_gets_a_new_id_and_sends_all(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    await spool.wait_stored()
    copied = spool.id
    assert not await spool.apply_welcome({pb.LIVE: 17})
    assert spool.id != copied
    assert await spool.apply_welcome({})
    assert names(await drain(spool, pb.LIVE, 1)) == ["1"]
    spool.close()
    again = open_spool(tmp_path)
    assert again.id == spool.id
    again.close()


@in_loop
async def test_a_clock_that_jumps_ahead_makes_nothing_too_old(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    spool = open_spool(tmp_path, clock, max_age_s=3600)
    batch(spool, 1)
    await spool.wait_stored()
    clock.jump(365 * 86_400_000)
    for _ in range(3):
        spool.tidy()
        await clock.advance(700)  # files are closed by age
        batch(spool, 2, clock.now_ms())
        await spool.wait_stored()
    assert names(await drain(spool, pb.LIVE, 4))[0] == "1"
    assert spool.take_losses() is None
    spool.close()


@pytest.mark.parametrize("seed", range(6))
@in_loop
async def test_whatever_happens_all_that_was_kept_is_sent_and_events_stay_in_order(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Additions, acknowledgements, new streams, restarts and a disk that hangs now and then, in any order."""
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.02)
    monkeypatch.setattr(async_spool, "CACHE_BYTES", 3_000)
    chance, shared = random.Random(seed), DiskThread()
    held: dict[int, int] = {}
    given: dict[int, list[str]] = {pb.EVENTS: [], pb.LIVE: []}
    arrived: dict[int, dict[int, str]] = {pb.EVENTS: {}, pb.LIVE: {}}
    at = {pb.EVENTS: 0, pb.LIVE: 0}

    def restart() -> AsyncSpool:
        return AsyncSpool(SpoolConfig(dir=str(tmp_path)), SystemClock(), shared)

    async def close(spool: AsyncSpool) -> None:
        disk.mend()
        monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 20.0)  # a slow machine is no disk that hangs
        await until(lambda: not spool.is_hung)
        await spool.wait_stored()
        await until(lambda: not spool.is_hung)
        spool.close()
        monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.02)

    spool = restart()

    def send(most: int) -> None:
        for lane, after in at.items():
            for _ in range(most):
                if not (found := spool.next(lane, after)):
                    break
                at[lane] = after = found[0]
                known = arrived[lane].setdefault(after, name(lane, found))
                assert known == name(lane, found), "a sequence means one thing"

    for number in range(400):
        now_ms = SystemClock().now_ms()
        match chance.choice(["batch", "batch", "event", "send", "send", "ack", "stream", "hang", "mend", "restart"]):
            case "batch":
                batch(spool, number, now_ms, size=chance.randrange(1_000))
                given[pb.LIVE].append(str(number))
            case "event":
                event(spool, f"e{number}")
                given[pb.EVENTS].append(f"e{number}")
            case "send":
                await asyncio.sleep(0.001)
                send(chance.randrange(20))
            case "ack":
                for lane, seq in at.items():
                    if seq > held.get(lane, 0):
                        held[lane] = chance.randint(held.get(lane, 0), seq)
                        spool.ack(lane, held[lane])
            case "stream":
                assert await spool.apply_welcome(held)
                at |= {lane: held.get(lane, 0) for lane in at}
            case "hang" if chance.random() < 0.3:
                disk.hang()
            case "mend":
                disk.mend()
            case "restart" if chance.random() < 0.3:
                await close(spool)
                spool = restart()
                assert await spool.apply_welcome(held)
                at |= {lane: held.get(lane, 0) for lane in at}
    disk.mend()
    await spool.wait_stored()

    def all_sent() -> bool:
        send(1_000)
        through = all(at[lane] == max(arrived[lane]) for lane in at)  # this stream, after those before
        return through and all(set(given[lane]) == set(arrived[lane].values()) for lane in given)

    await until(all_sent, "all of it")
    for lane, reported in given.items():
        assert [one for _, one in sorted(arrived[lane].items())] == reported
    for lane, seq in at.items():
        spool.ack(lane, seq)
    await until(lambda: spool.pending()[0] == 0, "nothing waits")
    assert spool.take_losses() is None
    spool.close()
    shared.close()


def log_sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.glob("telemetry-*")]


@in_loop
async def test_no_batch_is_on_disk_before_the_file_that_says_what_its_numbers_mean(tmp_path: Path) -> None:
    """The log has room in its file, and the dictionary cannot be replaced: then the agent is killed."""
    spool = open_spool(tmp_path)
    (tmp_path / "dictionary.json.new").mkdir()
    spool.write_file("dictionary.json", b"new", before_records=True)
    batch(spool, 1)
    spool.tidy()
    await spool.wait_stored()
    assert "Is a directory" in str(spool.status.trouble)
    assert ready(spool, pb.LIVE) == ["1"], "memory sends it"
    assert log_sizes(tmp_path) == [0]
    (tmp_path / "dictionary.json.new").rmdir()
    spool.tidy()
    await until(lambda: spool.status.trouble is None)
    assert (tmp_path / "dictionary.json").read_bytes() == b"new"
    assert [size > 0 for size in log_sizes(tmp_path)] == [True]
    spool.close()


class HeldThread(DiskThread):
    """Keeps its jobs until they are let go, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Callable[[], None]] | None = None

    def _put(self, job: Callable[[], None]) -> None:
        if self.kept is None:
            super()._put(job)
        else:
            self.kept.append(job)

    def let_go(self) -> None:
        kept, self.kept = self.kept or [], None
        for job in kept:
            super()._put(job)


@in_loop
async def test_a_collector_that_lost_some_gets_it_whatever_is_being_written_meanwhile(tmp_path: Path) -> None:
    thread = HeldThread()
    spool = AsyncSpool(SpoolConfig(dir=str(tmp_path)), ManualClock(NOW), thread)
    for number in range(6):
        batch(spool, number)
    await spool.wait_stored()
    assert spool.ack(pb.LIVE, 6)
    await until(lambda: spool.pending()[0] == 0)
    await spool.wait_stored()
    thread.kept = []
    welcome = asyncio.create_task(spool.apply_welcome({pb.LIVE: 2}))
    await until(lambda: thread.kept)
    batch(spool, 6)  # of before the Welcome, as far as the thread can know
    await until(lambda: thread.kept is not None and len(thread.kept) == 2)
    (first, second), thread.kept = thread.kept, []
    first()
    assert await welcome
    assert ready(spool, pb.LIVE, 2) == []
    thread.kept = [second, *thread.kept]
    thread.let_go()
    assert names(await drain(spool, pb.LIVE, 5, after=2)) == ["2", "3", "4", "5", "6"]
    spool.close()


@in_loop
async def test_a_plan_that_comes_late_is_followed_by_the_stream_that_began_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs while the plan is written; else its batches would wait for the next stream."""
    monkeypatch.setattr(async_spool, "CACHE_BYTES", 100)
    spool = open_spool(tmp_path)
    for number in range(20):
        batch(spool, number, NOW - (30 - number) * MINUTE, size=1_000)
    batch(spool, 20)
    await spool.wait_stored()
    answers, save = threading.Event(), BackfillPlan.save

    def slow(plan: BackfillPlan, path: Path) -> None:
        answers.wait(120)
        save(plan, path)

    monkeypatch.setattr(BackfillPlan, "save", slow)
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 0.05)
    assert await spool.apply_welcome({})
    assert not spool._lanes.plan.ranges
    monkeypatch.setattr(async_spool, "DISK_LIMIT_S", 20.0)
    answers.set()
    assert names(await drain(spool, pb.BACKFILL, 20)) == [str(number) for number in range(19, -1, -1)]
    assert names(await drain(spool, pb.LIVE, 1)) == ["20"]
    spool.close()


@in_loop
async def test_an_ack_for_what_was_never_given_out_holds_nothing(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    batch(spool, 1)
    event(spool, "79")
    await spool.wait_stored()
    for lane in (pb.EVENTS, pb.LIVE, pb.BACKFILL):
        assert not spool.ack(lane, 1_000)
    batch(spool, 2)
    await spool.wait_stored()
    assert (ready(spool, pb.LIVE), ready(spool, pb.EVENTS)) == (["1", "2"], ["79"])
    spool.close()

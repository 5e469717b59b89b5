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
from drover_agent.spool import async_spool as outbox_module
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.backfill import BackfillPlan
from drover_agent.spool.disk_thread import DiskThread
from drover_proto import telemetry_pb2 as pb
from testbed.clock import ManualClock
from testbed.disks import BadDisk
from testbed.loop import in_loop
from testbed.outbox_lanes import NOW, batch, drain, event, name, names, open_outbox, ready
from testbed.waiting import until

MINUTE = 60_000


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    bad = BadDisk(monkeypatch)
    yield bad
    bad.mend()


@in_loop
async def test_after_an_outage_the_backlog_is_read_newest_first_while_live_goes_on(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    for number in range(200):
        batch(outbox, number, NOW - (200 - number) * MINUTE)
    batch(outbox, 1000, NOW - 2_000)
    await outbox.wait_stored()
    assert await outbox.apply_welcome({})
    assert ready(outbox, pb.LIVE) == ["1000"]
    sent = await drain(outbox, pb.BACKFILL, 200)
    assert names(sent) == [str(number) for number in range(199, -1, -1)]
    assert [seq for seq, _ in sent] == sorted(seq for seq, _ in sent)
    outbox.ack(pb.BACKFILL, sent[-1][0])
    await until(lambda: outbox.pending()[0] == 1)
    outbox.close()


@in_loop
async def test_a_refused_batch_is_not_sent_again(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    for number in range(3):
        batch(outbox, number)
    await outbox.wait_stored()
    outbox.reject(pb.LIVE, 2)
    assert ready(outbox, pb.LIVE) == ["0", "2"]
    outbox.close()


@in_loop
async def test_a_copied_spool_gets_a_new_id_and_sends_all(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    batch(outbox, 1)
    await outbox.wait_stored()
    copied = outbox.id
    assert not await outbox.apply_welcome({pb.LIVE: 17})
    assert outbox.id != copied
    assert await outbox.apply_welcome({})
    assert names(await drain(outbox, pb.LIVE, 1)) == ["1"]
    outbox.close()
    again = open_outbox(tmp_path)
    assert again.id == outbox.id
    again.close()


@in_loop
async def test_a_clock_that_jumps_ahead_makes_nothing_too_old(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    outbox = open_outbox(tmp_path, clock, max_age_s=3600)
    batch(outbox, 1)
    await outbox.wait_stored()
    clock.jump(365 * 86_400_000)
    for _ in range(3):
        outbox.tidy()
        await clock.advance(700)  # files are closed by age
        batch(outbox, 2, clock.now_ms())
        await outbox.wait_stored()
    assert names(await drain(outbox, pb.LIVE, 4))[0] == "1"
    assert outbox.take_losses() is None
    outbox.close()


@pytest.mark.parametrize("seed", range(6))
@in_loop
async def test_whatever_happens_all_that_was_kept_is_sent_and_events_stay_in_order(
    tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Additions, acknowledgements, new streams, restarts and a disk that hangs now and then, in any order."""
    monkeypatch.setattr(outbox_module, "DISK_LIMIT_S", 0.02)
    monkeypatch.setattr(outbox_module, "CACHE_BYTES", 3_000)
    chance, shared = random.Random(seed), DiskThread()
    held: dict[int, int] = {}
    given: dict[int, list[str]] = {pb.EVENTS: [], pb.LIVE: []}
    arrived: dict[int, dict[int, str]] = {pb.EVENTS: {}, pb.LIVE: {}}
    at = {pb.EVENTS: 0, pb.LIVE: 0}

    def restart() -> AsyncSpool:
        return AsyncSpool(SpoolConfig(dir=str(tmp_path)), SystemClock(), shared)

    async def close(outbox: AsyncSpool) -> None:
        disk.mend()
        monkeypatch.setattr(outbox_module, "DISK_LIMIT_S", 20.0)  # a slow machine is no disk that hangs
        await until(lambda: not outbox.is_hung)
        await outbox.wait_stored()
        await until(lambda: not outbox.is_hung)
        outbox.close()
        monkeypatch.setattr(outbox_module, "DISK_LIMIT_S", 0.02)

    outbox = restart()

    def send(most: int) -> None:
        for lane, after in at.items():
            for _ in range(most):
                if not (found := outbox.next(lane, after)):
                    break
                at[lane] = after = found[0]
                known = arrived[lane].setdefault(after, name(lane, found))
                assert known == name(lane, found), "a sequence means one thing"

    for number in range(400):
        now_ms = SystemClock().now_ms()
        match chance.choice(["batch", "batch", "event", "send", "send", "ack", "stream", "hang", "mend", "restart"]):
            case "batch":
                batch(outbox, number, now_ms, size=chance.randrange(1_000))
                given[pb.LIVE].append(str(number))
            case "event":
                event(outbox, f"e{number}")
                given[pb.EVENTS].append(f"e{number}")
            case "send":
                await asyncio.sleep(0.001)
                send(chance.randrange(20))
            case "ack":
                for lane, seq in at.items():
                    if seq > held.get(lane, 0):
                        held[lane] = chance.randint(held.get(lane, 0), seq)
                        outbox.ack(lane, held[lane])
            case "stream":
                assert await outbox.apply_welcome(held)
                at |= {lane: held.get(lane, 0) for lane in at}
            case "hang" if chance.random() < 0.3:
                disk.hang()
            case "mend":
                disk.mend()
            case "restart" if chance.random() < 0.3:
                await close(outbox)
                outbox = restart()
                assert await outbox.apply_welcome(held)
                at |= {lane: held.get(lane, 0) for lane in at}
    disk.mend()
    await outbox.wait_stored()

    def all_sent() -> bool:
        send(1_000)
        through = all(at[lane] == max(arrived[lane]) for lane in at)  # this stream, after those before
        return through and all(set(given[lane]) == set(arrived[lane].values()) for lane in given)

    await until(all_sent, "all of it")
    for lane, reported in given.items():
        assert [one for _, one in sorted(arrived[lane].items())] == reported
    for lane, seq in at.items():
        outbox.ack(lane, seq)
    await until(lambda: outbox.pending()[0] == 0, "nothing waits")
    assert outbox.take_losses() is None
    outbox.close()
    shared.close()


def log_sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.glob("telemetry-*")]


@in_loop
async def test_no_batch_is_on_disk_before_the_file_that_says_what_its_numbers_mean(tmp_path: Path) -> None:
    """The log has room in its file, and the dictionary cannot be replaced: then the agent is killed."""
    outbox = open_outbox(tmp_path)
    (tmp_path / "dictionary.json.new").mkdir()
    outbox.write_file("dictionary.json", b"new", before_records=True)
    batch(outbox, 1)
    outbox.tidy()
    await outbox.wait_stored()
    assert "Is a directory" in str(outbox.status.trouble)
    assert ready(outbox, pb.LIVE) == ["1"], "memory sends it"
    assert log_sizes(tmp_path) == [0]
    (tmp_path / "dictionary.json.new").rmdir()
    outbox.tidy()
    await until(lambda: outbox.status.trouble is None)
    assert (tmp_path / "dictionary.json").read_bytes() == b"new"
    assert [size > 0 for size in log_sizes(tmp_path)] == [True]
    outbox.close()


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
    outbox = AsyncSpool(SpoolConfig(dir=str(tmp_path)), ManualClock(NOW), thread)
    for number in range(6):
        batch(outbox, number)
    await outbox.wait_stored()
    assert outbox.ack(pb.LIVE, 6)
    await until(lambda: outbox.pending()[0] == 0)
    await outbox.wait_stored()
    thread.kept = []
    welcome = asyncio.create_task(outbox.apply_welcome({pb.LIVE: 2}))
    await until(lambda: thread.kept)
    batch(outbox, 6)  # of before the Welcome, as far as the thread can know
    await until(lambda: thread.kept is not None and len(thread.kept) == 2)
    (first, second), thread.kept = thread.kept, []
    first()
    assert await welcome
    assert ready(outbox, pb.LIVE, 2) == []
    thread.kept = [second, *thread.kept]
    thread.let_go()
    assert names(await drain(outbox, pb.LIVE, 5, after=2)) == ["2", "3", "4", "5", "6"]
    outbox.close()


@in_loop
async def test_a_plan_that_comes_late_is_followed_by_the_stream_that_began_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs while the plan is written; else its batches would wait for the next stream."""
    monkeypatch.setattr(outbox_module, "CACHE_BYTES", 100)
    outbox = open_outbox(tmp_path)
    for number in range(20):
        batch(outbox, number, NOW - (30 - number) * MINUTE, size=1_000)
    batch(outbox, 20)
    await outbox.wait_stored()
    answers, save = threading.Event(), BackfillPlan.save

    def slow(plan: BackfillPlan, path: Path) -> None:
        answers.wait(20)
        save(plan, path)

    monkeypatch.setattr(BackfillPlan, "save", slow)
    monkeypatch.setattr(outbox_module, "DISK_LIMIT_S", 0.05)
    assert await outbox.apply_welcome({})
    assert not outbox._lanes.plan.ranges
    monkeypatch.setattr(outbox_module, "DISK_LIMIT_S", 20.0)
    answers.set()
    assert names(await drain(outbox, pb.BACKFILL, 20)) == [str(number) for number in range(19, -1, -1)]
    assert names(await drain(outbox, pb.LIVE, 1)) == ["20"]
    outbox.close()


@in_loop
async def test_an_ack_for_what_was_never_given_out_holds_nothing(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    batch(outbox, 1)
    event(outbox, "79")
    await outbox.wait_stored()
    for lane in (pb.EVENTS, pb.LIVE, pb.BACKFILL):
        assert not outbox.ack(lane, 1_000)
    batch(outbox, 2)
    await outbox.wait_stored()
    assert (ready(outbox, pb.LIVE), ready(outbox, pb.EVENTS)) == (["1", "2"], ["79"])
    outbox.close()

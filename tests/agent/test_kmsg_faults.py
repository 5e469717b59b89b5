"""The kernel log under faults, one test per row of the fault table: forged lines, a storm, an overrun, a log that
cannot be read, a suspended machine, a clock that jumps. Lines come through a real pipe or file for /dev/kmsg."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drover_agent import merge as merge_module
from drover_agent import runtime as runtime_module
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.merge import EventMerger
from drover_agent.outbox import Outbox
from drover_agent.runtime import NodeRuntime
from drover_agent.sources import kmsg
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg import KmsgReader
from drover_agent.sources.kmsg_clock import Clocks, system_clocks
from drover_agent.spool import Spool
from drover_proto import telemetry_pb2 as pb
from testbed.waiting import until, wait_until

CODES = (
    13,
    31,
    43,
    45,
    48,
    61,
    62,
    63,
    64,
    68,
    69,
    74,
    79,
    92,
    94,
    95,
    109,
    110,
    119,
    120,
    121,
    123,
    136,
    137,
    140,
    143,
    154,
)
HOUR_US = 3_600_000_000


def xid(seq: int, code: int, bus: int = 0x3B, *, facility: int = 0, us: int | None = None) -> bytes:
    when = system_clocks().awake_us if us is None else us
    return f"{facility << 3 | 4},{seq},{when},-;NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, pid=1\n".encode()


def text(seq: int, us: int, line: str) -> bytes:
    return f"6,{seq},{us},-;{line}\n".encode()


def events_of(spool: Outbox | Spool) -> list[pb.Event]:
    found, after = [], 0
    while record := spool.next(pb.EVENTS, after):
        after = record[0]
        if record[1].record.HasField("event"):
            found.append(record[1].record.event)
    return found


def codes(node: NodeRuntime) -> list[str]:
    return [event.code for event in events_of(node.agent.spool)]


@contextlib.asynccontextmanager
async def node(folder: Path, log: Path, **settings: bool) -> AsyncIterator[NodeRuntime]:
    config = AgentConfig(
        node="n1",
        collectors=("127.0.0.1:1",),
        hardware="none",
        kmsg_path=str(log),
        spool=SpoolConfig(dir=str(folder / "spool")),
        **settings,  # type: ignore[arg-type]  # only switches are passed
    )
    found = NodeRuntime(config)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # what is written stays while nobody else has it open
    yield path
    os.close(descriptor)


def feed(path: Path, data: Iterable[bytes]) -> threading.Thread:
    """Write to a pipe in a thread of its own; the reader sets the pace."""

    def work() -> None:
        with path.open("r+b", buffering=0) as file:
            for piece in data:
                file.write(piece)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("accepted", [False, True])
def test_xid_lines_forged_from_user_space_are_kept_and_never_count(tmp_path: Path, pipe: Path, accepted: bool) -> None:
    async def scenario() -> None:
        async with node(tmp_path, pipe, kmsg_accept_user_facility=accepted) as found:
            writer = feed(pipe, [xid(1, 79, facility=1), xid(2, 79, facility=3), xid(3, 48)])
            await until(lambda: {"79", "48"} <= set(codes(found)), "the lines")
            writer.join()
            told = {event.code: event.forgeable for event in events_of(found.agent.spool) if event.kind == "xid"}
            assert told == {"79": not accepted, "48": False}

    asyncio.run(scenario())


def test_a_storm_of_ten_thousand_lines_keeps_every_distinct_event_and_counts_the_rest(
    tmp_path: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs with 27 codes each, most of the lines of one of them."""
    monkeypatch.setattr(merge_module, "WINDOW_MS", 600_000)  # a machine under load takes longer than a window
    buses = range(0x10, 0x18)
    rare = [(code, bus) for code in CODES for bus in buses]
    lines = [rare[n // 40] if n % 40 == 0 and n // 40 < len(rare) else (95, 0x10) for n in range(10_000)]
    assert set(lines) == set(rare)

    async def scenario() -> None:
        async with node(tmp_path, pipe) as found:
            writer = feed(pipe, (xid(n, code, bus) for n, (code, bus) in enumerate(lines, 1)))
            merger = found.agent._merger
            await until(
                lambda: sum(n for key in merger._open.values() for n in key.seen.values()) == 10_000, "the last line"
            )
            await asyncio.to_thread(writer.join)
            wanted = {(str(code), f"NVRM: Xid (PCI:0000:{bus:02x}") for code, bus in rare}

            def told() -> set[tuple[str, str]]:
                return {(e.code, e.message[:22]) for e in events_of(found.agent.spool) if e.kind == "xid"}

            await found.agent.spool.kept()  # a thread writes them
            assert told() == wanted

    asyncio.run(scenario())
    spool = Spool(SpoolConfig(dir=str(tmp_path / "spool")), 0)
    xids = [event for event in events_of(spool) if event.kind == "xid"]
    assert sum(event.count for event in xids) == 10_000
    assert len(rare) < len(xids) <= len(rare) + 3  # and what was repeated, in a sum or two
    spool.close()


def peak_of_a_storm(folder: Path, lines: int) -> int:
    """Peak bytes of Python memory while a storm goes through reader and merger; what was told is counted, not kept."""
    path = folder / f"kmsg{lines}"
    with path.open("wb") as file:
        for n in range(1, lines + 1):
            file.write(xid(n, CODES[n % len(CODES)], 0x10 + n % 8))
    merger = EventMerger(expect_kernel_log=True)
    told = seen = 0

    def deliver(events: list[NodeEvent]) -> None:
        nonlocal told, seen
        seen += len(events)
        told += sum(len(merger.offer(event)) for event in events)

    reader = KmsgReader(path, "b", None, lambda pci, uuid: None, deliver)
    thread = threading.Thread(target=reader.run, daemon=True)
    tracemalloc.start()
    try:
        thread.start()
        wait_until(lambda: seen == lines, "the whole log")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        reader.stop()
        thread.join()
    assert told == len(CODES) * 8  # each distinct one at once
    return peak


def test_a_storm_takes_no_more_memory_the_longer_it_lasts(tmp_path: Path) -> None:
    short, long = peak_of_a_storm(tmp_path, 10_000), peak_of_a_storm(tmp_path, 20_000)
    assert short < 2_000_000
    assert long < 1.2 * short


def test_a_pipe_that_never_ends_a_line_takes_no_memory(tmp_path: Path, pipe: Path) -> None:
    seen: list[NodeEvent] = []
    reader = KmsgReader(pipe, "b", None, lambda pci, uuid: None, seen.extend)
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    feed(pipe, [b"x" * 50_000] * 20 + [b"\n", xid(1, 79)]).join()
    wait_until(lambda: seen, "the line after it")
    reader.stop()
    thread.join()
    assert [event.code for event in seen] == ["79"]
    assert len(reader._rest) <= kmsg.MAX_REST


def test_an_overrun_is_told_with_the_number_of_lost_lines_and_its_going_on_in_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(xid(10, 48) + xid(61, 79) + xid(71, 94) + xid(72, 95) + xid(80, 31))
    seen: list[NodeEvent] = []
    reader = KmsgReader(path, "b", None, lambda pci, uuid: None, seen.extend)
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: len(seen) == 6, "the lines")
        assert [event.code for event in seen] == ["48", "kmsg_overrun", "79", "94", "95", "31"]
        assert (seen[1].count, "50 kernel log lines" in seen[1].message) == (50, True)
        reader._tell_lost_at = 0.0  # the ten seconds are over
        wait_until(lambda: len(seen) == 7, "the sum")
    finally:
        reader.stop()
        thread.join()
    assert (seen[6].code, seen[6].count) == ("kmsg_overrun", 9 + 7)


@pytest.mark.system
def test_a_real_overrun_of_the_kernels_buffer(tmp_path: Path) -> None:
    """The reader stands still until the kernel has overwritten what it had not read; then it goes on and says so."""
    limit = Path("/proc/sys/kernel/printk_devkmsg")
    before = limit.read_text()
    limit.write_text("on\n")
    seen: list[NodeEvent] = []
    held, go_on = threading.Event(), threading.Event()

    def deliver(events: list[NodeEvent]) -> None:
        held.set()
        assert go_on.wait(60)
        seen.extend(events)

    reader = KmsgReader(Path("/dev/kmsg"), "b", None, lambda pci, uuid: None, deliver)
    thread = threading.Thread(target=reader.run, daemon=True)
    try:
        thread.start()
        with Path("/dev/kmsg").open("wb", buffering=0) as file:
            file.write(b"<4>NVRM: Xid (PCI:0000:3b:00): 48, drover-test begins\n")
            wait_until(held.is_set, "the reader to stand still")
            for n in range(60_000):  # more than log_buf_len holds
                file.write(b"<7>drover-test fills the log %d %s\n" % (n, b"x" * 200))
            file.write(b"<4>NVRM: Xid (PCI:0000:3b:00): 79, drover-test ends\n")
        go_on.set()
        wait_until(lambda: any("drover-test ends" in event.message for event in seen), "the newest line")
    finally:
        go_on.set()
        reader.stop()
        thread.join(10)
        limit.write_text(before)
    lost = [event for event in seen if event.code == "kmsg_overrun"]
    assert sum(event.count for event in lost) > 1_000


def test_a_log_that_is_not_there_is_told_once_tried_again_and_told_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.05)
    log = tmp_path / "kmsg"

    async def scenario() -> None:
        async with node(tmp_path, log) as found:
            await until(lambda: "kmsg_unreadable" in codes(found), "word of it")
            assert "No such file" in found.agent.hello().inventory["host.kernel_log"]
            log.mkdir()  # can be opened, not read
            await until(lambda: codes(found).count("kmsg_unreadable") == 2, "the other reason")
            log.rmdir()
            log.write_bytes(xid(1, 79))
            await until(lambda: {"kmsg_back", "79"} <= set(codes(found)), "its lines")
            assert codes(found).count("kmsg_back") == 1
            assert found.agent.hello().inventory["host.kernel_log"] == "read"

    asyncio.run(scenario())


def test_a_log_that_may_not_be_read_is_an_error_that_says_what_helps(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(xid(1, 79))
    path.chmod(0)
    reader = KmsgReader(path, "b", None, lambda pci, uuid: None, lambda events: None)
    user = os.geteuid()
    if user == 0:  # whom nothing is forbidden
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError) as caught:
            reader.run()
    finally:
        os.seteuid(user)
    assert runtime_module._why(caught.value) == "Permission denied; give the agent CAP_SYSLOG"


class Machine:
    """A machine whose clocks a test moves, and its kernel log in a file."""

    def __init__(self, folder: Path) -> None:
        self.clocks = Clocks(1_800_000_000_000_000, 10 * HOUR_US, 0)
        self.log = folder / "kmsg"
        self.log.touch()
        self.state = folder / "kmsg.json"
        self.seq = 0
        self.written: dict[str, int] = {}  # text -> wall time in ms
        self.seen: list[NodeEvent] = []

    def write(self, line: str) -> None:
        self.seq += 1
        self.written[line] = self.clocks.wall_us // 1000
        with self.log.open("ab") as file:
            file.write(text(self.seq, self.clocks.awake_us, line))

    def passes(self, awake_s: float = 0, asleep_s: float = 0) -> None:
        now, awake, asleep = self.clocks, int(awake_s * 1e6), int(asleep_s * 1e6)
        self.clocks = Clocks(now.wall_us + awake + asleep, now.awake_us + awake, now.slept_us + asleep)

    def sleeps(self, seconds: float, *, length: bool = False) -> None:
        self.write(f"PM: suspend entry (deep) {self.seq}")
        self.passes(2, seconds)
        if length:
            self.write(f"PM: Timekeeping suspended for {seconds:.3f} seconds")
        self.write(f"PM: suspend exit {self.seq}")

    @contextlib.contextmanager
    def read(self, *, wait_for: int) -> Iterator[None]:
        self.seen = []
        reader = KmsgReader(
            self.log, "b", self.state, lambda pci, uuid: 0, self.seen.extend, clocks=lambda: self.clocks
        )
        thread = threading.Thread(target=reader.run, daemon=True)
        thread.start()
        try:
            yield
            wait_until(lambda: len(self.seen) >= wait_for, "the lines")
        finally:
            reader.stop()
            thread.join()

    def wrong_by_s(self) -> dict[str, float]:
        return {event.code: (event.ts_ms - self.written[event.message]) / 1000 for event in self.seen}


def line(code: int) -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1"


def close_to_zero(errors: dict[str, float]) -> bool:
    return all(abs(error) <= 3 for error in errors.values())


@pytest.mark.parametrize("length", [False, True], ids=["length unknown", "length written"])
def test_lines_from_before_and_after_a_suspend_that_nobody_saw(tmp_path: Path, length: bool) -> None:
    machine = Machine(tmp_path)
    machine.write(line(48))
    machine.passes(600)
    machine.sleeps(7_200, length=length)
    machine.passes(60)
    machine.write(line(79))
    machine.passes(900)
    with machine.read(wait_for=2):
        pass
    assert machine.wrong_by_s().keys() == {"48", "79"}
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_several_suspends_whose_lengths_the_kernel_wrote(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for number, seconds in enumerate((7_200, 60, 86_400)):
        machine.write(line(13 + number))
        machine.passes(600)
        machine.sleeps(seconds, length=True)
    machine.write(line(79))
    machine.passes(900)
    with machine.read(wait_for=4):
        pass
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_a_suspend_while_the_log_is_read_and_what_is_known_of_it_after_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(line(48))
    with machine.read(wait_for=3):
        wait_until(lambda: machine.state.exists(), "the first line")
        machine.write(line(13))  # not read before the machine sleeps, as it may happen
        machine.passes(0.001)
        machine.sleeps(7_200)
        machine.write(line(79))
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()
    machine.write(line(94))
    machine.passes(1_800)
    machine.sleeps(600)
    machine.write(line(95))
    machine.passes(60)
    with machine.read(wait_for=2):
        pass
    assert machine.wrong_by_s().keys() == {"94", "95"}
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_lines_are_right_after_the_clock_jumped_an_hour_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(line(48))
    machine.passes(600)
    machine.clocks = replace(machine.clocks, wall_us=machine.clocks.wall_us - HOUR_US)
    machine.written[line(48)] -= HOUR_US // 1000  # by the clock that is right now
    with machine.read(wait_for=2):
        wait_until(lambda: machine.seen, "the backlog")
        wait_until(lambda: machine.state.exists(), "the end of the backlog")
        machine.write(line(79))
        wait_until(lambda: len(machine.seen) == 2, "a live line")
    assert [event.backlog for event in machine.seen] == [True, False]
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_a_reader_that_stood_still_reckons_by_the_lag_that_it_had_seen(tmp_path: Path) -> None:
    """The log's clock is a minute behind after weeks; a line read late must not be a minute too early."""
    machine = Machine(tmp_path)
    go_on = threading.Event()
    go_on.set()
    seen: list[NodeEvent] = []

    def deliver(events: list[NodeEvent]) -> None:
        seen.extend(events)
        assert go_on.wait(30)

    reader = KmsgReader(machine.log, "b", machine.state, lambda pci, uuid: 0, deliver, clocks=lambda: machine.clocks)
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    lag_us = 60_000_000

    def late(code: int) -> None:
        machine.seq += 1
        machine.written[line(code)] = machine.clocks.wall_us // 1000
        with machine.log.open("ab") as file:
            file.write(text(machine.seq, machine.clocks.awake_us - lag_us, line(code)))

    try:
        wait_until(lambda: not reader._backlog, "the end of the backlog")
        go_on.clear()
        late(48)
        wait_until(lambda: len(seen) == 1, "the line whose delivery hangs")
        late(79)
        machine.passes(300)
        go_on.set()
        wait_until(lambda: len(seen) == 2, "the line that waited")
    finally:
        go_on.set()
        reader.stop()
        thread.join()
    machine.seen = seen
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()

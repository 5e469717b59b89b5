"""The kernel log under faults, one test per row of the fault table: forged lines, a storm, an overrun, a log that
cannot be read. Lines come through a real pipe or file for /dev/kmsg."""

from __future__ import annotations

import asyncio
import os
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from drover_agent.config import SpoolConfig
from drover_agent.runtime import kernel_log as runtime_module
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg import reader as kmsg
from drover_agent.sources.kmsg.clock import system_clocks
from drover_agent.sources.kmsg.reader import KmsgReader
from drover_agent.spool.spool import Spool
from drover_agent.telemetry import event_dedup as merge_module
from drover_agent.telemetry.event_dedup import EventMerger
from drover_proto import telemetry_pb2 as pb
from testbed.kernel_log import codes, events_of, node, xid
from testbed.nvml import FakeNvml, pci_of
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
def test_xid_lines_forged_from_user_space_are_kept_and_never_count(
    tmp_path: Path, pipe: Path, fake_nvml: FakeNvml, accepted: bool
) -> None:
    async def scenario() -> None:
        async with node(tmp_path, pipe, hardware="nvml", kmsg_accept_user_facility=accepted) as found:
            writer = feed(pipe, [xid(1, 79, facility=1), xid(2, 79, facility=3), xid(3, 48)])
            await until(lambda: {"79", "48"} <= set(codes(found)), "the lines")
            writer.join()
            reported = {event.code: event.forgeable for event in events_of(found.agent.spool) if event.kind == "xid"}
            assert reported == {"79": not accepted, "48": False}

    asyncio.run(scenario())


def test_a_storm_of_ten_thousand_lines_in_a_second_keeps_every_distinct_event_and_counts_the_rest(
    tmp_path: Path, pipe: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs with 27 codes each, most of the lines of one of them: 10,000 with times of one second. Each names its
    GPU, which NVML knows by its address."""
    monkeypatch.setattr(merge_module, "WINDOW_MS", 600_000)  # a machine under load takes longer than a window
    buses = [int(pci_of(slot).split(":")[1], 16) for slot in range(8)]
    rare = [(code, bus) for code in CODES for bus in buses]
    lines = [rare[n // 40] if n % 40 == 0 and n // 40 < len(rare) else (95, buses[0]) for n in range(10_000)]
    assert set(lines) == set(rare)

    async def scenario() -> None:
        async with node(tmp_path, pipe, hardware="nvml") as found:
            await until(lambda: len(found.gpus.all()) == 8, "the GPUs are known")
            second_us = system_clocks().awake_us
            stamps = (second_us + 100 * n for n in range(10_000))
            writer = feed(
                pipe, (xid(n, *line, us=us) for n, (line, us) in enumerate(zip(lines, stamps, strict=True), 1))
            )
            merger = found.agent._merger
            await until(
                lambda: sum(n for key in merger._open.values() for n in key.seen.values()) == 10_000, "the last line"
            )
            await asyncio.to_thread(writer.join)
            wanted = {(str(code), buses.index(bus)) for code, bus in rare}

            def reported() -> set[tuple[str, int]]:
                return {(e.code, e.gpu) for e in events_of(found.agent.spool) if e.kind == "xid" and e.HasField("gpu")}

            await found.agent.spool.wait_stored()  # a thread writes them
            assert reported() == wanted

    asyncio.run(scenario())
    spool = Spool(SpoolConfig(dir=str(tmp_path / "spool")), 0)
    xids = [event for event in events_of(spool) if event.kind == "xid"]
    assert sum(event.count for event in xids) == 10_000
    assert len(rare) < len(xids) <= len(rare) + 3  # and what was repeated, in a sum or two
    spool.close()


def peak_of_a_storm(folder: Path, lines: int) -> int:
    """Peak bytes of Python memory while a storm goes through reader and merger; reports are counted, not kept."""
    path = folder / f"kmsg{lines}"
    with path.open("wb") as file:
        for n in range(1, lines + 1):
            file.write(xid(n, CODES[n % len(CODES)], 0x10 + n % 8))
    merger = EventMerger(expect_kernel_log=True)
    reported = seen = 0

    def deliver(events: list[NodeEvent]) -> None:
        nonlocal reported, seen
        seen += len(events)
        reported += sum(len(merger.offer(event)) for event in events)

    reader = KmsgReader(path, "b", None, lambda pci, uuid: None, deliver)
    thread = threading.Thread(target=reader.run, daemon=True)
    tracemalloc.start()
    try:
        thread.start()
        wait_until(lambda: seen == lines, "the whole log")  # tracemalloc makes it slow
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        reader.stop()
        thread.join()
    assert reported == len(CODES) * 8  # each distinct one at once
    return peak


def test_a_storm_takes_the_same_memory_however_long_it_lasts(tmp_path: Path) -> None:
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


def test_an_overrun_is_reported_with_the_number_of_lost_lines_and_its_going_on_in_sums(
    tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(xid(10, 48) + xid(61, 79) + xid(71, 94) + xid(72, 95) + xid(80, 31))

    async def scenario() -> None:
        async with node(tmp_path, path, hardware="nvml") as found:

            def reported() -> list[pb.Event]:
                return [e for e in events_of(found.agent.spool) if e.kind == "xid" or e.code == "kmsg_overrun"]

            await until(lambda: len(reported()) == 6, "the lines")
            seen = reported()
            assert [event.code for event in seen] == ["48", "kmsg_overrun", "79", "94", "95", "31"]
            assert (seen[1].count, "50 kernel log lines" in seen[1].message) == (50, True)
            assert found._kernel_log and found._kernel_log._reader
            found._kernel_log._reader._deliver_lost_at = 0.0  # the ten seconds are over
            await until(lambda: len(reported()) == 7, "the sum")
            assert (reported()[6].code, reported()[6].count) == ("kmsg_overrun", 9 + 7)

    asyncio.run(scenario())


@pytest.mark.system
def test_a_real_overrun_of_the_kernels_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stands still until the kernel has overwritten what it had not read; then it goes on and says so."""
    monkeypatch.setattr(kmsg, "LOST_EVERY_S", 0.0)  # the oldest line of a full log may be lost before it
    limit = Path("/proc/sys/kernel/printk_devkmsg")
    before = limit.read_text()
    limit.write_text("on\n")
    seen: list[NodeEvent] = []
    held, go_on = threading.Event(), threading.Event()

    def deliver(events: list[NodeEvent]) -> None:
        held.set()
        assert go_on.wait(120)
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


def test_a_log_that_is_not_there_is_reported_once_tried_again_and_reported_when_it_is_back(
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
    assert runtime_module.describe_error(caught.value) == "Permission denied; give the agent CAP_SYSLOG"

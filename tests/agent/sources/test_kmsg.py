"""Kernel-log lines: which are events, whose they are, and where reading goes on after a restart."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg import lines as kmsg_lines
from drover_agent.sources.kmsg.clock import Clocks, system_clocks
from drover_agent.sources.kmsg.lines import normal_pci, understand
from drover_agent.sources.kmsg.reader import KmsgReader, parse_record
from drover_core.model.events import KERNEL_CODES, EventKind
from testbed.waiting import wait_until

SLOTS = {"0000:3b:00": 0, "0000:86:00": 4}
UUID = "GPU-6d6b2e7c-96c4-4fc4-a0b9-1d2c3b4a5f60"

CASES = sorted((Path(__file__).parents[2] / "cases/agent/kmsg").iterdir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_kernel_writes_becomes_these_events(case: Path) -> None:
    """Whole logs, read as the agent reads them: every event that is expected, in its order, and no other."""
    expected = json.loads((case / "expected.json").read_text())
    with reading(case / "input.txt", gpus=expected["gpus"]) as found:
        wait_until(lambda: not found.reader._backlog, "the end of the log")
    reported = [
        {"kind": e.kind, "code": e.code, "gpu": e.gpu, "forgeable": e.forgeable, "message": e.message}
        for e in found.events
    ]
    assert reported == expected["events"]
    assert all(e.code in KERNEL_CODES for e in found.events if e.kind is EventKind.KERNEL)


def test_every_kernel_code_has_a_case() -> None:
    seen = {
        event["code"]
        for case in CASES
        for event in json.loads((case / "expected.json").read_text())["events"]
        if event["kind"] == "kernel"
    }
    assert seen == set(KERNEL_CODES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "pcieport 0000:3a:02.0: AER: Corrected error received: 0000:3b:00.0",
            "pcieport 0000:3a:02.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
        ),
        ("mlx5_core 0000:29:00.0 ens6f0np0: Link down", "mlx5_core 0000:29:00.0 ens6f0np0: Link up"),
        ("mlx5_core 0000:29:00.0 ens6f0np0: Link down", "mlx5_core 0000:29:00.1 ens6f1np1: Link down"),
        ("nvme nvme0: I/O 512 QID 7 timeout, aborting", "nvme nvme1: I/O 512 QID 7 timeout, aborting"),
        ("Out of memory: Killed process 42 (python) a", "Out of memory: Killed process 43 (slurmstepd) a"),
        (
            "mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 7: 8c00",
            "mce: [Hardware Error]: CPU 2: Machine Check Exception: 5 Bank 7: be00",
        ),
        ("{1}[Hardware Error]: event severity: corrected", "{1}[Hardware Error]: event severity: fatal"),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s!", "watchdog: BUG: soft lockup - CPU#4 stuck for 22s!"),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 timeout",
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 29 timeout",
        ),
    ],
)
def test_what_is_not_the_same_trouble_is_distinguished(one: str, other: str) -> None:
    first, second = understand(one), understand(other)
    assert first is not None and second is not None
    assert (first.code, first.where) != (second.code, second.where)
    again = understand(one)
    assert again == first


def test_a_uuid_next_to_the_address_is_read() -> None:
    line = understand(f"NVRM: Xid (PCI:0000:3b:00 {UUID}): 79, GPU has fallen off the bus.")
    assert line is not None
    assert (line.uuid, line.code) == (UUID, "79")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("PCI:0000:3b:00", "0000:3b:00"),
        ("3b:00", "0000:3b:00"),
        ("000A:3b:00.1", "000a:3b:00"),
        ("none", ""),
    ],
)
def test_addresses_have_one_form(text: str, normal: str) -> None:
    assert normal_pci(text) == normal


def test_records_are_parsed_and_garbage_is_not() -> None:
    record = parse_record(b"12,345,6789,-;a text; with more\n SUBSYSTEM=pci\n")
    assert record is not None
    assert (record.facility, record.seq, record.us, record.text) == (1, 345, 6789, "a text; with more")
    assert parse_record(b"no record") is None
    assert parse_record(b"\xff\xfe") is None


def log_line(seq: int, text: str, facility: int = 0, us: int | None = None) -> str:
    when = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000 if us is None else us
    return f"{facility << 3 | 4},{seq},{when},-;{text}\n SUBSYSTEM=pci\n"


def xid_line(seq: int, code: int, facility: int = 0, us: int | None = None) -> str:
    return log_line(seq, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1", facility, us)


class Reading:
    """A reader in its thread, and what it reported."""

    def __init__(
        self,
        path: Path,
        state: Path | None,
        boot: str,
        gpus: dict[str, int],
        clocks: Callable[[], Clocks],
        accept: bool,
    ) -> None:
        self.events: list[NodeEvent] = []
        self.reader = KmsgReader(
            path,
            boot,
            state,
            lambda pci, uuid: gpus.get(pci),
            self.events.extend,
            accept_user_facility=accept,
            clocks=clocks,
        )
        self.thread = threading.Thread(target=self.reader.run)

    def codes(self) -> list[str]:
        return [event.code for event in self.events]


@contextmanager
def reading(
    path: Path,
    state: Path | None = None,
    boot: str = "boot-1",
    *,
    gpus: dict[str, int] = SLOTS,
    clocks: Callable[[], Clocks] = system_clocks,
    accept: bool = False,
) -> Iterator[Reading]:
    found = Reading(path, state, boot, gpus, clocks, accept)
    found.thread.start()
    try:
        yield found
    finally:
        found.reader.stop()
        found.thread.join(10)
        assert not found.thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("")
    return path


def add(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(lines))


def test_backlog_and_live_lines_and_their_times(path: Path) -> None:
    uptime_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    add(path, xid_line(5, 48, us=uptime_us - 3_600_000_000), log_line(6, "usb 1-1: new device"))
    with reading(path) as found:
        wait_until(lambda: found.events, "the backlog")
        wait_until(lambda: not found.reader._backlog, "the end of the backlog")
        add(path, xid_line(7, 79), log_line(8, "Out of memory: Killed process 1 (a)"))
        wait_until(lambda: len(found.events) == 3, "the live lines")
    old, new, oom = found.events
    assert (old.code, old.gpu, old.backlog, old.forgeable) == ("48", 0, True, False)
    assert time.time() * 1000 - old.ts_ms == pytest.approx(3_600_000, abs=600_000)
    assert (new.code, new.kind, new.backlog, new.source) == ("79", EventKind.XID, False, "kmsg")
    assert time.time() * 1000 - new.ts_ms < 600_000
    assert (oom.code, oom.gpu) == ("oom", None)


def test_a_line_that_comes_while_the_backlog_is_reported_is_none_of_it(path: Path) -> None:
    """To report old lines takes as long as the disk does: a GPU that falls off the bus meanwhile did so now."""
    reported: list[NodeEvent] = []

    def deliver(events: list[NodeEvent]) -> None:
        if not reported:
            add(path, xid_line(6, 79), xid_line(7, 48))
        reported.extend(events)

    add(path, xid_line(5, 79))
    reader = KmsgReader(path, "boot-1", None, lambda pci, _: SLOTS.get(pci), deliver)
    thread = threading.Thread(target=reader.run)
    thread.start()
    try:
        wait_until(lambda: len(reported) == 3, "all lines")
    finally:
        reader.stop()
        thread.join(10)
    assert [(event.code, event.backlog) for event in reported] == [("79", True), ("79", False), ("48", False)]


def test_reading_goes_on_where_it_stopped_and_a_reboot_begins_again(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "kmsg.json"
    add(path, xid_line(1, 48))
    with reading(path, state) as first:
        wait_until(lambda: first.codes() == ["48"])
    add(path, xid_line(2, 79))
    with reading(path, state) as second:
        wait_until(lambda: second.codes() == ["79"])
        wait_until(lambda: json.loads(state.read_text())["seq"] == 2)
    assert not second.events[0].backlog
    with reading(path, state, "boot-2") as third:
        wait_until(lambda: third.codes() == ["48", "79"])


def test_lines_lost_between_two_runs_are_reported(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "kmsg.json"
    state.write_text(json.dumps({"boot_id": "boot-1", "seq": 10}))
    add(path, xid_line(61, 79))
    with reading(path, state) as found:
        wait_until(lambda: found.codes() == ["kmsg_overrun", "79"])
    assert "50 kernel log lines" in found.events[0].message


def test_a_broken_state_file_reads_from_the_beginning(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "kmsg.json"
    state.write_text("{")
    add(path, xid_line(1, 48))
    with reading(path, state) as found:
        wait_until(lambda: found.codes() == ["48"])


def test_the_place_is_kept_though_another_version_wrote_the_rest(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "kmsg.json"
    for clock in ("words", {"new": 1}, {"lag_us": 0, "looked_us": 0, "sleeps": [[0, 1e999]]}):
        state.write_text(json.dumps({"boot_id": "boot-1", "seq": 1, "clock": clock, "more": [1]}))
        path.write_text(xid_line(1, 48) + xid_line(2, 79))
        with reading(path, state) as found:
            wait_until(lambda: found.codes() == ["79"])


@pytest.mark.parametrize("kept", ["[]", "3", '{"boot_id": "boot-1", "seq": 1e999}', '{"boot_id": "boot-1"', ""])
def test_a_place_that_is_none_reads_from_the_beginning(path: Path, tmp_path: Path, kept: str) -> None:
    state = tmp_path / "kmsg.json"
    state.write_text(kept)
    add(path, xid_line(1, 48))
    with reading(path, state) as found:
        wait_until(lambda: found.codes() == ["48"])


def test_a_machine_set_back_to_an_earlier_state_is_not_deaf_until_its_log_has_caught_up(
    path: Path, tmp_path: Path
) -> None:
    """A snapshot has the boot id of then, and a log that ends before the place that was kept."""
    state = tmp_path / "kmsg.json"
    state.write_text(json.dumps({"boot_id": "boot-1", "seq": 90_000}))
    add(path, xid_line(1, 48))
    with reading(path, state) as found:
        wait_until(lambda: not found.reader._backlog, "the end of the log")
        add(path, xid_line(2, 79))
        wait_until(lambda: found.codes() == ["48", "79"])
    assert [event.backlog for event in found.events] == [True, False]


@pytest.mark.parametrize(("facility", "accept", "forgeable"), [(0, False, False), (1, False, True), (1, True, False)])
def test_only_the_kernels_own_lines_count(path: Path, facility: int, accept: bool, forgeable: bool) -> None:
    add(path, xid_line(1, 79, facility))
    with reading(path, accept=accept) as found:
        wait_until(lambda: found.codes() == ["79"])
    assert found.events[0].forgeable is forgeable


def test_an_unknown_device_keeps_its_address_in_the_message(path: Path) -> None:
    add(path, log_line(1, "NVRM: Xid (PCI:0000:ff:00): 79, gone"))
    with reading(path) as found:
        wait_until(lambda: found.events)
    assert (found.events[0].gpu, "0000:ff:00" in found.events[0].message) == (None, True)


def test_records_that_arrive_in_pieces_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    with reading(pipe) as found:
        text = (xid_line(1, 48) + xid_line(2, 79)).encode()
        for byte in text:
            os.write(writer, bytes([byte]))
        wait_until(lambda: found.codes() == ["48", "79"])
    os.close(writer)


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    reader = KmsgReader(tmp_path / "none", "b", None, lambda pci, uuid: None, lambda events: None)
    with pytest.raises(FileNotFoundError):
        reader.run()


@pytest.mark.system
def test_a_line_written_to_the_real_kernel_log(tmp_path: Path) -> None:
    mark = f"drover-test-{os.getpid()}"
    with reading(Path("/dev/kmsg"), tmp_path / "kmsg.json") as found:
        wait_until(lambda: not found.reader._backlog)
        Path("/dev/kmsg").write_text(f"<4>NVRM: Xid (PCI:0000:3b:00): 79, {mark}\n")
        wait_until(lambda: any(mark in event.message for event in found.events))
    event = next(event for event in found.events if mark in event.message)
    assert (event.code, event.gpu, event.forgeable, event.backlog) == ("79", 0, True, False)


def test_a_live_line_is_reported_with_the_time_now_though_the_kernels_clock_lags(path: Path) -> None:
    """The log's clock is not disciplined: after weeks of uptime it is minutes off the one it is compared with."""
    with reading(path) as found:
        wait_until(lambda: not found.reader._backlog, "the end of the backlog")
        add(path, xid_line(1, 79, us=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000 - 6_000_000_000))
        wait_until(lambda: found.events, "the line")
    assert time.time() * 1000 - found.events[0].ts_ms < 600_000


def test_every_pattern_is_one_though_it_is_made_only_when_a_line_asks_for_it() -> None:
    assert all(word and re.compile(pattern) for _, word, pattern in kmsg_lines._OTHERS)

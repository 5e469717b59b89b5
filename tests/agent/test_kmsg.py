"""Kernel-log lines: which are events, whose they are, and where reading goes on after a restart."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg import KmsgReader, parse_record
from drover_agent.sources.kmsg_lines import normal_pci, understand
from drover_proto.events import EventKind
from testbed.waiting import wait_until

SLOTS = {"0000:3b:00": 0, "0000:86:00": 4}
UUID = "GPU-6d6b2e7c-96c4-4fc4-a0b9-1d2c3b4a5f60"

LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", "xid", "79", "0000:3b:00"),
    ("NVRM: Xid (PCI:0000:86:00): 48, An uncorrectable double bit error (DBE)", "xid", "48", "0000:86:00"),
    ("NVRM: Xid (PCI:00000000:3B:00.0): 154, GPU recovery action changed", "xid", "154", "0000:3b:00"),
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:02): 13, Graphics SM Warp Exception", "xid", "13", "0000:3b:00"),
    ("NVRM: Xid (0000:03:00): 31, Ch 00000008", "xid", "31", "0000:03:00"),
    ("NVRM: Xid (PCI:0002:01:00): 119, Timeout waiting for RPC", "xid", "119", "0002:01:00"),
    ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32", "sxid", "12028", "0000:05:00"),
    (
        "pcieport 0000:00:01.0: AER: Corrected error received: 0000:3b:00.0",
        "kernel",
        "aer",
        "0000:3b:00",
    ),
    (
        "pcieport 0000:00:01.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:86:00.0",
        "kernel",
        "aer",
        "0000:86:00",
    ),
    ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer", "kernel", "aer", "0000:3b:00"),
    ("mce: [Hardware Error]: Machine check events logged", "kernel", "mce", ""),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", "kernel", "edac", ""),
    ("Out of memory: Killed process 4242 (python) total-vm:1kB", "kernel", "oom", ""),
    ("Memory cgroup out of memory: Killed process 77 (trainer)", "kernel", "oom", ""),
    ("INFO: task nv_queue:1234 blocked for more than 122 seconds.", "kernel", "hung_task", ""),
    ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0xffff:1589)", "kernel", "nvrm", "0000:3b:00"),
    ("NVRM: GPU at PCI:0000:86:00: has fallen off the bus.", "kernel", "nvrm", "0000:86:00"),
]
BOOT_NOISE = [
    "pcieport 0000:00:1c.0: AER: enabled with IRQ 122",
    "acpi PNP0A08:00: _OSC: OS now controls [PCIeHotplug PME AER PCIeCapability LTR]",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "EDAC MC: Ver: 3.0.0",
    "EDAC MC0: Giving out device to module skx_edac",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.172.08",
    "nvidia-nvswitch0: using MSI",
    "NVRM: GPU at PCI:0000:3b:00: " + UUID,
    "systemd[1]: Started OOM killer daemon",
    "",
]


@pytest.mark.parametrize(("text", "kind", "code", "pci"), LINES, ids=[line[0][:40] for line in LINES])
def test_lines_that_matter(text: str, kind: str, code: str, pci: str) -> None:
    line = understand(text)
    assert line is not None
    assert (line.kind, line.code, line.pci, line.message) == (kind, code, pci, text)


@pytest.mark.parametrize("text", BOOT_NOISE)
def test_what_every_boot_prints_is_no_event(text: str) -> None:
    assert understand(text) is None


def test_a_uuid_beside_the_address_is_read() -> None:
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
    """A reader in its thread, and what it told."""

    def __init__(self, path: Path, state: Path | None = None, boot: str = "boot-1", *, accept: bool = False) -> None:
        self.events: list[NodeEvent] = []
        self.reader = KmsgReader(
            path, boot, state, lambda pci, uuid: SLOTS.get(pci), self.events.extend, accept_user_facility=accept
        )
        self.thread = threading.Thread(target=self.reader.run)

    def codes(self) -> list[str]:
        return [event.code for event in self.events]


@contextmanager
def reading(path: Path, state: Path | None = None, boot: str = "boot-1", *, accept: bool = False) -> Iterator[Reading]:
    found = Reading(path, state, boot, accept=accept)
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
    assert time.time() * 1000 - old.ts_ms == pytest.approx(3_600_000, abs=5_000)
    assert (new.code, new.kind, new.backlog, new.source) == ("79", EventKind.XID, False, "kmsg")
    assert time.time() * 1000 - new.ts_ms < 10_000
    assert (oom.code, oom.gpu) == ("oom", None)


def test_reading_goes_on_where_it_stopped_and_a_reboot_begins_anew(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "kmsg.json"
    add(path, xid_line(1, 48))
    with reading(path, state) as first:
        wait_until(lambda: first.codes() == ["48"])
    add(path, xid_line(2, 79))
    with reading(path, state) as second:
        wait_until(lambda: second.codes() == ["79"])
        wait_until(lambda: json.loads(state.read_text())["seq"] == 2)
    assert second.events[0].backlog
    with reading(path, state, "boot-2") as third:
        wait_until(lambda: third.codes() == ["48", "79"])


def test_lines_lost_between_two_runs_are_told(path: Path, tmp_path: Path) -> None:
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


def test_a_live_line_is_told_with_the_time_now_though_the_kernels_clock_lags(path: Path) -> None:
    """The log's clock is not disciplined: after weeks of uptime it is a minute off the one it is compared with."""
    with reading(path) as found:
        wait_until(lambda: not found.reader._backlog, "the end of the backlog")
        add(path, xid_line(1, 79, us=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000 - 60_000_000))
        wait_until(lambda: found.events, "the line")
    assert time.time() * 1000 - found.events[0].ts_ms < 20_000

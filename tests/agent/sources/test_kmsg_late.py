"""Lines written while no agent ran: those of this boot since its place are news, sent once; all others are backlog."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from drover_agent.config import SpoolConfig
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg import reader as kmsg
from drover_agent.sources.kmsg.reader import BATCH, LATE_S, KmsgReader
from drover_agent.spool.spool import Spool
from testbed.kernel_log import Machine, close_to_zero, events_of, line, node, xid
from testbed.waiting import until, wait_until


def reported(machine: Machine) -> list[tuple[str, bool]]:
    return [(event.code, event.backlog) for event in machine.seen]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One on which an agent ran, saw an XID of before its start, and was stopped."""
    found = Machine(tmp_path)
    found.write(line(48))
    with found.read(wait_for=1):
        pass
    assert reported(found) == [("48", True)]
    found.passes(1)
    return found


def test_what_came_while_the_agent_was_updated_is_news_with_its_own_time_and_sent_once(machine: Machine) -> None:
    machine.write(line(79))
    machine.passes(600)
    with machine.read(wait_for=1):
        pass
    assert reported(machine) == [("79", False)]
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()
    machine.passes(60)
    with machine.read(wait_for=1):
        machine.write(line(94))
    assert reported(machine) == [("94", False)]


@pytest.mark.parametrize(
    ("awake_s", "asleep_s", "backlog"),
    [(LATE_S - 10, 0, False), (LATE_S + 10, 0, True), (600, LATE_S, True)],
    ids=["just in time", "too late", "too late for a machine that slept meanwhile"],
)
def test_what_was_missed_for_longer_than_an_hour_is_history(
    machine: Machine, awake_s: float, asleep_s: float, backlog: bool
) -> None:
    machine.write(line(79))
    machine.passes(5)
    if asleep_s:
        machine.sleeps(asleep_s)
    machine.passes(awake_s)
    with machine.read(wait_for=1):
        pass
    assert reported(machine) == [("79", backlog)]
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_what_came_while_the_reader_stood_still_has_its_own_time_and_is_history_after_an_hour(machine: Machine) -> None:
    """SIGSTOP, or a spool on a disk that hangs: to report the first line takes more than an hour."""

    def stand_still() -> None:
        if not machine.seen:
            machine.passes(5)
            machine.write(line(79))
            machine.passes(LATE_S - 600)
            machine.write(line(94))
            machine.passes(660)

    with machine.read(wait_for=3, meanwhile=stand_still):
        machine.write(line(63))
    assert reported(machine) == [("63", False), ("79", True), ("94", False)]
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_what_came_while_the_place_was_kept_on_a_slow_disk_has_its_own_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was empty before the disk hung, not after: what came meanwhile did not come just now."""
    real = kmsg.write_whole
    hung: list[str] = []

    def hang(path: Path, data: bytes, *, sync: bool = True) -> None:
        if not hung:
            hung.append("once")
            machine.write(line(79))
            machine.passes(120)
        real(path, data, sync=sync)

    machine.write("a line that is no event, so that there is a place to keep")
    monkeypatch.setattr(kmsg, "write_whole", hang)
    with machine.read(wait_for=1):
        pass
    assert reported(machine) == [("79", False)]
    assert close_to_zero(machine.wrong_by_s()), machine.wrong_by_s()


def test_lines_of_another_boot_are_none_of_these(machine: Machine) -> None:
    """A node that was drained, mended and rebooted is not drained again for what it said before."""
    machine.write(line(79))
    machine.passes(60)
    with machine.read(wait_for=2, boot="another"):
        wait_until(lambda: len(machine.seen) == 2, "the old ones")
        machine.write(line(94))
        wait_until(lambda: len(machine.seen) == 3, "a line of now")
    assert reported(machine) == [("48", True), ("79", True), ("94", False)]


def test_lines_of_a_machine_that_was_set_back_are_none_of_these(machine: Machine) -> None:
    machine.state.write_text(json.dumps({"boot_id": "b", "seq": 90_000}))
    machine.write(line(79))
    with machine.read(wait_for=2):
        pass
    assert reported(machine) == [("48", True), ("79", True)]


def test_an_agent_killed_between_two_batches_sends_none_of_them_again(tmp_path: Path) -> None:
    log, state = tmp_path / "kmsg", tmp_path / "kmsg.json"
    state.write_text(json.dumps({"boot_id": "b", "seq": 0}))
    log.write_bytes(b"".join(xid(n, 79) for n in range(1, 3 * BATCH + 1)))
    seen: list[NodeEvent] = []

    def until_killed(events: list[NodeEvent]) -> None:
        if len(seen) >= BATCH:
            raise InterruptedError
        seen.extend(events)

    with pytest.raises(InterruptedError):
        KmsgReader(log, "b", state, lambda pci, uuid: 0, until_killed).run()
    assert seen
    assert json.loads(state.read_text())["seq"] == len(seen)
    second = KmsgReader(log, "b", state, lambda pci, uuid: 0, seen.extend)
    thread = threading.Thread(target=second.run, daemon=True)
    thread.start()
    wait_until(lambda: len(seen) >= 3 * BATCH, "the rest")
    second.stop()
    thread.join()
    assert len(seen) == 3 * BATCH
    assert not any(event.backlog for event in seen)


def test_a_first_start_that_is_killed_makes_no_news_of_the_backlog(tmp_path: Path) -> None:
    """No place is kept before the end was reached once: what follows it was never watched."""
    log, state = tmp_path / "kmsg", tmp_path / "kmsg.json"
    log.write_bytes(b"".join(xid(n, 79) for n in range(1, 3 * BATCH + 1)))
    seen: list[NodeEvent] = []

    def until_killed(events: list[NodeEvent]) -> None:
        if seen:
            raise InterruptedError
        seen.extend(events)

    with pytest.raises(InterruptedError):
        KmsgReader(log, "b", state, lambda pci, uuid: 0, until_killed).run()
    assert seen and all(event.backlog for event in seen)
    assert not state.exists()


def test_an_agent_that_was_restarted_puts_into_its_spool_once_what_it_missed(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"

    async def run(seq: int) -> None:
        """A whole agent, from its start until it has read this line, and its stop."""
        state = tmp_path / "spool/kmsg.json"
        async with node(tmp_path, log):
            await until(lambda: state.exists() and json.loads(state.read_text())["seq"] == seq, "the place")

    def reported_after(more: bytes, seq: int) -> list[tuple[str, bool]]:
        with log.open("ab") as file:
            file.write(more)
        asyncio.run(run(seq))
        spool = Spool(SpoolConfig(dir=str(tmp_path / "spool")), 0)
        try:
            return [(event.code, event.backlog) for event in events_of(spool) if event.kind == "xid"]
        finally:
            spool.close()

    log.touch()
    assert reported_after(xid(1, 48), 1) == [("48", True)]
    assert reported_after(xid(2, 79), 2) == [("48", True), ("79", False)]
    assert reported_after(xid(3, 94), 3) == [("48", True), ("79", False), ("94", False)]


@pytest.mark.system
def test_the_real_kernel_log_while_the_agent_is_down(tmp_path: Path) -> None:
    mark, state = f"drover-test-late-{os.getpid()}", tmp_path / "kmsg.json"
    kmsg = Path("/dev/kmsg")

    def run(wanted: str | None) -> list[NodeEvent]:
        """What one run reports of our lines; `wanted`: the last of them."""
        seen: list[NodeEvent] = []
        caught_up = threading.Event()
        reader = KmsgReader(kmsg, "b", state, lambda pci, uuid: 0, seen.extend, caught_up=caught_up.set)
        thread = threading.Thread(target=reader.run, daemon=True)
        thread.start()
        try:
            wait_until(caught_up.is_set, "the end of the log")
            assert wanted is None or any(wanted in event.message for event in seen)
        finally:
            reader.stop()
            thread.join(10)
        return [event for event in seen if mark in event.message]

    kmsg.write_text(f"<4>NVRM: Xid (PCI:0000:3b:00): 48, {mark} before\n")
    assert [event.backlog for event in run("before")] == [True]
    kmsg.write_text(f"<4>NVRM: Xid (PCI:0000:3b:00): 79, {mark} missed\n")
    assert [(event.code, event.backlog) for event in run("missed")] == [("79", False)]
    assert run(None) == []

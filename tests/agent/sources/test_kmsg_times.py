"""When lines of the kernel log were written: a suspended machine, a clock that jumps, a log whose clock lags."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from drover_agent.sources.base import NodeEvent
from drover_agent.sources.kmsg.clock import (
    LAG_HOLDS_US,
    LIVE_US,
    Clocks,
    LogClock,
)
from drover_agent.sources.kmsg.reader import KmsgReader
from testbed.kernel_log import HOUR_US, Machine, close_to_zero, line, text
from testbed.waiting import wait_until


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
        assert go_on.wait(120)

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


def test_lines_of_a_storm_that_is_read_late_have_their_own_times_and_order() -> None:
    """A reader that falls behind, by less than LIVE_US and then by more; the log's clock is a minute behind."""
    lag_us, start = 60_000_000, Clocks(1_800_000_000_000_000, 10 * HOUR_US, 0)
    now = [start]

    def at(seconds: float) -> Clocks:
        return replace(start, wall_us=start.wall_us + int(seconds * 1e6), awake_us=start.awake_us + int(seconds * 1e6))

    clock = LogClock(lambda: now[0])
    clock.came_now(start.awake_us - lag_us)
    for written_s, read_s in ((0.1, 0.2), (0.3, 2.0), (0.6, 5.5), (0.9, 7.0)):
        now[0] = at(read_s)
        assert clock.when(at(written_s).awake_us - lag_us)[0] == at(written_s).wall_us // 1000
    assert clock.when(at(8.0).awake_us - lag_us)[0] == now[0].wall_us // 1000  # never ahead of now

    now[0] = at(LAG_HOLDS_US / 1e6)  # the lag may be another one by now
    assert clock.when(now[0].awake_us - lag_us - LIVE_US + 1)[0] == now[0].wall_us // 1000

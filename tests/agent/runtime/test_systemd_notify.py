"""What systemd receives from the agent, on a real datagram socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from drover_agent.runtime.systemd_notify import (
    READY_S,
    STALE_S,
    Notifier,
    SystemdReporter,
)
from testbed.clock import ManualClock, settle


class Systemd:
    """The manager's side of NOTIFY_SOCKET."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + path[1:] if path.startswith("@") else path)
        self._socket.setblocking(False)

    def received(self) -> list[list[str]]:
        """Messages since the last call, each as its lines."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(65536).decode().split("\n"))
        return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(str(tmp_path / "notify"))
    yield found
    found.close()


class Node:
    def __init__(self) -> None:
        self.ticks = 0
        self.status = "8 GPUs"


@contextlib.asynccontextmanager
async def reporting(
    systemd: Systemd, node: Node, clock: ManualClock, interval_s: float = 1.0
) -> AsyncIterator[SystemdReporter]:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
    reporter = SystemdReporter(notifier, clock, interval_s, lambda: node.ticks, lambda: node.status)
    task = asyncio.create_task(reporter.run())
    await settle()
    try:
        yield reporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def words(messages: list[list[str]]) -> set[str]:
    return {line for message in messages for line in message}


def test_an_agent_is_ready_after_its_first_tick_and_says_how_it_stands(systemd: Systemd) -> None:
    async def scenario() -> None:
        node, clock = Node(), ManualClock()
        async with reporting(systemd, node, clock) as reporter:
            await clock.advance(1)
            assert systemd.received() == []
            node.ticks = 1
            await clock.advance(1)
            assert systemd.received()[0] == ["READY=1", "STATUS=8 GPUs"]
            node.status = "two\nlines"
            await clock.advance(30)
            received = systemd.received()
            assert ["STATUS=two lines", "WATCHDOG=1"] in received
            assert not any("READY=1" in message for message in received)
            reporter.report_stopping()
            assert systemd.received() == [["STOPPING=1", "STATUS=stopping"]]

    asyncio.run(scenario())


def test_an_agent_with_a_long_interval_does_not_hold_up_the_boot(systemd: Systemd) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with reporting(systemd, Node(), clock, 600):
            await clock.advance(READY_S - 1)
            assert systemd.received() == []
            await clock.advance(2)
            assert "READY=1" in words(systemd.received())
            await clock.advance(600)
            assert "WATCHDOG=1" in words(systemd.received())

    asyncio.run(scenario())


def test_the_keep_alive_stops_with_the_ticks_and_comes_back_with_them(systemd: Systemd) -> None:
    async def scenario() -> None:
        node, clock = Node(), ManualClock()
        node.ticks = 1
        async with reporting(systemd, node, clock):
            await clock.advance(STALE_S)
            assert "WATCHDOG=1" in words(systemd.received())
            await clock.advance(20)
            systemd.received()
            await clock.advance(60)
            assert words(systemd.received()) == {"STATUS=8 GPUs"}
            node.ticks = 2
            await clock.advance(11)
            assert "WATCHDOG=1" in words(systemd.received())

    asyncio.run(scenario())


def test_an_abstract_address_is_understood() -> None:
    systemd = Systemd(f"@drover-test-{os.getpid()}")
    assert Notifier({"NOTIFY_SOCKET": systemd.path}).send("READY=1")
    assert systemd.received() == [["READY=1"]]
    systemd.close()


def test_outside_systemd_nothing_is_sent_and_nothing_runs() -> None:
    async def scenario() -> None:
        notifier = Notifier({})
        assert not notifier.on
        assert not notifier.send("READY=1")
        await SystemdReporter(notifier, ManualClock(), 1.0, lambda: 0, lambda: "").run()  # returns at once

    asyncio.run(scenario())


def test_a_manager_that_went_away_is_logged_once_and_stops_nothing(
    systemd: Systemd, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.path + "-gone"})
    assert [notifier.send("WATCHDOG=1") for _ in range(3)] == [False] * 3
    assert [record.message for record in caplog.records] == [
        "Reporting to systemd at NOTIFY_SOCKET failed: No such file or directory"
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_a_keep_alive_is_sent_only_where_it_is_awaited(environment: dict[str, str], expected: float | None) -> None:
    assert Notifier(environment).watchdog_s == expected

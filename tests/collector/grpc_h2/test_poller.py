"""The pause between two polls."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from drover_collector.grpc_h2 import frames, poller
from drover_collector.grpc_h2.connection import Connection
from drover_collector.grpc_h2.link import MUCH_BYTES, Link
from drover_collector.grpc_h2.poller import (
    BUSY_FACTOR,
    PAUSE_PER_LINK_S,
    PAUSE_S,
    Poller,
)
from testbed.http2 import GREETING, data, opened

MANY = 300  # links: enough for the longest pause


class Loop:
    """An event loop in which nothing happens by itself."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self.reading: Callable[[], None] | None = None

    def add_reader(self, _: int, call: Callable[[], None]) -> None:
        self.reading = call

    def remove_reader(self, _: int) -> None:
        self.reading = None

    def call_later(self, pause_s: float, _: Callable[[], None]) -> None:
        self.pauses_s.append(pause_s)


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    class Owner:
        def begin_call(self, _: Link, __: object) -> Any:
            return SimpleNamespace(stream_changed=lambda: None, take_message=lambda _: False)

        def watch(self, *_: object) -> None: ...

    with ours, theirs:
        yield Link(ours, ("", 0), Owner()), theirs  # type: ignore[arg-type]  # the rest is not asked for


def polled(monkeypatch: pytest.MonkeyPatch, link: Link, others: int = MANY) -> tuple[Poller, Loop]:
    loop = Loop()
    monkeypatch.setattr(poller.asyncio, "get_running_loop", lambda: loop)
    made = Poller(64, Link.handle_events, lambda *_: pytest.fail("lost"), pausing=True)
    made.add(link)
    made.links.update({-1 - n: link for n in range(others)})
    return made, loop


def test_it_pauses_for_company_and_less_while_one_has_much_to_say(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Link, socket.socket]
) -> None:
    """A peer that sends what an outage left says a window and waits until it is read: 64 KiB for each look."""
    link, theirs = pair
    made, loop = polled(monkeypatch, link)
    theirs.sendall(GREETING + opened() + data(bytes(1000)))
    made._poll()
    theirs.sendall(data(bytes(frames.FRAME_BYTES)) * 2)
    made._poll()
    theirs.sendall(data(b"x"))
    made._poll()
    theirs.sendall(data(b"x"))
    made._poll()
    assert loop.pauses_s == [PAUSE_S, PAUSE_S, PAUSE_S / BUSY_FACTOR, PAUSE_S]
    assert loop.reading is None
    made._poll()  # nothing is ready: the event loop calls when a link is
    assert loop.reading is not None
    made.close()


def test_few_connections_are_looked_at_sooner(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Link, socket.socket]
) -> None:
    link, theirs = pair
    made, loop = polled(monkeypatch, link, 9)
    theirs.sendall(GREETING)
    made._poll()
    assert loop.pauses_s == [pytest.approx(10 * PAUSE_PER_LINK_S)]
    made.close()


def test_a_message_of_ten_seconds_is_not_much(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    assert isinstance(link.connection, Connection)
    theirs.sendall(GREETING + opened() + data(bytes(8000)))
    assert not link.handle_events(select.EPOLLIN)
    theirs.sendall(data(bytes(MUCH_BYTES)))
    assert link.handle_events(select.EPOLLIN)

"""A frame that is one message, as most are, is delivered without being kept; all else goes through `receive`."""

from __future__ import annotations

import asyncio
import gzip
import random
import select
import socket

import grpc
import pytest

from drover_collector.grpc_h2 import GrpcServer, frames, messages
from drover_collector.grpc_h2.connection import HALF, Connection
from drover_collector.grpc_h2.link import Link
from testbed.http2 import GREETING, data, kinds, opened

TURNS = 10  # of the event loop, in which a call's task goes on


def whole(message: bytes, *, flag: int = 0, flags: int = 0, stream: int = 1, longer: int = 0) -> bytes:
    body = bytes((flag,)) + (len(message) + longer).to_bytes(4) + message
    return data(body, stream, flags)


LONG = bytes(range(100))


def begun() -> Connection:
    connection = Connection()
    (stream,) = connection.receive(GREETING + opened())
    stream.served_by = object()
    return connection


def test_a_frame_that_is_one_message_is_counted_and_not_held() -> None:
    connection = begun()
    stream = connection.accept_single_message(memoryview(whole(LONG)))
    assert stream is connection.streams[1]
    assert not stream.received
    assert stream.window_in == frames.WINDOW - len(LONG) - messages.PREFIX.size


@pytest.mark.parametrize(
    "came",
    [
        whole(LONG) + b"x",
        whole(LONG)[:-1],
        whole(LONG, longer=1),
        whole(LONG + b"x", longer=-1),
        whole(LONG, flag=2),
        whole(LONG, flags=frames.END_STREAM),
        whole(LONG, flags=frames.PADDED),
        whole(LONG, stream=3),
        whole(b"few"),
        frames.head(frames.PING, 0, 1, len(LONG) + 5) + bytes((0, 0, 0, 0, len(LONG))) + LONG,
        b"",
    ],
)
def test_all_else_is_left_to_receive(came: bytes) -> None:
    connection = begun()
    assert connection.accept_single_message(memoryview(came)) is None
    assert connection.streams[1].window_in == frames.WINDOW


def test_nor_is_a_message_taken_before_what_waits() -> None:
    waits = begun()
    waits.receive(data(b"\0\0\0"))
    assert waits.accept_single_message(memoryview(whole(LONG))) is None
    cut = begun()
    cut.receive(whole(LONG)[:5])
    assert cut.accept_single_message(memoryview(whole(LONG))) is None
    ended = begun()
    ended.receive(frames.head(frames.DATA, frames.END_STREAM, 1, 0))
    assert ended.accept_single_message(memoryview(whole(LONG))) is None
    amid = begun()
    amid.receive(frames.head(frames.HEADERS, 0, 3, 0))  # its CONTINUATION is to come
    assert amid.accept_single_message(memoryview(whole(LONG))) is None
    assert Connection().accept_single_message(memoryview(whole(LONG))) is None  # not greeted


def test_windows_are_filled_again_however_messages_come() -> None:
    """The frame that uses up half a window goes the long way, which gives it back."""
    connection = begun()
    stream, given = connection.streams[1], 0
    stream.needs_more = True
    for _ in range(3 * frames.WINDOW // len(whole(LONG))):
        came = whole(LONG)
        if connection.accept_single_message(memoryview(came)) is None:
            assert connection.receive(came) == [stream]
            stream.received.clear()
        given += frames.WINDOW_UPDATE in kinds(bytes(connection.queue.buffer))
        connection.queue.buffer.clear()
        assert stream.window_in >= HALF
    assert given >= 5


class Taker:
    """Takes messages that begin with `a` at once, fails at `!`, and reads all others; few bytes a message."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []

    def take(self, message: bytes) -> bool:
        if message.startswith(b"!"):
            raise ValueError("a defect")
        if message.startswith(b"a"):
            self.got.append(("at once", message))
        return message.startswith(b"a")

    async def __call__(self, _: object, context: grpc.aio.ServicerContext) -> None:
        context.max_message_bytes = 5_000  # type: ignore[attr-defined]  # a Call's
        await context.read()
        context.on_message = self.take  # type: ignore[attr-defined]  # of our server only
        while (message := await context.read()) is not grpc.aio.EOF:
            self.got.append(("read", message))


def said(*sent: bytes) -> tuple[Taker, bytes]:
    """What the call got of these frames, each read by itself, and what its peer received."""

    async def run() -> tuple[Taker, bytes]:
        taker = Taker()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            link = Link(ours, ("", 0), GrpcServer({"/echo": taker}))
            for each in (GREETING + opened(grpc_encoding="gzip") + whole(b"hello"), *sent):
                theirs.sendall(each)
                link.handle_events(select.EPOLLIN)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            link.close()
            return taker, theirs.recv(1 << 20)

    return asyncio.run(run())


def noise(first: bytes, size: int = 300) -> bytes:
    return first + random.Random(size).randbytes(size)


def test_what_is_not_taken_at_once_is_read_in_its_turn() -> None:
    sent = [noise(b"a", 200), noise(b"b", 210), noise(b"a", 220), noise(b"b", 230)]
    taker, _ = said(whole(sent[0]), *(whole(gzip.compress(m), flag=1) for m in sent[1:]))
    assert taker.got == [(how, m) for how, m in zip(("at once", "read", "at once", "read"), sent, strict=True)]


@pytest.mark.parametrize(
    ("frame", "code", "text"),
    [
        (whole(noise(b"!")), b"2", b"ValueError"),
        (whole(noise(b"no gzip"), flag=1), b"13", b"cannot be decompressed"),
        (whole(gzip.compress(bytes(1_000_000)), flag=1), b"8", b"larger than max"),
        (whole(noise(b"a", 6_000)), b"8", b"larger than max"),
    ],
)
def test_what_is_wrong_ends_its_call_as_ever(frame: bytes, code: bytes, text: bytes) -> None:
    taker, answered = said(frame)
    assert b"\x0bgrpc-status" + bytes((len(code),)) + code in answered
    assert text in answered
    assert not taker.got

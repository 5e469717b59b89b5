"""The server with real gRPC clients and with raw sockets: what it serves, and which peers it withstands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from typing import Any

import grpc
import pytest

from drover_collector.grpc_h2 import CallEndedError, frames, messages
from drover_collector.grpc_h2 import call as agent_call
from drover_collector.grpc_h2.connection import STREAMS
from drover_collector.grpc_h2.send_queue import HELD_BYTES
from testbed.grpc_server import MESSAGE_BYTES, WAIT_S, Echo, Raw, calling, exchange, serving
from testbed.http2 import GREETING, data, goodbye, opened, split
from testbed.loop import in_loop


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@in_loop
async def test_messages_larger_than_the_windows_go_both_ways(compression: grpc.Compression) -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port, compression) as call:
        for size in (0, 1, 65_535, 65_536, 3_000_000):
            await exchange(call, os.urandom(size))
        for _ in range(40):
            await exchange(call, os.urandom(11_000))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert (echo.open, echo.ended) == (0, 1)


@in_loop
async def test_a_message_that_is_too_long_ends_its_stream_alone() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as bystander:
        await exchange(bystander)
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):  # the latter is a bomb of 18 kB
            async with calling(port, compression) as call:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.write(bytes(MESSAGE_BYTES + 1))
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "larger than max" in await call.details()
        await exchange(bystander)
        assert echo.received == [1, 1]


@in_loop
async def test_a_refusal_before_the_first_message_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, most clients of grpc.aio know only of an internal error."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    monkeypatch.setattr(agent_call, "FIRST_MESSAGE_S", WAIT_S)  # however slow the machine is
    async with serving(refuse) as (_, port):
        for _ in range(20):
            async with calling(port) as call:
                await call.write(b"x")
                with pytest.raises(grpc.aio.AioRpcError, match="not you"):
                    await call.read()
        monkeypatch.setattr(agent_call, "FIRST_MESSAGE_S", 0.02)
        async with Raw(port, GREETING, opened()) as raw:  # says nothing more
            await raw.until(frames.RST_STREAM)
            assert b"not you" in raw.received


@in_loop
async def test_a_refusal_amid_a_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that came has been taken, so that the peer's window is as at the beginning."""
    monkeypatch.setattr(agent_call, "FIRST_MESSAGE_S", 100 * WAIT_S)
    size = frames.WINDOW // 2 + 10

    async def refuse(_: Any, context: Any) -> None:
        assert len(await context.read()) == size - 5
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    message = messages.wrap(bytes(size - 5))
    parts = [data(message[at : at + 16_384]) for at in range(0, size, 16_384)]
    async with serving(refuse) as (_, port), Raw(port, GREETING, opened(), *parts) as raw:
        await raw.until(frames.RST_STREAM)
        assert b"not you" in raw.received


@in_loop
async def test_a_request_that_is_not_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_call, "FIRST_MESSAGE_S", 0.02)
    async with serving(Echo()) as (_, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/drover.telemetry.v1.Telemetry/Other")(b"x")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for changed, says in (
            ({"grpc_encoding": "snappy"}, b"grpc-status\x0212"),
            ({"content_type": "text/html"}, b"\x08\x03415"),
            ({"_method": "GET"}, b"\x08\x03405"),
        ):
            async with Raw(port, GREETING, opened(**changed)) as raw:
                await raw.until(frames.RST_STREAM)
                assert says in raw.received
        async with Raw(port, b"GET / HTTP/1.1\r\n\r\n") as raw:
            assert goodbye(await raw.until_closed()) == frames.Code.PROTOCOL_ERROR


@in_loop
async def test_junk_on_one_connection_hits_no_other() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as bystander:
        await exchange(bystander)
        for junk in (
            b"\0" * 5000,
            os.urandom(5000),
            frames.PREFACE + os.urandom(500),
            GREETING + opened() + b"\xff" * 900,
        ):
            async with Raw(port, junk) as raw:
                await raw.until_closed()
            await exchange(bystander)
        async with Raw(port, GREETING, opened(), data(b"\1\0\0\0\4junk")) as raw:
            await raw.until(frames.RST_STREAM)
            assert b"grpc-status\x0213" in raw.received
        await exchange(bystander)
        assert echo.open == 1


@in_loop
async def test_a_peer_that_leaves_ends_its_calls() -> None:
    """Cancelled, killed, or with a reset; what it sent until then is read."""
    echo = Echo()
    async with serving(echo) as (_, port):
        async with calling(port) as call:
            await exchange(call)
            call.cancel()
        await echo.until_ended(1)
        async with Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
            await raw.until(frames.DATA)
            raw.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # as the kernel of one killed
        await echo.until_ended(2)
        async with Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
            await raw.until(frames.DATA)
            await raw.send(frames.reset(1, frames.Code.NO_ERROR))
            await echo.until_ended(3)
            await raw.send(opened(3) + data(messages.wrap(b"y" * 7), 3))
            await raw.send(frames.head(frames.DATA, frames.END_STREAM, 3, 0))
            await echo.until_ended(4)
        assert echo.received == [1, 1, 1, 7]
        with pytest.raises(CallEndedError):
            await echo.context.write(b"late")


@in_loop
async def test_what_waits_to_be_said_ends_with_its_connection() -> None:
    """Also in a task other than the call's own."""
    saying: list[asyncio.Task[None]] = []

    async def say(_: Any, context: Any) -> None:
        saying.append(asyncio.create_task(context.write(bytes(2 * frames.WINDOW))))
        await context.read()

    async with serving(say) as (_, port), Raw(port, GREETING, opened()) as raw:
        await raw.until(frames.DATA)
        raw.socket.close()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(CallEndedError):
                await saying[0]


@in_loop
async def test_streams_that_end_as_they_begin_take_no_places() -> None:
    begun = b"".join(opened(n) + frames.reset(n, frames.Code.NO_ERROR) for n in range(1, 2 * STREAMS + 3, 2))
    last = 2 * STREAMS + 3
    async with serving(Echo()) as (_, port), Raw(port, GREETING, begun, opened(last)) as raw:
        await raw.send(data(messages.wrap(b"x"), last))
        assert await raw.until(frames.DATA) == messages.wrap(b"x")


@in_loop
async def test_who_reads_nothing_holds_nobody_up_and_little_memory() -> None:
    """Its windows are open, its socket is full: its responses wait, and what it sends is not read."""
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as bystander:
        wide = frames.window_update(0, 2**30) + frames.window_update(1, 2**30)
        async with Raw(port, GREETING, opened(), wide) as raw:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            message = data(messages.wrap(bytes(10_000)))
            sending = asyncio.create_task(raw.send(message * 3000))
            while len(echo.received) < 100:
                await exchange(bystander)
            received = -1
            while received != len(echo.received) - 10:
                received = len(echo.received)
                for _ in range(10):
                    await exchange(bystander)
            assert served._pollers.open is not None
            for link in served._pollers.open.links.values():
                assert len(link.connection.queue.buffer) < 2 * HELD_BYTES
                for stream in link.connection.streams.values():
                    assert len(stream.received) + len(stream.unsent) < 2 * frames.WINDOW
            sending.cancel()
        await exchange(bystander)


@in_loop
async def test_who_says_much_at_once_lets_others_have_their_turn() -> None:
    turn = 0
    read_in: Counter[int] = Counter()
    done = asyncio.Event()

    async def count(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            read_in[turn] += 1
        done.set()

    said = messages.wrap(b"") * 3000
    async with serving(count) as (_, port), Raw(port, GREETING, opened(), data(said, flags=frames.END_STREAM)):
        async with asyncio.timeout(WAIT_S):
            while not done.is_set():
                turn += 1
                await asyncio.sleep(0)
    assert read_in.total() == 3000
    assert max(read_in.values()) <= agent_call.MESSAGES_PER_TURN


@in_loop
async def test_a_message_is_sent_at_once_and_complete_or_not_sent() -> None:
    async with serving(echo := Echo()) as (_, port), Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
        await raw.until(frames.DATA)
        begun = len(raw.received)
        assert not echo.context.try_write(bytes(70_000))  # more than the window
        assert echo.context.try_write(b"short")
        async with asyncio.timeout(WAIT_S):
            while len(raw.received) == begun:
                raw.received += await asyncio.get_running_loop().sock_recv(raw.socket, 1000)
        assert split(raw.received[begun:]) == [(frames.DATA, 0, 1, messages.wrap(b"short"))]
        await raw.send(frames.reset(1, frames.Code.NO_ERROR))
        await echo.until_ended()
        assert not echo.context.try_write(b"late")

"""Messages that are taken without waking the task of their call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from drover_collector.grpc_h2 import GrpcServer, frames, messages
from drover_collector.grpc_h2.call import MESSAGES_PER_TURN
from testbed.http2 import GREETING, data, opened
from testbed.loop import in_loop

WAIT_S = 120


class Counter:
    """Takes messages that begin with `a` at once, fails at `!`, and reads all others."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.read: list[bytes] = []
        self.ended = asyncio.Event()

    def take(self, message: bytes) -> bool:
        if message.startswith(b"!"):
            raise ValueError("a defect")
        if message.startswith(b"a"):
            self.taken.append(message)
        return message.startswith(b"a")

    async def __call__(self, _: Any, context: Any) -> None:
        try:
            await context.read()
            context.on_message = self.take
            while (message := await context.read()) is not grpc.aio.EOF:
                self.read.append(message)
        finally:
            context.on_message = None
            self.ended.set()


@contextlib.asynccontextmanager
async def calling(counter: Counter) -> AsyncIterator[Any]:
    server = GrpcServer({"/echo": counter})
    port = server.listen("127.0.0.1", 0, None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.stream_stream("/echo")(compression=grpc.Compression.Gzip)
    finally:
        await server.stop(0)


@in_loop
async def test_only_what_is_left_wakes_the_task() -> None:
    counter = Counter()
    async with asyncio.timeout(WAIT_S), calling(counter) as call:
        for message in (b"hello", b"a1", b"a" * 100_000, b"b1", b"a2"):
            await call.write(message)
        await call.done_writing()
        await counter.ended.wait()
    assert b"b1" in counter.read
    got = sorted(counter.taken + counter.read)
    assert got == sorted([b"a1", b"a" * 100_000, b"b1", b"a2"])  # each once


@in_loop
async def test_a_defect_costs_its_call() -> None:
    counter = Counter()
    async with asyncio.timeout(WAIT_S), calling(counter) as call:
        await call.write(b"hello")
        await call.write(b"!")
        assert await call.code() is grpc.StatusCode.UNKNOWN
        assert await call.details() == "Unexpected ValueError"


@in_loop
async def test_many_small_ones_let_others_have_their_turn() -> None:
    counter = Counter()
    server = GrpcServer({"/echo": counter})
    port = server.listen("127.0.0.1", 0, None)
    await server.start()
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GREETING + opened() + data(messages.wrap(b"hello")))
            await writer.drain()
            while not counter.taken:  # until it waits in `read`
                writer.write(data(messages.wrap(b"a")))
                await asyncio.sleep(0)
            before = len(counter.taken)
            writer.write(data(b"".join(messages.wrap(b"a%d" % n) for n in range(4 * MESSAGES_PER_TURN))))
            writer.write(frames.head(frames.DATA, frames.END_STREAM, 1, 0))
            await counter.ended.wait()
            writer.close()
            del reader
    finally:
        await server.stop(0)
    assert counter.read  # after so many in a row the task has the rest
    rest = [m for m in counter.taken[before:] + counter.read if len(m) > 1]
    assert sorted(rest) == sorted(b"a%d" % n for n in range(4 * MESSAGES_PER_TURN))

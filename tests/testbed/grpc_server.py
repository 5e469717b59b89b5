"""The gRPC server on its own port, a handler for it, and a raw socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc

from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer, Handler, ServerOptions
from testbed.http2 import kinds, split

WAIT_S = 120
MESSAGE_BYTES = 17 << 20
LARGE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Echo:
    """Sends back what it receives, and counts."""

    def __init__(self) -> None:
        self.open = self.ended = 0
        self.received: list[int] = []
        self.changed = asyncio.Event()
        self.context: Any = None

    async def __call__(self, _: Any, context: Any) -> None:
        self.context = context
        self.open += 1
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self.received.append(len(message))
                await context.write(message)
        finally:
            self.open -= 1
            self.ended += 1
            self.changed.set()

    async def until_ended(self, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.ended < count:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def serving(echo: Handler, tls: ServerTls | None = None, **options: Any) -> AsyncIterator[tuple[GrpcServer, int]]:
    served = GrpcServer({"/echo": echo}, ServerOptions(**{"message_bytes": MESSAGE_BYTES} | options))
    port = served.listen("127.0.0.1", 0, None if tls is None else tls.contexts("ingest.listen"))
    await served.start()
    try:
        yield served, port
    finally:
        await served.stop(0)


@contextlib.asynccontextmanager
async def calling(
    port: int, compression: grpc.Compression | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"{host}:{port}", options=LARGE) as channel:
        yield channel.stream_stream("/echo")(compression=compression)


async def exchange(call: Any, message: bytes = b"x") -> None:
    async with asyncio.timeout(WAIT_S):
        await call.write(message)
        assert await call.read() == message


class Raw:
    """A socket, without TLS, that sends arbitrary bytes."""

    def __init__(self, port: int, *sent: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.socket.setblocking(False)
        self.received = b""
        self._sent = b"".join(sent)

    async def __aenter__(self) -> Raw:
        await self.send(self._sent)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, sent: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_sendall(self.socket, sent)

    async def until(self, kind: int) -> bytes:
        """The body of the first frame of a kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                whole = self.received[: len(self.received)]
                with contextlib.suppress(Exception):
                    for found, _, _, body in split(whole):
                        if found == kind:
                            return body
                more = await asyncio.get_running_loop().sock_recv(self.socket, 65_536)
                assert more, f"closed after {kinds(self.received)}"
                self.received += more

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while more := await asyncio.get_running_loop().sock_recv(self.socket, 65_536):
                    self.received += more
        return self.received

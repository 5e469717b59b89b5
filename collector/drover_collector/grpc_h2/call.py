"""One gRPC call, as its handler sees it: what it uses of `grpc.aio.ServicerContext`, with the same meaning."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc

from drover_collector.grpc_h2 import headers, messages
from drover_collector.grpc_h2.connection import HALF, Connection
from drover_collector.grpc_h2.frames import WINDOW
from drover_collector.grpc_h2.send_queue import Stream

log = logging.getLogger(__name__)

SHUTDOWN = "the server is shutting down"
MESSAGES_PER_TURN = 16  # that a call reads before others have their turn: a window holds 13,000 empty ones
FIRST_MESSAGE_S = 2.0  # a refusal waits so long for a first message


class CallEndedError(Exception):
    """The message cannot be sent: the peer has left, or the call has ended."""


class CallAbortedError(Exception):
    """`abort` has ended the call."""


class CallTransport(Protocol):
    """The connection that a call uses.

    Attributes:
        blocked_writers: calls that wait until `connection.queue` is sent.
    """

    connection: Connection
    peer: str
    blocked_writers: dict[Call, None]

    def flush(self) -> None:
        """Send what is queued. Never raises."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what `grpc.ServicerContext.auth_context` does."""


class Call:
    """One stream, served by a task. Event loop only.

    Attributes:
        on_message: receives a message that arrives while the task waits in `read`, and returns whether it took it.
            Only a message that it leaves wakes the task, which costs as much as handling most messages. The handler
            that sets it also removes it.
        max_message_bytes: applies from the next message on.
        inflates: False: `read` returns compressed messages as they came.
        was_packed: the message that `read` returned last is compressed.
    """

    __slots__ = ("_in_turn", "_reader", "_received_any", "_stream", "_task", "_transport", "_writers", "inflates",
                 "max_message_bytes", "on_message", "was_packed")  # fmt: skip

    def __init__(self, transport: CallTransport, stream: Stream, max_message_bytes: int) -> None:
        self._transport, self._stream = transport, stream
        self._received_any, self._in_turn = False, 0  # messages read since the task last waited
        self._reader: asyncio.Future[Any] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self.on_message: Callable[[bytes], bool] | None = None
        self.max_message_bytes = max_message_bytes
        self.inflates, self.was_packed = True, False

    # ---- for the handler

    async def read(self) -> Any:
        """Return the next message, bytes; `grpc.aio.EOF` after the last.

        Raises:
            CallAbortedError: the message is invalid or too long; the peer received the reason.
        """
        if self._in_turn >= MESSAGES_PER_TURN:
            self._in_turn = 0
            await asyncio.sleep(0)
        try:
            message = self._next()
            if message is None:
                self._request_more()
                try:
                    message = await self._wait()
                finally:
                    self._stream.needs_more = False
        except messages.MessageError as error:
            await self.abort(error.code, str(error))
        self._received_any = True
        self._in_turn += 1
        return message

    def try_write(self, message: bytes) -> bool:
        """Send a message if that needs no waiting. Return False if nothing was sent: then use `write`."""
        stream, queue = self._stream, self._transport.connection.queue
        data = messages.wrap(message)
        if stream.closed or queue.buffer or not queue.fits(stream, len(data)):
            return False
        queue.write(stream, data)
        self._transport.flush()
        return True

    async def write(self, message: bytes) -> None:
        """Send a message. Return when the peer's windows and the socket have taken it.

        Raises:
            CallEndedError: the peer has left, or the call has ended.
        """
        stream, transport = self._stream, self._transport
        if stream.closed:
            raise CallEndedError("the stream has ended")
        queue = transport.connection.queue
        queue.write(stream, messages.wrap(message))
        transport.flush()
        while not stream.lost and (stream.unsent or queue.buffer):
            waiter = asyncio.get_running_loop().create_future()
            self._writers.append(waiter)
            transport.blocked_writers[self] = None
            try:
                await waiter
            finally:
                self._writers.remove(waiter)
                if not self._writers:
                    transport.blocked_writers.pop(self, None)
        if stream.lost:
            raise CallEndedError("the peer has left")

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call, after the peer's first message or FIRST_MESSAGE_S.

        A client whose first message meets a stream that has ended reports an error of its own to its user instead of
        this one (grpc.aio: `Internal error from Core`).

        Raises:
            CallAbortedError: always.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_MESSAGE_S):
                await self._wait_for_data()
        self._end(code, details)
        raise CallAbortedError(details)

    def peer(self) -> str:
        return self._transport.peer

    @property
    def partial_bytes(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._stream.received)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what `grpc.ServicerContext.auth_context` does; empty without TLS."""
        return self._transport.auth_context()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._stream.request.metadata

    # ---- for the connection

    def start(self, handler: Handler | None) -> asyncio.Task[None]:
        """Serve the call in a task. None: the method is unknown."""
        self._task = asyncio.get_running_loop().create_task(self._serve(handler))
        return self._task

    def finish(self) -> None:
        """Forget the task, which has ended: no reference cycle is left for the garbage collector."""
        self._task = None

    def stream_changed(self) -> None:
        """Wake the task: its stream received data, sent some, or was lost."""
        if self._stream.lost and self._task is not None:
            self._task.cancel()
        elif self._reader is not None and not self._reader.done():
            if self._stream.needs_more:
                self._deliver(self._reader)
            else:
                self._reader.set_result(None)
        if self._writers:
            self.sent()

    def take_message(self, data: memoryview) -> bool:
        """Give one complete message, prefix included, to `on_message`. Return whether it was taken."""
        take, reader = self.on_message, self._reader
        if take is None or reader is None or reader.done() or not self._stream.needs_more:
            return False
        packed = data[messages.PREFIX.size :]
        if len(packed) > self.max_message_bytes or (data[0] and not headers.COMPRESSED[self._stream.request.encoding]):
            return False
        try:
            return take(messages.inflate(packed, self.max_message_bytes) if data[0] else bytes(packed))
        except messages.MessageError:
            return False  # `read` reports it
        except Exception as error:  # noqa: BLE001  # read() raises it: only this call fails
            self._stream.needs_more = False
            reader.set_exception(error)
            return True

    def sent(self) -> None:
        """Wake writers if all they wrote has been sent."""
        if self._stream.lost or not (self._stream.unsent or self._transport.connection.queue.buffer):
            for waiter in self._writers:
                if not waiter.done():
                    waiter.set_result(None)

    # ---- parts

    async def _serve(self, handler: Handler | None) -> None:
        request = self._stream.request
        try:
            if request.method != "POST" or not request.content_type.startswith("application/grpc"):
                status = 405 if request.method != "POST" else 415
                self._transport.connection.queue.refuse(self._stream, headers.http_status(status))
                self._transport.flush()
            elif handler is None:
                await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            elif request.encoding not in headers.COMPRESSED:
                text = f"grpc-encoding {request.encoding[:40]!r} is not supported; use gzip, deflate or identity"
                await self.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            else:
                await handler(None, self)
                self._end(grpc.StatusCode.OK, "")
        except CallAbortedError:
            return
        except asyncio.CancelledError:  # by `stream_changed`, or by the server's stop
            self._end(grpc.StatusCode.UNAVAILABLE, SHUTDOWN)
        except Exception as error:  # a defect in the handler costs one call
            log.exception("%s: the call failed", self.peer())
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}")

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        done = code is grpc.StatusCode.OK
        self._transport.connection.queue.end(self._stream, headers.trailers(code, details), at_once=not done)
        self._transport.flush()

    def _request_more(self) -> None:
        self._stream.needs_more = True
        if self._stream.received:
            self._refill_window()

    def _deliver(self, reader: asyncio.Future[Any]) -> None:
        """Give what arrived to `on_message`; the first message that it leaves goes to the reader."""
        take, taken = self.on_message, 0
        self._stream.needs_more = False
        try:
            while not reader.done() and (message := self._next()) is not None:
                if take is None or message is grpc.aio.EOF or taken >= MESSAGES_PER_TURN or not take(message):
                    reader.set_result(message)
                taken += 1
        except Exception as error:  # noqa: BLE001  # read() raises it: only this call fails
            reader.set_exception(error)
        if not reader.done():
            self._request_more()

    def _next(self) -> Any:
        stream = self._stream
        found = messages.cut(stream.received, self.max_message_bytes)
        if found is None:
            if not stream.peer_ended:
                return None
            if stream.received:
                raise messages.MessageError(grpc.StatusCode.INTERNAL, "the stream ends within a message")
            return grpc.aio.EOF
        if stream.window_in < HALF:
            self._refill_window()
        compressed, message = found
        self.was_packed = False
        if not compressed:
            return message
        if not headers.COMPRESSED[stream.request.encoding]:
            raise messages.MessageError(grpc.StatusCode.INTERNAL, "a compressed message without grpc-encoding")
        if not self.inflates:
            self.was_packed = True
            return message
        return messages.inflate(message, self.max_message_bytes)

    def _refill_window(self) -> None:
        connection = self._transport.connection
        connection.refill_window(self._stream)
        if connection.queue.buffer:
            self._transport.flush()

    async def _wait_for_data(self) -> None:
        stream = self._stream
        while not (self._received_any or stream.window_in < WINDOW or stream.peer_ended or stream.closed):
            await self._wait()

    async def _wait(self) -> Any:
        """Wait until the stream changes. Return the message that `_deliver` left, if any."""
        self._in_turn = 0
        self._reader = asyncio.get_running_loop().create_future()
        try:
            return await self._reader
        finally:
            self._reader = None


Handler = Callable[[Any, Call], Awaitable[None]]

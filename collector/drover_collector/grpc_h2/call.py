"""A call as its service sees it: what it uses of `grpc.aio.ServicerContext`, with the same meaning."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from drover_collector.grpc_h2 import headers, messages
from drover_collector.grpc_h2.connection import HALF
from drover_collector.grpc_h2.frames import WINDOW
from drover_collector.grpc_h2.outgoing import Stream

if TYPE_CHECKING:
    from drover_collector.grpc_h2.link import Link

log = logging.getLogger(__name__)

MESSAGE_BYTES = 17 << 20  # a little over what agents send at most; a batch of 30 s of a 16-GPU node is below 1 MB
STOPPED = "the collector stops"
IN_A_ROW = 16  # messages that one call reads before others have their turn: a window has room for 13,000 empty ones
HEAR_S = 2.0  # a refusal waits so long for a first message


class CallEndedError(Exception):
    """There is nobody who could be told."""


class AbortError(Exception):
    """The call has been ended by `abort`."""


class Call:
    """One stream being served, in a task of its own. Used in the event loop.

    Attributes:
        at_once: is given a message that comes while the task waits in `read`, and says whether it has taken it; only
            what it leaves wakes the task, which costs as much as most messages do. Whoever sets it takes it away.
        most_bytes: of a message, from the next on.
    """

    __slots__ = ("_heard", "_in_a_row", "_link", "_reader", "_stream", "_writers", "at_once", "most_bytes", "task")

    def __init__(self, link: Link, stream: Stream) -> None:
        self._link, self._stream = link, stream
        self._heard, self._in_a_row = False, 0  # a message has been read; how many since it waited for one
        self._reader: asyncio.Future[Any] | None = None
        self.at_once: Callable[[bytes], bool] | None = None
        self.most_bytes = MESSAGE_BYTES
        self._writers: list[asyncio.Future[None]] = []
        self.task: asyncio.Task[None] | None = None

    # ---- for the service

    async def read(self) -> Any:
        """The next message, bytes; `grpc.aio.EOF` after the last.

        Raises:
            AbortError: it is none, or too long; the peer is told.
        """
        if self._in_a_row >= IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)
        try:
            message = self._next()
            if message is None:
                self._want()
                try:
                    message = await self._news()
                finally:
                    self._stream.wanted = False
        except messages.MessageError as error:
            await self.abort(error.code, str(error))
        self._heard = True
        self._in_a_row += 1
        return message

    def _want(self) -> None:
        self._stream.wanted = True
        if self._stream.buffer:
            self._credit()

    def _hand_over(self, reader: asyncio.Future[Any]) -> None:
        """What has come, to whoever takes it at once, else to who reads."""
        take, taken = self.at_once, 0
        self._stream.wanted = False
        try:
            while not reader.done() and (message := self._next()) is not None:
                if take is None or message is grpc.aio.EOF or taken >= IN_A_ROW or not take(message):
                    reader.set_result(message)
                taken += 1
        except Exception as error:  # noqa: BLE001  # raised by read(): it costs this call alone
            reader.set_exception(error)
        if not reader.done():
            self._want()

    def _next(self) -> Any:
        stream = self._stream
        found = messages.cut(stream.buffer, self.most_bytes)
        if found is None:
            if not stream.ended:
                return None
            if stream.buffer:
                raise messages.MessageError(grpc.StatusCode.INTERNAL, "the last message is not all there")
            return grpc.aio.EOF
        if stream.window_in < HALF:
            self._credit()
        compressed, message = found
        if not compressed:
            return message
        if not headers.COMPRESSED[stream.request.encoding]:
            raise messages.MessageError(grpc.StatusCode.INTERNAL, "a message is compressed, and nothing says how")
        return messages.inflate(message, self.most_bytes)

    def _credit(self) -> None:
        self._link.connection.credit(self._stream)
        if self._link.connection.outgoing:
            self._link.flush()

    def write_at_once(self, message: bytes) -> bool:
        """Say it, where nothing stands in its way; False: nothing was said, `write` will."""
        stream, connection = self._stream, self._link.connection
        data = messages.wrap(message)
        if stream.closed or connection.outgoing or not connection.lets_out(stream, len(data)):
            return False
        connection.write(stream, data)
        self._link.flush()
        return True

    async def write(self, message: bytes) -> None:
        """Returns when the peer's windows and the socket have taken it.

        Raises:
            CallEndedError: the peer has left, or the call has ended.
        """
        stream, link = self._stream, self._link
        if stream.closed:
            raise CallEndedError("the stream has ended")
        link.connection.write(stream, messages.wrap(message))
        link.flush()
        while not stream.gone and (stream.pending or link.connection.outgoing):
            waiter = asyncio.get_running_loop().create_future()
            self._writers.append(waiter)
            link.writing[self] = None
            try:
                await waiter
            finally:
                self._writers.remove(waiter)
                if not self._writers:
                    link.writing.pop(self, None)
        if stream.gone:
            raise CallEndedError("the peer has left")

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call, once its peer has said something.

        A client whose first message meets the end of its stream tells its user of an error of its own instead of this
        one (grpc.aio: `Internal error from Core`).

        Raises:
            AbortError: always.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_S):
                await self._something()
        self._end(code, details)
        raise AbortError(details)

    async def _something(self) -> None:
        stream = self._stream
        while not (self._heard or stream.window_in < WINDOW or stream.ended or stream.closed):
            await self._news()

    async def _news(self) -> Any:
        self._in_a_row = 0
        self._reader = asyncio.get_running_loop().create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def peer(self) -> str:
        return self._link.peer

    @property
    def held_bytes(self) -> int:
        """Of a message that is not there whole."""
        return len(self._stream.buffer)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """What gRPC gives; empty without TLS."""
        return self._link.auth_context()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._stream.request.metadata

    # ---- for the server

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        done = code is grpc.StatusCode.OK
        self._link.connection.end(self._stream, headers.end(code, details), at_once=not done)
        self._link.flush()

    def changed(self) -> None:
        """Something came for the stream, or left, or its connection is gone."""
        if self._stream.gone and self.task is not None:
            self.task.cancel()
        elif self._reader is not None and not self._reader.done():
            if self._stream.wanted:
                self._hand_over(self._reader)
            else:
                self._reader.set_result(None)
        if self._writers:
            self.drained()

    def whole(self, data: memoryview) -> bool:
        """One message has come, and nothing before it waits; whether it is taken at once. As `changed` would do it."""
        take, reader = self.at_once, self._reader
        if take is None or reader is None or reader.done() or not self._stream.wanted:
            return False
        packed = data[messages.PREFIX.size :]
        if len(packed) > self.most_bytes or (data[0] and not headers.COMPRESSED[self._stream.request.encoding]):
            return False
        try:
            return take(messages.inflate(packed, self.most_bytes) if data[0] else bytes(packed))
        except messages.MessageError:
            return False  # `read` tells
        except Exception as error:  # noqa: BLE001  # raised by read(): it costs this call alone
            self._stream.wanted = False
            reader.set_exception(error)
            return True

    def drained(self) -> None:
        """What was to be sent may have been."""
        if self._stream.gone or not (self._stream.pending or self._link.connection.outgoing):
            for waiter in self._writers:
                if not waiter.done():
                    waiter.set_result(None)

    async def serve(self, behaviour: Behaviour | None) -> None:
        """Answer it."""
        request = self._stream.request
        try:
            if request.method != "POST" or not request.content_type.startswith("application/grpc"):
                status = 405 if request.method != "POST" else 415
                self._link.connection.refuse(self._stream, headers.refuse(status))
                self._link.flush()
            elif behaviour is None:
                await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            elif request.encoding not in headers.COMPRESSED:
                await self.abort(grpc.StatusCode.UNIMPLEMENTED, f"messages in {request.encoding[:40]!r} cannot be read")
            else:
                await behaviour(None, self)
                self._end(grpc.StatusCode.OK, "")
        except AbortError:
            return  # told
        except asyncio.CancelledError:  # by `changed`, or by the server's stop
            self._end(grpc.StatusCode.UNAVAILABLE, STOPPED)
        except Exception as error:  # a defect of ours costs one call
            log.exception("a call of %s failed", self.peer())
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}")


Behaviour = Callable[[Any, Call], Awaitable[None]]

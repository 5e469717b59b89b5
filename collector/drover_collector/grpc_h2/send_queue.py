"""What a server sends on one HTTP/2 connection, within the windows of its peer (RFC 9113, section 5.2)."""

from __future__ import annotations

from typing import Any

from drover_collector.grpc_h2 import frames, headers
from drover_collector.grpc_h2.frames import Code

HELD_BYTES = 65_536  # of responses in the buffer of a connection; the rest waits in its stream


class ProtocolError(Exception):
    """The connection cannot go on: it ends with a GOAWAY of `code`."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Stream:
    """One call.

    Attributes:
        received: bytes that no one has read. needs_more: a reader waits for a message that is not complete.
        peer_ended: the peer has sent END_STREAM. lost: the peer has reset the stream, or its connection is lost.
        closed: nothing can be sent any longer. unsent: bytes that wait for a window to open.
        trailers: sent after `unsent`. served_by: the call that reads the stream; None until it is served.
    """

    __slots__ = (
        "closed", "lost", "needs_more", "number", "peer_ended", "received", "request", "responded", "served_by",
        "trailers", "unsent", "window_in", "window_out",
    )  # fmt: skip

    def __init__(self, number: int, request: headers.Request, window_out: int) -> None:
        self.number, self.request = number, request
        self.received, self.unsent = bytearray(), bytearray()
        self.window_in, self.window_out = frames.WINDOW, window_out
        self.needs_more = self.peer_ended = self.lost = self.closed = self.responded = False
        self.trailers: bytes | None = None
        self.served_by: Any = None


class SendQueue:
    """The bytes that go to the socket, and the streams that wait for a window.

    Attributes:
        buffer: bytes for the socket. The sender deletes what it has sent, and calls `resume` when it is empty.
        initial_window: of the peer's streams that open next.
    """

    __slots__ = ("_blocked", "_streams", "_window", "buffer", "initial_window")

    def __init__(self, streams: dict[int, Stream], first: bytes) -> None:
        """
        Args:
            streams: the open streams of the connection; one whose response is complete is removed.
            first: sent before all else.
        """
        self._streams = streams
        self.buffer = bytearray(first)
        self._window = self.initial_window = frames.WINDOW
        self._blocked: dict[Stream, None] = {}

    def fits(self, stream: Stream, size: int) -> bool:
        """Return whether so many bytes would be sent without waiting for the peer."""
        return not stream.unsent and size <= min(stream.window_out, self._window, HELD_BYTES)

    def write(self, stream: Stream, data: bytes) -> None:
        """Send data as soon as the windows allow. Ignored on a stream that is closed."""
        if stream.closed or stream.trailers is not None:
            return
        self._begin_response(stream)
        stream.unsent += data
        self._send(stream)

    def end(self, stream: Stream, trailers: bytes, *, at_once: bool) -> None:
        """Close a stream with these trailers, after what is unsent; at_once: instead of it."""
        if stream.closed or stream.trailers is not None:
            return
        self._begin_response(stream)
        if at_once:
            stream.unsent.clear()
        stream.trailers = trailers
        self._send(stream)

    def refuse(self, stream: Stream, block: bytes) -> None:
        """Close a stream with a response that is nothing but these headers."""
        stream.responded = True
        self.end(stream, block, at_once=True)

    def resume(self) -> None:
        """Send what waited for room: the buffer is empty."""
        for stream in list(self._blocked):
            self._send(stream)

    def widen(self, stream: Stream, more: int) -> None:
        """Open a stream's window further.

        Raises:
            ProtocolError: it becomes larger than HTTP/2 allows.
        """
        stream.window_out += more
        if stream.window_out > frames.MAX_WINDOW:
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "the window of a stream exceeds 2^31-1")
        if stream.unsent:
            self._send(stream)

    def widen_connection(self, more: int) -> None:
        """Open the connection's window further.

        Raises:
            ProtocolError: it becomes larger than HTTP/2 allows.
        """
        self._window += more
        if self._window > frames.MAX_WINDOW:
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "the window of the connection exceeds 2^31-1")
        self.resume()

    def drop(self, stream: Stream) -> None:
        """Forget what a lost stream would still send."""
        stream.lost = stream.closed = stream.peer_ended = True
        stream.received.clear()
        stream.unsent.clear()
        self._blocked.pop(stream, None)

    def _begin_response(self, stream: Stream) -> None:
        if not stream.responded:
            stream.responded = True
            self.buffer += frames.headers(stream.number, headers.RESPONSE, last=False)

    def _send(self, stream: Stream) -> None:
        unsent, buffer = stream.unsent, self.buffer
        while unsent:
            size = min(len(unsent), stream.window_out, self._window, frames.FRAME_BYTES)
            if size <= 0 or len(buffer) >= HELD_BYTES:
                self._blocked[stream] = None
                return
            buffer += frames.head(frames.DATA, 0, stream.number, size)
            buffer += unsent[:size]
            del unsent[:size]
            stream.window_out -= size
            self._window -= size
        self._blocked.pop(stream, None)
        if stream.trailers is not None and not stream.closed:
            buffer += frames.headers(stream.number, stream.trailers, last=True)
            if not stream.peer_ended:  # the peer need not send the rest
                buffer += frames.reset(stream.number, Code.NO_ERROR)
            stream.closed = True
            stream.received.clear()
            del self._streams[stream.number]

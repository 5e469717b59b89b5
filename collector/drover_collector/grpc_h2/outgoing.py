"""What a server says on an HTTP/2 connection: answers within the peer's windows (RFC 9113, section 5.2)."""

from __future__ import annotations

from typing import Any

from drover_collector.grpc_h2 import frames, headers
from drover_collector.grpc_h2.frames import Code

HELD_BYTES = 65_536  # of answers that wait for the socket; more stay with their streams


class BrokenError(Exception):
    """The connection cannot go on."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Stream:
    """One call.

    Attributes:
        buffer: what came and nobody has taken. wanted: somebody waits for more of it than there is.
        ended: the peer has said its last. gone: it has reset the stream, or its connection is lost.
        closed: nothing can be said any more. pending: what its window, or the connection's, does not let out yet.
        trailers: come behind what is pending. owner: whoever serves it.
    """

    __slots__ = (
        "begun", "buffer", "closed", "ended", "gone", "number", "owner", "pending", "request", "trailers", "wanted",
        "window_in", "window_out",
    )  # fmt: skip

    def __init__(self, number: int, request: headers.Request, window_out: int) -> None:
        self.number, self.request = number, request
        self.buffer, self.pending = bytearray(), bytearray()
        self.window_in, self.window_out = frames.WINDOW, window_out
        self.wanted = self.ended = self.gone = self.closed = self.begun = False
        self.trailers: bytes | None = None
        self.owner: Any = None


class Outgoing:
    """One side of a `Connection`.

    Attributes:
        outgoing: bytes for the socket; who sends takes them off its front, and calls `resume` when it is empty.
        streams: those that have not ended, by number.
    """

    __slots__ = ("_initial_out", "_waiting_out", "_window_out", "outgoing", "streams")

    def __init__(self, first: bytes) -> None:
        self.outgoing = bytearray(first)
        self.streams: dict[int, Stream] = {}
        self._window_out = self._initial_out = frames.WINDOW
        self._waiting_out: dict[Stream, None] = {}

    def lets_out(self, stream: Stream, size: int) -> bool:
        """Whether so many bytes would be sent without waiting for the peer."""
        return not stream.pending and size <= min(stream.window_out, self._window_out, HELD_BYTES)

    def write(self, stream: Stream, data: bytes) -> None:
        """Say it on this stream, as soon as the windows allow."""
        if stream.closed or stream.trailers is not None:
            return
        self._begin_answer(stream)
        stream.pending += data
        self._let_out(stream)

    def end(self, stream: Stream, block: bytes, *, at_once: bool) -> None:
        """Close it with these headers, behind what is pending; at once: instead of that."""
        if stream.closed or stream.trailers is not None:
            return
        self._begin_answer(stream)
        if at_once:
            stream.pending.clear()
        stream.trailers = block
        self._let_out(stream)

    def refuse(self, stream: Stream, block: bytes) -> None:
        """Close it with an answer of nothing but headers."""
        stream.begun = True
        self.end(stream, block, at_once=True)

    def resume(self) -> None:
        """All of `outgoing` has been sent: there is room for what had to wait."""
        for stream in list(self._waiting_out):
            self._let_out(stream)

    def _begin_answer(self, stream: Stream) -> None:
        if not stream.begun:
            stream.begun = True
            self.outgoing += frames.headers(stream.number, headers.BEGIN, last=False)

    def _let_out(self, stream: Stream) -> None:
        pending, out = stream.pending, self.outgoing
        while pending:
            size = min(len(pending), stream.window_out, self._window_out, frames.FRAME_BYTES)
            if size <= 0 or len(out) >= HELD_BYTES:
                self._waiting_out[stream] = None
                return
            out += frames.head(frames.DATA, 0, stream.number, size)
            out += pending[:size]
            del pending[:size]
            stream.window_out -= size
            self._window_out -= size
        self._waiting_out.pop(stream, None)
        if stream.trailers is not None and not stream.closed:
            out += frames.headers(stream.number, stream.trailers, last=True)
            if not stream.ended:  # its peer need not go on
                out += frames.reset(stream.number, Code.NO_ERROR)
            stream.closed = True
            stream.buffer.clear()
            del self.streams[stream.number]

    def _widen(self, stream: Stream, more: int) -> None:
        stream.window_out += more
        if stream.window_out > frames.MAX_WINDOW:
            raise BrokenError(Code.FLOW_CONTROL_ERROR, "a window that is too large")
        if stream.pending:
            self._let_out(stream)

    def _widen_all(self, more: int) -> None:
        self._window_out += more
        if self._window_out > frames.MAX_WINDOW:
            raise BrokenError(Code.FLOW_CONTROL_ERROR, "a window that is too large")
        self.resume()

    def _drop(self, stream: Stream) -> None:
        """Nobody listens any more."""
        stream.gone = stream.closed = stream.ended = True
        stream.buffer.clear()
        stream.pending.clear()
        self._waiting_out.pop(stream, None)

"""One HTTP/2 connection as a server sees it (RFC 9113), without sockets: bytes in, streams and bytes out.

What it keeps is bounded whatever comes: the beginning of one frame, one header list, a window of each stream beside the
message that somebody waits for, and answers. Frames that ask for work and bring nothing (pings, settings, resets, new
streams, crumbs of data) are counted against `budget`, and against that of its certificate (`share`); a connection that
uses one up is ended with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

import struct

from drover_collector.grpc_h2 import frames, headers, messages
from drover_collector.grpc_h2.frames import Code
from drover_collector.grpc_h2.outgoing import BrokenError, Outgoing, Stream

STREAMS = 100  # at once on a connection; an agent has one
BUDGET = 10_000  # of a connection until `relax`
FREE = 200  # of these a connection may use where others of its certificate have used up all: one stream takes some 30
OPENING, CONTROL, TRIFLE = 20, 5, 1  # what things cost of it
SMALL = 64  # bytes of data in a frame that counts as a trifle
HALF = frames.WINDOW // 2  # of a window is used up before it is filled again
WHOLE = struct.Struct(">HBBBLBL")  # `frames.HEAD` and, behind it, `messages.PREFIX`
OURS = {
    frames.HEADER_TABLE_SIZE: 0,
    frames.MAX_CONCURRENT_STREAMS: STREAMS,
    frames.MAX_HEADER_LIST_SIZE: headers.LIST_BYTES,
}


class Share:
    """What all connections of one certificate may ask for until `relax`, however many there are.

    Attributes:
        crowded: there were too many of them, which was logged.
    """

    __slots__ = ("crowded", "left")

    def __init__(self) -> None:
        self.left, self.crowded = BUDGET, False

    def relax(self) -> None:
        self.left = BUDGET


class Connection(Outgoing):
    """
    Attributes:
        broken: why the connection ends as soon as `outgoing` is sent; "": it goes on.
        busy: calls that are being served, also those whose peer has reset them; whoever serves them counts down.
        leaving: takes no more streams. begun: there has been one.
        share: of its certificate; None where there is none.
    """

    __slots__ = (
        "_first", "_fragments", "_greeted", "_last", "_opening", "_reader", "_rest", "_window_in", "broken", "budget",
        "busy", "leaving", "share",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(frames.settings(OURS))
        self.broken, self.leaving, self.busy, self.budget = "", False, 0, BUDGET
        self.share: Share | None = None
        self._rest = b""  # of a frame that is not there whole
        self._greeted = False  # the preface has come
        self._first = True  # the next frame is the first, which must be SETTINGS
        self._reader = headers.Reader()
        self._fragments: bytearray | None = None  # of a header block that goes on
        self._opening = (0, 0)  # its stream and flags
        self._last = 0  # the newest stream of the peer
        self._window_in = frames.WINDOW

    @property
    def begun(self) -> bool:
        return self._last > 0

    def receive(self, data: bytes) -> list[Stream]:
        """Take in what the peer sent; returns the streams that have changed, new ones among them."""
        changed: list[Stream] = []
        if self.broken:
            return changed
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            at, end = 0 if self._greeted else self._greet(data), len(data)
            while end - at >= frames.HEAD_BYTES and self._greeted:
                high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
                size = high << 8 | low
                if size > frames.FRAME_BYTES:
                    raise BrokenError(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                begin = at + frames.HEAD_BYTES
                if end - begin < size:
                    break
                at = begin + size
                plain = kind == frames.DATA and self._fragments is None and not self._first
                take = self._data if plain else self._frame
                stream = take(kind, flags, number & frames.MAX_WINDOW, data[begin:at])
                if stream is not None and stream not in changed:
                    changed.append(stream)
            if at < end:
                self._rest = data[at:]
        except BrokenError as error:
            self.broken = str(error)
            self.outgoing += frames.goaway(self._last, error.code, self.broken)
            self._fragments = None
        return changed

    def whole(self, data: memoryview) -> Stream | None:
        """The stream of which `data` is one frame that is one message, as most of what comes is, where nothing else
        is to be done for it: then it is counted, but not held, and left to the caller. None: `receive` it."""
        took = len(data) - frames.HEAD_BYTES
        if not SMALL <= took <= frames.FRAME_BYTES or self._rest or self._first or self.broken:
            return None
        high, low, kind, flags, number, flag, size = WHOLE.unpack_from(data)
        if kind != frames.DATA or flags or high << 8 | low != took or flag > 1 or size + messages.PREFIX.size != took:
            return None
        stream = self.streams.get(number)
        if stream is None or stream.ended or stream.buffer or self._fragments is not None:
            return None
        if stream.window_in - took < HALF or self._window_in - took < HALF:
            return None
        stream.window_in -= took
        self._window_in -= took
        return stream

    def credit(self, stream: Stream) -> None:
        """Let the peer send more where what waits leaves room, or somebody waits for the rest of a message."""
        room = frames.WINDOW - stream.window_in - (0 if stream.wanted else len(stream.buffer))
        if room > HALF and not (stream.ended or stream.closed):
            stream.window_in += room
            self.outgoing += frames.window_update(stream.number, room)

    def ping(self) -> None:
        self.outgoing += frames.ping(b"drover..", answer=False)

    def leave(self) -> None:
        """Take no more streams; those that are open may end."""
        if not (self.leaving or self.broken):
            self.leaving = True
            self.outgoing += frames.goaway(self._last, Code.NO_ERROR, "")

    def relax(self) -> None:
        """Some time has passed."""
        self.budget = BUDGET

    def lose(self) -> list[Stream]:
        """The connection is gone; returns the streams it had."""
        self.broken = self.broken or "lost"
        lost, self.streams = list(self.streams.values()), {}
        for stream in lost:
            self._drop(stream)
        self._rest, self._fragments = b"", None
        self.outgoing.clear()
        return lost

    # ---- frames

    def _greet(self, data: bytes) -> int:
        if not data.startswith(frames.PREFACE[: len(data)]):
            raise BrokenError(Code.PROTOCOL_ERROR, "no HTTP/2")
        self._greeted = len(data) >= len(frames.PREFACE)
        return len(frames.PREFACE) if self._greeted else 0

    def _frame(self, kind: int, flags: int, number: int, body: bytes) -> Stream | None:
        if self._first and (kind != frames.SETTINGS or flags & frames.ACK):
            raise BrokenError(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._first = False
        if (self._fragments is not None) != (kind == frames.CONTINUATION):
            raise BrokenError(Code.PROTOCOL_ERROR, "a header block that is not all there, or CONTINUATION without one")
        match kind:
            case frames.HEADERS:
                return self._headers(number, flags, body)
            case frames.CONTINUATION:
                return self._continued(number, flags, body)
            case frames.RST_STREAM:
                return self._reset(number, body)
            case frames.SETTINGS:
                self._settings(number, flags, body)
            case frames.PING:
                self._ping(number, flags, body)
            case frames.WINDOW_UPDATE:
                return self._window(number, body)
            case frames.PRIORITY:
                self._priority(number, body)
            case frames.GOAWAY if number:
                raise BrokenError(Code.PROTOCOL_ERROR, "GOAWAY of a stream")
            case frames.PUSH_PROMISE:
                raise BrokenError(Code.PROTOCOL_ERROR, "a client cannot push")
            case _:
                self._spend(TRIFLE)  # its GOAWAY, and what is not known
        return None

    def _data(self, _: int, flags: int, number: int, body: bytes) -> Stream | None:
        size = len(body)
        self._window_in -= size
        if self._window_in < HALF:  # given back at once: what waits is bounded by the streams' windows
            if self._window_in < 0:
                raise BrokenError(Code.FLOW_CONTROL_ERROR, "more data than the connection's window")
            self.outgoing += frames.window_update(0, frames.WINDOW - self._window_in)
            self._window_in = frames.WINDOW
        if size < SMALL:
            self._spend(TRIFLE)
        stream = self.streams.get(number)
        if stream is None:
            self._known(number)
            self._spend(TRIFLE)
            return None  # what was under way when the stream ended
        if stream.ended:
            raise BrokenError(Code.STREAM_CLOSED, "data behind the end of a stream")
        stream.window_in -= size
        stream.buffer += _unpadded(body) if flags & frames.PADDED else body
        if flags & frames.END_STREAM:
            stream.ended = True
        if stream.window_in < HALF:
            if stream.window_in < 0:
                raise BrokenError(Code.FLOW_CONTROL_ERROR, "more data than a stream's window")
            self.credit(stream)
        return stream

    def _headers(self, number: int, flags: int, body: bytes) -> Stream | None:
        self._spend(OPENING)
        if flags & frames.PADDED:
            body = _unpadded(body)
        if flags & frames.WITH_PRIORITY:
            if len(body) < 5:
                raise BrokenError(Code.FRAME_SIZE_ERROR, "HEADERS without its priority")
            self._check_priority(number, body)
            body = body[5:]
        if number % 2 == 0:
            raise BrokenError(Code.PROTOCOL_ERROR, f"a stream with number {number}")
        self._opening = number, flags
        if flags & frames.END_HEADERS:
            return self._begin(body)
        self._fragments = bytearray(body)
        return None

    def _continued(self, number: int, flags: int, body: bytes) -> Stream | None:
        self._spend(CONTROL)
        if self._fragments is None or number != self._opening[0]:
            raise BrokenError(Code.PROTOCOL_ERROR, "CONTINUATION of another stream")
        self._fragments += body
        if len(self._fragments) > headers.LIST_BYTES:
            raise BrokenError(Code.ENHANCE_YOUR_CALM, "a header list that is too long")
        if not flags & frames.END_HEADERS:
            return None
        block, self._fragments = bytes(self._fragments), None
        return self._begin(block)

    def _begin(self, block: bytes) -> Stream | None:
        number, flags = self._opening
        try:
            request = self._reader.read(block)  # also of one that is refused: those after it build on it
        except headers.HeadersError as error:
            raise BrokenError(Code.COMPRESSION_ERROR, str(error)) from None
        last = bool(flags & frames.END_STREAM)
        if number <= self._last:
            stream = self.streams.get(number)
            if stream is not None:  # trailers, which gRPC's clients do not send
                if stream.ended:
                    raise BrokenError(Code.STREAM_CLOSED, "HEADERS behind the end of a stream")
                if not last:
                    raise BrokenError(Code.PROTOCOL_ERROR, "HEADERS in the middle of a stream")
                stream.ended = True
            return stream
        self._last = number
        if request.malformed:
            self.outgoing += frames.reset(number, Code.PROTOCOL_ERROR)
            return None
        if self.leaving or self.busy >= STREAMS:
            self.outgoing += frames.reset(number, Code.REFUSED_STREAM)
            return None
        stream = self.streams[number] = Stream(number, request, self._initial_out)
        stream.ended = last
        self.busy += 1
        return stream

    def _reset(self, number: int, body: bytes) -> Stream | None:
        _sized(body, 4)
        self._spend(CONTROL)
        self._known(number)
        stream = self.streams.pop(number, None)
        if stream is not None:
            self._drop(stream)
            if stream.owner is None:  # nobody will serve it
                self.busy -= 1
        return stream

    def _settings(self, number: int, flags: int, body: bytes) -> None:
        self._spend(CONTROL + len(body) // 6 * TRIFLE)
        if len(body) % 6 or (flags & frames.ACK and body):
            raise BrokenError(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
        if number:
            raise BrokenError(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            self._reader.settled = True
            return
        window = self._initial_out
        for name, value in struct.iter_unpack(">HL", body):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise BrokenError(Code.FLOW_CONTROL_ERROR, "a window that is too large")
                window = value
            elif name == frames.ENABLE_PUSH and value > 1:
                raise BrokenError(Code.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
            elif name == frames.MAX_FRAME_SIZE and not frames.FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise BrokenError(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
        if window != self._initial_out:  # the last one counts: each has to look at all streams
            self._spend(len(self.streams) * TRIFLE)
            more, self._initial_out = window - self._initial_out, window
            for stream in list(self.streams.values()):
                self._widen(stream, more)
        self.outgoing += frames.settings_taken()

    def _priority(self, number: int, body: bytes) -> None:
        _sized(body, 5)
        self._spend(TRIFLE)
        if not number:
            raise BrokenError(Code.PROTOCOL_ERROR, "PRIORITY of no stream")
        self._check_priority(number, body)

    def _check_priority(self, number: int, body: bytes) -> None:
        if int.from_bytes(body[:4]) & frames.MAX_WINDOW == number:
            raise BrokenError(Code.PROTOCOL_ERROR, "a stream that depends on itself")

    def _ping(self, number: int, flags: int, body: bytes) -> None:
        _sized(body, 8)
        if number:
            raise BrokenError(Code.PROTOCOL_ERROR, "PING of a stream")
        self._spend(CONTROL)
        if not flags & frames.ACK:
            self.outgoing += frames.ping(body, answer=True)

    def _window(self, number: int, body: bytes) -> Stream | None:
        _sized(body, 4)
        self._spend(TRIFLE)
        more = int.from_bytes(body) & frames.MAX_WINDOW
        if not more:
            raise BrokenError(Code.PROTOCOL_ERROR, "a window that is not larger")
        if number == 0:
            self._widen_all(more)
            return None
        self._known(number)
        stream = self.streams.get(number)
        if stream is not None:
            self._widen(stream, more)
        return stream

    def _known(self, number: int) -> None:
        if number > self._last or number % 2 == 0:
            raise BrokenError(Code.PROTOCOL_ERROR, f"a frame of stream {number}, which has not begun")

    def _spend(self, cost: int) -> None:
        self.budget -= cost
        share = self.share
        if share is not None:
            share.left -= cost
        if self.budget < 0 or (share is not None and share.left < 0 and self.budget < BUDGET - FREE):
            raise BrokenError(Code.ENHANCE_YOUR_CALM, "too many frames that say nothing")


def _unpadded(body: bytes) -> bytes:
    if not body or body[0] >= len(body):
        raise BrokenError(Code.PROTOCOL_ERROR, "a frame that is all padding")
    return body[1 : len(body) - body[0]]


def _sized(body: bytes, size: int) -> None:
    if len(body) != size:
        raise BrokenError(Code.FRAME_SIZE_ERROR, f"a frame of {len(body)} bytes, where {size} are right")

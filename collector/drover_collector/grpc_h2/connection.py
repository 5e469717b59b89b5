"""One HTTP/2 connection as a server sees it (RFC 9113), without sockets: bytes in, streams and bytes out.

Its memory is bounded whatever the peer sends: part of one frame, one header list, one window for each stream plus the
message that a reader waits for, and responses. Frames that cost work and carry nothing (pings, settings, resets, new
streams, tiny data) are paid from a budget of the connection and one of its certificate; a connection that exceeds one
ends with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

import struct

from drover_collector.grpc_h2 import frames, headers, messages
from drover_collector.grpc_h2.frames import Code
from drover_collector.grpc_h2.send_queue import ProtocolError, SendQueue, Stream

STREAMS = 100  # open on one connection
BUDGET = 10_000  # of a connection, until `refill_budget`
FREE = 200  # a connection may use so much although its certificate's budget is spent; one stream costs some 30
OPENING, CONTROL, TRIFLE = 20, 5, 1  # costs
SMALL = 64  # bytes; a DATA frame with less costs a TRIFLE
HALF = frames.WINDOW // 2  # a window is refilled once this much of it is used
SINGLE_MESSAGE = struct.Struct(">HBBBLBL")  # `frames.HEAD`, then `messages.PREFIX`
OUR_SETTINGS = {
    frames.HEADER_TABLE_SIZE: 0,
    frames.MAX_CONCURRENT_STREAMS: STREAMS,
    frames.MAX_HEADER_LIST_SIZE: headers.LIST_BYTES,
}


class CertificateBudget:
    """The budget that all connections with one certificate share until `refill`.

    Attributes:
        crowded: the certificate had too many connections, which was logged.
    """

    __slots__ = ("crowded", "left")

    def __init__(self) -> None:
        self.left, self.crowded = BUDGET, False

    def refill(self) -> None:
        self.left = BUDGET


class Connection:
    """Reads what the peer sends; `queue` holds what goes back.

    Attributes:
        streams: open streams by number.
        error: why the connection ends as soon as the queue is sent; "" while it goes on.
        active_calls: calls being served, reset ones included; the server that serves them counts down.
        draining: no new streams are accepted.
        certificate_budget: None without a certificate.
    """

    __slots__ = (
        "_first", "_fragments", "_last", "_opening", "_partial", "_preface_read", "_reader", "_window_in",
        "active_calls", "budget", "certificate_budget", "draining", "error", "queue", "streams",
    )  # fmt: skip

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.queue = SendQueue(self.streams, frames.settings(OUR_SETTINGS))
        self.error, self.draining, self.active_calls, self.budget = "", False, 0, BUDGET
        self.certificate_budget: CertificateBudget | None = None
        self._partial = b""  # the beginning of a frame
        self._preface_read = False
        self._first = True  # the next frame is the first, which must be SETTINGS
        self._reader = headers.HeaderReader()
        self._fragments: bytearray | None = None  # of a header block that is not complete
        self._opening = (0, 0)  # its stream and flags
        self._last = 0  # the highest stream of the peer
        self._window_in = frames.WINDOW

    @property
    def had_streams(self) -> bool:
        return self._last > 0

    def receive(self, data: bytes) -> list[Stream]:
        """Read what the peer sent. Return the streams that changed, new ones included."""
        changed: list[Stream] = []
        if self.error:
            return changed
        if self._partial:
            data, self._partial = self._partial + data, b""
        try:
            at, end = 0 if self._preface_read else self._read_preface(data), len(data)
            while end - at >= frames.HEAD_BYTES and self._preface_read:
                high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
                size = high << 8 | low
                if size > frames.FRAME_BYTES:
                    raise ProtocolError(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes; {frames.FRAME_BYTES} allowed")
                begin = at + frames.HEAD_BYTES
                if end - begin < size:
                    break
                at = begin + size
                plain = kind == frames.DATA and self._fragments is None and not self._first
                read = self._data if plain else self._frame
                stream = read(kind, flags, number & frames.MAX_WINDOW, data[begin:at])
                if stream is not None and stream not in changed:
                    changed.append(stream)
            if at < end:
                self._partial = data[at:]
        except ProtocolError as error:
            self.error = str(error)
            self.queue.buffer += frames.goaway(self._last, error.code, self.error)
            self._fragments = None
        return changed

    def accept_single_message(self, data: memoryview) -> Stream | None:
        """Account for `data` if it is one frame that holds one message, as most reads are; None: call `receive`.

        The message is not kept: the caller delivers it to the returned stream. Also None where anything else is to be
        done, such as refilling a window.
        """
        body_bytes = len(data) - frames.HEAD_BYTES
        if not SMALL <= body_bytes <= frames.FRAME_BYTES or self._partial or self._first or self.error:
            return None
        high, low, kind, flags, number, flag, size = SINGLE_MESSAGE.unpack_from(data)
        if kind != frames.DATA or flags or high << 8 | low != body_bytes:
            return None
        if flag > 1 or size + messages.PREFIX.size != body_bytes:
            return None
        stream = self.streams.get(number)
        if stream is None or stream.peer_ended or stream.received or self._fragments is not None:
            return None
        if stream.window_in - body_bytes < HALF or self._window_in - body_bytes < HALF:
            return None
        stream.window_in -= body_bytes
        self._window_in -= body_bytes
        return stream

    def refill_window(self, stream: Stream) -> None:
        """Let the peer send more if unread bytes leave room, or a reader waits for the rest of a message."""
        room = frames.WINDOW - stream.window_in - (0 if stream.needs_more else len(stream.received))
        if room > HALF and not (stream.peer_ended or stream.closed):
            stream.window_in += room
            self.queue.buffer += frames.window_update(stream.number, room)

    def ping(self) -> None:
        self.queue.buffer += frames.ping(b"drover..", answer=False)

    def drain(self) -> None:
        """Accept no new streams; open ones may end."""
        if not (self.draining or self.error):
            self.draining = True
            self.queue.buffer += frames.goaway(self._last, Code.NO_ERROR, "")

    def refill_budget(self) -> None:
        self.budget = BUDGET

    def abandon(self) -> list[Stream]:
        """Drop everything: the connection is lost. Return the streams it had."""
        self.error = self.error or "lost"
        lost = list(self.streams.values())
        self.streams.clear()
        for stream in lost:
            self.queue.drop(stream)
        self._partial, self._fragments = b"", None
        self.queue.buffer.clear()
        return lost

    # ---- frames

    def _read_preface(self, data: bytes) -> int:
        if not data.startswith(frames.PREFACE[: len(data)]):
            raise ProtocolError(Code.PROTOCOL_ERROR, "not HTTP/2")
        self._preface_read = len(data) >= len(frames.PREFACE)
        return len(frames.PREFACE) if self._preface_read else 0

    def _frame(self, kind: int, flags: int, number: int, body: bytes) -> Stream | None:
        if self._first and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ProtocolError(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._first = False
        if (self._fragments is not None) != (kind == frames.CONTINUATION):
            raise ProtocolError(Code.PROTOCOL_ERROR, "an incomplete header block, or CONTINUATION without HEADERS")
        match kind:
            case frames.HEADERS:
                return self._headers(number, flags, body)
            case frames.CONTINUATION:
                return self._continuation(number, flags, body)
            case frames.RST_STREAM:
                return self._reset(number, body)
            case frames.SETTINGS:
                self._settings(number, flags, body)
            case frames.PING:
                self._ping(number, flags, body)
            case frames.WINDOW_UPDATE:
                return self._window_update(number, body)
            case frames.PRIORITY:
                self._priority(number, body)
            case frames.GOAWAY if number:
                raise ProtocolError(Code.PROTOCOL_ERROR, "GOAWAY on a stream")
            case frames.PUSH_PROMISE:
                raise ProtocolError(Code.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            case _:
                self._spend(TRIFLE)  # GOAWAY, and unknown types
        return None

    def _data(self, _: int, flags: int, number: int, body: bytes) -> Stream | None:
        size = len(body)
        self._window_in -= size
        if self._window_in < HALF:  # refilled whatever is read: the streams' windows bound what is kept
            if self._window_in < 0:
                raise ProtocolError(Code.FLOW_CONTROL_ERROR, "DATA exceeds the window of the connection")
            self.queue.buffer += frames.window_update(0, frames.WINDOW - self._window_in)
            self._window_in = frames.WINDOW
        if size < SMALL:
            self._spend(TRIFLE)
        stream = self.streams.get(number)
        if stream is None:
            self._check_opened(number)
            self._spend(TRIFLE)
            return None  # was under way when the stream ended
        if stream.peer_ended:
            raise ProtocolError(Code.STREAM_CLOSED, "DATA after the end of a stream")
        stream.window_in -= size
        stream.received += _unpadded(body) if flags & frames.PADDED else body
        if flags & frames.END_STREAM:
            stream.peer_ended = True
        if stream.window_in < HALF:
            if stream.window_in < 0:
                raise ProtocolError(Code.FLOW_CONTROL_ERROR, "DATA exceeds the window of its stream")
            self.refill_window(stream)
        return stream

    def _headers(self, number: int, flags: int, body: bytes) -> Stream | None:
        self._spend(OPENING)
        if flags & frames.PADDED:
            body = _unpadded(body)
        if flags & frames.WITH_PRIORITY:
            if len(body) < 5:
                raise ProtocolError(Code.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
            self._check_priority(number, body)
            body = body[5:]
        if number % 2 == 0:
            raise ProtocolError(Code.PROTOCOL_ERROR, f"HEADERS on stream {number}; clients use odd numbers")
        self._opening = number, flags
        if flags & frames.END_HEADERS:
            return self._open(body)
        self._fragments = bytearray(body)
        return None

    def _continuation(self, number: int, flags: int, body: bytes) -> Stream | None:
        self._spend(CONTROL)
        if self._fragments is None or number != self._opening[0]:
            raise ProtocolError(Code.PROTOCOL_ERROR, "CONTINUATION on another stream")
        self._fragments += body
        if len(self._fragments) > headers.LIST_BYTES:
            raise ProtocolError(Code.ENHANCE_YOUR_CALM, f"a header block of more than {headers.LIST_BYTES} bytes")
        if not flags & frames.END_HEADERS:
            return None
        block, self._fragments = bytes(self._fragments), None
        return self._open(block)

    def _open(self, block: bytes) -> Stream | None:
        number, flags = self._opening
        try:
            request = self._reader.read(block)  # also of a stream that is refused: later blocks build on it
        except headers.HeadersError as error:
            raise ProtocolError(Code.COMPRESSION_ERROR, str(error)) from None
        last = bool(flags & frames.END_STREAM)
        if number <= self._last:
            stream = self.streams.get(number)
            if stream is not None:  # trailers, which gRPC clients do not send
                if stream.peer_ended:
                    raise ProtocolError(Code.STREAM_CLOSED, "HEADERS after the end of a stream")
                if not last:
                    raise ProtocolError(Code.PROTOCOL_ERROR, "HEADERS in the middle of a stream")
                stream.peer_ended = True
            return stream
        self._last = number
        if request.malformed:
            self.queue.buffer += frames.reset(number, Code.PROTOCOL_ERROR)
            return None
        if self.draining or self.active_calls >= STREAMS:
            self.queue.buffer += frames.reset(number, Code.REFUSED_STREAM)
            return None
        stream = self.streams[number] = Stream(number, request, self.queue.initial_window)
        stream.peer_ended = last
        self.active_calls += 1
        return stream

    def _reset(self, number: int, body: bytes) -> Stream | None:
        _check_size(body, 4)
        self._spend(CONTROL)
        self._check_opened(number)
        stream = self.streams.pop(number, None)
        if stream is not None:
            self.queue.drop(stream)
            if stream.served_by is None:  # no call will count it down
                self.active_calls -= 1
        return stream

    def _settings(self, number: int, flags: int, body: bytes) -> None:
        self._spend(CONTROL + len(body) // 6 * TRIFLE)
        if len(body) % 6 or (flags & frames.ACK and body):
            raise ProtocolError(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
        if number:
            raise ProtocolError(Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            self._reader.settings_acked = True
            return
        window = self.queue.initial_window
        for name, value in struct.iter_unpack(">HL", body):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ProtocolError(Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
                window = value
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ProtocolError(Code.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
            elif name == frames.MAX_FRAME_SIZE and not frames.FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise ProtocolError(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
        if window != self.queue.initial_window:  # only the last one: each visits all streams
            self._spend(len(self.streams) * TRIFLE)
            more, self.queue.initial_window = window - self.queue.initial_window, window
            for stream in list(self.streams.values()):
                self.queue.widen(stream, more)
        self.queue.buffer += frames.settings_ack()

    def _priority(self, number: int, body: bytes) -> None:
        _check_size(body, 5)
        self._spend(TRIFLE)
        if not number:
            raise ProtocolError(Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._check_priority(number, body)

    def _check_priority(self, number: int, body: bytes) -> None:
        if int.from_bytes(body[:4]) & frames.MAX_WINDOW == number:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a stream depends on itself")

    def _ping(self, number: int, flags: int, body: bytes) -> None:
        _check_size(body, 8)
        if number:
            raise ProtocolError(Code.PROTOCOL_ERROR, "PING on a stream")
        self._spend(CONTROL)
        if not flags & frames.ACK:
            self.queue.buffer += frames.ping(body, answer=True)

    def _window_update(self, number: int, body: bytes) -> Stream | None:
        _check_size(body, 4)
        self._spend(TRIFLE)
        more = int.from_bytes(body) & frames.MAX_WINDOW
        if not more:
            raise ProtocolError(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        if number == 0:
            self.queue.widen_connection(more)
            return None
        self._check_opened(number)
        stream = self.streams.get(number)
        if stream is not None:
            self.queue.widen(stream, more)
        return stream

    def _check_opened(self, number: int) -> None:
        if number > self._last or number % 2 == 0:
            raise ProtocolError(Code.PROTOCOL_ERROR, f"a frame on stream {number}, which is not open")

    def _spend(self, cost: int) -> None:
        self.budget -= cost
        shared = self.certificate_budget
        if shared is not None:
            shared.left -= cost
        if self.budget < 0 or (shared is not None and shared.left < 0 and self.budget < BUDGET - FREE):
            raise ProtocolError(Code.ENHANCE_YOUR_CALM, "too many frames that carry nothing")


def _unpadded(body: bytes) -> bytes:
    if not body or body[0] >= len(body):
        raise ProtocolError(Code.PROTOCOL_ERROR, "the padding of a frame is longer than the frame")
    return body[1 : len(body) - body[0]]


def _check_size(body: bytes, size: int) -> None:
    if len(body) != size:
        raise ProtocolError(Code.FRAME_SIZE_ERROR, f"a frame of {len(body)} bytes; {size} expected")

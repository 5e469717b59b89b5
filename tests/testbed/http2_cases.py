"""Sequences of HTTP/2 bytes, honest and hostile, and what a client observes when a server receives one."""

from __future__ import annotations

import gzip
import struct
import zlib

import hpack

from drover_collector.grpc_h2 import frames, messages
from drover_collector.grpc_h2.frames import Code
from testbed.http2 import GREETING, REQUEST, block, data, opened

PING = frames.ping(b"12345678", answer=False)
END = frames.head(frames.DATA, frames.END_STREAM, 1, 0)
SAID = data(messages.wrap(b"hello"))
LAST_PING = b"the last"


def _list(*pairs: tuple[str, str]) -> bytes:
    return frames.headers(1, bytes(hpack.Encoder().encode(pairs)), last=False)


def _without(name: str) -> bytes:
    return _list(*(pair for pair in REQUEST if pair[0] != name))


def _sent(kind: int, body: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return frames.head(kind, flags, stream, len(body)) + body


def _call(*sent: bytes, **headers: str) -> bytes:
    return GREETING + opened(1, **headers) + b"".join(sent)


def _flood(one: bytes, count: int) -> bytes:
    return _call(SAID, one * count)


def _compressed(packed: bytes, **headers: str) -> bytes:
    return _call(data(b"\1" + len(packed).to_bytes(4) + packed), END, **headers)


_PADDED_AND_FIRST = frames.PADDED | frames.WITH_PRIORITY
_BLOCK = block()
_HEAD = b"\3" + b"\0\0\0\0\7" + _BLOCK[:10] + b"\0\0\0"
_BIG = 4 << 20

# name -> what the client sends at once, after which it sends a PING.
CASES: dict[str, bytes] = {
    # ---- honest
    "a message and the end": _call(SAID, END),
    "a message, and the stream stays open": _call(SAID),
    "an empty message": _call(data(messages.wrap(b"")), END),
    "two messages in one frame": _call(data(messages.wrap(b"one") + messages.wrap(b"two")), END),
    "a message in crumbs": _call(*(data(messages.wrap(b"hello")[n : n + 1]) for n in range(10)), END),
    "no message": _call(END),
    "the request ends with its headers": GREETING + frames.headers(1, block(), last=True),
    "two streams": _call(SAID, opened(3), data(messages.wrap(b"two"), 3), END),
    "gzip": _compressed(gzip.compress(b"x" * 99, mtime=0), grpc_encoding="gzip"),
    "deflate": _compressed(zlib.compress(b"x" * 99), grpc_encoding="deflate"),
    "padding": _call(data(b"\2" + messages.wrap(b"hello") + b"\0\0", flags=frames.PADDED), END),
    "headers in pieces with padding and priority": GREETING
    + _sent(frames.HEADERS, _HEAD, 1, _PADDED_AND_FIRST)
    + _sent(frames.CONTINUATION, _BLOCK[10:], 1, frames.END_HEADERS)
    + SAID
    + END,
    "trailers of a client": _call(SAID, frames.headers(1, b"\0\1x\1y", last=True)),
    "an unknown frame": _call(_sent(0x55, b"?"), SAID, END),
    "priority": _call(_sent(frames.PRIORITY, bytes(5), 1), SAID, END),
    "a stream is reset": _call(SAID, frames.reset(1, Code.PROTOCOL_ERROR), opened(3), data(messages.wrap(b"two"), 3)),
    "the client leaves": _call(SAID, END, frames.goaway(0, Code.NO_ERROR, "")),
    "a window of nothing, then one": frames.PREFACE
    + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
    + opened()
    + SAID
    + END
    + frames.window_update(1, 100),
    # ---- gRPC
    "an unknown method": _call(SAID, END, _path="/other"),
    "GET": _call(SAID, END, _method="GET"),
    "text/html": _call(SAID, END, content_type="text/html"),
    "no content-type": GREETING + _without("content-type") + SAID + END,
    "an unknown encoding": _call(SAID, END, grpc_encoding="snappy"),
    "no te": GREETING + _without("te") + SAID + END,
    "a compressed message without an encoding": _compressed(gzip.compress(b"x" * 99, mtime=0)),
    "compressed junk": _compressed(b"junk", grpc_encoding="gzip"),
    "gzip that goes on": _compressed(gzip.compress(b"x" * 99, mtime=0) + b"junk", grpc_encoding="gzip"),
    "a bomb": _compressed(gzip.compress(bytes(_BIG + 1)), grpc_encoding="gzip"),
    "data packed 1,000 times": _compressed(gzip.compress(bytes(_BIG - 1)), grpc_encoding="gzip"),
    "flags of a message": _call(data(b"\2\0\0\0\1x"), END),
    "a message that is too long": _call(data(b"\0" + (_BIG + 1).to_bytes(4) + b"x" * 100)),
    "the end within a message": _call(data(b"\0\0\0\0\5he"), END),
    # ---- header lists
    "a path twice": GREETING + _list(*REQUEST, (":path", "/other")),
    "a method twice": GREETING + _list((":method", "GET"), *REQUEST),
    "a pseudo-header of a response": GREETING + _list((":status", "200"), *REQUEST),
    "an unknown pseudo-header": GREETING + _list((":test", "x"), *REQUEST),
    "a pseudo-header after others": GREETING + _list(("x", "y"), *REQUEST),
    "no path": GREETING + _without(":path"),
    "an empty path": GREETING + _list(*((name, "" if name == ":path" else value) for name, value in REQUEST)),
    "no method": GREETING + _without(":method"),
    "no scheme": GREETING + _without(":scheme"),
    "no authority": GREETING + _without(":authority") + SAID + END,
    "capitals in a name": GREETING + _list(*REQUEST, ("X-Test", "x")),
    "connection: keep-alive": GREETING + _list(*REQUEST, ("connection", "keep-alive")),
    "te: gzip": GREETING + _list(*((name, "gzip" if name == "te" else value) for name, value in REQUEST)),
    "not HPACK": GREETING + frames.headers(1, b"\xff\xff\xff\xff\xff", last=False),
    "a long header": GREETING + frames.headers(1, block(x="y" * 40_000), last=False),
    "a dynamic table after SETTINGS": GREETING
    + frames.settings_ack()
    + frames.headers(1, b"\x3f\xe1\x1f" + block(), last=False),
    # ---- HTTP/2
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HEADERS first": frames.PREFACE + opened(),
    "a frame of 16,385 bytes": _call(data(bytes(16_385))),
    "an even stream": GREETING + opened(2),
    "DATA on an idle stream": GREETING + data(b"x"),
    "RST_STREAM on an idle stream": GREETING + frames.reset(1, Code.NO_ERROR),
    "WINDOW_UPDATE on an idle stream": GREETING + frames.window_update(1, 1),
    "PUSH_PROMISE": GREETING + _sent(frames.PUSH_PROMISE, bytes(4), 1),
    "CONTINUATION without HEADERS": GREETING + _sent(frames.CONTINUATION, b"", 1, frames.END_HEADERS),
    "PING within a header block": GREETING + _sent(frames.HEADERS, b"\x88", 1) + PING,
    "all padding": _call(data(b"\5ab", flags=frames.PADDED)),
    "HEADERS that are all padding": GREETING + _sent(frames.HEADERS, b"\5ab", 1, frames.PADDED | frames.END_HEADERS),
    "the connection's window becomes too large": GREETING + frames.window_update(0, 2**31 - 1),
    "a stream's window becomes too large": _call(frames.window_update(1, 2**31 - 1)),
    "INITIAL_WINDOW_SIZE 2^31": GREETING + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}),
    "ENABLE_PUSH 2": GREETING + frames.settings({frames.ENABLE_PUSH: 2}),
    "MAX_FRAME_SIZE 16,383": GREETING + frames.settings({frames.MAX_FRAME_SIZE: 16_383}),
    "MAX_FRAME_SIZE 2^24": GREETING + frames.settings({frames.MAX_FRAME_SIZE: 2**24}),
    "WINDOW_UPDATE of 0": GREETING + frames.window_update(0, 0),
    "WINDOW_UPDATE of 0 on a stream": _call(frames.window_update(1, 0)),
    "PING of 1 byte": GREETING + _sent(frames.PING, b"x"),
    "PING on a stream": _call(_sent(frames.PING, bytes(8), 1)),
    "SETTINGS of 1 byte": GREETING + _sent(frames.SETTINGS, b"x"),
    "SETTINGS on a stream": _call(_sent(frames.SETTINGS, b"", 1)),
    "SETTINGS ack with a body": GREETING + _sent(frames.SETTINGS, bytes(6), 0, frames.ACK),
    "RST_STREAM of 3 bytes": _call(_sent(frames.RST_STREAM, bytes(3), 1)),
    "RST_STREAM on stream 0": _call(_sent(frames.RST_STREAM, bytes(4))),
    "DATA on stream 0": _call(data(b"x", 0)),
    "HEADERS on stream 0": GREETING + opened(0),
    "WINDOW_UPDATE of 3 bytes": _call(_sent(frames.WINDOW_UPDATE, bytes(3))),
    "GOAWAY on a stream": _call(_sent(frames.GOAWAY, bytes(8), 1)),
    "PRIORITY on stream 0": GREETING + _sent(frames.PRIORITY, bytes(5)),
    "PRIORITY of 4 bytes": _call(_sent(frames.PRIORITY, bytes(4), 1)),
    "a stream depends on itself": GREETING + _sent(frames.PRIORITY, b"\0\0\0\1\7", 1),
    "HEADERS again": _call(SAID, opened()),
    "DATA after the end": _call(SAID, END, data(b"more")),
    "HEADERS after the end": _call(SAID, END, opened()),
    "DATA after a reset": _call(SAID, frames.reset(1, Code.NO_ERROR), data(b"more")),
    "a lower stream than before": GREETING + opened(5) + data(messages.wrap(b"hello"), 5) + opened(3),
    "16 MiB that are not read": _call(data(bytes(16_384)) * 1024, _path="/idle"),
    # ---- floods
    "10,000 pings": _flood(PING, 10_000),
    "10,000 SETTINGS": _flood(frames.settings({}), 10_000),
    "50,000 windows in SETTINGS": _flood(
        _sent(frames.SETTINGS, b"".join(struct.pack(">HL", 4, 70_000 + n) for n in range(2_000))), 25
    ),
    "10,000 resets": GREETING + b"".join(opened(n) + frames.reset(n, Code.NO_ERROR) for n in range(1, 20_000, 2)),
    "20,000 empty DATA": _flood(data(b""), 20_000),
    "20,000 windows": _flood(frames.window_update(0, 1), 20_000),
    "20,000 unknown frames": _flood(_sent(0x55), 20_000),
    "20,000 PRIORITY": _flood(_sent(frames.PRIORITY, bytes(5), 1), 20_000),
    "20,000 CONTINUATION": _call(_sent(frames.HEADERS, b"\x88", 3), _sent(frames.CONTINUATION, b"", 3) * 20_000),
    "150 streams": GREETING + b"".join(opened(n) for n in range(1, 300, 2)),
}


class Observed:
    """What a client reads from one connection, as a sentence that two servers can be compared by."""

    def __init__(self) -> None:
        self.closed = False
        self._rest = b""
        self._decoder = hpack.Decoder()
        self._pieces = b""  # of a header block
        self._bodies: dict[int, bytearray] = {}
        self._ends: dict[int, list[str]] = {}
        self._goaway: str | None = None
        self._alive = False

    def receive(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= frames.HEAD_BYTES:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(self._rest)
            end = frames.HEAD_BYTES + (high << 8 | low)
            if len(self._rest) < end:
                return
            body, self._rest = self._rest[frames.HEAD_BYTES : end], self._rest[end:]
            self._frame(kind, flags, stream, body)

    def _frame(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        match kind:
            case frames.DATA:
                self._bodies.setdefault(stream, bytearray()).extend(body)
            case frames.HEADERS | frames.CONTINUATION:
                self._pieces += body
                if flags & frames.END_HEADERS:
                    found = {str(name): str(value) for name, value in self._decoder.decode(self._pieces)}
                    self._pieces = b""
                    self._headers(stream, found)
            case frames.RST_STREAM:
                self._ends.setdefault(stream, []).append(f"reset {_code(body)}")
            case frames.GOAWAY:
                self._goaway = _code(body[4:8])
            case frames.PING if flags & frames.ACK and body == LAST_PING:
                self._alive = True

    def _headers(self, stream: int, found: dict[str, str]) -> None:
        ends = self._ends.setdefault(stream, [])
        if found.get(":status", "200") != "200":
            ends.append(f"HTTP {found[':status']}")
        elif "grpc-status" in found:
            ends.append(f"status {found['grpc-status']}")

    def text(self) -> str:
        """Return the outcome. What depends on timing is left out: streams of a connection that was closed, and the
        RST_STREAM that may follow a status."""
        if self.closed:
            return "closed" if self._goaway is None else f"GOAWAY {self._goaway}, closed"
        said: dict[str, int] = {}  # outcome -> its first stream
        for stream in sorted({*self._bodies, *self._ends}):
            if outcome := self._stream(stream):
                said.setdefault(outcome, stream)
        found = [f"stream {stream}: {outcome}" for outcome, stream in said.items()]
        if self._goaway is not None:
            found.append(f"GOAWAY {self._goaway}")
        return "; ".join([*found, "open"]) if self._alive else ""

    def _stream(self, stream: int) -> str:
        body, ends = self._bodies.get(stream, bytearray()).copy(), list(dict.fromkeys(self._ends.get(stream, ())))
        echoed = []
        while (cut := messages.cut(body, 1 << 30)) is not None:
            echoed.append(f"{len(cut[1])} B")
        if len(ends) > 1 and ends[-1] == "reset NO_ERROR":
            ends.pop()
        return ", ".join([*echoed, *ends])


def _code(body: bytes) -> str:
    number = int.from_bytes(body[:4])
    return "INTERNAL_ERROR" if number == 2 else Code(number).name  # which our server never sends

"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6)."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">HBBBL")  # length as 16 and 8 bits, type, flags, stream
HEAD_BYTES = 9
FRAME_BYTES = 16_384  # the longest payload that either side may send: HTTP/2's initial value, which we never raise
WINDOW = 65_535  # HTTP/2's initial value, for a stream and for a connection
MAX_WINDOW = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

# Identifiers in SETTINGS.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6
MAX_FRAME_BYTES = 2**24 - 1  # the largest MAX_FRAME_SIZE that a peer may announce


class Code(IntEnum):
    """The reason why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def settings(values: dict[int, int]) -> bytes:
    body = b"".join(struct.pack(">HL", name, value) for name, value in values.items())
    return head(SETTINGS, 0, 0, len(body)) + body


def settings_ack() -> bytes:
    return head(SETTINGS, ACK, 0, 0)


def ping(body: bytes, *, answer: bool) -> bytes:
    return head(PING, ACK if answer else 0, 0, 8) + body


def window_update(stream: int, more: int) -> bytes:
    return head(WINDOW_UPDATE, 0, stream, 4) + struct.pack(">L", more)


def reset(stream: int, code: Code) -> bytes:
    return head(RST_STREAM, 0, stream, 4) + struct.pack(">L", code)


def goaway(last_stream: int, code: Code, text: str) -> bytes:
    body = struct.pack(">LL", last_stream, code) + text.encode()
    return head(GOAWAY, 0, 0, len(body)) + body


def headers(stream: int, block: bytes, *, last: bool) -> bytes:
    """Return a header block as HEADERS and as many CONTINUATION frames as it needs."""
    found = bytearray()
    kind, flags = HEADERS, END_STREAM if last else 0
    while True:
        part, block = block[:FRAME_BYTES], block[FRAME_BYTES:]
        found += head(kind, flags | (0 if block else END_HEADERS), stream, len(part)) + part
        if not block:
            return bytes(found)
        kind, flags = CONTINUATION, 0

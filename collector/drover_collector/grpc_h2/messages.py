"""gRPC messages in a stream: five bytes of prefix, then the message, perhaps compressed."""

from __future__ import annotations

import struct
import zlib

import grpc

PREFIX = struct.Struct(">BL")  # compressed, length
# A message may inflate to FREE_BYTES, or to RATIO times its length. 1 MB of rows that do not change inflates 73 times.
FREE_BYTES, RATIO = 256 << 10, 200
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects the format; gRPC calls zlib's "deflate"


class MessageError(Exception):
    """A message is invalid: its stream ends with `code`."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def wrap(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def cut(buffer: bytearray, max_bytes: int) -> tuple[bool, bytes] | None:
    """Take the first message out of the buffer; None until it is complete.

    Returns:
        (whether it is compressed, the message).
    Raises:
        MessageError: it is longer than `max_bytes`, or its prefix is invalid.
    """
    if len(buffer) < PREFIX.size:
        return None
    flag, size = PREFIX.unpack_from(buffer)
    if flag > 1:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message has flags {flag}; only 0 and 1 are valid")
    if size > max_bytes:
        text = f"Received message larger than max ({size} vs. {max_bytes})"
        raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    end = PREFIX.size + size
    if len(buffer) < end:
        return None
    message = bytes(memoryview(buffer)[PREFIX.size : end])
    del buffer[:end]
    return bool(flag), message


def inflate(packed: bytes | memoryview, max_bytes: int) -> bytes:
    """Decompress a message. Never makes more bytes than the limits allow.

    Raises:
        MessageError: not compressed, longer than `max_bytes`, or beyond RATIO.
    """
    at_ratio = RATIO * len(packed)
    if at_ratio < max_bytes:
        max_bytes = min(max_bytes, max(FREE_BYTES, at_ratio))
    stream = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        message = stream.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}") from None
    if len(message) > max_bytes:
        text = f"Received message larger than max (more than {max_bytes} bytes once it is decompressed)"
        raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    if not stream.eof or stream.unused_data:
        raise MessageError(grpc.StatusCode.INTERNAL, "a message cannot be decompressed: it is cut off, or goes on")
    return message

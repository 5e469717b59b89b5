"""gRPC messages within a stream: five bytes of prefix, then the message, perhaps compressed."""

from __future__ import annotations

import struct
import zlib

import grpc

PREFIX = struct.Struct(">BL")
# What is unpacked may be so much, or so many times as long as it came. 4,000 rows of GPUs that change nothing (1 MB)
# are 73 times as long.
FREE_BYTES, RATIO = 256 << 10, 200
EITHER = 32 + zlib.MAX_WBITS  # zlib finds out whether it is gzip's form or zlib's, which gRPC calls deflate


class MessageError(Exception):
    """A message that ends its stream with `code`."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def wrap(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def cut(buffer: bytearray, most: int) -> tuple[bool, bytes] | None:
    """(whether it is compressed, the message) once it is there whole; it is taken out of the buffer.

    Raises:
        MessageError: it will have more than `most` bytes, or is none.
    """
    if len(buffer) < PREFIX.size:
        return None
    flag, size = PREFIX.unpack_from(buffer)
    if flag > 1:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message with flags {flag}; 0 and 1 are right")
    if size > most:
        raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})")
    whole = PREFIX.size + size
    if len(buffer) < whole:
        return None
    message = bytes(memoryview(buffer)[PREFIX.size : whole])
    del buffer[:whole]
    return bool(flag), message


def inflate(packed: bytes | memoryview, most: int) -> bytes:
    """
    Raises:
        MessageError: not compressed, or more than `most` bytes, or packed more tightly than data is; no more than
            these are made.
    """
    loosely = RATIO * len(packed)
    if loosely < most:
        most = min(most, max(FREE_BYTES, loosely))
    stream = zlib.decompressobj(EITHER)
    try:
        message = stream.decompress(packed, most + 1)
    except zlib.error as error:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message that is not compressed as it says: {error}") from None
    if len(message) > most:
        text = f"Received message larger than max (more than {most} bytes once it is decompressed)"
        raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    if not stream.eof or stream.unused_data:
        raise MessageError(grpc.StatusCode.INTERNAL, "a message that is not compressed as it says")
    return message

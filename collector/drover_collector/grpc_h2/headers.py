"""Read the header list of a gRPC request, and write that of a response (gRPC's PROTOCOL-HTTP2.md).

Responses use no dynamic table and no Huffman code (RFC 7541): they are a few bytes, once for each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote_from_bytes

import grpc
import hpack

LIST_BYTES = 16_384  # of one header list; gRPC clients send some 400
TEXT_BYTES = 2_000  # of a status message
UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")  # in a status message
COMPRESSED = {"": False, "identity": False, "gzip": True, "deflate": True}  # encoding -> messages may be compressed
PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))  # of a request; all but the last are required
OF_HTTP_1 = frozenset(("connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"))
NOT_METADATA = ("te", "content-type", "user-agent", "accept-encoding")  # headers of the protocol itself


class HeadersError(Exception):
    """A header block cannot be read. Its connection is lost: later blocks build on this one."""


@dataclass(frozen=True, slots=True)
class Request:
    """The header list that opened a stream."""

    method: str  # of HTTP
    path: str
    content_type: str
    encoding: str
    metadata: tuple[tuple[str, str], ...]
    malformed: str = ""  # why it is not a request (RFC 9113, section 8)


class HeaderReader:
    """Reads the header blocks of one connection, in order: each builds on those before it.

    Most connections send one block, and thousands of clients the same one. So the first is cached, and a decoder is
    made for the second.

    Attributes:
        settings_acked: the peer has acknowledged our SETTINGS, which allow no dynamic table.
    """

    __slots__ = ("_decoder", "_first", "settings_acked")

    def __init__(self) -> None:
        self.settings_acked = False
        self._decoder: hpack.Decoder | None = None
        self._first: bytes | None = None

    def read(self, block: bytes) -> Request:
        """Return the request of a header block.

        Raises:
            HeadersError: not HPACK, or too long.
        """
        if self.settings_acked:
            _check_table(block)
        if self._first is None:
            self._first = block
            return _decode_first(block)
        if self._decoder is None:
            self._decoder = _decoder()
            _decode(self._decoder, self._first)
        return _decode(self._decoder, block)


def _check_table(block: bytes) -> None:
    """Refuse a block that begins with a new size of the dynamic table (RFC 7541, section 6.3) other than 0."""
    for byte in block:
        if byte & 0xE0 != 0x20:
            return
        if byte != 0x20:
            raise HeadersError("HPACK: a dynamic table is not allowed")


def _decoder() -> hpack.Decoder:
    return hpack.Decoder(max_header_list_size=LIST_BYTES)


@lru_cache(64)
def _decode_first(block: bytes) -> Request:
    return _decode(_decoder(), block)


def _decode(decoder: hpack.Decoder, block: bytes) -> Request:
    try:
        found = decoder.decode(block, raw=True)
    except hpack.HPACKError as error:
        raise HeadersError(str(error)) from None
    pairs = [(_str(name), _str(value)) for name, value in found]
    first = dict(reversed(pairs))  # the first value of each name
    metadata = tuple(pair for pair in pairs if pair[0] not in NOT_METADATA and not pair[0].startswith((":", "grpc-")))
    method, path, kind, encoding = (first.get(n, "") for n in (":method", ":path", "content-type", "grpc-encoding"))
    return Request(method, path, kind, encoding, metadata, _malformed(pairs))


def _malformed(pairs: Sequence[tuple[str, str]]) -> str:
    """Return why a header list is not a request; "" if it is one."""
    pseudo = [name for name, _ in pairs if name.startswith(":")]
    if len(set(pseudo)) < len(pseudo) or not PSEUDO.issuperset(pseudo):
        return "a pseudo-header appears twice, or is not allowed in a request"
    if any(name.startswith(":") for name, _ in pairs[len(pseudo) :]):
        return "a pseudo-header follows a regular header"
    found = dict(pairs)
    if not (found.get(":method") and found.get(":scheme") and found.get(":path")):
        return ":method, :scheme or :path is missing"
    if any(name != name.lower() or name in OF_HTTP_1 for name in found):
        return "a header name has capitals, or belongs to HTTP/1.1"
    return "" if found.get("te", "trailers") == "trailers" else "te is not trailers"


def _str(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def trailers(code: grpc.StatusCode, text: str) -> bytes:
    """Return the block after the last message of a response."""
    block = _literal(b"grpc-status", b"%d" % code.value[0])
    return block + _literal(b"grpc-message", _percent(text)) if text else block


def http_status(status: int) -> bytes:
    """Return the whole response to a request that is not gRPC."""
    return b"\x08" + _text(b"%d" % status)  # :status has number 8 in the static table


def _percent(text: str) -> bytes:
    return quote_from_bytes(text.encode("utf-8", "replace")[:TEXT_BYTES], UNESCAPED).encode()


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _text(name) + _text(value)


def _text(value: bytes) -> bytes:
    """Encode a string (RFC 7541, section 5.2)."""
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    found, size = bytearray((127,)), size - 127
    while size >= 128:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found) + value


RESPONSE = (
    b"\x88"  # :status 200, number 8 in the static table
    b"\x0f\x10" + _text(b"application/grpc")  # content-type, number 31
    + _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
)  # fmt: skip

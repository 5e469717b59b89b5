"""Header lists of gRPC over HTTP/2 (its PROTOCOL-HTTP2.md): a request's read, an answer's written.

Answers use no dynamic table and no Huffman code (RFC 7541): they are a few bytes, once for each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote_from_bytes

import grpc
import hpack

LIST_BYTES = 16_384  # of one header list; agents send some 400
TEXT_BYTES = 2_000  # of an error's text
PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")  # need no escape in a text
COMPRESSED = {"": False, "identity": False, "gzip": True, "deflate": True}  # encoding -> whether messages may be
PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))  # of a request; all but the last it must have
OF_HTTP_1 = frozenset(("connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"))
OWN = ("te", "content-type", "user-agent", "accept-encoding")  # of the protocol, no metadata


class HeadersError(Exception):
    """A header block that cannot be read; its connection is lost, as what comes after it cannot be read either."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a stream began with."""

    method: str  # of HTTP
    path: str
    content_type: str
    encoding: str
    metadata: tuple[tuple[str, str], ...]
    malformed: str = ""  # why it is no request (RFC 9113, section 8)


class Reader:
    """Reads the blocks of one connection, each of which builds on those before it.

    Most connections have one, and thousands of agents the same: so the first is looked up, and a decoder is made for
    the second.

    Attributes:
        settled: the peer has acknowledged our SETTINGS, which allow no dynamic table.
    """

    __slots__ = ("_decoder", "_first", "settled")

    def __init__(self) -> None:
        self.settled = False
        self._decoder: hpack.Decoder | None = None
        self._first: bytes | None = None

    def read(self, block: bytes) -> Request:
        """
        Raises:
            HeadersError: not HPACK, or too long.
        """
        if self.settled:
            _check_table(block)
        if self._first is None:
            self._first = block
            return _first(block)
        if self._decoder is None:
            self._decoder = _decoder()
            _decode(self._decoder, self._first)
        return _decode(self._decoder, block)


def _check_table(block: bytes) -> None:
    """A block may begin with new sizes of the dynamic table (RFC 7541, section 6.3), of which 0 alone is allowed."""
    for byte in block:
        if byte & 0xE0 != 0x20:
            return
        if byte != 0x20:
            raise HeadersError("a dynamic table, where none is allowed")


def _decoder() -> hpack.Decoder:
    return hpack.Decoder(max_header_list_size=LIST_BYTES)


@lru_cache(64)
def _first(block: bytes) -> Request:
    return _decode(_decoder(), block)


def _decode(decoder: hpack.Decoder, block: bytes) -> Request:
    try:
        found = decoder.decode(block, raw=True)
    except hpack.HPACKError as error:
        raise HeadersError(str(error)) from None
    pairs = [(_str(name), _str(value)) for name, value in found]
    own = dict(reversed(pairs))  # the first of each
    metadata = tuple(pair for pair in pairs if pair[0] not in OWN and not pair[0].startswith((":", "grpc-")))
    method, path, kind, encoding = (own.get(n, "") for n in (":method", ":path", "content-type", "grpc-encoding"))
    return Request(method, path, kind, encoding, metadata, _malformed(pairs))


def _malformed(pairs: Sequence[tuple[str, str]]) -> str:
    """Why a header list is none of a request; "": it is one."""
    pseudo = [name for name, _ in pairs if name.startswith(":")]
    if len(set(pseudo)) < len(pseudo) or not PSEUDO.issuperset(pseudo):
        return "a pseudo header twice, or one that no request has"
    if any(name.startswith(":") for name, _ in pairs[len(pseudo) :]):
        return "a pseudo header behind others"
    found = dict(pairs)
    if not (found.get(":method") and found.get(":scheme") and found.get(":path")):
        return "no :method, :scheme or :path"
    if any(name != name.lower() or name in OF_HTTP_1 for name in found):
        return "a name with capitals, or a header of HTTP/1.1"
    return "" if found.get("te", "trailers") == "trailers" else "te with something else than trailers"


def _str(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def end(code: grpc.StatusCode, text: str) -> bytes:
    """The block after the last message of an answer."""
    block = _literal(b"grpc-status", b"%d" % code.value[0])
    return block + _literal(b"grpc-message", _percent(text)) if text else block


def refuse(status: int) -> bytes:
    """The whole answer to who speaks no gRPC, with a status of HTTP."""
    return b"\x08" + _text(b"%d" % status)  # :status has number 8 in the static table


def _percent(text: str) -> bytes:
    return quote_from_bytes(text.encode("utf-8", "replace")[:TEXT_BYTES], PLAIN).encode()


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _text(name) + _text(value)


def _text(value: bytes) -> bytes:
    """A string of RFC 7541, section 5.2."""
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    found, size = bytearray((127,)), size - 127
    while size >= 128:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found) + value


BEGIN = (
    b"\x88"  # :status 200, number 8 in the static table
    b"\x0f\x10" + _text(b"application/grpc")  # content-type, number 31
    + _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
)  # fmt: skip

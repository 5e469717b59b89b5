"""Single frames of an HTTP/2 client, for what a correct one never sends."""

from __future__ import annotations

import functools

import hpack

from drover_collector.grpc_h2 import frames

REQUEST = (
    (":method", "POST"), (":scheme", "http"), (":path", "/echo"), (":authority", "x"), ("te", "trailers"),
    ("content-type", "application/grpc"),
)  # fmt: skip
GREETING = frames.PREFACE + frames.settings({})


def opened(stream: int = 1, **changed: str) -> bytes:
    """HEADERS of a call; `changed`: headers, with _ for - (and a leading one for a colon)."""
    return frames.headers(stream, block(**changed), last=False)


def block(encoder: hpack.Encoder | None = None, **changed: str) -> bytes:
    return _first_block(**changed) if encoder is None else _block(encoder, **changed)


@functools.cache  # a flood has 10,000 of the same
def _first_block(**changed: str) -> bytes:
    return _block(hpack.Encoder(), **changed)


def _block(encoder: hpack.Encoder, **changed: str) -> bytes:
    own = {name.replace("_", "-").replace("-", ":", name.startswith("_")): value for name, value in changed.items()}
    return bytes(encoder.encode([*(dict(REQUEST) | own).items()]))


def data(body: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return frames.head(frames.DATA, flags, stream, len(body)) + body


def split(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, body) of each frame."""
    found, at = [], 0
    while at < len(sent):
        high, low, kind, flags, stream = frames.HEAD.unpack_from(sent, at)
        at += frames.HEAD_BYTES
        size = high << 8 | low
        found.append((kind, flags, stream, sent[at : at + size]))
        at += size
    return found


def kinds(sent: bytes) -> list[int]:
    return [kind for kind, _, _, _ in split(sent)]


def goodbye(sent: bytes) -> int | None:
    """The code of a GOAWAY, if there is one."""
    codes = [int.from_bytes(body[4:8]) for kind, _, _, body in split(sent) if kind == frames.GOAWAY]
    return codes[-1] if codes else None

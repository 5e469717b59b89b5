"""What the process that reads pages and the collector write to each other: frames of a kind, a node and a message."""

from __future__ import annotations

import asyncio
import struct

_HEAD = struct.Struct(">cHI")
HELLO, BATCH, RECORD, STATE = b"H", b"B", b"R", b"S"
GONE = b"G"  # a node is not read any more
AGENT = b"N"  # to the process: the node has an agent, which is used instead
# Requests to the process, and its answer; named by a number, not a node. An OTLP request begins with its form.
WRITE, OTLP, ANSWER = b"W", b"O", b"A"
MAX_FRAME = (4 << 20) + 64


def pack(kind: bytes, node: str, message: bytes) -> bytes:
    name = node.encode()
    return _HEAD.pack(kind, len(name), len(message)) + name + message


async def read(reader: asyncio.StreamReader) -> tuple[bytes, str, bytes]:
    """Return (kind, node, message).

    Raises:
        asyncio.IncompleteReadError: the process has ended. ValueError: it wrote no frame.
    """
    kind, name, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    node = (await reader.readexactly(name)).decode()
    return kind, node, await reader.readexactly(size)

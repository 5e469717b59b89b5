"""Read one page over HTTP or HTTPS, within limits: of time as a whole, of bytes, and of where it may come from.

A redirect is refused: a page elsewhere than at the configured address is not what was asked for. No proxy is used. The
answer is checked before anything of it is parsed, and a target that hangs costs one task until the limit.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

MAX_BYTES = 8 << 20  # a node_exporter of 256 CPUs has 1 MB, a dcgm-exporter of 16 GPUs with all fields as much
MAX_HEADERS = 16 << 10
CHUNK = 64 << 10


class FetchError(Exception):
    """The page could not be had; the message says why, in a few words."""


async def fetch(
    host: str, port: int, path: str, tls: ssl.SSLContext | None, headers: Mapping[str, str], limit_s: float
) -> str:
    """Return the page. Bytes that are no UTF-8 are replaced.

    Raises:
        FetchError: nobody listens, no answer in time, another answer than a page, or too large a page.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await _fetch(host, port, path, tls, headers)
    except TimeoutError:
        raise FetchError(f"no answer within {limit_s:g} s") from None
    except ssl.SSLError as error:
        raise FetchError(f"TLS: {error.reason or 'failed'}") from None
    except OSError as error:
        raise FetchError(error.strerror or type(error).__name__) from None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise FetchError(f"it does not speak HTTP: {type(error).__name__}") from None


async def _fetch(host: str, port: int, path: str, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> str:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=MAX_HEADERS)
    try:
        name = f"[{host}]" if ":" in host else host
        sent = {"Host": f"{name}:{port}", "Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
        sent |= {"Connection": "close", **headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = head[0].split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1.") or not status[1].isdecimal():
            raise FetchError("it does not speak HTTP")
        answered = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        _check(int(status[1]), answered)
        return (await _body(reader, answered)).decode("utf-8", "replace")
    finally:
        writer.transport.abort()


def _check(status: int, headers: Mapping[str, str]) -> None:
    if 300 <= status < 400:
        there = "".join(c for c in headers.get("location", "nowhere")[:100] if c.isprintable())
        raise FetchError(f"it redirects to {there}; set that address instead")
    if status != 200:
        raise FetchError(f"it answers {status}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError("it answers compressed, though asked not to")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is not None:
        if not length.isdecimal() or len(length) > 12:
            raise FetchError("its length is no number")
        _limit(int(length))
        return await reader.readexactly(int(length))
    parts: list[bytes] = []
    size = 0
    while part := await reader.read(CHUNK):
        size += len(part)
        _limit(size)
        parts.append(part)
    return b"".join(parts)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    total = 0
    while True:
        text = (await reader.readuntil(b"\r\n")).partition(b";")[0].strip()
        size = int(text, 16) if len(text) <= 8 and text.isalnum() else -1
        if size < 0:
            raise FetchError("a chunk's length is no number")
        if not size:
            return b"".join(parts)
        total += size
        _limit(total)
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)


def _limit(size: int) -> None:
    if size > MAX_BYTES:
        raise FetchError(f"the page has more than {MAX_BYTES} bytes")

"""A page is read within limits, and any other answer is refused before it is parsed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from drover_collector.scrape.fetch import MAX_BYTES, FetchError, fetch
from testbed.loop import in_loop

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def _answering(answer: bytes, end: bool = True) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            if not end:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _get(port: int, limit_s: float = 5.0) -> str:
    return await fetch("127.0.0.1", port, "/metrics", None, {}, limit_s)


@pytest.mark.parametrize(
    "answer",
    [OK + b"Content-Length: 5\r\n\r\nup 1\n", OK + b"\r\nup 1\n",
     OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nup\r\n3;x=y\r\n 1\n\r\n0\r\n\r\n"],
)  # fmt: skip
@in_loop
async def test_a_page_in_each_form_of_http(answer: bytes) -> None:
    async with _answering(answer) as port:
        assert await _get(port) == "up 1\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", "redirects to http://169.254"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answers 404"),
        (OK + b"Content-Encoding: gzip\r\n\r\nx", "compressed"),
        (OK + b"Content-Length: 99999999999\r\n\r\n", "more than"),
        (OK + b"Content-Length: -1\r\n\r\n", "no number"),
        (OK + b"Content-Length: 50\r\n\r\nup 1\n", "does not speak HTTP"),  # it broke off
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "does not speak HTTP"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n7ffffff\r\n", "more than"),
        (OK + b"\r\n" + b"x" * (MAX_BYTES + 1), "more than"),
        (OK + b"X: " + b"y" * 40_000, "does not speak HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not speak HTTP"),
        (b"", "does not speak HTTP"),
    ],
)
@in_loop
async def test_any_other_answer_is_refused(answer: bytes, why: str) -> None:
    async with _answering(answer) as port:
        with pytest.raises(FetchError, match=why):
            await _get(port)


@in_loop
async def test_a_target_that_hangs_costs_its_limit() -> None:
    async with _answering(OK + b"\r\nup", end=False) as port:
        with pytest.raises(FetchError, match=r"no answer within 0\.2 s"):
            await _get(port, 0.2)

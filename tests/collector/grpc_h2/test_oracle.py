"""Our gRPC server compared with grpcio's: both receive the same honest and hostile sequences of bytes.

The differences are the table of docs/explanation/grpc-server-oracle.md, with who is right and why. A difference that is
not in the table fails, and so does one in the table that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer, frames
from drover_collector.grpc_h2.connection import STREAMS
from testbed.certificates import Files, Fleet
from testbed.http2_cases import CASES, LAST_PING, Observed
from testbed.loop import in_loop

PAGE = Path(__file__).resolve().parents[3] / "docs/explanation/grpc-server-oracle.md"
WAIT_S = 120.0
STAYS_S = 0.1  # an outcome must last so long
RIGHT = {"ours", "grpcio", "both"}
AGREED = {
    "stream 1: 5 B, status 0; open": (
        "a message and the end",
        "a message in crumbs",
        "trailers of a client",
        "an unknown frame",
        "priority",
        "the client leaves",
        "a window of nothing, then one",
    ),
    "stream 1: 5 B; open": ("a message, and the stream stays open",),
    "stream 1: 0 B, status 0; open": ("an empty message",),
    "stream 1: 3 B, 3 B, status 0; open": ("two messages in one frame",),
    "stream 1: status 0; open": (
        "no message",
        "the request ends with its headers",
    ),
    "stream 1: 5 B, status 0; stream 3: 3 B; open": ("two streams",),
    "stream 1: 99 B, status 0; open": (
        "gzip",
        "deflate",
    ),
    "stream 3: 3 B; open": ("a stream is reset",),
    "stream 1: status 12; open": ("an unknown method",),
    "stream 1: status 13; open": (
        "a compressed message without an encoding",
        "compressed junk",
        "gzip that goes on",
    ),
    "stream 1: status 8; open": (
        "a bomb",
        "a message that is too long",
    ),
    "GOAWAY FLOW_CONTROL_ERROR, closed": ("INITIAL_WINDOW_SIZE 2^31",),
    "GOAWAY PROTOCOL_ERROR, closed": (
        "ENABLE_PUSH 2",
        "MAX_FRAME_SIZE 16,383",
        "MAX_FRAME_SIZE 2^24",
    ),
    "open": ("DATA after a reset",),
    "stream 5: 5 B; open": ("a lower stream than before",),
    "GOAWAY ENHANCE_YOUR_CALM, closed": ("10,000 pings",),
}  # outcome -> cases with the same outcome on both servers


def _table() -> dict[str, tuple[str, str]]:
    """Return case -> (outcome of our server, outcome of grpcio's) of the page's table."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[3] in RIGHT:
            case, ours, theirs, _, why = cells
            assert why and case not in found, case
            found[case] = (ours, theirs)
    return found


DIFFERENCES = _table()
SAME = {case: outcome for outcome, cases in AGREED.items() for case in cases}


async def _echo(_: object, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def _idle(_: object, context: Any) -> None:
    await asyncio.Event().wait()


METHODS = {"/echo": _echo, "/idle": _idle}


class _Handler(grpc.GenericRpcHandler):
    def service(self, call: Any) -> Any:
        method = METHODS.get(call.method)
        return None if method is None else grpc.stream_stream_rpc_method_handler(method)


@contextlib.asynccontextmanager
async def both(tls: ServerTls | None = None) -> AsyncIterator[tuple[int, int]]:
    """Serve the same methods with our server and with grpcio's. Yields their ports."""
    ours = GrpcServer(METHODS)
    port = ours.listen("127.0.0.1", 0, None if tls is None else tls.contexts("ingest.listen"))
    await ours.start()
    theirs = grpc.aio.server(handlers=(_Handler(),), options=(("grpc.max_concurrent_streams", STREAMS),))
    address = "127.0.0.1:0"
    other = theirs.add_insecure_port(address) if tls is None else theirs.add_secure_port(address, tls.credentials("x"))
    await theirs.start()
    try:
        yield port, other
    finally:
        await ours.stop(0)
        await theirs.stop(0)


async def outcome(port: int, sent: bytes, expected: str, context: ssl.SSLContext | None = None) -> str:
    """Send bytes and a PING. Return the outcome once it is as expected and stays so, else after WAIT_S."""
    observed, changed = Observed(), asyncio.Event()
    try:
        name = None if context is None else "localhost"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except (OSError, ssl.SSLError):
        return "closed"

    async def read() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                observed.receive(data)
                changed.set()
        observed.closed = True
        changed.set()

    async def write() -> None:
        with contextlib.suppress(OSError):
            writer.write(sent + frames.ping(LAST_PING, answer=False))
            await writer.drain()

    tasks = asyncio.create_task(read()), asyncio.create_task(write())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while observed.text() != expected:
                changed.clear()
                await changed.wait()
    await asyncio.sleep(STAYS_S)
    for task in tasks:
        task.cancel()
    writer.close()
    return observed.text()


@pytest.mark.parametrize("case", CASES)
@in_loop
async def test_both_servers_do_what_the_table_says(case: str) -> None:
    expected = DIFFERENCES.get(case) or (SAME[case], SAME[case])
    async with both() as ports:
        found = await asyncio.gather(*(outcome(p, CASES[case], e) for p, e in zip(ports, expected, strict=True)))
    assert tuple(found) == expected


def test_the_table_has_differences_only_and_every_case_is_known() -> None:
    assert all(ours != theirs for ours, theirs in DIFFERENCES.values())
    assert not DIFFERENCES.keys() & SAME.keys()
    assert DIFFERENCES.keys() | SAME.keys() == CASES.keys()


def _context(files: Files, protocols: list[str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("an agent's certificate", "stream 1: 5 B, status 0; open"),
        ("a certificate of another fleet", "closed"),
        ("no certificate", "closed"),
        ("no ALPN", "closed"),
        ("ALPN of HTTP/1.1", "closed"),
        ("no TLS", "closed"),
    ],
)
@in_loop
async def test_both_servers_treat_tls_alike(tmp_path: Path, case: str, expected: str) -> None:
    fleet = Fleet(tmp_path / "ca")
    tls, agent = ServerTls(*fleet.issue("collector", "c1").paths), fleet.issue("agent", "n0")
    other = Fleet(tmp_path / "other").issue("agent", "n0")
    context: ssl.SSLContext | None = _context(
        agent, {"no ALPN": [], "ALPN of HTTP/1.1": ["http/1.1"]}.get(case, ["h2"])
    )
    assert context is not None
    if case == "no TLS":
        context = None
    elif case != "no certificate":
        own = other if case == "a certificate of another fleet" else agent
        context.load_cert_chain(own.cert, own.key)
    async with both(tls) as ports:
        sent = CASES["a message and the end"]
        found = await asyncio.gather(*(outcome(port, sent, expected, context) for port in ports))
    assert found == [expected, expected]

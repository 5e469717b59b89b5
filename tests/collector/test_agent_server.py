"""The agents' server with real gRPC clients and with raw sockets: what it serves, and whom it stands up to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.agent_server import AgentServer, CallEndedError, frames, messages, server
from drover_collector.agent_server import call as agent_call
from drover_collector.agent_server.call import MESSAGE_BYTES, STOPPED, Behaviour
from drover_collector.agent_server.connection import STREAMS
from drover_collector.agent_server.link import Link, LinkLostError, peer_name
from drover_collector.agent_server.outgoing import HELD_BYTES
from drover_collector.tls import ServerTls
from testbed.certificates import Fleet
from testbed.http2 import GREETING, data, goodbye, kinds, opened, split
from testbed.loop import in_loop

WAIT_S = 20
LARGE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Echo:
    """Says again what it hears, and counts."""

    def __init__(self) -> None:
        self.open = self.ended = 0
        self.heard: list[int] = []
        self.changed = asyncio.Event()
        self.context: Any = None

    async def __call__(self, _: Any, context: Any) -> None:
        self.context = context
        self.open += 1
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self.heard.append(len(message))
                await context.write(message)
        finally:
            self.open -= 1
            self.ended += 1
            self.changed.set()

    async def until_ended(self, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.ended < count:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def serving(
    echo: Behaviour, tls: ServerTls | None = None, **kwargs: Any
) -> AsyncIterator[tuple[AgentServer, int]]:
    served = AgentServer({"/echo": echo}, **kwargs)
    port = served.listen("127.0.0.1", 0, None if tls is None else tls.contexts("ingest.listen"))
    await served.start()
    try:
        yield served, port
    finally:
        await served.stop(0)


@contextlib.asynccontextmanager
async def calling(
    port: int, compression: grpc.Compression | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"{host}:{port}", options=LARGE) as channel:
        yield channel.stream_stream("/echo")(compression=compression)


async def said(call: Any, message: bytes = b"x") -> None:
    async with asyncio.timeout(WAIT_S):
        await call.write(message)
        assert await call.read() == message


class Raw:
    """A socket, without TLS, that sends what it is told to."""

    def __init__(self, port: int, *sent: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.socket.setblocking(False)
        self.heard = b""
        self._sent = b"".join(sent)

    async def __aenter__(self) -> Raw:
        await self.send(self._sent)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, sent: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_sendall(self.socket, sent)

    async def until(self, kind: int) -> bytes:
        """The body of the first frame of a kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                whole = self.heard[: len(self.heard)]
                with contextlib.suppress(Exception):
                    for found, _, _, body in split(whole):
                        if found == kind:
                            return body
                more = await asyncio.get_running_loop().sock_recv(self.socket, 65_536)
                assert more, f"closed after {kinds(self.heard)}"
                self.heard += more

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while more := await asyncio.get_running_loop().sock_recv(self.socket, 65_536):
                    self.heard += more
        return self.heard


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@in_loop
async def test_messages_larger_than_the_windows_go_both_ways(compression: grpc.Compression) -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port, compression) as call:
        for size in (0, 1, 65_535, 65_536, 3_000_000):
            await said(call, os.urandom(size))
        for _ in range(40):
            await said(call, os.urandom(11_000))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert (echo.open, echo.ended) == (0, 1)


@in_loop
async def test_a_message_that_is_too_long_ends_its_stream_alone() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as bystander:
        await said(bystander)
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):  # the latter is a bomb of 18 kB
            async with calling(port, compression) as call:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.write(bytes(MESSAGE_BYTES + 1))
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "larger than max" in await call.details()
        await said(bystander)
        assert echo.heard == [1, 1]


@in_loop
async def test_who_is_refused_before_a_word_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, most clients of grpc.aio know only of an internal error."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async with serving(refuse) as (_, port):
        for _ in range(20):
            async with calling(port) as call:
                await call.write(b"x")
                with pytest.raises(grpc.aio.AioRpcError, match="not you"):
                    await call.read()
        monkeypatch.setattr(agent_call, "HEAR_S", 0.02)
        async with Raw(port, GREETING, opened()) as raw:  # says nothing more
            await raw.until(frames.RST_STREAM)
            assert b"not you" in raw.heard


@in_loop
async def test_a_refusal_amid_a_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that came has been taken, so that the peer's window is as at the beginning."""
    monkeypatch.setattr(agent_call, "HEAR_S", 100 * WAIT_S)
    size = frames.WINDOW // 2 + 10

    async def refuse(_: Any, context: Any) -> None:
        assert len(await context.read()) == size - 5
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    message = messages.wrap(bytes(size - 5))
    parts = [data(message[at : at + 16_384]) for at in range(0, size, 16_384)]
    async with serving(refuse) as (_, port), Raw(port, GREETING, opened(), *parts) as raw:
        await raw.until(frames.RST_STREAM)
        assert b"not you" in raw.heard


@in_loop
async def test_who_speaks_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_call, "HEAR_S", 0.02)
    async with serving(Echo()) as (_, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/drover.telemetry.v1.Telemetry/Other")(b"x")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for changed, says in (
            ({"grpc_encoding": "snappy"}, b"grpc-status\x0212"),
            ({"content_type": "text/html"}, b"\x08\x03415"),
            ({"_method": "GET"}, b"\x08\x03405"),
        ):
            async with Raw(port, GREETING, opened(**changed)) as raw:
                await raw.until(frames.RST_STREAM)
                assert says in raw.heard
        async with Raw(port, b"GET / HTTP/1.1\r\n\r\n") as raw:
            assert goodbye(await raw.until_closed()) == frames.Code.PROTOCOL_ERROR


@in_loop
async def test_junk_on_one_connection_hits_no_other() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as bystander:
        await said(bystander)
        for junk in (
            b"\0" * 5000,
            os.urandom(5000),
            frames.PREFACE + os.urandom(500),
            GREETING + opened() + b"\xff" * 900,
        ):
            async with Raw(port, junk) as raw:
                await raw.until_closed()
            await said(bystander)
        async with Raw(port, GREETING, opened(), data(b"\1\0\0\0\4junk")) as raw:
            await raw.until(frames.RST_STREAM)
            assert b"grpc-status\x0213" in raw.heard
        await said(bystander)
        assert echo.open == 1


@in_loop
async def test_a_peer_that_leaves_ends_its_calls() -> None:
    """Cancelled, killed, or with a reset; what it has said until then is heard."""
    echo = Echo()
    async with serving(echo) as (_, port):
        async with calling(port) as call:
            await said(call)
            call.cancel()
        await echo.until_ended(1)
        async with Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
            await raw.until(frames.DATA)
            raw.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # as the kernel of one killed
        await echo.until_ended(2)
        async with Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
            await raw.until(frames.DATA)
            await raw.send(frames.reset(1, frames.Code.NO_ERROR))
            await echo.until_ended(3)
            await raw.send(opened(3) + data(messages.wrap(b"y" * 7), 3))
            await raw.send(frames.head(frames.DATA, frames.END_STREAM, 3, 0))
            await echo.until_ended(4)
        assert echo.heard == [1, 1, 1, 7]
        with pytest.raises(CallEndedError):
            await echo.context.write(b"late")


@in_loop
async def test_what_waits_to_be_said_ends_with_its_connection() -> None:
    """Also in a task other than the call's own."""
    saying: list[asyncio.Task[None]] = []

    async def say(_: Any, context: Any) -> None:
        saying.append(asyncio.create_task(context.write(bytes(2 * frames.WINDOW))))
        await context.read()

    async with serving(say) as (_, port), Raw(port, GREETING, opened()) as raw:
        await raw.until(frames.DATA)
        raw.socket.close()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(CallEndedError):
                await saying[0]


@in_loop
async def test_streams_that_end_as_they_begin_take_no_places() -> None:
    begun = b"".join(opened(n) + frames.reset(n, frames.Code.NO_ERROR) for n in range(1, 2 * STREAMS + 3, 2))
    last = 2 * STREAMS + 3
    async with serving(Echo()) as (_, port), Raw(port, GREETING, begun, opened(last)) as raw:
        await raw.send(data(messages.wrap(b"x"), last))
        assert await raw.until(frames.DATA) == messages.wrap(b"x")


@in_loop
async def test_who_reads_nothing_holds_nobody_up_and_little_memory() -> None:
    """Its windows are open, its socket is full: what it was to be told waits, and what it sends is not read."""
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as bystander:
        wide = frames.window_update(0, 2**30) + frames.window_update(1, 2**30)
        async with Raw(port, GREETING, opened(), wide) as raw:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            message = data(messages.wrap(bytes(10_000)))
            sending = asyncio.create_task(raw.send(message * 3000))
            while len(echo.heard) < 100:
                await said(bystander)
            heard = -1
            while heard != len(echo.heard) - 10:
                heard = len(echo.heard)
                for _ in range(10):
                    await said(bystander)
            assert served._open is not None
            for link in served._open.links.values():
                assert len(link.connection.outgoing) < 2 * HELD_BYTES
                for stream in link.connection.streams.values():
                    assert len(stream.buffer) + len(stream.pending) < 2 * frames.WINDOW
            sending.cancel()
        await said(bystander)


@in_loop
async def test_who_says_much_at_once_lets_others_have_their_turn() -> None:
    turn = 0
    read_in: Counter[int] = Counter()
    done = asyncio.Event()

    async def count(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            read_in[turn] += 1
        done.set()

    said = messages.wrap(b"") * 3000
    async with serving(count) as (_, port), Raw(port, GREETING, opened(), data(said, flags=frames.END_STREAM)):
        async with asyncio.timeout(WAIT_S):
            while not done.is_set():
                turn += 1
                await asyncio.sleep(0)
    assert read_in.total() == 3000
    assert max(read_in.values()) <= agent_call.IN_A_ROW


@in_loop
async def test_what_is_said_at_once_is_said_whole_or_not_at_all() -> None:
    async with serving(echo := Echo()) as (_, port), Raw(port, GREETING, opened(), data(messages.wrap(b"x"))) as raw:
        await raw.until(frames.DATA)
        begun = len(raw.heard)
        assert not echo.context.write_at_once(bytes(70_000))  # more than the window
        assert echo.context.write_at_once(b"short")
        async with asyncio.timeout(WAIT_S):
            while len(raw.heard) == begun:
                raw.heard += await asyncio.get_running_loop().sock_recv(raw.socket, 1000)
        assert split(raw.heard[begun:]) == [(frames.DATA, 0, 1, messages.wrap(b"short"))]
        await raw.send(frames.reset(1, frames.Code.NO_ERROR))
        await echo.until_ended()
        assert not echo.context.write_at_once(b"late")


# ---- time


@in_loop
async def test_who_says_nothing_is_asked_and_then_left() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:

        class Owner:
            def watch(self, link: Link, events: int) -> None: ...

        link = Link(ours, ("", 0), Owner())  # type: ignore[arg-type]  # the rest is not asked for
        link.connection.receive(GREETING + opened())
        for _ in range(server.QUIET_LOOKS):
            server._look_at(link)
        assert kinds(theirs.recv(1000)) == [frames.SETTINGS, frames.SETTINGS, frames.PING]
        theirs.send(frames.ping(b"drover..", answer=True))
        link.ready(1)
        assert link.quiet == 0
        for _ in range(server.QUIET_LOOKS + server.ANSWER_LOOKS):
            server._look_at(link)
        with pytest.raises(LinkLostError, match="does not answer"):
            server._look_at(link)


@in_loop
async def test_a_connection_without_a_call_is_not_kept_for_ever() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:

        class Owner:
            def watch(self, link: Link, events: int) -> None: ...

        link = Link(ours, ("", 0), Owner())  # type: ignore[arg-type]  # the rest is not asked for
        for _ in range(server.HANDSHAKE_LOOKS):
            link.quiet = 0
            server._look_at(link)
        with pytest.raises(LinkLostError, match="has left"):
            server._look_at(link)
        assert goodbye(theirs.recv(1000)) == frames.Code.NO_ERROR


@pytest.mark.parametrize("bound", ["connections", "handshakes"])
@in_loop
async def test_handshakes_that_stand_still_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths)
    agent = fleet.issue("agent", "n0")
    echo = Echo()
    monkeypatch.setattr(server, "SHAKING_MOST", 5 if bound == "handshakes" else 100)
    async with (
        serving(echo, tls, most=5 if bound == "connections" else 100) as (served, port),
        contextlib.AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(Raw(port)) for _ in range(5)]
        for one in silent[1:2] if bound == "connections" else silent:  # has begun
            one.socket.send(b"\x16\x03\x01\x02\x00\x01\x00")
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(f"localhost:{port}", agent.credentials, options) as channel:
            await said(channel.stream_stream("/echo")())
            assert await silent[0].until_closed() == b""
            assert served._shaking is not None and served._new is not None
            standing = [*served._new.links.values(), *served._shaking.links.values()]
            assert len(standing) == 4
            for link in standing:
                link.idle = server.HANDSHAKE_LOOKS
                with pytest.raises(LinkLostError):
                    server._look_at_handshake(link)
        for other in silent[1:]:
            await other.send(b"GET / HTTP/1.0\r\n\r\n" + bytes(600))
            await other.until_closed()
        # TLS, but not for HTTP/2.
        context = ssl.create_default_context(cafile=agent.ca)
        context.load_cert_chain(agent.cert, agent.key)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


@in_loop
async def test_handshakes_of_many_at_once_are_finished_beside_new_ones(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths)
    agent = fleet.issue("agent", "n0")
    context = ssl.create_default_context(cafile=agent.ca)
    context.load_cert_chain(agent.cert, agent.key)
    context.set_alpn_protocols(["h2"])
    most, count = 0, 60
    async with serving(Echo(), tls) as (served, port):
        shaking = served._shaking
        assert shaking is not None
        add = shaking.add

        def counted(link: Link) -> None:
            nonlocal most
            add(link)
            most = max(most, len(shaking.links))

        shaking.add = counted  # type: ignore[method-assign]  # to look at each beginning
        opening = (asyncio.open_connection("localhost", port, ssl=context) for _ in range(count))
        async with asyncio.timeout(WAIT_S):
            for _, writer in await asyncio.gather(*opening):
                writer.close()
    assert 0 < most <= count // 2


@in_loop
async def test_who_resets_before_its_handshake_is_worth_no_line(tmp_path: Path) -> None:
    """As scanners and health checks do: Python closes the socket then, and epoll forgets it before we do."""
    tls = ServerTls(*Fleet(tmp_path / "ca").issue("collector", "c1").paths)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    async with serving(Echo(), tls) as (_, port):
        for sent in (b"", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", port)) as hasty:
                hasty.send(sent)
                hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        async with Raw(port, b"GET / HTTP/1.0\r\n\r\n") as last:
            await last.until_closed()
    assert tls.connections["ingest.listen"] == 3
    assert complaints == []


# ---- a stop


@in_loop
async def test_a_stop_waits_for_calls_and_then_ends_them() -> None:
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as polite, calling(port) as other:
        await said(polite)
        await said(other)
        stopping = asyncio.create_task(served.stop(5))
        await said(other)  # open calls go on
        with pytest.raises(OSError):  # refused
            socket.create_connection(("127.0.0.1", port), 1)
        await polite.done_writing()
        assert await polite.code() is grpc.StatusCode.OK
        assert not stopping.done()
        other.cancel()
        await asyncio.wait_for(stopping, 4)
        assert echo.open == 0


@in_loop
async def test_a_call_that_a_stop_ends_is_told() -> None:
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as call:
        await said(call)
        await served.stop(0)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == STOPPED


# ---- addresses


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("listened", "called"),
    [("localhost", "127.0.0.1"), ("0.0.0.0", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")],
)
@in_loop
async def test_addresses_of_both_families(listened: str, called: str) -> None:
    echo = Echo()
    served = AgentServer({"/echo": echo})
    port = served.listen(listened, 0, None)
    await served.start()
    async with calling(port, host=called) as call:
        await said(call)
        assert echo.context.peer().startswith("ipv6:%5B::1%5D:" if "[" in called else "ipv4:127.0.0.1:")
        assert echo.context.auth_context() == {}
    await served.stop(0)


def test_a_peer_is_named_as_grpc_names_it() -> None:
    assert peer_name(socket.AF_INET, ("10.0.0.7", 43210)) == "ipv4:10.0.0.7:43210"
    assert peer_name(socket.AF_INET6, ("::ffff:10.0.0.7", 1, 0, 0)) == "ipv4:10.0.0.7:1"
    assert peer_name(socket.AF_INET6, ("2001:db8::1", 1, 0, 0)) == "ipv6:%5B2001:db8::1%5D:1"

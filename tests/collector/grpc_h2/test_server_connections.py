"""Connections of the server: handshakes, silence, a stop, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer, frames, server
from drover_collector.grpc_h2 import link as link_module
from drover_collector.grpc_h2.call import SHUTDOWN
from drover_collector.grpc_h2.link import Link, LinkLostError, peer_name
from testbed.certificates import Files, Fleet
from testbed.grpc_server import WAIT_S, Echo, Raw, calling, exchange, serving
from testbed.hostile_agents import HostileAgent
from testbed.http2 import GREETING, data, goodbye, kinds, opened
from testbed.loop import in_loop
from testbed.waiting import until

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
        for _ in range(server.SILENT_CHECKS):
            server._check(link)
        assert kinds(theirs.recv(1000)) == [frames.SETTINGS, frames.SETTINGS, frames.PING]
        theirs.send(frames.ping(b"drover..", answer=True))
        link.handle_events(1)
        assert link.silent_checks == 0
        for _ in range(server.SILENT_CHECKS + server.ANSWER_CHECKS):
            server._check(link)
        with pytest.raises(LinkLostError, match="does not answer"):
            server._check(link)


@in_loop
async def test_a_connection_without_a_call_is_not_kept_for_ever() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:

        class Owner:
            def watch(self, link: Link, events: int) -> None: ...

        link = Link(ours, ("", 0), Owner())  # type: ignore[arg-type]  # the rest is not asked for
        for _ in range(server.HANDSHAKE_CHECKS):
            link.silent_checks = 0
            server._check(link)
        with pytest.raises(LinkLostError, match="drained"):
            server._check(link)
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
    monkeypatch.setattr(server, "MAX_HANDSHAKES", 5 if bound == "handshakes" else 100)
    async with (
        serving(echo, tls, connections=5 if bound == "connections" else 100) as (served, port),
        contextlib.AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(Raw(port)) for _ in range(5)]
        for one in silent[1:2] if bound == "connections" else silent:  # has begun
            one.socket.send(b"\x16\x03\x01\x02\x00\x01\x00")
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(f"localhost:{port}", agent.credentials, options) as channel:
            await exchange(channel.stream_stream("/echo")())
            assert await silent[0].until_closed() == b""
            assert served._pollers.handshaking is not None and served._pollers.new is not None
            standing = [*served._pollers.new.links.values(), *served._pollers.handshaking.links.values()]
            assert len(standing) == 4
            for link in standing:
                link.idle_checks = server.HANDSHAKE_CHECKS
                with pytest.raises(LinkLostError):
                    server._check_handshake(link)
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
async def test_handshakes_of_many_at_once_are_finished_among_new_ones(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths)
    agent = fleet.issue("agent", "n0")
    context = ssl.create_default_context(cafile=agent.ca)
    context.load_cert_chain(agent.cert, agent.key)
    context.set_alpn_protocols(["h2"])
    most, count = 0, 60
    async with serving(Echo(), tls) as (served, port):
        shaking = served._pollers.handshaking
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


# ---- an end that is said


@pytest.mark.parametrize("secure", [False, True])
def test_why_a_connection_ended_is_read_though_the_peer_had_sent_more(tmp_path: Path, secure: bool) -> None:
    """A socket that is closed with unread data is reset, and the peer may lose the GOAWAY before that."""
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths) if secure else None
    agent = fleet.issue("agent", "n0") if secure else None

    async def scenario() -> None:
        async with serving(Echo(), tls) as (served, port):

            def attack() -> HostileAgent:
                hostile = HostileAgent(f"127.0.0.1:{port}", agent)
                hostile.send(frames.settings({frames.MAX_FRAME_SIZE: 1}) + data(bytes(16_000)) * 16)
                hostile.until(lambda: False)
                return hostile

            hostile = await asyncio.to_thread(attack)
            assert hostile.goaway == frames.Code.PROTOCOL_ERROR
            assert not hostile.is_reset(), "what the network loses of the GOAWAY is never sent again"
            hostile.close()
            lingering = served._pollers.lingering
            await until(lambda: lingering is not None and not lingering.links)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["goes on", "stays"])
@in_loop
async def test_a_peer_that_stays_after_its_goaway_is_closed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(server, "LINGER_S", 100.0 if how == "goes on" else 0.05)
    monkeypatch.setattr(link_module, "LINGER_BYTES", 100_000)
    async with serving(Echo()) as (served, port), Raw(port, b"no HTTP/2" + bytes(100)) as raw:
        assert goodbye(await raw.until_closed()) == frames.Code.PROTOCOL_ERROR
        lingering = served._pollers.lingering
        assert lingering is not None
        if how == "goes on":
            with contextlib.suppress(ConnectionError):
                while lingering.links:
                    await raw.send(bytes(10_000))
        await until(lambda: not lingering.links)


# ---- connections of one certificate


@in_loop
async def test_a_certificate_has_so_many_connections_and_its_agent_is_never_locked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that its network has cut make room, then the newest: not the one at work."""
    fleet = Fleet(tmp_path / "ca")
    tls = ServerTls(*fleet.issue("collector", "c1").paths)
    agent, other = fleet.issue("agent", "n0"), fleet.issue("agent", "n1")

    async with (
        serving(Echo(), tls, connections_per_certificate=3) as (served, port),
        contextlib.AsyncExitStack() as stack,
    ):
        assert served._pollers.open is not None
        links = served._pollers.open.links

        async def connect(files: Files) -> Link:
            before = set(links.values())
            options = (("grpc.use_local_subchannel_pool", 1),)
            channel = grpc.aio.secure_channel(f"localhost:{port}", files.credentials, options)
            call = (await stack.enter_async_context(channel)).stream_stream("/echo")()
            await exchange(call)
            (fresh,) = set(links.values()) - before
            return fresh

        bystander = await connect(other)
        at_work, cut, newest = [await connect(agent) for _ in range(3)]
        cut.silent_checks = server.STALE_CHECKS
        fourth = await connect(agent)
        assert set(links.values()) == {bystander, at_work, newest, fourth}
        fifth = await connect(agent)
        assert set(links.values()) == {bystander, at_work, newest, fifth}
        share = at_work.connection.certificate_budget
        assert share is not None and share is fifth.connection.certificate_budget
        assert bystander.connection.certificate_budget is not share
    assert not served._certificates._links
    served._certificates.refill()
    assert not served._certificates._budgets


# ---- a stop


@in_loop
async def test_a_stop_waits_for_calls_and_then_ends_them() -> None:
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as polite, calling(port) as other:
        await exchange(polite)
        await exchange(other)
        stopping = asyncio.create_task(served.stop(5))
        await exchange(other)  # open calls go on
        with pytest.raises(OSError):  # refused
            socket.create_connection(("127.0.0.1", port), 1)
        await polite.done_writing()
        assert await polite.code() is grpc.StatusCode.OK
        assert not stopping.done()
        other.cancel()
        await asyncio.wait_for(stopping, 4)
        assert echo.open == 0


@in_loop
async def test_a_call_that_a_stop_ends_gets_a_status() -> None:
    echo = Echo()
    async with serving(echo) as (served, port), calling(port) as call:
        await exchange(call)
        await served.stop(0)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == SHUTDOWN


# ---- addresses


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("listened", "called"),
    [("localhost", "127.0.0.1"), ("0.0.0.0", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")],
)
@in_loop
async def test_addresses_of_both_families(listened: str, called: str) -> None:
    echo = Echo()
    served = GrpcServer({"/echo": echo})
    port = served.listen(listened, 0, None)
    await served.start()
    async with calling(port, host=called) as call:
        await exchange(call)
        assert echo.context.peer().startswith("ipv6:%5B::1%5D:" if "[" in called else "ipv4:127.0.0.1:")
        assert echo.context.auth_context() == {}
    await served.stop(0)


def test_a_peer_is_named_as_grpc_names_it() -> None:
    assert peer_name(socket.AF_INET, ("10.0.0.7", 43210)) == "ipv4:10.0.0.7:43210"
    assert peer_name(socket.AF_INET6, ("::ffff:10.0.0.7", 1, 0, 0)) == "ipv4:10.0.0.7:1"
    assert peer_name(socket.AF_INET6, ("2001:db8::1", 1, 0, 0)) == "ipv6:%5B2001:db8::1%5D:1"

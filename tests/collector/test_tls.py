"""The collector's TLS and its gate, with real gRPC: renewal under open streams, and what each wrong peer gets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from drover_collector.agent_server import AgentServer
from drover_collector.gate import OPERATORS, ROLES, Gate, may_force
from drover_collector.identity import Denied, Role
from drover_collector.tls import ServerTls
from drover_proto import fleet_pb2, telemetry_pb2, x509
from drover_proto.settings import SettingsError
from testbed.certificates import Files, Fleet

STREAM = "/drover.telemetry.v1.Telemetry/Stream"
STATUS = "/drover.fleet.v1.Fleet/GetStatus"
EXPORT = "/drover.fleet.v1.Fleet/Export"
WAIT_S = 20


def methods() -> dict[str, Any]:
    """Path -> descriptor of every method of both services."""
    services = [telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"], fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


class Server:
    """Every method of both services behind the gate; each answers with what it was asked."""

    def __init__(self, files: Files, **gate: Any) -> None:
        self.tls = ServerTls(*files.paths)
        self.gate = Gate(secure=True, **gate)
        self.ended, self.answering = asyncio.Event(), asyncio.Event()
        self.forced: list[bool] = []  # of each unary call: whether it might have been by force

    async def __aenter__(self) -> Server:
        self.server = grpc.aio.server(interceptors=(self.gate,))
        self.agents = AgentServer({STREAM: self.gate.guarded(STREAM, self._stream)})
        self.agents_port = self.agents.listen("localhost", 0, self.tls.contexts("ingest.listen"))
        await self.agents.start()
        by_service: dict[str, dict[str, Any]] = {}
        for path, method in methods().items():
            if path == STREAM:
                continue
            _, service, name = path.split("/")
            by_service.setdefault(service, {})[name] = self._handler(method)
        for service, handlers in by_service.items():
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.port = self.server.add_secure_port("localhost:0", self.tls.credentials("api.listen"))
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        await self.agents.stop(0)

    async def _stream(self, _: Any, context: Any) -> None:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)
        finally:
            self.ended.set()

    def _handler(self, method: Any) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            self.forced.append(may_force())
            return request

        async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
            self.answering.set()
            yield request
            await asyncio.Event().wait()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(generate)
        return grpc.unary_unary_rpc_method_handler(unary)

    def channel(
        self, files: Files | None, credentials: grpc.ChannelCredentials | None = None, path: str = STATUS
    ) -> Any:
        options = (("grpc.use_local_subchannel_pool", 1),)
        chosen = credentials or (files.credentials if files else None)
        target = f"localhost:{self.agents_port if path == STREAM else self.port}"
        return (
            grpc.aio.secure_channel(target, chosen, options) if chosen else grpc.aio.insecure_channel(target, options)
        )

    async def ask(self, path: str, files: Files | None, credentials: grpc.ChannelCredentials | None = None) -> str:
        """ "" when a call is answered, else `CODE: details`."""
        method = methods()[path]
        async with self.channel(files, credentials, path) as channel:
            try:
                if method.client_streaming:
                    call = channel.stream_stream(path)()
                    await call.write(b"x")  # also who is refused gets so far
                    answer = await asyncio.wait_for(call.read(), WAIT_S)
                elif method.server_streaming:
                    answer = await asyncio.wait_for(channel.unary_stream(path)(b"x").read(), WAIT_S)
                else:
                    answer = await channel.unary_unary(path)(b"x", timeout=WAIT_S)
                if answer == b"x":
                    return ""
                return f"{(await call.code()).name}: {await call.details()}"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"

    async def certificate(self) -> int:
        """Serial number of what a new connection is shown, by both servers."""

        def look(port: int) -> int:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection(("localhost", port), WAIT_S) as plain,
                context.wrap_socket(plain) as secure,
            ):
                return x509.parse(secure.getpeercert(True) or b"").serial

        found = {await asyncio.to_thread(look, port) for port in (self.port, self.agents_port)}
        assert len(found) == 1
        return found.pop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def collector(fleet: Fleet) -> Files:
    return fleet.issue("collector", "c1")


# ---- roles


def test_every_method_has_roles() -> None:
    assert set(methods()) == set(ROLES)
    assert ROLES["/drover.fleet.v1.Fleet/Backup"] == OPERATORS
    assert {role for roles in ROLES.values() for role in roles} == set(Role)


async def _who_may_what(fleet: Fleet, collector: Files) -> None:
    peers = {role: fleet.issue(role, "n0") for role in Role}
    async with Server(collector) as server:
        for path, allowed in ROLES.items():
            for role, files in peers.items():
                answer = await server.ask(path, files)
                if role in allowed:
                    assert answer == "", (path, role)
                else:
                    assert answer.startswith(f"PERMISSION_DENIED: the certificate is for drover://{role}/n0"), path
                    assert "; this needs one with a name drover://" in answer
        assert server.gate.refused == {"wrong role": len(ROLES) * len(Role) - sum(map(len, ROLES.values()))}
        assert server.gate.calls["drover.telemetry.v1.Telemetry"] == 1


def test_who_may_what(fleet: Fleet, collector: Files) -> None:
    asyncio.run(_who_may_what(fleet, collector))


def test_a_viewer_gets_no_drain(fleet: Fleet, collector: Files) -> None:
    """Nor anything else that changes something; an agent does not even get to read."""
    acting = ("ActOnNode", "ApproveDecision", "RejectDecision", "RequestProbe", "CreateSilence", "EndSilence", "Backup")

    async def scenario() -> None:
        viewer, agent = fleet.issue("viewer", "ann"), fleet.issue("agent", "n0")
        async with Server(collector) as server:
            for name in acting:
                answer = await server.ask(f"/drover.fleet.v1.Fleet/{name}", viewer)
                assert answer.startswith("PERMISSION_DENIED: the certificate is for drover://viewer/ann"), name
            assert (await server.ask(STATUS, agent)).startswith("PERMISSION_DENIED")
            assert server.gate.refused == {"wrong role": len(acting) + 1}

    asyncio.run(scenario())
    assert {path for path, roles in ROLES.items() if roles == OPERATORS} == {
        f"/drover.fleet.v1.Fleet/{name}" for name in acting
    }


@pytest.mark.parametrize(("role", "forces"), [("operator", False), ("admin", True)])
def test_only_an_admin_acts_past_the_guard(fleet: Fleet, collector: Files, role: str, forces: bool) -> None:
    """What `ActOnNode` asks from within the call; that it then refuses: tests/collector/test_api_silences.py."""

    async def scenario() -> None:
        async with Server(collector) as server:
            assert await server.ask("/drover.fleet.v1.Fleet/ActOnNode", fleet.issue(role, "alex")) == ""
            assert server.forced == [forces]

    asyncio.run(scenario())


def test_a_method_without_roles_is_refused(fleet: Fleet, collector: Files) -> None:
    async def scenario() -> None:
        without = {path: roles for path, roles in ROLES.items() if path not in (STATUS, EXPORT, STREAM)}
        async with Server(collector, roles=without) as server:
            for path, role in ((STATUS, "operator"), (EXPORT, "operator"), (STREAM, "agent")):
                answer = await server.ask(path, fleet.issue(role, "n0"))
                assert answer == f"PERMISSION_DENIED: {path}: no role may call this"

    asyncio.run(scenario())


# ---- what each wrong peer gets


@pytest.mark.parametrize(
    ("path", "role", "listener"), [(STATUS, "viewer", "api.listen"), (STREAM, "agent", "ingest.listen")]
)
def test_what_each_wrong_peer_gets(
    fleet: Fleet, collector: Files, tmp_path: Path, path: str, role: str, listener: str
) -> None:
    async def scenario() -> None:
        other = Fleet(tmp_path / "other", "other-ca")
        good = fleet.issue(role, "console")
        ca = fleet.ca.read_bytes()
        async with Server(collector) as server:

            async def explained(files: Files | None, credentials: grpc.ChannelCredentials | None = None) -> str:
                answer = await server.ask(path, files, credentials)
                return x509.explain(answer, [], "ca.pem", "cert.pem")

            assert await explained(good) == ""
            # In the handshake: gRPC tells the collector nothing of it, but it counts.
            before = server.tls.connections[listener]
            assert "is cert.pem of the authority" in await explained(None, grpc.ssl_channel_credentials(ca))
            stranger = other.issue(role, "console")
            mixed = grpc.ssl_channel_credentials(ca, stranger.key.read_bytes(), stranger.cert.read_bytes())
            assert "is cert.pem of the authority" in await explained(None, mixed)
            ended = fleet.issue(role, "console", ends_in=timedelta(days=-1))
            assert "is cert.pem of the authority" in await explained(ended)
            assert (await server.ask(path, None)).startswith("UNAVAILABLE")
            assert server.tls.connections[listener] >= before + 4
            assert server.gate.calls[path.split("/")[1]] == 1
            # After it: by the gate, with words for both sides.
            for uris, says in (
                ([], "has no URI name"),
                (["drover://viewer/a", "drover://operator/a"], "has 2 URI names"),
                (["drover://root/a"], "'drover://root/a' is not drover://agent/NODE"),
            ):
                assert says in await server.ask(path, fleet.odd(uris))
            assert server.gate.refused["no identity"] == 3
            # The client looks too.
            assert "is of another authority than ca.pem" in await explained(stranger)
        async with Server(fleet.issue("collector", "c1", ends_in=timedelta(days=-1))) as server:
            answer = x509.explain(await server.ask(path, good), [], "ca.pem", "cert.pem")
            assert "the other side's certificate, or its authority's, has ended" in answer
        # An agent's key, stolen, plays no collector.
        async with Server(fleet.issue("agent", "n0")) as server:
            assert (await server.ask(path, good)).startswith("UNAVAILABLE")
        # Nor does a collector's key read.
        async with Server(collector) as server:
            assert await server.ask(path, collector) != ""

    asyncio.run(scenario())


def test_tls_1_2_is_taken(fleet: Fleet, collector: Files) -> None:
    client = fleet.issue("viewer", "console")

    def handshake(port: int, version: ssl.TLSVersion) -> str:
        context = ssl.create_default_context(cafile=client.ca)
        context.load_cert_chain(client.cert, client.key)
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(("localhost", port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            return str(secure.version())

    async def scenario() -> None:
        async with Server(collector) as server:
            for port in (server.port, server.agents_port):
                assert await asyncio.to_thread(handshake, port, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"

    asyncio.run(scenario())


# ---- renewal


@contextlib.asynccontextmanager
async def open_stream(server: Server, files: Files) -> AsyncIterator[Any]:
    async with server.channel(files, path=STREAM) as channel:
        call = channel.stream_stream(STREAM)()
        await echo(call)
        yield call


async def echo(call: Any) -> None:
    await call.write(b"x")
    assert await asyncio.wait_for(call.read(), WAIT_S) == b"x"


def test_a_renewed_certificate_is_for_new_connections_and_streams_go_on(fleet: Fleet, collector: Files) -> None:
    async def scenario() -> None:
        agent, newer = fleet.issue("agent", "n0"), fleet.issue("collector", "c1")
        async with Server(collector) as server, open_stream(server, agent) as call:
            assert await server.certificate() == collector.serial
            # Half a renewal: the key is there, its certificate not yet.
            collector.key.write_bytes(newer.key.read_bytes())
            assert await server.certificate() == collector.serial
            assert await server.ask(STREAM, fleet.issue("agent", "n1")) == ""
            assert [line for line in server.tls.troubles() if "does not belong to" in line]
            collector.cert.write_bytes(newer.cert.read_bytes()[:200])
            assert [line for line in server.tls.troubles() if "holds no CERTIFICATE" in line]
            assert await server.certificate() == collector.serial
            collector.cert.write_bytes(newer.cert.read_bytes())
            assert await server.certificate() == newer.serial
            assert server.tls.troubles() == []
            assert await server.ask(STREAM, fleet.issue("agent", "n1")) == ""
            await echo(call)
            collector.cert.unlink()
            assert [line for line in server.tls.troubles() if "No such file" in line]
            assert await server.ask(STREAM, fleet.issue("agent", "n1")) == ""
            await echo(call)

    asyncio.run(scenario())


def test_a_renewed_authority_is_for_new_connections(fleet: Fleet, collector: Files, tmp_path: Path) -> None:
    async def scenario() -> None:
        ca = tmp_path / "ca.pem"
        ca.write_bytes(fleet.ca.read_bytes())
        other = Fleet(tmp_path / "other", "other-ca")
        agent, moved = fleet.issue("agent", "n0"), other.issue("agent", "n0")
        mixed = grpc.ssl_channel_credentials(
            fleet.ca.read_bytes() + other.ca.read_bytes(), moved.key.read_bytes(), moved.cert.read_bytes()
        )
        async with (
            Server(Files(ca, collector.cert, collector.key, collector.issued)) as server,
            open_stream(server, agent) as call,
        ):
            assert await server.ask(STREAM, None, mixed) != ""
            ca.write_bytes(fleet.ca.read_bytes() + other.ca.read_bytes())
            assert await server.ask(STREAM, None, mixed) == ""
            assert await server.ask(STREAM, agent) == ""
            ca.write_bytes(other.ca.read_bytes())
            assert await server.ask(STREAM, agent) != ""
            assert await server.ask(STREAM, None, mixed) == ""
            await echo(call)

    asyncio.run(scenario())


def test_files_that_cannot_be_used_at_a_start(fleet: Fleet, collector: Files) -> None:
    other = fleet.issue("collector", "c2")
    with pytest.raises(SettingsError, match="does not belong to"):
        ServerTls(collector.ca, collector.cert, other.key)
    with pytest.raises(SettingsError, match="holds no PRIVATE KEY"):
        ServerTls(collector.ca, collector.cert, collector.cert)
    key = serialization.load_pem_private_key(other.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    other.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(SettingsError, match="is encrypted"):
        ServerTls(*other.paths)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666, 0o602])
def test_a_key_that_every_user_can_read_is_refused(fleet: Fleet, mode: int) -> None:
    files = fleet.issue("collector", "c1")
    files.key.chmod(mode)
    says = f"tls.key: {files.key} is open to every user of this machine; chmod o= {files.key}"
    with pytest.raises(SettingsError) as raised:
        ServerTls(*files.paths)
    assert says in str(raised.value)
    with pytest.raises(x509.CertificateError, match="is open to every user"):  # what agent, console and drover read by
        x509.read(*files.paths)
    files.key.chmod(0o640)
    assert ServerTls(*files.paths).own.serial == files.serial


def test_an_end_that_is_near_or_past_is_told(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    near = ServerTls(*fleet.issue("collector", "c1", ends_in=timedelta(days=5, hours=1)).paths)
    (line,) = near.troubles()
    assert "ends in 5 days, at " in line
    assert "drover certs renew" in line
    files = fleet.issue("collector", "c1", ends_in=timedelta(days=-2))
    (line,) = ServerTls(*files.paths).troubles()
    assert f"the certificate in {files.cert} ended at 20" in line
    assert line in caplog.text
    assert ServerTls(*fleet.issue("collector", "c1").paths).troubles() == []


# ---- open streams


def deny(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def denied(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "denied"
    path.write_text("")
    yield path


def test_open_streams_of_both_services_end_when_denied(fleet: Fleet, collector: Files, denied: Path) -> None:
    async def scenario() -> None:
        agent, viewer, other = fleet.issue("agent", "n0"), fleet.issue("viewer", "wall"), fleet.issue("agent", "n1")
        async with (
            Server(collector, denied=Denied(denied)) as server,
            open_stream(server, agent) as stream,
            open_stream(server, other) as bystander,
            server.channel(viewer) as channel,
        ):
            export = channel.unary_stream(EXPORT)(b"x")
            assert await export.read() == b"x"
            server.gate.look()
            await echo(stream)
            deny(denied, f"{agent.serial:X}  # n0\n{viewer.serial:x}\n")
            server.gate.look()
            for call, files in ((stream, agent), (export, viewer)):
                assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.PERMISSION_DENIED
                assert f"with serial {files.serial:X} is denied" in (await call.details() or "")
            await asyncio.wait_for(server.ended.wait(), WAIT_S)
            assert "is denied" in await server.ask(STATUS, viewer)
            await echo(bystander)
            # A broken list leaves the last good one in force.
            deny(denied, "not a number\n")
            server.gate.look()
            assert "is denied" in await server.ask(STATUS, viewer)
            await echo(bystander)
            assert any("line 1: 'not a number'" in line for line in server.gate.troubles())
            deny(denied, "")
            assert await server.ask(STATUS, viewer) == ""
            assert server.gate.troubles() == []

    asyncio.run(scenario())


def test_who_is_denied_while_an_answer_is_on_its_way_hears_it(fleet: Fleet, collector: Files, denied: Path) -> None:
    async def scenario() -> None:
        viewer = fleet.issue("viewer", "wall")
        async with Server(collector, denied=Denied(denied)) as server, server.channel(viewer) as channel:
            server.gate.look()
            export = channel.unary_stream(EXPORT)(b"x" * (3 << 20))  # more than leaves before it is read
            await server.answering.wait()
            await asyncio.sleep(0)  # the answer is handed on
            deny(denied, f"{viewer.serial:X}\n")
            server.gate.look()
            while await asyncio.wait_for(export.read(), WAIT_S) is not grpc.aio.EOF:
                pass

    with pytest.raises(grpc.aio.AioRpcError, match="is denied"):
        asyncio.run(scenario())


def test_an_open_stream_ends_with_its_certificate_which_is_told_days_before(fleet: Fleet, collector: Files) -> None:
    async def scenario() -> None:
        agent, other = fleet.issue("agent", "n0", ends_in=timedelta(days=20)), fleet.issue("agent", "n1")
        begin = x509.parse_pem(agent.cert.read_bytes())[0].ends_s - 20 * x509.DAY_S
        now = [begin]
        async with (
            Server(collector, now_s=lambda: now[0]) as server,
            open_stream(server, agent) as call,
            open_stream(server, other) as bystander,
        ):
            server.gate.look()
            assert server.gate.troubles() == []
            now[0] = begin + 7 * x509.DAY_S
            server.gate.look()
            (line,) = server.gate.troubles()
            assert "drover://agent/n0 at 20" in line
            assert "n1" not in line
            await echo(call)
            now[0] = begin + 20 * x509.DAY_S + 1
            server.gate.look()
            assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.PERMISSION_DENIED
            assert (await call.details()).startswith("the certificate of drover://agent/n0 ended at 20")
            await echo(bystander)
            # It has come back with a new one: nothing is left to tell.
            assert server.gate.troubles() != []
            assert await server.ask(STREAM, fleet.issue("agent", "n0", ends_in=timedelta(days=90))) == ""
            assert server.gate.troubles() == []

    asyncio.run(scenario())


def test_calls_that_end_by_themselves_are_forgotten(fleet: Fleet, collector: Files) -> None:
    async def scenario() -> None:
        async with Server(collector) as server:
            async with open_stream(server, fleet.issue("agent", "n0")):
                assert len(server.gate._open) == 1
            await asyncio.wait_for(server.ended.wait(), WAIT_S)
            assert await server.ask(STATUS, fleet.issue("viewer", "n0")) == ""
            assert not server.gate._open

    asyncio.run(scenario())

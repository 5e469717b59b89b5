"""The collector's TLS and its gate, with real gRPC: renewal under open streams, and what each wrong peer gets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from drover_collector.auth.authorization import OPERATORS, OTLP_EXPORT, ROLES
from drover_collector.auth.identity import Role
from drover_collector.auth.tls import ServerTls
from drover_core import x509
from drover_core.settings import SettingsError
from testbed.certificates import Files, Fleet
from testbed.other_authorities import OtherAuthority
from testbed.tls_server import EXPORT, STATUS, STREAM, WAIT_S, Server, echo, methods, open_stream


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
    assert {path for path, roles in ROLES.items() if Role.WRITER in roles} == {OTLP_EXPORT}
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
    acting = (
        "ActOnNode",
        "ApproveDecision",
        "RejectDecision",
        "RequestProbe",
        "CreateSilence",
        "EndSilence",
        "ReportMaintenance",
        "AdoptNode",
        "NoteIncident",
        "Backup",
    )

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
    """What `ActOnNode` asks from within the call; that it then refuses: tests/collector/api/test_api_silences.py."""

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
                return x509.explain_failure(answer, [], "ca.pem", "cert.pem")

            assert await explained(good) == ""
            # In the handshake: gRPC reports nothing of it to the collector, but it counts.
            before = server.tls.connections[listener]
            assert "the authority of cert.pem" in await explained(None, grpc.ssl_channel_credentials(ca))
            stranger = other.issue(role, "console")
            mixed = grpc.ssl_channel_credentials(ca, stranger.key.read_bytes(), stranger.cert.read_bytes())
            assert "the authority of cert.pem" in await explained(None, mixed)
            ended = fleet.issue(role, "console", ends_in=timedelta(days=-1))
            assert "the authority of cert.pem" in await explained(ended)
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
            assert "is signed by another authority than ca.pem" in await explained(stranger)
        async with Server(fleet.issue("collector", "c1", ends_in=timedelta(days=-1))) as server:
            answer = x509.explain_failure(await server.ask(path, good), [], "ca.pem", "cert.pem")
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
        x509.read_files(*files.paths)
    files.key.chmod(0o640)
    assert ServerTls(*files.paths).own.serial == files.serial


def test_an_end_that_is_near_or_past_is_reported(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    near = ServerTls(*fleet.issue("collector", "c1", ends_in=timedelta(days=5, hours=1)).paths)
    (line,) = near.troubles()
    assert "ends in 5 days, at " in line
    assert "drover certs renew" in line
    files = fleet.issue("collector", "c1", ends_in=timedelta(days=-2))
    (line,) = ServerTls(*files.paths).troubles()
    assert f"the certificate in {files.cert} ended at 20" in line
    assert line in caplog.text
    assert ServerTls(*fleet.issue("collector", "c1").paths).troubles() == []


# ---- authorities other than `drover certs`


@pytest.mark.parametrize("kind", ["step-ca", "cert-manager"])
def test_certificates_of_another_authority_have_the_roles_of_their_uri(tmp_path: Path, kind: str) -> None:
    """With an intermediate, both usages, further names, or without a subject, as docs/how-to/tls.md asks for them."""
    step = kind == "step-ca"
    authority = OtherAuthority(tmp_path / "ca", intermediate=step)
    collector = authority.issue("collector.example" if step else "", hosts=("localhost", "127.0.0.1"))
    agent = authority.issue("n0" if step else "", uris=("drover://agent/n0",))
    operator = authority.issue("alex" if step else "", uris=("drover://operator/alex", "spiffe://example/alex"))
    nobody = authority.issue("n0", hosts=("n0",))
    stranger = OtherAuthority(tmp_path / "other", intermediate=step).issue("n0", uris=("drover://agent/n0",))

    async def scenario() -> None:
        async with Server(collector) as server:
            assert await server.ask(STREAM, agent) == ""
            assert await server.ask(STATUS, operator) == ""
            assert "the certificate is for drover://agent/n0" in await server.ask(STATUS, agent)
            assert "no URI name drover://ROLE/NAME" in await server.ask(STREAM, nobody)
            assert "UNAVAILABLE" in await server.ask(STREAM, stranger)
            # The agent's certificate has the server's usage too, but no host name: no client takes it for a collector.
            async with Server(agent) as false_collector:
                assert "UNAVAILABLE" in await false_collector.ask(STREAM, agent)

    asyncio.run(scenario())

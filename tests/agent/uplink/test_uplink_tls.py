"""The uplink over mutual TLS: renewal, wrong certificates, slow handshakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from drover_agent.config import AgentConfig, TlsConfig
from drover_agent.runtime.agent import Agent
from drover_agent.uplink import stream as uplink
from drover_agent.uplink.tls import ClientTls
from drover_proto import telemetry_pb2 as pb
from testbed.certificates import Files, Fleet
from testbed.telemetry_server import TelemetryServer, play
from testbed.uplinks import now_ms, power, running, settings, xid
from testbed.waiting import until


def tls_server(files: Files) -> grpc.ServerCredentials:
    pair = files.key.read_bytes(), files.cert.read_bytes()
    return grpc.ssl_server_credentials([pair], files.ca.read_bytes(), True)


def with_tls(config: AgentConfig, files: Files) -> AgentConfig:
    return replace(config, tls=TlsConfig(*map(str, files.paths)))


def test_mutual_tls(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "ca")

    async def scenario() -> None:
        server = TelemetryServer()
        plain = settings(tmp_path, await server.start(credentials=tls_server(fleet.issue("collector", "c1"))))
        async with running(Agent(with_tls(plain, fleet.issue("agent", "n1")), "n1")) as agent:
            agent.accept(now_ms(), xid("79"))
            await until(lambda: "79" in server.codes())

    play(scenario())


def test_a_renewed_certificate_is_taken_without_losing_or_resending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("drover_agent.uplink.stream.RENEWAL_CHECK_S", 0.01)
    caplog.set_level("INFO")
    fleet = Fleet(tmp_path / "ca")
    files, newer = fleet.issue("agent", "n1"), fleet.issue("agent", "n1")

    async def scenario() -> None:
        server = TelemetryServer()
        plain = settings(tmp_path, await server.start(credentials=tls_server(fleet.issue("collector", "c1"))))
        async with running(Agent(with_tls(plain, files), "n1")) as agent:
            start, count = now_ms(), 0

            async def feed(enough: Callable[[], object]) -> None:
                nonlocal count
                deadline = time.monotonic() + 300
                while not enough():
                    assert time.monotonic() < deadline
                    agent.accept(*power(start + count))
                    agent.flush()
                    count += 1
                    await asyncio.sleep(0)

            await feed(lambda: len(server.rows) > 50)
            # Half a renewal ends no stream.
            files.key.write_bytes(newer.key.read_bytes())
            await feed(lambda: "does not belong to" in caplog.text)
            more = len(server.rows) + 50
            await feed(lambda: len(server.rows) > more)
            assert server.streams == 1
            files.cert.write_bytes(newer.cert.read_bytes())
            await feed(lambda: server.streams == 2)
            more = len(server.rows) + 50
            await feed(lambda: len(server.rows) > more)
            await until(lambda: len(server.rows) == 2 * count, "all rows")
            await until(lambda: agent.spool.pending()[0] == 0, "all acknowledged")
        assert server.streams == 2
        assert server.repeated_rows == 0
        assert len(server.order) == len(set(server.order))
        assert "no collector" not in caplog.text

    play(scenario())


def test_a_renewal_waits_for_the_acks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_agent.uplink.stream.RENEWAL_CHECK_S", 0.01)
    fleet = Fleet(tmp_path / "ca")
    files = fleet.issue("agent", "n1")
    seen: list[bool] = []
    renewed = ClientTls.renewed

    def spy(tls: ClientTls) -> bool:
        seen.append(renewed(tls))
        return seen[-1]

    monkeypatch.setattr(ClientTls, "renewed", spy)

    async def scenario() -> None:
        server = TelemetryServer(acks=False)
        plain = settings(tmp_path, await server.start(credentials=tls_server(fleet.issue("collector", "c1"))))
        async with running(Agent(with_tls(plain, files), "n1")) as agent:
            agent.accept(now_ms(), xid("79"))
            await until(lambda: server.order, "it is sent")
            files.renew_from(fleet.issue("agent", "n1"))
            sent = 0
            while True not in seen:
                sent += 1
                agent.accept(*power(now_ms() + sent))
                agent.flush()
                await asyncio.sleep(0.001)
            for _ in range(50):  # a stream that were ended now would send the event again on the next
                agent.accept(now_ms(), xid("31"))
                await asyncio.sleep(0.01)
            assert server.streams == 1
            assert len(server.order) == len(set(server.order))

    play(scenario())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("own ended", "tls.cert: the certificate in {} ended at 20"),
        ("collector ended", "the other side's certificate, or its authority's, has ended"),
        ("other authority", "the other side's certificate is signed by another authority than"),
        ("plain collector", "the other side does not use TLS"),
        ("pair", "does not belong to"),
    ],
)
def test_a_wrong_certificate_is_one_clear_line_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, says: str
) -> None:
    fleet = Fleet(tmp_path / "ca")
    good, past = fleet.issue("agent", "n1"), timedelta(days=-2)
    files = fleet.issue("agent", "n1", ends_in=past) if wrong == "own ended" else fleet.issue("agent", "n1")
    served = (
        fleet.issue("collector", "c1", ends_in=past) if wrong == "collector ended" else fleet.issue("collector", "c")
    )
    if wrong == "other authority":
        served = Fleet(tmp_path / "other", "other-ca").issue("collector", "c1")
    if wrong == "pair":
        files.key.write_bytes(good.key.read_bytes())

    async def scenario() -> None:
        server = TelemetryServer()
        credentials = None if wrong == "plain collector" else tls_server(served)
        config = with_tls(settings(tmp_path, await server.start(credentials=credentials)), files)
        async with running(Agent(config, "n1")) as agent:
            agent.accept(now_ms(), xid("79"))
            await until(lambda: "No connection to a collector" in caplog.text)
            if wrong in ("own ended", "pair"):
                files.renew_from(good)
                await until(lambda: "79" in server.codes(), "the event comes with the renewed certificate")

    play(scenario())
    lines = [record.getMessage() for record in caplog.records if "No connection to a collector" in record.getMessage()]
    assert says.format(files.cert) in lines[0], lines
    assert "\n" not in lines[0]


def test_a_handshake_may_take_as_long_as_the_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents come at once after a restart of the collector; one that gave up would cost it another handshake."""
    monkeypatch.setattr(uplink, "ANSWER_LIMIT_S", 0.005)  # of writes

    class Slow:
        """A call that waits for its connection, as gRPC's do."""

        async def wait_for_connection(self) -> None:
            await asyncio.sleep(0.01)

        async def write(self, _message: pb.AgentMessage) -> None:
            pass

        async def read(self) -> pb.CollectorMessage:
            return pb.CollectorMessage(welcome=pb.Welcome(protocol=1, ts_ms=now_ms()))

    async def scenario() -> None:
        agent = Agent(settings(tmp_path, "127.0.0.1:1"), "n1")
        assert (await agent._uplink._greet(Slow(), "there", 60.0)).protocol == 1

    asyncio.run(scenario())

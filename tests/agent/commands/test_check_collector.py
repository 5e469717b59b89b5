"""`drover-agent check`: the way to a collector, over real sockets and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_agent.commands.check import collector as check_collector
from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.config import AgentConfig, TlsConfig
from drover_collector.auth.authorization import Gate
from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer
from drover_proto import telemetry_pb2 as pb
from testbed.certificates import Files, Fleet
from testbed.telemetry_server import TelemetryServer
from testbed.tls_server import STREAM


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("ca"))


def config_of(files: Files | None, address: str = "127.0.0.1:1", node: str = "n1") -> AgentConfig:
    tls = TlsConfig(*map(str, files.paths)) if files else TlsConfig()
    return AgentConfig(node=node, collectors=(address,), tls=tls)


async def welcome(_: Any, context: Any) -> None:
    """A Telemetry service that knows nobody's data."""

    async def requests() -> AsyncIterator[pb.AgentMessage]:
        while (message := await context.read()) is not grpc.aio.EOF:
            yield pb.AgentMessage.FromString(message)

    async for answer in TelemetryServer().Stream(requests(), context):
        await context.write(answer.SerializeToString())


@contextlib.asynccontextmanager
async def collector(files: Files | None) -> AsyncIterator[str]:
    """That service behind the collector's own gate, on its own server for agents."""
    server = GrpcServer({STREAM: Gate(secure=files is not None).guarded(STREAM, welcome)})
    port = server.listen("localhost", 0, ServerTls(*files.paths).contexts("ingest.listen") if files else None)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)


def ask(server: Files | None, client: Files | None) -> CheckResult:
    async def scenario() -> CheckResult:
        async with collector(server) as address:
            [line] = await asyncio.to_thread(check_collector.collector, config_of(client, address), address)
            return line

    return asyncio.run(scenario())


def test_a_collector_that_takes_this_agent(fleet: Fleet) -> None:
    line = ask(fleet.issue("collector", "c1"), fleet.issue("agent", "n1"))
    assert line.state is CheckState.OK, line
    assert "certificate until" in line.text
    assert line.text.endswith("takes agents")


def test_plain_connections_are_tried_too() -> None:
    assert ask(None, None).state is CheckState.OK


def test_a_collector_whose_certificate_ends_soon(fleet: Fleet) -> None:
    line = ask(fleet.issue("collector", "c1", ends_in=timedelta(days=3)), fleet.issue("agent", "n1"))
    assert line.state is CheckState.LIMITED
    assert "drover certs renew" in line.remedy


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("other role", "drover://viewer/n1"),
        ("other authority", "is signed by another authority"),
        ("no certificate", "does it want certificates?"),
        ("plain server", "does not use TLS"),
        ("ended", "has ended"),
    ],
)
def test_each_way_to_be_refused_has_its_words(fleet: Fleet, tmp_path: Path, case: str, text: str) -> None:
    server: Files | None = fleet.issue("collector", "c1")
    client: Files | None = fleet.issue("agent", "n1")
    if case == "other role":
        client = fleet.issue("viewer", "n1")
    elif case == "other authority":
        client = Fleet(tmp_path, "other-ca").issue("agent", "n1")
    elif case == "no certificate":
        client = None
    elif case == "plain server":
        server = None
    else:
        server = fleet.issue("collector", "c1", ends_in=timedelta(days=-1))
    line = ask(server, client)
    assert line.state is CheckState.BROKEN
    assert text in line.text


def test_nobody_there_and_no_such_name() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        [line] = check_collector.collector(config_of(None, address), address)
    assert (line.state, line.text) == (CheckState.BROKEN, "Connection refused")
    [line] = check_collector.collector(config_of(None), "no-such-host.invalid:7301")
    assert line.state is CheckState.BROKEN
    assert "no-such-host.invalid" in line.text


@pytest.mark.parametrize(
    ("role", "node", "ends_in", "state", "text"),
    [
        ("agent", "n1", 60, CheckState.OK, "drover://agent/n1, until"),
        ("agent", "n2", 60, CheckState.BROKEN, "this node is n1"),
        ("viewer", "n1", 60, CheckState.BROKEN, "is for drover://viewer/n1"),
        ("agent", "n1", 3, CheckState.LIMITED, "ends in"),
        ("agent", "n1", -1, CheckState.BROKEN, "ended at"),
    ],
)
def test_the_own_certificate(fleet: Fleet, role: str, node: str, ends_in: int, state: CheckState, text: str) -> None:
    files = fleet.issue(role, node, ends_in=timedelta(days=ends_in, hours=1))
    [line] = check_collector.own_certificate(config_of(files))
    assert line.state is state
    assert text in line.text


def test_no_certificate_is_broken_only_for_a_collector_elsewhere() -> None:
    [local] = check_collector.own_certificate(config_of(None, "127.0.0.1:7301"))
    [remote] = check_collector.own_certificate(config_of(None, "collector.example:7301"))
    assert (local.state, remote.state) == (CheckState.MISSING, CheckState.BROKEN)

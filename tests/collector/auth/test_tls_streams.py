"""Open streams under mutual TLS: who is denied or whose certificate ends is cut off, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from drover_collector.auth.identity import Denied
from drover_core import x509
from testbed.certificates import Files, Fleet
from testbed.tls_server import EXPORT, STATUS, STREAM, WAIT_S, Server, echo, open_stream


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def collector(fleet: Fleet) -> Files:
    return fleet.issue("collector", "c1")


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
            server.gate.check_open_calls()
            await echo(stream)
            deny(denied, f"{agent.serial:X}  # n0\n{viewer.serial:x}\n")
            server.gate.check_open_calls()
            for call, files in ((stream, agent), (export, viewer)):
                assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.PERMISSION_DENIED
                assert f"with serial {files.serial:X} is denied" in (await call.details() or "")
            await asyncio.wait_for(server.ended.wait(), WAIT_S)
            assert "is denied" in await server.ask(STATUS, viewer)
            await echo(bystander)
            # A broken list leaves the last good one in force.
            deny(denied, "not a number\n")
            server.gate.check_open_calls()
            assert "is denied" in await server.ask(STATUS, viewer)
            await echo(bystander)
            assert any("line 1: 'not a number'" in line for line in server.gate.troubles())
            deny(denied, "")
            assert await server.ask(STATUS, viewer) == ""
            assert server.gate.troubles() == []

    asyncio.run(scenario())


def test_who_is_denied_while_an_answer_is_on_its_way_is_refused(fleet: Fleet, collector: Files, denied: Path) -> None:
    async def scenario() -> None:
        viewer = fleet.issue("viewer", "wall")
        async with Server(collector, denied=Denied(denied)) as server, server.channel(viewer) as channel:
            server.gate.check_open_calls()
            export = channel.unary_stream(EXPORT)(b"x" * (3 << 20))  # more than leaves before it is read
            await server.answering.wait()
            await asyncio.sleep(0)  # the answer is handed on
            deny(denied, f"{viewer.serial:X}\n")
            server.gate.check_open_calls()
            while await asyncio.wait_for(export.read(), WAIT_S) is not grpc.aio.EOF:
                pass

    with pytest.raises(grpc.aio.AioRpcError, match="is denied"):
        asyncio.run(scenario())


def test_an_open_stream_ends_with_its_certificate_which_is_announced_days_before(
    fleet: Fleet, collector: Files
) -> None:
    async def scenario() -> None:
        agent, other = fleet.issue("agent", "n0", ends_in=timedelta(days=20)), fleet.issue("agent", "n1")
        begin = x509.parse_pem(agent.cert.read_bytes())[0].ends_s - 20 * x509.DAY_S
        now = [begin]
        async with (
            Server(collector, now_s=lambda: now[0]) as server,
            open_stream(server, agent) as call,
            open_stream(server, other) as bystander,
        ):
            server.gate.check_open_calls()
            assert server.gate.troubles() == []
            now[0] = begin + 7 * x509.DAY_S
            server.gate.check_open_calls()
            (line,) = server.gate.troubles()
            assert "drover://agent/n0 at 20" in line
            assert "n1" not in line
            await echo(call)
            now[0] = begin + 20 * x509.DAY_S + 1
            server.gate.check_open_calls()
            assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.PERMISSION_DENIED
            assert (await call.details()).startswith("the certificate of drover://agent/n0 ended at 20")
            await echo(bystander)
            # It has come back with a new one: nothing is left to report.
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

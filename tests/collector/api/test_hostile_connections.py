"""Connections of nobody, which need no certificate: `drover-collector run` with mutual TLS and 4,096 files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import urllib3

from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from drover_proto import telemetry_pb2
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.certificates import Files, Fleet
from testbed.collector_process import Running, collector, write
from testbed.fleets import hello
from testbed.hostile_fleet_api import cage, channel, idle_connections, open_files, threads_of, watch
from testbed.ingest import EVENTS, Agent, event
from testbed.tls_server import STREAM
from testbed.waiting import wait_until

FILES, IDLE = 4_096, 4_500
SAYS = (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # nothing, and the beginning of a hello of TLS


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def running(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    toml = fleet.issue("collector", "c1").toml + '[metrics]\nlisten = "127.0.0.1:0"\n'
    with collector(write(tmp_path_factory.mktemp("collector"), toml), FILES) as made, cage(made.process.pid):
        yield made


@contextlib.asynccontextmanager
async def agent(running: Running, files: Files, node: str) -> AsyncIterator[Agent]:
    async with grpc.aio.secure_channel(running.addresses["agents"], files.credentials) as made:
        call: Any = made.stream_stream(STREAM, response_deserializer=telemetry_pb2.CollectorMessage.FromString)()
        found = Agent(call)
        await found.send(hello=hello(node))
        await found.read("welcome")
        yield found
        call.cancel()


async def an_xid_is_stored(running: Running, files: Files, node: str) -> None:
    async with agent(running, files, node) as found:
        await found.send(record=event(1, time.time_ns() // 1_000_000))
        await found.until_held(EVENTS, 1)


def port_of(running: Running, name: str) -> int:
    return int(running.addresses[name].rpartition(":")[2])


@pytest.mark.parametrize(("node", "says"), zip(("n1", "n2"), SAYS, strict=True), ids=["silent", "half-a-hello"])
def test_idle_connections_stop_neither_detection_nor_store_nor_agents_nor_operators(
    running: Running, fleet: Fleet, node: str, says: bytes
) -> None:
    """Each GetStatus by a new connection, which needs a place of its own.

    All come from one address here: a connection may be cut while more of the flood arrives, and its client connects
    again (decision 31).
    """
    patient: Any = {"timeout": 30, "wait_for_ready": True}
    target, pid = running.addresses["Fleet API"], running.process.pid
    operator = fleet.issue("operator", "olga")
    with (
        idle_connections("127.0.0.1", port_of(running, "Fleet API"), IDLE, says),
        idle_connections("127.0.0.1", port_of(running, "metrics"), IDLE // 3, says),
        watch(pid, target, operator, reconnect=True) as cost,
    ):
        asyncio.run(an_xid_is_stored(running, fleet.issue("agent", node), node))
        with channel(target, operator) as made:
            stub = FleetStub(made)

            def accused() -> set[str | None]:
                found = stub.ListIncidents(pb.ListIncidentsRequest(), **patient).incidents_json
                return {from_json(Incident, text).node for text in found}

            wait_until(lambda: node in accused(), "the XID is an incident")
            answered = cost.answered
            wait_until(lambda: cost.answered > answered + 3 or bool(cost.failed), "GetStatus goes on")
            troubles = list(stub.GetStatus(pb.StatusRequest(), **patient).troubles)
        files = open_files(pid)
    print(f"{says[:1]!r} {files} files: {cost.row()}; {troubles}")
    assert files < FILES / 2
    assert not cost.failed
    assert cost.grown_mib < 200
    assert [line for line in running.errors if "open files" in line or "refused a statement" in line] == []
    assert not any("room" in line or "blind" in line for line in troubles)


def test_the_metrics_page_is_served_next_to_connections_that_say_nothing(running: Running, fleet: Fleet) -> None:
    viewer, port = fleet.issue("viewer", "prometheus"), port_of(running, "metrics")
    pool = urllib3.HTTPSConnectionPool(
        "127.0.0.1", port, ca_certs=str(viewer.ca), cert_file=str(viewer.cert), key_file=str(viewer.key), timeout=120,
        retries=urllib3.Retry(5, backoff_factor=0.5),  # one address here: see above
    )  # fmt: skip
    with idle_connections("127.0.0.1", port, 1_500):
        page = pool.request("GET", "/metrics").data.decode()
        threads = threads_of(running.process.pid)
    assert threads < 500
    assert "\ndrover_store_answers 1.0\n" in page

"""Who may not, or may only read, sends the Fleet API what kills a collector that parses it: `drover-collector run`,
mutual TLS, real gRPC clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from drover_collector.app import REQUEST_BYTES
from drover_collector.auth import authorization as gate
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.certificates import Files, Fleet
from testbed.collector_process import Running, collector, write
from testbed.hostile_fleet_api import cage, channel, empty_targets, flood, pinned_calls, watch
from testbed.loop import in_loop
from testbed.tls_server import EXPORT, STATUS, WAIT_S, Server
from testbed.waiting import wait_until

ACT = "/drover.fleet.v1.Fleet/ActOnNode"
GROWN_MIB = 200


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def operator(fleet: Fleet) -> Files:
    return fleet.issue("operator", "olga")


@pytest.fixture(scope="module")
def running(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    toml = fleet.issue("collector", "c1").toml
    with collector(write(tmp_path_factory.mktemp("collector"), toml)) as made, cage(made.process.pid):
        yield made


@pytest.mark.parametrize("size", [16 << 20, REQUEST_BYTES], ids=["16-MiB", "as-large-as-may-be"])
@pytest.mark.parametrize("role", ["agent", "viewer"])
def test_small_bombs_of_any_certificate_cost_little(
    running: Running, fleet: Fleet, operator: Files, role: str, size: int
) -> None:
    """A request of 16 kB is 16 MiB of empty messages, which parse to 530 MiB each: 12 at once would take 6 GiB."""
    target = running.addresses["Fleet API"]
    calls, rounds = (3, 1) if size > REQUEST_BYTES else (40, 2)
    with watch(running.process.pid, target, operator) as cost:
        codes = flood(target, fleet.issue(role, "n1"), empty_targets(size), connections=4, calls=calls, rounds=rounds)
    print(f"{role} {size} {dict(codes)}: {cost.row()}")
    assert running.process.poll() is None, "the collector has gone on"
    assert codes.total() == 4 * calls * rounds
    assert set(codes) <= ({"PERMISSION_DENIED"} if role == "agent" else {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"})
    assert cost.grown_mib < GROWN_MIB
    assert cost.answered
    assert not cost.failed


def pinned_out(target: str, viewer: Files) -> bool:
    """Whether one more viewer is refused for the calls of others."""
    with channel(target, viewer) as made:
        try:
            FleetStub(made).GetStatus(pb.StatusRequest(), timeout=120)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return False


@pytest.mark.parametrize(("role", "certificates"), [("agent", 1), ("viewer", 6)])
def test_calls_whose_answers_nobody_reads_keep_no_operator_out(
    running: Running, fleet: Fleet, operator: Files, role: str, certificates: int
) -> None:
    """An agent's are refused at once. Viewers' calls stand until their connections end: six had all places."""
    target, pid = running.addresses["Fleet API"], running.process.pid
    attackers, other = [fleet.issue(role, f"n{n}") for n in range(certificates)], fleet.issue("viewer", "wall")
    with pinned_calls(target, attackers, 30, 64) as sent:
        if role == "viewer":
            wait_until(lambda: pinned_out(target, other), "viewers have all places that viewers may have")
        with watch(pid, target, operator, reconnect=True) as cost:
            wait_until(lambda: cost.answered > 5 or len(cost.failed) > 5, "GetStatus is answered or not")
    print(f"{sent.calls} calls of {role}: {cost.row()}")
    assert not cost.failed
    assert cost.grown_mib < GROWN_MIB
    wait_until(lambda: not pinned_out(target, other), "those who left have left no call behind")


def test_of_thousands_of_calls_at_once_none_is_ended_unheard(running: Running, fleet: Fleet) -> None:
    """Above 1,000 calls that have just come gRPC ended some with CANCELLED, no matter whose they were."""
    connections, calls, refused = 32, 64, "7"
    attackers = [fleet.issue("agent", "n1")]
    with pinned_calls(running.addresses["Fleet API"], attackers, connections, calls, narrow=False) as sent:
        assert sent.calls == connections * calls
        for agent in sent.agents:
            agent.until(lambda agent=agent: len(agent.ended.keys() | agent.reset.keys()) == calls)
            assert {agent.status(stream) for stream in range(1, 2 * calls, 2)} == {refused}


def test_the_largest_honest_request_is_taken(running: Running, operator: Files) -> None:
    """A silence of as many nodes as may be named, by names of 40 characters: it is judged, and not cut off."""
    ask = pb.SilenceAsk(node=[f"gpu-{number:04}.cluster-7.training.example.org"[:40] for number in range(1000)])
    assert REQUEST_BYTES / 2 < ask.ByteSize() < REQUEST_BYTES
    with channel(running.addresses["Fleet API"], operator) as made, pytest.raises(grpc.RpcError) as refused:
        FleetStub(made).CreateSilence(ask, timeout=120)
    assert refused.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
    print(ask.ByteSize(), refused.value.details())


@in_loop
async def test_a_role_is_looked_at_before_the_request_is_received(fleet: Fleet) -> None:
    """Who may not call is refused though no request has come."""
    async with Server(fleet.issue("collector", "c2")) as server:
        async with server.channel(fleet.issue("agent", "n1")) as made:
            call = made.stream_stream(STATUS)()
            assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.PERMISSION_DENIED
        assert server.gate.refused == {"wrong role": 1}


@in_loop
async def test_a_call_without_a_request_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "REQUEST_S", 0.1)
    async with Server(fleet.issue("collector", "c2")) as server, server.channel(fleet.issue("viewer", "v1")) as made:
        silent = made.stream_stream(STATUS)()
        assert await asyncio.wait_for(silent.code(), WAIT_S) is grpc.StatusCode.DEADLINE_EXCEEDED
        empty = made.stream_stream(STATUS)()
        await empty.done_writing()
        assert await asyncio.wait_for(empty.code(), WAIT_S) is grpc.StatusCode.INVALID_ARGUMENT
        assert await made.unary_unary(STATUS)(b"x", timeout=WAIT_S) == b"x"


@in_loop
async def test_calls_beyond_a_certificate_s_turns_wait_and_acts_do_not_wait_for_questions(fleet: Fleet) -> None:
    """Exports under way here stand for questions that take long."""
    async with Server(fleet.issue("collector", "c2")) as server:
        operator, other = fleet.issue("operator", "o1"), fleet.issue("viewer", "v1")
        async with server.channel(operator) as made, server.channel(other) as second:
            begun = [made.unary_stream(EXPORT)(b"x") for _ in range(gate.CALLS_EACH)]
            for call in begun:
                assert await asyncio.wait_for(call.read(), WAIT_S) == b"x"
            waiting = made.unary_unary(STATUS)(b"x", timeout=WAIT_S)
            assert await made.unary_unary(ACT)(b"x", timeout=WAIT_S) == b"x"
            assert await second.unary_unary(STATUS)(b"x", timeout=WAIT_S) == b"x"
            assert not waiting.done()
            begun[0].cancel()
            assert await waiting == b"x"
            for call in begun:
                call.cancel()

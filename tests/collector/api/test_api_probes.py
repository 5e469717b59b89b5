"""Probes over the Fleet service: real gRPC, a real store, the real desk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from drover_collector.api.snapshot import OptionalParts
from drover_collector.auth.authorization import ROLES
from drover_collector.auth.identity import Identity, Role
from drover_collector.store import Store
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
    from_json,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed import probed
from testbed.collected import small_index
from testbed.probes_served import ServedProbes, serving

NOW = 1_800_000_000_000
INDEX = small_index(16, 8)
NODES = [node.name for node in INDEX.nodes]
FIRST, SECOND, THIRD, FOURTH, LAST = *NODES[:4], NODES[-1]


class Served:
    def __init__(self, served: ServedProbes, stub: FleetStub) -> None:
        self.stub, self.facts, self.store = stub, served.facts, served.store

    async def refused(self, call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError("answered")

    async def figure(self, name: str, node: str = "") -> pb.ProbeFigure:
        (found,) = (await self.stub.ListProbes(pb.ProbesRequest(figure=name, node=node))).figures
        return found


Check = Callable[[Served], Awaitable[None]]
Against = Callable[[Check], None]


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Against]:
    store = Store.open(f"chdb://{store_root}?database=api_probes")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        probed.fill(store, NODES, NOW)
        served = runner.run(stack.enter_async_context(serving(store, INDEX, lambda: NOW)))
        channel = runner.run(stack.enter_async_context(grpc.aio.insecure_channel(served.address)))
        fleet = Served(served, FleetStub(channel))
        yield lambda check: runner.run(check(fleet))  # type: ignore[arg-type]  # an async function's
        runner.run(stack.aclose())
    store.close()


def of(figure: pb.ProbeFigure, node: str, gpu: int) -> pb.ProbeValue:
    (found,) = [v for v in figure.values if (v.node, v.gpu) == (node, gpu)]
    return found


def test_a_figure_over_the_fleet_marks_the_slow_gpu_and_shows_what_it_is_compared_with(against: Against) -> None:
    async def check(fleet: Served) -> None:
        figure = await fleet.figure("gemm_bf16")
        assert (figure.unit, figure.better, figure.sku, figure.nodes) == ("TFLOP/s", "higher", "NVIDIA H200", 15)
        assert len(figure.values) == 15 * 8
        assert {(v.node, v.gpu) for v in figure.values if v.verdict != "pass"} == {(FIRST, probed.SLOW)}
        slow = of(figure, FIRST, probed.SLOW)
        assert slow.verdict == "fail"
        assert slow.worse == pytest.approx(0.05, abs=0.003)
        assert slow.expected == pytest.approx(789, rel=0.002)
        assert f"GPU {probed.SLOW} of {FIRST}: gemm_bf16 749.5 TFLOP/s, " in slow.text
        values = np.frombuffer(figure.fleet, "<f4")
        assert len(values) == 120
        assert (np.diff(values) >= 0).all()
        (group,) = figure.groups
        assert (group.size, group.configuration) == (120, "NVIDIA H200, driver 570.124, 700 W, ECC on, quick")

    against(check)


def test_one_node_has_all_its_figures_against_the_same_fleet(against: Against) -> None:
    async def check(fleet: Served) -> None:
        reply = await fleet.stub.ListProbes(pb.ProbesRequest(node=THIRD))
        assert {f.figure for f in reply.figures} == {*probed.GPUS, *probed.NODES, "p2p"}
        assert {v.node for f in reply.figures for v in f.values} == {THIRD}
        by_name = {f.figure: f for f in reply.figures}
        assert len(np.frombuffer(by_name["gemm_bf16"].fleet, "<f4")) == 120
        wrong = of(by_name["sdc"], THIRD, probed.WRONG)
        assert (wrong.verdict, wrong.HasField("expected")) == ("fail", False)
        assert "1 of 31 products differ" in wrong.text
        absent = of(by_name["gemm_fp8"], THIRD, probed.HUNG)
        assert (absent.HasField("value"), absent.verdict) == (False, "unknown"), "absent, and never 0"
        assert "gave no figure (not enough memory: CUDA out of memory)" in absent.text
        (own,) = by_name["allreduce"].values
        assert not own.HasField("gpu")
        alone = await fleet.figure("gemm_bf16", THIRD)
        assert len(alone.values) == 8

    against(check)


def test_pairs_show_the_way_that_is_slow(against: Against) -> None:
    async def check(fleet: Served) -> None:
        figure = await fleet.figure("p2p", SECOND)
        assert len(figure.values) == 56
        assert {(v.gpu, v.peer) for v in figure.values if v.verdict == "fail"} == {(2, 5), (5, 2)}

    against(check)


def test_a_node_that_was_never_probed_has_no_figures(against: Against) -> None:
    async def check(fleet: Served) -> None:
        assert not (await fleet.stub.ListProbes(pb.ProbesRequest(node=LAST))).figures
        assert not (await fleet.stub.ListProbes(pb.ProbesRequest(figure="gemm_fp64"))).figures

    against(check)


def test_history_of_a_gpu_and_its_drift(against: Against) -> None:
    async def check(fleet: Served) -> None:
        ask = pb.ProbeHistoryRequest(node=FOURTH, gpu=probed.SLOW, figure="hbm_copy")
        found = await fleet.stub.ProbeHistory(ask)
        assert [p.ts_ms for p in found.points] == sorted(p.ts_ms for p in found.points)
        assert len(found.points) == 8
        assert found.points[-1].value < 0.97 * found.points[0].value
        assert (found.HasField("steady"), found.steady) == (True, False)
        assert found.since_ms in {p.ts_ms for p in found.points}
        assert "what it gave before" in found.drift
        steady = await fleet.stub.ProbeHistory(pb.ProbeHistoryRequest(node=FOURTH, gpu=0, figure="hbm_copy"))
        assert steady.steady
        short = await fleet.stub.ProbeHistory(pb.ProbeHistoryRequest(node=FIRST, gpu=0, figure="hbm_copy"))
        assert (len(short.points), short.HasField("steady")) == (1, False)
        none = await fleet.stub.ProbeHistory(pb.ProbeHistoryRequest(node=LAST, gpu=0, figure="hbm_copy"))
        assert (len(none.points), none.HasField("steady")) == (0, False)

    against(check)


def test_orders_with_their_verdicts_the_last_asked_first(against: Against) -> None:
    async def check(fleet: Served) -> None:
        rows = (await fleet.stub.ListProbeOrders(pb.ProbeOrdersRequest())).orders
        orders = [from_json(ProbeOrder, row.order_json) for row in rows if row.order_json]
        mine = [o for o in orders if o.id.startswith("p-")]
        assert [(o.node, o.state) for o in mine] == [
            (LAST, "asked"), (LAST, "failed"), (NODES[-2], "sent"), (THIRD, "done"), (SECOND, "done"), (FIRST, "done"),
        ]  # fmt: skip
        of_first = next(row for row in rows if from_json(ProbeOrder, row.order_json).node == FIRST)
        verdicts = [from_json(ProbeVerdict, text) for text in of_first.verdicts_json]
        assert [v.gpu for v in verdicts] == [None, *range(8)]
        assert [v.gpu for v in verdicts if v.passed is False] == [None, probed.SLOW]
        assert not of_first.results_json
        only = (await fleet.stub.ListProbeOrders(pb.ProbeOrdersRequest(node=SECOND, limit=5))).orders
        assert {from_json(ProbeOrder, row.order_json).node for row in only} == {SECOND}

    against(check)


def test_one_order_with_its_results(against: Against) -> None:
    async def check(fleet: Served) -> None:
        (row,) = (await fleet.stub.ListProbeOrders(pb.ProbeOrdersRequest(id=probed.order_id(FIRST, 0)))).orders
        assert from_json(ProbeOrder, row.order_json).state == "done"
        assert row.asked_ms == NOW - 3_600_000 - 600_000
        results = [from_json(ProbeResult, text) for text in row.results_json]
        assert len(results) == 7 * 8 + 56 + 2 + 1
        assert results[-1].end == "done"

    against(check)


def test_a_person_asks_and_the_order_is_theirs(against: Against) -> None:
    async def check(fleet: Served) -> None:
        ask = pb.ProbeAsk(node=FIRST, gpus=[5, 1], level="standard", probes=["gemm_bf16"], why="slow in job 812")
        asked = await fleet.stub.RequestProbe(ask)
        (order,) = fleet.store.probes.orders.versions(asked.id)
        assert order == ProbeOrder(
            asked.id, FIRST, (1, 5), "standard", ("gemm_bf16",), ProbeReason.PERSON, "asked", NOW, by="a local user"
        )
        assert (await fleet.stub.RequestProbe(ask)).id == asked.id, "the same one is not asked for twice"

    against(check)


def test_the_order_bears_the_name_of_the_certificate(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.auth.authorization.caller", lambda: Identity(Role.OPERATOR, "ada"))

    async def check(fleet: Served) -> None:
        asked = await fleet.stub.RequestProbe(pb.ProbeAsk(node=THIRD, level="deep", why="noisy \n fan"))
        assert fleet.store.probes.orders.versions(asked.id)[0].by == "ada"
        (line,) = [a for a in fleet.store.audit.read() if a.detail == f"order {asked.id}"]
        assert (line.by, line.what, line.subject, line.why) == ("ada", "probe", THIRD, "noisy fan")

    against(check)


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("ListProbes", pb.ProbesRequest(), "INVALID_ARGUMENT", "give a figure, a node, or both"),
        ("ListProbes", pb.ProbesRequest(figure="rm"), "INVALID_ARGUMENT", "no figure is called 'rm'; there are launch"),
        ("ListProbes", pb.ProbesRequest(node="zz"), "NOT_FOUND", "no node 'zz'"),
        ("ProbeHistory", pb.ProbeHistoryRequest(figure="sdc"), "INVALID_ARGUMENT", "node is empty"),
        ("ProbeHistory", pb.ProbeHistoryRequest(node="n1"), "INVALID_ARGUMENT", "no figure is called ''"),
        ("ListProbeOrders", pb.ProbeOrdersRequest(id="p0"), "NOT_FOUND", "no order 'p0'; `drover probe --list`"),
        ("RequestProbe", pb.ProbeAsk(node="zz"), "NOT_FOUND", "no node 'zz'"),
        ("RequestProbe", pb.ProbeAsk(node="n1", level="all"), "INVALID_ARGUMENT", "no level is called 'all'"),
        ("RequestProbe", pb.ProbeAsk(node="n1", gpus=[8]), "INVALID_ARGUMENT", "n1 has no GPU 8; its slots are 0 to 7"),
        ("RequestProbe", pb.ProbeAsk(node="n1", probes=["rm -rf"]), "INVALID_ARGUMENT", "no probe is called 'rm -rf'"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(
    against: Against, method: str, request_: Any, code: str, text: str
) -> None:
    async def check(fleet: Served) -> None:
        found = await fleet.refused(getattr(fleet.stub, method)(request_))
        assert found[0].name == code
        assert text in found[1]

    against(check)


def test_a_collector_that_asks_for_no_probes_says_so(against: Against) -> None:
    async def check(fleet: Served) -> None:
        parts, fleet.facts.parts = fleet.facts.parts, OptionalParts()
        found = await fleet.refused(fleet.stub.RequestProbe(pb.ProbeAsk(node=FIRST)))
        fleet.facts.parts = parts
        assert found[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert "ask the active one" in found[1]

    against(check)


def test_only_operators_may_ask() -> None:
    fleet = "/drover.fleet.v1.Fleet/"
    assert ROLES[fleet + "RequestProbe"] == {Role.OPERATOR, Role.ADMIN}
    for method in ("ListProbes", "ProbeHistory", "ListProbeOrders"):
        assert ROLES[fleet + method] == {Role.OPERATOR, Role.VIEWER, Role.ADMIN}

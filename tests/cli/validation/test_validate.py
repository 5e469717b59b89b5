"""`drover validate`: which nodes it takes, what it asks for, how long it waits, and the report that it writes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from drover_cli import client
from drover_cli.main import main
from drover_cli.validation import stages
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeResult, ProbeVerdict, to_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

NODES = ("a1", "a2", "a3")
GPU = "NVIDIA H200"
TOGETHER = ("pairs_group", "fsdp_group", "tp_group")


class Fleet:
    """The collector's answers. `hung`: a node that never ends its part of a group."""

    def __init__(self) -> None:
        now_ms = round(time.time() * 1000)
        self.rows = [
            pb.NodeRow(name=n, pool="new", leaf="l1", health="drained", last_seen_ms=now_ms, agent_version="0.3")
            for n in NODES
        ]
        self.asked: list[pb.ProbeAsk] = []
        self.orders: dict[str, ProbeOrder] = {}
        self.hung = ""

    def call(self, method: Any, request: Message, _deadline_s: float = 1.0) -> Any:
        return getattr(self, method.name)(request)

    def ListNodes(self, _: pb.ListNodesRequest) -> pb.NodeList:  # as in fleet.proto
        return pb.NodeList(nodes=self.rows, total=len(self.rows))

    def GetNode(self, request: pb.NodeRequest) -> pb.NodeDetail:
        inventory = {"driver_version": "570.1", "gpu0.vbios": "96.00", "gpu1.vbios": "96.00", "host.product": "XE9680"}
        return pb.NodeDetail(row=pb.NodeRow(name=request.node), inventory=inventory)

    def GetStatus(self, _: pb.StatusRequest) -> pb.Status:
        return pb.Status(fleet="west", version="0.3.1")

    def RequestProbe(self, ask: pb.ProbeAsk) -> pb.ProbeAsked:
        self.asked.append(pb.ProbeAsk.FromString(ask.SerializeToString()))
        members = tuple(ask.group)
        ids = []
        for node in members or [ask.node]:
            made = ProbeOrder(
                f"p{len(self.orders)}", node, (), ask.level, tuple(ask.probes), ProbeReason.PERSON, "done", 1,
                by="anna", group="g" if members else "", members=members, protection="drained",
            )  # fmt: skip
            self.orders[made.id] = replace(made, state="sent") if members and node == self.hung else made
            ids.append(made.id)
        return pb.ProbeAsked(id=ids[0], ids=ids)

    def ListProbeOrders(self, request: pb.ProbeOrdersRequest) -> pb.ProbeOrderList:
        order = self.orders[request.id]
        verdict = ProbeVerdict(order.id, order.node, None, True, "", f"{order.node}: well", 1, ProbeReason.PERSON)
        open_ = order.state == "sent"
        row = pb.ProbeOrderRow(
            order_json=to_json(order), verdicts_json=[] if open_ else [to_json(verdict)],
            results_json=[] if open_ else [to_json(result) for result in self.results(order)],
        )  # fmt: skip
        return pb.ProbeOrderList(orders=[row])

    def ListProbes(self, request: pb.ProbesRequest) -> pb.ProbeList:
        own = [o.id for o in self.orders.values() if o.node == request.node and not o.group and not o.probes]
        value = pb.ProbeValue(
            node=request.node, gpu=0, value=4300, verdict="pass", expected=4290, order=own[0] if own else ""
        )
        return pb.ProbeList(figures=[pb.ProbeFigure(figure="hbm_copy", unit="GB/s", values=[value], nodes=40)])

    def results(self, order: ProbeOrder) -> list[ProbeResult]:
        base = ProbeResult(
            "", order.node, None, "", 1, None, None, "", request=order.id, device=GPU, spread=0.001, repeats=9
        )
        end = replace(base, id="end", end="done", detail="")
        if not order.group:
            names = order.probes or ("hbm_copy",)
            return [*(replace(base, id=n, probe=n, gpu=0, value=4300.0, unit="GB/s") for n in names), end]
        mine = order.members.index(order.node)
        if self.hung:
            other = order.members.index(self.hung)
            return [
                replace(base, id="x", probe="fsdp_group", unit="tokens/s", peer=other, detail="no sign of life"),
                end,
            ]
        found = []
        for peer in {*range(len(order.members))} - {mine}:
            value = 20.0 if {mine, peer} == {0, 2} else 45.0
            found.append(replace(base, id=f"{peer}", probe="pairs_group", gpu=0, value=value, unit="GB/s", peer=peer))
            found.append(
                replace(base, id=f"l{peer}", probe="pairs_group_latency", gpu=0, value=9, unit="us", peer=peer)
            )
        found.append(replace(base, id="solo", probe="fsdp_group_solo", gpu=0, value=9000.0, unit="tokens/s"))
        for name in ("fsdp_group", "fsdp_group_slowest", "tp_group", "tp_group_slowest"):
            found.append(replace(base, id=name, probe=name, value=5000.0, unit="tokens/s"))
        return [*found, end]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet()

    @contextlib.contextmanager
    def connect(_args: object) -> Iterator[Fleet]:
        yield made

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(stages, "POLL_S", 0.01)
    assert methods.REQUEST_PROBE.name == "RequestProbe"
    return made


def test_a_pool_is_validated_in_stages_and_the_report_names_the_slow_way(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"r.{ending}" for ending in ("md", "html", "json")]
    words = [word for file in files for word in ("--output", str(file))]
    assert main(["validate", "new", "--why", "rack 7 <new>", *words]) == 1
    asked = [(ask.node, tuple(ask.group), tuple(ask.probes), ask.level) for ask in fleet.asked]
    assert asked == [
        *((node, (), (), "standard") for node in NODES),
        *((node, (), ("storage_write", "storage_read"), "standard") for node in NODES),
        ("", NODES, TOGETHER, "standard"),
    ]
    report = json.loads(files[2].read_text())
    assert (report["result"], report["by"], report["why"], report["fleet"]) == ("fail", "anna", "rack 7 <new>", "west")
    assert [(f["about"], f["mark"]) for f in report["findings"]] == [("a1 - a3", "fail")]
    assert report["versions"] == {"collector": "0.3.1", "agents": "0.3"}
    assert report["nodes"][0]["facts"] == {"driver_version": "570.1", "host.product": "XE9680", "gpu.vbios": "96.00"}
    marks = {(row["stage"], row["node"], row["figure"]): row["mark"] for row in report["figures"]}
    assert marks["node", "a1", "hbm_copy"] == "pass", "as the collector judged it"
    assert marks["storage", "a1", "storage_write"] == "unknown", "nobody judged it"
    assert marks["network", "a1 - a3", "pairs_group"] == "fail"
    assert {order["protection"] for order in report["orders"]} == {"drained"}
    text, page = files[0].read_text(), files[1].read_text()
    for shown in ("Result: FAIL", "anna", "a1 - a3", "570.1", "4290, 40 nodes", "Signature"):
        assert shown in text
        assert shown in page
    assert "rack 7 &lt;new&gt;" in page
    assert "<script" not in page
    assert "FAIL: a1 - a3" in capsys.readouterr().err


def test_a_node_that_holds_a_job_is_away_or_in_service_is_refused_and_nothing_is_asked(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["validate", *words]) == 1
        return capsys.readouterr().err

    fleet.rows[1].health = "healthy"
    assert "a2 is in service" in refused("new", "--burn-in")
    fleet.rows[1].last_seen_ms = 1
    assert "a2: no agent reports" in refused("new")
    fleet.rows[1].last_seen_ms, fleet.rows[1].agent_version = fleet.rows[0].last_seen_ms, "0.3 (scraped)"
    assert "a2: no agent is there" in refused("new")
    fleet.rows[1].agent_version = "0.3"
    fleet.rows[1].jobs.append("812")
    assert "a job runs on a2 (job 812)" in refused("new")
    assert main(["validate", "old"]) == 4
    assert main(["validate", "a1", "--output", "r.pdf"]) == 2
    assert main(["validate", "a1"]) == 2, "pairs need two nodes"
    assert "--stages node storage" in capsys.readouterr().err
    assert fleet.asked == []


def test_burn_in_is_deep_and_one_node_alone_can_have_it(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "a1", "--burn-in", "--stages", "node", "--json"]) == 1, "what was left out is no pass"
    assert [(ask.node, ask.level) for ask in fleet.asked] == [("a1", "deep")]
    report = json.loads(capsys.readouterr().out)
    assert (report["result"], report["findings"]) == ("unknown", [])
    assert "Not run: the stage storage." in report["not_known"]


def test_a_node_that_hangs_is_named_and_not_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    fleet.hung = "a2"
    assert main(["validate", "new", "--stages", "network", "training", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {(f["about"], f["mark"]) for f in report["findings"]} == {("a2", "fail"), ("a2", "unknown")}
    assert [order["late"] for order in report["orders"]] == [False, True, False]


def test_an_earlier_report_compares_only_with_as_many_nodes(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert main(["validate", "a1", "a2", "--stages", "network", "--output", str(before)]) == 1
    assert main(["validate", "new", "--reference", str(before)]) == 2
    assert "is of 2 nodes at level standard; only one of 3 at standard compares" in capsys.readouterr().err
    before.write_text("{}")
    assert main(["validate", "new", "--reference", str(before)]) == 2
    assert fleet.asked[-1].group == ["a1", "a2"], "nothing was asked for"

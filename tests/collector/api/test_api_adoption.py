"""A node that reports joins the fleet when an operator says so, and not before."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from drover_collector.api import reporting
from drover_collector.api.snapshot import RefusalError
from drover_collector.pipeline import adopted_nodes
from drover_collector.pipeline.adopted_nodes import AdoptionWatch, adopted, line, with_adopted
from drover_core.model.events import Audit
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_proto import fleet_pb2 as pb

FILED = FleetSpec((NodeSpec("n1", "r1"), NodeSpec("n2", "r1")), name="alpha")


class Store:
    """The audit of a store, the newest line first, and the GPUs of one node."""

    def __init__(self) -> None:
        self.lines: list[Audit] = []
        self.shared = False
        self.audit = self.entities = self

    def write(self, lines: list[Audit]) -> None:
        self.lines += lines

    def read(self, what: str, limit: int, subject: str = "") -> list[Audit]:
        found = [line for line in self.lines if line.what == what and subject in ("", line.subject)]
        return sorted(found, key=lambda line: -line.ts_ms)[:limit]

    def gpus_of(self, node: str) -> list[Any]:
        return [SimpleNamespace(model="NVIDIA H100", gpu=slot) for slot in range(4)] if node == "n7" else []


class Facts:
    def __init__(self) -> None:
        self.store, self.now = Store(), 1000
        self.troubles: dict[str, str] = {}
        self.pipeline = SimpleNamespace(leading=True, ticks=SimpleNamespace(troubles=self.troubles))
        self.index = SimpleNamespace(spec=FILED)
        self.stats = SimpleNamespace(unknown_nodes=frozenset({"n7", "n8"}))

    def now_ms(self) -> int:
        self.now += 1
        return self.now

    def ask(self, node: str = "n7", why: str = "new", **more: Any) -> str:
        request = pb.AdoptRequest(node=node, why=why, **more)
        return reporting.adopt_node(self, request, "anna").detail  # type: ignore[arg-type]  # a stand-in


def test_it_has_the_gpus_and_the_model_that_report_and_the_audit_says_who_adopted_it() -> None:
    facts = Facts()
    assert "n7 is adopted with 4 GPUs" in facts.ask(rack="r9")
    assert adopted(facts.store) == {"n7": NodeSpec("n7", "r9", sku="H100", gpus=4)}  # type: ignore[arg-type]  # a stand-in
    (made,) = facts.store.lines
    assert (made.by, made.what, made.subject, made.why) == ("anna", "adopt", "n7", "new")
    facts.ask(rack="r8", gpus=8)
    assert adopted(facts.store)["n7"] == NodeSpec("n7", "r8", sku="H100", gpus=8)  # type: ignore[arg-type]  # a stand-in
    facts.ask(forget=True)
    assert adopted(facts.store) == {}  # type: ignore[arg-type]  # a stand-in


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"node": "n9"}, "no node 'n9' reports"),
        ({"node": "n1"}, "n1 is in the fleet already"),
        ({"node": "n8"}, "no GPU of n8 reports"),
        ({"node": "a b"}, "is no name"),
        ({"why": " "}, "say why"),
        ({"gpus": 256}, "at most 255"),
        ({"rack": "r\n1"}, "cannot be printed"),
        ({"node": "n8", "forget": True}, "n8 is not adopted"),
    ],
)
def test_what_cannot_be_adopted_is_refused(more: dict[str, Any], said: str) -> None:
    facts = Facts()
    with pytest.raises(RefusalError, match=re.escape(said)):
        facts.ask(**more)
    assert facts.store.lines == []


def test_a_standby_and_a_fleet_that_is_learned_adopt_nothing() -> None:
    facts = Facts()
    facts.troubles["fleet"] = "There is no fleet file"
    with pytest.raises(RefusalError, match="in the fleet already"):
        facts.ask()
    facts.pipeline.leading = False
    with pytest.raises(RefusalError, match="stands by"):
        facts.ask()


def test_the_fleet_file_comes_first_and_wins() -> None:
    fleet = with_adopted(FILED, {"n7": NodeSpec("n7"), "n2": NodeSpec("n2", "elsewhere"), "n5": NodeSpec("n5")})
    assert [node.name for node in fleet.nodes] == ["n1", "n2", "n5", "n7"]
    assert (fleet.by_name["n2"].rack, fleet.name) == ("r1", "alpha")
    assert with_adopted(FILED, {}) is FILED


def test_a_collector_starts_again_when_adoptions_have_changed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted_nodes, "LOOK_S", 0.01)
    monkeypatch.setattr(adopted_nodes, "STEADY_S", 0.03)
    store: Any = Store()
    stopped: list[bool] = []

    async def watched(spec: FleetSpec) -> bool:
        watch = AdoptionWatch(store, FILED, spec, lambda: stopped.append(True))
        task = asyncio.ensure_future(watch.run())
        await asyncio.wait([task], timeout=0.2)
        task.cancel()
        return watch.changed

    assert not asyncio.run(watched(FILED))
    store.write([line(NodeSpec("n7"), "anna", "new", 1)])
    assert asyncio.run(watched(FILED))
    assert stopped == [True]
    assert not asyncio.run(watched(with_adopted(FILED, adopted(store)))), "after its start it has what it wants"


def test_a_clock_that_goes_back_keeps_no_node_that_is_given_up() -> None:
    facts = Facts()
    facts.ask()
    facts.now -= 500
    facts.ask(forget=True)
    assert adopted(facts.store) == {}  # type: ignore[arg-type]  # a stand-in

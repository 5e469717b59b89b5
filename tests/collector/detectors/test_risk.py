"""The ranking of nodes by their chance to fail, and the few that are reported."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from drover_collector.api.fleet import list_risk
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.risk import detector as risk
from drover_collector.detectors.risk.model import (
    DAY_MS,
    KEPT_MS,
    PER_NODE,
    Trouble,
    Troubles,
    chance_of,
    risk_ranking,
)
from drover_collector.engine.engine import Engine
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Health,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_proto import fleet_pb2 as pb

INDEX = small_fleet(40, 8, 4)
NODES = [node.name for node in INDEX.nodes]


def trouble(days_ago: float, what: str = "xid/xid_79", *, still: bool = False) -> Trouble:
    at = START_MS - int(days_ago * DAY_MS)
    return Trouble(f"{what} {days_ago}", at, None if still else at + 3_600_000, what)


def incident(id_: str, node: str, **more: object) -> Incident:
    made = Incident(
        id_, IncidentKind.XID, "xid_79", "gpu", node, 0, ((node, 0),), START_MS, START_MS, START_MS + 60_000,
        Severity.CRITICAL, 0.97, RecommendedAction.DRAIN, "", "",
    )  # fmt: skip
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # whatever field the test says


def test_recent_and_many_troubles_come_first_and_reasons_say_so() -> None:
    history = {
        "n05": [trouble(60)], "n06": [trouble(1)], "n07": [trouble(1), trouble(3), trouble(9, "link/port_down")],
    }  # fmt: skip
    found = risk_ranking(history, NODES, START_MS)
    assert [r.node for r in found[:3]] == ["n07", "n06", "n05"]
    assert [r.node for r in found[3:]] == sorted(set(NODES) - {"n05", "n06", "n07"})
    assert found[0].reasons == ("3 troubles within 9 days, the newest xid/xid_79 24.0 h ago", "xid/xid_79 2 times")
    assert found[-1].reasons == ()
    assert len({r.chance for r in found[3:]}) == 1


def test_a_trouble_that_is_forgotten_or_to_come_counts_for_nothing() -> None:
    plain = chance_of([])
    (found, *_) = risk_ranking({"n00": [trouble(KEPT_MS / DAY_MS + 1), trouble(-1)]}, ["n00"], START_MS)
    assert (found.chance, found.reasons) == (plain, ())


def test_chances_stay_chances() -> None:
    assert 0.01 < chance_of([]) < 0.05  # 2.4 % of the public trace's nodes fail within a week
    assert chance_of([]) < chance_of([30]) < chance_of([3]) < chance_of([0.1]) < chance_of([0.1] * 5) < 1


def test_signs_of_memory_and_heat_raise_it() -> None:
    found = risk_ranking({}, NODES, START_MS, {"n09": ["rows_many"], "n08": ["margin"]})
    assert [r.node for r in found[:2]] == ["n09", "n08"]
    assert found[0].reasons == ("more than 10 HBM rows were remapped on one of its GPUs",)


@pytest.mark.parametrize(
    "other",
    [
        {"severity": Severity.INFO},
        {"kind": IncidentKind.IDLE},
        {"kind": IncidentKind.DRIFT},
        {"scope": "rack"},
        {"cause": "agent_stopped"},
    ],
    ids=["a note", "idle", "drift", "a rack", "an agent that was stopped"],
)
def test_what_is_no_trouble_of_the_node_does_not_count(other: dict[str, object]) -> None:
    past = Troubles()
    past.take([incident("a", "n01", **other)], START_MS + DAY_MS)
    assert not past


def test_what_is_kept_is_bounded_and_a_later_version_of_an_incident_replaces_it() -> None:
    past = Troubles()
    past.take([incident("a", "n01", closed_ms=None)], START_MS)
    past.take([incident("a", "n01")], START_MS)
    assert [t.end_ms for t in past["n01"].values()] == [START_MS + 60_000]
    past.take([incident(str(n), "n01", since_ms=START_MS + n) for n in range(2 * PER_NODE)], START_MS + DAY_MS)
    assert len(past["n01"]) == PER_NODE
    assert "a" not in past["n01"]
    past.take([incident("old", "n02")], START_MS + KEPT_MS + DAY_MS)
    assert "n02" not in past


def look(troubles: dict[str, list[Trouble]]) -> tuple[list[Finding], risk.RiskState]:
    held = {node: {t.id: t for t in mine} for node, mine in troubles.items()}
    window = Window(INDEX, (training_bucket(INDEX, 0),), True, (), START_MS, None, held)
    return risk.detect(window, None, START_MS + 17_000)


def test_few_are_reported_and_none_that_is_in_trouble_now() -> None:
    bad = [trouble(0.5), trouble(1), trouble(2), trouble(3)]
    found, state = look(dict.fromkeys(NODES[:20], bad))
    assert [f.node for f in found] == ["n00", "n01"]  # 5 % of 40
    assert {(f.severity, f.action, f.scope) for f in found} == {(Severity.INFO, RecommendedAction.WATCH, "node")}
    assert len(state.ranking) == 40
    found, _ = look({"n00": [*bad, trouble(0.1, still=True)]})
    assert found == []


def test_the_engine_learns_from_its_own_incidents_and_nobody_gets_suspect_by_a_rank() -> None:
    engine = Engine(INDEX, Policy.named("nvidia"), START_MS)
    assert engine.risks == []
    engine.remember([incident(str(n), "n03", since_ms=START_MS - n * DAY_MS) for n in range(1, 6)], START_MS)
    engine.on_bucket(training_bucket(INDEX, 0), START_MS + 17_000)
    assert engine.risks[0].node == "n03"
    assert [(i.kind, i.node) for i in engine.incidents.values()] == [(IncidentKind.RISK, "n03")]
    assert engine.health_of("n03")[0] is Health.HEALTHY
    event = Event("e", START_MS + 18_000, "n07", 2, EventKind.XID, "79", "fell off", received_ms=START_MS + 18_000)
    engine.on_events([event], START_MS + 18_000)
    for number in range(1, 70):
        bucket = training_bucket(INDEX, number)
        engine.on_bucket(bucket, bucket.end_ms + 7_000)
    (seven,) = [r for r in engine.risks if r.node == "n07"]
    assert seven.in_trouble
    assert seven.chance > chance_of([])


def test_the_api_shows_the_ranking_with_its_reasons() -> None:
    engine = Engine(INDEX, Policy.named("nvidia"), START_MS)
    facts: Any = SimpleNamespace(pipeline=SimpleNamespace(engine=engine), open_incidents=list, index=INDEX)
    assert list_risk(facts, pb.RiskRequest()).total == 0
    engine.remember([incident("a", "n03", since_ms=START_MS - DAY_MS)], START_MS)
    engine.on_bucket(training_bucket(INDEX, 0), START_MS + 17_000)
    reply = list_risk(facts, pb.RiskRequest(limit=2))
    assert (len(reply.nodes), reply.total, reply.days) == (2, 40, 7)
    assert reply.nodes[0].node == "n03"
    assert reply.nodes[0].chance > reply.nodes[1].chance
    assert "xid/xid_79" in reply.nodes[0].reasons[0]

"""Who is probed next, and which nodes together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drover_collector.probes.scheduling.planner import (
    AGAIN_MS,
    Standing,
    confirmations,
    fabric_rounds,
    upkeep,
)
from drover_collector.probes.settings import ProbesConfig
from drover_core.model.events import (
    Decision,
    Incident,
    IncidentKind,
    ProbeOrder,
    ProbeReason,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import FleetSpec, NodeSpec

NOW = 1_800_000_000_000
HOUR = 3_600_000


def incident(id_: str = "i1", node: str = "n1", gpu: int | None = 3, **more: object) -> Incident:
    base = Incident(
        id_, IncidentKind.STRAGGLER, "hbm", "gpu", node, gpu, ((node, gpu),), NOW, NOW, None, Severity.WARNING, 0.7,
        RecommendedAction.PROBE, "slow", "",
    )  # fmt: skip
    return replace(base, **more)


def decision(outcome: str = "act", wanted: RecommendedAction = RecommendedAction.PROBE) -> Decision:
    return Decision("d1", "i1", NOW, "n1", wanted, "approve", outcome, "rule", "")


def standing(node: str = "n1", idle_ms: int | None = HOUR, **more: object) -> Standing:
    return Standing(node, idle_ms, **more)


def order(state: str = "failed", ts_ms: int = NOW, incident_id: str = "i1") -> ProbeOrder:
    return ProbeOrder("p1", "n1", (), "quick", (), ProbeReason.CONFIRM, state, ts_ms, incident_id)


SUSPICIONS = {
    "free": (decision(), incident(), standing(), [], True),
    "a job runs on that GPU or another": (decision(), incident(), standing(idle_ms=None), [], False),
    "of a node, and a job runs": (decision(), incident(gpu=None), standing(idle_ms=None), [], False),
    "observe mode": (decision("would_act"), incident(), standing(), [], False),
    "a drain is wanted": (decision(wanted=RecommendedAction.DRAIN), incident(), standing(), [], False),
    "over": (decision(), incident(closed_ms=NOW), standing(), [], False),
    "tried just now": (decision(), incident(), standing(), [order(ts_ms=NOW - AGAIN_MS + 1)], False),
    "tried long ago": (decision(), incident(), standing(), [order(ts_ms=NOW - AGAIN_MS)], True),
    "another's order": (decision(), incident(), standing(), [order(incident_id="i2")], True),
}


@pytest.mark.parametrize("case", list(SUSPICIONS))
def test_a_suspicion_is_probed_where_no_job_is_disturbed(case: str) -> None:
    stored, about, at, orders, asked = SUSPICIONS[case]
    found = confirmations([stored], {about.id: about}, {"n1": at}, orders, ProbesConfig(), NOW)
    assert [(w.node, w.why, w.incident_id) for w in found] == [("n1", ProbeReason.CONFIRM, "i1")] * asked


def test_in_observe_mode_only_where_the_settings_say_so() -> None:
    stored = {"i1": incident()}
    assert confirmations([decision("would_act")], stored, {"n1": standing()}, [], ProbesConfig(confirm=True), NOW)


def test_heat_is_looked_for_by_a_soak() -> None:
    stored = {"i1": incident(cause="thermal")}
    (wish,) = confirmations([decision()], stored, {"n1": standing()}, [], ProbesConfig(), NOW)
    assert "soak" in wish.probes


def wished(config: ProbesConfig, *nodes: Standing, asked: int = 0, room: int = 8, busy: tuple[str, ...] = ()) -> list:
    return [(w.node, w.why.value) for w in upkeep(nodes, busy, asked, config, room)]


def test_nothing_is_done_by_default() -> None:
    assert wished(ProbesConfig(), standing(), standing("n2", probed_ms=1, firmware="b", probed_firmware="a")) == []


def test_a_change_of_driver_asks_for_a_baseline_once_the_node_is_idle() -> None:
    config = ProbesConfig(baseline=True)
    changed = standing(probed_ms=1, firmware="driver=2", probed_firmware="driver=1")
    assert wished(config, changed) == [("n1", "baseline")]
    assert wished(config, replace(changed, idle_ms=None)) == []
    assert wished(config, replace(changed, idle_ms=60_000)) == []
    assert wished(config, replace(changed, probed_firmware="")) == []
    assert wished(config, changed, busy=("n1",)) == []


def test_a_new_node_is_probed_before_it_serves() -> None:
    config = ProbesConfig(admit=True)
    assert wished(config, standing(), standing("n2", probed_ms=1)) == [("n1", "admit")]


def test_the_budget_goes_to_the_highest_risk_and_the_oldest_result() -> None:
    nodes = [standing(f"n{i}", probed_ms=100 - i, risk=float(i == 7)) for i in range(20)]
    config = ProbesConfig(idle_share_per_day=0.15)
    assert wished(config, *nodes) == [("n7", "idle"), ("n19", "idle"), ("n18", "idle")]
    assert wished(config, *nodes, asked=2) == [("n7", "idle")]
    assert wished(config, *nodes, asked=3) == []
    assert wished(config, *nodes, room=2) == [("n7", "idle"), ("n19", "idle")]
    assert wished(ProbesConfig(idle_share_per_day=0.01), *nodes) == [("n7", "idle")]


@example((1, 1, 1))
@example((2, 1))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple).filter(lambda sizes: sum(sizes) > 1))
def test_fabric_rounds_follow_the_leaves(sizes: tuple[int, ...]) -> None:
    nodes = [
        NodeSpec(f"l{leaf}n{n}", leaf=f"l{leaf}") for leaf, size in enumerate(sizes) for n in range(size)
    ]  # fmt: skip
    spec = FleetSpec((*nodes, NodeSpec("stray")))
    leaf = {node.name: node.leaf for node in nodes}
    rounds = fabric_rounds(spec)
    seen: set[frozenset[str]] = set()
    kinds = []
    for pairs in rounds:
        names = [name for pair in pairs for name in pair]
        assert len(set(names)) == len(names)  # each node once in a round
        kinds.append({leaf[a] == leaf[b] for a, b in pairs})
        fresh = {frozenset(pair) for pair in pairs}
        assert not fresh & seen  # and with another partner each time
        seen |= fresh
    assert all(len(kind) == 1 for kind in kinds)
    paired = {name for pairs in rounds for pair in pairs for name in pair}
    assert "stray" not in paired
    assert paired == set(leaf)
    assert ({False} in kinds) == (len(sizes) > 1)
    assert ({True} in kinds) == (max(sizes) > 1)


def test_fabric_rounds_among_some() -> None:
    spec = FleetSpec(tuple(NodeSpec(f"n{i}", leaf=f"l{i % 2}") for i in range(6)))
    assert fabric_rounds(spec, {"n0", "n1"}) == [(("n0", "n1"),)]
    assert fabric_rounds(spec, {"n0"}) == []

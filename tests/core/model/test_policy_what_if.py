"""What would have happened if the policy had enforced."""

from __future__ import annotations

from drover_core.model.events import Decision, RecommendedAction
from drover_core.model.policy_what_if import describe_enforcement


def decision(node: str, wanted: RecommendedAction, outcome: str, ts_ms: int = 1) -> Decision:
    return Decision(f"d{node}{ts_ms}", "i1", ts_ms, node, wanted, "approve", outcome, "rule", "why")


def test_what_is_done_held_and_rejected_is_reported() -> None:
    said, about = describe_enforcement(
        [
            decision("n1", RecommendedAction.DRAIN, "would_act", 1),
            decision("n2", RecommendedAction.DRAIN, "pending_approval", 4),
            decision("n3", RecommendedAction.ISOLATE, "rejected", 2),
            decision("n4", RecommendedAction.DRAIN, "held", 9),
            decision("n5", RecommendedAction.PROBE, "act", 3),
            decision("n2", RecommendedAction.DRAIN, "expired", 3),
            decision("n1", RecommendedAction.DRAIN, "held", 8),  # for another incident: it is out all the same
        ],
        "the last 7 days",
    )
    assert said == (
        "Had it enforced in the last 7 days, Drover would by itself have isolated 1 node (n3), drained 2 nodes (n2,"
        " n1), probed 1 node (n5); the guard would have held 1 node (n4) back. Of these a person rejected 1 node (n3)."
    )
    assert [d.node for d in about] == ["n2", "n5", "n2", "n3", "n1", "n4", "n1"]


def test_nothing_wanted_is_said_so_and_a_mass_event_is_no_node() -> None:
    said, about = describe_enforcement([decision("", RecommendedAction.DRAIN, "pending_approval")], "the last 24 h")
    assert said == (
        "Had it enforced in the last 24 h, Drover would by itself have done nothing; the guard would have held nothing"
        " back."
    )
    assert about == []


def test_many_nodes_are_counted() -> None:
    said, _ = describe_enforcement(
        [decision(f"n{k}", RecommendedAction.DRAIN, "act", -k) for k in range(6)], "the last 7 days"
    )
    assert "drained 6 nodes (n0, n1, n2, n3 and 2 more)" in said

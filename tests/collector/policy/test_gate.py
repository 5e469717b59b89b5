"""Which decisions let a node's gate refuse a job, and that a mass event leaves the partition alive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drover_agent.commands.gate import judge
from drover_collector.policy.decider import Decider
from drover_collector.policy.gate import GateAnswer, GateVerdict, gate_verdicts
from drover_collector.policy.guard import GuardLimits
from drover_core.model.events import Act, Action, ActionState, Health, NodeOutage, RecommendedAction
from testbed.deciding import OPEN, decide, fleet, incident, policy

INDEX = fleet(200)
XID = "drain n001 for xid/xid_79"


def decider(mode: str = "enforce", guard: GuardLimits = OPEN) -> Decider:
    return Decider(INDEX, policy(mode, guard), "enforce")


def refuses(verdict: GateVerdict) -> bool:
    """Whether the gate of a node refuses a job by this verdict."""
    known = {"received_s": 0.0, "answer": verdict.answer.value, "text": verdict.text, "incident": "", "mode": "enforce"}
    return judge({"verdict": known, "faults": [], "age_s": 3600.0, "unanswered": "closed"}, 1.0).refused


@pytest.mark.parametrize(
    ("mode", "answer", "text"),
    [
        ("observe", GateAnswer.OBSERVE, f"would {XID}"), ("approve", GateAnswer.ASKED, "asks to drain n001"),
        ("enforce", GateAnswer.REFUSE, XID),
    ],
)  # fmt: skip
def test_only_what_is_done_refuses(mode: str, answer: GateAnswer, text: str) -> None:
    subject = decider(mode)
    decide(subject, [incident("n001")], 1000)
    (verdict,) = gate_verdicts(subject).values()
    assert (verdict.answer, verdict.incident) == (answer, "n001-xid_79-0")
    assert verdict.text.startswith(text)
    assert refuses(verdict) is (mode == "enforce")


def test_advice_is_no_reason_to_refuse() -> None:
    subject = decider()
    decide(subject, [incident("n001", wanted=RecommendedAction.ADVISE)], 1000)
    assert gate_verdicts(subject) == {}


def test_without_the_guards_leave_the_gate_passes() -> None:
    subject = decider(guard=replace(OPEN, fleet_nodes=1))
    decide(subject, [incident("n001"), incident("n100")], 1000)
    found = gate_verdicts(subject)
    assert {node: v.answer for node, v in found.items()} == {"n001": GateAnswer.REFUSE, "n100": GateAnswer.HELD}
    assert found["n100"].text.startswith("2 of 200 nodes of the fleet would be out")


def test_a_drain_that_failed_gives_no_leave_as_the_caps_do_not_count_its_node() -> None:
    subject = decider()
    (decision,), _ = decide(subject, [incident("n001")], 1000)
    failed = Action(
        "a", decision.id, decision.incident_id, "n001", Act.DRAIN, "slurm", ActionState.FAILED, 2000, "no right"
    )
    subject.take_failed([failed])
    assert "n001" not in subject.out(really=True)
    assert gate_verdicts(subject)["n001"].answer is GateAnswer.HELD


def test_a_node_that_is_out_refuses_until_it_is_back() -> None:
    subject = decider()
    decide(subject, [incident("n001")], 1000)
    subject.take_duties({"n001": NodeOutage("n001", Health.DRAINED, 2000, "n001-xid_79-0", "xid_79 on n001")})
    assert gate_verdicts(subject)["n001"].answer is GateAnswer.REFUSE
    subject.take_duties({"n001": NodeOutage("n001", Health.HEALTHY, 9000, "n001-xid_79-0", "passed")})
    assert gate_verdicts(subject) == {}


def test_200_nodes_whose_gates_fail_at_once_all_pass() -> None:
    """The prolog that drains the whole partition: here the breaker holds it, with the guard's own limits."""
    subject = decider(guard=GuardLimits())
    decide(subject, [incident(f"n{n:03d}") for n in range(200)], 1000)
    found = gate_verdicts(subject)
    assert len(found) == 200
    assert [node for node, verdict in found.items() if refuses(verdict)] == []
    assert {verdict.answer for verdict in found.values()} == {GateAnswer.HELD}


def test_200_nodes_whose_gates_fail_one_after_the_other_leave_the_partition_alive() -> None:
    subject, sick = decider(guard=GuardLimits()), []
    duties: dict[str, NodeOutage] = {}
    for n in range(200):
        sick.append(incident(f"n{n:03d}", at_ms=1000 * n))
        made, _ = decide(subject, sick, 1000 * n)
        begun = {d.node: d for d in made if d.outcome == "act"}
        duties |= {name: NodeOutage(name, Health.DRAINING, d.ts_ms, d.incident_id, "") for name, d in begun.items()}
        subject.take_duties(duties)
    found = gate_verdicts(subject)
    refused = [node for node, verdict in found.items() if refuses(verdict)]
    assert len(found) == 200
    assert refused == sorted(duties), "those that went before the breaker opened, and no other"
    assert 0 < len(refused) < GuardLimits().mass_nodes

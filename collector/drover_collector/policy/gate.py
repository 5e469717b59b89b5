"""What the standing decisions mean for a job that is about to begin on a node. Pure.

A node's gate refuses a job only if the guard has let this node go: Drover takes it out, or has. All else passes, with a
sentence that says what stands against it. So a fault that hits many nodes at once, which the breaker or a cap holds,
drains no partition through its prologs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from drover_collector.policy.decider import DISRUPTIVE, Decider
from drover_core.model.events import OUT_STAGES, Decision, NodeOutage


class GateAnswer(StrEnum):
    """The values are on the wire (`GateVerdict` of telemetry.proto); the later one counts more."""

    PASS = "pass"  # noqa: S105  # not a password
    OBSERVE = "observe"  # observe mode: the job would be refused
    ASKED = "asked"  # a person is asked first
    HELD = "held"  # the guard, or what else holds the decision back, gives no leave
    REFUSE = "refuse"  # with the guard's leave


ORDER = tuple(GateAnswer)
OF_OUTCOME = {
    "would_act": GateAnswer.OBSERVE,
    "pending_approval": GateAnswer.ASKED,
    "held": GateAnswer.HELD,
}


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """
    Attributes:
        closed: the node's scheduler keeps jobs away itself. If it has put the node back since, its word counts.
        by_hand: a person took the node out, under whatever mode of the policy.
    """

    answer: GateAnswer = GateAnswer.PASS
    text: str = ""
    incident: str = ""
    closed: bool = False
    by_hand: bool = False


NOTHING_KNOWN = GateVerdict()


def gate_verdicts(decider: Decider) -> dict[str, GateVerdict]:
    """Return the verdict of each node against which something stands. In the thread that judges."""
    out = decider.out(really=True)
    held, found = decider.held_back(), of_outages(decider.duties)
    for key, decision in decider.standing.items():
        node = key[1]
        if not node or decision.wanted not in DISRUPTIVE or decision.gpu is not None:  # its node stays in service
            continue
        verdict = _of_decision(decision, node in out, key in decider.failed, held.get(node, ""))
        if verdict is not None and _rank(verdict) > _rank(found.get(node, NOTHING_KNOWN)):
            found[node] = verdict
    for node, text in decider.maintenance.items():  # it never refuses a job: to close the node is its planner's part
        found.setdefault(node, GateVerdict(GateAnswer.PASS, text))
    return found


def of_outages(outages: Mapping[str, NodeOutage]) -> dict[str, GateVerdict]:
    """Return the verdicts of nodes that Drover keeps out of service."""
    found = {}
    for node, outage in outages.items():
        if outage.stage in OUT_STAGES:
            text, by_hand = f"{node} is {outage.stage}: {outage.reason}", outage.by != "drover"
            found[node] = GateVerdict(GateAnswer.REFUSE, text, outage.incident_id, closed=True, by_hand=by_hand)
    return found


def in_mode(verdict: GateVerdict, mode: str, ceiling: str) -> GateVerdict:
    """Return the verdict in the modes in force: observe mode refuses nothing, of before it was set too.

    Args:
        mode: the strongest in force. ceiling: `act.mode`, which alone counts for what a person took out.
    """
    if (ceiling if verdict.by_hand else mode) != "observe" or verdict.answer is not GateAnswer.REFUSE:
        return verdict
    return replace(verdict, answer=GateAnswer.OBSERVE)


def _of_decision(decision: Decision, out: bool, failed: bool, held: str) -> GateVerdict | None:
    """Return what a standing decision says; None: nothing.

    A drain that failed took nothing out, so the caps do not count its node: to refuse jobs there would be beyond them.
    The same holds for one that the guard, asked again right before it, holds back.

    Args:
        held: why the guard does; "": it does not.
    """
    if decision.outcome == "act":
        if failed:
            return GateVerdict(GateAnswer.HELD, f"{decision.reason}: it failed", decision.incident_id)
        if held:
            return GateVerdict(GateAnswer.HELD, f"{decision.reason}: {held}", decision.incident_id)
        return GateVerdict(GateAnswer.REFUSE, decision.reason, decision.incident_id) if out else None
    answer = OF_OUTCOME.get(decision.outcome)
    return None if answer is None else GateVerdict(answer, decision.reason, decision.incident_id)


def _rank(verdict: GateVerdict) -> int:
    return ORDER.index(verdict.answer)

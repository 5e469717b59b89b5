"""What a policy would have decided about past incidents. Pure.

It reads incidents, not samples: detection does not depend on the policy. Each incident has its final state (worst
severity, surest cause) from its opening to its closing. A node that is taken out stays out until its incidents close:
nobody knows how long its repair would have taken. Decisions are made only when an incident opens or closes. So one that
the guard holds is not tried again in between, as a live collector would do. The counts are what the policy would have
asked for, and its GPU-hours serve to compare policies; they predict nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.policy.circuit_breaker import of_guard
from drover_collector.policy.decider import DISRUPTIVE, Decider
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Decision,
    Incident,
    RecommendedAction,
    stronger,
)
from drover_core.model.fleet import NodeSpec


@dataclass(slots=True)
class Outage:
    """One time that a node was taken out.

    Attributes:
        wanted: the strongest action that was wanted.
        incidents: the incident that took the node out, then those that kept it out.
        to_ms: when the last of these closed; None: the node is still out.
    """

    node: str
    gpus: int
    wanted: RecommendedAction
    rule: str
    from_ms: int
    incidents: list[str]
    to_ms: int | None = None

    def hours(self, until_ms: int) -> float:
        return max(0, (until_ms if self.to_ms is None else self.to_ms) - self.from_ms) / 3_600_000


@dataclass(slots=True)
class Backtest:
    """The result of one policy.

    Attributes:
        wanted: number of decisions by what they want, those that the guard held included.
        outages: drains and isolations, in order of time.
        most_out: the most nodes that were out at the same time.
        until_ms: nodes that are still out are counted up to then.
        held: decisions that the guard held.
        newest: incident -> its last decision.
    """

    policy: str
    wanted: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)
    most_out: int = 0
    until_ms: int = 0
    held: list[Decision] = field(default_factory=list)
    mass_events: int = 0
    newest: dict[str, Decision] = field(default_factory=dict)

    @property
    def out(self) -> set[str]:
        """Return the nodes that were taken out."""
        return {outage.node for outage in self.outages}

    @property
    def node_hours(self) -> float:
        """Return the node-hours out of service, each until its incidents closed."""
        return sum(outage.hours(self.until_ms) for outage in self.outages)

    @property
    def gpu_hours(self) -> float:
        return sum(outage.hours(self.until_ms) * outage.gpus for outage in self.outages)

    def outcome(self, incident: str) -> str:
        """Return what was decided about an incident: `drain`, `drain, held`, or `nothing`."""
        decision = self.newest.get(incident)
        if decision is None:
            return "nothing"
        return f"{decision.wanted}, held" if decision.outcome == "held" else decision.wanted.value


def backtest(
    index: FleetIndex, incidents: Sequence[Incident], policy: Policy, until_ms: int,
    jobs: Mapping[str, set[str]] | None = None,
) -> Backtest:  # fmt: skip
    """Decide about all incidents again, each at the times of its opening and closing.

    Args:
        incidents: the newest version of each.
        until_ms: open incidents are counted up to then.
        jobs: nodes of each job; the guard's cap per job does not bound a job that is missing here.
    """
    found = Backtest(policy.name, until_ms=until_ms)
    decider = Decider(index, policy, "observe")  # decides, and does nothing
    real = [i for i in incidents if not of_guard(i)]  # the guard makes its own again
    moments = sorted({i.opened_ms for i in real} | {i.closed_ms for i in real if i.closed_ms is not None})
    ends = {i.id: i.closed_ms for i in real}
    opening = sorted(real, key=lambda i: (i.opened_ms, i.id))
    reporting = np.ones(index.node_count, bool), np.ones(index.gpu_count, bool)
    open_: dict[str, Incident] = {}
    taken: dict[str, Outage] = {}  # by node
    at = 0
    for now_ms in moments:
        for id_ in [id_ for id_ in open_ if (ends[id_] or until_ms + 1) <= now_ms]:
            del open_[id_]
        while at < len(opening) and opening[at].opened_ms <= now_ms:
            one = opening[at]
            if one.closed_ms is None or one.closed_ms > now_ms:
                open_[one.id] = replace(one, closed_ms=None)
            at += 1
        _return_nodes(taken, open_, now_ms)
        wanted = [(i, i.asked or i.action) for i in open_.values()]
        fold = health.fold(index, open_.values(), *reporting)
        made, events = decider.decide(wanted, fold, lambda incident: _of_job(incident.job, jobs), now_ms)
        found.mass_events += sum(event.version == 1 for event in events)
        for decision in made:
            _count(found, taken, decision, index)
        found.most_out = max(found.most_out, len(decider.out()))
    return found


def _count(found: Backtest, taken: dict[str, Outage], decision: Decision, index: FleetIndex) -> None:
    if decision.wanted is RecommendedAction.NONE or decision.outcome not in ("held", "would_act"):
        return
    before = found.newest.get(decision.incident_id)
    if before is None or before.wanted is not decision.wanted:
        found.wanted[decision.wanted.value] += 1
    found.newest[decision.incident_id] = decision
    if decision.outcome == "held":
        found.held.append(decision)
    elif decision.wanted in DISRUPTIVE:
        outage = taken.get(decision.node)
        if outage is None:
            place = index.spec.by_name.get(decision.node)
            outage = taken[decision.node] = Outage(
                decision.node, _gpus_out(decision, place), decision.wanted, decision.rule, decision.ts_ms, []
            )
            found.outages.append(outage)
        outage.wanted = stronger(outage.wanted, decision.wanted)
        if decision.incident_id not in outage.incidents:
            outage.incidents.append(decision.incident_id)


def _gpus_out(decision: Decision, place: NodeSpec | None) -> int:
    if decision.gpu is not None:
        return 1
    return 0 if place is None else place.gpus


def _return_nodes(taken: dict[str, Outage], open_: Mapping[str, Incident], now_ms: int) -> None:
    """End the outages whose incidents have all closed."""
    for node in [node for node, outage in taken.items() if not open_.keys() & set(outage.incidents)]:
        taken.pop(node).to_ms = now_ms


def _of_job(job: str | None, jobs: Mapping[str, set[str]] | None) -> dict[str, set[str]]:
    return {job: jobs[job]} if job is not None and jobs and job in jobs else {}

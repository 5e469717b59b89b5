"""What a policy would have decided of incidents that were. Pure.

Incidents are taken, not samples: detection does not depend on the policy, so what differs is what is decided. Each is
taken as it stood at its end (its worst severity and surest cause) from its opening to its closing; a node that is taken
out stays out for as long as the incident that took it was open, since nobody knows how long its repair had taken. So
the counts of a policy are what it would have asked for; GPU-hours are a measure for comparing, not a prophecy.
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


@dataclass(slots=True)
class Outage:
    """One time that a node was taken out: by the incident `incidents` begins with, until all of them were over."""

    node: str
    gpus: int
    wanted: RecommendedAction  # the strongest
    rule: str
    from_ms: int
    incidents: list[str]
    to_ms: int | None = None  # None: it is out still

    def hours(self, until_ms: int) -> float:
        return max(0, (until_ms if self.to_ms is None else self.to_ms) - self.from_ms) / 3_600_000


@dataclass(slots=True)
class Backtest:
    """What one policy came to."""

    policy: str
    wanted: Counter[str] = field(default_factory=Counter)  # decisions by what is wanted, held ones too
    outages: list[Outage] = field(default_factory=list)  # drains and isolations, in their order
    most_out: int = 0  # nodes at the same time
    until_ms: int = 0  # to which those that are out still are counted
    held: list[Decision] = field(default_factory=list)
    mass_events: int = 0
    newest: dict[str, Decision] = field(default_factory=dict)  # incident -> how its decision stood at the end

    @property
    def out(self) -> set[str]:
        """Nodes that were taken out."""
        return {outage.node for outage in self.outages}

    @property
    def node_hours(self) -> float:
        """Out of service, until the incidents closed."""
        return sum(outage.hours(self.until_ms) for outage in self.outages)

    @property
    def gpu_hours(self) -> float:
        return sum(outage.hours(self.until_ms) * outage.gpus for outage in self.outages)

    def outcome(self, incident: str) -> str:
        """`drain`, `drain, held`, or `nothing`."""
        decision = self.newest.get(incident)
        if decision is None:
            return "nothing"
        return f"{decision.wanted}, held" if decision.outcome == "held" else decision.wanted.value


def backtest(
    index: FleetIndex, incidents: Sequence[Incident], policy: Policy, until_ms: int,
    jobs: Mapping[str, set[str]] | None = None,
) -> Backtest:  # fmt: skip
    """Decide all of them again, in their own time.

    Args:
        incidents: newest versions. until_ms: to which those still open are counted.
        jobs: nodes of each job; a job that is not there is bounded by no cap of jobs.
    """
    found = Backtest(policy.name, until_ms=until_ms)
    decider = Decider(index, policy, "observe")  # decides all, and does nothing
    real = [i for i in incidents if not of_guard(i)]
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
        _count_back(taken, open_, now_ms)
        wishes = [(i, i.asked or i.action) for i in open_.values()]
        fold = health.fold(index, open_.values(), *reporting)
        made, events = decider.decide(wishes, fold, lambda incident: _of_job(incident.job, jobs), now_ms)
        found.mass_events += sum(event.version == 1 for event in events)
        for decision in made:
            _note(found, taken, decision, index)
        found.most_out = max(found.most_out, len(decider.out()))
    return found


def _note(found: Backtest, taken: dict[str, Outage], decision: Decision, index: FleetIndex) -> None:
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
                decision.node, 0 if place is None else place.gpus, decision.wanted, decision.rule, decision.ts_ms, []
            )
            found.outages.append(outage)
        outage.wanted = stronger(outage.wanted, decision.wanted)
        if decision.incident_id not in outage.incidents:
            outage.incidents.append(decision.incident_id)


def _count_back(taken: dict[str, Outage], open_: Mapping[str, Incident], now_ms: int) -> None:
    """Nodes come back when the incidents are over for which they went."""
    for node in [node for node, outage in taken.items() if not open_.keys() & set(outage.incidents)]:
        taken.pop(node).to_ms = now_ms


def _of_job(job: str | None, jobs: Mapping[str, set[str]] | None) -> dict[str, set[str]]:
    return {job: jobs[job]} if job is not None and jobs and job in jobs else {}

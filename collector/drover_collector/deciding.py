"""Deciding: what the policy wants for each open incident, and what becomes of the wish. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Set

from drover_collector import guard, health
from drover_collector.fleet_index import FleetIndex
from drover_collector.policy import Policy
from drover_proto.events import WANTED_ORDER, Decision, Health, Incident, Wanted

JobNodes = Callable[[str | None], dict[str, Set[str]]]  # the nodes of a job, by its name; empty when it is not known


class Decider:
    """Keeps what was decided last for each open incident and node, so that only what has changed is decided again."""

    def __init__(self, index: FleetIndex, policy: Policy) -> None:
        self.index = index
        self.policy = policy
        self.standing: dict[tuple[str, str], Decision] = {}

    def decide(
        self, wishes: Iterable[tuple[Incident, Wanted]], fold: health.Fold, job_nodes: JobNodes, now_ms: int
    ) -> list[Decision]:
        """New decisions: for each open incident and node, when what is wanted or its outcome has changed.

        Args:
            wishes: open incidents, each with what its detectors ask for.
            fold: health of all, as of the call before.
        """
        decisions: list[Decision] = []
        wishes = list(wishes)
        open_ids = {incident.id for incident, _ in wishes}
        self.standing = {key: d for key, d in self.standing.items() if key[0] in open_ids}
        for incident, asked in wishes:
            wanted, rule = self.policy.wanted(incident, asked)
            if incident.node is None or WANTED_ORDER.index(wanted) < WANTED_ORDER.index(Wanted.PROBE):
                self.standing.pop((incident.id, incident.node or ""), None)
                continue
            key = (incident.id, incident.node)
            last = self.standing.get(key)
            reason = self._held(incident, wanted, fold, job_nodes)
            outcome = "held" if reason else "would_act"
            if last is not None and (last.wanted, last.outcome, last.rule) == (wanted, outcome, rule):
                continue
            text = reason or f"observe mode: would {wanted.value} {incident.node} for {incident.kind}/{incident.cause}"
            seed = f"{incident.id} {incident.node} {wanted} {outcome} {now_ms}"
            decision = Decision(
                hashlib.blake2b(seed.encode(), digest_size=8).hexdigest(), incident.id, now_ms, incident.node, wanted,
                self.policy.mode, outcome, rule, text,
            )  # fmt: skip
            self.standing[key] = decision
            decisions.append(decision)
        return decisions

    def _held(self, incident: Incident, wanted: Wanted, fold: health.Fold, job_nodes: JobNodes) -> str | None:
        """Why the guard would hold the action back; None when it would not, or when nothing leaves service."""
        if wanted not in (Wanted.DRAIN, Wanted.ISOLATE) or incident.node is None:
            return None
        codes = Counter(fold.node.tolist())
        unknown = codes[health.HEALTHS.index(Health.UNKNOWN)]
        out = {
            node
            for (_, node), d in self.standing.items()
            if d.outcome == "would_act" and d.wanted in (Wanted.DRAIN, Wanted.ISOLATE)
        }
        state = guard.FleetState(
            self.index, out, codes[health.HEALTHS.index(Health.HEALTHY)], self.index.node_count - unknown,
            job_nodes(incident.job),
        )  # fmt: skip
        return guard.hold(incident.node, incident.job, state, self.policy.guard)

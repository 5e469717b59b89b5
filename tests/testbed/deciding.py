"""Incidents and a healthy fleet, for tests of the policy's, the guard's and the decider's answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents import health
from drover_collector.policy.decider import Decider
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.policy import Policy, Rule
from drover_core.model.events import (
    Decision,
    Incident,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import FleetSpec, NodeSpec

OPEN = GuardLimits(  # no limit: what a test is about it sets itself
    fleet_ratio=1, pool_ratio=1, rack_ratio=1, leaf_ratio=1, job_ratio=1, min_healthy_ratio=0, per_hour=0, cooldown_s=0,
    mass_nodes=0, gap_ratio=0,
)  # fmt: skip


def fleet(count: int, per_rack: int = 4, per_leaf: int = 8, per_pool: int = 16) -> FleetIndex:
    """Nodes n000, n001, ... of one GPU each."""
    nodes = (
        NodeSpec(f"n{n:03d}", f"r{n // per_rack}", f"l{n // per_leaf}", f"p{n // per_pool}", "sku", 1)
        for n in range(count)
    )
    return FleetIndex(FleetSpec(tuple(nodes)))


def policy(mode: str = "enforce", guard: GuardLimits = OPEN, rules: tuple[Rule, ...] = (), **more: float) -> Policy:
    return Policy("test", mode, guard, rules, **more)  # type: ignore[arg-type]  # only numbers are left


def incident(
    node: str, cause: str = "xid_79", at_ms: int = 0, number: int = 0, job: str | None = None,
    kind: IncidentKind = IncidentKind.XID, wanted: RecommendedAction = RecommendedAction.DRAIN,
) -> Incident:  # fmt: skip
    return Incident(
        f"{node}-{cause}-{number}", kind, cause, "gpu", node, 0, ((node, 0),), at_ms, at_ms, None, Severity.CRITICAL,
        0.99, wanted, f"{cause} on {node}.", "Drain it.", detectors=("xid",), job=job, updated_ms=at_ms,
    )  # fmt: skip


def folded(
    index: FleetIndex, incidents: Iterable[Incident] = (), duties: Mapping[str, NodeOutage] | None = None
) -> health.HealthFold:
    reporting = np.ones(index.node_count, bool)
    return health.fold(index, incidents, reporting, np.ones(index.gpu_count, bool), duties)


def decide(
    decider: Decider, incidents: Sequence[Incident], now_ms: int, jobs: Mapping[str, Set[str]] | None = None,
    reporting: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None,
) -> tuple[list[Decision], list[Incident]]:  # fmt: skip
    fold = folded(decider.index, incidents, decider.duties)
    wishes = [(i, i.action) for i in incidents]
    return decider.decide(wishes, fold, lambda _: jobs or {}, now_ms, reporting)

"""Blast-radius guard: how much of the fleet may be taken out of service. Pure; every disruptive decision passes it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from drover_collector.fleet_index import FleetIndex
from drover_proto.settings import between, setting


@dataclass(frozen=True)
class GuardLimits:
    """Shares are of nodes. Each limit allows at least one node, or small racks and jobs could lose none."""

    fleet_ratio: float = setting(0.1, "at most this share of the fleet's nodes out of service at once", between(0, 1))
    rack_ratio: float = setting(0.5, "at most this share of a rack's nodes", between(0, 1))
    job_ratio: float = setting(0.25, "at most this share of the nodes of one job", between(0, 1))
    min_healthy_ratio: float = setting(
        0.7, "no more nodes go out while fewer than this share of the fleet is healthy", between(0, 1)
    )


@dataclass(frozen=True, slots=True)
class FleetState:
    """What the guard must know. `out`: nodes that decisions have taken out (or would have, in observe mode)."""

    index: FleetIndex
    out: Set[str]
    healthy_nodes: int
    known_nodes: int  # whose health is not unknown
    job_nodes: Mapping[str, Set[str]]  # nodes of each job


def hold(node: str, job: str | None, state: FleetState, limits: GuardLimits) -> str | None:
    """Why `node` must not be taken out now, as a sentence; None when it may be."""
    if node in state.out:
        return None
    index = state.index
    spec = index.spec.by_name.get(node)
    if spec is None:
        return f"{node} is not in the fleet file"
    out = len(state.out) + 1
    if out > _allowed(index.node_count, limits.fleet_ratio):
        return _words(out, index.node_count, "the fleet", limits.fleet_ratio)
    if spec.rack:
        rack = {other.name for other in index.nodes if other.rack == spec.rack}
        out = len(rack & state.out) + 1
        if out > _allowed(len(rack), limits.rack_ratio):
            return _words(out, len(rack), f"rack {spec.rack}", limits.rack_ratio)
    if job is not None and (nodes := state.job_nodes.get(job)):
        out = len(nodes & state.out) + 1
        if out > _allowed(len(nodes), limits.job_ratio):
            return _words(out, len(nodes), f"job {job}", limits.job_ratio)
    if state.known_nodes and state.healthy_nodes < limits.min_healthy_ratio * state.known_nodes:
        return (
            f"only {state.healthy_nodes} of {state.known_nodes} known nodes are healthy "
            f"(at least {limits.min_healthy_ratio:.0%} must be): a person should look first"
        )
    return None


def _allowed(count: int, ratio: float) -> int:
    return max(1, int(count * ratio))


def _words(out: int, count: int, of: str, ratio: float) -> str:
    return f"{out} of {count} nodes of {of} would be out (at most {ratio:.0%}, and always one, may be)"

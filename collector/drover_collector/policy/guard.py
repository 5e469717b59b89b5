"""Blast-radius guard: how much of the fleet may be taken out of service. Pure; every disruptive decision passes it.

    caps         by share and by count, of fleet, pool, rack, leaf and job (here); what others took out and what is dead
                 counts as well
    healthy      no more nodes go while too few of the known ones are healthy (here)
    pace         so many nodes an hour; a node that came back is left alone for a while (here)
    breaker      many nodes at once with one cause: a person is asked (circuit_breaker)

A resume passes no guard: what is well may always come back. Only a drain that Drover itself made is ever undone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.guard_clock import ClockSteps
from drover_core.model.events import OUT_STAGES, GpuRef, Health, NodeOutage
from drover_core.settings import between, setting

HOUR_MS = 3_600_000
GROUPS = ("pool", "rack", "leaf")


@dataclass(frozen=True)
class GuardLimits:
    """Shares are of nodes. Each share allows at least one node, or small racks and jobs could lose none."""

    fleet_ratio: float = setting(0.1, "at most this share of the fleet's nodes out of service at once", between(0, 1))
    pool_ratio: float = setting(0.2, "at most this share of a pool's nodes", between(0, 1))
    rack_ratio: float = setting(0.5, "at most this share of a rack's nodes", between(0, 1))
    leaf_ratio: float = setting(0.5, "at most this share of the nodes of one leaf switch", between(0, 1))
    job_ratio: float = setting(0.25, "at most this share of the nodes of one job", between(0, 1))
    fleet_nodes: int = setting(0, "at most this many nodes of the fleet; 0: no such limit", between(0, 1_000_000))
    pool_nodes: int = setting(0, "of a pool", between(0, 1_000_000))
    rack_nodes: int = setting(0, "of a rack", between(0, 1_000_000))
    leaf_nodes: int = setting(0, "of a leaf switch", between(0, 1_000_000))
    job_nodes: int = setting(0, "of a job", between(0, 1_000_000))
    min_healthy_ratio: float = setting(
        0.7, "no more nodes go out while fewer than this share of the known nodes is healthy", between(0, 1)
    )
    per_hour: int = setting(10, "at most this many nodes within an hour; 0: no such limit", between(0, 1_000_000))
    cooldown_s: float = setting(
        600.0, "a node that came back is not taken out again within this time", between(0, 7 * 86_400)
    )
    mass_nodes: int = setting(
        5, "the breaker opens when this many nodes are to go with one cause, within mass_window_s; 0: never",
        between(0, 1_000_000),
    )  # fmt: skip
    mass_ratio: float = setting(0.002, "but not below this share of the fleet", between(0, 1))
    mass_window_s: float = setting(300.0, "window of the breaker", between(1, 86_400))
    gap_ratio: float = setting(
        0.2, "it opens too when this share of the fleet falls silent in that time: the collector's own fault, or a"
        " network's; 0: never", between(0, 1),
    )  # fmt: skip
    quiet_s: float = setting(
        3600.0, "it closes for other nodes when none has joined for this long; 0: only a person closes it",
        between(0, 7 * 86_400),
    )  # fmt: skip

    def allowed(self, group: str, count: int) -> int:
        """How many of `count` nodes of a fleet, pool, rack, leaf or job may be out; at least one."""
        most = max(1, int(count * float(getattr(self, f"{group}_ratio")) + 1e-9))
        limit = int(getattr(self, f"{group}_nodes"))
        return min(most, limit) if limit else most


class Census:
    """Who is out of service, counted by group; `take` counts one node more.

    Args:
        out: nodes that decisions and duties have taken out (or would have, in observe mode).
        healthy: nodes whose health is healthy; known: whose health is not unknown.
        away: nodes that others took out, or that are dead: they are missing as well.
        doubtful: the silent ones among them that no scheduler reports as dead: to take them out costs as much
            as to take out any other.
        really: of `out` those that are out, and not only would be.
    """

    def __init__(
        self,
        index: FleetIndex,
        out: Iterable[str],
        healthy: int,
        known: int,
        away: Iterable[str] = (),
        really: Set[str] = frozenset(),
        doubtful: Set[str] = frozenset(),
    ) -> None:
        self.index, self.healthy, self.known = index, healthy, known
        self.out: set[str] = set()
        self.really = really
        self.away = {node for node in away if node in index.node_number}
        self._missing = self.away - doubtful  # for sure
        self._codes = {"pool": index.pool, "rack": index.rack, "leaf": index.leaf}
        self._names = {"pool": index.pools, "rack": index.racks, "leaf": index.leafs}
        self._sizes = {group: np.bincount(codes) for group, codes in self._codes.items() if len(codes)}
        self._ours: dict[str, Counter[int]] = {group: Counter() for group in GROUPS}
        self._all: dict[str, Counter[int]] = {group: Counter() for group in GROUPS}
        self._isolated: dict[str, float] = {}  # node -> share of it that is out of service as single GPUs
        for node in self.away:
            self._count(self._all, node, 1)
        for node in out:
            self.take(node)

    def take(self, node: str) -> None:
        if node in self.out or node not in self.index.node_number:
            return
        self.out.add(node)
        self._count(self._ours, node, 1)
        if node not in self.away:
            self._count(self._all, node, 1)

    def give_back(self, node: str) -> None:
        """It is not out after all."""
        if node not in self.out:
            return
        self.out.remove(node)
        self._count(self._ours, node, -1)
        if node not in self.away:
            self._count(self._all, node, -1)

    def take_gpu(self, node: str, share: float) -> None:
        """Count a GPU that is out alone, as this share of its node."""
        if node in self.index.node_number:
            self._isolated[node] = min(1.0, self._isolated.get(node, 0.0) + share)

    def give_back_gpu(self, node: str, share: float) -> None:
        """It is not out after all."""
        if node in self._isolated:
            self._isolated[node] = max(0.0, self._isolated[node] - share)

    def isolated(self, nodes: Set[str], gone: Set[str], besides: str = "") -> float:
        """Return how many nodes the single GPUs of `nodes` add up to, without nodes that are gone as a whole.

        Args:
            besides: a node that does not count: it goes as a whole.
        """
        return sum(share for node, share in self._isolated.items() if node in nodes - gone and node != besides)

    def members(self, group: str, node: str) -> Set[str]:
        """Return the nodes with single GPUs out that are in the same group as `node`."""
        if group == "fleet":
            return self._isolated.keys()
        code, numbers = self._codes[group], self.index.node_number
        mine = int(code[numbers[node]])
        return {other for other in self._isolated if other in numbers and int(code[numbers[other]]) == mine}

    def gone(self, node: str) -> set[str]:
        """What counts for `node`: all others that are missing. One that is missing itself takes nothing more away; for
        it what Drover took out counts, so that nodes that only seem dead do not all go."""
        return self.out if node in self._missing else (self.out | self.away) - ({node} - self.out)

    def counts(self, node: str) -> list[tuple[str, str, int, int]]:
        """(group, its name, nodes out of it, nodes in it) of the fleet and of the groups that `node` is in."""
        n = self.index.node_number[node]
        gone = self._ours if node in self._missing else self._all
        itself = node in self.away and node not in self._missing and node not in self.out
        found = [("fleet", "", len(self.gone(node)), self.index.node_count)]
        for group in GROUPS:
            code = int(self._codes[group][n])
            if name := self._names[group][code]:  # a fleet file may leave rack, leaf or pool out: then there is none
                found.append((group, name, gone[group][code] - itself, int(self._sizes[group][code])))
        return found

    def is_missing(self, node: str) -> bool:
        """Whether it is out by others or dead for sure: to take it out takes nothing more away."""
        return node in self._missing

    def _count(self, groups: dict[str, Counter[int]], node: str, by: int) -> None:
        n = self.index.node_number[node]
        for group in GROUPS:
            groups[group][int(self._codes[group][n])] += by


def hold(
    node: str, jobs: Mapping[str, Set[str]], census: Census, limits: GuardLimits, gpu_share: float | None = None
) -> str | None:
    """Why `node` must not be taken out now, as a sentence; None when it may be.

    Args:
        jobs: those that may run on it, each with its nodes.
        gpu_share: only a GPU of it goes, which is this share of it; None: the node.
    """
    if node in census.out:
        return None
    if node not in census.index.node_number:
        return f"{node} is not in the fleet file"
    gone = census.gone(node)
    groups = [(g, name, out, count, census.members(g, node)) for g, name, out, count in census.counts(node)]
    groups += [("job", job, len(nodes & gone), len(nodes), nodes) for job, nodes in jobs.items() if node in nodes]
    more, besides = (1.0, node) if gpu_share is None else (gpu_share, "")
    for group, name, whole, count, members in groups:
        most = limits.allowed(group, count)
        out = whole + census.isolated(members, gone, besides) + more
        if out > most + 1e-6:
            of = "the fleet" if group == "fleet" else f"{group} {name}"
            away = len(census.away - census.out)
            others = (
                f"; {away} {'nodes of the fleet are' if away > 1 else 'node of the fleet is'} dead or out by others"
                if away and not census.is_missing(node)
                else ""
            )
            return f"{_number(out)} of {count} nodes of {of} would be out (at most {most} may be{others})"
    unwell = census.known - census.healthy
    if unwell > 1 and census.healthy < limits.min_healthy_ratio * census.known:
        return (
            f"only {census.healthy} of {census.known} known nodes are healthy "
            f"(at least {limits.min_healthy_ratio:.0%} must be): a person should look first"
        )
    return None


def _number(nodes: float) -> str:
    return str(round(nodes)) if abs(nodes - round(nodes)) < 1e-6 else f"{nodes:.3f}".rstrip("0")


def may_resume(node: str, duty: NodeOutage | None) -> str | None:
    """Return why Drover must not put `node` back, as a sentence; None: it may, because it took the node out."""
    if duty is None or duty.stage not in OUT_STAGES:
        return f"{node} was not taken out by Drover: only the person who did can put it back"
    return None


class Pace:
    """Nodes that were taken out within the last hour, and when each node came back."""

    def __init__(self, steps: ClockSteps | None = None) -> None:
        self._steps = steps or ClockSteps()
        self.taken: deque[tuple[int, str]] = deque()  # (when, node), with those that observe mode only announced
        self.done: deque[tuple[int, str]] = deque()  # without them
        self.returned: dict[str, NodeOutage] = {}

    def note_taken(self, node: str, at_ms: int, said: bool = False) -> None:
        """Count a node that a decision took out; `said`: it would have, in observe mode."""
        self.taken.append((at_ms, node))
        if not said:
            self.done.append((at_ms, node))

    def note_outage(self, outage: NodeOutage) -> None:
        if outage.stage is Health.HEALTHY:
            self.returned[outage.node if outage.gpu is None else outage.gpu.uuid] = outage

    def within_hour(self, now_ms: int, said: bool = True) -> int:
        """Return how many nodes went out within the hour; `said`: with those that observe mode only announced."""
        for taken in (self.taken, self.done):
            for at, (at_ms, node) in enumerate(taken):
                if self._steps.now_of(at_ms) > now_ms:  # the clock went back: take it for now, or it would stay
                    taken[at] = now_ms, node
            while taken and self._steps.age_ms(now_ms, taken[0][0]) >= HOUR_MS:
                taken.popleft()
        return len({node for _, node in (self.taken if said else self.done)})

    def returned_of(self, node: str, gpu: GpuRef | None) -> list[NodeOutage]:
        """Return how what would go came back: a GPU with its node, or a node with all GPUs that went out alone."""
        if gpu is not None:
            return [self.returned[key] for key in (gpu.uuid, node) if key in self.returned]
        return [outage for outage in self.returned.values() if outage.node == node]

    def hold(
        self, node: str, now_ms: int, limits: GuardLimits, said: bool = False, gpu: GpuRef | None = None
    ) -> str | None:
        """Return why `node` must wait, as a sentence; None: it need not. `said`: as for `within_hour`.

        Args:
            gpu: it goes alone. It counts as a node here: this is the pace of what Drover does.
        """
        if limits.per_hour and (count := self.within_hour(now_ms, said)) >= limits.per_hour:
            return f"{count} nodes went out within the last hour (at most {limits.per_hour} may)"
        for key in (node,) if gpu is None else (gpu.uuid, node):
            outage = self.returned.get(key)
            if outage is not None and self._steps.now_of(outage.ts_ms) > now_ms:  # the clock went back here too
                outage = self.returned[key] = replace(outage, ts_ms=now_ms)
            age_ms = 0 if outage is None else self._steps.age_ms(now_ms, outage.ts_ms)
            if outage is not None and age_ms < limits.cooldown_s * 1000:
                minutes = max(0, age_ms) // 60_000
                return f"{key} came back {minutes} min ago: it is left alone for {limits.cooldown_s / 60:.0f} min"
        return None

"""Collectives over groups of nodes: a group is as slow as its worst member, so several groups name that one.

Group testing: who ran in a good group is cleared; a bad group with one member left that is not cleared names it; with
several, it is one of them, and the next groups to run are named; with none, the way between its members is to blame.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.probes.judging.fleet import LEAST, Scale
from drover_collector.probes.judging.groups import (
    Floats,
    fit,
    sign,
    usual,
)
from drover_collector.probes.judging.measurements import End
from drover_collector.probes.judging.texts import number, off
from drover_core.model.probe_figures import FIGURES

BUDGET = 1.0  # false fails per 1,000 groups run
MOST_FASTER = 0.1  # of the groups of a kind
COARSE = 0.3  # groups that lie so far apart clear nobody; half the links of a node, or one NIC of two, cost more


@dataclass(frozen=True, slots=True)
class Run:
    """One collective over `nodes` (in any order). `value`: bus bandwidth in GB/s, None: none came, see `end`.

    `board`: what its nodes are by design; runs of others say nothing of it.
    """

    nodes: tuple[str, ...]
    probe: str
    value: float | None
    end: End = End.DONE
    detail: str = ""
    board: str = ""


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """`why`: without the node's name. `suspects`: one of these nodes is faulty, and it is unknown which one."""

    node: str
    ok: bool | None
    why: str
    suspects: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.node}: {self.why}"


@dataclass(frozen=True, slots=True)
class Blame:
    """`ways`: groups that were slow though each member was good elsewhere, and a sentence. `next_pairs`: run these."""

    nodes: tuple[NodeVerdict, ...]
    ways: tuple[tuple[tuple[str, ...], str], ...]
    next_pairs: tuple[tuple[str, str], ...]


def blame(
    runs: Sequence[Run], leaf: Mapping[str, str], known: Sequence[Run] = (), budget: float = BUDGET, least: int = 1
) -> Blame:  # fmt: skip
    """Who makes groups slow.

    Args:
        leaf: the leaf switch of each node; a group across leaves is held against such groups only.
        known: earlier runs of other nodes of the same kind, to hold these against.
        least: bad groups that a node is named by; one in fewer is a suspect.
    """
    states = {_name(run): _state(run, [*runs, *known], leaf, budget) for run in runs}
    by_state: dict[bool | None, list[Run]] = defaultdict(list)
    for run in runs:
        by_state[states[_name(run)][0]].append(run)
    cleared = {node for run in by_state[True] for node in run.nodes}
    faulty: dict[str, str] = {}
    open_: dict[str, tuple[tuple[str, ...], str]] = {}
    ways: list[tuple[tuple[str, ...], str]] = []
    bad = sorted(by_state[False], key=_name)
    for run in bad:
        names = set(run.nodes) - cleared
        if len(names) == 1:
            name = min(names)
            if sum(name in other.nodes for other in bad) >= least:
                faulty[name] = states[_name(run)][1]
    for run in bad:
        left = tuple(sorted(set(run.nodes) - cleared))
        why = states[_name(run)][1]
        if not left:
            leaves = sorted({leaf.get(node, "?") for node in run.nodes})
            way = f"the way between leaves {', '.join(leaves)}" if len(leaves) > 1 else f"leaf {leaves[0]}"
            text = f"{why}, though each of them was good in another group: {way}, or it was disturbed"
            ways.append((tuple(sorted(run.nodes)), text))
        elif not faulty.keys() & set(left):
            for node in left:
                open_.setdefault(node, (left, why))
    verdicts = [
        _verdict(node, cleared, faulty, open_)
        for node in sorted({node for run in runs for node in run.nodes})
    ]  # fmt: skip
    partners = {node: {other for run in bad if node in run.nodes for other in run.nodes} for node in open_}
    return Blame(tuple(verdicts), tuple(ways), _next(open_, cleared, leaf, partners))


def _name(run: Run) -> tuple[str, tuple[str, ...], float, str]:
    return run.probe, tuple(sorted(run.nodes)), -1.0 if run.value is None else run.value, run.end.value


def _kind(run: Run, leaf: Mapping[str, str]) -> tuple[str, str, int, bool]:
    return run.probe, run.board, len(run.nodes), len({leaf.get(node, "?") for node in run.nodes}) > 1


def _state(run: Run, others: Sequence[Run], leaf: Mapping[str, str], budget: float) -> tuple[bool | None, str]:
    """Return whether the group is good (None: unknown), and why."""
    who = f"{run.probe} over {', '.join(sorted(run.nodes))}"
    why = f" ({run.detail})" if run.detail else ""
    if run.end in (End.HUNG, End.CRASHED, End.TIMEOUT):
        return False, f"{who} {'was not done in time' if run.end is End.TIMEOUT else run.end.value}{why}"
    value = _usable(run)
    if not value:
        return None, f"{who} gave no figure{why}"
    turn = sign(run.probe)
    like = [found for other in others if _kind(other, leaf) == _kind(run, leaf) and (found := _usable(other))]
    if len(like) < LEAST:
        return None, f"{who}: too few groups of its kind to compare"
    logs = turn * _logs(like)
    scale = Scale(run.probe, fit(logs, usual(run.probe).spread), budget / 1000)
    far = scale.fit.centre - turn * math.log(value)
    text = f"{who} reached {number(value)} {FIGURES[run.probe].unit}, "
    text += f"{off(run.probe, far)} the {len(like)} groups of its kind ({scale.text})"
    reach = float(scale.reach())
    if far > reach:
        return False, text
    # One bad node spoils a whole group, so most groups may be bad: what lies about the centre is good only if little
    # lies above it.
    faster = float((logs > scale.fit.centre + reach).mean())
    return (True if far < -reach or (faster <= MOST_FASTER and scale.detectable <= COARSE) else None), text


def _usable(run: Run) -> float:
    """Its figure; 0 where there is none that can be."""
    return run.value if run.value is not None and 0 < run.value < math.inf else 0.0


def _logs(values: Sequence[float]) -> Floats:
    return np.log(np.array(values, dtype=np.float64))


def _verdict(
    node: str, cleared: set[str], faulty: Mapping[str, str], open_: Mapping[str, tuple[tuple[str, ...], str]]
) -> NodeVerdict:
    if node in faulty:
        return NodeVerdict(node, False, f"{faulty[node]}; the others of that group were good elsewhere")
    if node in cleared:
        return NodeVerdict(node, True, "good in a group")
    if node in open_:
        suspects, why = open_[node]
        if suspects == (node,):
            text = f"{why}; the others of that group were good elsewhere, but it ran in no other"
            return NodeVerdict(node, None, text, suspects)
        return NodeVerdict(node, None, f"{why}; one of {', '.join(suspects)}", suspects)
    return NodeVerdict(node, None, "ran only with a faulty node, or in no group that could be judged")


def _next(
    open_: Mapping[str, tuple[tuple[str, ...], str]],
    cleared: set[str],
    leaf: Mapping[str, str],
    partners: Mapping[str, set[str]],
) -> tuple[tuple[str, str], ...]:
    """Each suspect with a cleared node of its leaf that it was not slow with already, if there is one; else another."""
    pairs = []
    for node in sorted(open_):
        good = sorted(cleared, key=lambda o: (o in partners[node], leaf.get(o) != leaf.get(node), o))  # used at once
        if good:
            pairs.append((node, good[0]))
    return tuple(pairs)

"""What many boards give alike is no fault of one: of software, of a slot by design, of the host. Pure.

A failed verdict here becomes a doubt: nothing is drained for it, and nothing is cleared by it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from drover_collector.probes.fleet import LEAST
from drover_collector.probes.measurements import Basis, Verdict

MOST_OF_NODE = 1 / 2  # of a node's GPUs, and at least two: a wrong answer or a crash of more is the software's
MOST_NODES = 0.1  # of the nodes that ran a probe, and at least LEAST: likewise
MOST_OF_SLOT = 1 / 2  # of the nodes' GPUs in one slot, and at least LEAST: this slot is slower by design


def doubted(verdict: Verdict, why: str) -> Verdict:
    return dataclasses.replace(verdict, ok=None, text=f"{verdict.text}; but {why}: not judged", suspicious=True)


def by_software(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Wrong answers, hangs and crashes that most of a node's GPUs give, or several nodes, in one probe.

    GPUs do not break together; a library that does not go with the driver breaks a probe on all of them.
    """
    nodes: dict[str, set[str]] = defaultdict(set)
    bad_nodes: dict[str, set[str]] = defaultdict(set)
    gpus: dict[tuple[str, str], set[int | None]] = defaultdict(set)
    bad_gpus: dict[tuple[str, str], set[int | None]] = defaultdict(set)
    for v in verdicts:
        m = v.measurement
        nodes[m.probe].add(m.node)
        gpus[m.probe, m.node].add(m.gpu)
        if _by_itself(v):
            bad_nodes[m.probe].add(m.node)
            bad_gpus[m.probe, m.node].add(m.gpu)
    many = {p for p, bad in bad_nodes.items() if len(bad) >= LEAST and len(bad) > MOST_NODES * len(nodes[p])}
    most = {at for at, bad in bad_gpus.items() if len(bad) >= 2 and len(bad) > MOST_OF_NODE * len(gpus[at])}
    if not many and not most:
        return list(verdicts)
    return [_told(v, many, most, len(bad_nodes[v.measurement.probe])) if _by_itself(v) else v for v in verdicts]


def _by_itself(verdict: Verdict) -> bool:
    return verdict.ok is False and verdict.basis in (Basis.EXACT, Basis.END)


def _told(verdict: Verdict, many: set[str], most: set[tuple[str, str]], nodes: int) -> Verdict:
    m = verdict.measurement
    if (m.probe, m.node) in most:
        return doubted(verdict, f"so do most GPUs of {m.node}, which do not break together; see its driver and torch")
    return doubted(verdict, f"so do {nodes} nodes, see their driver and torch") if m.probe in many else verdict


def by_slot(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """GPUs that are slow as most in the same slot of other nodes are: their way to the host or their air is longer."""
    all_: dict[int, int] = defaultdict(int)
    slow: dict[int, int] = defaultdict(int)
    for v in verdicts:
        if (gpu := v.measurement.gpu) is not None:
            all_[gpu] += 1
            slow[gpu] += v.ok is False
    design = {gpu for gpu, bad in slow.items() if bad >= LEAST and bad > MOST_OF_SLOT * all_[gpu]}
    if not design:
        return list(verdicts)
    return [
        doubted(v, f"so are {slow[gpu]} of the {all_[gpu]} in its slot, which is by design")
        if v.ok is False and (gpu := v.measurement.gpu) in design
        else v
        for v in verdicts
    ]

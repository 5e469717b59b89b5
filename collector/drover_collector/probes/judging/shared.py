"""What many boards give alike is no fault of one: of software, of a slot by design, of the host. Pure.

A failed verdict here becomes a doubt: nothing is drained for it, and nothing is cleared by it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from drover_collector.probes.judging.fleet import LEAST
from drover_collector.probes.judging.groups import family
from drover_collector.probes.judging.measurements import Basis, Verdict

MOST_BAD = 1 / 3  # of a group: more of them are another kind of board, or a batch; the fit holds up to here
MOST_OF_NODE = 1 / 2  # of a node's GPUs, and at least two: a wrong answer or a crash of more is the software's
MOST_NODES = 0.1  # of the nodes that ran a probe, and at least LEAST: the same
# Figures that depend by design on where in the host a board sits: its way to the host's memory, its air.
OF_THE_SLOT = frozenset({"pcie", "launch", "soak"})
# On the board itself, at a clock of its own: no slot makes it slower. In small fleets with many bad boards most of a
# slot are bad by chance, and each of them was doubted (tuning seeds 1000-1059: 10 % defects .98 found, else 1.00).
OF_THE_BOARD = frozenset({"hbm"})
LONE_SLOT = "but no other node shows that its slot gives more: not judged"
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
    return [_of_software(v, many, most, len(bad_nodes[v.measurement.probe])) if _by_itself(v) else v for v in verdicts]


def _by_itself(verdict: Verdict) -> bool:
    return verdict.ok is False and verdict.basis in (Basis.EXACT, Basis.END)


def _of_software(verdict: Verdict, many: set[str], most: set[tuple[str, str]], nodes: int) -> Verdict:
    m = verdict.measurement
    if (m.probe, m.node) in most:
        return doubted(verdict, f"so do most GPUs of {m.node}, which do not break together; see its driver and torch")
    return doubted(verdict, f"so do {nodes} nodes, see their driver and torch") if m.probe in many else verdict


def by_slot(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """GPUs that are slow as most in the same slot of other nodes are: their way to the host or their air is longer.

    Of a figure that depends on the slot, one whose slot no other node shows to give more is a doubt, too: on a lone
    node a slot by design looks like a fault. Where more are slow than single faults can be, `judge` says so.
    """
    all_: dict[int, int] = defaultdict(int)
    slow: dict[int, int] = defaultdict(int)
    good: dict[int, set[str]] = defaultdict(set)
    for v in verdicts:
        if (gpu := v.measurement.gpu) is not None:
            all_[gpu] += 1
            slow[gpu] += v.ok is False
            if v.ok:
                good[gpu].add(v.measurement.node)
    few = sum(slow.values()) <= MOST_BAD * len(verdicts)
    return [_in_its_slot(v, slow, all_, good, few=few) for v in verdicts]


def _in_its_slot(
    v: Verdict, slow: Mapping[int, int], all_: Mapping[int, int], good: Mapping[int, set[str]], *, few: bool
) -> Verdict:
    gpu = v.measurement.gpu
    if v.ok is not False or gpu is None or family(v.measurement.probe) in OF_THE_BOARD:
        return v
    bad = slow[gpu]
    if bad > MOST_OF_SLOT * all_[gpu] and bad >= LEAST:
        return doubted(v, f"so are {bad} of the {all_[gpu]} in its slot, which is by design")
    if few and family(v.measurement.probe) in OF_THE_SLOT and not good.get(gpu, set()) - {v.measurement.node}:
        return dataclasses.replace(v, ok=None, text=f"{v.text}; {LONE_SLOT}", suspicious=True)
    return v

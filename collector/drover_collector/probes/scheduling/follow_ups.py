"""Choose pairs that find the node that made a group slow: each suspect with a good node. Pure.

A node is named by two slow groups whose other nodes were good elsewhere (`groups_of_nodes`); so a suspect needs one
pair more, with a partner that it was not with, and mostly that is all. The number of pairs is
limited; what they leave open, the verdicts say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from drover_collector.probes.judging.multi_node import Blame
from drover_core.model.events import ProbeOrder

ROUNDS = 3  # pairs that Drover asks for by itself of one node within the hour that is looked at
DROVER = "drover"


@dataclass(frozen=True, slots=True)
class FollowUp:
    nodes: tuple[str, str]  # the suspect, its partner
    probes: tuple[str, ...]


def follow_ups(
    blames: Mapping[str, Blame],
    orders: Iterable[ProbeOrder],
    partners: Callable[[str], Sequence[str]],
    *,
    anybody: bool,
) -> list[FollowUp]:
    """
    Args:
        blames: of each figure. orders: of the groups that they are about, and of those under way.
        partners: nodes that may run with a node now, the best first.
        anybody: also nodes that none of these groups had.
    """
    met: dict[str, set[str]] = defaultdict(set)
    rounds: Counter[str] = Counter()
    for order in orders:
        met[order.node] |= {*order.members}
        rounds[order.node] += order.by == DROVER
    suspects = {v.node for blame in blames.values() for v in blame.nodes if v.suspects}
    found: dict[str, tuple[str, list[str]]] = {}
    used: set[str] = set()
    for probe, blame in blames.items():
        cleared = {v.node for v in blame.nodes if v.ok}
        for node in sorted(v.node for v in blame.nodes if v.suspects):
            if node in found:
                found[node][1].append(probe)
                continue
            free = partners(node)
            if rounds[node] >= ROUNDS or node not in free or node in used:
                continue
            taken = met[node] | used | suspects
            known = [name for name in free if name in cleared and name not in taken]
            others = [name for name in free if name not in taken and name not in met] if anybody else []
            if options := [*known, *others]:
                found[node] = options[0], [probe]
                used |= {node, options[0]}
    return [FollowUp((node, partner), tuple(probes)) for node, (partner, probes) in found.items()]

"""Bandwidth between the GPUs of a node: a bad pair, a bad GPU (its pairs are slow, those of the others are not), or
something that all share (switches, fabric manager, a setting).

Where links differ by position by design, each position is held against the same position of the other nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from drover_collector.probes.judging.fleet import (
    LARGE,
    LEAST,
    Scale,
    logs_of,
)
from drover_collector.probes.judging.groups import Floats, fit, usual
from drover_collector.probes.judging.measurements import Basis, Measurement, Verdict
from drover_collector.probes.judging.references import reference
from drover_collector.probes.judging.texts import number, off, share
from drover_core.model.probe_figures import FIGURES

MOST_OF_NODE = 1 / 2  # of a node's pairs: what they share is to blame, not single GPUs
MOST_OF_GPU = 0.6  # of a GPU's pairs, and at least two: the GPU, not the pairs
MOST_BAD = 1 / 3  # of a configuration's pairs: links that differ by design

ALIKE = 0.05  # in logarithms: pairs so near to each other are of one kind

Pair = tuple[int, int]
Blamed = tuple[tuple[int | None, ...], str]  # GPUs (None: the node) and why


def by_matrix(group: Sequence[Measurement], alpha: float) -> list[Verdict]:
    """Of all pairs (both ways) of nodes of one configuration; `alpha`: false fails per GPU."""
    logs = logs_of(group)
    centres = _centres(group, logs)
    rest = logs - centres
    pairs_of_gpu = max(Counter((m.node, m.gpu) for m in group).values())
    alike = rest[np.abs(rest) <= ALIKE]
    scale = Scale("p2p", fit(alike if len(alike) else rest, usual("p2p").spread), alpha / (2 * pairs_of_gpu))
    far = scale.fit.centre - rest
    slow = far > float(scale.reach())
    blamed = _blame(group, slow)
    if len(group) < LEAST or scale.coarse or (slow.mean() > MOST_BAD and not _few_gpus(group, blamed)):
        return [_undecided(m, float(f), bool(s), len(group)) for m, f, s in zip(group, far, slow, strict=True)]
    out = []
    for m, centre, f, is_slow in zip(group, centres, far, slow, strict=True):
        around = f"{number(math.exp(centre))} of {len(group)} pairs of its configuration"
        limit = f"the smallest detectable difference is {share(scale.detectable)}"
        head = f"{m.who}: p2p {number(m.value)} {FIGURES['p2p'].unit}, "
        culprits: tuple[tuple[str, int | None], ...] = ()
        if not is_slow:
            text = f"like the {around}; {limit}"
        else:
            gpus, why = blamed[m.node, _pair(m)]
            text = f"{off('p2p', f)} the {around}: {why}; {limit}"
            culprits = tuple((m.node, gpu) for gpu in gpus)
        worse = -math.expm1(-f)
        out.append(
            Verdict(m, not is_slow, head + text, Basis.FLEET, worse, scale.detectable, len(group), culprits=culprits)
        )
    return out


def _centres(group: Sequence[Measurement], logs: Floats) -> Floats:
    """What each pair should read: as its position on other nodes where these are enough, else as the best of each GPU.

    A bad GPU makes half of the pairs of four GPUs slow, but only one GPU's best.
    """
    best: dict[tuple[str, int | None], float] = {}
    positions: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for k, (m, log) in enumerate(zip(group, logs.tolist(), strict=True)):
        positions[m.gpu, m.peer].append(k)
        for gpu in (m.gpu, m.peer):
            best[m.node, gpu] = max(log, best.get((m.node, gpu), -math.inf))
    top = fit(np.array(sorted(best.values())), usual("p2p").spread).centre
    alike = logs[np.abs(logs - top) <= ALIKE]
    centres = np.full(len(group), fit(alike, usual("p2p").spread).centre if len(alike) else top)
    for rows in positions.values():
        if len(rows) >= LARGE:
            centres[rows] = fit(logs[rows], usual("p2p").spread).centre
    return centres


def _few_gpus(group: Sequence[Measurement], blamed: Mapping[tuple[str, Pair], Blamed]) -> bool:
    """Whether single GPUs, at most a third of all, are to blame for all that is slow."""
    culprits = {(node, gpus) for (node, _), (gpus, _) in blamed.items()}
    if any(len(gpus) != 1 or gpus[0] is None for _, gpus in culprits):
        return False
    return len(culprits) <= MOST_BAD * len({(m.node, gpu) for m in group for gpu in (m.gpu, m.peer)})


def _pair(m: Measurement) -> Pair:
    a, b = -1 if m.gpu is None else m.gpu, -1 if m.peer is None else m.peer
    return min(a, b), max(a, b)


def _undecided(m: Measurement, far: float, slow: bool, pairs: int) -> Verdict:
    """Too few pairs, or so many slow ones that links must differ by design."""
    head = f"{m.who}: p2p {number(m.value)} {FIGURES['p2p'].unit}, "
    published = reference("p2p", m.key)
    if published is not None and (m.value or 0) >= published.floor:
        text = f"at least the {number(published.floor)} that a healthy link reaches ({published.source})"
        return Verdict(m, True, head + text, Basis.REFERENCE, 1 - (m.value or 0) / published.expected, peers=pairs)
    why = "too few pairs to compare" if pairs < LEAST else "more than a third of the pairs are slower than the others"
    return Verdict(
        m, None, f"{head}{why}: not judged", Basis.NOTHING, -math.expm1(-far), peers=pairs, suspicious=slow
    )  # fmt: skip


def _blame(group: Sequence[Measurement], slow: np.ndarray) -> dict[tuple[str, Pair], Blamed]:
    """Of each slow pair of a node: the GPUs to blame (None: the node) and why."""
    pairs: dict[str, dict[Pair, bool]] = defaultdict(dict)
    for m, is_slow in zip(group, slow, strict=True):
        of_node = pairs[m.node]
        of_node[_pair(m)] = of_node.get(_pair(m), False) or bool(is_slow)
    out: dict[tuple[str, Pair], Blamed] = {}
    for node, of_node in pairs.items():
        for pair, blame in _of_node(of_node).items():
            out[node, pair] = blame
    return out


def _of_node(pairs: Mapping[Pair, bool]) -> dict[Pair, Blamed]:
    left = {pair for pair, is_slow in pairs.items() if is_slow}
    out: dict[Pair, Blamed] = {}
    if len(pairs) > 1 and len(left) > MOST_OF_NODE * len(pairs):
        why = (
            f"{len(left)} of the node's {len(pairs)} pairs are slow, so what they share is: switches, fabric, a setting"
        )
        return dict.fromkeys(left, ((None,), why))
    gpus = sorted({gpu for pair in pairs for gpu in pair})
    while left:
        count = {gpu: sum(gpu in pair for pair in left) for gpu in gpus}
        of_all = {gpu: sum(gpu in pair for pair in pairs) for gpu in gpus}
        worst = max(gpus, key=lambda gpu: (count[gpu] / of_all[gpu], -gpu))
        if count[worst] < 2 or count[worst] < MOST_OF_GPU * of_all[worst]:
            break
        why = f"{count[worst]} of the {of_all[worst]} pairs of GPU {worst} are slow, so that GPU or its links are"
        for pair in [pair for pair in left if worst in pair]:
            out[pair] = ((worst,), why)
            left.remove(pair)
    for pair in left:
        out[pair] = (pair, "other pairs of both are not slow, so the links between these two are")
    return out

"""Judge pairs of nodes: whose port is slow, or which way between two nodes. Pure.

A defect makes a pair slow, never fast. So the reference is the fast quarter of the pairs of one kind (below one leaf
switch, or across), and their spread is taken there too. A port is named when two thirds of its pairs, and at least two,
are slow; the slow pairs that no named port explains are ways between two nodes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drover_cli.validation.model import Finding, Mark, Row
from drover_core.model.events import ProbeResult

STAGE = "network"
CPU = "cpu"  # ProbeResult.device where no NVIDIA driver is
BANDWIDTH, LATENCY = "pairs_group", "pairs_group_latency"
LEAST = 3  # pairs of a kind: of two nobody knows which is the odd one
# By how much worse than the reference a pair may be: a tenth of the bandwidth (half the links of a node cost more); of
# the latency half as much again, since the shortest of a hundred round trips varies little.
MATERIAL = {BANDWIDTH: 0.10, LATENCY: 0.5}
CPU_MATERIAL = {BANDWIDTH: 2.0, LATENCY: 4.0}  # CPUs are shared with whatever else runs: only much worse is named
ERRORS = 4.0  # standard errors of a pair's median: of 1,000 healthy pairs, less than 1 is further off
SPREADS = 2.0  # times what the fast quarter spans
MOST_OF_PORT = 2 / 3

Port = tuple[str, int | None]  # node, GPU


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of one pair of ports."""

    figure: str
    a: Port
    b: Port
    result: ProbeResult

    @property
    def value(self) -> float:
        assert self.result.value is not None
        return self.result.value


@dataclass(frozen=True, slots=True)
class _Kind:
    """The reference of pairs of a kind. `tolerance`: the share by which a healthy pair may be worse."""

    centre: float
    tolerance: float
    size: int


def pairs_of(results: Iterable[ProbeResult], members: Sequence[str]) -> list[Pair]:
    """Return each pair once: both of its nodes report it."""
    found: dict[tuple[str, Port, Port], Pair] = {}
    for result in results:
        if result.probe not in MATERIAL or result.value is None or result.value <= 0 or result.peer is None:
            continue
        ports = sorted([(result.node, result.gpu), (members[result.peer], result.gpu)], key=str)
        found.setdefault((result.probe, ports[0], ports[1]), Pair(result.probe, ports[0], ports[1], result))
    return list(found.values())


def judge_pairs(
    pairs: Sequence[Pair], leaf: Mapping[str, str], slow_nodes: Iterable[str] = ()
) -> tuple[list[Row], list[Finding]]:
    """
    Args:
        slow_nodes: known to be slow by themselves: what is wrong with their pairs is attributed to that.
    """
    kinds = _kinds(pairs, leaf)
    rows, bad = [], []
    for pair in sorted(pairs, key=lambda p: (p.figure, str(p.a), str(p.b))):
        kind = kinds[_kind(pair, leaf)]
        worse = _worse(pair, kind)
        mark = Mark.UNKNOWN if kind.size < LEAST else Mark.FAILED if worse > kind.tolerance else Mark.PASSED
        if mark is Mark.FAILED:
            bad.append(pair)
        why = f"{worse:+.0%} off, {kind.tolerance:.0%} allowed" if kind.size >= LEAST else "too few pairs of its kind"
        of = f"{kind.centre:.4g}, the fast quarter of {kind.size} pairs"
        on = "" if pair.a[1] is None else f"GPU {pair.a[1]}"
        rows.append(
            Row(
                STAGE, f"{pair.a[0]} - {pair.b[0]}", on, pair.figure, pair.value, pair.result.unit, of, mark, why,
                pair.result.device,
            )
        )  # fmt: skip
    return rows, _named(pairs, bad, kinds, leaf, set(slow_nodes))


def _kind(pair: Pair, leaf: Mapping[str, str]) -> tuple[str, bool]:
    return pair.figure, leaf.get(pair.a[0], "") != leaf.get(pair.b[0], "")


def _kinds(pairs: Iterable[Pair], leaf: Mapping[str, str]) -> dict[tuple[str, bool], _Kind]:
    of: dict[tuple[str, bool], list[Pair]] = defaultdict(list)
    for pair in pairs:
        of[_kind(pair, leaf)].append(pair)
    found = {}
    for (figure, across), same in of.items():
        # Turned so that more is better.
        values = [_turned(pair) for pair in same]
        centre = _fast_quarter(values)
        wide = max(values) / centre - 1
        error = statistics.median(1.25 * (p.result.spread or 0.0) / max(p.result.repeats, 1) ** 0.5 for p in same)
        material = CPU_MATERIAL if any(p.result.device == CPU for p in same) else MATERIAL
        tolerance = max(material[figure], SPREADS * wide, ERRORS * error)
        found[figure, across] = _Kind(1 / centre if figure == LATENCY else centre, tolerance, len(same))
    return found


def _fast_quarter(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[2] if len(values) > 1 else values[0]


def _turned(pair: Pair) -> float:
    return 1 / pair.value if pair.figure == LATENCY else pair.value


def _worse(pair: Pair, kind: _Kind) -> float:
    """Return by which share it is worse than its kind: 1 is twice as slow."""
    return pair.value / kind.centre - 1 if pair.figure == LATENCY else kind.centre / pair.value - 1


def _named(
    pairs: Sequence[Pair], bad: Sequence[Pair], kinds: Mapping[tuple[str, bool], _Kind], leaf: Mapping[str, str],
    slow_nodes: set[str],
) -> list[Finding]:  # fmt: skip
    left = [p for p in bad if not {p.a[0], p.b[0]} & slow_nodes]
    found = []
    known: set[Port] = set()
    for figure in MATERIAL:
        mine = [p for p in left if p.figure == figure and not {p.a, p.b} & known]
        all_ = [p for p in pairs if p.figure == figure]
        ports: dict[Port, list[Pair]] = {}
        while port := _worst_port(all_, mine):
            ports[port] = [p for p in mine if port in (p.a, p.b)]
            mine = [p for p in mine if port not in (p.a, p.b)]
            all_ = [p for p in all_ if port not in (p.a, p.b)]
        known |= ports.keys()
        for node in sorted({node for node, _ in ports}):
            found.append(_port_finding(node, {p: ports[p] for p in ports if p[0] == node}, kinds, leaf))
        for pair in mine:
            about = f"{pair.a[0]} - {pair.b[0]}"
            text = f"{_how(pair, kinds[_kind(pair, leaf)])}; each of them is well with others: the way between them"
            found.append(Finding(STAGE, about, Mark.FAILED, f"{about}: {text}"))
    return found


def _worst_port(pairs: Sequence[Pair], bad: Sequence[Pair]) -> Port | None:
    """Return the port with the largest share of slow pairs, if that is large enough."""
    count: dict[Port, int] = defaultdict(int)
    slow: dict[Port, int] = defaultdict(int)
    for pair in pairs:
        for port in (pair.a, pair.b):
            count[port] += 1
            slow[port] += pair in bad
    named = [port for port in slow if slow[port] >= 2 and slow[port] >= MOST_OF_PORT * count[port]]
    return max(named, key=lambda port: (slow[port] / count[port], slow[port], str(port)), default=None)


def _port_finding(
    node: str, ports: Mapping[Port, Sequence[Pair]], kinds: Mapping[tuple[str, bool], _Kind], leaf: Mapping[str, str]
) -> Finding:
    gpus = sorted(gpu for _, gpu in ports if gpu is not None)
    about = f"{node} GPU {', '.join(map(str, gpus))}" if gpus else node
    worst = max((pair for of in ports.values() for pair in of), key=lambda p: _worse(p, kinds[_kind(p, leaf)]))
    what = f"the port of {'these GPUs' if len(gpus) > 1 else 'this GPU'}" if gpus else "its port"
    many = sum(map(len, ports.values()))
    text = f"{many} of its pairs are slow, such as {_how(worst, kinds[_kind(worst, leaf)])}: {what}, or its link"
    return Finding(STAGE, about, Mark.FAILED, f"{about}: {text}")


def _how(pair: Pair, kind: _Kind) -> str:
    what = "latency" if pair.figure == LATENCY else "bandwidth"
    return (
        f"{what} {pair.a[0]} - {pair.b[0]} {pair.value:.4g} {pair.result.unit} against {kind.centre:.4g} of the fast"
        f" quarter of {kind.size} pairs"
    )

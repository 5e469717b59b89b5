"""Draw weeks of failures and repairs of nodes, without telemetry, to train and test a ranking by risk.

Figures of the InfiniteHBD trace: 4.18 faults per 1,000 node-days; repairs 0.85 d in the median, 13 d at the ninth
decile; a new fault within 1, 7 and 30 days of a repair with .22, .31 and .43; up to 14 faults start together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FAULTS_PER_NODE_DAY = 4.18e-3
# (days after the repair, cumulative chance of a repeat): the published ones, less the base rate.
AGAIN = ((1.0, 0.218), (7.0, 0.298), (30.0, 0.387))
REPAIR_MEDIAN_D = 0.85
REPAIR_SIGMA = 1.93  # of the logarithm: results in the published mean of 5.5 d, and 10 d at the ninth decile
TOGETHER_SHARE, TOGETHER_MOST = 0.02, 14  # first faults that hit neighbours too (share assumed)
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Outage:
    """A fault of a node, from its start to the end of its repair."""

    node: int
    start_ms: int
    end_ms: int


def draw_history(seed: int, *, nodes: int, days: float, start_ms: int = 0) -> list[Outage]:
    """Return outages of `nodes` nodes over `days`, in order of start. Neighbours have adjacent numbers."""
    rng = np.random.default_rng([seed, 110])
    last = AGAIN[-1][1]
    # Each first fault leads to 1 / (1 - last) faults in the long run, and some of them hit neighbours.
    with_others = 1 + TOGETHER_SHARE * (TOGETHER_MOST - 1) / 2
    rate = FAULTS_PER_NODE_DAY * (1 - last) / with_others
    due = [(float(at), int(node)) for at, node in _first(rng, nodes, days, rate)]
    found: list[tuple[float, float, int]] = []
    free = np.zeros(nodes)
    while due:
        due.sort(reverse=True)
        at, node = due.pop()
        if at < free[node] or at >= days:
            continue  # the node is out of service already
        end = at + float(rng.lognormal(np.log(REPAIR_MEDIAN_D), REPAIR_SIGMA))
        free[node] = end
        found.append((at, end, node))
        again = _again(rng, end)
        if again is not None and again < days:
            due.append((again, node))
    return [Outage(n, start_ms + round(a * DAY_MS), start_ms + round(b * DAY_MS)) for a, b, n in sorted(found)]


def _first(rng: np.random.Generator, nodes: int, days: float, rate: float) -> list[tuple[float, int]]:
    """Return the faults without an earlier repair: day and node."""
    result = []
    for _ in range(int(rng.poisson(rate * nodes * days))):
        at, node = float(rng.uniform(0, days)), int(rng.integers(nodes))
        count = 1
        if rng.random() < TOGETHER_SHARE:
            count = int(rng.integers(2, TOGETHER_MOST + 1))
        result += [(at, (node + k) % nodes) for k in range(count)]
    return result


def _again(rng: np.random.Generator, end: float) -> float | None:
    """Return the day of the next fault after a repair that did not last; None if it lasted."""
    chance, low_d, low = float(rng.random()), 0.0, 0.0
    for high_d, high in AGAIN:
        if chance < high:
            return end + low_d + (high_d - low_d) * (chance - low) / (high - low)
        low_d, low = high_d, high
    return None

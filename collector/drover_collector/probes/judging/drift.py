"""A GPU's own history under one configuration: has it become worse, and since when?

Its own earlier results are the best peers that it has: they share its silicon, slot and host. One-sided, and a new
driver, firmware or power limit begins a new history, since it may change what is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from drover_collector.probes.judging.fleet import logs_of
from drover_collector.probes.judging.groups import (
    POWER,
    Floats,
    part,
    sign,
    t_quantile,
    usual,
)
from drover_collector.probes.judging.measurements import End, Measurement
from drover_collector.probes.judging.texts import number, off, share
from drover_core.model.probe_figures import FIGURES

BUDGET = 1.0  # false drifts per 1,000 histories looked at
LEAST_BEFORE = 3
LEAST_AFTER = 2  # one bad result is a matter of the fleet's verdict, or of a second measurement
OWN = 0.3  # of the spread between units: how far results of one unit lie apart from run to run
PRIOR = 6.0
WINDOW = 64  # results
POWER_Z = NormalDist().inv_cdf(POWER)


@dataclass(frozen=True, slots=True)
class Drift:
    """`ok` None: too short to judge. `worse`: share since `since_ms`. `detectable`: a change found 9 times in 10."""

    ok: bool | None
    text: str
    results: int
    worse: float | None = None
    since_ms: int | None = None
    detectable: float | None = None


def drift(history: Sequence[Measurement], budget: float = BUDGET) -> Drift:
    """Of one GPU and probe, in any order; the key of the newest result says which of the others count.

    A step or a slow decline: the best split into before and after, every split tested, their number paid for.

    Raises:
        ValueError: results of several GPUs or probes.
    """
    if len({(m.node, m.gpu, m.peer, m.probe) for m in history}) > 1:
        raise ValueError("a history has one GPU and one probe")
    done = [
        m for m in history if m.end is End.DONE and m.value is not None and 0 < m.value < math.inf and m.ok is not False
    ]
    done.sort(key=lambda m: (m.ts_ms, m.value))
    if not done:
        return Drift(None, "no results", 0)
    last = done[-1]
    key = part(last.key, last.probe)
    same = [m for m in done if part(m.key, m.probe) == key][-WINDOW:]
    size = len(same)
    head = f"{last.who}: {last.probe} "
    if size < LEAST_BEFORE + LEAST_AFTER:
        left = f"{len(done) - size} earlier ones were under another" if len(done) > size else "it has no earlier ones"
        return Drift(None, f"{head}has {size} results under this configuration ({left}): too few to judge drift", size)
    logs = logs_of(same)
    splits = range(LEAST_BEFORE, size - LEAST_AFTER + 1)
    t = t_quantile(budget / 1000 / len(splits), PRIOR + size - 2)
    prior, least = OWN * usual(last.probe).spread, -math.log1p(-usual(last.probe).material)
    at, drop, noise = max(((k, *_step(logs, k, prior)) for k in splits), key=lambda step: step[1] / step[2])
    detectable = -math.expm1(-max((t + POWER_Z) * _step(logs, size - LEAST_AFTER, prior)[1], least))
    if drop > max(t * noise, least):
        before = math.exp(sign(last.probe) * float(logs[:at].mean()))
        text = (
            f"{number(last.value)} {FIGURES[last.probe].unit}, and since result {at + 1} of {size} "
            f"{off(last.probe, drop)} what it gave before ({number(before)})"
        )
        return Drift(False, head + text, size, -math.expm1(-drop), same[at].ts_ms, detectable)
    text = f"steady over {size} results; a change of {share(detectable)} would be detected"
    return Drift(True, head + text, size, -math.expm1(-drop), None, detectable)


def _step(logs: Floats, at: int, prior: float) -> tuple[float, float]:
    """How far the mean falls at a split, and that difference's standard error."""
    before, after = logs[:at], logs[at:]
    squares = float(((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum())
    variance = (PRIOR * prior**2 + squares) / (PRIOR + len(logs) - 2)
    return float(before.mean() - after.mean()), math.sqrt(variance * (1 / len(before) + 1 / len(after)))

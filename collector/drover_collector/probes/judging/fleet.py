"""Verdicts against boards of the same configuration, or, where they are too few, against what is published of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.probes.judging.groups import (
    Fit,
    Floats,
    sign,
    usual,
)
from drover_collector.probes.judging.measurements import Basis, Measurement, Verdict
from drover_collector.probes.judging.references import Reference
from drover_collector.probes.judging.texts import (
    centre_text,
    number,
    off,
    share,
)
from drover_core.model.probe_figures import FIGURES

LEAST = 3  # boards that can say which of them is the odd one
LARGE = 8  # boards that, all alike, are what their configuration gives, whatever is published
# A group that can detect only larger differences than this calls none of its boards healthy.
TOO_COARSE = 0.15
TOO_COARSE_USUAL = 5.0  # times the figure's usual spread, where that is more: launch latency, disks
UNSTEADY = 2.0  # times the usual reach: a board whose own repeats ask for more is measured again
_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, of normal values


@dataclass(frozen=True, slots=True)
class Scale:
    """A group's fit at a rate of false fails."""

    probe: str
    fit: Fit
    alpha: float

    @property
    def centre(self) -> float:
        """In the probe's unit."""
        return math.exp(sign(self.probe) * self.fit.centre)

    @property
    def detectable(self) -> float:
        return self.fit.detectable(self.alpha, usual(self.probe).material)

    @property
    def coarse(self) -> bool:
        return self.detectable > max(TOO_COARSE, TOO_COARSE_USUAL * usual(self.probe).spread)

    def reach(self, extra: float | Floats = 0.0) -> Floats:
        return self.fit.reach(self.alpha, usual(self.probe).material, extra)

    @property
    def text(self) -> str:
        return centre_text(self.probe, self.centre, self.fit.spread)


def logs_of(group: Sequence[Measurement]) -> Floats:
    """Values in logarithms, lower is worse. All are positive."""
    return sign(group[0].probe) * np.log(np.array([m.value for m in group], dtype=np.float64))


def own_error(m: Measurement) -> float:
    """Standard error of its median, as a share; 0 where it was measured once."""
    return _MEDIAN * m.spread / math.sqrt(m.repeats) if m.spread and m.repeats > 1 else 0.0


def by_fleet(group: Sequence[Measurement], logs: Floats, scale: Scale, low: bool) -> list[Verdict]:
    """Each against its own group. `low`: the whole group reads less than published."""
    own = np.array([own_error(m) for m in group])
    extra = np.sqrt(np.maximum(0.0, own**2 - float(np.median(own)) ** 2))
    plain, detectable = float(scale.reach()), scale.detectable
    around = f"the {len(group)} boards of its configuration ({scale.text})"
    smallest = f"the smallest detectable difference is {share(detectable)}"
    out: list[Verdict] = []
    for m, far, allowed in zip(group, (scale.fit.centre - logs).tolist(), scale.reach(extra).tolist(), strict=True):
        ok: bool | None
        if far > allowed:
            ok, text = False, f"{off(scale.probe, far)} {around}; {smallest}"
        elif far > plain or allowed > UNSTEADY * plain:
            ok, text = None, f"its own repeats vary by {share(m.spread or 0)}: too unsteady to judge, measure again"
        elif low and len(group) < LARGE:
            ok, text = None, f"like {around}, but all of them read less than published: not judged"
        else:
            ok, text = True, f"like {around}; {smallest}"
        head = f"{m.who}: {m.probe} {number(m.value)} {FIGURES[m.probe].unit}, "
        out.append(Verdict(m, ok, head + text, Basis.FLEET, -math.expm1(-far), detectable, len(group)))
    return out


def by_few(
    group: Sequence[Measurement], logs: Floats, scale: Scale, published: Reference | None, pool: Scale | None
) -> list[Verdict]:
    """Boards too few, or too far apart, to judge by themselves. `pool`: the same boards with other drivers too."""
    reach = float(scale.reach())
    floor = -math.inf if published is None else math.log(published.floor)
    any_above = bool((logs >= floor).any())
    out: list[Verdict] = []
    for m, log in zip(group, logs.tolist(), strict=True):
        far = scale.fit.centre - log
        head = f"{m.who}: {m.probe} {number(m.value)} {FIGURES[m.probe].unit}, "
        few = f"{len(group)} board{'s' if len(group) > 1 else ''} of its configuration"
        ok: bool | None = None
        basis, worse, detectable, peers = Basis.NOTHING, None, None, len(group)
        if len(group) >= LEAST and far > reach:
            ok, basis, worse, detectable = False, Basis.FLEET, -math.expm1(-far), scale.detectable
            text = f"{off(m.probe, far)} the {few} ({scale.text})"
        elif published is not None:
            basis, worse, detectable = (
                Basis.REFERENCE,
                1 - (m.value or 0) / published.expected,
                1 - published.floor / published.expected,
            )
            text, ok = _against_published(m, published, alone=len(group) == 1, any_above=any_above, last=far > reach)
            text += f"; {few}"
        elif pool is not None:
            away = pool.fit.centre - log
            basis, worse, detectable, peers = Basis.POOLED, -math.expm1(-away), pool.detectable, pool.fit.size
            around = f"the {peers} boards of its model with any driver ({pool.text})"
            ok = True if away <= float(pool.reach()) else None
            text = f"like {around}" if ok else f"{off(m.probe, away)} {around}: the driver, or the board; not judged"
        else:
            text = f"{few}, and nothing published of it: not judged"
        low = published is not None and log < floor and len(group) == 1
        suspicious = ok is None and (far > reach or low)
        out.append(Verdict(m, ok, head + text, basis, worse, detectable, peers, suspicious=suspicious))
    return out


def _against_published(
    m: Measurement, published: Reference, *, alone: bool, any_above: bool, last: bool
) -> tuple[str, bool | None]:
    usual_text = f"{number(published.expected)} that healthy boards reach ({published.source})"
    away = f"{share(abs(1 - (m.value or 0) / published.expected))} "
    if (m.value or 0) < published.floor:
        if any_above:
            return f"{away}below the {usual_text}", False
        if alone:  # its driver, libraries, clocks or host may limit it: no other board shows that they do not
            return f"{away}below the {usual_text}, and the only one of its configuration: not judged", None
        return f"{away}below the {usual_text}, as all others of its configuration: not judged", None
    if last:
        return f"above the floor of the {usual_text}, yet far below the best of its configuration: not judged", None
    return f"within {share(1 - published.floor / published.expected)} of the {usual_text}", True

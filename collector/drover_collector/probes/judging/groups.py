"""Which GPUs are alike by design, and what is usual among them though up to a third may be faulty.

All in logarithms, turned so that lower is worse: shares add up, and a unit's scale changes nothing.

A defect makes slow, never fast. So the upper side of a group is healthy: the centre is sought there and the spread
taken from what lies above it, which a third of slow boards below, in one clump or strewn, moves by little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from drover_collector.store.repositories.probes import Key
from drover_core.model.probe_figures import FIGURES, Better

Floats = NDArray[np.float64]

# What a figure depends on by design; a field that it does not depend on would only make groups smaller.
_CORE = ("sku", "driver", "power_limit_w", "ecc", "mig", "form")
_LINKS = ("sku", "driver", "nvlinks", "mig", "form")
_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": _CORE, "hbm": _CORE, "train": (*_CORE, "nvlinks"), "soak": (*_CORE, "host"),
        "launch": (*_CORE, "host"),
        "pcie": ("sku", "driver", "pcie_gen", "pcie_width", "mig", "host", "form"),
        "p2p": ("sku", "driver", "nvlinks", "pcie_gen", "pcie_width", "mig", "form"),
        "allreduce": _LINKS, "allgather": _LINKS, "alltoall": _LINKS,
        "host": ("host", "form"), "disk": ("host", "form"), "storage": ("host", "form"),
        "pairs": _LINKS, "fsdp": (*_CORE, "nvlinks"), "tp": (*_CORE, "nvlinks"),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Usual:
    """What is usual for a figure before any was seen.

    Attributes:
        spread: standard deviation between healthy units, as a share. material: less than this is never failed.
    """

    spread: float
    material: float


# Unit-to-unit spread of GEMM: 1-3 % within a model (SC'22, Sinha et al., "Not all GPUs are created equal": 8 % between
# extremes); of HBM and links less, since their clocks are fixed; of host and disk more. It weighs as much as PRIOR
# boards do, so it matters in small groups alone.
_USUAL: Mapping[str, Usual] = MappingProxyType(
    {
        "gemm": Usual(0.02, 0.01), "hbm": Usual(0.007, 0.01), "train": Usual(0.02, 0.02), "launch": Usual(0.08, 0.10),
        "pcie": Usual(0.01, 0.01), "p2p": Usual(0.01, 0.02), "soak": Usual(0.06, 0.05), "allreduce": Usual(0.03, 0.05),
        "allgather": Usual(0.03, 0.05), "alltoall": Usual(0.03, 0.05), "host": Usual(0.05, 0.10),
        "disk": Usual(0.10, 0.20), "storage": Usual(0.10, 0.20), "pairs": Usual(0.03, 0.05), "fsdp": Usual(0.02, 0.02),
        "tp": Usual(0.02, 0.02),
    }
)  # fmt: skip
PRIOR = 6.0
# Of the estimators below, by simulation (seeds of tuning): the spread is as uncertain as that of WORTH n normal
# values, the centre's variance CENTRE / n of theirs.
WORTH = 0.4
CENTRE = 3.0
LEAST_FREEDOM = 12.0  # of a group of none: what is usual is known that well
MOST_FREEDOM = 60.0
TAILS = ((60.0, 0.7), (15.0, 0.15), (8.0, 0.1), (4.5, 0.05))  # degrees of freedom of the units' own spread: how likely
SLIP = 10.0  # spreads above the centre: a reading that is wrong, not a tail
NEAR, FAR = 1.5, 3.5  # spreads: around the centre for the centre, above it for the spread
_MEDIAN = 0.6745  # half the width of the shortest half of normal values, over their standard deviation
POWER = 0.9  # a difference counts as found when it fails so often
_NORMAL = NormalDist()


def family(probe: str) -> str:
    return probe.partition("_")[0]


def usual(probe: str) -> Usual:
    return _USUAL[family(probe)]


def part(key: Key, probe: str, without: Iterable[str] = ()) -> Key:
    """The key with only those fields that the probe depends on by design."""
    fields = {name: getattr(key, name) for name in _FIELDS[family(probe)] if name not in set(without)}
    limit = fields.get("power_limit_w")
    if limit is not None:
        fields["power_limit_w"] = float(round(limit))  # sensors read 699.99
    return replace(Key(), **fields)


def sign(probe: str) -> float:
    """1 where higher is better, -1 where lower is."""
    return -1.0 if FIGURES[probe].better is Better.LOWER else 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Of `size` values in logarithms: where the healthy ones lie.

    Attributes:
        freedom: degrees of it that the spread is known with.
        tails: how heavy the tails may be: degrees of freedom, scale, and how likely.
    """

    size: int
    centre: float
    spread: float
    freedom: float
    tails: tuple[tuple[float, float, float], ...]

    def reach(self, alpha: float, material: float, extra: float | Floats = 0.0) -> Floats:
        """How far below the centre a healthy value comes once in 1 / `alpha`, at least `material`.

        `extra`: a value's own error beyond the others', in logarithms.
        """
        far = sum(t_quantile(alpha, min(self.freedom, tail)) * scale * weight for tail, scale, weight in self.tails)
        error = np.hypot(far * math.sqrt(1 + CENTRE / self.size), t_quantile(alpha, self.freedom) * extra)
        return np.maximum(error, -math.log1p(-material))

    def detectable(self, alpha: float, material: float) -> float:
        """The smallest share by which a unit may be worse and still fail nine times in ten (POWER)."""
        log = float(self.reach(alpha, material)) + _NORMAL.inv_cdf(POWER) * self.spread
        return -math.expm1(-log)


def fit(values: Floats, prior_spread: float) -> Fit:
    """Centre and spread of the healthy among `values` (logarithms, lower is worse), in any order, at least one.

    Start: the shortest half, the upper one of equals (a mode: slow ones up to a third do not reach it). Then in turn:
    the spread from what lies above the centre (a few that read far too much are left out), the centre from what lies
    near it on both sides.
    """
    ordered = np.sort(values)
    size = len(ordered)
    half = size // 2 + 1 if size > 2 else 1  # of two the better one: defects make slow
    widths = ordered[half - 1 :] - ordered[: size - half + 1]
    # Equal widths differ by rounding when the unit is another one.
    start = int(np.nonzero(widths <= widths.min() + 1e-9)[0][-1])
    centre = float(ordered[start : start + half].mean())
    spread = _spread(float(widths[start]) / (2 * _MEDIAN), size // 2, prior_spread)
    for _ in range(40):
        near = ordered[np.abs(ordered - centre) <= NEAR * spread + 1e-9]
        moved = 0.5 * centre + 0.5 * float(near.mean()) if len(near) else centre
        above = ordered[(ordered > moved + 1e-12) & (ordered <= moved + FAR * spread + 1e-9)] - moved
        wide = _spread(math.sqrt(float(above @ above) / len(above)) if len(above) else 0.0, len(above), prior_spread)
        done = abs(moved - centre) + abs(wide - spread) < 1e-9
        centre, spread = moved, wide
        if done:
            break
    above = ordered[(ordered > centre + 1e-12) & (ordered <= centre + SLIP * spread + 1e-9)] - centre
    return Fit(size, centre, spread, min(MOST_FREEDOM, LEAST_FREEDOM + WORTH * size), _tails(above, prior_spread))


def _spread(seen: float, above: int, prior: float) -> float:
    """Of `above` values over the centre, which stand for as many below it, and of PRIOR boards as is usual."""
    return math.sqrt((PRIOR * prior**2 + 2 * above * seen**2) / (PRIOR + 2 * above))


def _tails(above: Floats, prior: float) -> tuple[tuple[float, float, float], ...]:
    """Student's t of several degrees fitted to the upper side, each with how likely it is (TAILS before any is seen).

    Healthy units of some fleets lie apart with heavier tails than normal ones; the upper side shows it, and is no
    defect.
    """
    found = []
    for tail, weight in TAILS:
        scale = prior * math.sqrt((tail - 2) / tail)
        least = PRIOR * scale**2
        for _ in range(12):
            pull = (tail + 1) / (tail + (above / scale) ** 2)
            scale = math.sqrt((least + 2 * float(pull @ above**2)) / (PRIOR + 2 * len(above)))
        likely = len(above) * (
            math.lgamma((tail + 1) / 2) - math.lgamma(tail / 2) - 0.5 * math.log(tail) - math.log(scale)
        )
        likely -= (tail + 1) / 2 * float(np.log1p((above / scale) ** 2 / tail).sum())
        found.append((tail, scale, likely + math.log(weight)))
    most = max(likely for _, _, likely in found)
    total = sum(math.exp(likely - most) for _, _, likely in found)
    return tuple((tail, scale, math.exp(likely - most) / total) for tail, scale, likely in found)


def similarity(one: Floats, other: Floats) -> float:
    """Of two samples by their empirical distributions: 1 less the area between their CDFs, over the largest value.

    After SuperBench (USENIX ATC'24), which calls 0.95 the same; the paper itself was not at hand. Values as measured,
    positive; for single values it is 1 - |a - b| / max(a, b).

    Raises:
        ValueError: a sample is empty, or has a value that is not positive.
    """
    if not len(one) or not len(other) or min(one.min(), other.min()) <= 0:
        raise ValueError("similarity needs two samples of positive values")
    points = np.unique(np.concatenate([one, other]))
    steps = np.diff(points)
    below = [np.searchsorted(np.sort(sample), points[:-1], side="right") / len(sample) for sample in (one, other)]
    return 1.0 - float(np.abs(below[0] - below[1]) @ steps) / float(points[-1])


def t_quantile(alpha: float, freedom: float) -> float:
    """Student's t that is exceeded with probability `alpha` (< 0.5); G. W. Hill, CACM algorithm 396, 1970."""
    n, p = freedom, 2 * alpha
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * p) ** (2 / n)
    if y > 0.05 + a:
        x = _NORMAL.inv_cdf(alpha)
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return math.sqrt(n * y)

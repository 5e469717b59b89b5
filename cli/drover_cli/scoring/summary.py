"""Sum the scores of several cases, with 95 % intervals: by generator, by kind and cause, by precursor."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drover_cli.scoring.score import Score

Z = 1.96  # 95 % of a normal distribution
NONE_SEEN = 3.0  # the 95 % bound of a count of 0 (Poisson)


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927); (0, 1) of nothing."""
    if not of:
        return 0.0, 1.0
    p, n = hits / of, of
    middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)


@dataclass(slots=True)
class Cause:
    """Faults of one kind and cause."""

    faults: int = 0
    delays_s: list[float] = field(default_factory=list)  # of those that were found


@dataclass(slots=True)
class Foretold:
    """Faults with one kind of precursor."""

    faults: int = 0
    leads_s: list[float] = field(default_factory=list)  # of those that were reported before the fault


@dataclass(slots=True)
class Summary:
    """Several cases together.

    Attributes:
        reported: incidents that name a fault. false: that name nothing. false_drains: of these.
        causes: kind/cause -> its faults. precursors: kind of precursor -> its faults.
    """

    cases: int = 0
    gpu_days: float = 0.0
    reported: int = 0
    false: int = 0
    false_drains: int = 0
    negatives: int = 0
    causes: dict[str, Cause] = field(default_factory=lambda: defaultdict(Cause))
    precursors: dict[str, Foretold] = field(default_factory=lambda: defaultdict(Foretold))
    false_causes: Counter[str] = field(default_factory=Counter)
    false_drain_causes: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> int:
        return sum(cause.faults for cause in self.causes.values())

    @property
    def delays_s(self) -> list[float]:
        return [delay for cause in self.causes.values() for delay in cause.delays_s]

    @property
    def precision(self) -> float | None:
        total = self.reported + self.false
        return self.reported / total if total else None

    @property
    def recall(self) -> float | None:
        return len(self.delays_s) / self.faults if self.faults else None

    @property
    def f1(self) -> float | None:
        p, r = self.precision, self.recall
        return 2 * p * r / (p + r) if p and r else None

    def rate(self, count: int) -> str:
        """Return a count per 1,000 GPU-days, or the bound where there was none."""
        if not self.gpu_days:
            return "unknown"
        rate = (count or NONE_SEEN) * 1000 / self.gpu_days
        return f"{rate:.2f}" if count else f"0 (<= {rate:.2f})"


def summarize(scores: Sequence[Score]) -> Summary:
    """Return the sum of `scores`."""
    total = Summary()
    for one in scores:
        total.cases += 1
        total.gpu_days += one.gpu_days
        total.reported += one.matched + one.duplicates
        total.false += len(one.false)
        total.false_drains += len(one.false_drains)
        total.negatives += one.negatives
        total.false_causes.update(f"{found.kind}/{found.cause}" for found in one.false)
        total.false_drain_causes.update(f"{found.kind}/{found.cause}" for found in one.false_drains)
        for label, cause in one.cause_of.items():
            total.causes[cause].faults += 1
            if label in one.delays_of:
                total.causes[cause].delays_s.append(one.delays_of[label])
        for label, precursor in one.precursors.items():
            total.precursors[precursor].faults += 1
            if label in one.warned:
                total.precursors[precursor].leads_s.append(one.warned[label])
    return total

"""Count errors that come again and again: in how many of the last minutes, and how many in all."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.fleet.buckets import Floats

DECAY_MS = 1_800_000
MINUTE_MS = 60_000


@dataclass(slots=True)
class Bursts:
    """Growth of counters of errors in the last minutes, decaying over half an hour; float64 [E], by entity.

    Attributes:
        minutes: with errors. errors: in them, float64 [counters, E]. since_ms: when `minutes` last left 0.
    """

    minutes: Floats = field(default_factory=lambda: np.zeros(0))
    errors: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    since_ms: Floats = field(default_factory=lambda: np.zeros(0))
    last: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    newest: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    minute_ms: int = 0

    def add(self, end_ms: int, *counters: Floats) -> None:
        """Add the newest bucket's counters, float64 [E] each; judged once a minute."""
        now = np.array(counters)
        if self.last.shape != now.shape:
            self.last = self.newest = np.full(now.shape, np.nan)
            self.errors, self.minutes, self.since_ms = np.zeros(now.shape), *np.zeros((2, now.shape[1]))
        self.newest = np.where(np.isnan(now), self.newest, now)
        if end_ms - self.minute_ms < MINUTE_MS:
            return
        kept = float(np.exp(-(end_ms - self.minute_ms) / DECAY_MS)) if self.minute_ms else 1.0
        grown = np.nan_to_num(np.maximum(self.newest - self.last, 0.0))
        self.minutes, self.errors = kept * self.minutes + (grown > 0).any(axis=0), kept * self.errors + grown
        begun = np.where(self.since_ms > 0, self.since_ms, end_ms - MINUTE_MS)
        self.since_ms = np.where(self.minutes < 0.5, 0.0, begun)
        self.last, self.minute_ms = self.newest, end_ms

    def many(self, minutes: float, errors: float) -> Bools:
        """Return who has so many errors in so many minutes, bool [E]."""
        return np.asarray((self.minutes >= minutes) & (self.errors.sum(axis=0) >= errors))

    def main(self, entity: int) -> int:
        """Return the number of the counter that has most of an entity's errors."""
        return int(np.argmax(self.errors[:, entity]))

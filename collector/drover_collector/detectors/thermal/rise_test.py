"""The sequential test of things that may get warmer, each in units of its own noise (Page 1954)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

BLOCK_MS = 300_000
NOISE_C = 0.35  # least noise of a block
NOISE_BLOCKS = 24  # over which the noise is learnt
K, LIMIT, CLIP, KEEP = 1.0, 12.0, 4.0, 4.0  # of the test; KEEP: over the limit, so that it ends within four good blocks
FADES = 0.5  # of the score, in a block that cannot be judged
SUSPECT = 3.0  # of the score, from which on a block is not learnt
LASTS = 3  # judged blocks; two of them must show a rise that is reported


class RiseTest:
    """The sequential test of some things, each in units of its own noise.

    Attributes:
        score: float64, from 0. since_ms: start of the block in which the score left 0, int64.
    """

    def __init__(self, count: int) -> None:
        self.score = np.zeros(count)
        self.since_ms = np.zeros(count, np.int64)
        self._noise = np.full(count, 0.3**2)  # degC^2
        self._large = np.zeros((LASTS - 1, count), bool)  # in the judged blocks before

    def restore(self, which: int, since_ms: int) -> None:
        """Know that one has risen since then, before the collector started again."""
        self.score[which], self.since_ms[which] = LIMIT + KEEP, since_ms

    @property
    def suspect(self) -> Bools:
        """What may have risen, and is not learnt from."""
        return np.asarray(self.score >= SUSPECT)

    @property
    def passed(self) -> Bools:
        return np.asarray(self.score >= LIMIT)

    def step(self, block: int, warmer_c: Floats, least: Floats, judged: Bools) -> Floats:
        """Add a block, and return z. `least`: degC^2 of noise that each has at least; NaN is not judged."""
        z = warmer_c / np.sqrt(np.maximum(self._noise, NOISE_C**2) - NOISE_C**2 + least)
        judged = judged & ~np.isnan(z)
        step = np.clip(np.where(judged, z, 0.0), -CLIP, CLIP) - K
        before = self.score
        # What cannot be judged for hours, at another load, must not stay suspect: it would never be learnt.
        self.score = np.where(judged, np.clip(before + step, 0.0, LIMIT + KEEP), np.maximum(before - FADES, 0.0))
        self.since_ms[(before == 0) & (self.score > 0)] = block * BLOCK_MS
        return np.asarray(z)

    def lasting(self, large: Bools, judged: Bools) -> Bools:
        """Add a block, and return what has passed and is large in this block and in one of the two judged before it.

        A rise too small to be reported passes the test, too, if it lasts for hours. Then one block is enough in which
        something passes by: fans that slow down while the hottest GPU of the node pauses. A fault passes the test in
        four blocks or more, and shows its size in each.

        Args:
            large: warmer by as much as is reported.
        """
        result = judged & self.passed & large & self._large.any(axis=0)
        self._large = np.where(judged, np.concatenate([self._large[1:], [large]]), self._large)
        return np.asarray(result)

    def learn(self, warmer_c: Floats, learns: Bools) -> None:
        """Learn the noise of what is healthy."""
        square = np.minimum(warmer_c**2, 9 * np.maximum(self._noise, NOISE_C**2))
        known = learns & ~np.isnan(warmer_c)
        self._noise = np.where(known, self._noise + (square - self._noise) / NOISE_BLOCKS, self._noise)

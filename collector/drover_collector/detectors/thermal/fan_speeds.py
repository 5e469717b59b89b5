"""Compare the slowest fan of a node with those of nodes that are as busy, against how it compared before.

A controller keeps the hottest GPU at its temperature, so where a fan fails the others speed up and nothing gets warm
until they are at their end. The speed tells earlier: a fan slower than it was beside its like has worn or has dust; all
of a node's fans faster say that air is missing, or that one of them is gone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors.thermal.beside import ALIKE, LEAST_MATES, Beside, Limits
from drover_collector.detectors.thermal.rise_test import BLOCK_MS
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

UNIT_RPM = 100.0  # so that speeds are numbers as degrees are: 30 to 200
SLOWNESS = 600_000.0  # over rpm: 150 at 4,000 rpm, 40 at 15,000
NOISE = 1.0  # of a block, squared
# Shares are our own: rooms and unequal GPUs move fans of nodes with like jobs by a tenth.
LIMITS = Limits(0.15, 5.0, 0.18, 0.30, 6.0)


class FanSpeeds:
    """State of all nodes; add each bucket in order of time.

    Attributes:
        faster, slower: the two tests; of the slower one, in SLOWNESS over rpm.
    """

    def __init__(self, nodes: int) -> None:
        self.faster, self.slower = Beside(nodes, LIMITS), Beside(nodes, LIMITS)
        self._speed, self._watts, self._count = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
        self._block: int | None = None

    def advance(self, end_ms: int, rpm: Floats, watts: Floats, board: Ints) -> None:
        """Add a bucket. rpm: of each node's slowest fan; watts: mean of its GPUs; board: -1 unknown; [N] each."""
        block = end_ms // BLOCK_MS
        if self._block is not None and block != self._block:
            self._judge(self._block, board)
        self._block = block
        known = (rpm > 0) & (watts > 0)
        self._speed += np.where(known, rpm, 0.0)
        self._watts += np.where(known, watts, 0.0)
        self._count += known

    @property
    def hot(self) -> Bools:
        return np.asarray(self.faster.hot | self.slower.hot)

    def expected_rpm(self, n: int) -> float:
        """Return the speed that nodes as busy say node `n` should have."""
        if self.slower.hot[n]:
            return float(SLOWNESS / self.slower.own_c[n])
        return float(self.faster.own_c[n] * UNIT_RPM)

    def since_ms(self, n: int) -> int:
        return int((self.slower if self.slower.hot[n] else self.faster).test.since_ms[n])

    def _judge(self, block: int, board: Ints) -> None:
        with np.errstate(invalid="ignore", divide="ignore"):
            speed, watts = self._speed / self._count, self._watts / self._count
            log = np.log(watts)
        step = np.floor(np.nan_to_num(log) / ALIKE).astype(np.int64)
        groups = np.unique(np.stack([board, step]), axis=1, return_inverse=True)[1].ravel().astype(np.int64)
        least, nobody = np.full(len(speed), NOISE), np.zeros(len(speed), bool)
        for test, value in ((self.faster, speed / UNIT_RPM), (self.slower, SLOWNESS / speed)):
            median, count = group_medians(test.usual(value), groups, int(groups.max(initial=-1)) + 1)
            expected = np.where(count >= LEAST_MATES + 1, median, np.nan)[groups]
            test.add_block(block, value, np.where(np.isnan(value), np.nan, expected), least, nobody)
        self._speed, self._watts, self._count = np.zeros((3, len(speed)))

"""Predict how warm the HBM of a GPU is from its node's other GPUs, and say by how much it is warmer.

Heat flows from the stacks into the lid and the heat sink that they share with the core, and from the board's other
parts: T_memory = c T_core + (1 - c) T_sink + R P_memory. GPUs of one node that do the same work differ in three things:
the offset of their sensors, R (its pads), and how warm their cores are. So what a GPU's HBM has over its mates' median
is o + s x traffic + c x (what its core has over theirs). The three are learnt by recursive least squares from a prior,
and their doubt is part of the noise. So a new load, another job, or the first half hour needs no past of its own:
mates with about the same load and traffic are enough.

Sources: the spreads are from what the two temperatures of healthy GPUs of a node show on the tuning fleets. NVML states
whole degrees and no accuracy for HBM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors.thermal.peer_share import NodeMates
from drover_collector.detectors.thermal.rise_test import SUSPECT, RiseTest
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

# Of healthy ones: o, degC; s, degC at full traffic, where HBM is 15 to 25 degC above its core, and pads differ by some
# 20 %; c, degC per degC of the core.
EXPECTED, SPREADS = np.array([0.0, 0.0, 0.75]), np.array([2.0, 5.0, 0.15])
BOUND = 2.5  # spreads: a line farther off is a slow rise that was learnt, and no healthy GPU's
FIT_NOISE_C = 0.7  # of a block: two sensors in whole degrees
UNSTEADY_C = 8.0  # and for a load that moved by one limit since the last block: HBM cools later than the core
MEMORY = 48  # blocks of forgetting, so that the doubt never vanishes
# Allowed before it counts in the test: a third of what is reported. The line is not exact at each load.
ALLOWED_C = 1.5
LEAST_C = 5.0  # a smaller rise is not reported
LEARNT_C = 1.0  # deviation of a line that is known
SURE = 3.0  # nor one of less than so many deviations of the line
BLIND_C = 10.0  # where the traffic is unknown, which warms HBM by itself
SAME_TRAFFIC = 0.15  # of the HBM's bandwidth, within which mates do the same
LEAST_LOAD = 0.1  # of the power limit
OWN_LIMIT_C = 4.0  # a mate's own offset counts up to this, so that a bad one is no better than it is


class MemoryPeers:
    """State of all GPUs. `add_block` with each block in order of time.

    Attributes:
        test: the sequential test. warmer_c: degC above what its mates predict, NaN where they say nothing, float64 [G].
        hot: bool [G]. learnt: the line of the GPU is known well enough to contradict its own past, bool [G].
    """

    def __init__(self, node: Ints) -> None:
        count = len(node)
        self._mates = NodeMates(node)
        self._prior = np.diag(SPREADS**-2.0)
        self._squares = np.repeat(self._prior[None], count, axis=0)
        self._products = np.repeat((self._prior @ EXPECTED)[None], count, axis=0)
        self.test = RiseTest(count)
        self.warmer_c: Floats = np.full(count, np.nan)
        self.hot: Bools = np.zeros(count, bool)
        self.learnt: Bools = np.zeros(count, bool)

    def line(self, gpu: int) -> list[float]:
        """Return o, s and c of a GPU."""
        return [float(value) for value in np.linalg.solve(self._squares[gpu], self._products[gpu])]

    def restore(self, gpu: int, line: list[float], warmer_c: float, since_ms: int) -> None:
        """Know the line of a GPU that was hot before the collector started again."""
        self._squares[gpu] = self._prior + np.diag(FIT_NOISE_C**-2.0 * np.ones(3)) * MEMORY / 4
        self._products[gpu] = self._squares[gpu] @ np.array(line)
        self.test.restore(gpu, since_ms)
        self.hot[gpu], self.warmer_c[gpu] = True, warmer_c

    def add_block(self, block: int, seen: Floats, moved: Floats, held: Bools) -> None:
        """Judge a block, and learn from it.

        Args:
            seen: HBM and core, degC; load, of the power limit; traffic, of the bandwidth. [4, G], NaN where unknown.
            moved: by how much the load differs from the last block's, [G].
            held: not to be learnt from, as it may be too warm, bool [G].
        """
        memory, core, load, traffic = seen
        spread = np.linalg.inv(self._squares)
        line = np.einsum("gij,gj->gi", spread, self._products)
        line = np.clip(line, EXPECTED - BOUND * SPREADS, EXPECTED + BOUND * SPREADS)
        blind = np.isnan(traffic)
        work = np.where(blind, load, traffic)
        known = ~np.isnan(memory) & ~np.isnan(core) & (load >= LEAST_LOAD)
        own_c = np.clip(line[:, 0] + line[:, 1] * work, -OWN_LIMIT_C, OWN_LIMIT_C)
        values = np.where(known, np.array([memory - own_c, core]), np.nan)
        of_mates = self._mates.medians(values, np.where(known, load, np.nan), traffic, SAME_TRAFFIC)
        over_c, core_over_c = memory - of_mates[0], core - of_mates[1]
        known &= ~np.isnan(over_c) & ~np.isnan(core_over_c)
        row = np.where(known[:, None], np.stack([np.ones_like(load), work, core_over_c], axis=1), 0.0)
        doubt = np.einsum("gi,gij,gj->g", row, spread, row)
        noise = FIT_NOISE_C**2 + (UNSTEADY_C * np.nan_to_num(moved)) ** 2
        warmer_c = np.where(known, over_c - (row * line).sum(axis=1), np.nan)
        z = self.test.step(block, warmer_c - ALLOWED_C, noise + doubt, known)
        least_c = np.maximum(np.where(blind, BLIND_C, LEAST_C), SURE * np.sqrt(noise + doubt))
        self.hot = np.asarray(known & self.test.passed & (warmer_c >= least_c))
        self.warmer_c, self.learnt = warmer_c, doubt <= LEARNT_C**2
        learns = known & ~held & ~(self.test.suspect | (z > SUSPECT))
        self._learn(learns, row, over_c, noise)
        self.test.learn(warmer_c, learns)

    def _learn(self, learns: Bools, row: Floats, over_c: Floats, noise: Floats) -> None:
        x, y, weight, keep = row[learns], over_c[learns], 1 / noise[learns], 1 - 1 / MEMORY
        squares = weight[:, None, None] * x[:, :, None] * x[:, None, :]
        self._squares[learns] = keep * self._squares[learns] + (1 - keep) * self._prior + squares
        forgotten = (1 - keep) * self._prior @ EXPECTED  # what is forgotten is the prior
        self._products[learns] = keep * self._products[learns] + forgotten + (weight * y)[:, None] * x

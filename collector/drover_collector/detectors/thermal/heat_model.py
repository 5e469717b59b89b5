"""Predict each GPU's core temperature from its power, by its own past, and say by how much it is warmer.

A core is warmer than its air by R x P, where P is power filtered with the time constants of die, heat sink and chassis
(a first-order model for each: TAUS_S). R, and what the node's other GPUs add, are learnt for each GPU by regularised
least squares, with MEMORY blocks of forgetting. Nothing needs a steady load.

A block is 5 minutes. What the median GPU of a node is off by is the air (an inlet that nobody reads, a fan, the room):
no matter of one GPU, so it is taken away. What is left, z, is in units of the GPU's own noise, and goes into a
sequential test, S = max(0, S + z - K) (Page 1954). z is clipped, so at least four blocks in a row must show it. A load
at which a GPU has not been seen for three blocks, among neighbours as busy as now, is not judged: fans follow the load,
so no line through two loads says what a third is like. Nor is a GPU hot whose neighbour is half as much warmer.

The state is bounded (about 0.8 kB a GPU) and depends on the buckets alone: a replay gives what a live collector gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

TAUS_S = (20.0, 90.0, 400.0)  # die and lid; heat sink or cold plate; chassis
OWN = len(TAUS_S)  # parts of a core's rise that its own power makes; then the node's power, and a constant
PARTS = OWN + 2
BLOCK_MS = 300_000
LEARN_BLOCKS = 6  # before a GPU is judged: half an hour
MEMORY = 288  # blocks of forgetting: a day
WARM_MS = 300_000  # after a gap, until the filters hold what came before
MORE_POWER = 1.2  # than the highest power so far, where no limit is read
MOST_GAP = 0.5  # of a block's buckets may be missing

# Expected rise at the power limit and its spread, degC, before anything is learnt: 40 over all three parts, as boards
# have (H100: 0.060 degC/W x 700 W). The parts differ by little, so what moves together is split evenly.
RISE_C, RISE_SPREAD_C, PART_SPREAD_C = 40.0, 15.0, 4.0
NODE_C, NODE_SPREAD_C = 3.0, 3.0
AIR_C = 28.0  # where no inlet is read
OFFSET_C, UNREAD_OFFSET_C = 4.0, 12.0  # spread of the constant with and without an inlet
# Noise of a block's mean against a line, degC, and the blocks that count at most: what the line leaves out (fans) does
# not become less by watching for longer, and a load that never moves must not decide how the rise is split.
FIT_NOISE_C, FIT_BLOCKS = 1.0, 12.0

LOADS, MOST_LOAD = 15, 1.5  # steps of load, up to this share of the power limit, each with an offset of its own
SEEN_BLOCKS = 3.0  # at a load before it is judged
AROUND = 0.12  # by which the node's load may differ from its usual one at that load of the GPU
LEAST_OF_RISE = 0.5  # of RISE_C: a fit that gives the GPU's own power less of its heat is wrong
SLOWEST = 96  # blocks over which such an offset is forgotten: 8 h
LEAST_LOAD = 0.15  # of the power limit
LEAST_RISE_C = 4.0  # by its own power; sensors are in whole degrees

NOISE_C, NOISE_SHARE = 0.35, 0.03  # least noise of a block, degC and share of the rise
UNSTEADY_C = 4.0  # and for a load that moved within the block by one limit (standard deviation)
NOISE_BLOCKS = 24  # over which the noise is learnt
K, LIMIT, CLIP, KEEP = 1.0, 12.0, 4.0, 4.0  # of the test; KEEP: over the limit, so that it ends within four good blocks
SUSPECT = 3.0  # of the test, from which on a block is not learnt
LEAST_SHARE, LEAST_C = 0.08, 0.7  # a smaller rise is not reported
ALONE = 2.0  # times as much warmer as any other GPU of the node
AIR_FOLLOWS, AIR_RESTS = 0.5, 0.02  # share of what is off per block; and of what was followed, that is forgotten
NODE_GPUS, RACK_GPUS = 4, 6  # judged GPUs whose median is the air of a node, of a rack


@dataclass(frozen=True, slots=True)
class Rise:
    """What a block showed, float64 [G], NaN where not judged.

    Attributes:
        warmer_c: degC above what the GPU's own past and the air predict. own_c: predicted rise by its own power.
        hot: bool [G], the test has passed, and this block shows it too.
    """

    warmer_c: Floats
    own_c: Floats
    hot: Bools


class _Loads:
    """Each GPU's power as a share of its scale, filtered with each time constant."""

    def __init__(self, node: Ints, nodes: int) -> None:
        self._node, self._nodes = node, nodes
        self.filtered = np.full((OWN, len(node)), np.nan)
        self.of_node = np.full(nodes, np.nan)  # mean of its GPUs, filtered
        self._scale_w = np.full(len(node), np.nan)  # first power limit; where none is read, the highest power
        self._limited = np.zeros(len(node), bool)  # it is a limit
        self._warm_ms = np.zeros(len(node))

    def rescale(self, power: Floats, limit: Floats) -> tuple[Ints, Floats]:
        """Set what loads are a share of. Return the GPUs whose scale changed, and the old one over the new.

        A limit that changes later changes nothing: heat follows watts.
        """
        first = (limit > 0) & ~self._limited
        higher = ~self._limited & ~first & (power > MORE_POWER * np.nan_to_num(self._scale_w))
        changed = np.flatnonzero(first | higher)
        scale_w = np.where(first, limit, power)[changed]
        ratio = np.nan_to_num(self._scale_w[changed] / scale_w, nan=1.0)
        self.filtered[:, changed] *= ratio
        self._scale_w[changed], self._limited[first] = scale_w, True
        return changed, ratio

    def advance(self, power: Floats, length_ms: int) -> Bools:
        """Add a bucket. Return the GPUs whose filters hold what came before, bool [G]."""
        load = power / self._scale_w
        known = np.isfinite(load)
        for part, tau_s in enumerate(TAUS_S):
            before, share = self.filtered[part], -np.expm1(-length_ms / 1000 / tau_s)
            after = np.where(np.isnan(before), load, before + share * (load - before))
            self.filtered[part] = np.where(known, after, before)
        count = np.bincount(self._node[known], minlength=self._nodes)
        total = np.bincount(self._node[known], load[known], self._nodes)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
        share = -np.expm1(-length_ms / 1000 / TAUS_S[1])
        after = np.where(np.isnan(self.of_node), mean, self.of_node + share * (mean - self.of_node))
        self.of_node = np.where(count > 0, after, self.of_node)
        self._warm_ms = np.where(known, self._warm_ms + length_ms, 0.0)
        return np.asarray(known & (self._warm_ms >= WARM_MS))


class _Sums:
    """Sums of squares and products of the parts x and the degrees y, [G, ...]."""

    def __init__(self, gpus: int) -> None:
        self.squares, self.products = np.zeros((gpus, PARTS, PARTS)), np.zeros((gpus, PARTS))
        self.x, self.y, self.count = np.zeros((gpus, PARTS)), np.zeros(gpus), np.zeros(gpus)

    def add(self, x: Floats, y: Floats, use: Bools) -> None:
        self.squares += x[:, :, None] * x[:, None, :]
        self.products += x * y[:, None]
        self.x += x
        self.y += y
        self.count += use

    def rescale(self, gpus: Ints, ratio: Floats) -> None:
        by = np.ones((len(gpus), PARTS))
        by[:, :OWN] = ratio[:, None]
        self.squares[gpus] *= by[:, :, None] * by[:, None, :]
        self.products[gpus] *= by
        self.x[gpus] *= by

    def learn(self, block: _Sums, learns: Bools) -> None:
        """Add the means of a block; `count` becomes the number of blocks."""
        keep, count = 1 - 1 / MEMORY, np.maximum(block.count, 1)
        self.squares[learns] = keep * self.squares[learns] + (block.squares / count[:, None, None])[learns]
        self.products[learns] = keep * self.products[learns] + (block.products / count[:, None])[learns]
        self.count += learns

    def fit(self, read: Bools) -> Floats:
        """Return degC at the scale for each part of the rise, float64 [G, PARTS]. `read`: an inlet is, bool [G]."""
        prior = np.zeros_like(self.squares)
        prior[:, :OWN, :OWN] = np.linalg.inv((RISE_SPREAD_C / OWN) ** 2 + PART_SPREAD_C**2 * np.eye(OWN))
        prior[:, OWN, OWN] = NODE_SPREAD_C**-2.0
        prior[:, -1, -1] = np.where(read, OFFSET_C, UNREAD_OFFSET_C) ** -2.0
        expected = np.array([RISE_C / OWN] * OWN + [NODE_C, 0.0])
        weight = np.minimum(1.0, FIT_BLOCKS / np.clip(self.count, 1.0, MEMORY)) / FIT_NOISE_C**2
        wanted = self.products * weight[:, None] + prior @ expected
        squares = self.squares * weight[:, None, None] + prior
        return np.asarray(np.linalg.solve(squares, wanted[:, :, None])[:, :, 0])


class _ByLoad:
    """What each GPU is off by at each step of load, and how often it was seen there, float32 [G, LOADS]."""

    def __init__(self, gpus: int) -> None:
        self._offset_c = np.zeros((gpus, LOADS), np.float32)
        self._seen = np.zeros((gpus, LOADS), np.float32)  # blocks
        self._around = np.zeros((gpus, LOADS), np.float32)  # load of the node in these

    def forget(self, gpus: Ints) -> None:
        self._offset_c[gpus] = self._seen[gpus] = 0.0

    def at(self, load: Floats, around: Floats) -> tuple[Floats, Floats]:
        """Return the offset at a load, and the blocks seen there among neighbours as busy as `around`, [G] each."""
        low, high, weight = _steps(load)
        g = np.arange(len(load))
        offset_c, seen, usual = (
            (1 - weight) * of[g, low] + weight * of[g, high] for of in (self._offset_c, self._seen, self._around)
        )
        return offset_c, np.where(np.abs(around - usual) <= AROUND, seen, 0.0)

    def learn(self, learns: Bools, load: Floats, around: Floats, off_c: Floats) -> None:
        low, high, weight = _steps(load)
        for step, share in ((low, 1 - weight), (high, weight)):
            g = np.flatnonzero(learns & ~np.isnan(off_c) & (share > 0))
            at = g, step[g]
            rate = share[g] * np.maximum(1 / (self._seen[at] + 1), 1 / SLOWEST)
            self._offset_c[at] += rate * (off_c[g] - self._offset_c[at])
            self._around[at] += rate * (around[g] - self._around[at])
            self._seen[at] += share[g]


class HeatModel:
    """State of all GPUs of a fleet. `advance` with each bucket in order of time.

    Attributes:
        rise: what the last block showed. score: of the test, float64 [G].
        since_ms: start of the block in which the score left 0, int64 [G].
    """

    def __init__(self, node: Ints, rack_of_node: Ints, racks: int) -> None:
        gpus, self._racks = len(node), racks
        self._node, self._rack_of = node, rack_of_node
        self._loads, self._past, self._by_load = _Loads(node, len(rack_of_node)), _Sums(gpus), _ByLoad(gpus)
        self._sums, self._buckets = _Sums(gpus), 0  # of the block
        self._block: int | None = None
        self._noise = np.full(gpus, 0.3**2)  # degC^2
        self._air_c = np.zeros(len(rack_of_node))
        self._read: Bools = np.zeros(gpus, bool)  # an inlet is
        self.score = np.zeros(gpus)
        self.since_ms = np.zeros(gpus, np.int64)
        nothing: Floats = np.full(gpus, np.nan)
        self.rise = Rise(nothing, nothing, np.zeros(gpus, bool))

    def advance(self, end_ms: int, length_ms: int, temp: Floats, power: Floats, limit: Floats, inlet: Floats) -> None:
        """Add a bucket; at the end of a block set `rise` and `score`.

        Args:
            temp: degC, power and limit: W, float64 [G]. inlet: degC, float64 [N]. NaN where unknown.
        """
        power = np.where(power > 0, power, np.nan)
        changed, ratio = self._loads.rescale(power, limit)
        if len(changed):
            self._sums.rescale(changed, ratio)
            self._past.rescale(changed, ratio)
            self._by_load.forget(changed)
        air = np.where(np.isnan(inlet), AIR_C, inlet) + self._air_c
        self._read = ~np.isnan(inlet)[self._node]
        above = temp - air[self._node]
        use = self._loads.advance(power, length_ms) & ~np.isnan(above)
        x = np.ones((len(temp), PARTS))
        x[:, :OWN], x[:, OWN] = self._loads.filtered.T, self._loads.of_node[self._node]
        x[~use] = 0.0
        self._sums.add(x, np.where(use, above, 0.0), use)
        self._buckets += 1
        block = end_ms // BLOCK_MS
        if self._block is not None and block != self._block:
            self._judge(self._block)
            self._sums, self._buckets = _Sums(len(temp)), 0
        self._block = block

    def _judge(self, block: int) -> None:
        """Judge the block that has ended, and learn from it."""
        sums = self._sums
        there = sums.count > max(1.0, MOST_GAP * self._buckets)
        count = np.maximum(sums.count, 1)
        x, y = sums.x / count[:, None], sums.y / count
        load, around = x[:, 1], x[:, OWN]
        parts = self._past.fit(self._read)
        own_c = np.maximum((parts[:, :OWN] * x[:, :OWN]).sum(axis=1), LEAST_OF_RISE * RISE_C * load)
        offset_c, seen = self._by_load.at(load, around)
        off_c = np.where(there & (self._past.count >= LEARN_BLOCKS), y - (parts * x).sum(axis=1), np.nan)
        rest_c = np.where(seen >= SEEN_BLOCKS, off_c - offset_c, np.nan)
        warmer_c = rest_c - self._air(rest_c)
        moved = np.sqrt(np.maximum(sums.squares[:, 0, 0] / count - x[:, 0] ** 2, 0.0))
        least = NOISE_C**2 + (NOISE_SHARE * own_c) ** 2 + (UNSTEADY_C * moved) ** 2 + 0.5 / np.maximum(seen, 1)
        z = warmer_c / np.sqrt(np.maximum(self._noise, NOISE_C**2) - NOISE_C**2 + least)
        judged = ~np.isnan(z) & (own_c >= LEAST_RISE_C) & (load >= LEAST_LOAD)
        step = np.clip(np.where(judged, z, 0.0), -CLIP, CLIP) - K
        before = self.score
        self.score = np.where(judged, np.clip(before + step, 0.0, LIMIT + KEEP), before)
        self.since_ms[(before == 0) & (self.score > 0)] = block * BLOCK_MS
        hot = judged & (self.score >= LIMIT) & (warmer_c >= np.maximum(LEAST_C, LEAST_SHARE * own_c))
        learns = there & ((self._past.count < LEARN_BLOCKS) | ((self.score < SUSPECT) & ~(z > SUSPECT)))
        self._past.learn(sums, learns)
        self._by_load.learn(learns, load, around, off_c)
        square = np.minimum(warmer_c**2, 9 * np.maximum(self._noise, NOISE_C**2))
        known = learns & ~np.isnan(warmer_c)
        self._noise = np.where(known, self._noise + (square - self._noise) / NOISE_BLOCKS, self._noise)
        warmer_c = np.where(judged, warmer_c, np.nan)
        self.rise = Rise(warmer_c, own_c, self._alone(hot, warmer_c / np.maximum(own_c, LEAST_RISE_C)))

    def _alone(self, hot: Bools, share: Floats) -> Bools:
        """Return the hot GPUs that are by far the warmest of their node, bool [G]. `share`: by which each is warmer."""
        result = np.zeros_like(hot)
        for g in np.flatnonzero(hot):
            mine = np.flatnonzero(self._node == self._node[g])
            others = np.nan_to_num(share[mine[mine != g]])
            result[g] = share[g] >= ALONE * others.max(initial=0.0)
        return result

    def _air(self, rest_c: Floats) -> Floats:
        """Return what the air of each GPU is off by, degC [G], and follow it; NaN where nothing says."""
        of_node, count = group_medians(rest_c, self._node, len(self._air_c))
        of_rack, in_rack = group_medians(rest_c, self._rack_of[self._node], self._racks)
        by_rack = np.where(in_rack >= RACK_GPUS, of_rack, np.nan)[self._rack_of]
        air = np.where(count >= NODE_GPUS, of_node, by_rack)
        self._air_c += AIR_FOLLOWS * np.where(np.isnan(air), 0.0, air) - AIR_RESTS * self._air_c
        result = air[self._node]
        return np.where(np.isnan(result) & self._read, 0.0, result)


def _steps(load: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the two steps of LOADS that a load lies between, and the weight of the higher one, [G] each."""
    place = np.clip(load / MOST_LOAD, 0.0, 0.999) * (LOADS - 1)
    low = place.astype(np.int64)
    return low, low + 1, place - low

"""Predict how warm a GPU or a node is from its peers with a load about its own, and say by how much it is warmer.

GPUs of one node share air, fans and coolant. A fan that follows the load changes the resistance of all of them alike,
by 70 % and more, so what a GPU was at one load says little about another. The share between it and its mates stays: a
heat sink that is 10 % worse than theirs is so at any fan speed. The same holds of nodes of one board that are as busy:
their fans follow one law. So a rise y is o + s x, where x is its power times the median resistance of its mates; s is
its own share, and o what its sensor or its place is off by. Both are learnt by recursive least squares from a prior,
and their doubt is part of the noise. What y is above that goes into the sequential test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors.thermal.rise_test import SUSPECT, RiseTest
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

ALIKE = 0.35  # natural log of one load over the other, at most
LEAST_MATES = 3  # with such a load
FIT_NOISE_C, FIT_SHARE = 0.7, 0.04  # noise of a block's rise against the line, degC and share of the rise
MEMORY = 48  # blocks of forgetting, so that the doubt never vanishes
LEARN_BLOCKS = 3  # before it is judged
LEAST_RISE_C = 6.0  # over its air
YOUNG_BLOCKS = 9
LEAST_SHARE = 0.3  # as s: less is no GPU


@dataclass(frozen=True, slots=True)
class Limits:
    """Spreads of the prior, and rises that are not reported.

    Attributes:
        share_spread, offset_spread_c: between healthy ones. share, young_share: of the rise that its mates predict; the
            second until YOUNG_BLOCKS are learnt. least_c: degC.
    """

    share_spread: float
    offset_spread_c: float
    share: float
    young_share: float
    least_c: float


OF_GPUS = Limits(0.15, 3.0, 0.10, 0.15, 2.0)
OF_NODES = Limits(0.12, 4.0, 0.18, 0.25, 5.0)


class PeerShare:
    """What is learnt of each GPU or each node, and its test; a block at a time.

    Attributes:
        test: the sequential test. warmer_c, own_c: degC above what its mates predict, and that prediction.
        hot: bool, the test has passed, and this block shows it too.
    """

    def __init__(self, count: int, limits: Limits) -> None:
        self._limits = limits
        squares, products = np.zeros((count, 2, 2)), np.zeros((count, 2))
        squares[:, 0, 0], squares[:, 1, 1] = limits.offset_spread_c**-2.0, limits.share_spread**-2.0
        products[:, 1] = limits.share_spread**-2.0  # a share of 1
        self._prior = squares, products
        self._squares, self._products, self._count = squares.copy(), products.copy(), np.zeros(count)
        self.test = RiseTest(count)
        self.warmer_c = self.own_c = np.full(count, np.nan)
        self.hot: Bools = np.zeros(count, bool)

    def _line(self) -> Floats:
        """Return o, degC, and s of each, [count, 2]."""
        return np.asarray(np.linalg.solve(self._squares, self._products[:, :, None])[:, :, 0])

    def usual(self, rise_c: Floats) -> Floats:
        """Return rises as they would be without what is each one's own; mates differ, and are not always the same."""
        line = self._line()
        return np.asarray((rise_c - line[:, 0]) / np.maximum(line[:, 1], LEAST_SHARE))

    def add_block(self, block: int, rise_c: Floats, x: Floats, least: Floats, held: Bools) -> None:
        """Judge a block, and learn from it.

        Args:
            rise_c: degC over its air. x: what its mates would have at its power. NaN where unknown.
            least: degC^2 of noise at least. held: not to be learnt from, as it may be too warm.
        """
        row = np.stack([np.ones_like(x), x], axis=1)
        known = ~np.isnan(x) & (rise_c >= LEAST_RISE_C)
        row[~known] = 0.0
        line = self._line()
        doubt = (row * np.linalg.solve(self._squares, row[:, :, None])[:, :, 0]).sum(axis=1)
        own_c = (row * line).sum(axis=1)
        warmer_c = np.where(known, rise_c - own_c, np.nan)
        judged = known & (self._count >= LEARN_BLOCKS)
        z = self.test.step(block, warmer_c, least + doubt, judged)
        share = np.where(self._count < YOUNG_BLOCKS, self._limits.young_share, self._limits.share)
        self.hot = self.test.lasting(warmer_c >= np.maximum(self._limits.least_c, share * own_c), judged)
        self.warmer_c, self.own_c = np.where(judged, warmer_c, np.nan), own_c
        learns = known & ~held & ((self._count < LEARN_BLOCKS) | ~(self.test.suspect | (z > SUSPECT)))
        self._learn(learns, row, rise_c, least)
        self.test.learn(warmer_c, learns & judged)

    def _learn(self, learns: Bools, row: Floats, rise_c: Floats, least: Floats) -> None:
        weight = 1 / (FIT_NOISE_C**2 + (FIT_SHARE * rise_c) ** 2 + least)[learns]
        x, y, keep = row[learns], rise_c[learns], 1 - 1 / MEMORY
        seen = weight[:, None, None] * x[:, :, None] * x[:, None, :], (weight * y)[:, None] * x
        for learnt, prior, new in zip((self._squares, self._products), self._prior, seen, strict=True):
            learnt[learns] = keep * learnt[learns] + (1 - keep) * prior[learns] + new  # what is forgotten is the prior
        self._count[learns] += 1


class NodeMates:
    """Finds the mates of a GPU: the other GPUs of its node."""

    def __init__(self, node: Ints) -> None:
        begins = np.diff(node, prepend=-1) != 0
        number = np.cumsum(begins) - 1
        slot = np.arange(len(node)) - np.flatnonzero(begins)[number]
        self._at = number, slot  # of each GPU in a table of nodes and places
        self._shape = (int(begins.sum()), int(slot.max(initial=0)) + 1)

    def expected_c(self, rise_c: Floats, load: Floats) -> Floats:
        """Return the rise of each GPU if it were cooled as its mates are, [G]; NaN with too few at about its load."""
        resistance, log = _resistance(rise_c, load)
        return np.asarray(self._medians(resistance[None], log)[0] * load)

    def medians(self, values: Floats, load: Floats, other: Floats, apart: float) -> Floats:
        """Return the median of each GPU's mates in each row of values, [M, G]; NaN with too few.

        Args:
            values: [M, G]. load: > 0, NaN where unknown. other: a second value of each GPU. Mates have about the same
                load, and `other` within `apart`, where both are known.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._medians(values, np.log(load), other, apart)

    def _medians(self, values: Floats, log: Floats, other: Floats | None = None, apart: float = 0.0) -> Floats:
        table = np.full((len(values), *self._shape), np.nan)
        table[:, *self._at] = values
        loads, others = np.full((2, *self._shape), np.nan)
        loads[self._at] = log
        if other is not None:
            others[self._at] = other
        result = np.full_like(table, np.nan)
        for place in range(self._shape[1]):
            alike = np.abs(loads - loads[:, place : place + 1]) <= ALIKE
            alike &= ~(np.abs(others - others[:, place : place + 1]) > apart)
            alike[:, place] = False
            enough = alike.sum(axis=1) >= LEAST_MATES
            if enough.any():
                result[:, enough, place] = _medians(np.where(alike[enough], table[:, enough], np.nan))
        return np.asarray(result[:, *self._at])


def _medians(values: Floats) -> Floats:
    """Return the medians of the last axis without NaN, as numpy's nanmedian, in a tenth of its time."""
    ordered, count = np.sort(values, axis=-1), (~np.isnan(values)).sum(axis=-1)[..., None]
    low, high = (np.take_along_axis(ordered, np.maximum(at, 0), -1)[..., 0] for at in ((count - 1) // 2, count // 2))
    return np.asarray(np.where(count[..., 0] > 0, (low + high) / 2, np.nan))


def expected_of_nodes_c(rise_c: Floats, load: Floats, board: Ints) -> Floats:
    """Return the rise of each node if it were cooled as nodes of its board with about its load are, [N].

    Loads are grouped twice, half a step apart, and the medians of both groups of a node are weighed by how far inside
    the node is: a load that wanders over the edge of a group must not change its mates at once.
    """
    resistance, log = _resistance(rise_c, load)
    found, weights = [], []
    for shift in (0.0, 0.5):
        place = np.nan_to_num(log) / ALIKE + shift
        step = np.floor(place)
        groups = np.unique(np.stack([board, step.astype(np.int64)]), axis=1, return_inverse=True)[1].ravel()
        groups = groups.astype(np.int64)
        median, count = group_medians(resistance, groups, int(groups.max(initial=-1)) + 1)
        found.append(np.where(count >= LEAST_MATES + 1, median, np.nan)[groups])
        weights.append(np.where(np.isnan(found[-1]), 0.0, 1 - np.abs(2 * (place - step) - 1)))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(np.multiply(found, weights), axis=0) / np.sum(weights, axis=0)
    return np.asarray(mean * load)


def _resistance(rise_c: Floats, load: Floats) -> tuple[Floats, Floats]:
    """Return resistance and log of the load; NaN where one is not known, or too small."""
    with np.errstate(invalid="ignore", divide="ignore"):
        known = (rise_c >= LEAST_RISE_C) & (load > 0)
        return np.where(known, rise_c / load, np.nan), np.where(known, np.log(load), np.nan)

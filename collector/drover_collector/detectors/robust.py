"""Robust statistics over groups of GPUs, for all groups at once.

A group is what a GPU may be compared with: its job and SKU, or its rack. Arrays are over entities; group -1 is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.buckets import Floats

Bools = npt.NDArray[np.bool_]
Groups = npt.NDArray[np.int64]

MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Grouping:
    """Groups laid out once, for the medians of many metrics at a time.

    Groups of one size are one block [groups, size], so that a block of all metrics is sorted in one call.

    Attributes:
        count: J, one more than the highest group.
        size: entities per group, int64 [J].
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.count = int(groups.max(initial=-1)) + 1
        inside = np.flatnonzero(groups >= 0)
        order = inside[np.argsort(groups[inside], kind="stable")]
        self.size: Groups = np.bincount(groups[inside], minlength=self.count).astype(np.int64)
        starts = np.cumsum(self.size) - self.size
        self._blocks: list[tuple[Groups, Groups]] = []  # (groups [k], entities [k, size])
        for size in np.unique(self.size[self.size > 0]).tolist():
            which = np.flatnonzero(self.size == size)
            self._blocks.append((which, order[starts[which][:, None] + np.arange(size)]))

    def medians(self, values: Floats) -> tuple[Floats, Floats]:
        """Median and number of values of each group: float64 [M, E] -> [M, J] twice; NaN is left out."""
        medians, counts = np.full((len(values), self.count), np.nan), np.zeros((len(values), self.count))
        for which, entities in self._blocks:
            block = np.sort(values[:, entities], axis=-1)  # NaN to the end
            size = block.shape[-1]
            whole = (block[:, :, (size - 1) // 2] + block[:, :, size // 2]) / 2
            gaps = np.isnan(block[:, :, -1])
            known = np.full(whole.shape, size)
            if gaps.any():
                some = block[gaps]  # [those with NaN, size]
                have = np.count_nonzero(~np.isnan(some), axis=-1)
                rows = np.arange(len(some))
                low, high = some[rows, np.maximum(have - 1, 0) // 2], some[rows, have // 2]
                whole[gaps] = np.where(have > 0, (low + high) / 2, np.nan)
                known[gaps] = have
            medians[:, which] = whole
            counts[:, which] = known
        return medians, counts

    def spread(self, of_groups: Floats) -> Floats:
        """Values of groups, float64 [..., J], to their entities, [..., E]; NaN outside."""
        if not self.count:
            return np.full((*of_groups.shape[:-1], len(self.groups)), np.nan)
        return np.asarray(np.where(self.groups >= 0, of_groups[..., self.groups], np.nan))

    def peers(self, values: Floats) -> Peers:
        """As `peers`, for float64 [M, E]: arrays [M, E]."""
        medians, counts = self.medians(values)
        median = self.spread(medians)
        sigmas, _ = self.medians(np.abs(values - median))
        return Peers(median, self.spread(sigmas) * MAD_TO_SIGMA, np.nan_to_num(self.spread(counts)))


@dataclass(frozen=True, slots=True)
class Peers:
    """Statistics of each entity's group, laid out by entity: float64 [E] each, NaN where the group is empty.

    Attributes:
        median, sigma: of the group (sigma: scaled median absolute deviation).
        count: how many values the group has.
    """

    median: Floats
    sigma: Floats
    count: Floats


def group_medians(values: Floats, groups: Groups, count: int) -> tuple[Floats, Floats]:
    """Median and number of values per group, float64 [count] each; NaN and group -1 are left out."""
    medians, sizes = np.full(count, np.nan), np.zeros(count)
    keep = ~np.isnan(values) & (groups >= 0)
    values, groups = values[keep], groups[keep]
    if not len(values):
        return medians, sizes
    order = np.argsort(values)
    order = order[np.argsort(groups[order], kind="stable")]
    values = values[order]
    lengths = np.bincount(groups, minlength=count)
    there = np.flatnonzero(lengths)
    starts = (np.cumsum(lengths) - lengths)[there]
    medians[there] = (values[starts + (lengths[there] - 1) // 2] + values[starts + lengths[there] // 2]) / 2
    sizes[there] = lengths[there]
    return medians, sizes


def peers(values: Floats, groups: Groups) -> Peers:
    """Median, spread and size of the group of each entity (itself included: one in many moves no median)."""
    count = int(groups.max(initial=-1)) + 1
    nothing = np.full(len(values), np.nan)
    if not count:
        return Peers(nothing, nothing, np.zeros(len(values)))
    medians, sizes = group_medians(values, groups, count)
    inside = groups >= 0
    median = np.where(inside, medians[groups], np.nan)
    spreads, _ = group_medians(np.abs(values - median), groups, count)
    return Peers(median, np.where(inside, spreads[groups] * MAD_TO_SIGMA, np.nan), np.where(inside, sizes[groups], 0.0))


def peer_medians(values: Floats, groups: Groups) -> Floats:
    """Median of the group of each entity, float64 [E]; NaN where the group is empty."""
    count = int(groups.max(initial=-1)) + 1
    if not count:
        return np.full(len(values), np.nan)
    return np.where(groups >= 0, group_medians(values, groups, count)[0][groups], np.nan)

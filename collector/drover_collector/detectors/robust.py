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
    order = np.lexsort((values, groups))
    values, groups = values[order], groups[order]
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    lengths = np.diff(np.append(starts, len(groups)))
    low, high = values[starts + (lengths - 1) // 2], values[starts + lengths // 2]
    medians[groups[starts]] = (low + high) / 2
    sizes[groups[starts]] = lengths
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


def share(flags: Bools, judged: Bools, groups: Groups) -> Floats:
    """Per entity: how much of its group's judged entities carry the flag; NaN where none was judged."""
    count = int(groups.max(initial=-1)) + 1
    if not count:
        return np.full(len(groups), np.nan)
    inside = groups >= 0
    total = np.bincount(groups[inside & judged], minlength=count).astype(float)
    flagged = np.bincount(groups[inside & judged & flags], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(inside, (flagged / total)[groups], np.nan)

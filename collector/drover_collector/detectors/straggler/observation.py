"""One bucket as the straggler detector sees it: each metric against the GPU's peers, all metrics in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.robust import (
    MAD_TO_SIGMA,
    Bools,
    Grouping,
    Groups,
    grouped,
)
from drover_collector.detectors._lib.steady import (
    Ints,
    boards,
    column,
    counter_share,
    reasons_of,
)
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats

COMPARED = (
    "sm_clock_mhz", "tensor_active_ratio", "sm_active_ratio", "dram_active_ratio", "gpu_util_ratio", "power_limit_w",
    "memory_clock_mhz", "pcie_width", "pcie_generation", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s",
    "nvlink_active_links", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
)  # fmt: skip
THROTTLES = ("throttle_power_us", "throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us")

LONE_SHARE = 0.1  # of the group: more outliers than this are a part of the job that works otherwise, by design
LONE_OF_NODES = 4  # what a GPU reports of itself may hit all GPUs of one node: a power brake, a cap, a fan
LONE_REPORTED = 2  # GPUs of a small group that may report a limit of their own at once
PLANNED_SHARE = 0.5  # of a rack's boards with a lower power limit, on two nodes or more: somebody planned it
LIMIT_RATIO = 0.97  # power limit against the peers'


@dataclass(slots=True)
class UsualLimit:
    """Power limits of the last look, W, and the median of each GPU's kind of board, whether it is judged or not."""

    limit: Floats = field(default_factory=lambda: np.zeros(0))
    kinds: Grouping | None = None
    median: Floats = field(default_factory=lambda: np.zeros(0))

    def of(self, limit: Floats, board: Groups) -> Floats:
        kinds = grouped(board, self.kinds)
        if kinds is not self.kinds or not np.array_equal(limit, self.limit, equal_nan=True):  # seldom
            self.limit, self.kinds = limit.copy(), kinds
            self.median = kinds.spread(kinds.medians(limit[None])[0][0])
        return self.median


def zeroed(values: Floats) -> Floats:
    """0 for what is unknown."""
    return np.where(np.isnan(values), 0.0, values)


class Observation:
    """float64 [G]; NaN where a GPU is not judged.

    Attributes:
        values, medians: metric -> what the GPU has, and the median of its group.
        size: judged GPUs of each group, int64 [J].
    """

    def __init__(self, window: Window, grouping: Grouping) -> None:
        self.window, self.grouping = window, grouping
        self.groups, self.size = grouping.groups, grouping.size
        self.judged: Bools = self.groups >= 0
        nothing = np.full(window.index.gpu_count, np.nan)
        names = [name for name in COMPARED if name in window.newest.gpu]
        throttles = [name for name in THROTTLES if name in window.newest.gpu]
        rows = [window.newest.gpu[name] for name in names] + [counter_share(window, name) for name in throttles]
        table = np.array(rows).reshape(len(rows), window.index.gpu_count)
        of_groups, counts = self.grouping.medians(table)
        medians = self.grouping.spread(of_groups)
        self.values = dict.fromkeys((*COMPARED, *THROTTLES), nothing)
        self.medians = dict.fromkeys((*COMPARED, *THROTTLES), nothing)
        self.values |= zip([*names, *throttles], table, strict=True)
        self.medians |= zip([*names, *throttles], medians, strict=True)
        if "gpu_util_ratio" in names:  # of two nodes the busy one is the measure: who waits spins at full utilisation
            util = self.grouping.medians(self.values["gpu_util_ratio"][None], upper=True)[0][0]
            self.medians["gpu_util_ratio"] = self.grouping.spread(util)
        if "sm_clock_mhz" in names:
            at = names.index("sm_clock_mhz")
            self.clock_count = zeroed(self.grouping.spread(counts[at]))
            away, _ = self.grouping.medians(np.abs(table[at] - medians[at])[None])
            self.clock_sigma = self.grouping.spread(away[0]) * MAD_TO_SIGMA
        else:
            self.clock_count, self.clock_sigma = np.zeros(len(nothing)), nothing
        self._reasons = reasons_of(window)
        self.tensor, self.sm = self.ratio("tensor_active_ratio"), self.ratio("sm_active_ratio")
        self.has_duty: Bools = ~np.isnan(self.tensor) | ~np.isnan(self.sm)
        self.traffic = self._traffic()

    def _traffic(self) -> Floats:
        """Of the peers' median, the share of time in which memory was read or written, where no duty is read: NVML has
        it on every board, and who does the same work moves the same data."""
        used = self.window.newest.gpu.get("memory_util_ratio")
        if used is None or not (self.judged & ~self.has_duty).any():
            return np.full(len(self.judged), np.nan)
        median = self.grouping.spread(self.grouping.medians(used[None])[0][0])
        self.values["memory_util_ratio"], self.medians["memory_util_ratio"] = used, median
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.has_duty, np.nan, used / median)

    def ratio(self, metric: str) -> Floats:
        """Of the peers' median."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.values[metric] / self.medians[metric])

    def over(self, metric: str) -> Floats:
        """A counter's share of time beyond the peers' median."""
        return np.asarray(zeroed(self.values[metric]) - zeroed(self.medians[metric]))

    def share(self, gpus: Ints) -> Floats:
        """How much of the judged GPUs of its group these are, for each of these GPUs, which are judged."""
        groups = self.groups[gpus]
        return np.asarray(np.bincount(groups, minlength=self.grouping.count)[groups] / self.size[groups])

    def own(self, bits: int) -> Bools:
        """GPUs that report one of these reasons while less than half of their group does."""
        flags = self.reports(bits) & self.judged
        return self.where(flags, lambda gpus: self.share(gpus) < 0.5)

    def where(self, flags: Bools, test: Callable[[Ints], Bools]) -> Bools:
        """Those flagged GPUs, all of them judged, that pass a test: few as a rule, and looked at by themselves."""
        gpus = np.flatnonzero(flags)
        if not len(gpus):
            return flags
        result = np.zeros(len(flags), bool)
        result[gpus] = test(gpus)
        return result

    def reports(self, bits: int) -> Bools:
        """GPUs that report one of these clock event reasons."""
        return np.asarray((self._reasons & bits) != 0)

    def lone(self, flags: Bools, of_node: bool = False) -> Bools:
        """Those that are few enough in their group.

        Args:
            of_node: of what GPUs report themselves: two of a small group may do so at once, and all on one node of
                at least LONE_OF_NODES.
        """

        def few(gpus: Ints) -> Bools:
            size = self.size[self.groups[gpus]]
            most = np.where(size >= 2 * LONE_REPORTED, LONE_REPORTED, 1) if of_node else 1
            found = self.share(gpus) <= np.maximum(LONE_SHARE, np.minimum(most / size, 0.26 if of_node else 1.0))
            return found | self.one_node(gpus) if of_node else np.asarray(found)

        return self.where(flags & self.judged, few)

    def one_node(self, gpus: Ints, of_nodes: int = LONE_OF_NODES) -> Bools:
        """Of these GPUs, in order, those of groups on so many nodes that have all of them on one."""
        groups, nodes = self.groups[gpus], self.window.index.gpu_node
        result = np.zeros(len(gpus), bool)
        for group in set(groups.tolist()):
            mine = groups == group
            flagged = nodes[gpus[mine]]
            if flagged[0] == flagged[-1] and 1 + np.count_nonzero(np.diff(nodes[self.grouping.of(group)])) >= of_nodes:
                result |= mine
        return result

    def planned_limit(self, usual: UsualLimit) -> Bools:
        """GPUs whose lower power limit most boards of their rack have too, whoever holds those. `usual`: of the last
        look, brought up to date."""
        index, limit = self.window.index, column(self.window, "power_limit_w")
        low = limit <= LIMIT_RATIO * usual.of(limit, boards(self.window)[index.gpu_node])
        result = np.zeros(len(limit), bool)
        rack = index.rack[index.gpu_node]
        for r in np.unique(rack[low & self.judged]).tolist():
            inside = (rack == r) & ~np.isnan(limit)
            many = (low & inside).sum() >= PLANNED_SHARE * inside.sum()
            if index.racks[r] and many and len(np.unique(index.gpu_node[low & inside])) >= 2:
                result |= low & inside
        return result

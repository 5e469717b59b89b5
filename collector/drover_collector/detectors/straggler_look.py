"""One bucket as the straggler detector sees it: each metric against the GPU's peers, all metrics in one go."""

from __future__ import annotations

import numpy as np

from drover_collector.buckets import Floats
from drover_collector.detectors.robust import MAD_TO_SIGMA, Bools, Grouping, Groups
from drover_collector.detectors.steady import boards, column, counter_share, reasons_of
from drover_collector.detectors.window import Window

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


def zeroed(values: Floats) -> Floats:
    """0 for what is unknown."""
    return np.where(np.isnan(values), 0.0, values)


class Look:
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

    def share(self, flags: Bools) -> Floats:
        """How much of its group's judged GPUs carry the flag, for each GPU; 0 outside."""
        if not self.grouping.count:
            return np.zeros(len(flags))
        flagged = np.bincount(self.groups[self.judged & flags], minlength=self.grouping.count)
        return zeroed(self.grouping.spread(flagged / np.maximum(self.size, 1)))

    def own(self, bits: int) -> Bools:
        """GPUs that report one of these reasons while less than half of their group does."""
        flags = self.reports(bits) & self.judged
        return flags & (self.share(flags) < 0.5) if flags.any() else flags

    def reports(self, bits: int) -> Bools:
        """GPUs that report one of these clock event reasons."""
        return np.asarray((self._reasons & bits) != 0)

    def lone(self, flags: Bools, of_node: bool = False) -> Bools:
        """Those that are few enough in their group.

        Args:
            of_node: of what GPUs report themselves: two of a small group may do so at once, and all on one node of
                at least LONE_OF_NODES.
        """
        flags = flags & self.judged
        if not flags.any():
            return flags
        size = np.maximum(self.size[self.groups], 1)
        most = np.where(size >= 2 * LONE_REPORTED, LONE_REPORTED, 1) if of_node else 1
        few = self.share(flags) <= np.maximum(LONE_SHARE, np.minimum(most / size, 0.26 if of_node else 1.0))
        return flags & (few | self.one_node(flags)) if of_node else flags & few

    def one_node(self, flags: Bools, of_nodes: int = LONE_OF_NODES) -> Bools:
        """Of groups on so many nodes, those whose flagged GPUs all sit on one."""
        nodes = self.window.index.gpu_node
        result = np.zeros(len(flags), bool)
        for group in np.flatnonzero(np.bincount(self.groups[flags & self.judged])).tolist():
            inside = self.groups == group
            flagged = nodes[inside & flags]  # in order
            if flagged[0] == flagged[-1] and 1 + np.count_nonzero(np.diff(nodes[inside])) >= of_nodes:
                result |= inside
        return result

    def planned_limit(self) -> Bools:
        """GPUs whose lower power limit most boards of their rack have too, whoever holds those."""
        index, limit = self.window.index, column(self.window, "power_limit_w")
        board = boards(self.window)[index.gpu_node]
        usual = self.grouping_medians(limit, board.astype(np.int64))
        low = limit <= LIMIT_RATIO * usual
        result = np.zeros(len(limit), bool)
        rack = index.rack[index.gpu_node]
        for r in np.unique(rack[low & self.judged]).tolist():
            inside = (rack == r) & ~np.isnan(limit)
            many = (low & inside).sum() >= PLANNED_SHARE * inside.sum()
            if index.racks[r] and many and len(np.unique(index.gpu_node[low & inside])) >= 2:
                result |= low & inside
        return result

    @staticmethod
    def grouping_medians(values: Floats, groups: Groups) -> Floats:
        """Median of each GPU's group, whether it is judged or not."""
        grouping = Grouping(groups)
        return grouping.spread(grouping.medians(values[None])[0][0])

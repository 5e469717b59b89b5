"""Compare each metric of the GPUs in one bucket with their peers, all metrics at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import (
    Ints,
    boards,
    column,
    counter_share,
    reasons_of,
)
from drover_collector.detectors._lib.robust import (
    MAD_TO_SIGMA,
    Bools,
    Grouping,
    Groups,
    grouped,
)
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats

COMPARED = (
    "sm_clock_mhz", "tensor_active_ratio", "sm_active_ratio", "dram_active_ratio", "gpu_util_ratio", "power_limit_w",
    "memory_clock_mhz", "pcie_width", "pcie_generation", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s",
    "nvlink_active_links", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
)  # fmt: skip
THROTTLES = ("throttle_power_us", "throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us")

LONE_SHARE = 0.1  # of the group: more outliers are a part of the job that works differently by design
LONE_OF_NODES = 4  # a limit that GPUs report may affect all GPUs of one node: a power brake, a cap, a fan
LONE_REPORTED = 2  # GPUs of a small group that may report a limit at once
PLANNED_SHARE = 0.5  # of a rack's boards with a lower power limit, on two nodes or more: it is planned
LIMIT_RATIO = 0.97  # power limit against the peers'


@dataclass(slots=True)
class UsualLimit:
    """Power limits of the last bucket, W, and the median of each GPU's kind of board, judged or not."""

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
    """Replace NaN by 0."""
    return np.where(np.isnan(values), 0.0, values)


class Observation:
    """The newest bucket of the judged GPUs. Arrays are float64 [G]; NaN where a GPU is not judged.

    Attributes:
        values: metric -> values of the GPUs. medians: metric -> medians of their groups.
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
        if "gpu_util_ratio" in names:  # of two nodes the busy one counts: GPUs that wait spin at full utilisation
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
        memory = self.values.get("memory_util_ratio", nothing)
        self.busy = np.where(self.has_duty, self.values["sm_active_ratio"], memory)

    def _traffic(self) -> Floats:
        """Return the time in which memory was used, over the peers' median, where no duty is read.

        NVML has it on every board, and GPUs with the same work move the same data.
        """
        used = self.window.newest.gpu.get("memory_util_ratio")
        if used is None or not (self.judged & ~self.has_duty).any():
            return np.full(len(self.judged), np.nan)
        median = self.grouping.spread(self.grouping.medians(used[None])[0][0])
        self.values["memory_util_ratio"], self.medians["memory_util_ratio"] = used, median
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.has_duty, np.nan, used / median)

    def ratio(self, metric: str) -> Floats:
        """Return a metric over the peers' median."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.values[metric] / self.medians[metric])

    def over(self, metric: str) -> Floats:
        """Return a counter's share of time beyond the peers' median."""
        return np.asarray(zeroed(self.values[metric]) - zeroed(self.medians[metric]))

    def share(self, gpus: Ints) -> Floats:
        """Return for each of these judged GPUs the share of its group's judged GPUs that they make up."""
        groups = self.groups[gpus]
        return np.asarray(np.bincount(groups, minlength=self.grouping.count)[groups] / self.size[groups])

    def own(self, bits: int) -> Bools:
        """Return GPUs that report one of these reasons while less than half of their group does."""
        flags = self.reports(bits) & self.judged
        return self.where(flags, lambda gpus: self.share(gpus) < 0.5)

    def where(self, flags: Bools, test: Callable[[Ints], Bools]) -> Bools:
        """Return the flagged GPUs, all judged, that pass a test. Only these, usually few, are computed."""
        gpus = np.flatnonzero(flags)
        if not len(gpus):
            return flags
        result = np.zeros(len(flags), bool)
        result[gpus] = test(gpus)
        return result

    def reports(self, bits: int) -> Bools:
        """Return GPUs that report one of these clock event reasons."""
        return np.asarray((self._reasons & bits) != 0)

    def lone(self, flags: Bools, of_node: bool = False) -> Bools:
        """Return the flagged GPUs that are few enough in their group.

        Args:
            of_node: for causes that GPUs report: two of a small group may do so at once, and all on one node of at
                least LONE_OF_NODES.
        """

        def few(gpus: Ints) -> Bools:
            size = self.size[self.groups[gpus]]
            most = np.where(size >= 2 * LONE_REPORTED, LONE_REPORTED, 1) if of_node else 1
            found = self.share(gpus) <= np.maximum(LONE_SHARE, np.minimum(most / size, 0.26 if of_node else 1.0))
            return found | self.one_node(gpus) if of_node else np.asarray(found)

        return self.where(flags & self.judged, few)

    def one_node(self, gpus: Ints, of_nodes: int = LONE_OF_NODES) -> Bools:
        """Return which of these GPUs, in order, are all on one node of a group that has `of_nodes` nodes or more."""
        groups, nodes = self.groups[gpus], self.window.index.gpu_node
        result = np.zeros(len(gpus), bool)
        for group in set(groups.tolist()):
            mine = groups == group
            flagged = nodes[gpus[mine]]
            if flagged[0] == flagged[-1] and 1 + np.count_nonzero(np.diff(nodes[self.grouping.of(group)])) >= of_nodes:
                result |= mine
        return result

    def planned_limit(self, usual: UsualLimit) -> Bools:
        """Return GPUs whose lower power limit most boards of their rack share, in any job.

        `usual`: of the last bucket; updated in place.
        """
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

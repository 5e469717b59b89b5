"""Find fans that stand still or turn too slowly for the heat of their node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, column
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.kernel.shortage import Held
from drover_collector.fleet.buckets import Floats

WORKS = 0.2  # of the time, the busiest GPU: at rest a controller may stop fans, and other heat than GPUs' sets them
TURNING_NODES = 3  # of the same kind, whose fans all turn: without so many the node's own past must show it
# A controller turns fans faster with more heat. All limits are our own: a cooler room slows fans by less.
# Of the slowest mean speed that this node had, with any core. A warmer core needs a faster fan, so what is slower than
# with a cooler core is slow; and what was fast enough for a warmer core is fast enough now, after fans ran at full.
SLOW = 0.5
STEPS, STEP_C, COOLEST_C = 8, 8.0, 26.0  # of the node's hottest core, which fans follow
LEARN_MS = 900_000  # at such a step, before it counts
LEARNS = 0.85  # of that speed: a slower fan is not learnt from
FORGET_MS = 7_200_000


@dataclass(slots=True)
class Fans:
    """The slowest fan of each node.

    Attributes:
        speed: in rpm. turned: whether it has turned, bool [N].
        reopened: node with a slow fan before a restart -> its speed before that.
        mean, seen_ms: its mean speed at each step of heat, and how long it was seen there, float64 [STEPS, N].
    """

    speed: Held = field(default_factory=Held)
    turned: Bools = field(default_factory=lambda: np.zeros(0, bool))
    reopened: Mapping[str, float] = field(default_factory=dict)
    mean: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))
    seen_ms: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))

    def bad(self, window: Window) -> tuple[Floats, Floats]:
        """Take the newest bucket.

        Returns:
            1 for a node with a fan that is too slow, 0 for one without, NaN where unknown, float64 [N]; and the speed
            to expect, rpm, NaN where unknown, float64 [N].
        """
        count, speed = window.index.node_count, window.newest.node.get("fan_min_rpm")
        if speed is None:
            return np.full(count, np.nan), np.full(count, np.nan)
        if len(self.turned) != count:
            self.turned = np.zeros(count, bool)
            self.mean, self.seen_ms = np.full((STEPS, count), np.nan), np.zeros((STEPS, count))
            for name, rpm in self.reopened.items():
                n = window.index.node_number.get(name)
                if n is not None:
                    self.mean[:, n], self.seen_ms[:, n] = rpm, LEARN_MS
        self.speed.read(window, speed)
        least = self._least(window, ~np.isnan(speed))
        slow = (speed > 0) & (speed < SLOW * least)
        bad = (self._stopped(window) | slow) & _works(window)
        return np.where(np.isnan(speed), np.nan, bad), least

    def _least(self, window: Window, read: Bools) -> Floats:
        """Return the slowest mean speed of each node at any step of heat, [N]; NaN while unknown. Learn."""
        hottest = np.full(window.index.node_count, np.nan)
        np.fmax.at(hottest, window.index.gpu_node, column(window, "gpu_temp_c"))
        known = ~np.isnan(hottest) & read & (self.speed.value > 0)
        step: Ints = np.clip((np.nan_to_num(hottest) - COOLEST_C) / STEP_C, 0, STEPS - 1).astype(np.int64)
        means = np.where(self.seen_ms >= LEARN_MS, self.mean, np.inf)
        cooler = np.where(np.arange(STEPS)[:, None] <= step, means, np.inf).min(axis=0)
        least = np.where(np.isfinite(cooler), means.min(axis=0), np.inf)
        least = np.where(np.isfinite(least) & ~np.isnan(hottest), least, np.nan)
        nodes = np.flatnonzero(known & ~(self.speed.value < LEARNS * least))
        at = step[nodes], nodes
        seen, length = self.seen_ms[at], window.newest.length_ms
        share = np.maximum(length / (seen + length), length / FORGET_MS)
        before = np.where(seen > 0, self.mean[at], self.speed.value[nodes])
        self.mean[at] = before + share * (self.speed.value[nodes] - before)
        self.seen_ms[at] = seen + length
        return least

    def _stopped(self, window: Window) -> Bools:
        """Return the nodes whose slowest fan stands still, but turned before or turns at like nodes; bool [N]."""
        still, turns = self.speed.value == 0, self.speed.value > 0
        self.turned |= turns
        skus = np.array([node.sku for node in window.index.nodes])
        alike = np.zeros(len(still), bool)
        for sku in set(skus[still].tolist()):
            same = skus == sku
            needed = max(TURNING_NODES, 4 * int(np.count_nonzero(still & same)))
            alike[same] = np.count_nonzero(turns & same) >= needed
        return np.asarray(still & (self.turned | alike))


def _works(window: Window) -> Bools:
    """Return the nodes with a busy GPU, bool [N]."""
    works = np.zeros(window.index.node_count, bool)
    busy = window.newest.gpu.get("gpu_util_ratio")
    if busy is not None:
        works[window.index.gpu_node[busy >= WORKS]] = True
    return works

"""Find fans that stand still or turn too slowly for the heat of their node."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, column
from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.kernel.shortage import Held
from drover_collector.fleet.buckets import Floats

WORKS = 0.2  # of the time, the busiest GPU: at rest a controller may stop fans, and other heat than GPUs' sets them
WORKS_POWER = 0.3  # of its limit, where utilisation is not read: boards at rest have a tenth to a fifth
TURNING_NODES = 3  # of the same kind, whose fans all turn: without so many the node's own past must show it
# A controller turns fans faster with more heat. All limits are our own: a cooler room slows fans by less.
# Of the slowest mean speed that this node had, with any core. A warmer core needs a faster fan, so what is slower than
# with a cooler core is slow; and what was fast enough for a warmer core is fast enough now, after fans ran at full.
SLOW = 0.5
STEPS, STEP_C, COOLEST_C = 8, 8.0, 26.0  # of the node's hottest core, which fans follow
LEARN_MS = 900_000  # at such a step, before it counts
LEARNS = 0.85  # of that speed: a slower fan is not learnt from
FORGET_MS = 7_200_000
# Of the slowest mean speed that other nodes of its kind had with at most its power. A controller has a lowest speed,
# and above it turns fans faster with more heat. What is left is the room: air that is 5 degC cooler under a core 45
# degC above it needs 12 % less flow (R goes with flow^-0.8), and speeds of one model differ by some percent.
SLOW_OF_ALIKE = 0.75
STEP_W = 100.0  # of the mean power of the node's GPUs, for this comparison


@dataclass(slots=True)
class Fans:
    """The slowest fan of each node.

    Attributes:
        speed: in rpm. turned: whether it has turned, bool [N].
        reopened: node with a slow fan before a restart -> its speed before that.
        mean, seen_ms: its mean speed at each step of heat, and how long it was seen there, float64 [STEPS, N].
        power_mean, power_seen_ms: the same for each step of power. kinds: the nodes of each SKU and pool.
    """

    speed: Held = field(default_factory=Held)
    turned: Bools = field(default_factory=lambda: np.zeros(0, bool))
    reopened: dict[str, float] = field(default_factory=dict)
    mean: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))
    seen_ms: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))
    power_mean: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))
    power_seen_ms: Floats = field(default_factory=lambda: np.zeros((STEPS, 0)))
    kinds: list[Ints] = field(default_factory=list)

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
            self.power_mean, self.power_seen_ms = self.mean.copy(), self.seen_ms.copy()
            names = np.array([f"{node.sku}|{node.pool}" for node in window.index.nodes])
            self.kinds = [np.flatnonzero(names == name) for name in np.unique(names)]
            for name, rpm in self.reopened.items():
                n = window.index.node_number.get(name)
                if n is not None:
                    self.mean[:, n], self.seen_ms[:, n] = rpm, LEARN_MS
        self.speed.read(window, speed)
        least = self._least(window, ~np.isnan(speed))
        slow = (speed > 0) & (speed < SLOW * least)
        slow |= self._still_slow(window, speed, least)
        alike = self._least_of_alike(window, ~np.isnan(speed))
        # In a colder room a core is cold, and needs less air: the node must have been seen with one no warmer.
        slow_of_alike = (speed > 0) & (speed < SLOW_OF_ALIKE * alike) & ~np.isnan(least)
        bad = (self._stopped(window) | slow | slow_of_alike) & _works(window)
        return np.where(np.isnan(speed), np.nan, bad), np.where(slow_of_alike, alike, least)

    def _still_slow(self, window: Window, speed: Floats, least: Floats) -> Bools:
        """Return the nodes that were reported before a restart and still are slow, bool [N]."""
        result = np.zeros(len(speed), bool)
        for name in tuple(self.reopened):
            n = window.index.node_number.get(name)
            if n is None or speed[n] >= LEARNS * least[n]:
                del self.reopened[name]  # it is repaired
            else:
                result[n] = 0 < speed[n] < SLOW_OF_ALIKE * least[n]
        return result

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
        self._learn(self.mean, self.seen_ms, step, nodes, window.newest.length_ms)
        return least

    def _learn(self, mean: Floats, seen_ms: Floats, step: Ints, nodes: Ints, length: int) -> None:
        at = step[nodes], nodes
        seen = seen_ms[at]
        share = np.maximum(length / (seen + length), length / FORGET_MS)
        before = np.where(seen > 0, mean[at], self.speed.value[nodes])
        mean[at] = before + share * (self.speed.value[nodes] - before)
        seen_ms[at] = seen + length

    def _least_of_alike(self, window: Window, read: Bools) -> Floats:
        """Return the slowest mean speed that other nodes of each one's kind had with at most its power, [N]. Learn.

        NaN with fewer than TURNING_NODES of them, or where the node itself has never turned about as fast.
        """
        index, slots = window.index, window.index.gpu_node.astype(np.int64)
        watts, _ = group_medians(column(window, "power_w"), slots, index.node_count)
        known = ~np.isnan(watts) & read & (self.speed.value > 0)
        step: Ints = np.clip(np.nan_to_num(watts) / STEP_W, 0, STEPS - 1).astype(np.int64)
        means = np.where(self.power_seen_ms >= LEARN_MS, self.power_mean, np.inf)
        means = np.minimum.accumulate(means, axis=0)  # with at most this power
        fastest = np.where(self.power_seen_ms >= LEARN_MS, self.power_mean, 0.0).max(axis=0)
        least = np.full(index.node_count, np.nan)
        for nodes in self.kinds:
            if len(nodes) <= TURNING_NODES:
                continue
            slowest, row = np.partition(means[:, nodes], range(TURNING_NODES + 1), axis=1), step[nodes]
            own = means[row, nodes]
            others = np.where(own <= slowest[row, 0], slowest[row, 1], slowest[row, 0])
            enough = (
                np.isfinite(slowest[row, TURNING_NODES]) & np.isfinite(others) & (fastest[nodes] >= LEARNS * others)
            )
            least[nodes] = np.where(known[nodes] & enough, others, np.nan)
        learns = known & ~(self.speed.value < LEARNS * least)
        self._learn(self.power_mean, self.power_seen_ms, step, np.flatnonzero(learns), window.newest.length_ms)
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
    """Return the nodes with a busy GPU, bool [N]. Where utilisation is not read, its power says so."""
    busy, power, limit = (column(window, name) for name in ("gpu_util_ratio", "power_w", "power_limit_w"))
    works = np.zeros(window.index.node_count, bool)
    working = np.where(np.isnan(busy), power >= WORKS_POWER * limit, busy >= WORKS)
    works[window.index.gpu_node[working]] = True
    return works

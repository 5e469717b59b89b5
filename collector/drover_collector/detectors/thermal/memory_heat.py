"""Find GPUs whose HBM is warmer than its own past says, against their cores.

HBM sits under the same lid as the core, so it is compared with the core: what is left depends on the load and on the
traffic, and on how well the stacks touch the lid. That difference is learnt for each step of load, like the offsets of
`heat_model`, and only judged with about the traffic that the HBM had at that load. What all GPUs of a node share, such
as a new driver's sensor or a job with other work, is taken away. A GPU that its own past cannot judge, as at a new load
or in its first half hour, is compared with its node's other GPUs: see `memory_peers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.thermal.heat_model import (
    LEAST_BUCKETS,
    LEAST_LOAD,
    NODE_GPUS,
    OffsetsByLoad,
)
from drover_collector.detectors.thermal.memory_peers import MemoryPeers
from drover_collector.detectors.thermal.rise_test import BLOCK_MS, RiseTest
from drover_collector.fleet.buckets import Floats

NOISE_C = 0.7  # least noise of a block: two sensors in whole degrees
LEAST_C = 5.0  # a smaller rise is not reported
BLIND_C = 10.0  # where the traffic is unknown, which warms HBM by itself: our own limit
UNREAD_MS = 150_000  # some are read once a minute
AS_MATES = 0.4  # share of a rise that its mates must show too, where they can say
LOAD_STEADY = 0.1  # of the power limit, between two blocks: HBM cools later than the core


@dataclass(slots=True)
class MemoryLimits:
    """The highest HBM temperature that each board's driver allows (NVML_TEMPERATURE_THRESHOLD_MEM_MAX).

    The GPU begins to slow down there (nvml.h). DCGM's health check of HBM warns at the same limit.

    Attributes:
        known_c: degC, NaN where the driver names none, float64 [G]. version: of the inventory it is from.
        streak: readings in a row at which a GPU's HBM was as hot, int64 [G]. seen_ms: of the newest one, int64 [G].
    """

    known_c: Floats = field(default_factory=lambda: np.zeros(0))
    version: int = -1
    streak: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seen_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def advance(self, window: Window, temps_c: Floats) -> None:
        """Take the newest bucket. `temps_c`: of HBM, float64 [G]."""
        if len(self.streak) != len(temps_c):
            self.known_c, self.version = np.full(len(temps_c), np.nan), -1
            self.streak, self.seen_ms = np.zeros((2, len(temps_c)), np.int64)
        if window.inventory is not None and self.version != window.inventory.version:
            limits = window.inventory.numbers("memory_temp_max_c")
            self.known_c, self.version = np.where(limits > 0, limits, np.nan), window.inventory.version
        known, end_ms = ~np.isnan(temps_c), window.newest.end_ms
        self.seen_ms = np.where(known, end_ms, self.seen_ms)
        self.streak = np.where(known, np.where(temps_c >= self.known_c, self.streak + 1, 0), self.streak)
        self.streak[end_ms - self.seen_ms > UNREAD_MS] = 0


class MemoryHeat:
    """State of all GPUs. `advance` with each bucket in order of time.

    Attributes:
        test: of each GPU, by its own past. peers: by its node's other GPUs.
        warmer_c: degC by which its HBM is warmer than before, NaN where not judged, float64 [G].
        hot: bool [G]. by_peers: those of them that only the node's other GPUs say, bool [G].
    """

    def __init__(self, node: Ints) -> None:
        self._node, self._nodes = node, int(node.max(initial=-1)) + 1
        self._offsets, self.test = OffsetsByLoad(len(node)), RiseTest(len(node))
        self.peers = MemoryPeers(node)
        self._sums, self._count, self._buckets = np.zeros((4, len(node))), np.zeros(len(node)), 0
        self._block: int | None = None
        self._load_before: Floats = np.full(len(node), np.nan)
        self._last: Floats = np.full(
            (3, len(node)), np.nan
        )  # of the last block: load, traffic, and what was usual there
        self._blind: Bools = np.ones(len(node), bool)  # the traffic is unknown
        self.warmer_c: Floats = np.full(len(node), np.nan)
        self.hot: Bools = np.zeros(len(node), bool)
        self.by_peers: Bools = np.zeros(len(node), bool)

    def since_ms(self, gpu: int) -> int:
        """Return since when a GPU, which is hot, is."""
        return int((self.peers.test if self.by_peers[gpu] else self.test).since_ms[gpu])

    def usual(self, gpu: int) -> dict[str, float]:
        """Return what is known of a GPU that was judged in the last block.

        Empty if it was not judged then. Else its load and traffic, its usual difference to the core there, and by how
        much it is warmer now, degC. Where only its node's other GPUs say that it is hot: its line against them.
        """
        if self.by_peers[gpu]:
            offset_c, per_work_c, per_core = self.peers.line(gpu)
            line = {"offset_c": offset_c, "per_work_c": per_work_c, "per_core": per_core}
            return line | {"warmer_c": float(self.warmer_c[gpu])}
        load, traffic, usual_c = self._last[:, gpu].tolist()
        usual = {"load": load, "traffic": traffic, "usual_c": usual_c, "warmer_c": float(self.warmer_c[gpu])}
        return usual if np.isfinite(list(usual.values())).all() else {}

    def restore(self, gpu: int, usual: Mapping[str, float], since_ms: int) -> None:
        """Know a GPU that was hot before the collector started again. `usual`: as `usual` returned it.

        Raises:
            KeyError: it is not of this form.
        """
        self.hot[gpu], self.warmer_c[gpu] = True, usual["warmer_c"]
        if "per_core" in usual:
            line = [usual["offset_c"], usual["per_work_c"], usual["per_core"]]
            self.peers.restore(gpu, line, usual["warmer_c"], since_ms)
            self.by_peers[gpu] = True
            return
        self._offsets.restore(gpu, usual["load"], usual["traffic"], usual["usual_c"])
        self._last[:, gpu] = usual["load"], usual["traffic"], usual["usual_c"]
        self.test.restore(gpu, since_ms)

    def advance(self, end_ms: int, memory: Floats, core: Floats, load: Floats, traffic: Floats) -> None:
        """Add a bucket; at the end of a block judge it.

        Args:
            memory, core: degC. load: of the power limit. traffic: share of HBM bandwidth, NaN where unknown. [G] each.
        """
        self._blind = np.isnan(traffic)
        values = np.array([memory - core, load, np.where(np.isnan(traffic), 0.0, traffic), core])
        known = ~np.isnan(values).any(axis=0)
        self._sums[:, known] += values[:, known]
        self._count += known
        self._buckets += 1
        block = end_ms // BLOCK_MS
        if self._block is not None and block != self._block:
            self._judge(self._block)
            self._sums[:], self._count[:], self._buckets = 0.0, 0.0, 0
        self._block = block

    def _judge(self, block: int) -> None:
        there = self._count > max(1.0, LEAST_BUCKETS * self._buckets)
        apart, load, traffic, core = self._sums / np.maximum(self._count, 1)
        offset_c, seen, doubt_c = self._offsets.at(load, traffic)
        rest_c = np.where(there & ~np.isnan(doubt_c), apart - offset_c, np.nan)
        of_node, count = group_medians(rest_c, self._node, self._nodes)
        warmer_c = rest_c - np.where(count >= NODE_GPUS, of_node, 0.0)[self._node]
        least = NOISE_C**2 + 0.5 / np.maximum(seen, 1) + np.nan_to_num(doubt_c) ** 2
        first, moved = np.isnan(self._load_before).all(), np.abs(load - self._load_before)
        steady = moved <= LOAD_STEADY
        self._load_before = np.where(there, load, np.nan)
        if first:
            return  # nothing is known of the load before; what was hot before a restart stays so
        judged = ~np.isnan(warmer_c) & steady & (load >= LEAST_LOAD)
        self.test.step(block, warmer_c, least, judged)
        core = np.where(there, core, np.nan)
        work = np.where(self._blind, np.nan, traffic)
        self.peers.add_block(block, np.array([core + apart, core, load, work]), moved, self.test.suspect)
        hot = self.test.passed & judged & (warmer_c >= np.where(self._blind, BLIND_C, LEAST_C))
        # A core that is cooled well again leaves its HBM warmer against it: the mates, whose cores stay, know.
        hot &= ~(self.peers.learnt & (self.peers.warmer_c < AS_MATES * warmer_c))
        self.by_peers = np.asarray(self.peers.hot & ~hot)
        self.hot = np.asarray(hot | self.peers.hot)
        learns = there & steady & ~self.test.suspect & ~self.peers.test.passed
        self._offsets.learn(learns, load, traffic, apart)
        self.test.learn(warmer_c, learns)
        self.warmer_c = np.where(self.by_peers, self.peers.warmer_c, warmer_c)
        self._last = np.array([load, traffic, offset_c])

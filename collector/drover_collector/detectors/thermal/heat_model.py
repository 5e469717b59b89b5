"""Predict each GPU's core temperature from its power, by its own past, and say by how much it is warmer.

A core is warmer than its air by R x P, where P is power filtered with the time constants of die, heat sink and chassis
(a first-order model for each: TAUS_S). R, and what the node's other GPUs add, are learnt for each GPU by regularised
least squares, with MEMORY blocks of forgetting. Nothing needs a steady load.

A block is 5 minutes. What the median GPU of a node is off by is the air (an inlet that nobody reads, a fan, the room):
no matter of one GPU, so it is taken away. What is left, z, is in units of the GPU's own noise, and goes into a
sequential test, S = max(0, S + z - K) (Page 1954). z is clipped, so at least four blocks in a row must show it. A load
at which a GPU has not been seen for three blocks, among neighbours as busy as now, is not judged: fans follow the load,
so no line through two loads says what a third is like. Nor is a GPU hot whose neighbour is half as much warmer.

What the air of a node is off by, less that of the rack's or else the fleet's median node, is the node's own: its fans
or coolant. What a rack's median node is off by, less that of the median rack, is the rack's air. Each goes into such a
test. Where no inlet is read and there is nothing to compare with, it is not judged.

The state is bounded (about 0.9 kB a GPU) and depends on the buckets alone: a replay gives what a live collector gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools, group_medians
from drover_collector.detectors.thermal.highest_seen import HighestSeen
from drover_collector.detectors.thermal.mate_loads import MateLoads
from drover_collector.detectors.thermal.peer_share import OF_GPUS, OF_NODES, NodeMates, PeerShare, expected_of_nodes_c
from drover_collector.detectors.thermal.rise_test import BLOCK_MS, NOISE_C, SUSPECT, RiseTest
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

TAUS_S = (20.0, 90.0, 400.0)  # die and lid; heat sink or cold plate; chassis
OWN = len(TAUS_S)  # parts of a core's rise that its own power makes; then the node's power, and a constant
PARTS = OWN + 2
LEARN_BLOCKS = 4  # before a GPU is judged: 20 minutes
MEMORY = 288  # blocks of forgetting: a day
WARM_MS = 300_000  # after a gap, until the filters hold what came before
GAP_MS = 60_000  # a shorter one is a node that is read seldom, or lost a sample
MORE_POWER = 1.2  # than the highest power so far, where no limit is read
LEAST_BUCKETS = 0.25  # of a block's must be there: a node may be read each 30 s

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
SEEN_BLOCKS = 2.0  # at a load before it is judged
AROUND = 0.12  # by which the node's load may differ from its usual one at that load of the GPU
NEAR, DOUBT_C = 0.25, 15.0  # a load at most so far from one that was seen; spread of the rise between them, per limit
LEAST_OF_RISE = 0.5  # of RISE_C: a fit that gives the GPU's own power less of its heat is wrong
SLOWEST = 96  # blocks over which such an offset is forgotten: 8 h
LEAST_LOAD = 0.15  # of the power limit
LEAST_RISE_C = 4.0  # by its own power; sensors are in whole degrees

# By how much the load, as a share of the limit, may move within a block (standard deviation) and from what the chassis
# feels: up to it the block counts fully.
STEADY = 0.05
NOISE_SHARE = 0.03  # of the rise, in addition to NOISE_C
UNSTEADY_C = 4.0  # and for a load that moved by one limit, as in STEADY
LEAST_SHARE, LEAST_C = 0.08, 0.7  # a smaller rise is not reported
# A neighbour that begins to work may warm the air of one GPU by as much: until an hour is learnt, nothing less is said.
YOUNG_BLOCKS, YOUNG_SHARE = 12, 0.22
ALONE = 2.0  # times as much warmer as any other GPU of the node
AS_MATES = 0.4  # share of a rise that its mates must show too, where they can say
AIR_FOLLOWS, AIR_RESTS = 0.5, 0.02  # share of what is off per block; and of what was followed, that is forgotten
AIR_LEARN_BLOCKS, AIR_SEEN_BLOCKS = 6, 3.0  # for the air a GPU counts later, at loads that it was seen at
NODE_GPUS, RACK_GPUS = 4, 6  # judged GPUs whose median is the air of a node, of a rack
ALIKE_NODES, RACK_NODES, RACKS = 4, 3, 3  # to compare a node with; of a rack for its median; racks to compare it with
PAIR = 2  # nodes of a rack that are enough if both show it: the cooler one counts
AIR_NOISE_C = 0.5  # least noise of a node's and a rack's block
# Fans need minutes to follow a load: noise of a node's block for a load that moved by one limit. An H100 node whose job
# began was 12 degC warmer than ten minutes later.
FANS_FOLLOW_C = 15.0
# A smaller rise of a node's or a rack's air is not reported: neighbours' loads move it by some degrees within a day.
NODE_SHARE, NODE_LEAST_C, UNREAD_NODE_C = 0.20, 5.0, 9.0  # the last where no inlet is read
RACK_LEAST_C = 6.0
# Share of a GPU's rise by which it must be warmer than it ever was at such a load, as AS_MATES.
OVER_HIGHEST_SHARE = 0.4
OVER_HIGHEST_C = 2.5  # by which a node, or most of a rack, is warmer than it ever was at such a load


@dataclass(frozen=True, slots=True)
class Rise:
    """What a block showed, float64 [G], NaN where not judged.

    Attributes:
        warmer_c: degC above what the GPU's own past and the air predict. own_c: predicted rise by its own power.
        hot: bool [G], the test has passed, and this block shows it too.
        by_peers: bool [G], those of `hot` that are warmer than their node's other GPUs say, not than their own past.
        node_c: degC by which a node's air is warmer than before, beyond the nodes around it, float64 [N].
        rack_c: the same of a rack, beyond the other racks, [R]. hot_nodes, hot_racks: bool [N], [R].
    """

    warmer_c: Floats
    own_c: Floats
    hot: Bools
    by_peers: Bools
    node_c: Floats
    rack_c: Floats
    hot_nodes: Bools
    hot_racks: Bools

    @classmethod
    def nothing(cls, gpus: int, nodes: int, racks: int) -> Rise:
        gpu_c, node_c, rack_c = (np.full(count, np.nan) for count in (gpus, nodes, racks))
        return cls(gpu_c, gpu_c, gpu_c > 0, gpu_c > 0, node_c, rack_c, node_c > 0, rack_c > 0)


class _Loads:
    """Each GPU's power as a share of its scale, filtered with each time constant."""

    def __init__(self, node: Ints, nodes: int) -> None:
        self._node, self._nodes = node, nodes
        self.filtered = np.full((OWN, len(node)), np.nan)
        self.of_node = np.full(nodes, np.nan)  # mean of its GPUs, filtered
        self.scale_w = np.full(len(node), np.nan)  # first power limit; where none is read, the highest power
        self._limited = np.zeros(len(node), bool)  # it is a limit
        self._warm_ms, self._gap_ms = np.zeros(len(node)), np.zeros(len(node))

    def rescale(self, power: Floats, limit: Floats) -> tuple[Ints, Floats]:
        """Set what loads are a share of. Return the GPUs whose scale changed, and the old one over the new.

        A limit that changes later changes nothing: heat follows watts.
        """
        first = (limit > 0) & ~self._limited
        higher = ~self._limited & ~first & (power > MORE_POWER * np.nan_to_num(self.scale_w))
        changed = np.flatnonzero(first | higher)
        scale_w = np.where(first, limit, power)[changed]
        ratio = np.nan_to_num(self.scale_w[changed] / scale_w, nan=1.0)
        self.filtered[:, changed] *= ratio
        self.scale_w[changed], self._limited[first] = scale_w, True
        return changed, ratio

    def advance(self, power: Floats, length_ms: int) -> Bools:
        """Add a bucket. Return the GPUs whose filters hold what came before, bool [G]."""
        load = power / self.scale_w
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
        self._gap_ms = np.where(known, 0.0, self._gap_ms + length_ms)
        self._warm_ms = np.where(self._gap_ms > GAP_MS, 0.0, self._warm_ms + length_ms)
        return np.asarray(known & (self._warm_ms >= WARM_MS))


class _Sums:
    """Sums of squares and products of the parts x and the degrees y, [G, ...]."""

    def __init__(self, gpus: int) -> None:
        self.squares, self.products = np.zeros((gpus, PARTS, PARTS)), np.zeros((gpus, PARTS))
        self.x, self.y, self.count = np.zeros((gpus, PARTS)), np.zeros(gpus), np.zeros(gpus)
        self.buckets = 0  # in which any GPU could have been seen

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


class OffsetsByLoad:
    """What each GPU is off by at each step of load, and how often it was seen there, float32 [G, LOADS]."""

    def __init__(self, gpus: int) -> None:
        self._offset_c = np.zeros((gpus, LOADS), np.float32)
        self._seen = np.zeros((gpus, LOADS), np.float32)  # blocks
        self._around = np.zeros((gpus, LOADS), np.float32)  # load of the node in these

    def forget(self, gpus: Ints) -> None:
        self._offset_c[gpus] = self._seen[gpus] = 0.0

    def restore(self, gpu: int, load: float, around: float, offset_c: float) -> None:
        """Know what a GPU was off by at a load, before the collector started again."""
        low, high, _ = _steps(np.array([load]))
        for step in (int(low[0]), int(high[0])):
            self._offset_c[gpu, step], self._around[gpu, step], self._seen[gpu, step] = offset_c, around, SLOWEST

    def at(self, load: Floats, around: Floats) -> tuple[Floats, Floats, Floats]:
        """Return what each GPU is off by at a load, the blocks seen there, and the doubt of another load, [G] each.

        They are those of the nearest step that it was seen at among neighbours about as busy as `around`, where it was
        not seen at this load itself. The doubt, degC, is 0 at a load that was seen, NaN where none is near.
        """
        low, high, weight = _steps(load)
        g = np.arange(len(load))
        offset_c, seen, usual = (
            (1 - weight) * of[g, low] + weight * of[g, high] for of in (self._offset_c, self._seen, self._around)
        )
        known = (seen >= SEEN_BLOCKS) & (np.abs(around - usual) <= AROUND)
        doubt_c = np.where(known, 0.0, np.nan)
        rest = np.flatnonzero(~known & ~np.isnan(load))
        away = np.abs(np.arange(LOADS) * MOST_LOAD / (LOADS - 1) - load[rest, None])
        near = (self._seen[rest] >= SEEN_BLOCKS) & (away <= NEAR)
        near &= np.abs(around[rest, None] - self._around[rest]) <= AROUND + away
        away = np.where(near, away, np.inf)
        step = away.argmin(axis=1)
        row = np.arange(len(rest))
        offset_c[rest], seen[rest] = self._offset_c[rest, step], np.where(near[row, step], self._seen[rest, step], 0.0)
        doubt_c[rest] = np.where(near[row, step], DOUBT_C * away[row, step], np.nan)
        return offset_c, seen, doubt_c

    def learn(self, learns: Bools, load: Floats, around: Floats, off_c: Floats, worth: Floats | float = 1.0) -> None:
        """Learn from a block. `worth`: it counts as so many, [G]: a block in which the load changed says little."""
        low, high, weight = _steps(load)
        for step, share in ((low, (1 - weight) * worth), (high, weight * worth)):
            g = np.flatnonzero(learns & ~np.isnan(off_c) & (share > 0))
            at = g, step[g]
            rate = share[g] * np.maximum(1 / (self._seen[at] + 1), 1 / SLOWEST)
            self._offset_c[at] += rate * (off_c[g] - self._offset_c[at])
            self._around[at] += rate * (around[g] - self._around[at])
            self._seen[at] += share[g]


@dataclass(slots=True)
class Layout:
    """What stands where, and works on what.

    Attributes:
        node: of each GPU, int64 [G]. rack_of: of each node, int64 [N]. racks: how many.
        job: number of each node's job, int64 [N]; -1: none is known.
        board: number of each node's kind of board and pool, int64 [N]: equal ones are cooled alike.
    """

    node: Ints
    rack_of: Ints
    racks: int
    job: Ints
    board: Ints


@dataclass(frozen=True, slots=True)
class PeerTests:
    """Tests of GPUs against their node's others, of nodes against nodes as busy, and of racks by their nodes."""

    mates: NodeMates
    gpus: PeerShare
    nodes: PeerShare
    racks: RiseTest


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rises of GPUs and of nodes."""

    gpus: HighestSeen
    nodes: HighestSeen


class HeatModel:
    """State of all GPUs of a fleet. `advance` with each bucket in order of time.

    Attributes:
        rise: what the last block showed. gpus, nodes, racks: their tests.
        layout: what stands where; its `job` and `board` are to be set before a bucket is added.
    """

    def __init__(self, node: Ints, rack_of_node: Ints, racks: int) -> None:
        gpus, nobody = len(node), np.full(len(rack_of_node), -1, np.int64)
        self.layout = Layout(node, rack_of_node, racks, nobody, nobody)
        self._loads, self._past, self._by_load = _Loads(node, len(rack_of_node)), _Sums(gpus), OffsetsByLoad(gpus)
        self._sums = _Sums(gpus)  # of the block
        self._block: int | None = None
        self._air_c = np.zeros(len(rack_of_node))
        self._read: Bools = np.zeros(gpus, bool)  # an inlet is
        self.gpus, self.nodes, self.racks = RiseTest(gpus), RiseTest(len(rack_of_node)), RiseTest(racks)
        self.by_peers = PeerTests(
            NodeMates(node), PeerShare(gpus, OF_GPUS), PeerShare(len(rack_of_node), OF_NODES), RiseTest(racks)
        )
        self._highest = Highest(HighestSeen(gpus), HighestSeen(len(rack_of_node)))
        self._mates = MateLoads(node, len(rack_of_node))
        self.rise = Rise.nothing(gpus, len(rack_of_node), racks)

    def since_ms(self, g: int) -> int:
        """Return since when GPU `g`, which is hot, is."""
        return int((self.by_peers.gpus.test if self.rise.by_peers[g] else self.gpus).since_ms[g])

    def node_since_ms(self, n: int) -> int:
        """Return since when node `n`, which is hot, is."""
        return int((self.nodes if self.nodes.passed[n] else self.by_peers.nodes.test).since_ms[n])

    def rack_since_ms(self, rack: int) -> int:
        """Return since when a rack, which is hot, is."""
        return int((self.racks if self.racks.passed[rack] else self.by_peers.racks).since_ms[rack])

    @property
    def load(self) -> Floats:
        """Each GPU's power as a share of its limit, as its heat sink feels it, float64 [G]."""
        return np.asarray(self._loads.filtered[1])

    @property
    def suspects(self) -> Bools:
        """GPUs that may be too warm, or whose node or rack may be, bool [G]."""
        tests = self.by_peers
        nodes, racks = self.nodes.suspect | tests.nodes.test.suspect, self.racks.suspect | tests.racks.suspect
        alone = self.gpus.suspect | tests.gpus.test.suspect
        return np.asarray(alone | (nodes | racks[self.layout.rack_of])[self.layout.node])

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
            self._mates.rescale(changed, ratio)
            self._highest.gpus.forget(changed)
        air = np.where(np.isnan(inlet), AIR_C, inlet) + self._air_c
        self._read = ~np.isnan(inlet)[self.layout.node]
        above = temp - air[self.layout.node]
        use = self._loads.advance(power, length_ms) & ~np.isnan(above)
        x = np.ones((len(temp), PARTS))
        x[:, :OWN], x[:, OWN] = self._loads.filtered.T, self._loads.of_node[self.layout.node]
        x[~use] = 0.0
        self._sums.add(x, np.where(use, above, 0.0), use)
        self._sums.buckets += 1
        block = end_ms // BLOCK_MS
        if self._block is not None and block != self._block:
            self._judge(self._block)
            self._sums = _Sums(len(temp))
        self._block = block

    def _judge(self, block: int) -> None:
        """Judge the block that has ended, and learn from it."""
        sums = self._sums
        there = sums.count > max(1.0, LEAST_BUCKETS * sums.buckets)
        count = np.maximum(sums.count, 1)
        x, y = sums.x / count[:, None], sums.y / count
        load, around = x[:, 1], x[:, OWN]
        rise_c = np.where(there, y + self._air_c[self.layout.node], np.nan)  # over the inlet
        parts = self._past.fit(self._read)
        moved = np.sqrt(np.maximum(sums.squares[:, 0, 0] / count - x[:, 0] ** 2, 0.0))
        moved = np.maximum(moved, np.abs(x[:, 0] - x[:, OWN - 1]))  # the chassis has not followed yet
        own_c = np.maximum((parts[:, :OWN] * x[:, :OWN]).sum(axis=1), LEAST_OF_RISE * RISE_C * load)
        offset_c, seen, doubt_c = self._by_load.at(load, around)
        off_c = np.where(there & (self._past.count >= LEARN_BLOCKS), y - (parts * x).sum(axis=1), np.nan)
        rest_c = np.where(np.isnan(doubt_c), np.nan, off_c - offset_c)
        sure = (doubt_c == 0.0) & (seen >= AIR_SEEN_BLOCKS) & (self._past.count >= AIR_LEARN_BLOCKS)
        air_c, of_gpu = self._air(rest_c, sure)
        warmer_c = rest_c - of_gpu
        # The mean of a load that moves is known from so many readings alone, and the rise by as much.
        moves_c = RISE_C * moved / np.sqrt(count)
        least = NOISE_C**2 + (NOISE_SHARE * own_c) ** 2 + (UNSTEADY_C * moved) ** 2 + 0.5 / np.maximum(seen, 1)
        self._mates.add_block(np.where(there, load, np.nan))
        least += moves_c**2 + self._mates.doubt_c**2
        least += np.nan_to_num(doubt_c) ** 2
        judged = ~np.isnan(warmer_c) & (own_c >= LEAST_RISE_C) & (load >= LEAST_LOAD)
        z = self.gpus.step(block, warmer_c, least, judged)
        least_share = np.where(self._past.count < YOUNG_BLOCKS, YOUNG_SHARE, LEAST_SHARE)
        slope_c = np.maximum(parts[:, :OWN].sum(axis=1), LEAST_OF_RISE * RISE_C)
        over_c = np.where(self._read, self._highest.gpus.over_c(load, rise_c, slope_c), np.nan)
        large = (warmer_c >= np.maximum(LEAST_C, least_share * own_c)) & ~(over_c < OVER_HIGHEST_SHARE * warmer_c)
        hot = self.gpus.lasting(large, judged)
        # A GPU at rest says little of its heat sink, and its power hardly moves: its core follows its air, as a
        # thermometer does. So it counts for its rack, if not for its node, whose fans may rest with it.
        of_gpus = np.array([np.where(known, own_c, np.nan) for known in (judged, ~np.isnan(warmer_c))])
        node_c, rack_c, hot_nodes, hot_racks = self._judge_air(block, air_c, of_gpus, moved, moves_c)
        learns = there & ((self._past.count < LEARN_BLOCKS) | ~(self.suspects | (z > SUSPECT)))
        self._past.learn(sums, learns)
        self._by_load.learn(learns, load, around, off_c, np.minimum(1.0, (STEADY / np.maximum(moved, STEADY)) ** 2))
        self.gpus.learn(warmer_c, learns)
        warmer_c = np.where(judged, warmer_c, np.nan)
        hot = self._alone(hot, warmer_c / np.maximum(own_c, LEAST_RISE_C))
        self.rise = Rise(warmer_c, own_c, hot, hot & False, node_c, rack_c, hot_nodes, hot_racks)
        self._judge_by_peers(block, rise_c, load * self._loads.scale_w, moved, moves_c)
        # What could not be judged may be a fault that began then, and an air that is not read is not known.
        self._highest.gpus.learn(load, rise_c, ~self.suspects, judged & self._read & (moved <= STEADY), slope_c)
        self._keep_new(rise_c, around)

    def _judge_by_peers(self, block: int, rise_c: Floats, watts: Floats, moved: Floats, moves_c: Floats) -> None:
        """Judge GPUs and nodes by their peers, racks by their nodes, and add it to `rise`.

        Where a node's GPUs work unequally, each at its own job, its median rise and its median power may be those of
        different GPUs: noise of RISE_C for a difference of one power limit.
        """
        was, gpus, nodes = self.rise, self.by_peers.gpus, self.by_peers.nodes
        least = NOISE_C**2 + (UNSTEADY_C * moved) ** 2 + moves_c**2 + self._mates.doubt_c**2
        gpus.add_block(
            block, rise_c, self.by_peers.mates.expected_c(gpus.usual(rise_c), watts), least, self.gpus.passed
        )
        hot = was.hot & ~(gpus.warmer_c < AS_MATES * was.warmer_c)
        by_peers = self._alone(gpus.hot, gpus.warmer_c / np.maximum(gpus.own_c, LEAST_RISE_C)) & ~hot
        warmer_c, own_c = np.where(by_peers, gpus.warmer_c, was.warmer_c), np.where(by_peers, gpus.own_c, was.own_c)
        count = len(self.layout.board)
        of_node, watts_of, moved_by, moves_by = (
            group_medians(of, self.layout.node, count)[0] for of in (rise_c, watts, moved, moves_c)
        )
        expected_c = expected_of_nodes_c(nodes.usual(of_node), watts_of, self.layout.board)
        load = watts / self._loads.scale_w
        middle_load, _ = group_medians(load, self.layout.node, count)
        uneven, _ = group_medians(np.abs(load - middle_load[self.layout.node]), self.layout.node, count)
        least = NOISE_C**2 + (FANS_FOLLOW_C * np.nan_to_num(moved_by)) ** 2 + np.nan_to_num(moves_by) ** 2
        least += (RISE_C * np.nan_to_num(uneven)) ** 2
        nodes.add_block(block, of_node, expected_c, least, self.nodes.passed)
        over_c = nodes.warmer_c - self._of_jobs(nodes.warmer_c)
        of_rack = self._of_racks(over_c)
        rack_own, _ = group_medians(nodes.own_c, self.layout.rack_of, self.layout.racks)
        racks = self.by_peers.racks
        judged = ~np.isnan(of_rack)
        z = racks.step(block, of_rack, AIR_NOISE_C**2 + (NOISE_SHARE * rack_own) ** 2, judged)
        racks.learn(of_rack, judged & ~racks.suspect & ~(z > SUSPECT))
        warm_rack = racks.lasting(of_rack >= np.maximum(RACK_LEAST_C, NODE_SHARE * rack_own), judged)
        # What all nodes of a rack have is the rack's.
        alone_c = over_c - np.nan_to_num(np.maximum(of_rack, 0.0))[self.layout.rack_of]
        warm = nodes.hot & (alone_c >= np.maximum(OF_NODES.least_c, OF_NODES.share * nodes.own_c))
        # GPUs that their own past cannot judge.
        by_node = warm[self.layout.node] & np.isnan(warmer_c) & ~np.isnan(rise_c)
        warmer_c = np.where(by_node, alone_c[self.layout.node], warmer_c)
        self.rise = Rise(
            warmer_c, own_c, hot | by_peers, by_peers, np.where(warm & ~was.hot_nodes, alone_c, was.node_c),
            np.where(warm_rack & ~was.hot_racks, of_rack, was.rack_c), was.hot_nodes | warm, was.hot_racks | warm_rack,
        )  # fmt: skip

    def _keep_new(self, rise_c: Floats, around: Floats) -> None:
        """Drop nodes and racks from `rise` that were as warm before, at such a load and with nothing wrong; learn."""
        nodes, rack_of, tests = len(self.layout.board), self.layout.rack_of, self.by_peers
        of_node, load = (group_medians(of, self.layout.node, nodes)[0] for of in (rise_c, around))
        over_c = self._highest.nodes.over_c(load, of_node)
        of_rack, _ = group_medians(over_c, rack_of, self.layout.racks)
        hot_nodes, hot_racks = self.rise.hot_nodes, self.rise.hot_racks
        self.rise = replace(
            self.rise,
            hot_nodes=hot_nodes & ~(over_c < OVER_HIGHEST_C),
            hot_racks=hot_racks & ~(of_rack < OVER_HIGHEST_C),
        )
        wrong = self.nodes.suspect | tests.nodes.test.suspect | (self.racks.suspect | tests.racks.suspect)[rack_of]
        self._highest.nodes.learn(load, of_node, ~wrong)

    def _judge_air(
        self, block: int, air_c: Floats, own_c: Floats, moved: Floats, moves_c: Floats
    ) -> tuple[Floats, Floats, Bools, Bools]:
        """Judge nodes and racks by what their air is off by, degC [N]; the last four of `Rise`.

        Args:
            own_c: predicted rise of the GPUs that count for their node, and of those that count for their rack, [2, G].
        """
        nodes = len(air_c)
        own, at_rest, by_load, moves = (
            group_medians(of, self.layout.node, nodes)[0] for of in (*own_c, moved, moves_c)
        )
        air_c = air_c - self._of_jobs(air_c)
        of_rack, known = group_medians(air_c, self.layout.rack_of, self.layout.racks)
        racks = self._of_racks(air_c)
        everywhere, count = group_medians(air_c, np.zeros(nodes, np.int64), 1)
        around = np.where(known >= ALIKE_NODES, of_rack, everywhere[0] if count[0] >= ALIKE_NODES else np.nan)
        around = around[self.layout.rack_of]
        read = np.zeros(nodes, bool)
        read[self.layout.node[self._read]] = True
        node_c = air_c - np.where(np.isnan(around) & read, 0.0, around)
        middle, count = group_medians(racks, np.zeros(self.layout.racks, np.int64), 1)
        rack_c = racks - (middle[0] if count[0] >= RACKS else np.nan)
        rack_own, _ = group_medians(at_rest, self.layout.rack_of, self.layout.racks)
        result = []
        by_load = (FANS_FOLLOW_C * np.nan_to_num(by_load)) ** 2 + np.nan_to_num(moves) ** 2
        for test, warmer_c, of, least_own_c, least_c, noise in (
            (self.nodes, node_c, own, LEAST_RISE_C, np.where(read, NODE_LEAST_C, UNREAD_NODE_C), by_load),
            (self.racks, rack_c, rack_own, 0.0, np.full(len(rack_c), RACK_LEAST_C), np.zeros(len(rack_c))),
        ):
            judged = ~np.isnan(warmer_c) & (of >= least_own_c)
            z = test.step(block, warmer_c, AIR_NOISE_C**2 + (NOISE_SHARE * of) ** 2 + noise, judged)
            test.learn(warmer_c, judged & ~test.suspect & ~(z > SUSPECT))
            hot = test.lasting(warmer_c >= np.maximum(least_c, NODE_SHARE * of), judged)
            result += [np.where(judged, warmer_c, np.nan), hot]
        return result[0], result[2], np.asarray(result[1], bool), np.asarray(result[3], bool)

    def _of_racks(self, air_c: Floats) -> Floats:
        """Return what the median node of each rack is off by, [R]; of two nodes the cooler one, NaN with fewer."""
        of_rack, known = group_medians(air_c, self.layout.rack_of, self.layout.racks)
        least = np.full(self.layout.racks, np.inf)
        np.fmin.at(least, self.layout.rack_of, air_c)
        return np.where(known >= RACK_NODES, of_rack, np.where(known >= PAIR, least, np.nan))

    def _of_jobs(self, air_c: Floats) -> Floats:
        """Return by how much the nodes of each node's job are warmer, degC [N]; 0 for a job on one or two racks.

        A job that begins on many racks at a load that they have not had for hours changes the air of all of them.
        """
        common = np.zeros(len(air_c))
        jobs = int(self.layout.job.max(initial=-1)) + 1
        if jobs:
            of_job, count = group_medians(air_c, self.layout.job, jobs)
            job, racks = self.layout.job[self.layout.job >= 0], self.layout.racks
            pairs = np.unique(job * racks + self.layout.rack_of[self.layout.job >= 0]) // racks
            wide = (np.bincount(pairs, minlength=jobs) >= RACKS) & (count >= ALIKE_NODES)
            common = np.where(self.layout.job >= 0, np.where(wide, np.maximum(of_job, 0.0), 0.0)[self.layout.job], 0.0)
        return np.nan_to_num(common)

    def _alone(self, hot: Bools, share: Floats) -> Bools:
        """Return the hot GPUs that are by far the warmest of their node, bool [G]. `share`: by which each is warmer."""
        result = np.zeros_like(hot)
        for g in np.flatnonzero(hot):
            mine = np.flatnonzero(self.layout.node == self.layout.node[g])
            others = np.nan_to_num(share[mine[mine != g]])
            result[g] = share[g] >= ALONE * others.max(initial=0.0)
        return result

    def _air(self, rest_c: Floats, sure: Bools) -> tuple[Floats, Floats]:
        """Follow the air: return what that of each node is off by, [N], and what is new of it for each GPU, [G].

        NaN where nothing says. What a load that was never seen adds is the same for all GPUs of a node: it is taken
        from each of them, and is not the air's.
        """
        of_node, air = self._medians(np.where(sure, rest_c, np.nan))
        off_c = self._air_c + of_node
        self._air_c += AIR_FOLLOWS * np.where(np.isnan(air), 0.0, air) - AIR_RESTS * self._air_c
        new = self._medians(rest_c)[1][self.layout.node]
        return off_c, np.where(np.isnan(new) & self._read, 0.0, new)

    def _medians(self, rest_c: Floats) -> tuple[Floats, Floats]:
        """Return what each node's GPUs are off by, and the same with the rack's where its own are few, [N] each."""
        of_node, count = group_medians(rest_c, self.layout.node, len(self._air_c))
        of_rack, in_rack = group_medians(rest_c, self.layout.rack_of[self.layout.node], self.layout.racks)
        own = np.where(count >= NODE_GPUS, of_node, np.nan)
        by_rack = np.where(in_rack >= RACK_GPUS, of_rack, np.nan)[self.layout.rack_of]
        return own, np.where(np.isnan(own), by_rack, own)


def _steps(load: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the two steps of LOADS that a load lies between, and the weight of the higher one, [G] each."""
    place = np.clip(load / MOST_LOAD, 0.0, 0.999) * (LOADS - 1)
    low = place.astype(np.int64)
    return low, low + 1, place - low

"""Find what a job waits for by what its GPUs do not do: a node whose SMs rest, a GPU whose NVLinks carry less.

- A late host: its GPUs have nothing to run while those of the other nodes wait in NCCL's kernels, which occupy SMs and
  count as utilisation. So a whole node shows less SM activity than its peers for the same tensor activity and HBM
  traffic, and the job has become slower by more than that. No utilisation gap is needed.
- A slow NVLink whose links are all up: one GPU's NVLinks carry less while it does the same work as its peers, as NCCL
  sends the rest another way, and the job has become slower.

In both the peers are less active than before; a node with less work, or an expert that is asked less, does not make
them so. Two nodes are not distinguished by SM activity: one that rests looks like one whose peer is busy for longer.
NVIDIA, "DCGM profiling metrics": SM activity counts resident warps, those that spin too; NVLink rates are of payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors.straggler.cusum import BUSY_TIME, NVLINK, PAUSE, Drifts, of_node
from drover_collector.detectors.straggler.observation import Observation

NODE_SHARE = 0.75  # of a node's GPUs in the job: its host is late, not a GPU
EACH = 0.4  # of the node's rest: so much each of these GPUs rests
OTHERS = 3.0  # times what the job's other nodes have changed
SMALL_PAUSE = 0.006  # log ratio of SM activity for the same work, the node's mean
SLOWER = 0.02  # log ratio by which peers are less active than before: the job is slower
PAUSE_SHARE = 1.0  # of the node's fall that the peers must have fallen by: they wait for longer than it rests
SAME_WORK = 0.2, 0.8  # of the node's rest: outside, its tensor activity has risen or fallen, and so has its work
LESS_NVLINK = 0.10  # log ratio: a smaller fall delays a job by a percent
LIGHTER = 0.25  # of that fall: a GPU whose work fell by as much has less to send


@dataclass(slots=True)
class Waits:
    """GPUs whose job became slower when they did, bool [G]. They stay so until it is over."""

    host: Bools = field(default_factory=lambda: np.zeros(0, bool))
    nvlink: Bools = field(default_factory=lambda: np.zeros(0, bool))

    def resume(self, channel: int, gpus: Ints, count: int) -> None:
        """Take an incident that is open at a start as seen. `count`: GPUs of the fleet."""
        for flags, of in (("host", PAUSE), ("nvlink", NVLINK)):
            if channel == of:
                known = getattr(self, flags)
                setattr(self, flags, known if len(known) == count else np.zeros(count, bool))
                getattr(self, flags)[gpus] = True

    def late_hosts(self, now: Observation, drifts: Drifts) -> Bools:
        """Return the GPUs of nodes that rest while the job waits, bool [G]."""
        rest = -drifts.moved(PAUSE)
        late = drifts.passed(PAUSE) & now.judged & (rest >= SMALL_PAUSE) & (-drifts.last[PAUSE] >= SMALL_PAUSE)
        slower = drifts.fell >= np.maximum(SLOWER, PAUSE_SHARE * rest)
        less = of_node(now, drifts.less_work(PAUSE))  # of SM and tensor activity the mean: half of what the SMs rest
        late &= now.has_duty & (less >= SAME_WORK[0] * rest) & (less <= SAME_WORK[1] * rest)
        self.host = _kept(self.host, late, slower, drifts.score[PAUSE] > 0)
        late &= self.host
        return now.where(late, lambda gpus: _one_node(now, drifts, gpus)) if late.any() else late

    def slow_nvlinks(self, now: Observation, drifts: Drifts) -> Bools:
        """Return the GPUs whose NVLinks carry less than before, against their peers, bool [G]."""
        less = -drifts.last[NVLINK]
        slow = drifts.passed(NVLINK) & now.judged & (less >= LESS_NVLINK) & now.has_duty
        slow &= drifts.less_work(NVLINK) <= LIGHTER * less
        slow &= drifts.less_work(NVLINK, newest=True) <= LIGHTER * less
        self.nvlink = _kept(self.nvlink, slow, drifts.fell >= SLOWER, drifts.score[NVLINK] > 0)
        return now.lone(slow & self.nvlink)


def _kept(before: Bools, flags: Bools, slower: Bools, lasts: Bools) -> Bools:
    if len(before) != len(flags):
        before = np.zeros(len(flags), bool)
    return np.asarray((before & lasts) | (flags & slower))


def _one_node(now: Observation, drifts: Drifts, gpus: Ints) -> Bools:
    """Return which of these GPUs are the only changed node of a job on three nodes or more."""
    nodes, result = now.window.index.gpu_node, np.zeros(len(gpus), bool)
    for group in np.unique(now.groups[gpus]).tolist():
        inside = now.grouping.of(group)
        inside = inside[now.judged[inside]]
        mine = gpus[now.groups[gpus] == group]
        node = nodes[mine[0]]
        others = inside[nodes[inside] != node]
        if (nodes[mine] != node).any() or len(np.unique(nodes[others])) < 2:
            continue
        moved = drifts.moved(PAUSE)
        usual = float(np.median(moved[others]))  # in a job of few nodes the median of all lies between them
        rest = usual - float(moved[mine].mean())
        rests = np.count_nonzero(-drifts.moved(BUSY_TIME)[mine] >= EACH * rest)
        whole = rests >= NODE_SHARE * np.count_nonzero(nodes[inside] == node)
        if whole and rest >= OTHERS * float(np.abs(moved[others] - usual).max()):
            result |= now.groups[gpus] == group
    return result

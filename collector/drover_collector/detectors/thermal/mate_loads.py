"""Say how unusual the loads of a GPU's neighbours are, as their heat is not its own.

A board stands in the air of the one in front of it: 700 W in a channel of 70 W/K are 10 degC. And all boards share
fans that follow the hottest of them: when that rests, the others get warmer. So when single GPUs of a node begin or end
jobs of their own, their neighbours change by some degrees, each by another amount. Which GPU stands in whose air is not
known. So what it may be is a doubt, in degC, until it is learnt at such loads.

What a node's GPUs do alike, as in a synchronous job, is no such change: the model follows the node's mean load. Nor is
a GPU's own change: the model knows each GPU by its own load.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import group_medians
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

# Of the power limit: replicas wander by less than the first against each other; more than the second counts fully.
USUAL, UNUSUAL = 0.1, 0.2
DOUBT_C = 12.0  # for a neighbour whose load changed by one power limit: our own limit, of the two reasons above
SLOWEST = 96  # blocks over which usual loads are forgotten, as the offsets of heat_model.py are


class MateLoads:
    """Usual load of each GPU, as a share of its power limit, learnt a block at a time.

    Attributes:
        doubt_c: by how much neighbours may have changed each GPU's heat in the newest block, degC [G]; 0 where nothing
            is known.
    """

    def __init__(self, node: Ints, nodes: int) -> None:
        self._node, self._nodes = node, nodes
        self.doubt_c = np.zeros(len(node))
        self._usual, self._count = np.full(len(node), np.nan), np.zeros(len(node))

    def add_block(self, load: Floats) -> None:
        """Judge a block against those before it, then learn from it. `load`: NaN where unknown."""
        more = load - self._usual
        alike, _ = group_medians(more, self._node, self._nodes)
        change = np.nan_to_num(np.abs(more - alike[self._node]))
        highest = np.zeros((2, self._nodes))  # of each node, and of its others
        np.maximum.at(highest[0], self._node, change)
        first = change == highest[0][self._node]
        np.maximum.at(highest[1], self._node[~first], change[~first])
        only = first & (np.bincount(self._node[first], minlength=self._nodes) == 1)[self._node]
        of_mates = np.where(only, highest[1][self._node], highest[0][self._node])
        self.doubt_c = DOUBT_C * of_mates * np.clip((of_mates - USUAL) / (UNUSUAL - USUAL), 0.0, 1.0)
        known = ~np.isnan(load)
        usual = np.where(np.isnan(self._usual), load, self._usual)
        share = np.maximum(1 / (self._count + 1), 1 / SLOWEST)
        self._usual = np.where(known, usual + share * (load - usual), self._usual)
        self._count += known

    def rescale(self, gpus: Ints, ratio: Floats) -> None:
        """Take over that loads of some GPUs are shares of another power now. `ratio`: the old one over the new."""
        self._usual[gpus] *= ratio

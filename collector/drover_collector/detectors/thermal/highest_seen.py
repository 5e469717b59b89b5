"""Remember how warm each node and each GPU has been at each load, so that what comes back is not called new.

Fans that a board sets to full for an hour cool a node by 15 degC; a room cools at night. When that ends, the node is
warmer than just before, and no warmer than it was. So a node is badly cooled only if it is also warmer than the
highest that it kept at such a load while nothing was wrong with it. That is known WAIT blocks later, when a fault that
began then would have been suspected.

The same holds of a GPU with another load than its node's others: a fan changes what a watt heats, so it changes the
busiest GPU by more degrees than the median one, and that is not taken away with the node's air.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.robust import Bools
from drover_collector.fleet.buckets import Floats

Ints = npt.NDArray[np.int64]

LOADS, WIDTH = 15, 0.1  # steps of load, and a step, as a share of the power limit
RISE_C = 40.0  # at the power limit, as boards have (H100: 0.060 degC/W x 700 W): from a load to the next step
WAIT = 4  # blocks until a block is learnt
UP, DOWN = 0.4, 1 / 96  # share of the way to a block's rise: three blocks keep most of it, eight hours forget it


class HighestSeen:
    """The highest rise, degC over the inlet, that each of some things kept at each step of load; NaN: none was seen."""

    def __init__(self, count: int) -> None:
        self._highest_c = np.full((count, LOADS), np.nan, np.float32)
        self._waiting = np.full((WAIT, 2, count), np.nan, np.float32)  # load and rise, the newest last

    def forget(self, which: Ints) -> None:
        """Forget what was seen of some, whose loads are shares of another power now."""
        self._highest_c[which] = self._waiting[:, :, which] = np.nan

    def over_c(self, load: Floats, rise_c: Floats, slope_c: Floats | float = RISE_C) -> Floats:
        """Return degC above the highest at such a load, [count]; NaN where none near it was seen.

        Args:
            slope_c: degC from no load to the power limit.
        """
        step, at_step_c = _at_step(load, rise_c, slope_c)
        row, over_c = np.arange(len(load)), np.full(len(load), np.nan)
        for near in (-1, 0, 1):
            of_near = at_step_c + near * slope_c * WIDTH - self._highest_c[row, np.clip(step + near, 0, LOADS - 1)]
            over_c = np.fmin(over_c, of_near)
        return over_c

    def learn(
        self,
        load: Floats,
        rise_c: Floats,
        healthy: Bools,
        steady: Bools | bool = True,
        slope_c: Floats | float = RISE_C,
    ) -> None:
        """Add a block; what waits of a thing that may not be healthy is forgotten.

        Args:
            load: share of the power limit. rise_c: degC over the inlet. healthy: seems to be. [count] each.
            steady: only then it is known what the load was that made this rise.
            slope_c: as in `over_c`.
        """
        self._waiting[:, :, ~healthy] = np.nan
        load_then, rise_then_c = self._waiting[0]
        step, at_step_c = _at_step(load_then, rise_then_c, slope_c)
        which = np.flatnonzero(~np.isnan(at_step_c))
        at = which, step[which]
        before, now = self._highest_c[at], at_step_c[which]
        share = np.where(now > before, UP, DOWN)
        self._highest_c[at] = np.where(np.isnan(before), now, before + share * (now - before))
        newest = np.array([[np.where(healthy & steady, load, np.nan), rise_c]], np.float32)
        self._waiting = np.concatenate([self._waiting[1:], newest])


def _at_step(load: Floats, rise_c: Floats, slope_c: Floats | float) -> tuple[Ints, Floats]:
    """Return the nearest step of load, and the rise that is to be expected there."""
    step = np.clip(np.round(np.nan_to_num(load) / WIDTH), 0, LOADS - 1).astype(np.int64)
    return step, np.asarray(rise_c + slope_c * (step * WIDTH - load))

"""Measure how well each GPU is cooled: its thermal resistance at steady load, and that of GPUs in the same place."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, boards, column, counter_share, margin_c
from drover_collector.detectors._lib.robust import Bools, Grouping, group_medians
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats

# Slots of a chassis differ by +-11 % (Theta), units by a few percent more, and racks by the air that they get: a board
# of 36 W seems 20 % worse by 5 degC of warmer air. So peers prove a gross fault only, such as a heat sink that lost
# contact. What is less is found against the GPU's own past.
RESISTANCE_RATIO, OVER_C = 1.5, 10.0
UNREAD_RATIO, UNREAD_OVER_C = 1.6, 15.0  # where no inlet is read
BUSY_RATIO = 0.5  # of the power limit; below it the resistance is mostly noise of the sensors
BUSY_POWER_W = 250.0  # where no limit is read
# At a lighter load, as in inference, much of it is the sensors' resolution: whole degrees at the core, one or two at
# the inlet, which all GPUs of a node share. So the GPU is compared with its node's others too.
LIGHT_RATIO = 0.25  # of the power limit
# Fans follow the load, so the resistance of a GPU at half of its load, or among GPUs that rest, may be 70 % higher than
# at full load. Peers are GPUs whose power and whose node's power are in the same step; a step is so much (natural log).
LOAD_STEP = 0.3
HELD_BY_HEAT = ("throttle_thermal_sw_us", "throttle_thermal_hw_us")
SLOWED_SHARE = 0.05  # of a bucket's time held down by heat
HELD_MARGIN_C = 2.0  # to slowdown, for boards without these counters
LEAST_ALIKE = 4  # GPUs in the same slots elsewhere; with fewer, all GPUs in the same place are compared
LIGHT_GPUS = 4  # of the node, including the GPU itself
# Power may vary by this share, as the core follows it with a time constant of 15 to 60 s, and may be lower than the
# window's highest by it: a core keeps the heat of a former load for a minute, and some boards sample power for 25 of
# 100 ms only (Yang et al. 2023, arXiv 2312.02741), so that a few low values in a row are not a lower load.
POWER_STEADY = 0.10
STEADY_BUCKETS = 3  # to compare with peers, which had the same load
SETTLED_BUCKETS = 6  # to compare with its own past, which had another load
DEFAULT_INLET_C = 25.0  # where no inlet sensor is read: the peers are then the rack's, which share the error


def _places(window: Window, inlets: Floats) -> tuple[Ints, Ints]:
    """Return board and place of each GPU, int64 [G]: only GPUs of the same board and place are compared.

    All nodes of a pool with a known inlet and board are one place, as one board may be cooled by air in one pool and by
    liquid in the other. The others are placed by rack; without a rack by node.
    """
    index, board = window.index, boards(window)
    racked = np.array([bool(name) for name in index.racks], bool)[index.rack]
    pools = len(index.pools)
    apart = pools + np.where(racked, index.rack, len(index.racks) + np.arange(index.node_count))
    place = np.where(~np.isnan(inlets) & (board >= 0), index.pool, apart).astype(np.int64)
    return (board + 1)[index.gpu_node], place[index.gpu_node]


def _resistance(window: Window, inlets: Floats) -> tuple[Floats, Bools, Bools, Bools]:
    """Return each GPU's resistance now, degC/W, and three flags for its load, each [G].

    The flags: busy and steady for STEADY_BUCKETS; busy and steady for SETTLED_BUCKETS; light and steady for
    STEADY_BUCKETS.
    """
    power, temp = window.gpu("power_w"), column(window, "gpu_temp_c")
    inlet = np.where(np.isnan(inlets), DEFAULT_INLET_C, inlets)
    limit = column(window, "power_limit_w")
    with np.errstate(invalid="ignore", divide="ignore"):
        warmer_by = temp - inlet[window.index.gpu_node]
        # 0 W is not a measurement (if the limit is 0 too, it would count as busy), nor is a core below its inlet.
        resistance = np.where((power[-1] > 0) & (warmer_by > 0), warmer_by / power[-1], np.nan)
        busy = power[-1] >= np.where(np.isnan(limit), BUSY_POWER_W, BUSY_RATIO * limit)
        usable = (np.fmax.reduce(power) - power[-1] <= POWER_STEADY * power[-1]) & ~np.isnan(resistance)
        steady, settled = (
            usable & (len(power) >= count) & (np.ptp(power[-count:], axis=0) <= POWER_STEADY * power[-1])
            for count in (STEADY_BUCKETS, SETTLED_BUCKETS)
        )
        light = steady & ~busy & (power[-1] >= LIGHT_RATIO * limit)
    return resistance, steady & busy, settled & busy, light


def _load_steps(window: Window) -> Ints:
    """Return a number for each GPU's load and its node's, int64 [G]: equal where both are alike.

    A GPU that heat holds down counts at its node's load: so its peers are those that do the same work.
    """
    index, power = window.index, column(window, "power_w")
    known = power > 0
    node = index.gpu_node
    total = np.bincount(node[known], power[known], index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / np.bincount(node[known], minlength=index.node_count)
        mean = mean[node]
        held = np.fmax(*(counter_share(window, name) for name in HELD_BY_HEAT)) >= SLOWED_SHARE
        held |= margin_c(window) <= HELD_MARGIN_C
        power = np.where(held, np.fmax(power, mean), power)
        own, around = (np.nan_to_num(np.log(of) / LOAD_STEP, posinf=0.0, neginf=0.0) for of in (power, mean))
    return np.asarray(own.astype(np.int64).clip(0, 63) * 64 + around.astype(np.int64).clip(0, 63))


def resistances(window: Window, inlets: Floats) -> Floats:
    """Return the resistance of each GPU in each bucket, degC/W, float64 [T, G], also at unsteady load."""
    power, temp = window.gpu("power_w"), window.gpu("gpu_temp_c")
    warmer_by = temp - np.where(np.isnan(inlets), DEFAULT_INLET_C, inlets)[window.index.gpu_node]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((power > 0) & (warmer_by > 0), warmer_by / power, np.nan)


@dataclass(frozen=True, slots=True)
class Cooling:
    """Cooling of each GPU in the newest bucket, arrays [G].

    Attributes:
        resistance: degC/W. expected: that of GPUs in the same place, NaN where unknown.
        count: number of these GPUs, including the GPU itself.
        steady, settled: busy and steady for STEADY_BUCKETS, for SETTLED_BUCKETS.
        light: steady at a light load, where much of the resistance is noise of the sensors.
    """

    resistance: Floats
    expected: Floats
    count: Floats
    steady: Bools
    settled: Bools
    light: Bools


@dataclass(slots=True)
class Places:
    """Groups of comparable GPUs, by slot and as a whole, kept from bucket to bucket."""

    keys: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    slots: Grouping = field(default_factory=lambda: Grouping(np.zeros(0, np.int64)))
    whole: Grouping = field(default_factory=lambda: Grouping(np.zeros(0, np.int64)))

    def usual(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the median and the number of known values in the same place: float64 [M, G] -> [M, G] twice."""
        median, count = (self.slots.spread(of) for of in self.slots.medians(values))
        few = (count < LEAST_ALIKE) & ~np.isnan(values)
        if few.any():
            median_of_all, count_of_all = (self.whole.spread(of) for of in self.whole.medians(values))
            median, count = np.where(few, median_of_all, median), np.where(few, count_of_all, count)
        return median, count


def cooling(window: Window, inlets: Floats, places: Places | None = None) -> Cooling:
    """Return the cooling of all GPUs.

    Args:
        inlets: degC of each node, float64 [N], NaN where unknown.
        places: of the last bucket; updated in place.
    """
    places = places or Places()
    resistance, steady, settled, light = _resistance(window, inlets)
    board, place_of = _places(window, inlets)
    keys = (board * (int(place_of.max(initial=0)) + 1) + place_of) * 64 * 64 + _load_steps(window)
    if not np.array_equal(keys, places.keys):
        places.keys = keys
        alike = np.unique(keys, return_inverse=True)[1].astype(np.int64)
        # Peers sit in the same slot: boards behind others get warmer air by design.
        places.slots, places.whole = Grouping(alike * 256 + window.index.gpu_slot), Grouping(alike)
    judged = [steady, light | steady] if light.any() else [steady]
    median, number = places.usual(np.where(np.array(judged), resistance, np.nan))
    expected, count = np.where(steady, median[0], np.nan), np.where(steady, number[0], 0.0)
    if light.any():
        expected, count = np.where(light, median[1], expected), np.where(light, number[1], count)
    return Cooling(resistance, expected, count, steady, settled, light)


def gross(window: Window, now: Cooling, over: Floats, read: Bools) -> Bools:
    """Return GPUs that are far warmer than the same slots elsewhere, bool [G].

    At a light load they must be as much warmer than their node's others, too.

    Args:
        over: resistance over the expected one, float64 [G]. read: the GPU's inlet is read, bool [G].
    """
    index = window.index
    far = (now.steady | now.light) & (over >= np.where(read, RESISTANCE_RATIO, UNREAD_RATIO))
    if not far.any():
        return np.asarray(far)
    least_c = np.where(read, OVER_C, UNREAD_OVER_C)
    too_warm = (now.resistance - now.expected) * column(window, "power_w")
    far &= too_warm >= least_c
    if not (far & now.light).any():
        return np.asarray(far)
    too_warm = np.where(now.light, too_warm, np.nan)
    of_node, count = group_medians(too_warm, index.gpu_node.astype(np.int64), index.node_count)
    alone = (too_warm - of_node[index.gpu_node] >= least_c) & (count >= LIGHT_GPUS)[index.gpu_node]
    return np.asarray(far & (now.steady | alone))

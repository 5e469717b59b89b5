"""Which GPUs of a job are slow, and by what: large effects in the newest bucket, small ones by the sequential test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.steady import Ints, column
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.straggler.cusum import (
    CLOCK,
    DRAM,
    DUTY,
    LATE,
    Drifts,
    of_node,
)
from drover_collector.detectors.straggler.observation import LIMIT_RATIO, Observation, UsualLimit
from drover_collector.fleet.buckets import Floats

MIN_PEERS = 4  # judged GPUs in a group: with fewer no outlier can be told
PERSIST_UNEXPLAINED = 3  # buckets with a cause that the GPU does not report itself

# Large effects are judged against the peers alone, within two or three buckets. Healthy GPUs of one SKU spread by 8 %
# in clocks, 22 % at most (SC'22). What a GPU reports of itself (a lower power limit, heat, fewer lanes) is no natural
# spread, and needs only a clear effect; what it does not, must be far outside. Small ones: see straggler_cusum.
CLOCK_EXPLAINED = 0.96  # of the peers' median
CLOCK_UNEXPLAINED = 0.92
CLOCK_AT_FULL_POWER = 0.78  # where it draws all the power it may, like any chip with more leakage: beyond the 22 %
SIGMAS = 5.0  # and this many robust deviations from the peers
SIGMA_FLOOR = 0.006  # of the median: the clocks' own resolution is 15 MHz
DUTY_SHARE = 0.3  # of the duty that the lower clock must have brought: 1 / ratio - 1, less what is no compute
NODE_GPUS = 3  # judged there: with fewer, what is the node's cannot be told from what is a GPU's
AT_LIMIT = 0.95  # of its power limit: full power, where neither reasons nor throttle times are read
PRESSED_SHARE = 0.05  # of a bucket's time at the power limit: with a clock up to 22 % lower in it, 1 % in the mean
NEAR_LIMIT = 0.90  # likewise: the limit may hold it now and then
SAME_WORK = 0.9  # of the peers' duty: a host that is late does not make the work less
MORE_WORK = (
    2.0  # of the peers' duty, a node's mean: these do not wait for it, they do nothing (a hung collective spins)
)
THROTTLED_SHARE = 0.2  # of a bucket's time, and as much more than the peers
BANDWIDTH_RATIO = 0.90  # traffic against the peers' where the path is known to be slower
MEMORY_CLOCK_RATIO = 0.99  # a constant of the board
UTIL_GAP = 0.03  # time without a kernel beyond the peers', which spin at full utilisation
NODE_SHARE = 0.5  # of a node's GPUs slow by one cause: told once, of the node
HOST_NODE_SHARE = 0.75  # of a node's GPUs with such gaps: its host is late, not a GPU
HOST_CPU_RATIO = 1.5  # CPU of that node against the job's others
HOST_CPU_HALF = 1.2  # in a job of two nodes, where the median lies in the middle between them
WAITED_RATIO = 1.02  # SM duty over the peers'
# Small effects, where the sequential test speaks or the GPU reports a limit since before the job began.
DUTY_TOLD = 0.5  # of the test's threshold: the second sign
REPORTED_CLOCK = -0.015  # log ratio to the peers, smoothed, with a limit that the GPU reports
REPORTED_DUTY = 0.005
LIGHTER = 0.25  # of what HBM traffic fell by: with as much less duty the work became less, not the HBM slower
SMALL_CLOCK = -0.015  # log ratio to its own offset: less is not told of a clock that nothing explains
SLOWER = -0.006  # log ratio to its peers, smoothed: what only lost its lead over them holds nobody up
FREE_BUCKETS = 3  # since its power limit last held it: from then on its clock does not follow its work
BUSY = 0.9  # of time with a kernel
SMALL_GAP = 0.012  # of time, a node's mean
RESTED = 0.5  # of that time: with as much less duty it has less to do, as a replica of a service has now and then
CLEAR_GAP = 0.03  # likewise, where the CPUs show nothing
CLEAR_BUCKETS = 6  # in a row with the test's threshold passed

THERMAL_BITS = 0x20 | 0x40
SETTING_BITS = 0x02
POWER_CAP_BITS = 0x04
BRAKE_BITS = 0x80


@dataclass(frozen=True, slots=True)
class Limits:
    """What a GPU reports that its group does not: bool [G]."""

    heat: Bools
    capped: Bools
    setting: Bools
    full_power: Bools  # draws all that it may: a chip that leaks more, or has more work, is slower by nature
    pressed: Bools  # its power limit holds it now and then


def limits_of(look: Observation, usual: UsualLimit) -> Limits:
    window = look.window
    held = look.values["throttle_power_us"]
    with np.errstate(invalid="ignore", divide="ignore"):
        of_limit = column(window, "power_w") / look.values["power_limit_w"]
    bits, unread = look.reports(POWER_CAP_BITS), _unknown(column(window, "clock_event_reasons"), held)
    full_power = bits | (held >= THROTTLED_SHARE) | (unread & ~(of_limit < AT_LIMIT))
    pressed = full_power | (held >= PRESSED_SHARE) | (unread & ~(of_limit < NEAR_LIMIT))
    heat = look.over("throttle_thermal_sw_us") + look.over("throttle_thermal_hw_us") >= THROTTLED_SHARE
    low = look.ratio("power_limit_w") <= LIMIT_RATIO
    if low.any():
        low &= ~look.planned_limit(usual)
    brake = look.over("throttle_brake_us") >= THROTTLED_SHARE
    return Limits(
        heat | look.own(THERMAL_BITS), low | brake | look.own(BRAKE_BITS), look.own(SETTING_BITS), full_power, pressed
    )


def _by_clock(look: Observation, limits: Limits, explained: Bools, unexplained: Bools) -> dict[str, Bools]:
    """Slow clocks by what holds them down."""
    heat, capped = limits.heat, limits.capped
    clock = (explained & limits.setting) | unexplained
    return {
        "thermal": look.lone(explained & heat, of_node=True),
        "power_cap": look.lone(explained & capped & ~heat, of_node=True),
        "clock": look.lone(clock & ~heat & ~capped)
        | look.lone(explained & limits.setting & ~heat & ~capped, of_node=True),
    }


def _with_its_node(look: Observation, moved: Floats) -> Bools:
    """GPUs that moved as their node did, as a stage of a pipeline does when steps get longer; of nodes with others."""
    known = np.where(look.judged, moved, np.nan)
    others = np.bincount(look.window.index.gpu_node[look.judged], minlength=look.window.index.node_count) >= NODE_GPUS
    return np.asarray(others[look.window.index.gpu_node] & (of_node(look, known) < NODE_SHARE * moved))


def _unbound(look: Observation, free: Ints) -> Bools:
    """GPUs of which no duty is read, that compute all the time, and that neither heat nor their power limit has held
    lately: chips differ by nature only where one of these governs them, and all others run at the clock of their kind.
    So a lower one needs no second sign."""
    return np.asarray(~look.has_duty & (free >= FREE_BUCKETS) & (look.values["gpu_util_ratio"] >= BUSY))


def large_effects(look: Observation, limits: Limits, drifts: Drifts, free: Ints) -> dict[str, Bools]:
    """Cause -> GPUs that show it in this bucket, against their peers alone.

    A limit that the GPU reports may be older than the job: then a small effect will do, if it lasts.
    """
    window, ratio = look.window, look.ratio("sm_clock_mhz")
    median = look.medians["sm_clock_mhz"]
    sigma = np.fmax(look.clock_sigma, SIGMA_FLOOR * median)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = (median - look.values["sm_clock_mhz"]) / sigma >= SIGMAS
        gain = DUTY_SHARE * (1 / ratio - 1)
    far &= look.clock_count >= MIN_PEERS
    duty = np.fmax(look.tensor, look.sm)
    waited = duty >= 1 + gain
    explained = far & (ratio <= CLOCK_EXPLAINED) & (waited | ~look.has_duty)
    reported = (drifts.count[CLOCK] >= PERSIST_UNEXPLAINED) & (look.clock_count >= MIN_PEERS) & (duty > 1)
    reported &= (drifts.recent[CLOCK] <= REPORTED_CLOCK) & (drifts.recent[DUTY] >= REPORTED_DUTY)
    explained |= reported & (limits.capped | limits.setting)
    unexplained = (
        far
        & (waited | _unbound(look, free) | (~look.has_duty & (ratio <= CLOCK_AT_FULL_POWER)))
        & (ratio <= np.where(limits.full_power, CLOCK_AT_FULL_POWER, CLOCK_UNEXPLAINED))
    )
    result = _by_clock(look, limits, explained, unexplained)
    slow_clock = result["thermal"] | result["power_cap"] | result["clock"]

    sm_waited = look.sm >= WAITED_RATIO
    dram = look.ratio("dram_active_ratio")
    slow_memory = look.ratio("memory_clock_mhz") <= MEMORY_CLOCK_RATIO
    hbm = look.lone(slow_memory & ((dram <= BANDWIDTH_RATIO) | sm_waited | _unknown(dram, look.sm)), of_node=True)
    gap = look.medians["gpu_util_ratio"] - look.values["gpu_util_ratio"]
    gaps = (gap >= UTIL_GAP) & ~slow_clock
    pcie_less = np.fmin(look.ratio("pcie_rx_bytes_per_s"), look.ratio("pcie_tx_bytes_per_s"))
    narrow = (look.ratio("pcie_width") < 1) | (look.ratio("pcie_generation") < 1)
    pcie = look.lone(narrow & ((gap >= UTIL_GAP) | (pcie_less <= BANDWIDTH_RATIO)), of_node=True)
    nvlink_less = np.fmin(look.ratio("nvlink_rx_bytes_per_s"), look.ratio("nvlink_tx_bytes_per_s"))
    slower = (nvlink_less <= BANDWIDTH_RATIO) | sm_waited | _unknown(nvlink_less, look.sm)
    nvlink = look.lone((look.ratio("nvlink_active_links") < 1) & slower, of_node=True)
    host = _hosts(window, look, gaps & ~pcie & ~(duty < SAME_WORK))
    return result | {"hbm": hbm & ~slow_clock, "pcie": pcie, "nvlink": nvlink, "host": host}


def small_effects(look: Observation, limits: Limits, drifts: Drifts, free: Ints) -> dict[str, Bools]:
    """Cause -> GPUs of which the sequential tests say so."""
    nothing = np.zeros(len(look.groups), bool)
    steady = drifts.told(CLOCK)
    with np.errstate(invalid="ignore"):
        waited = drifts.told(DUTY, DUTY_TOLD) | (drifts.moved(DUTY) >= -DUTY_SHARE * drifts.moved(CLOCK))
    result = dict.fromkeys(("thermal", "power_cap", "clock"), nothing)
    if steady.any():
        clear = (drifts.moved(CLOCK) <= SMALL_CLOCK) & (drifts.last[CLOCK] <= SMALL_CLOCK) & (free >= FREE_BUCKETS)
        # Where another one slows the job the power limit lets go of all, and those that were faster are no more.
        clear &= drifts.recent[CLOCK] <= SLOWER
        unbound = _unbound(look, free) & (drifts.recent[CLOCK] <= SMALL_CLOCK)
        result = _by_clock(look, limits, steady & (waited | ~look.has_duty), steady & (waited | unbound) & clear)
    slow_clock = result["thermal"] | result["power_cap"] | result["clock"]
    less = drifts.told(DRAM) & (np.maximum(drifts.recent[DRAM], drifts.moved(DRAM)) <= SLOWER) & ~slow_clock & ~steady
    less &= look.has_duty
    if less.any():  # less traffic and no less work, lately and in this bucket: the HBM gives less
        less &= ~_with_its_node(look, drifts.moved(DRAM))
        less &= drifts.less_work(DRAM) <= -LIGHTER * drifts.moved(DRAM)
        less &= drifts.less_work(DRAM, newest=True) <= -LIGHTER * drifts.last[DRAM]
        less = look.lone(less)
    late = drifts.told(LATE) & (drifts.moved(LATE) >= SMALL_GAP)
    if late.any():  # a host that is late does not make the work less; who has less to do rests as well
        late &= ~(of_node(look, drifts.less_work(LATE)) > RESTED * drifts.moved(LATE))
    host = _hosts(look.window, look, late, of_cpu=True) if late.any() else nothing
    # A host may be late with its CPUs at rest: it waits itself. Then more must be missing, for longer.
    waits = late & (drifts.moved(LATE) >= CLEAR_GAP) & (drifts.last[LATE] >= CLEAR_GAP)
    waits &= (drifts.late >= CLEAR_BUCKETS) & (look.has_duty | ~np.isnan(look.traffic))
    if waits.any():
        host = host | _hosts(look.window, look, waits, busy=False)
    return result | {"hbm": less, "host": host}


def _works_alone(look: Observation) -> Bools:
    """GPUs of nodes that do much more than their peers, which therefore do not wait for them in each step."""
    work = np.where(look.has_duty, np.fmax(look.tensor, look.sm), look.traffic)
    return np.asarray(of_node(look, np.minimum(work, 10 * MORE_WORK)) > MORE_WORK)


def _unknown(*metrics: Floats) -> Bools:
    """Where none of these is known, as on boards before Hopper without DCGM: what the GPU reports must do alone."""
    return np.asarray(np.isnan(np.array(metrics)).all(axis=0))


def _hosts(window: Window, look: Observation, gaps: Bools, of_cpu: bool = False, busy: bool = True) -> Bools:
    """GPUs of nodes most of whose GPUs have gaps while the job's other nodes have none, and whose CPU is busy.

    Args:
        of_cpu: only where the CPU is known. busy: only where it is half again as busy as the others'.
    """
    index = window.index
    if not (gaps & look.judged).any():
        return np.zeros(len(gaps), bool)
    judged = np.bincount(index.gpu_node[look.judged], minlength=index.node_count)
    late = np.bincount(index.gpu_node[look.judged & gaps], minlength=index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        nodes = (judged >= 1) & (late / judged >= HOST_NODE_SHARE)
    flags = nodes[index.gpu_node] & look.judged
    if flags.any():  # who waits in a collective spins at full utilisation: replicas of a service wait for nobody
        flags &= ~(look.medians["gpu_util_ratio"] < BUSY) & ~_works_alone(look)
    if not flags.any():
        return flags
    if not busy:  # of two nodes one
        half = look.where(flags, lambda gpus: (look.share(gpus) <= 0.5) & look.one_node(gpus, 2))
        return half | look.where(flags, lambda gpus: look.share(gpus) < 0.5)
    cpu = window.newest.node.get("cpu_util_ratio")
    if cpu is None:
        return look.where(flags, lambda gpus: (look.share(gpus) < 0.5) & (not of_cpu))
    of_gpu = cpu[index.gpu_node]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = of_gpu / look.grouping.spread(look.grouping.medians(of_gpu[None])[0][0])

    def late_alone(gpus: Ints) -> Bools:
        share = look.share(gpus)
        works = ratio[gpus] >= np.where(share < 0.5, HOST_CPU_RATIO, HOST_CPU_HALF)
        unread = np.isnan(of_gpu[gpus]) & (share < 0.5) & (not of_cpu)
        return np.asarray((share <= 0.5) & (works | unread))

    return look.where(flags, late_alone)

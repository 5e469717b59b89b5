"""Find the slow GPUs of a job by cause: large effects in the newest bucket, small ones by the sequential test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.metrics import Ints, column
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.straggler.cusum import (
    BUSY_TIME,
    CLOCK,
    DRAM,
    DUTY,
    LATE,
    LEAST_WORK,
    Drifts,
    of_node,
)
from drover_collector.detectors.straggler.observation import LIMIT_RATIO, Observation, UsualLimit
from drover_collector.fleet.buckets import Floats

MIN_PEERS = 4  # judged GPUs in a group: with fewer an outlier cannot be recognised
PERSIST_UNEXPLAINED = 3  # buckets with a cause that the GPU does not report itself

# Large effects are judged against the peers alone, within two or three buckets. Healthy GPUs of one SKU spread by 8 %
# in clocks, 22 % at most (SC'22). A cause that the GPU reports (a lower power limit, heat, fewer lanes) needs only a
# clear effect; without one the value must be far outside this spread. Small effects: see cusum.py.
CLOCK_EXPLAINED = 0.96  # of the peers' median
CLOCK_UNEXPLAINED = 0.92
CLOCK_AT_FULL_POWER = 0.78  # if it draws its full power, as chips with more leakage do: beyond the 22 %
JUMPING = 0.25  # of a group whose clocks jump: no GPU of it stands out by one reading
SIGMAS = 5.0  # and this many robust deviations from the peers
SIGMA_FLOOR = 0.006  # of the median: the clocks' own resolution is 15 MHz
DUTY_SHARE = 0.3  # of the additional duty that the lower clock causes: 1 / ratio - 1, less other parts than compute
NODE_GPUS = 3  # judged on the node: with fewer, its faults cannot be distinguished from those of a GPU
AT_LIMIT = 0.95  # of its power limit: full power, where neither reasons nor throttle times are read
PRESSED_SHARE = 0.05  # of a bucket's time at the power limit: with a clock up to 22 % lower in it, 1 % in the mean
NEAR_LIMIT = 0.90  # of its power limit: the limit may hold it at times
SAME_WORK = 0.9  # of the peers' duty: a late host does not reduce the work
# The same where no duty is read: of the time in which the peers use their memory, which is in whole percent.
SAME_TRAFFIC = 0.67
MORE_WORK = 2.0  # of the peers' duty, as the node's mean: such peers do not wait, they do no work
THROTTLED_SHARE = 0.2  # of a bucket's time, and as much more than the peers
BANDWIDTH_RATIO = 0.90  # traffic against the peers' where the path is known to be slower
MEMORY_CLOCK_RATIO = 0.99  # a constant of the board
UTIL_GAP = 0.03  # time without a kernel beyond the peers', which spin at full utilisation
NODE_SHARE = 0.5  # of a node's GPUs slow by one cause: reported once, for the node
HOST_NODE_SHARE = 0.75  # of a node's GPUs with such gaps: its host is late, not a GPU
HOST_CPU_RATIO = 1.5  # CPU of that node against the job's others
HOST_CPU_HALF = 1.2  # in a job of two nodes, where the median is the middle between them
WAITED_RATIO = 1.02  # SM duty over the peers'
# Small effects, found by the sequential test or with a limit that the GPU has reported since before the job began.
DUTY_PASSED = 0.5  # of the test's threshold: the second sign
REPORTED_CLOCK = -0.015  # log ratio to the peers, smoothed, with a limit that the GPU reports
REPORTED_DUTY = 0.005
LIGHTER = 0.25  # of the fall in HBM traffic: if duty fell by as much, the work got less and the HBM is not slower
SMALL_CLOCK = -0.015  # log ratio to its own offset: a smaller fall of an unexplained clock is not reported
SLOWER = -0.006  # log ratio to its peers, smoothed: a GPU that was faster before delays nobody
FREE_BUCKETS = 3  # since its power limit last held it: its clock then does not follow its work
BUSY = 0.9  # of time with a kernel
SMALL_GAP = 0.012  # of time, as the node's mean
RESTED = 0.5  # of that time: if duty fell by as much, it has less to do, like a replica of a service
CLEAR_GAP = 0.03  # of time, where the CPUs show nothing
CLEAR_BUCKETS = 6  # in a row with the test's threshold passed

# A GPU that is busy for longer, with the same work, while its peers wait: shares of the rise of its busy time.
OWN_RISE = 0.25  # its duty (of SM and tensor activity the mean) rose by: it is not that its work fell
PEERS_FELL = 0.25  # its peers' SM activity fell by, against their past
SMALL_BUSY = 0.02  # log ratio to its own offset in the newest bucket: a smaller rise is not reported

SMALL_BUSY_MEMORY = 0.06  # where the time in which memory was used is all that shows it: uneven experts move it by 3 %

THERMAL_BITS = 0x20 | 0x40
SETTING_BITS = 0x02
POWER_CAP_BITS = 0x04
BRAKE_BITS = 0x80


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a GPU reports and its group does not, bool [G]."""

    heat: Bools
    capped: Bools
    setting: Bools
    full_power: Bools  # draws its full power: a chip with more leakage, or more work, is naturally slower
    pressed: Bools  # its power limit holds it at times


def limits_of(now: Observation, usual: UsualLimit) -> Limits:
    window = now.window
    held = now.values["throttle_power_us"]
    with np.errstate(invalid="ignore", divide="ignore"):
        of_limit = column(window, "power_w") / now.values["power_limit_w"]
    bits, unread = now.reports(POWER_CAP_BITS), _unknown(column(window, "clock_event_reasons"), held)
    full_power = bits | (held >= THROTTLED_SHARE) | (unread & ~(of_limit < AT_LIMIT))
    pressed = full_power | (held >= PRESSED_SHARE) | (unread & ~(of_limit < NEAR_LIMIT))
    heat = now.over("throttle_thermal_sw_us") + now.over("throttle_thermal_hw_us") >= THROTTLED_SHARE
    low = now.ratio("power_limit_w") <= LIMIT_RATIO
    if low.any():
        low &= ~now.planned_limit(usual)
    brake = now.over("throttle_brake_us") >= THROTTLED_SHARE
    return Limits(
        heat | now.own(THERMAL_BITS), low | brake | now.own(BRAKE_BITS), now.own(SETTING_BITS), full_power, pressed
    )


def _by_clock(now: Observation, limits: Limits, explained: Bools, unexplained: Bools) -> dict[str, Bools]:
    """Return slow clocks by cause."""
    heat, capped = limits.heat, limits.capped
    if unexplained.any():
        unexplained = unexplained & ~_with_jumping_peers(now, unexplained)
    clock = (explained & limits.setting) | unexplained
    return {
        "thermal": now.lone(explained & heat, of_node=True),
        "power_cap": now.lone(explained & capped & ~heat, of_node=True),
        "clock": now.lone(clock & ~heat & ~capped)
        | now.lone(explained & limits.setting & ~heat & ~capped, of_node=True),
    }


def _with_its_node(now: Observation, moved: Floats) -> Bools:
    """Return GPUs that changed with their whole node, as a pipeline stage does when steps get longer; bool [G]."""
    known = np.where(now.judged, moved, np.nan)
    others = np.bincount(now.window.index.gpu_node[now.judged], minlength=now.window.index.node_count) >= NODE_GPUS
    return np.asarray(others[now.window.index.gpu_node] & (of_node(now, known) < NODE_SHARE * moved))


def _unbound(now: Observation, free: Ints) -> Bools:
    """Return GPUs whose lower clock needs no second sign, bool [G].

    Their duty is not read, they compute all the time, and neither heat nor their power limit has held them lately. Only
    under these limits chips differ naturally; all others run at the clock of their kind.
    """
    return np.asarray(~now.has_duty & (free >= FREE_BUCKETS) & (now.values["gpu_util_ratio"] >= BUSY))


def large_effects(now: Observation, limits: Limits, drifts: Drifts, free: Ints) -> dict[str, Bools]:
    """Return cause -> GPUs that show it in this bucket, compared with their peers, bool [G].

    A limit that the GPU reports may be older than the job: then a small effect that lasts is enough.
    """
    window, ratio = now.window, now.ratio("sm_clock_mhz")
    median = now.medians["sm_clock_mhz"]
    sigma = np.fmax(now.clock_sigma, SIGMA_FLOOR * median)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = (median - now.values["sm_clock_mhz"]) / sigma >= SIGMAS
        gain = DUTY_SHARE * (1 / ratio - 1)
    far &= now.clock_count >= MIN_PEERS
    duty = np.fmax(now.tensor, now.sm)
    waited = duty >= 1 + gain
    explained = far & (ratio <= CLOCK_EXPLAINED) & (waited | ~now.has_duty)
    reported = (drifts.count[CLOCK] >= PERSIST_UNEXPLAINED) & (now.clock_count >= MIN_PEERS) & (duty > 1)
    reported &= (drifts.recent[CLOCK] <= REPORTED_CLOCK) & (drifts.recent[DUTY] >= REPORTED_DUTY)
    explained |= reported & (limits.capped | limits.setting)
    unexplained = (
        far
        & (waited | _unbound(now, free) | (~now.has_duty & (ratio <= CLOCK_AT_FULL_POWER)))
        & (ratio <= np.where(limits.full_power, CLOCK_AT_FULL_POWER, CLOCK_UNEXPLAINED))
    )
    result = _by_clock(now, limits, explained, unexplained)
    slow_clock = result["thermal"] | result["power_cap"] | result["clock"]

    sm_waited = now.sm >= WAITED_RATIO
    dram = now.ratio("dram_active_ratio")
    slow_memory = now.ratio("memory_clock_mhz") <= MEMORY_CLOCK_RATIO
    slow_memory &= ~(now.medians["dram_active_ratio"] < LEAST_WORK)
    hbm = now.lone(slow_memory & ((dram <= BANDWIDTH_RATIO) | sm_waited | _unknown(dram, now.sm)), of_node=True)
    gap = now.medians["gpu_util_ratio"] - now.values["gpu_util_ratio"]
    gaps = (gap >= UTIL_GAP) & ~slow_clock
    pcie_less = np.fmin(now.ratio("pcie_rx_bytes_per_s"), now.ratio("pcie_tx_bytes_per_s"))
    narrow = (now.ratio("pcie_width") < 1) | (now.ratio("pcie_generation") < 1)
    pcie = now.lone(narrow & ((gap >= UTIL_GAP) | (pcie_less <= BANDWIDTH_RATIO)), of_node=True)
    nvlink_less = np.fmin(now.ratio("nvlink_rx_bytes_per_s"), now.ratio("nvlink_tx_bytes_per_s"))
    slower = (nvlink_less <= BANDWIDTH_RATIO) | sm_waited | _unknown(nvlink_less, now.sm)
    nvlink = now.lone((now.ratio("nvlink_active_links") < 1) & slower, of_node=True)
    less_work = (duty < SAME_WORK) | (now.traffic < SAME_TRAFFIC)
    host = _hosts(window, now, gaps & ~pcie & ~less_work)
    result |= {"hbm": hbm & ~slow_clock, "pcie": pcie, "nvlink": nvlink, "host": host}
    return result | {"unexplained": np.zeros(len(far), bool)}


def small_effects(now: Observation, limits: Limits, drifts: Drifts, free: Ints) -> dict[str, Bools]:
    """Return cause -> GPUs that the sequential tests find, bool [G]."""
    nothing = np.zeros(len(now.groups), bool)
    steady = drifts.passed(CLOCK)
    with np.errstate(invalid="ignore"):
        waited = drifts.passed(DUTY, DUTY_PASSED) | (drifts.moved(DUTY) >= -DUTY_SHARE * drifts.moved(CLOCK))
    result = dict.fromkeys(("thermal", "power_cap", "clock"), nothing)
    if steady.any():
        clear = (drifts.moved(CLOCK) <= SMALL_CLOCK) & (drifts.last[CLOCK] <= SMALL_CLOCK) & (free >= FREE_BUCKETS)
        # If another GPU slows the job, power limits stop holding, and formerly faster GPUs lose their lead.
        clear &= drifts.recent[CLOCK] <= SLOWER
        unbound = _unbound(now, free) & (drifts.recent[CLOCK] <= SMALL_CLOCK)
        result = _by_clock(now, limits, steady & (waited | ~now.has_duty), steady & (waited | unbound) & clear)
    slow_clock = result["thermal"] | result["power_cap"] | result["clock"]
    less = drifts.passed(DRAM) & (np.maximum(drifts.recent[DRAM], drifts.moved(DRAM)) <= SLOWER) & ~slow_clock & ~steady
    less &= now.has_duty
    if less.any():  # less traffic without less work, lately and in this bucket: the HBM is slower
        less &= ~_with_its_node(now, drifts.moved(DRAM))
        less &= drifts.less_work(DRAM) <= -LIGHTER * drifts.moved(DRAM)
        less &= drifts.less_work(DRAM, newest=True) <= -LIGHTER * drifts.last[DRAM]
        less = now.lone(less)
    late = drifts.passed(LATE) & (drifts.moved(LATE) >= SMALL_GAP)
    if late.any():  # a late host does not reduce the work; a GPU with less work has gaps too
        late &= ~(of_node(now, drifts.less_work(LATE)) > RESTED * drifts.moved(LATE))
    host = _hosts(now.window, now, late, of_cpu=True) if late.any() else nothing
    # A host may be late with idle CPUs, waiting itself. Then the gap must be larger and last longer.
    waits = late & (drifts.moved(LATE) >= CLEAR_GAP) & (drifts.last[LATE] >= CLEAR_GAP)
    waits &= (drifts.late >= CLEAR_BUCKETS) & (now.has_duty | ~np.isnan(now.traffic))
    if waits.any():
        host = host | _hosts(now.window, now, waits, busy=False)
    return result | {"hbm": less, "host": host, "unexplained": _unexplained(now, drifts) & ~slow_clock & ~less & ~host}


def _unexplained(now: Observation, drifts: Drifts) -> Bools:
    """Return GPUs that are busy for longer with the same work as their peers, who wait; bool [G]."""
    rise = drifts.moved(BUSY_TIME)
    least = np.where(now.has_duty, SMALL_BUSY, SMALL_BUSY_MEMORY)
    busy = drifts.passed(BUSY_TIME) & (drifts.last[BUSY_TIME] >= least) & (rise >= least)
    if not busy.any():
        return np.asarray(busy)
    busy &= (drifts.moved(DUTY) >= OWN_RISE * rise) & (drifts.fell >= PEERS_FELL * rise)
    return now.lone(busy & ~_with_its_node(now, -rise))


def _with_jumping_peers(now: Observation, flags: Bools) -> Bools:
    """Return the flagged GPUs whose clocks jump, as those of a quarter of their group do within the window; bool [G].

    At a light load clocks jump between two steps from one reading to the next: one GPU may read the lower for minutes.
    """
    result, clocks = np.zeros(len(flags), bool), now.window.gpu("sm_clock_mhz")
    for group in set(now.groups[flags & now.judged].tolist()):
        inside = now.grouping.of(group)
        with np.errstate(invalid="ignore"):
            limit = CLOCK_UNEXPLAINED * now.medians["sm_clock_mhz"][inside]
            jumps = (clocks[:, inside] <= limit).any(axis=0) & (clocks[:, inside] > limit).any(axis=0)
        if np.count_nonzero(jumps & ~flags[inside]) >= JUMPING * np.count_nonzero(~flags[inside]):
            result[inside] = flags[inside] & jumps
    return result


def _works_alone(now: Observation) -> Bools:
    """Return GPUs of nodes with much more work than their peers, which so cannot wait for them in each step."""
    work = np.where(now.has_duty, np.fmax(now.tensor, now.sm), now.traffic)
    return np.asarray(of_node(now, np.minimum(work, 10 * MORE_WORK)) > MORE_WORK)


def _unknown(*metrics: Floats) -> Bools:
    """Return True where no metric is known, as on boards before Hopper without DCGM: the reported cause is enough."""
    return np.asarray(np.isnan(np.array(metrics)).all(axis=0))


def _hosts(window: Window, now: Observation, gaps: Bools, of_cpu: bool = False, busy: bool = True) -> Bools:
    """Return GPUs of nodes with a late host: most of the node's GPUs have gaps, those of other nodes none, bool [G].

    Args:
        of_cpu: only where the CPU is known. busy: only where the CPU is half again as busy as the others'.
    """
    index = window.index
    if not (gaps & now.judged).any():
        return np.zeros(len(gaps), bool)
    judged = np.bincount(index.gpu_node[now.judged], minlength=index.node_count)
    late = np.bincount(index.gpu_node[now.judged & gaps], minlength=index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        nodes = (judged >= 1) & (late / judged >= HOST_NODE_SHARE)
    flags = nodes[index.gpu_node] & now.judged
    if flags.any():  # GPUs that wait in a collective spin at full utilisation: replicas of a service do not wait
        flags &= ~(now.medians["gpu_util_ratio"] < BUSY) & ~_works_alone(now)
    if not flags.any():
        return flags
    if not busy:  # one of two nodes is allowed
        half = now.where(flags, lambda gpus: (now.share(gpus) <= 0.5) & now.one_node(gpus, 2))
        return half | now.where(flags, lambda gpus: now.share(gpus) < 0.5)
    cpu = window.newest.node.get("cpu_util_ratio")
    if cpu is None:
        return now.where(flags, lambda gpus: (now.share(gpus) < 0.5) & (not of_cpu))
    of_gpu = cpu[index.gpu_node]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = of_gpu / now.grouping.spread(now.grouping.medians(of_gpu[None])[0][0])

    def late_alone(gpus: Ints) -> Bools:
        share = now.share(gpus)
        works = ratio[gpus] >= np.where(share < 0.5, HOST_CPU_RATIO, HOST_CPU_HALF)
        unread = np.isnan(of_gpu[gpus]) & (share < 0.5) & (not of_cpu)
        return np.asarray((share <= 0.5) & (works | unread))

    return now.where(flags, late_alone)

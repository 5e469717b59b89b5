"""Stragglers: the GPU that a synchronous job waits for, and why it is slow.

In a synchronous job the slow GPU is the busy one: it computes while its peers wait in a collective, at full utilisation
but with less tensor work and power. So a straggler needs two signs at once, against peers of the same job and SKU in
the same bucket: something of it is slower (clock, memory, a link, its host), and the others wait for it. A heavier
share of the work shows the second sign only; natural spread of units the first one only, in small, and is learnt.

Each cause is judged by its own metrics, never by a pooled score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from drover_collector.buckets import Floats
from drover_collector.detectors.example import Example, play, small_fleet
from drover_collector.detectors.robust import Bools, Groups, peer_medians, peers, share
from drover_collector.detectors.steady import (
    Ints,
    JobAges,
    boards,
    column,
    counter_share,
    has_bits,
    job_groups,
    working,
)
from drover_collector.detectors.straggler_texts import CAUSES, Slow, finding, nic_finding, node_finding
from drover_collector.detectors.window import Window
from drover_proto.events import Finding

NAME = "straggler"
VERSION = 1
QUIET_MS = 180_000  # hysteresis: a cause that comes and goes within three minutes is one incident

MIN_PEERS = 4  # judged GPUs in a group: with fewer no outlier can be told
SETTLE_BUCKETS = 3  # after a job took a GPU: it loads its data and compiles
PERSIST = 2  # buckets with a cause that the GPU itself reports
PERSIST_UNEXPLAINED = 3  # without one
LONG_BUCKET_MS = 60_000  # a bucket longer than this is a median over long enough by itself

# Healthy GPUs of one SKU spread by 8 % in clocks, 22 % at most (SC'22). What a GPU reports of itself (a lower power
# limit, heat, fewer lanes) is no natural spread, and needs only a clear effect; what it does not, must be far outside.
CLOCK_EXPLAINED = 0.96  # of the peers' median
CLOCK_UNEXPLAINED = 0.92
CLOCK_AT_FULL_POWER = 0.78  # where it draws all the power it may, like any chip with more leakage: beyond the 22 %
CLOCK_LEARNT = 0.95  # of the peers' median over the GPU's own usual share of it
SIGMAS = 5.0  # and this many robust deviations from the peers
SIGMA_FLOOR = 0.006  # of the median: the clocks' own resolution is 15 MHz
DUTY_SHARE = 0.3  # of the duty that the lower clock must have brought: 1 / ratio - 1, less what is no compute
LONE_SHARE = 0.1  # of the group: more outliers than this are a part of the job that works otherwise, by design
LONE_OF_NODES = 4  # what a GPU reports of itself may hit all GPUs of one node: a power brake, a cap, a fan
NODE_SHARE = 0.5  # of a node's GPUs slow by one cause: told once, of the node
AT_LIMIT = 0.95  # of its power limit: full power, where neither reasons nor throttle times are read
SAME_WORK = 0.9  # of the peers' duty: a host that is late does not make the work less
LIMIT_RATIO = 0.97  # power limit against the peers'
THROTTLED_SHARE = 0.2  # of a bucket's time, and as much more than the peers
BANDWIDTH_RATIO = 0.90  # traffic against the peers' where the path is known to be slower
MEMORY_CLOCK_RATIO = 0.97
MEMORY_LEARNT_RATIO = 0.85  # HBM traffic against the peers' where the memory clock says nothing
UTIL_GAP = 0.03  # time without a kernel beyond the peers', which spin at full utilisation
HOST_NODE_SHARE = 0.75  # of a node's GPUs with such gaps: its host is late, not a GPU
HOST_CPU_RATIO = 1.5  # CPU of that node against the job's others
WAITED_RATIO = 1.02  # SM duty over the peers'
NIC_RATE_RATIO = 0.9
LEARN_RATE = 0.02  # of the GPU's usual share: about 8 min at 10 s
LEARN_BUCKETS = 30

THERMAL_BITS = 0x20 | 0x40
SETTING_BITS = 0x02
POWER_CAP_BITS = 0x04
BRAKE_BITS = 0x80


@dataclass(slots=True)
class State:
    ages: JobAges = field(default_factory=JobAges)
    usual_clock: Floats = field(default_factory=lambda: np.zeros(0))  # ratio to the peers' median, [G]
    usual_dram: Floats = field(default_factory=lambda: np.zeros(0))
    learnt: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    streaks: dict[str, Ints] = field(default_factory=dict)  # cause -> buckets in a row, [G]
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    nic_streak: dict[int, int] = field(default_factory=dict)  # link -> buckets in a row
    nic_since_ms: dict[int, int] = field(default_factory=dict)


def detect(window: Window, state: State | None, now_ms: int) -> tuple[list[Finding], State]:
    s = state if state is not None else State()
    count = window.index.gpu_count
    if len(s.usual_clock) != count:
        s = State(usual_clock=np.ones(count), usual_dram=np.ones(count), learnt=np.zeros(count, np.int64))
        s.streaks = {cause: np.zeros(count, np.int64) for cause in CAUSES}
    if not window.fresh:
        return [], s
    s.ages.advance(window)
    for streak in s.streaks.values():
        streak[s.ages.buckets == 0] = 0  # another job: what was seen in the last one is no beginning
    groups = job_groups(window)
    settle = SETTLE_BUCKETS if window.newest.length_ms <= LONG_BUCKET_MS else 1
    judged = working(window, groups) & (s.ages.buckets >= settle)
    groups = np.where(judged, groups, -1)
    found = list(_nics(window, s, now_ms))
    if not judged.any():
        return found, s
    look = _Look(window, groups)
    candidates = _candidates(look, s)
    _learn(look, s, candidates)
    for cause, flags in candidates.items():
        # A bucket that could not be judged neither adds to a streak nor ends it.
        s.streaks[cause] = np.where(flags, s.streaks[cause] + 1, np.where(judged, 0, s.streaks[cause]))
    found += _findings(look, s, now_ms)
    return found, s


def could_not_judge(window: Window) -> list[str]:
    have, result = window.newest.gpu, []
    if not (window.newest.jobs >= 0).any():
        return ["any straggler: it is not known which job holds which GPU"]
    if "sm_clock_mhz" not in have:
        result.append("slow clocks: needs sm_clock_mhz")
    if "sm_active_ratio" not in have and "tensor_active_ratio" not in have:
        result.append("who waits for whom: needs sm_active_ratio or tensor_active_ratio; only reported causes are told")
    if "gpu_util_ratio" not in have:
        result.append("slow hosts and PCIe: needs gpu_util_ratio")
    if "rate_gbps" not in window.newest.link:
        result.append("slow NICs: needs rate_gbps of links")
    return result


class _Look:
    """One bucket, each metric against the GPU's peers. float64 [G]; NaN where a GPU is not judged."""

    def __init__(self, window: Window, groups: Groups) -> None:
        self.window, self.groups = window, groups
        self.judged: Bools = groups >= 0
        self.size = np.bincount(groups[self.judged], minlength=int(groups.max(initial=-1)) + 1)
        self.clock = column(window, "sm_clock_mhz")
        self.clock_peers = peers(self.clock, groups)
        with np.errstate(invalid="ignore", divide="ignore"):
            self.clock_ratio = self.clock / self.clock_peers.median
        self.tensor = self.ratio("tensor_active_ratio")
        self.sm = self.ratio("sm_active_ratio")
        self.has_duty: Bools = ~np.isnan(self.tensor) | ~np.isnan(self.sm)
        self.big_enough: Bools = self.clock_peers.count >= MIN_PEERS

    def ratio(self, metric: str) -> Floats:
        values = column(self.window, metric)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(values / peer_medians(values, self.groups))

    def over(self, metric: str) -> Floats:
        """A counter's share of time beyond the peers' median."""
        values = counter_share(self.window, metric)
        return np.asarray(np.nan_to_num(values) - np.nan_to_num(peer_medians(values, self.groups)))

    def lone(self, flags: Bools, of_node: bool = False) -> Bools:
        """Those that are few enough in their group; `of_node`: or all on one node of at least LONE_OF_NODES."""
        flags = flags & self.judged
        few = np.nan_to_num(share(flags, self.judged, self.groups)) <= np.maximum(
            LONE_SHARE, 1.0 / np.maximum(self.size[self.groups], 1)
        )
        return flags & (few | self._one_node(flags)) if of_node else flags & few

    def _one_node(self, flags: Bools) -> Bools:
        """Of groups on many nodes, those whose flagged GPUs all sit on one."""
        nodes = self.window.index.gpu_node
        result = np.zeros(len(flags), bool)
        for group in np.unique(self.groups[flags]).tolist():
            inside = self.groups == group
            if len(np.unique(nodes[inside & flags])) == 1 and len(np.unique(nodes[inside])) >= LONE_OF_NODES:
                result |= inside
        return result


def _candidates(look: _Look, s: State) -> dict[str, Bools]:
    """Cause -> GPUs that show it in this bucket."""
    window, ratio = look.window, look.clock_ratio
    sigma = np.fmax(look.clock_peers.sigma, SIGMA_FLOOR * look.clock_peers.median)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = (look.clock_peers.median - look.clock) / sigma >= SIGMAS
        gain = DUTY_SHARE * (1 / ratio - 1)
    duty = np.fmax(look.tensor, look.sm)
    waited = duty >= 1 + gain
    explained_slow = look.big_enough & far & (ratio <= CLOCK_EXPLAINED) & (waited | ~look.has_duty)
    learnt = (s.learnt >= LEARN_BUCKETS) & (ratio / s.usual_clock <= CLOCK_LEARNT)
    held = counter_share(window, "throttle_power_us")
    with np.errstate(invalid="ignore", divide="ignore"):
        of_limit = column(window, "power_w") / column(window, "power_limit_w")
    full_power = has_bits(window, POWER_CAP_BITS) | (held >= THROTTLED_SHARE) | (of_limit >= AT_LIMIT)
    full_power |= _unknown(column(window, "clock_event_reasons"), held, of_limit)
    unexplained = np.where(full_power, ratio <= CLOCK_AT_FULL_POWER, (ratio <= CLOCK_UNEXPLAINED) | learnt)
    unexplained_slow = look.big_enough & far & waited & unexplained

    heat = (look.over("throttle_thermal_sw_us") + look.over("throttle_thermal_hw_us") >= THROTTLED_SHARE) | (
        has_bits(window, THERMAL_BITS) & ~_common(look, has_bits(window, THERMAL_BITS))
    )
    limit = look.ratio("power_limit_w")
    brake = look.over("throttle_brake_us") >= THROTTLED_SHARE
    capped = (
        (limit <= LIMIT_RATIO) | brake | (has_bits(window, BRAKE_BITS) & ~_common(look, has_bits(window, BRAKE_BITS)))
    )
    setting = has_bits(window, SETTING_BITS) & ~_common(look, has_bits(window, SETTING_BITS))
    thermal = look.lone(explained_slow & heat, of_node=True)
    power = look.lone(explained_slow & capped & ~heat, of_node=True)
    clock = look.lone(((explained_slow & setting) | unexplained_slow) & ~heat & ~capped)
    slow_clock = thermal | power | clock

    sm_waited = look.sm >= WAITED_RATIO
    dram = look.ratio("dram_active_ratio")
    memory_clock = look.ratio("memory_clock_mhz")
    with np.errstate(invalid="ignore", divide="ignore"):
        dram_learnt = (s.learnt >= LEARN_BUCKETS) & (dram / s.usual_dram <= MEMORY_LEARNT_RATIO)
    hbm = look.lone(
        ((memory_clock <= MEMORY_CLOCK_RATIO) & ((dram <= BANDWIDTH_RATIO) | sm_waited | _unknown(dram, look.sm)))
        | ((dram <= MEMORY_LEARNT_RATIO) & dram_learnt & sm_waited & ~slow_clock)
    )
    util = column(window, "gpu_util_ratio")
    gap = peer_medians(util, look.groups) - util
    gaps = (gap >= UTIL_GAP) & ~slow_clock
    pcie_less = np.fmin(look.ratio("pcie_rx_bytes_per_s"), look.ratio("pcie_tx_bytes_per_s"))
    narrow = (look.ratio("pcie_width") < 1) | (look.ratio("pcie_generation") < 1)
    pcie = look.lone(narrow & ((gap >= UTIL_GAP) | (pcie_less <= BANDWIDTH_RATIO)))
    nvlink_less = np.fmin(look.ratio("nvlink_rx_bytes_per_s"), look.ratio("nvlink_tx_bytes_per_s"))
    slower = (nvlink_less <= BANDWIDTH_RATIO) | sm_waited | _unknown(nvlink_less, look.sm)
    nvlink = look.lone((look.ratio("nvlink_active_links") < 1) & slower)
    host = _hosts(look, gaps & ~pcie & ~(duty < SAME_WORK))
    return {
        "thermal": thermal, "power_cap": power, "clock": clock, "hbm": hbm & ~slow_clock, "pcie": pcie,
        "nvlink": nvlink, "host": host,
    }  # fmt: skip


def _unknown(*metrics: Floats) -> Bools:
    """Where none of these is known, as on boards before Hopper without DCGM: what the GPU reports must do alone."""
    return np.asarray(np.isnan(np.array(metrics)).all(axis=0))


def _common(look: _Look, flags: Bools) -> Bools:
    """Whether half of the GPU's group carries the flag: then it tells nobody apart."""
    return np.asarray(np.nan_to_num(share(flags, look.judged, look.groups)) >= 0.5)


def _hosts(look: _Look, gaps: Bools) -> Bools:
    """GPUs of nodes most of whose GPUs have gaps while the job's other nodes have none, and whose CPU is busy."""
    index = look.window.index
    judged = np.bincount(index.gpu_node[look.judged], minlength=index.node_count)
    late = np.bincount(index.gpu_node[look.judged & gaps], minlength=index.node_count)
    with np.errstate(invalid="ignore", divide="ignore"):
        nodes = (judged >= 1) & (late / judged >= HOST_NODE_SHARE)
    flags = nodes[index.gpu_node] & look.judged
    lone = np.nan_to_num(share(flags, look.judged, look.groups)) <= 0.5 - 1e-9
    cpu = look.window.newest.node.get("cpu_util_ratio")
    if cpu is None:
        return flags & lone
    of_gpu = cpu[index.gpu_node]
    with np.errstate(invalid="ignore", divide="ignore"):
        busy = of_gpu / peer_medians(of_gpu, look.groups) >= HOST_CPU_RATIO
    return np.asarray(flags & lone & (busy | np.isnan(of_gpu)))


def _learn(look: _Look, s: State, candidates: dict[str, Bools]) -> None:
    """Usual shares of what nothing was suspected of in this bucket or the last."""
    suspect = np.any(list(candidates.values()), axis=0) | np.any([k > 0 for k in s.streaks.values()], axis=0)
    known = look.judged & look.big_enough & ~suspect & ~np.isnan(look.clock_ratio)
    rate = np.maximum(LEARN_RATE, 1.0 / (s.learnt + 1))
    s.usual_clock = np.where(known, s.usual_clock + rate * (look.clock_ratio - s.usual_clock), s.usual_clock)
    dram = look.ratio("dram_active_ratio")
    s.usual_dram = np.where(known & ~np.isnan(dram), s.usual_dram + rate * (dram - s.usual_dram), s.usual_dram)
    s.learnt = np.where(known, s.learnt + 1, s.learnt)


def _findings(look: _Look, s: State, now_ms: int) -> Iterator[Finding]:
    window = look.window
    standing: set[tuple[str, int]] = set()
    for cause in CAUSES:
        need = PERSIST_UNEXPLAINED if cause in ("clock", "host") else PERSIST
        if window.newest.length_ms > LONG_BUCKET_MS:
            need = 1
        flagged = np.flatnonzero((s.streaks[cause] >= need) & look.judged).tolist()
        for g in flagged:
            standing.add((cause, g))
            run = min(int(s.streaks[cause][g]), len(window.buckets))
            s.since_ms.setdefault((cause, g), window.buckets[-run].start_ms)
        for n in np.unique(window.index.gpu_node[flagged]).tolist() if flagged else []:
            gpus = [g for g in flagged if window.index.gpu_node[g] == n]
            if cause == "host" or len(gpus) > max(1, NODE_SHARE * window.index.nodes[n].gpus):
                yield node_finding(window, n, gpus, _slow(look, s, cause, gpus[0]), now_ms)
                continue
            for g in gpus:
                yield finding(window, g, _slow(look, s, cause, g), now_ms)
    for key in [key for key in s.since_ms if key not in standing and look.judged[key[1]]]:
        del s.since_ms[key]


def _slow(look: _Look, s: State, cause: str, g: int) -> Slow:
    duty = look.tensor[g] if not np.isnan(look.tensor[g]) else look.sm[g]
    if cause in ("hbm", "nvlink"):
        duty = look.sm[g]
    util = column(look.window, "gpu_util_ratio")
    waiting = float(peers(util, look.groups).median[g] - util[g]) if cause in ("host", "pcie") else 1 - 1 / duty
    return Slow(
        cause, s.since_ms[cause, g], look.groups, int(look.size[look.groups[g]]),
        float(np.clip(np.nan_to_num(waiting), 0.0, 1.0)),
        float(s.usual_clock[g]) if s.learnt[g] >= LEARN_BUCKETS else None,
    )  # fmt: skip


def _nics(window: Window, s: State, now_ms: int) -> Iterator[Finding]:
    """Ports that run below the rate of the same ports on nodes with the same boards."""
    rates = window.newest.link.get("rate_gbps")
    ports = [(n, link) for n, node in enumerate(window.index.nodes) for link in node.links]
    if rates is None or len(ports) != len(rates) or not len(rates):
        return
    # Ports of one name serve one purpose; a port for storage or management may be slower by design.
    names = {name: number for number, name in enumerate(dict.fromkeys(link.link for _, link in ports))}
    board = boards(window) + 1
    usual = peers(rates, np.array([board[n] * len(names) + names[link.link] for n, link in ports], np.int64))
    computing = np.array([board[n] if link.gpu is not None else -1 for n, link in ports], np.int64)
    others = peers(rates, computing)
    few = usual.count < MIN_PEERS  # a small fleet: all ports that serve a GPU
    median, count = np.where(few, others.median, usual.median), np.where(few, others.count, usual.count)
    with np.errstate(invalid="ignore"):
        slow = (rates <= NIC_RATE_RATIO * median) & (rates > 0) & (count >= MIN_PEERS)
    s.nic_streak = {k: s.nic_streak.get(k, 0) + 1 for k in np.flatnonzero(slow).tolist()}
    s.nic_since_ms = {k: s.nic_since_ms.get(k, window.newest.start_ms) for k in s.nic_streak}
    for k, streak in s.nic_streak.items():
        n, link = ports[k]
        if streak >= PERSIST:
            values = float(rates[k]), float(median[k]), int(count[k]) - 1
            yield nic_finding(window, n, link.link, values, s.nic_since_ms[k], now_ms)


def _set_cap(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number < 4:
        return
    slow = 1.25
    for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        others = np.arange(len(gpu[metric])) != 13
        gpu[metric][others] /= slow
    gpu["power_w"] *= 0.9
    gpu["sm_clock_mhz"][13] /= slow
    gpu["power_limit_w"][13] = gpu["power_w"][13] = 450
    gpu["clock_event_reasons"][13] = 0x4


def _uneven(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    """A quarter of the ranks holds a heavier pipeline stage: busier, warmer, a little slower by design."""
    if number >= 4:
        gpu["tensor_active_ratio"][:16] *= 1.3
        gpu["sm_active_ratio"][:16] *= 1.2
        gpu["sm_clock_mhz"][:16] *= 0.93


EXAMPLES = (
    Example("a job whose first pipeline stage is heavier", lambda: play(small_fleet(), 9, _uneven), frozenset()),
    Example(
        "someone left a power cap on one GPU",
        lambda: play(small_fleet(), 9, _set_cap),
        frozenset({("straggler", "power_cap", "gpu", "warning")}),
    ),
)

"""Detect faults of a GPU's own links: lost NVLinks, NVLink errors, no NVSwitch fabric, bad PCIe links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from drover_collector.detectors._lib.metrics import (
    IDLE_UTIL,
    Ints,
    boards,
    column,
)
from drover_collector.detectors._lib.robust import Bools, Grouping, grouped
from drover_collector.detectors._lib.texts import place
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_core.metrics.catalog import FABRIC_STATES
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "links"

MIN_PEERS = 4
FEW_SHARE = 0.1  # of the boards of one kind: more than these differ by design
FEW_OF_NODES = 4  # nodes with boards of one kind: errors of all GPUs of one of these nodes are a fault of the node
FEW_BOARDS = 2  # of 2 * MIN_PEERS and more: also in a fleet of one node two GPUs can be broken
PERSIST = 3  # buckets: links train again after a reset
NVLINK_RATES = {  # per second, over the window (DCGM 4.6: 100 CRC errors a second; any replays and recoveries)
    "nvlink_crc_errors": 100.0,
    "nvlink_replays": 1.0,
    "nvlink_recoveries": 2 / 60,
}
MINUTE_S = 60.0  # limits below one a second are compared with the count of a minute: one error in 10 s is no rate
NVLINK_BER = 1e-12  # effective bit error rate from which DCGM 4.6 fails the link (DcgmGPUHardwareLimits.h)
# A GPU that is not registered with the NVSwitch fabric cannot start CUDA (error 802, system not yet initialized). The
# fabric manager registers GPUs within minutes of a boot; NVSentinel issue 883 has nodes where it never does.
FABRIC_MS = 300_000
FABRIC_UNREADY = tuple(FABRIC_STATES.index(name) for name in ("not started", "in progress"))
FABRIC_COMPLETED, FABRIC_FAILED = FABRIC_STATES.index("completed"), FABRIC_STATES.index("failed")
NODE_SHARE = 0.5  # of a node's GPUs: more than these share a cause
# PCIe replays per minute and lane, by generation, from which DCGM 4.6 warns.
REPLAYS_PER_LANE = (0.15, 0.15, 0.3, 0.48, 0.96, 1.92, 3.84)


@dataclass(frozen=True, slots=True)
class Usual:
    """A metric's newest values, and the median and number of values of the boards of the same kind, float64 [G]."""

    values: Floats
    kinds: Grouping
    median: Floats
    count: Floats


@dataclass(slots=True)
class GpuState:
    streaks: dict[str, Ints] = field(default_factory=dict)  # cause -> buckets in a row, [G]
    kinds: Grouping | None = None  # GPUs by kind of board
    usual: dict[str, Usual] = field(default_factory=dict)
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    most_links: Floats = field(default_factory=lambda: np.zeros(0))  # NVLinks that were ever seen up, [G]


def gpu_links(window: Window, s: GpuState, now_ms: int) -> Iterator[Finding]:
    s.kinds = grouped((boards(window) + 1)[window.index.gpu_node], s.kinds)
    if len(s.most_links) != window.index.gpu_count:
        s.most_links = np.full(window.index.gpu_count, np.nan)
    s.most_links = np.fmax(s.most_links, column(window, "nvlink_active_links"))
    now = GpuLinks(window, s.kinds, s.usual, s.most_links)
    standing: dict[tuple[str, int], int] = {}
    for cause, found in now.flags().items():
        streak = s.streaks.get(cause)
        if streak is None or len(streak) != len(found):
            streak = np.zeros(len(found), np.int64)
        s.streaks[cause] = streak = np.where(found, streak + 1, 0)
        need = max(PERSIST, FABRIC_MS // window.newest.length_ms) if cause == "fabric" else PERSIST
        lasting = np.flatnonzero(streak >= need).tolist()
        for g in lasting:
            back = min(int(streak[g]), len(window.buckets))
            standing[cause, g] = s.since_ms.get((cause, g), window.buckets[-back].start_ms)
        for n, together in groupby(lasting, lambda g: int(window.index.gpu_node[g])):  # GPUs are in the nodes' order
            mine = list(together)
            whole = len(mine) > max(1, NODE_SHARE * window.index.nodes[n].gpus)
            for gpus in [mine] if whole else [[g] for g in mine]:
                yield _finding(now, cause, gpus, min(standing[cause, g] for g in gpus), now_ms)
    s.since_ms = standing


class GpuLinks:
    """Links of all GPUs in the newest bucket, compared with boards of the same kind.

    Attributes:
        values: metric -> float64 [G]. usual: metric -> values of the boards of the same kind.
        rates: counter -> growth per second, float64 [G].
        narrow: bool [G], the GPU has fewer lanes.
    """

    def __init__(self, window: Window, kinds: Grouping, known: dict[str, Usual], most_links: Floats) -> None:
        self.window = window
        self._kinds = kinds.groups
        self._most_links = most_links
        self.values = {metric: column(window, metric) for metric in ("nvlink_active_links", "pcie_width")}
        # Some boards lower the generation while they are idle.
        rests = ~(column(window, "gpu_util_ratio") >= IDLE_UTIL)
        self.values["pcie_generation"] = np.where(rests, np.nan, column(window, "pcie_generation"))
        for metric, values in self.values.items():  # links seldom train again
            old = known.get(metric)
            if old is None or old.kinds is not kinds or not np.array_equal(old.values, values, equal_nan=True):
                median, count = (kinds.spread(of[0]) for of in kinds.medians(values[None]))
                known[metric] = Usual(values.copy(), kinds, median, count)
        self.usual = known
        self.rates = {metric: _rate(window, metric, limit) for metric, limit in NVLINK_RATES.items()}
        self.rates["pcie_replays"] = _rate(window, "pcie_replays", 0.0)
        self.narrow = self._below("pcie_width")
        self.ber = column(window, "nvlink_effective_ber")
        self.fabric = column(window, "fabric_state")

    def flags(self) -> dict[str, Bools]:
        """Return cause -> bool [G]."""
        errors = np.zeros(len(self._kinds), bool)
        for metric, limit in NVLINK_RATES.items():
            errors |= self._few(self.rates[metric] > limit)
        return {
            "nvlink_down": self._below("nvlink_active_links") | self._lost_nvlinks(),
            "nvlink_errors": errors,
            "nvlink_ber": self._few(self.ber > NVLINK_BER),
            "fabric": self._unregistered(),
            "pcie_narrow": self.narrow | self._below("pcie_generation"),
            "pcie_replays": self._few(self._replays()),
        }

    def _lost_nvlinks(self) -> Bools:
        """Return the GPUs of a node that lost NVLinks which they had, with a switch or its tray, bool [G]."""
        return self._few(self.values["nvlink_active_links"] < self._most_links)

    def _unregistered(self) -> Bools:
        """Return the GPUs that the fabric does not know, where it knows others of their kind, bool [G].

        Where it knows none, no fabric manager is in use.
        """
        unready = np.isin(self.fabric, FABRIC_UNREADY)
        if unready.any():
            known = np.unique(self._kinds[self.fabric == FABRIC_COMPLETED])
            unready &= np.isin(self._kinds, known)
        return np.asarray(unready | (self.fabric == FABRIC_FAILED))

    def _replays(self) -> Bools:
        """Return the GPUs with more PCIe replays than the limit, bool [G]."""
        rate, result = self.rates["pcie_replays"], np.zeros(len(self._kinds), bool)
        some = np.flatnonzero(rate > 0)
        result[some] = rate[some] * 60 > self.replays_limit(some)
        return result

    def replays_limit(self, gpus: Ints) -> Floats:
        """Return the limit of these GPUs, in replays per minute and link."""
        lanes, generation = np.array(REPLAYS_PER_LANE), column(self.window, "pcie_generation")[gpus]
        known = np.nan_to_num(generation).astype(np.int64).clip(0, len(lanes) - 1)
        width = self.values["pcie_width"][gpus]
        return np.asarray(np.ceil(lanes[known] * np.where(np.isnan(width), 16, width)))

    def _below(self, metric: str) -> Bools:
        """Return the GPUs with a lower value than boards of the same kind, if enough of those are known, bool [G]."""
        usual = self.usual[metric]
        return self._few((self.values[metric] < usual.median) & (usual.count >= MIN_PEERS), errors=False)

    def _few(self, flags: Bools, errors: bool = True) -> Bools:
        """Return the flagged GPUs that are few among the boards of their kind, bool [G].

        `errors`: all flagged GPUs on one node count as few too.
        """
        if not flags.any():
            return flags
        nodes, result = self.window.index.gpu_node, np.zeros(len(flags), bool)
        for kind in np.unique(self._kinds[flags]).tolist():
            inside = self._kinds == kind
            mine, size = flags & inside, int(inside.sum())
            some = FEW_BOARDS if size >= 2 * MIN_PEERS else 1
            one_node = errors and len(np.unique(nodes[mine])) == 1 and len(np.unique(nodes[inside])) >= FEW_OF_NODES
            if one_node or mine.sum() <= max(some, FEW_SHARE * size):
                result |= mine
        return result


def _rate(window: Window, metric: str, limit: float) -> Floats:
    """Return the growth per second from the first to the last value in the window, float64 [G].

    It is NaN after a counter's reset, or with fewer than two values: some counters are read every 30 s only.
    """
    known = [(bucket.end_ms, values) for bucket in window.buckets if (values := bucket.gpu.get(metric)) is not None]
    if len(known) < 2:
        return np.full(window.index.gpu_count, np.nan)
    least_s = 0.0 if limit >= 1 else MINUTE_S
    (since_ms, before), (at_ms, now) = known[0], known[-1]
    grown = now - before
    rate = grown / max((at_ms - since_ms) / 1000, least_s)
    with np.errstate(invalid="ignore"):
        rate[grown < 0] = np.nan
    gaps = np.flatnonzero(np.isnan(grown))
    if len(gaps):  # few GPUs lack the first or last value
        rate[gaps] = _rate_between(known, gaps, least_s)
    return rate


def _rate_between(columns: Sequence[tuple[int, Floats]], gpus: Ints, least_s: float) -> Floats:
    """Return `_rate` of these GPUs, each from its first to its last known value."""
    values = np.array([some[gpus] for _, some in columns])
    known, at = ~np.isnan(values), np.arange(len(gpus))
    first, last = known.argmax(axis=0), len(columns) - 1 - known[::-1].argmax(axis=0)
    ends_ms = np.array([end_ms for end_ms, _ in columns], np.float64)
    elapsed_s, grown = (ends_ms[last] - ends_ms[first]) / 1000, values[last, at] - values[first, at]
    with np.errstate(invalid="ignore"):
        good = (grown >= 0) & (elapsed_s > 0)
        over_s = np.where(good, np.maximum(elapsed_s, least_s), np.nan)
    return np.where(good, grown / over_s, np.nan)


def _finding(now: GpuLinks, cause: str, gpus: Sequence[int], since_ms: int, now_ms: int) -> Finding:
    """Return the finding of one GPU, or of most GPUs of a node, whose first stands for all."""
    window, g = now.window, gpus[0]
    node, slot = window.index.member(g)
    text, advice, facts = _describe(now, cause, g, since_ms)
    whole = len(gpus) > 1
    if whole:
        text = f"{len(gpus)} of {window.index.nodes[int(window.index.gpu_node[g])].gpus} GPUs show it: {text}"
        advice = f"Check what they share first: its switches, its backplane, the fabric manager. {advice}"
    scope, gpu = ("node", None) if whole else ("gpu", slot)
    return Finding(
        NAME, IncidentKind.LINK, cause, scope, node, gpu, ((node, gpu),), now_ms, since_ms, Severity.WARNING, 0.8,
        RecommendedAction.ADVISE if cause == "pcie_replays" else RecommendedAction.PROBE, text, advice, tuple(facts),
        window.job_of(g),
    )  # fmt: skip


def _describe(now: GpuLinks, cause: str, g: int, since_ms: int) -> tuple[str, str, list[Evidence]]:
    """Return summary, advice and evidence for one GPU."""
    if cause in ("nvlink_ber", "fabric"):
        return _describe_state(now, cause, g, since_ms)
    facts: list[Evidence] = []
    where, end_ms = place(*now.window.index.member(g)), now.window.newest.end_ms

    def against(metric: str, unit: str) -> str:
        of, value = now.usual[metric], float(now.values[metric][g])
        usual, others = float(of.median[g]), int(of.count[g]) - 1
        text = f"{value:g} {unit}; the other {others} boards of its kind have {usual:g}"
        facts.append(Evidence(text, metric, value, usual, None, others, since_ms, end_ms))
        return text

    def growing(metric: str, limit: float, what: str) -> str:
        rate = float(now.rates[metric][g])
        text = f"{rate * 60:.0f} {what} per minute"
        facts.append(Evidence(text, metric, rate, limit, None, None, since_ms, end_ms))
        return text

    if cause == "nvlink_down":
        text = f"{where} has {against('nvlink_active_links', 'NVLinks up')}."
        advice = (
            "Test its NVLinks when its work is done, and reset it. A link that stays down is broken. Until then"
            " collectives run at this GPU's pace."
        )
    elif cause == "nvlink_errors":
        words = {"nvlink_crc_errors": "CRC errors", "nvlink_replays": "replays", "nvlink_recoveries": "recoveries"}
        over = [metric for metric, limit in NVLINK_RATES.items() if now.rates[metric][g] > limit]
        counts = " and ".join(growing(metric, NVLINK_RATES[metric], words[metric]) for metric in over)
        text = f"NVLinks of {where} have {counts}."
        advice = "Test its NVLinks when its work is done; reseat or replace the GPU."
    elif cause == "pcie_narrow":
        metric, unit = ("pcie_width", "PCIe lanes") if now.narrow[g] else ("pcie_generation", "is its PCIe generation")
        text = f"{where}: {against(metric, unit)}."
        advice = (
            "Test its PCIe link, then reseat the board or its riser. A reboot trains the link again and shows whether"
            " the fault persists."
        )
    else:
        counts = growing("pcie_replays", float(now.replays_limit(np.array([g]))[0]) / 60, "replays")
        text = f"The PCIe link of {where} has too many replays: {counts}."
        advice = "Check the node's kernel log for PCIe errors; reseat the board or its riser."
    return text, advice, facts


def _describe_state(now: GpuLinks, cause: str, g: int, since_ms: int) -> tuple[str, str, list[Evidence]]:
    """Return the same for what a GPU's own value says, without its peers."""
    where, end_ms = place(*now.window.index.member(g)), now.window.newest.end_ms
    if cause == "nvlink_ber":
        ber = float(now.ber[g])
        rate = f"an effective bit error rate of {ber:.1e}; {NVLINK_BER:.0e} is the limit"
        fact = Evidence(f"worst NVLink: {rate}", "nvlink_effective_ber", ber, NVLINK_BER, None, None, since_ms, end_ms)
        advice = "Test its NVLinks when its work is done; clean or reseat its cable or board, then replace it."
        return f"The worst NVLink of {where} has {rate}.", advice, [fact]
    value, state = float(now.fabric[g]), FABRIC_STATES[int(now.fabric[g])]
    fact = Evidence(f"fabric state: {state}", "fabric_state", value, FABRIC_COMPLETED, None, None, since_ms, end_ms)
    return (
        f"{where} is not registered with the NVSwitch fabric ({state}): CUDA does not start on it.",
        "Check nvidia-fabricmanager on the node (on rack-scale systems nvidia-imex and the NVLink switches), then reset"
        " the GPUs or reboot the node.",
        [fact],
    )

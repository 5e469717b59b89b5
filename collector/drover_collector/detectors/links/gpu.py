"""A GPU's own links: NVLinks that are gone or err, PCIe with fewer lanes, a lower generation or many repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from drover_collector.detectors._lib.robust import Bools, Grouping, grouped
from drover_collector.detectors._lib.steady import (
    IDLE_UTIL,
    Ints,
    boards,
    column,
)
from drover_collector.detectors._lib.texts import place
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import (
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "links"

MIN_PEERS = 4
FEW_SHARE = 0.1  # of the boards of one kind: more of them differ by design
FEW_OF_NODES = 4  # nodes with boards of one kind: errors of all GPUs of one of them are that node's
FEW_BOARDS = 2  # of 2 * MIN_PEERS and more, however few that is: two broken GPUs of a node that is the whole fleet
PERSIST = 3  # buckets: links train anew after a reset
NVLINK_RATES = {  # per second, over the window (DCGM 4.6: CRC from 100 a second fails; replays and recoveries at all)
    "nvlink_crc_errors": 100.0,
    "nvlink_replays": 1.0,
    "nvlink_recoveries": 2 / 60,
}
MINUTE_S = 60.0  # limits below one a second are held against what came in a minute: from one in 10 s no rate follows
NODE_SHARE = 0.5  # of a node's GPUs: more is what they have in common
# DCGM 4.6: PCIe replays a minute and lane, by generation, from which it warns.
REPLAYS_PER_LANE = (0.15, 0.15, 0.3, 0.48, 0.96, 1.92, 3.84)


@dataclass(frozen=True, slots=True)
class Usual:
    """A metric's last values, and of the boards of each GPU's kind the median and how many are known, float64 [G]."""

    values: Floats
    kinds: Grouping
    median: Floats
    count: Floats


@dataclass(slots=True)
class GpuState:
    streaks: dict[str, Ints] = field(default_factory=dict)  # cause -> buckets in a row, [G]
    kinds: Grouping | None = None  # GPUs by their boards
    usual: dict[str, Usual] = field(default_factory=dict)
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)


def gpu_links(window: Window, s: GpuState, now_ms: int) -> Iterator[Finding]:
    s.kinds = grouped((boards(window) + 1)[window.index.gpu_node], s.kinds)
    look = _Look(window, s.kinds, s.usual)
    standing: dict[tuple[str, int], int] = {}
    for cause, found in look.flags().items():
        streak = s.streaks.get(cause)
        if streak is None or len(streak) != len(found):
            streak = np.zeros(len(found), np.int64)
        s.streaks[cause] = streak = np.where(found, streak + 1, 0)
        told = np.flatnonzero(streak >= PERSIST).tolist()
        for g in told:
            back = min(int(streak[g]), len(window.buckets))
            standing[cause, g] = s.since_ms.get((cause, g), window.buckets[-back].start_ms)
        for n, together in groupby(told, lambda g: int(window.index.gpu_node[g])):  # GPUs are in the nodes' order
            mine = list(together)
            whole = len(mine) > max(1, NODE_SHARE * window.index.nodes[n].gpus)
            for gpus in [mine] if whole else [[g] for g in mine]:
                yield _finding(look, cause, gpus, min(standing[cause, g] for g in gpus), now_ms)
    s.since_ms = standing


class _Look:
    """The newest bucket against boards of the same kind, each column worked through once.

    Attributes:
        values, usual: metric -> float64 [G]; what the boards of the same kind have.
        rates: counter -> growth per second, float64 [G].
        narrow: GPUs with fewer lanes, bool [G].
    """

    def __init__(self, window: Window, kinds: Grouping, known: dict[str, Usual]) -> None:
        self.window = window
        self._kinds = kinds.groups
        self.values = {metric: column(window, metric) for metric in ("nvlink_active_links", "pcie_width")}
        # Some boards lower the generation while they rest.
        rests = ~(column(window, "gpu_util_ratio") >= IDLE_UTIL)
        self.values["pcie_generation"] = np.where(rests, np.nan, column(window, "pcie_generation"))
        for metric, values in self.values.items():  # what links train to changes seldom
            old = known.get(metric)
            if old is None or old.kinds is not kinds or not np.array_equal(old.values, values, equal_nan=True):
                median, count = (kinds.spread(of[0]) for of in kinds.medians(values[None]))
                known[metric] = Usual(values.copy(), kinds, median, count)
        self.usual = known
        self.rates = {metric: _rate(window, metric, limit) for metric, limit in NVLINK_RATES.items()}
        self.rates["pcie_replays"] = _rate(window, "pcie_replays", 0.0)
        self.narrow = self._below("pcie_width")

    def flags(self) -> dict[str, Bools]:
        """Cause -> bool [G]."""
        errors = np.zeros(len(self._kinds), bool)
        for metric, limit in NVLINK_RATES.items():
            errors |= self._few(self.rates[metric] > limit)
        return {
            "nvlink_down": self._below("nvlink_active_links"),
            "nvlink_errors": errors,
            "pcie_narrow": self.narrow | self._below("pcie_generation"),
            "pcie_replays": self._few(self._replays()),
        }

    def _replays(self) -> Bools:
        """GPUs whose PCIe link repeats itself more than it may."""
        rate, result = self.rates["pcie_replays"], np.zeros(len(self._kinds), bool)
        some = np.flatnonzero(rate > 0)  # no limit is lower
        result[some] = rate[some] * 60 > self.replays_limit(some)
        return result

    def replays_limit(self, gpus: Ints) -> Floats:
        """Of these GPUs, a minute and whole link."""
        lanes, generation = np.array(REPLAYS_PER_LANE), column(self.window, "pcie_generation")[gpus]
        known = np.nan_to_num(generation).astype(np.int64).clip(0, len(lanes) - 1)
        width = self.values["pcie_width"][gpus]
        return np.asarray(np.ceil(lanes[known] * np.where(np.isnan(width), 16, width)))

    def _below(self, metric: str) -> Bools:
        """Fewer than the boards of the same kind have, where enough of them are known."""
        usual = self.usual[metric]
        return self._few((self.values[metric] < usual.median) & (usual.count >= MIN_PEERS), errors=False)

    def _few(self, flags: Bools, errors: bool = True) -> Bools:
        """Those that are few among the boards of their kind; errors, which nobody builds in, also all of one node."""
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
    """Growth per second from the first to the last value in the window, float64 [G]; NaN where it began anew or fewer
    than two are known: the agent and dcgm-exporter read some counters each 30 s only."""
    told = [(bucket.end_ms, values) for bucket in window.buckets if (values := bucket.gpu.get(metric)) is not None]
    if len(told) < 2:
        return np.full(window.index.gpu_count, np.nan)
    least_s = 0.0 if limit >= 1 else MINUTE_S
    (since_ms, before), (at_ms, now) = told[0], told[-1]
    grown = now - before
    rate = grown / max((at_ms - since_ms) / 1000, least_s)
    with np.errstate(invalid="ignore"):
        rate[grown < 0] = np.nan
    gaps = np.flatnonzero(np.isnan(grown))
    if len(gaps):  # of the few that lack a value at an end what lies between
        rate[gaps] = _rate_between(told, gaps, least_s)
    return rate


def _rate_between(told: Sequence[tuple[int, Floats]], gpus: Ints, least_s: float) -> Floats:
    """The same for these GPUs, each from its first to its last known value."""
    values = np.array([some[gpus] for _, some in told])
    known, at = ~np.isnan(values), np.arange(len(gpus))
    first, last = known.argmax(axis=0), len(told) - 1 - known[::-1].argmax(axis=0)
    ends_ms = np.array([end_ms for end_ms, _ in told], np.float64)
    elapsed_s, grown = (ends_ms[last] - ends_ms[first]) / 1000, values[last, at] - values[first, at]
    with np.errstate(invalid="ignore"):
        good = (grown >= 0) & (elapsed_s > 0)
        over_s = np.where(good, np.maximum(elapsed_s, least_s), np.nan)
    return np.where(good, grown / over_s, np.nan)


def _finding(look: _Look, cause: str, gpus: Sequence[int], since_ms: int, now_ms: int) -> Finding:
    """Of one GPU, or of most of a node's: then the first stands for all."""
    window, g, facts = look.window, gpus[0], []
    index = window.index
    node, slot = index.member(g)
    where = place(node, slot)

    def against(metric: str, unit: str) -> str:
        of, value = look.usual[metric], float(look.values[metric][g])
        usual, others = float(of.median[g]), int(of.count[g]) - 1
        text = f"{value:g} {unit}; the other {others} boards of its kind have {usual:g}"
        facts.append(Evidence(text, metric, value, usual, None, others, since_ms, window.newest.end_ms))
        return text

    def growing(metric: str, limit: float, what: str) -> str:
        rate = float(look.rates[metric][g])
        text = f"{rate * 60:.0f} {what} a minute"
        facts.append(Evidence(text, metric, rate, limit, None, None, since_ms, window.newest.end_ms))
        return text

    if cause == "nvlink_down":
        text = f"{where} has {against('nvlink_active_links', 'NVLinks up')}."
        advice = "Test its NVLinks when its work is done, and reset it: a link that stays away is broken. Until then "
        advice += "collectives run at this GPU's pace."
    elif cause == "nvlink_errors":
        words = {"nvlink_crc_errors": "CRC errors", "nvlink_replays": "replays", "nvlink_recoveries": "recoveries"}
        over = [metric for metric, limit in NVLINK_RATES.items() if look.rates[metric][g] > limit]
        counts = " and ".join(growing(metric, NVLINK_RATES[metric], words[metric]) for metric in over)
        text = f"NVLinks of {where} count {counts}."
        advice = "Test its NVLinks when its work is done; reseat or replace."
    elif cause == "pcie_narrow":
        metric, unit = ("pcie_width", "PCIe lanes") if look.narrow[g] else ("pcie_generation", "is its PCIe generation")
        text = f"{where}: {against(metric, unit)}."
        advice = "Test its PCIe link, then reseat the board or its riser; a reboot trains the link anew, and shows "
        advice += "whether it stays so."
    else:
        counts = growing("pcie_replays", float(look.replays_limit(np.array([g]))[0]) / 60, "replays")
        text = f"The PCIe link of {where} repeats itself: {counts}."
        advice = "Look for PCIe lines in the kernel log of the node; reseat the board or its riser."
    whole = len(gpus) > 1
    if whole:
        text = f"{len(gpus)} of {index.nodes[int(index.gpu_node[g])].gpus} GPUs show it: {text}"
        advice = f"Look at what they share first: its switches, its backplane, the fabric manager. {advice}"
    return Finding(
        NAME,
        IncidentKind.LINK,
        cause,
        "node" if whole else "gpu",
        node,
        None if whole else slot,
        ((node, None if whole else slot),),
        now_ms,
        since_ms,
        Severity.WARNING,
        0.8,
        RecommendedAction.ADVISE if cause == "pcie_replays" else RecommendedAction.PROBE,
        text,
        advice,
        tuple(facts),
        window.job_of(g),
    )

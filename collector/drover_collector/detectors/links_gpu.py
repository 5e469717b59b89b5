"""A GPU's own links: NVLinks that are gone or err, PCIe with fewer lanes, a lower generation or many repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from drover_collector.buckets import Floats
from drover_collector.detectors.robust import Bools, peers, share
from drover_collector.detectors.steady import IDLE_UTIL, Ints, boards, column
from drover_collector.detectors.texts import place
from drover_collector.detectors.window import Window
from drover_proto.events import Evidence, Finding, IncidentKind, Severity, Wanted

NAME = "links"

MIN_PEERS = 4
FEW_SHARE = 0.1  # of the boards of one kind: more of them differ by design
PERSIST = 3  # buckets: links train anew after a reset
NVLINK_RATES = {  # per second, over the window (DCGM 4.6: CRC from 100 a second fails; replays and recoveries at all)
    "nvlink_crc_errors": 100.0,
    "nvlink_replays": 1.0,
    "nvlink_recoveries": 2 / 60,
}
# DCGM 4.6: PCIe replays a minute and lane, by generation, from which it warns.
REPLAYS_PER_LANE = (0.15, 0.15, 0.3, 0.48, 0.96, 1.92, 3.84)


@dataclass(slots=True)
class GpuState:
    streaks: dict[str, Ints] = field(default_factory=dict)  # cause -> buckets in a row, [G]
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)


def gpu_links(window: Window, s: GpuState, now_ms: int) -> Iterator[Finding]:
    kinds = (boards(window) + 1)[window.index.gpu_node]
    links, width = column(window, "nvlink_active_links"), column(window, "pcie_width")
    generation, util = column(window, "pcie_generation"), column(window, "gpu_util_ratio")
    fewer_links, lanes = _below(links, kinds), _below(width, kinds)
    # Some boards lower the generation while they rest.
    slower = _below(np.where(util >= IDLE_UTIL, generation, np.nan), kinds)
    flags: dict[str, Bools] = {
        "nvlink_down": fewer_links,
        "nvlink_errors": _any_over(window, kinds),
        "pcie_narrow": lanes | slower,
        "pcie_replays": _few(_replays(window, width, generation), kinds),
    }
    standing = set()
    for cause, found in flags.items():
        streak = s.streaks.get(cause)
        if streak is None or len(streak) != len(found):
            streak = np.zeros(len(found), np.int64)
        s.streaks[cause] = streak = np.where(found, streak + 1, 0)
        for g in np.flatnonzero(streak >= PERSIST).tolist():
            standing.add((cause, g))
            back = min(int(streak[g]), len(window.buckets))
            s.since_ms.setdefault((cause, g), window.buckets[-back].start_ms)
            yield _finding(window, cause, g, s.since_ms[cause, g], kinds, lanes, now_ms)
    s.since_ms = {key: since for key, since in s.since_ms.items() if key in standing}


def _few(flags: Bools, kinds: Ints) -> Bools:
    """Those that are few among the boards of their kind, or one."""
    everyone = np.ones(len(flags), bool)
    size = np.bincount(kinds, minlength=int(kinds.max(initial=0)) + 1)[kinds]
    limit = np.maximum(FEW_SHARE, 1.0 / np.maximum(size, 1))
    return flags & (np.nan_to_num(share(flags, everyone, kinds)) <= limit)


def _below(values: Floats, kinds: Ints) -> Bools:
    """Fewer than the boards of the same kind have, where enough of them are known."""
    usual = peers(values, kinds)
    with np.errstate(invalid="ignore"):
        return _few((values < usual.median) & (usual.count >= MIN_PEERS), kinds)


def _rate(window: Window, metric: str) -> Floats:
    """Growth per second over the window, float64 [G]; NaN where it began anew or is not known."""
    first, last = window.buckets[0], window.buckets[-1]
    before, now = first.gpu.get(metric), last.gpu.get(metric)
    elapsed_s = (last.end_ms - first.end_ms) / 1000
    if before is None or now is None or not elapsed_s:
        return np.full(window.index.gpu_count, np.nan)
    grown = now - before
    return np.where(grown >= 0, grown / elapsed_s, np.nan)


def _any_over(window: Window, kinds: Ints) -> Bools:
    found = np.zeros(window.index.gpu_count, bool)
    for metric, limit in NVLINK_RATES.items():
        found |= _few(_rate(window, metric) > limit, kinds)
    return found


def _replays(window: Window, width: Floats, generation: Floats) -> Bools:
    lanes = np.array(REPLAYS_PER_LANE)
    known = np.nan_to_num(generation).astype(np.int64).clip(0, len(lanes) - 1)
    limit = np.ceil(lanes[known] * np.where(np.isnan(width), 16, width))
    return np.asarray(_rate(window, "pcie_replays") * 60 > limit)


def _finding(window: Window, cause: str, g: int, since_ms: int, kinds: Ints, lanes: Bools, now_ms: int) -> Finding:
    node, gpu = window.index.nodes[int(window.index.gpu_node[g])].name, int(window.index.gpu_slot[g])
    where, facts = place(node, gpu), []

    def against(metric: str, unit: str) -> str:
        values = column(window, metric)
        of = peers(values, kinds)
        value, usual = float(values[g]), float(of.median[g])
        text = f"{value:g} {unit}; the other {int(of.count[g]) - 1} boards of its kind have {usual:g}"
        facts.append(Evidence(text, metric, value, usual, None, int(of.count[g]) - 1, since_ms, window.newest.end_ms))
        return text

    def growing(metric: str, limit: float, what: str) -> str:
        rate = float(_rate(window, metric)[g])
        text = f"{rate * 60:.0f} {what} a minute"
        facts.append(Evidence(text, metric, rate, limit, None, None, since_ms, window.newest.end_ms))
        return text

    if cause == "nvlink_down":
        text = f"{where} has {against('nvlink_active_links', 'NVLinks up')}."
        advice = "Collectives run at this GPU's pace: reset it when its work is done; a link that stays away is broken."
    elif cause == "nvlink_errors":
        words = {"nvlink_crc_errors": "CRC errors", "nvlink_replays": "replays", "nvlink_recoveries": "recoveries"}
        over = [m for m, limit in NVLINK_RATES.items() if _rate(window, m)[g] > limit]
        counts = " and ".join(growing(m, NVLINK_RATES[m], words[m]) for m in over)
        text, advice = (
            f"NVLinks of {where} count {counts}.",
            "Probe its NVLinks when its work is done; reseat or replace.",
        )
    elif cause == "pcie_narrow":
        metric, unit = ("pcie_width", "PCIe lanes") if lanes[g] else ("pcie_generation", "is its PCIe generation")
        text = f"{where}: {against(metric, unit)}."
        advice = "Reseat the board or its riser; a reboot trains the link anew, and tells whether it stays so."
    else:
        text = f"The PCIe link of {where} repeats itself: {growing('pcie_replays', 0.0, 'replays')}."
        advice = "Look for PCIe lines in the kernel log of the node; reseat the board or its riser."
    return Finding(
        NAME, IncidentKind.LINK, cause, "gpu", node, gpu, ((node, gpu),), now_ms, since_ms, Severity.WARNING, 0.8,
        Wanted.ADVISE if cause == "pcie_replays" else Wanted.PROBE, text, advice, tuple(facts), window.job_of(g),
    )  # fmt: skip

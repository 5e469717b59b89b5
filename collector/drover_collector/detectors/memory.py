"""Device memory: failed and pending row remaps, uncorrected errors, the driver's verdict on SRAM.

Thresholds: DCGM 4.6 (DcgmGPUHardwareLimits.h), NVIDIA GPU Memory Error Management, NVML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drover_collector.buckets import Floats
from drover_collector.detectors.example import Example, play, small_fleet
from drover_collector.detectors.texts import place
from drover_collector.detectors.window import Window
from drover_proto.events import Evidence, Finding, IncidentKind, Severity, Wanted

NAME = "memory"
VERSION = 1
QUIET_MS = 300_000  # the condition must be gone this long: states of the driver do not flicker

REMAPPED_ROWS_WARN = 512  # uncorrectable remaps; every bank of the GPU has 8 spare rows (DCGM, NVIDIA)
GROWTH_HELD_MS = 3_600_000  # an uncorrected error is told for this long: counters do not go back by themselves

# Corrected HBM errors per second. Azure's node check rejects a GPU at 20 million: reached within a week at this rate.
STORM_PER_S = 33.0
STORM_BUCKETS = 3

# Rows replaced after corrected errors, within an hour or two: they can pile up without any XID until the GPU vanishes
# (one had reached 254), and after more than 10 rows 83 % of nodes regress (SuperBench, ATC'24).
PILE_ROWS = 10
PILE_MS = 3_600_000

COUNTERS = ("ecc_dram_uncorrected", "ecc_sram_uncorrected")
STATES = ("row_remap_failed", "row_remap_pending", "sram_threshold_exceeded", "remapped_rows_uncorrected")


@dataclass(slots=True)
class State:
    last: dict[str, Floats] = field(default_factory=dict)  # newest known value of each counter, [G]
    grown_ms: dict[str, Floats] = field(default_factory=dict)  # when it last grew, [G], NaN never
    storm: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row, [G]
    piles: dict[str, Floats] = field(default_factory=dict)  # rows of each GPU at the last two marks, and when told, [G]
    marked_ms: int = 0
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)  # (state, GPU) -> when first seen so


def detect(window: Window, state: State | None, now_ms: int) -> tuple[list[Finding], State]:
    s = state if state is not None else State()
    if not window.fresh:
        return [], s
    bucket, found = window.newest, []
    standing: set[tuple[str, int]] = set()
    for metric in STATES:
        values = bucket.gpu.get(metric)
        if values is None:
            continue
        limit = REMAPPED_ROWS_WARN if metric == "remapped_rows_uncorrected" else 1
        for g in np.flatnonzero(values >= limit).tolist():
            standing.add((metric, g))
            since = s.since_ms.setdefault((metric, g), bucket.start_ms)
            found.append(_state_finding(window, g, metric, float(values[g]), since, now_ms))
    found += _storms(window, s, standing, now_ms)
    found += _piles(window, s, standing, now_ms)
    for key in [key for key in s.since_ms if key not in standing]:
        del s.since_ms[key]
    for metric in COUNTERS:
        values = bucket.gpu.get(metric)
        if values is None:
            continue
        last = s.last.get(metric, np.full(len(values), np.nan))
        grown = s.grown_ms.setdefault(metric, np.full(len(values), np.nan))
        more = values > last  # NaN: not known before, hence no growth
        grown[more] = bucket.end_ms
        s.last[metric] = np.where(np.isnan(values), last, values)
        for g in np.flatnonzero(now_ms - grown <= GROWTH_HELD_MS).tolist():
            found.append(_growth_finding(window, g, metric, float(s.last[metric][g]), int(grown[g]), now_ms))
    return found, s


def could_not_judge(window: Window) -> list[str]:
    missing = [metric for metric in (*STATES, *COUNTERS, "ecc_dram_corrected") if metric not in window.newest.gpu]
    return [f"memory faults told by {', '.join(missing)}: not in the data"] if missing else []


_TEXTS: Mapping[str, tuple[str, Severity, float, Wanted, str, str]] = {
    "row_remap_failed": (
        "remap_failed", Severity.CRITICAL, 0.99, Wanted.DRAIN,
        "could not replace a bad HBM row: a remap failed",
        "Drain the node and run a field diagnostic; NVIDIA replaces a GPU whose remap failed.",
    ),
    "row_remap_pending": (
        "remap_pending", Severity.WARNING, 0.95, Wanted.DRAIN,
        "waits for a reset to replace a bad HBM row",
        "Drain the node, and reset the GPU once it is idle; running work may finish first.",
    ),
    "sram_threshold_exceeded": (
        "sram_threshold", Severity.CRITICAL, 0.97, Wanted.DRAIN,
        "has had more SRAM errors than its driver accepts",
        "Drain the node and run a field diagnostic; the driver's own limit marks it for replacement.",
    ),
    "remapped_rows_uncorrected": (
        "remaps_many", Severity.WARNING, 0.9, Wanted.ADVISE,
        f"has replaced {REMAPPED_ROWS_WARN} HBM rows or more: its spares run out",
        "Plan its replacement, and give it no long job until then.",
    ),
}  # fmt: skip


def _state_finding(window: Window, g: int, metric: str, value: float, since_ms: int, now_ms: int) -> Finding:
    cause, severity, confidence, action, what, advice = _TEXTS[metric]
    node, gpu = window.index.member(g)
    text = f"{metric} is {value:.0f}"
    return Finding(
        NAME, IncidentKind.MEMORY, cause, "gpu", node, gpu, ((node, gpu),), now_ms, since_ms, severity, confidence,
        action, f"{place(node, gpu)} {what}.", advice,
        (Evidence(text, metric, value, 0.0, from_ms=since_ms, to_ms=window.newest.end_ms),), window.job_of(g),
    )  # fmt: skip


def _storms(window: Window, s: State, standing: set[tuple[str, int]], now_ms: int) -> Iterator[Finding]:
    """GPUs whose HBM keeps needing correction."""
    values = window.gpu("ecc_dram_corrected")
    if len(values) < 2:
        return
    seconds = (window.buckets[-1].end_ms - window.buckets[-2].end_ms) / 1000
    rate = np.nan_to_num((values[-1] - values[-2]) / seconds)
    s.storm = np.where(rate >= STORM_PER_S, (s.storm if len(s.storm) else 0) + np.ones(len(rate), np.int64), 0)
    for g in np.flatnonzero(s.storm >= STORM_BUCKETS).tolist():
        node, gpu = window.index.member(g)
        standing.add(("storm", g))
        since = s.since_ms.setdefault(("storm", g), window.buckets[-STORM_BUCKETS].start_ms)
        evidence = Evidence(
            f"{rate[g]:,.0f} corrected HBM errors a second", "ecc_dram_corrected", from_ms=since,
            to_ms=window.newest.end_ms,
        )  # fmt: skip
        yield Finding(
            NAME, IncidentKind.MEMORY, "ecc_storm", "gpu", node, gpu, ((node, gpu),), now_ms, since, Severity.WARNING,
            0.85, Wanted.PROBE, f"{place(node, gpu)} corrects {rate[g]:,.0f} HBM errors a second.",
            "Its data are still right. Run a memory test when the node is free, and replace the GPU if it goes on.",
            (evidence,), window.job_of(g),
        )  # fmt: skip


def _piles(window: Window, s: State, standing: set[tuple[str, int]], now_ms: int) -> Iterator[Finding]:
    """GPUs whose HBM rows are replaced one after the other."""
    rows = window.newest.gpu.get("remapped_rows_corrected")
    if rows is None:
        return
    nothing = np.full(len(rows), np.nan)
    if not s.piles:
        s.piles = {"before": rows.copy(), "mark": rows.copy(), "grew_ms": nothing.copy()}
        s.marked_ms = window.newest.end_ms
    if window.newest.end_ms - s.marked_ms >= PILE_MS:
        s.piles["before"], s.piles["mark"] = s.piles["mark"], rows.copy()
        s.marked_ms = window.newest.end_ms
    for name in ("before", "mark"):  # a GPU that was not heard then, or was exchanged since
        low = np.isnan(s.piles[name]) | (rows < s.piles[name])
        s.piles[name] = np.where(low, rows, s.piles[name])
    s.piles["grew_ms"] = np.where(rows - s.piles["before"] >= PILE_ROWS, window.newest.end_ms, s.piles["grew_ms"])
    for g in np.flatnonzero(window.newest.end_ms - s.piles["grew_ms"] <= PILE_MS).tolist():
        node, gpu = window.index.member(g)
        standing.add(("pile", g))
        since = s.since_ms.setdefault(("pile", g), min(s.marked_ms, window.newest.start_ms))
        count = float(rows[g] - s.piles["before"][g])
        evidence = Evidence(
            f"remapped_rows_corrected is {rows[g]:.0f}", "remapped_rows_corrected", float(rows[g]), from_ms=since,
            to_ms=window.newest.end_ms,
        )  # fmt: skip
        yield Finding(
            NAME, IncidentKind.MEMORY, "remaps_pile_up", "gpu", node, gpu, ((node, gpu),), now_ms, since,
            Severity.WARNING, 0.8, Wanted.PROBE,
            f"{place(node, gpu)} has replaced {max(count, 0):.0f} HBM rows within two hours after corrected errors.",
            "Run a memory test when the node is free, and give it no long job until then: such GPUs can vanish.",
            (evidence,), window.job_of(g),
        )  # fmt: skip


def _growth_finding(window: Window, g: int, metric: str, value: float, grown_ms: int, now_ms: int) -> Finding:
    node, gpu = window.index.member(g)
    memory = "HBM" if "dram" in metric else "SRAM"
    evidence = Evidence(f"{metric} has grown to {value:.0f}", metric, value, 0.0, to_ms=grown_ms)
    return Finding(
        NAME, IncidentKind.MEMORY, "uncorrected_errors", "gpu", node, gpu, ((node, gpu),), now_ms, grown_ms,
        Severity.WARNING, 0.85, Wanted.PROBE, f"{place(node, gpu)} has a new uncorrected {memory} error.",
        "The program that used it has probably ended. Run a memory test on the GPU before its next long job.",
        (evidence,), window.job_of(g),
    )  # fmt: skip


def _remap_fails(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number >= 2:
        gpu["row_remap_failed"][11] = 1


EXAMPLES = (
    Example("no errors", lambda: play(small_fleet(), 4), frozenset()),
    Example(
        "a row remap fails",
        lambda: play(small_fleet(), 4, _remap_fails),
        frozenset({("memory", "remap_failed", "gpu", "critical")}),
    ),
)

"""Detect faults of device memory: failed and pending row remaps, uncorrected errors, too many SRAM errors.

Thresholds: DCGM 4.6 (DcgmGPUHardwareLimits.h), NVIDIA GPU Memory Error Management, NVML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.bursts import Bursts
from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.metrics import Ints, column
from drover_collector.detectors._lib.shared_condition import SharedCondition, common_finding
from drover_collector.detectors._lib.texts import place
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "memory"
VERSION = 1
QUIET_MS = 300_000  # for which the condition must be gone

REMAPPED_ROWS_WARN = 512  # uncorrectable remaps; every bank of the GPU has 8 spare rows (DCGM, NVIDIA)
GROWTH_HELD_MS = 3_600_000  # for which an uncorrected error is reported: counters never fall by themselves

# Corrected HBM errors per second. At this rate a GPU reaches Azure's limit for nodes, 20 million, within a week.
STORM_PER_S = 33.0
STORM_BUCKETS = 3

# Errors that come again and again, as from one weak row or cell, before its storm or its remap. A stray error is alone
# in its minute, and 4.5 % of Perlmutter's boards had any corrected error. The limits are our own.
BURST_MINUTES = 8.0  # of half an hour
BURST_ERRORS = 20.0

# Rows replaced after corrected errors, within an hour or two. They can grow without any XID until the GPU vanishes (one
# had reached 254); after more than 10 rows 83 % of nodes regress (SuperBench, ATC'24). A healthy GPU replaces one in
# years, so four are reported: our own limit.
PILE_ROWS = 4
PILE_MS = 3_600_000

COUNTERS = ("ecc_dram_uncorrected", "ecc_sram_uncorrected")
CORRECTED = ("ecc_dram_corrected", "ecc_sram_corrected")
STATES = (
    "row_remap_failed", "row_remap_pending", "sram_threshold_exceeded", "remapped_rows_uncorrected", "remap_banks_none",
)  # fmt: skip
# Of AMD's GPUs, by their exporter; absent elsewhere.
OF_AMD, XGMI = "exporter_unhealthy", "xgmi_uncorrected"
JUDGED = (*STATES, OF_AMD, *COUNTERS, XGMI, *CORRECTED, "remapped_rows_corrected")


@dataclass(slots=True)
class MemoryState:
    last: dict[str, Floats] = field(default_factory=dict)  # newest known value of each counter, [G]
    grown_ms: dict[str, Floats] = field(default_factory=dict)  # when it last grew, [G], NaN never
    storm: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # buckets in a row, [G]
    bursts: Bursts = field(default_factory=lambda: Bursts())
    piles: dict[str, Floats] = field(default_factory=dict)  # rows of each GPU at the last two checkpoints, [G]
    checkpoint_ms: int = 0
    shared: SharedCondition = field(default_factory=SharedCondition)
    reopened: Sequence[Incident] = ()  # open when the collector started


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> MemoryState:
    """Return state with the start of each open condition, which keeps a single bad board apart from many later."""
    return MemoryState(
        reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None and i.scope == "gpu"]
    )


def _resume(index: FleetIndex, s: MemoryState) -> None:
    for incident in s.reopened:
        g = None if incident.node is None or incident.gpu is None else index.gpu(incident.node, incident.gpu)
        for e in incident.evidence if g is not None else ():
            if e.metric in JUDGED:
                since = s.shared.since_ms.setdefault(e.metric, np.zeros(index.gpu_count, np.int64))
                since[g] = e.from_ms if e.from_ms is not None else incident.since_ms
            if e.metric in (*COUNTERS, XGMI) and e.value is not None and e.to_ms is not None:
                s.last.setdefault(e.metric, np.full(index.gpu_count, np.nan))[g] = e.value
                s.grown_ms.setdefault(e.metric, np.full(index.gpu_count, np.nan))[g] = e.to_ms
            elif e.metric == "remapped_rows_corrected" and e.to_ms is not None:
                if not s.piles:
                    s.piles = {name: np.full(index.gpu_count, np.nan) for name in ("before", "newest", "grew_ms")}
                    s.checkpoint_ms = incident.updated_ms
                s.piles["grew_ms"][g] = e.to_ms
    s.reopened = ()


def detect(window: Window, state: MemoryState | None, now_ms: int) -> tuple[list[Finding], MemoryState]:
    s = state if state is not None else MemoryState()
    if not window.fresh:
        return [], s
    if s.reopened:
        _resume(window.index, s)
    bucket, found = window.newest, []
    for metric in (*STATES, OF_AMD):
        values = bucket.gpu.get(metric)
        if values is None:
            continue
        flags = values >= (REMAPPED_ROWS_WARN if metric == "remapped_rows_uncorrected" else 1)
        alone, since = s.shared.split(window, metric, flags, bucket.start_ms)
        for g in np.flatnonzero(alone).tolist():
            found.append(_state_finding(window, g, metric, float(values[g]), int(since[g]), now_ms))
        found += _common(window, s, metric, _TEXTS[metric][0], now_ms)
    found += _storms(window, s, now_ms)
    found += _bursts(window, s, now_ms)
    found += _piles(window, s, now_ms)
    for metric in (*COUNTERS, XGMI):
        values = bucket.gpu.get(metric)
        if values is None:
            continue
        last = s.last.get(metric, np.full(len(values), np.nan))
        grown = s.grown_ms.setdefault(metric, np.full(len(values), np.nan))
        more = values > last  # NaN: unknown before, hence no growth
        grown[more] = bucket.end_ms
        s.last[metric] = np.where(np.isnan(values), last, values)
        alone, _ = s.shared.split(window, metric, now_ms - grown <= GROWTH_HELD_MS, bucket.start_ms)
        for g in np.flatnonzero(alone).tolist():
            since_ms = int(grown[g]) - bucket.length_ms  # start of the bucket in which it grew
            found.append(_growth_finding(window, g, metric, float(s.last[metric][g]), since_ms, now_ms))
        found += _common(window, s, metric, "xgmi_errors" if metric == XGMI else "uncorrected_errors", now_ms)
    return found, s


def could_not_judge(window: Window) -> list[str]:
    missing = [metric for metric in (*STATES, *COUNTERS, *CORRECTED) if metric not in window.newest.gpu]
    return [f"memory faults: the data lacks {', '.join(missing)}"] if missing else []


_TEXTS: Mapping[str, tuple[str, Severity, float, RecommendedAction, str, str]] = {
    "row_remap_failed": (
        "remap_failed", Severity.CRITICAL, 0.99, RecommendedAction.DRAIN,
        "could not replace a bad HBM row: a row remap failed",
        "Drain the node and run a field diagnostic. NVIDIA replaces a GPU whose row remap failed.",
    ),
    "row_remap_pending": (
        "remap_pending", Severity.WARNING, 0.95, RecommendedAction.DRAIN,
        "needs a reset to replace a bad HBM row",
        "Drain the node, then reset the GPU when it is idle. Running jobs may finish first.",
    ),
    "sram_threshold_exceeded": (
        "sram_threshold", Severity.CRITICAL, 0.97, RecommendedAction.DRAIN,
        "has more SRAM errors than its driver allows",
        "Drain the node and run a field diagnostic. The GPU has passed the driver's own limit for replacement.",
    ),
    "remapped_rows_uncorrected": (
        "remaps_many", Severity.WARNING, 0.9, RecommendedAction.ADVISE,
        f"has replaced {REMAPPED_ROWS_WARN} HBM rows or more and is running out of spare rows",
        "Plan to replace the GPU. Give it no long job until then.",
    ),
    # AMD's exporter judges by its own thresholds, by default of uncorrected errors: advice, never a drain.
    OF_AMD: (
        "exporter_unhealthy", Severity.WARNING, 0.8, RecommendedAction.ADVISE,
        "is unhealthy, says AMD's exporter",
        "Look at its RAS errors (amd-smi ras, amd-smi metric --ecc). Give it no new long job until they are explained.",
    ),
    # NVIDIA GPU Memory Error Management: a remap fails where the bank has no spare row left.
    "remap_banks_none": (
        "no_spare_rows", Severity.WARNING, 0.9, RecommendedAction.ADVISE,
        "has a memory bank without a spare row: the next bad row in it cannot be replaced",
        "Plan to replace the GPU. Give it no long job until then.",
    ),
}  # fmt: skip


def _common(window: Window, s: MemoryState, metric: str, cause: str, now_ms: int) -> Iterator[Finding]:
    """Yield a finding for each kind of board with many that show the same condition."""
    for many in s.shared.shared(metric):
        yield common_finding(
            window, NAME, IncidentKind.MEMORY, cause, metric, many, now_ms,
            "Check first how the counter is read (driver, agent, DCGM) and what changed on all of these nodes: so many"
            " boards do not fail in one day. Drover drains none of them for it.",
        )  # fmt: skip


def _state_finding(window: Window, g: int, metric: str, value: float, since_ms: int, now_ms: int) -> Finding:
    cause, severity, confidence, action, what, advice = _TEXTS[metric]
    node, gpu = window.index.member(g)
    text = f"{BY_NAME[metric].label} is {value:.0f}"
    return Finding(
        NAME, IncidentKind.MEMORY, cause, "gpu", node, gpu, ((node, gpu),), now_ms, since_ms, severity, confidence,
        action, f"{place(node, gpu)} {what}.", advice,
        (Evidence(text, metric, value, 0.0, from_ms=since_ms, to_ms=window.newest.end_ms),), window.job_of(g),
    )  # fmt: skip


def _storms(window: Window, s: MemoryState, now_ms: int) -> Iterator[Finding]:
    """Report GPUs whose HBM needs constant correction."""
    if len(window.buckets) < 2:
        return
    seconds = (window.buckets[-1].end_ms - window.buckets[-2].end_ms) / 1000
    before, now = (bucket.gpu.get("ecc_dram_corrected") for bucket in window.buckets[-2:])
    if before is None or now is None:
        before = now = np.full(window.index.gpu_count, np.nan)
    rate = np.nan_to_num((now - before) / seconds)
    s.storm = np.where(rate >= STORM_PER_S, (s.storm if len(s.storm) else 0) + np.ones(len(rate), np.int64), 0)
    begun = window.buckets[-min(STORM_BUCKETS, len(window.buckets))].start_ms
    alone, sinces = s.shared.split(window, "ecc_dram_corrected", s.storm >= STORM_BUCKETS, begun)
    yield from _common(window, s, "ecc_dram_corrected", "ecc_storm", now_ms)
    for g in np.flatnonzero(alone).tolist():
        node, gpu = window.index.member(g)
        since = int(sinces[g])
        evidence = Evidence(
            f"{rate[g]:,.0f} corrected HBM errors per second", "ecc_dram_corrected", from_ms=since,
            to_ms=window.newest.end_ms,
        )  # fmt: skip
        yield Finding(
            NAME, IncidentKind.MEMORY, "ecc_storm", "gpu", node, gpu, ((node, gpu),), now_ms, since, Severity.WARNING,
            0.85, RecommendedAction.PROBE, f"{place(node, gpu)} corrects {rate[g]:,.0f} HBM errors per second.",
            "Its data is still correct. Run a memory test when the node is free; replace the GPU if errors continue.",
            (evidence,), window.job_of(g),
        )  # fmt: skip


def _bursts(window: Window, s: MemoryState, now_ms: int) -> Iterator[Finding]:
    """Report GPUs whose HBM or SRAM needs correction again and again. A storm is reported as that."""
    s.bursts.add(window.newest.end_ms, *(column(window, metric) for metric in CORRECTED))
    many = s.bursts.many(BURST_MINUTES, BURST_ERRORS)
    if len(s.storm):
        many &= s.storm < STORM_BUCKETS
    alone, _ = s.shared.split(window, "ecc bursts", many, window.newest.start_ms)
    yield from _common(window, s, "ecc bursts", "ecc_bursts", now_ms)
    for g in np.flatnonzero(alone).tolist():
        node, gpu = window.index.member(g)
        since = int(s.bursts.since_ms[g]) or now_ms
        text = (
            f"about {s.bursts.errors[:, g].sum():,.0f} corrected memory errors in half an hour, in many of its minutes"
        )
        yield Finding(
            NAME, IncidentKind.MEMORY, "ecc_bursts", "gpu", node, gpu, ((node, gpu),), now_ms, since, Severity.WARNING,
            0.7, RecommendedAction.ADVISE, f"{place(node, gpu)} has {text}.",
            "Its data is still correct. Give it no new long job, and run a memory test when the node is free.",
            (Evidence(text, CORRECTED[s.bursts.main(g)], from_ms=since, to_ms=window.newest.end_ms),), window.job_of(g),
        )  # fmt: skip


def _piles(window: Window, s: MemoryState, now_ms: int) -> Iterator[Finding]:
    """Report GPUs that replace HBM rows one after the other."""
    rows = window.newest.gpu.get("remapped_rows_corrected")
    if rows is None:
        return
    nothing = np.full(len(rows), np.nan)
    if not s.piles:
        s.piles = {"before": rows.copy(), "newest": rows.copy(), "grew_ms": nothing.copy()}
        s.checkpoint_ms = window.newest.end_ms
    if window.newest.end_ms - s.checkpoint_ms >= PILE_MS:
        s.piles["before"], s.piles["newest"] = s.piles["newest"], rows.copy()
        s.checkpoint_ms = window.newest.end_ms
    for name in ("before", "newest"):  # the GPU was not reporting then, or was replaced since
        low = np.isnan(s.piles[name]) | (rows < s.piles[name])
        s.piles[name] = np.where(low, rows, s.piles[name])
    s.piles["grew_ms"] = np.where(rows - s.piles["before"] >= PILE_ROWS, window.newest.end_ms, s.piles["grew_ms"])
    growing = window.newest.end_ms - s.piles["grew_ms"] <= PILE_MS
    begun = min(s.checkpoint_ms, window.newest.start_ms)
    alone, sinces = s.shared.split(window, "remapped_rows_corrected", growing, begun)
    yield from _common(window, s, "remapped_rows_corrected", "remaps_pile_up", now_ms)
    for g in np.flatnonzero(alone).tolist():
        node, gpu = window.index.member(g)
        since, count = int(sinces[g]), float(np.nan_to_num(rows[g] - s.piles["before"][g]))
        shown = f"has replaced {count:.0f} HBM rows" if count >= PILE_ROWS else "has replaced many HBM rows"
        evidence = Evidence(
            f"{BY_NAME['remapped_rows_corrected'].label} is {rows[g]:.0f}", "remapped_rows_corrected",
            float(rows[g]), from_ms=since,
            to_ms=int(s.piles["grew_ms"][g]),
        )  # fmt: skip
        yield Finding(
            NAME,
            IncidentKind.MEMORY,
            "remaps_pile_up",
            "gpu",
            node,
            gpu,
            ((node, gpu),),
            now_ms,
            since,
            Severity.WARNING,
            0.8,
            RecommendedAction.PROBE,
            f"{place(node, gpu)} {shown} within two hours after corrected errors.",
            "Run a memory test when the node is free. Give the GPU no long job until then: such GPUs can vanish.",
            (evidence,),
            window.job_of(g),
        )


def _growth_finding(window: Window, g: int, metric: str, value: float, grown_ms: int, now_ms: int) -> Finding:
    node, gpu = window.index.member(g)
    cause, kind, action = "uncorrected_errors", IncidentKind.MEMORY, RecommendedAction.PROBE
    what = f"uncorrected {'HBM' if 'dram' in metric else 'SRAM'} error"
    advice = (
        "The program that used the memory has probably crashed. Run a memory test on the GPU before its next long job."
    )
    if metric == XGMI:
        cause, kind, action = "xgmi_errors", IncidentKind.LINK, RecommendedAction.ADVISE
        what = "uncorrected error of its XGMI links"
        advice = "The job that used the link has probably crashed. Look at amd-smi xgmi; reseat or replace the GPU."
    evidence = Evidence(
        f"{BY_NAME[metric].label} has grown to {value:.0f}",
        metric,
        value,
        0.0,
        from_ms=grown_ms,
        to_ms=grown_ms + window.newest.length_ms,
    )
    return Finding(
        NAME, kind, cause, "gpu", node, gpu, ((node, gpu),), now_ms, grown_ms, Severity.WARNING, 0.85, action,
        f"{place(node, gpu)} has a new {what}.", advice, (evidence,), window.job_of(g),
    )  # fmt: skip


def _remap_fails(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number >= 2:
        gpu["row_remap_failed"][11] = 1


def _all_pending(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    """Let the driver read the field wrongly."""
    if number >= 2:
        gpu["row_remap_pending"][:] = 1


EXAMPLES = (
    Example("no errors", lambda: play(small_fleet(), 4), frozenset()),
    Example(
        "a row remap fails",
        lambda: play(small_fleet(), 4, _remap_fails),
        frozenset({("memory", "remap_failed", "gpu", "critical")}),
    ),
    Example(
        "all boards need a reset at the same time: one finding, without a drain",
        lambda: play(small_fleet(), 4, _all_pending),
        frozenset({("memory", "remap_pending_common", "rack", "warning")}),
    ),
)

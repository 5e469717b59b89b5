"""Find GPUs whose telemetry is partly lost, while their node's other GPUs are complete.

Calls into the driver for such a GPU fail or time out now and then. GPUs that fell off the bus showed no other sign
before it than that values of theirs went missing (arXiv 2603.28781, five incidents with telemetry at GWDG). One that no
longer answers is `gpu_lost`, by the detector of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import Bools
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

NAME = "liveness"

MEMORY_MS = 600_000  # of the mean share that is missing
MISSING_SHARE, ENDS_SHARE = 0.15, 0.05  # of the GPU's values, from which it is reported, below which no longer
OTHERS_SHARE = 0.03  # of the node's median GPU: more is the agent or its network
FEW = 3  # GPUs of a node, at least: in smaller ones nothing says whether the GPU or its node loses rows
COUNTED = 3  # buckets in a row without any value: a longer absence is a lost or reset GPU


@dataclass(slots=True)
class PartialReports:
    """What is missing of each GPU's telemetry.

    Attributes:
        share: mean share of rows or values that are missing, float64 [G].
        absent: buckets in a row without a row, int64 [G]. reported: bool [G].
        since_ms: when the share last left 0, int64 [G].
        unanswered: buckets since its last value in which GPUs of its node had rows, int64 [G].
        has: metric -> GPUs that ever had a value, bool [G].
    """

    share: Floats
    absent: Ints
    reported: Bools
    since_ms: Ints
    unanswered: Ints
    has: dict[str, Bools] = field(default_factory=dict)

    @classmethod
    def of(cls, gpus: int) -> PartialReports:
        absent, since_ms, unanswered = (np.zeros(gpus, np.int64) for _ in range(3))
        return cls(np.zeros(gpus), absent, np.zeros(gpus, bool), since_ms, unanswered)

    def resume(self, g: int, since_ms: int) -> None:
        """Take over that a former run of the collector reported this GPU."""
        self.share[g], self.reported[g], self.since_ms[g] = MISSING_SHARE, True, since_ms

    def note(self, window: Window, answers: Bools) -> None:
        """Count the newest bucket for GPUs that did not answer. `answers`: bool [G]."""
        index, rows = window.index, window.newest.gpu_rows
        others = np.bincount(index.gpu_node, rows, index.node_count) > 0
        self.unanswered = np.where(answers, 0, self.unanswered + others[index.gpu_node])

    def findings(self, window: Window, core: tuple[str, ...], now_ms: int) -> Iterator[Finding]:
        """Add the newest bucket, and return a finding for each GPU whose telemetry is partly lost. `core`: metrics."""
        index, bucket = window.index, window.newest
        missing, reports = self._missing(window, core)
        rate = -np.expm1(-bucket.length_ms / MEMORY_MS)
        counts = reports & (self.absent <= COUNTED)
        self.share = np.where(counts, self.share + rate * (missing - self.share), self.share)
        begins = (self.since_ms == 0) & (missing > 0) & counts
        self.since_ms = np.where(begins, bucket.start_ms, np.where(self.share < rate * ENDS_SHARE, 0, self.since_ms))
        flagged = self.share >= np.where(self.reported, ENDS_SHARE, MISSING_SHARE)
        flagged &= self.absent <= COUNTED  # else it is lost, or its node is silent
        for g in np.flatnonzero(flagged).tolist():
            first, end = (int(of) for of in index.first_gpu[index.gpu_node[g] : index.gpu_node[g] + 2])
            of_node = self.share[first:end]
            flagged[g] = len(of_node) >= FEW and float(np.median(of_node)) <= OTHERS_SHARE
        self.reported = flagged
        for g in np.flatnonzero(flagged).tolist():
            yield self._finding(window, g, now_ms)

    def _missing(self, window: Window, core: tuple[str, ...]) -> tuple[Floats, Bools]:
        """Return the share of each GPU's rows or values that the newest bucket lacks, and whose node reports: [G]."""
        index, bucket = window.index, window.newest
        most = bucket.node_rows.astype(np.float64)
        np.maximum.at(most, index.gpu_node, bucket.gpu_rows)
        rows, of_node = bucket.gpu_rows, most[index.gpu_node]
        absent, had = np.zeros(index.gpu_count), np.zeros(index.gpu_count)
        for metric in core:
            known = ~np.isnan(bucket.gpu[metric]) if metric in bucket.gpu else np.zeros(index.gpu_count, bool)
            has = self.has.setdefault(metric, np.zeros(index.gpu_count, bool))
            has |= known
            had += has
            absent += has & ~known
        reports = (of_node > 0) & (had > 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            missing = np.where(reports, np.fmax(1 - rows / of_node, np.where(rows > 0, absent / had, 0.0)), 0.0)
        self.absent = np.where(reports & (rows == 0), self.absent + 1, np.where(rows > 0, 0, self.absent))
        return np.clip(missing, 0.0, 1.0), np.asarray(reports)

    def _finding(self, window: Window, g: int, now_ms: int) -> Finding:
        node, gpu = window.index.member(g)
        since = int(self.since_ms[g]) or now_ms
        text = f"{self.share[g]:.0%} of its values are missing, and few of its neighbours'"
        return Finding(
            NAME, IncidentKind.LIVENESS, "gpu_partial", "gpu", node, gpu, ((node, gpu),), now_ms, since,
            Severity.WARNING, 0.7, RecommendedAction.ADVISE,
            f"{place(node, gpu)} answers only in part: {text}.",
            "Check the node's kernel log for XIDs and PCIe errors of this GPU. Give it no new long job; when it is"
            " free, reset it and run a diagnostic. GPUs have fallen off the bus after this.",
            (Evidence(text, from_ms=since, to_ms=window.newest.end_ms),), window.job_of(g),
        )  # fmt: skip

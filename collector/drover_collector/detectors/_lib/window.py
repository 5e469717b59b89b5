"""Give a detector what it judges: the newest buckets as arrays, the events since its last call, and the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.report_interval import (
    Bools,
    ReportInterval,
    Times,
    least_silence_ms,
)
from drover_collector.detectors.risk.model import Trouble
from drover_collector.fleet.buckets import (
    Bucket,
    Floats,
    Ints,
    LazyColumns,
)
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Event


@dataclass(frozen=True, slots=True)
class Window:
    """T buckets, oldest first; T may be 0 (a call for events only).

    Attributes:
        fresh: the newest bucket is new since the last call; False: only `events` are.
        events: new since the last call, in order of receipt.
        started_ms: start of this collector or replay; nothing counts as silent before it.
        inventory: what nodes have reported of their hardware and settings; None: not kept.
        troubles: node -> incident -> what was wrong in the last months; None: not kept.
        report_interval: how often each node reports; None: assume every bucket.
        maintained: node -> since when people work on it. A replay knows of none.
    """

    index: FleetIndex
    buckets: tuple[Bucket, ...]
    fresh: bool
    events: tuple[Event, ...]
    started_ms: int
    inventory: Inventory | None = None
    troubles: Mapping[str, Mapping[str, Trouble]] | None = None
    report_interval: ReportInterval | None = None
    maintained: Mapping[str, int] = field(default_factory=dict)

    @property
    def newest(self) -> Bucket:
        return self.buckets[-1]

    def gpu(self, metric: str) -> Floats:
        """Return one metric, float64 [T, G]; NaN where absent."""
        return _stack([b.gpu.get(metric) for b in self.buckets], self.index.gpu_count)

    def node(self, metric: str) -> Floats:
        """Return one metric, float64 [T, N]; NaN where absent."""
        return _stack([b.node.get(metric) for b in self.buckets], self.index.node_count)

    def gpu_rows(self) -> Ints:
        """Return the samples in each bucket, int32 [T, G]."""
        return np.array([b.gpu_rows for b in self.buckets], np.int32).reshape(len(self.buckets), self.index.gpu_count)

    def node_rows(self) -> Ints:
        """Return the samples in each bucket, int32 [T, N]."""
        return np.array([b.node_rows for b in self.buckets], np.int32).reshape(len(self.buckets), self.index.node_count)

    def spacing_ms(self, quiet: Bools) -> Times:
        """Return the time between two reports of each node, int64 [N], at least one bucket.

        Args:
            quiet: bool [N], nodes to compute it for; the others get the length of a bucket.
        """
        length_ms = self.newest.length_ms
        if self.report_interval is None:
            return np.full(self.index.node_count, length_ms, np.int64)
        return np.maximum(self.report_interval.spacing_ms(length_ms, quiet), length_ms)

    def silent_after_ms(self, quiet: Bools) -> Times:
        """Return the time without a report after which each node counts as silent, int64 [N]. `quiet`: as above."""
        length_ms = self.newest.length_ms
        if self.report_interval is None:
            return np.full(self.index.node_count, least_silence_ms(length_ms), np.int64)
        return self.report_interval.silent_after_ms(length_ms, quiet)

    def job_of(self, gpu: int) -> str | None:
        """Return the job that holds GPU index `gpu` at the end of the newest bucket."""
        if not self.buckets or self.newest.jobs[gpu] < 0:
            return None
        return self.newest.job_names[int(self.newest.jobs[gpu])]


def _stack(rows: list[Floats | None], width: int) -> Floats:
    nothing = np.full(width, np.nan)
    return np.array([nothing if row is None else row for row in rows], np.float64).reshape(len(rows), width)


def onset_ms(window: Window, first: int, values: Floats, usual: float) -> int:
    """Return when a change began that was first judged in bucket number `first`.

    It is the start of the earliest of the buckets right before `first` that are nearer to the newest than to `usual`.

    Args:
        values: float64 [T], one for each bucket of the window; NaN (unknown) is skipped.
    """
    middle, at = (usual + values[-1]) / 2, first
    for number in range(first - 1, -1, -1):
        if np.isnan(values[number]):
            continue
        if np.isnan(middle) or (values[number] > middle) != (values[-1] > middle):
            break
        at = number
    return window.buckets[at].start_ms


class Buckets:
    """The newest `limit` buckets in memory."""

    def __init__(self, limit: int) -> None:
        self._held: deque[Bucket] = deque(maxlen=limit)

    def append(self, bucket: Bucket) -> None:
        for columns in (self._held[-1].gpu, self._held[-1].node, self._held[-1].link) if self._held else ():
            if isinstance(columns, LazyColumns):
                columns.age()
        self._held.append(bucket)

    def all(self) -> tuple[Bucket, ...]:
        return tuple(self._held)

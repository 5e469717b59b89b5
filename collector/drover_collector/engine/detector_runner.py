"""Run the detectors over the newest buckets and events, and keep each detector's state.

Pure: no I/O; a clock is read for metrics only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors import Detector
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.report_interval import ReportInterval, Times, least_silence_ms
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.risk.model import Troubles
from drover_collector.engine.guessed_jobs import OF_NODES, USERS, GuessedJobs, doubted
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Member,
)

WINDOW_BUCKETS = 6  # in memory; a detector that needs more history keeps it in its state


@dataclass(slots=True)
class DetectorError:
    """A detector raised. It runs again on the next call."""

    count: int = 0
    latest: str = ""


@dataclass(slots=True)
class DetectorContext:
    """What all detectors read and the engine updates.

    Attributes:
        inventory: what each node reported about its hardware and settings.
        history: past failures of each node, for risk.
        errors: detector -> what it raised, and how often.
        seconds: detector -> time spent in it. Metrics only.
        maintained: node -> since when people work on it.
    """

    started_ms: int
    inventory: Inventory
    history: Troubles = field(default_factory=Troubles)
    errors: dict[str, DetectorError] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    maintained: Mapping[str, int] = field(default_factory=dict)


class DetectorRunner:
    """Buckets, detector states and reporting times of one fleet. One thread at a time, but for `late_ms`.

    Attributes:
        states: detector -> its state.
        report_interval: how often each node reports.
    """

    def __init__(self, index: FleetIndex, detectors: Sequence[Detector], context: DetectorContext) -> None:
        self.index, self.detectors, self.context = index, detectors, context
        self.states: dict[str, object] = {}
        self.buckets = Buckets(WINDOW_BUCKETS)
        self.report_interval = ReportInterval(index)
        self._guesses = GuessedJobs(index)
        self._filled: dict[bool, Bucket] = {}  # newest bucket with guesses, by whether nodes are jobs too
        self._node_reported_ms: npt.NDArray[np.int64] = np.zeros(index.node_count, np.int64)  # 0: never
        self._gpu_reported_ms: npt.NDArray[np.int64] = np.zeros(index.gpu_count, np.int64)
        self._newest_end_ms = self._newest_length_ms = 0

    def reset_copy(self) -> DetectorRunner:
        """Return a runner with the same detectors and context that has seen no data."""
        return DetectorRunner(self.index, self.detectors, self.context)

    def window(self, fresh: bool, events: tuple[Event, ...] = ()) -> Window:
        """Return what the detectors judge: the newest buckets and these events. `fresh`: a bucket is new."""
        context = self.context
        return Window(
            self.index, self.buckets.all(), fresh, events, context.started_ms, context.inventory, context.history,
            self.report_interval, context.maintained,
        )  # fmt: skip

    def add_bucket(self, bucket: Bucket) -> None:
        """Add the newest closed bucket. Buckets come in order of time."""
        self.buckets.append(bucket)
        self.report_interval.add_bucket(bucket)
        self._guesses.add_bucket(bucket)
        self._filled.clear()
        self._gpu_reported_ms[bucket.gpu_rows > 0] = bucket.end_ms
        per_node = np.bincount(self.index.gpu_node, bucket.gpu_rows, self.index.node_count)
        self._node_reported_ms[(bucket.node_rows > 0) | (per_node > 0)] = bucket.end_ms
        self._newest_end_ms, self._newest_length_ms = bucket.end_ms, bucket.length_ms

    def detect(self, window: Window, now_ms: int) -> list[Finding]:
        """Run every detector. One that raises is counted and skipped; the others still run."""
        found: list[Finding] = []
        if not self.index.node_count:  # a fleet that is still to be learned
            return found
        for event in window.events:
            if event.kind is EventKind.LIFECYCLE and event.code == "agent_started":
                self.report_interval.forget(event.node)
        for detector in self.detectors:
            judged = self._guessed(window, detector.name in OF_NODES) if detector.name in USERS else window
            began = time.perf_counter()
            try:
                findings, self.states[detector.name] = detector.detect(judged, self.states.get(detector.name), now_ms)
            except Exception as error:  # noqa: BLE001  # a defect in one detector must not stop the others; it is shown
                record = self.context.errors.setdefault(detector.name, DetectorError())
                record.count += 1
                record.latest = f"{type(error).__name__}: {error}"
                continue
            finally:
                self.context.seconds[detector.name] += time.perf_counter() - began
            found += [doubted(finding) for finding in findings]
        return found

    def _guessed(self, window: Window, of_nodes: bool) -> Window:
        """Return the window with guessed jobs where none are known."""
        if not window.buckets:
            return window
        if of_nodes not in self._filled:  # events come between two buckets
            self._filled[of_nodes] = self._guesses.filled(window.newest, of_nodes)
        filled = self._filled[of_nodes]
        return window if filled is window.newest else replace(window, buckets=(*window.buckets[:-1], filled))

    def coverage_ms(self, member: Member) -> int:
        """Return how much of the newest bucket a node or GPU speaks for, in ms: its length, or 0 if it was silent."""
        node, slot = member
        n, g = self.index.node_number.get(node), None if slot is None else self.index.gpu(node, slot)
        at = 0 if n is None else int(self._node_reported_ms[n] if g is None else self._gpu_reported_ms[g])
        if n is None or at >= self._newest_end_ms:
            return self._newest_length_ms if n is not None else 0
        # A node that reports every 30 s speaks for the empty buckets between two reports.
        quiet = self._node_reported_ms < self._newest_end_ms
        spacing_ms = int(self.report_interval.spacing_ms(self._newest_length_ms, quiet)[n])
        return self._newest_length_ms if self._newest_end_ms - at < spacing_ms else 0

    def late_ms(self, n: int) -> int:
        """Return how long node `n` may report nothing until it counts as silent. Any thread may ask."""
        return self.report_interval.late_ms(n, self._newest_length_ms)

    def reporting(self) -> tuple[Bools, Bools]:
        """Return which nodes [N] and GPUs [G] have reported lately. The health of the others is unknown."""
        after: Times | int = self._newest_end_ms - least_silence_ms(self._newest_length_ms)
        nodes, gpus = self._node_reported_ms > after, self._gpu_reported_ms > after
        if not (nodes.all() and gpus.all()) and self._newest_end_ms:
            quiet = ~nodes
            quiet[self.index.gpu_node[~gpus]] = True
            after = self._newest_end_ms - self.report_interval.silent_after_ms(self._newest_length_ms, quiet)
            nodes, gpus = self._node_reported_ms > after, self._gpu_reported_ms > after[self.index.gpu_node]
        return nodes & (self._node_reported_ms > 0), gpus & (self._gpu_reported_ms > 0)

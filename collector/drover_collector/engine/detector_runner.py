"""What the detectors know of a fleet: the newest buckets, who was heard when, and the state of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.detectors import Detector
from drover_collector.detectors._lib.inventory import Inventory
from drover_collector.detectors._lib.report_interval import ReportInterval, Times, least_silence_ms
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.risk.model import Troubles
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Member,
)

WINDOW_BUCKETS = 6  # kept in memory; what detectors must know for longer is in their state


@dataclass(slots=True)
class Trouble:
    """A detector that raised; it is asked again at the next call."""

    count: int = 0
    newest: str = ""


class DetectorRunner:
    """
    Args:
        inventory, past: what nodes told of themselves, and went through; others add to them.
    Attributes:
        states: detector -> what it keeps. troubles: detector -> what went wrong inside it, and how often.
        seconds: detector -> time spent in it, for metrics; nothing is judged by it.
        rhythm: how often each node reports.
    """

    def __init__(
        self,
        index: FleetIndex,
        detectors: Sequence[Detector],
        started_ms: int,
        inventory: Inventory,
        past: Troubles,
        troubles: dict[str, Trouble],
        seconds: dict[str, float],
    ) -> None:
        self.index, self.detectors, self.started_ms = index, detectors, started_ms
        self.inventory, self.past, self.troubles, self.seconds = inventory, past, troubles, seconds
        self.states: dict[str, object] = {}
        self.buckets = Buckets(WINDOW_BUCKETS)
        self.rhythm = ReportInterval(index)
        self._node_heard_ms: npt.NDArray[np.int64] = np.zeros(index.node_count, np.int64)
        self._gpu_heard_ms: npt.NDArray[np.int64] = np.zeros(index.gpu_count, np.int64)
        self._newest_end_ms = self._newest_length_ms = 0

    def afresh(self) -> DetectorRunner:
        """Those of a fleet of which nothing was heard yet."""
        return DetectorRunner(
            self.index, self.detectors, self.started_ms, self.inventory, self.past, self.troubles, self.seconds
        )

    def window(self, fresh: bool, events: tuple[Event, ...] = ()) -> Window:
        return Window(
            self.index, self.buckets.all(), fresh, events, self.started_ms, self.inventory, self.past, self.rhythm
        )

    def hear(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        self.rhythm.add_bucket(bucket)
        self._gpu_heard_ms[bucket.gpu_rows > 0] = bucket.end_ms
        per_node = np.bincount(self.index.gpu_node, bucket.gpu_rows, self.index.node_count)
        self._node_heard_ms[(bucket.node_rows > 0) | (per_node > 0)] = bucket.end_ms
        self._newest_end_ms, self._newest_length_ms = bucket.end_ms, bucket.length_ms

    def detect(self, window: Window, now_ms: int) -> list[Finding]:
        found: list[Finding] = []
        for event in window.events:
            if event.kind is EventKind.LIFECYCLE and event.code == "agent_started":
                self.rhythm.forget(event.node)
        for detector in self.detectors:
            began = time.perf_counter()
            try:
                findings, self.states[detector.name] = detector.detect(window, self.states.get(detector.name), now_ms)
            except Exception as error:  # noqa: BLE001  # one detector's bug must not blind the others; it is counted and shown
                trouble = self.troubles.setdefault(detector.name, Trouble())
                trouble.count += 1
                trouble.newest = f"{type(error).__name__}: {error}"
                continue
            finally:
                self.seconds[detector.name] += time.perf_counter() - began
            found += findings
        return found

    def heard_ms(self, member: Member) -> int:
        """How much time the newest bucket tells of a node or GPU; 0 when it was silent."""
        node, slot = member
        n, g = self.index.node_number.get(node), None if slot is None else self.index.gpu(node, slot)
        at = 0 if n is None else int(self._node_heard_ms[n] if g is None else self._gpu_heard_ms[g])
        if n is None or at >= self._newest_end_ms:
            return self._newest_length_ms if n is not None else 0
        # One that reports every 30 s speaks for the empty buckets between two reports.
        quiet = self._node_heard_ms < self._newest_end_ms
        spacing_ms = int(self.rhythm.spacing_ms(self._newest_length_ms, quiet)[n])
        return self._newest_length_ms if self._newest_end_ms - at < spacing_ms else 0

    def late_ms(self, n: int) -> int:
        """How long a node may give nothing until it counts as silent. Any thread may ask."""
        return self.rhythm.late_ms(n, self._newest_length_ms)

    def heard_lately(self) -> tuple[Bools, Bools]:
        """bool [N] and [G]: False where the health is unknown, since nothing came for too long."""
        after: Times | int = self._newest_end_ms - least_silence_ms(self._newest_length_ms)
        nodes, gpus = self._node_heard_ms > after, self._gpu_heard_ms > after
        if not (nodes.all() and gpus.all()) and self._newest_end_ms:
            quiet = ~nodes
            quiet[self.index.gpu_node[~gpus]] = True
            after = self._newest_end_ms - self.rhythm.silent_after_ms(self._newest_length_ms, quiet)
            nodes, gpus = self._node_heard_ms > after, self._gpu_heard_ms > after[self.index.gpu_node]
        return nodes & (self._node_heard_ms > 0), gpus & (self._gpu_heard_ms > 0)

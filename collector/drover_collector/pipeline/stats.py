"""Counters and troubles of detection, for Status and metrics."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from drover_collector.engine.detector_runner import DetectorError
from drover_collector.store import StoreError
from drover_core.times import iso

log = logging.getLogger(__name__)


class Rate:
    """Growth of a count per second over about the last ten seconds, from its values at each call."""

    def __init__(self) -> None:
        self._stood = deque([(time.monotonic(), 0)])  # the first call gets the rate since the start

    def per_s(self, count: int) -> float:
        now = time.monotonic()
        if now - self._stood[-1][0] >= 1:
            self._stood.append((now, count))
        while len(self._stood) > 2 and now - self._stood[1][0] >= 10:
            self._stood.popleft()
        since, before = self._stood[0]
        return max(0.0, (count - before) / (now - since)) if now > since else 0.0


@dataclass(slots=True)
class Ticks:
    """Counters of the detectors, for Status and metrics."""

    newest_end_ms: int = 0  # end of the newest bucket seen; 0: none
    seconds: float = 0.0  # of the newest tick, read and detect
    read_seconds: float = 0.0  # of all ticks: reading buckets
    judge_seconds: float = 0.0  # judging them, and storing the outcome
    roll_seconds: float = 0.0  # making rollups
    done: int = 0
    skipped: int = 0  # buckets left out: too far behind
    failures: int = 0  # calls into the engine that raised
    store_failures: int = 0
    lost_outcomes: int = 0  # that the store did not take
    lost_events: int = 0  # that were stored and not judged: too many at once
    troubles: dict[str, str] = field(default_factory=dict)  # by subject, each a sentence

    def failed(self, error: Exception, at_ms: int) -> None:
        """A call into the engine, or what is made of it, raised: a defect."""
        self.failures += 1
        log.error("detection failed", exc_info=error)
        self.troubles["engine"] = (
            f"Detection failed {self.failures} times, last at {iso(at_ms)} with"
            f" {type(error).__name__}; see the collector's log."
        )

    def store_failed(self, error: StoreError) -> None:
        self.store_failures += 1
        self.troubles["store"] = f"The store fails: {error}."
        log.warning("store: %s", error)

    def note_detector_errors(self, errors: Mapping[str, DetectorError]) -> None:
        for name, error in errors.items():
            text = (
                f"Detector {name} failed {error.count} times, last with {error.latest}; the others go on."
                " Please report it."
            )
            if self.troubles.get(f"detector {name}") != text:
                self.troubles[f"detector {name}"] = text
                log.error("%s", text)

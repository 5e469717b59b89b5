"""Days of the trend that are counted, kept in memory for all consoles that ask."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from drover_proto import fleet_pb2 as pb

MOST_DAYS = 35
TODAY_S = 300.0  # a day that may still change is counted again after this


@dataclass(frozen=True, slots=True)
class _Counted:
    at_s: float
    final: bool
    day: pb.TrendDay


class TrendCache:
    """Days that are counted, by their beginning. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._days: dict[int, _Counted] = {}

    def get(self, from_ms: int) -> pb.TrendDay | None:
        with self._lock:
            found = self._days.get(from_ms)
        return found.day if found and (found.final or time.monotonic() - found.at_s < TODAY_S) else None

    def put(self, day: pb.TrendDay, final: bool) -> None:
        with self._lock:
            self._days[day.from_ms] = _Counted(time.monotonic(), final, day)
            for old in sorted(self._days)[: -MOST_DAYS - 1]:
                del self._days[old]

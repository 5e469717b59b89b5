"""How far the rollups are: read from and written to the table `rollup_state`."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.samples.rows import LEVELS_MS
from drover_collector.store.sql import millis
from drover_collector.store.table_writer import WriteFence

KNOWN_S = 2.0  # how long a write of another collector may stay unseen
LEAP = 3_600 * 10**9  # of versions, which are nanoseconds


class RollupProgress:
    """How far the rollups are. Thread-safe.

    Attributes:
        upto_ms: buckets of 10 s before this are rolled up or marked.
        upto_5m: the same for buckets of 5 minutes.
        closing_ms: buckets before this have been read by the detectors.
        open_samples: samples in the 5 minutes that are not over.
        version: of the newest rows of rollups.
    """

    def __init__(self, clients: Clients, fence: WriteFence) -> None:
        self._clients = clients
        self._fence = fence
        self._lock = threading.Lock()
        self._state_version = 0  # of the newest state that was read or written
        self._known_at = 0.0  # monotonic
        self.upto_ms = 0
        self.upto_5m = 0
        self.closing_ms = 0
        self.open_samples = 0
        self.version = 0

    def load(self) -> None:
        """Read where the last active collector stopped."""
        self.read()
        if self.version > time.time_ns():  # the clock went back: rows written after the state may have higher ones
            self.version += LEAP

    @property
    def is_old(self) -> bool:
        """Whether another collector may have written since this was read."""
        return bool(self._known_at) and not self._clients.embedded and time.monotonic() - self._known_at >= KNOWN_S

    def next_version(self) -> int:
        """Return a version above all that were given before."""
        self.version = max(self.version + 1, time.time_ns())
        return self.version

    def write(self, upto_ms: int, upto_5m: int, open_samples: int) -> None:
        """Store how far the rollups are.

        Raises:
            StoreError: not stored, or this collector is not the active one.
        """
        version = self.next_version()
        self._clients.insert(
            "rollup_state",
            pa.table(
                {
                    "level": pa.array(list(LEVELS_MS)),
                    "upto": millis([upto_ms, upto_5m]),
                    "samples": pa.array([open_samples, 0], pa.uint64()),
                    "version": pa.array([version, version], pa.uint64()),
                }
            ),
            self._fence(),
        )
        with self._lock:
            self.upto_ms, self.upto_5m, self.open_samples = upto_ms, upto_5m, open_samples
            self._state_version = version

    def read(self) -> None:
        """Read what any collector has stored."""
        found = self._clients.rows(
            "SELECT level, toUnixTimestamp64Milli(upto) AS upto_ms, samples, version FROM rollup_state FINAL"
        )
        with self._lock:
            for row in found:
                if row["version"] < self._state_version:
                    continue  # read before this process wrote, or from a replica that lags
                self.version = max(self.version, row["version"])
                if row["level"] == "5m":
                    self.upto_5m = row["upto_ms"]
                else:
                    self.upto_ms, self.open_samples = row["upto_ms"], row["samples"]
            self._state_version = max([self._state_version, *(row["version"] for row in found)])
        self.closing_ms = max(self.closing_ms, self.upto_ms)
        self._known_at = time.monotonic()

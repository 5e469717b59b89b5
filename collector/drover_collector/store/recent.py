"""The GPU samples that this process wrote last, as they were inserted, so that the newest values of a small fleet take
no statement: an empty one costs the engine as much as all that VictoriaMetrics does for a thousand GPUs.

Nothing is copied: the tables that went into inserts are held a while longer. Whoever asks for more than is sure to be
held, as after a start and of a large fleet, asks the store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from drover_collector.store.records import Ids, Mask, Millis

Floats = npt.NDArray[np.float64]

HELD_BYTES = 16 << 20
TABLE_BYTES = 32 << 10  # what a table takes beside its values
HELD_S = 75.0  # a newest value is at most a minute old, and some seconds on its way
NEVER = 2**62


class Recent:
    """Thread-safe. Answers nothing before `begin`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: deque[tuple[float, int, int, pa.Table]] = deque()  # when it came, bytes, its newest moment in ms
        self._bytes = 0
        self._gone_ms = NEVER  # moments up to this may be in the store and not here

    def begin(self, newest_ms: int) -> None:
        """Nobody else writes; `newest_ms`: of what is stored already."""
        with self._lock:
            self._held.clear()
            self._bytes, self._gone_ms = 0, newest_ms

    def add(self, table: pa.Table, newest_ms: int) -> None:
        """What an insert wrote."""
        now_s = self._clock()
        with self._lock:
            if self._gone_ms == NEVER:
                return
            size = table.nbytes + TABLE_BYTES
            self._held.append((now_s, size, newest_ms, table))
            self._bytes += size
            while self._held and (self._bytes > HELD_BYTES or now_s - self._held[0][0] > HELD_S):
                _, size, oldest_ms, _ = self._held.popleft()
                self._bytes -= size
                self._gone_ms = max(self._gone_ms, oldest_ms)

    def unsure(self, newest_ms: int) -> None:
        """An insert failed: what it wrote may be in the store."""
        with self._lock:
            self._gone_ms = max(self._gone_ms, newest_ms)

    def newest(self, metric: str, known: Ids, span: tuple[int, int]) -> tuple[Ids, Floats, Millis] | None:
        """Of those of `known` (ascending) that have a row within [from, to) ms: the newest value there as it is stored
        (NaN: none) and its moment (0: none). None: not all of that time is held."""
        with self._lock:
            if span[0] <= self._gone_ms:
                return None
            tables = [table for _, _, newest_ms, table in self._held if newest_ms >= span[0]]
        there = np.zeros(len(known), np.bool_)
        found, newest = np.full(len(known), np.nan), np.zeros(len(known), np.int64)
        if not len(known):
            return known, found, newest
        # A moment that was told twice has the value that was told last, as in the store when it has merged them.
        for table in tables:
            _take(table, metric, known, span, (there, found, newest))
        return known[there], found[there], newest[there]


def _take(
    table: pa.Table,
    metric: str,
    known: Ids,
    span: tuple[int, int],
    into: tuple[Mask, Floats, Millis],
) -> None:
    there, found, newest = into
    ids, ts = table["entity_id"].to_numpy(), table["ts"].cast(pa.int64()).to_numpy()
    rows = np.flatnonzero((ts >= span[0]) & (ts < span[1]))
    at = np.minimum(np.searchsorted(known, ids[rows]), len(known) - 1)
    mine = known[at] == ids[rows]
    rows, at = rows[mine], at[mine]
    there[at] = True
    if metric not in table.column_names:
        return
    value = table[metric].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)[rows]
    told = ~np.isnan(value)
    at, value, moment = at[told], value[told], ts[rows[told]]
    np.maximum.at(newest, at, moment)
    last = moment == newest[at]
    found[at[last]] = value[last]

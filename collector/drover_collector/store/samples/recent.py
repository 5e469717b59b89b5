"""The samples that this process wrote last, in memory: what is read every few seconds needs no query.

That are the rows of the bucket that is over, for the detectors, and the newest values of a small fleet: an empty query
costs the engine as much as all that VictoriaMetrics does for a thousand GPUs. A caller that needs more than is held, as
after a start, asks the store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.store.records import Ids, Mask, Millis
from drover_collector.store.samples.packed import Packed
from drover_core.metrics.catalog import Scope

Floats = npt.NDArray[np.float64]
Span = tuple[int, int]  # ms, from and to

OPEN_BYTES = 384 << 20  # until their buckets are read: 25 s of 100,000 GPUs, 152 bytes a row
HELD_BYTES = 16 << 20  # after that; newest values are searched in no more than this
TABLE_BYTES = 32 << 10  # bytes that a table takes in addition to its values
HELD_S = 75.0  # a newest value is at most a minute old, plus some seconds on the way
AHEAD_MS = 120_000  # after the bucket that was read last: from a wrong clock, and not read soon
NEVER = 2**62


@dataclass(frozen=True, slots=True)
class _Insert:
    scope: Scope
    came_s: float
    size: int
    newest_ms: int
    rows: Packed


class Recent:
    """The newest inserts. Thread-safe. Has nothing before `begin`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: deque[_Insert] = deque()
        self._bytes = 0
        self._read_ms = 0  # buckets before this have been read
        self._gone_ms = dict.fromkeys(Scope, NEVER)  # samples up to this time may be in the store and not here
        self._far: dict[Scope, Span] = {}  # times far ahead, of samples that may be here or not

    def begin(self, newest_ms: Mapping[Scope, int]) -> None:
        """Start to hold inserts. Only this process writes; `newest_ms`: the newest sample that is stored already."""
        with self._lock:
            self._held.clear()
            self._bytes, self._far = 0, {}
            self._gone_ms = {scope: newest_ms.get(scope, 0) for scope in Scope}

    def add(self, scope: Scope, rows: Packed) -> None:
        """Hold what an insert wrote."""
        now_s, size = self._clock(), rows.nbytes + TABLE_BYTES
        with self._lock:
            if self._gone_ms[scope] == NEVER:
                return
            self._held.append(_Insert(scope, now_s, size, self._near(scope, rows.ts_ms), rows))
            self._bytes += size
            self._let_go(now_s)

    def unsure(self, scope: Scope, times_ms: Millis) -> None:
        """Note that an insert failed: its rows may be in the store."""
        with self._lock:
            self._gone_ms[scope] = max(self._gone_ms[scope], self._near(scope, times_ms))

    def read(self, upto_ms: int) -> None:
        """Note that buckets before this have been read, so their rows are dropped sooner."""
        with self._lock:
            self._read_ms = max(self._read_ms, upto_ms)
            self._let_go(self._clock())

    def rows(self, scope: Scope, span: Span) -> list[Packed] | None:
        """Return all rows of [from, to) ms, and others. None: not all of that time is held."""
        with self._lock:
            held = self._inserts(scope, span)
        return None if held is None else [insert.rows for insert in held]

    def newest(self, metric: str, known: Ids, span: Span) -> tuple[Ids, Floats, Millis] | None:
        """Return the newest stored value of each GPU of `known` (ascending) that has a row within [from, to) ms.

        Returns:
            (ids, values (NaN: none), their times (0: none)); None: not all of that time is held, or so much that a
            query costs less.
        """
        with self._lock:
            held = self._inserts(Scope.GPU, span)
        if held is None or sum(insert.size for insert in held) > HELD_BYTES:
            return None
        there = np.zeros(len(known), np.bool_)
        found, newest = np.full(len(known), np.nan), np.zeros(len(known), np.int64)
        if not len(known):
            return known, found, newest
        # Of two values of one time the last inserted counts, as in the store after a merge.
        for insert in held:
            _take(insert.rows, metric, known, span, (there, found, newest))
        return known[there], found[there], newest[there]

    def _inserts(self, scope: Scope, span: Span) -> list[_Insert] | None:
        low, high = self._far.get(scope, (NEVER, 0))
        if span[0] <= self._gone_ms[scope] or (low < span[1] and high >= span[0]):
            return None
        return [insert for insert in self._held if insert.scope is scope and insert.newest_ms >= span[0]]

    def _near(self, scope: Scope, times_ms: Millis) -> int:
        """Return the newest time, without those far ahead, which are noted."""
        newest_ms, far_ms = int(times_ms.max()), self._read_ms + AHEAD_MS
        if not self._read_ms or newest_ms < far_ms:
            return newest_ms
        far = times_ms >= far_ms
        low, high = self._far.get(scope, (NEVER, 0))
        self._far[scope] = (min(low, int(times_ms[far].min())), max(high, newest_ms))
        return int(times_ms[~far].max(initial=0))

    def _let_go(self, now_s: float) -> None:
        kept: deque[_Insert] = deque()
        for insert in self._held:
            few = self._bytes <= HELD_BYTES or (insert.newest_ms >= self._read_ms and self._bytes <= OPEN_BYTES)
            if few and now_s - insert.came_s <= HELD_S:
                kept.append(insert)
            else:
                self._bytes -= insert.size
                self._gone_ms[insert.scope] = max(self._gone_ms[insert.scope], insert.newest_ms)
        self._held = kept


def _take(
    inserted: Packed,
    metric: str,
    known: Ids,
    span: Span,
    into: tuple[Mask, Floats, Millis],
) -> None:
    there, found, newest = into
    ids, ts = inserted.entity_id, inserted.ts_ms
    rows = np.flatnonzero((ts >= span[0]) & (ts < span[1]))
    at = np.minimum(np.searchsorted(known, ids[rows]), len(known) - 1)
    mine = known[at] == ids[rows]
    rows, at = rows[mine], at[mine]
    there[at] = True
    if metric not in inserted.names:
        return
    stored, mask = inserted.get(metric)
    value = stored[rows].astype(np.float64)
    has_value = ~np.isnan(value) if mask is None else mask[rows] & ~np.isnan(value)
    at, value, time_ms = at[has_value], value[has_value], ts[rows[has_value]]
    np.maximum.at(newest, at, time_ms)
    last = time_ms == newest[at]
    found[at[last]] = value[last]

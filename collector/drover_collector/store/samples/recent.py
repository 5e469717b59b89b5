"""The samples that this process wrote last, as they were inserted, so that what is asked for every few seconds takes no
statement: the rows of the bucket that is over, for the detectors, and the newest values of a small fleet, for which an
empty statement costs the engine as much as all that VictoriaMetrics does for a thousand GPUs.

What went into inserts is held a while longer. Whoever asks for more than is sure to be held, as after a start, asks the
store.
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

OPEN_BYTES = 384 << 20  # while their buckets are to be read: 25 s of 100,000 GPUs, of 152 bytes a row
HELD_BYTES = 16 << 20  # after that, and all that newest values are looked for in
TABLE_BYTES = 32 << 10  # what a table takes beside its values
HELD_S = 75.0  # a newest value is at most a minute old, and some seconds on its way
AHEAD_MS = 120_000  # beyond the bucket that was read last: of a clock that is wrong, and not asked for soon
NEVER = 2**62


@dataclass(frozen=True, slots=True)
class _Insert:
    scope: Scope
    came_s: float
    size: int
    newest_ms: int
    rows: Packed


class Recent:
    """Thread-safe. Answers nothing before `begin`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: deque[_Insert] = deque()
        self._bytes = 0
        self._read_ms = 0  # buckets before this have been read
        self._gone_ms = dict.fromkeys(Scope, NEVER)  # moments up to this may be in the store and not here
        self._far: dict[Scope, Span] = {}  # likewise: from and to of moments far ahead, whether held or not

    def begin(self, newest_ms: Mapping[Scope, int]) -> None:
        """Nobody else writes; `newest_ms`: of what is stored already."""
        with self._lock:
            self._held.clear()
            self._bytes, self._far = 0, {}
            self._gone_ms = {scope: newest_ms.get(scope, 0) for scope in Scope}

    def add(self, scope: Scope, rows: Packed) -> None:
        """What an insert wrote."""
        now_s, size = self._clock(), rows.nbytes + TABLE_BYTES
        with self._lock:
            if self._gone_ms[scope] == NEVER:
                return
            self._held.append(_Insert(scope, now_s, size, self._near(scope, rows.ts_ms), rows))
            self._bytes += size
            self._let_go(now_s)

    def unsure(self, scope: Scope, moments: Millis) -> None:
        """An insert failed: what it wrote may be in the store."""
        with self._lock:
            self._gone_ms[scope] = max(self._gone_ms[scope], self._near(scope, moments))

    def read(self, upto_ms: int) -> None:
        """Buckets before this have been read; what they held is let go sooner."""
        with self._lock:
            self._read_ms = max(self._read_ms, upto_ms)
            self._let_go(self._clock())

    def rows(self, scope: Scope, span: Span) -> list[Packed] | None:
        """All rows of [from, to) ms, and others. None: not all of that time is held."""
        with self._lock:
            held = self._inserts(scope, span)
        return None if held is None else [insert.rows for insert in held]

    def newest(self, metric: str, known: Ids, span: Span) -> tuple[Ids, Floats, Millis] | None:
        """Of those GPUs of `known` (ascending) that have a row within [from, to) ms: the newest value there as it is
        stored (NaN: none) and its moment (0: none). None: not all of that time is held, or so much that a statement
        costs less."""
        with self._lock:
            held = self._inserts(Scope.GPU, span)
        if held is None or sum(insert.size for insert in held) > HELD_BYTES:
            return None
        there = np.zeros(len(known), np.bool_)
        found, newest = np.full(len(known), np.nan), np.zeros(len(known), np.int64)
        if not len(known):
            return known, found, newest
        # A moment that was told twice has the value that was told last, as in the store when it has merged them.
        for insert in held:
            _take(insert.rows, metric, known, span, (there, found, newest))
        return known[there], found[there], newest[there]

    def _inserts(self, scope: Scope, span: Span) -> list[_Insert] | None:
        low, high = self._far.get(scope, (NEVER, 0))
        if span[0] <= self._gone_ms[scope] or (low < span[1] and high >= span[0]):
            return None
        return [insert for insert in self._held if insert.scope is scope and insert.newest_ms >= span[0]]

    def _near(self, scope: Scope, moments: Millis) -> int:
        """The newest moment but those far ahead, which are noted."""
        newest_ms, far_ms = int(moments.max()), self._read_ms + AHEAD_MS
        if not self._read_ms or newest_ms < far_ms:
            return newest_ms
        far = moments >= far_ms
        low, high = self._far.get(scope, (NEVER, 0))
        self._far[scope] = (min(low, int(moments[far].min())), max(high, newest_ms))
        return int(moments[~far].max(initial=0))

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
    told = ~np.isnan(value) if mask is None else mask[rows] & ~np.isnan(value)
    at, value, moment = at[told], value[told], ts[rows[told]]
    np.maximum.at(newest, at, moment)
    last = moment == newest[at]
    found[at[last]] = value[last]

"""Dirty ranges: times to be rolled up, or rolled up again, because samples came late or a bucket was left out.

They are stored, so they outlast a crash.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import Ids, SampleBatch
from drover_collector.store.rollups.progress import RollupProgress
from drover_collector.store.samples.rows import LEVELS_MS, SampleRows
from drover_collector.store.samples.spans import Span
from drover_collector.store.schema.tables import samples_table
from drover_collector.store.sql import millis
from drover_core.metrics.catalog import Scope
from drover_core.times import iso

log = logging.getLogger(__name__)

CHUNK_MS = 300_000  # what is rolled up again at once: a 5 min bucket
NAMED_MAX = 2_000  # entities that the ranges of one chunk name; above, all entities are dirty
# With several collectors: the active one may miss rows that are stored this short before it reads their bucket,
# because clocks differ and a replica lags.
SLACK_MS = 2_000


@dataclass(slots=True)
class DirtyRange:
    """[from_ms, to_ms) of a scope. `entities`: sorted ids; None: all. Created at `at_ms`."""

    scope: Scope
    from_ms: int
    to_ms: int
    id: int
    entities: Ids | None
    at_ms: int
    written_to_ms: int
    begun: bool = False  # it is being rolled up, which may miss samples that are stored from now on

    def touches(self, span: Span) -> bool:
        return self.from_ms < span[1] and self.to_ms > span[0]


class DirtyRanges:
    """Thread-safe.

    Attributes:
        lag_ms: a bucket is read no sooner than this after its end.
        settle_ms: how long a range waits for more late rows: each piece of work on it reads 5 minutes.
        late_rows: rows that came after their bucket was read.
        all_loaded: all open ranges are in memory.
    """

    def __init__(self, clients: Clients, rows: SampleRows, progress: RollupProgress) -> None:
        self._clients = clients
        self._rows = rows
        self.progress = progress
        self._lock = threading.Lock()
        self._ranges: dict[int, DirtyRange] = {}
        self.lag_ms = 7_000
        self.settle_ms = 0
        self.late_rows = 0
        self.all_loaded = False

    def load(self) -> None:
        """Read the open ranges.

        Raises:
            StoreError
        """
        with self._lock:
            ours = dict(self._ranges)
        table = self._clients.arrow(
            "SELECT scope, id, entities, toUnixTimestamp64Milli(`from`) AS from_ms,"
            " toUnixTimestamp64Milli(to) AS to_ms, toUnixTimestamp64Milli(at) AS at_ms"
            " FROM rollup_marks FINAL WHERE done = 0"
        )
        found: dict[int, DirtyRange] = {}
        for row in table.to_pylist():
            ids = np.array(row["entities"], np.uint64) if row["entities"] else None
            dirty = DirtyRange(
                Scope(row["scope"]), row["from_ms"], row["to_ms"], row["id"], ids, row["at_ms"], row["to_ms"]
            )
            found[dirty.id] = ours.get(dirty.id, dirty)
        for dirty in found.values():
            if dirty.id not in ours:  # another collector stored rows of that time
                self._rows.note_stored(samples_table(dirty.scope), dirty.from_ms)
        with self._lock:
            added = {key: dirty for key, dirty in self._ranges.items() if key not in ours}  # since then
            self._ranges = found | added

    def mark_late(self, samples: SampleBatch, now_ms: int) -> None:
        """DirtyRange rows whose buckets may have been rolled up without them.

        Args:
            samples: rows that are stored; now_ms: taken after that.
        Raises:
            StoreError: not marked; the rows must not be acknowledged.
        """
        if len(samples.ts_ms):
            self._rows.note_stored(samples_table(samples.scope), int(samples.ts_ms.min()))
        before_ms = self.progress.closing_ms
        if not self._clients.embedded:
            read_ms = (now_ms - self.lag_ms + SLACK_MS) // BUCKET_MS * BUCKET_MS
            before_ms = max(before_ms, read_ms)
        late = samples.ts_ms < before_ms
        count = int(np.count_nonzero(late))
        if not count:
            return
        self.late_rows += count
        chunks = samples.ts_ms[late] // CHUNK_MS * CHUNK_MS
        ids = samples.entity_id[late]
        ranges = []
        for chunk_ms in np.unique(chunks).tolist():
            named, times = np.unique(ids[chunks == chunk_ms]), samples.ts_ms[late][chunks == chunk_ms]
            span = (chunk_ms, chunk_ms + CHUNK_MS)
            with self._lock:
                held = [m for m in self._ranges.values() if m.scope is samples.scope and m.touches(span)]
                everyone = [m for m in held if m.entities is None and not m.begun]
                covered = any(m.from_ms <= times.min() and times.max() < m.to_ms for m in everyone)
            if covered and self._clients.embedded:  # on a server another collector may have begun with it
                continue
            names = sum(len(m.entities) for m in held if m.entities is not None)
            everything = len(named) + names > NAMED_MAX
            ranges.append(self._new_range(samples.scope, *span, None if everything else named))
        self._insert(ranges)

    def mark_damaged(self, table: str, from_ms: int | None, to_ms: int | None) -> None:
        """Mark what lost rows of a table affect: of a rollup, the lost time; of the dirty ranges, everything.

        Args:
            from_ms, to_ms: the first and last time that may be lost; None: not known.
        Raises:
            StoreError: not marked.
        """
        if table == "rollup_marks":
            self._mark_all_lost()
            return
        scope, _, level = table.rpartition("_")
        if level not in LEVELS_MS:
            return
        low = self._rows.oldest_ms(samples_table(Scope(scope))) if from_ms is None else from_ms
        high = self.progress.upto_ms if to_ms is None else to_ms + 1
        if low is not None and low < high:
            self._insert([self._new_range(Scope(scope), chunk_of(low), chunk_of(high - 1) + CHUNK_MS, None)])

    def _mark_all_lost(self) -> None:
        """Write the ranges again that this process knows; if it has not loaded them yet, any rollup may lack rows."""
        if self.all_loaded:
            with self._lock:
                held = list(self._ranges.values())
            self._insert_rows([(dirty, dirty.written_to_ms, 0) for dirty in held])
            return
        lost = []
        for scope in Scope:
            oldest = self._rows.oldest_ms(samples_table(scope))
            if oldest is None or oldest >= self.progress.upto_ms:
                continue
            low = chunk_of(oldest)
            whole = (m for m in self.all() if m.scope is scope and m.entities is None)
            if not any(m.from_ms <= low and m.to_ms >= self.progress.upto_ms for m in whole):
                lost.append(self._new_range(scope, low, self.progress.upto_ms, None))
        if lost:
            log.warning(
                "store: rollups may lack samples that came late. All from %s on are computed again, the newest first;"
                " until then charts read samples", iso(min(dirty.from_ms for dirty in lost)),
            )  # fmt: skip
        self._insert(lost)

    def all(self) -> list[DirtyRange]:
        with self._lock:
            return list(self._ranges.values())

    def begin(self, chosen: Callable[[DirtyRange], bool]) -> list[DirtyRange]:
        """Return the ranges to work on. From now on they do not cover rows that are stored."""
        with self._lock:
            found = [dirty for dirty in self._ranges.values() if chosen(dirty)]
            for dirty in found:
                dirty.begun = True
        return found

    def within(self, scope: Scope, span: Span, ids: Ids | None = None) -> Iterator[Span]:
        """Yield the dirty spans within `span`: of some entities, or of any."""
        for dirty in self.all():
            if dirty.scope is scope and dirty.touches(span):
                if ids is not None and dirty.entities is not None and not np.isin(ids, dirty.entities).any():
                    continue
                yield max(dirty.from_ms, span[0]), min(dirty.to_ms, span[1])

    def lag(self, now_ms: int) -> tuple[int, int]:
        """Return how many ranges wait, and the ms since the oldest was created."""
        ranges = self.all()
        return len(ranges), max((now_ms - dirty.at_ms for dirty in ranges), default=0)

    def mark_all(self, from_ms: int, to_ms: int) -> None:
        self._insert([self._new_range(scope, from_ms, to_ms, None) for scope in Scope])

    def _new_range(self, scope: Scope, from_ms: int, to_ms: int, entities: Ids | None) -> DirtyRange:
        return DirtyRange(scope, from_ms, to_ms, secrets.randbits(63), entities, time.time_ns() // 1_000_000, to_ms)

    def shrink(self, dirty: DirtyRange) -> None:
        """Store a range's new end: a new row, and the old one as done."""
        self._insert_rows([(dirty, dirty.to_ms, 0), (dirty, dirty.written_to_ms, 1)])
        dirty.written_to_ms = dirty.to_ms

    def done(self, ranges: Iterable[DirtyRange]) -> None:
        """Store that these ranges are rolled up."""
        listed = list(ranges)
        self._insert_rows([(dirty, dirty.written_to_ms, 1) for dirty in listed])
        with self._lock:
            for dirty in listed:
                self._ranges.pop(dirty.id, None)

    def _insert(self, ranges: Sequence[DirtyRange]) -> None:
        self._insert_rows([(dirty, dirty.to_ms, 0) for dirty in ranges])
        with self._lock:
            self._ranges.update({dirty.id: dirty for dirty in ranges})

    def _insert_rows(self, rows: Sequence[tuple[DirtyRange, int, int]]) -> None:
        if not rows:
            return
        named = [[] if done or dirty.entities is None else dirty.entities.tolist() for dirty, _, done in rows]
        self._clients.insert(
            "rollup_marks",
            pa.table(
                {
                    "scope": pa.array([str(dirty.scope) for dirty, _, _ in rows]),
                    "from": millis([dirty.from_ms for dirty, _, _ in rows]),
                    "to": millis([to_ms for _, to_ms, _ in rows]),
                    "id": pa.array([dirty.id for dirty, _, _ in rows], pa.uint64()),
                    "entities": pa.array(named, pa.list_(pa.uint64())),
                    "at": millis([dirty.at_ms for dirty, _, _ in rows]),
                    "done": pa.array([done for _, _, done in rows], pa.uint8()),
                }
            ),
        )


def chunk_of(ts_ms: int) -> int:
    return ts_ms // CHUNK_MS * CHUNK_MS

"""Marks: what is to be rolled up, or rolled up again, because it came late or was left out. They outlast a crash."""

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

CHUNK_MS = 300_000  # what is marked, and rolled up again: a 5 min bucket
NAMED_MAX = 2_000  # entities that marks of one chunk name; beyond, all are marked
# Of a store with several collectors: rows this little before the active one reads their bucket may be missed by it,
# because clocks differ and a replica lags.
SLACK_MS = 2_000


@dataclass(slots=True)
class Mark:
    """[from_ms, to_ms) of a scope. `entities`: sorted ids; None: all."""

    scope: Scope
    from_ms: int
    to_ms: int
    id: int
    entities: Ids | None
    at_ms: int
    written_to_ms: int
    begun: bool = False  # what is stored from now on may be missed by those who work on it

    def touches(self, span: Span) -> bool:
        return self.from_ms < span[1] and self.to_ms > span[0]


class DirtyRanges:
    """Thread-safe.

    Attributes:
        lag_ms: after its end a bucket is read no sooner.
        settle_ms: so long a mark waits for more of its kind: each piece of work on it reads 5 minutes.
        late_rows: rows that came after their bucket was read.
        all_loaded: those that are open are in memory, all of them.
    """

    def __init__(self, clients: Clients, rows: SampleRows, progress: RollupProgress) -> None:
        self._clients = clients
        self._rows = rows
        self.progress = progress
        self._lock = threading.Lock()
        self._marks: dict[int, Mark] = {}
        self.lag_ms = 7_000
        self.settle_ms = 0
        self.late_rows = 0
        self.all_loaded = False

    def load(self) -> None:
        """What rests of them. Raises StoreError."""
        with self._lock:
            ours = dict(self._marks)
        table = self._clients.arrow(
            "SELECT scope, id, entities, toUnixTimestamp64Milli(`from`) AS from_ms,"
            " toUnixTimestamp64Milli(to) AS to_ms, toUnixTimestamp64Milli(at) AS at_ms"
            " FROM rollup_marks FINAL WHERE done = 0"
        )
        found: dict[int, Mark] = {}
        for row in table.to_pylist():
            ids = np.array(row["entities"], np.uint64) if row["entities"] else None
            mark = Mark(Scope(row["scope"]), row["from_ms"], row["to_ms"], row["id"], ids, row["at_ms"], row["to_ms"])
            found[mark.id] = ours.get(mark.id, mark)
        for mark in found.values():
            if mark.id not in ours:  # of another collector, which stored rows of that time
                self._rows.note_stored(samples_table(mark.scope), mark.from_ms)
        with self._lock:
            added = {key: mark for key, mark in self._marks.items() if key not in ours}  # meanwhile
            self._marks = found | added

    def mark_late(self, samples: SampleBatch, now_ms: int) -> None:
        """Note rows whose buckets may have been rolled up without them.

        Args:
            samples: rows that are stored; now_ms: taken after that.
        Raises:
            StoreError: not noted; the rows must not be acknowledged.
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
        marks = []
        for chunk_ms in np.unique(chunks).tolist():
            named, times = np.unique(ids[chunks == chunk_ms]), samples.ts_ms[late][chunks == chunk_ms]
            span = (chunk_ms, chunk_ms + CHUNK_MS)
            with self._lock:
                held = [m for m in self._marks.values() if m.scope is samples.scope and m.touches(span)]
                everyone = [m for m in held if m.entities is None and not m.begun]
                covered = any(m.from_ms <= times.min() and times.max() < m.to_ms for m in everyone)
            if covered and self._clients.embedded:  # elsewhere another collector may have begun with it
                continue
            names = sum(len(m.entities) for m in held if m.entities is not None)
            everything = len(named) + names > NAMED_MAX
            marks.append(self._mark(samples.scope, *span, None if everything else named))
        self._insert_marks(marks)

    def mark_damaged(self, table: str, from_ms: int | None, to_ms: int | None) -> None:
        """Rows of a table are gone. If it is a rollup, they are made again, as far as samples are there; if it is what
        tells of late rows, all is.

        Args:
            from_ms, to_ms: the first and the last that may be gone; None: not known.
        Raises:
            StoreError: not noted.
        """
        if table == "rollup_marks":
            self._mark_unknown()
            return
        scope, _, level = table.rpartition("_")
        if level not in LEVELS_MS:
            return
        low = self._rows.oldest_ms(samples_table(Scope(scope))) if from_ms is None else from_ms
        high = self.progress.upto_ms if to_ms is None else to_ms + 1
        if low is not None and low < high:
            self._insert_marks([self._mark(Scope(scope), chunk_of(low), chunk_of(high - 1) + CHUNK_MS, None)])

    def _mark_unknown(self) -> None:
        """Marks are gone: those that this process knows are written again; before it knew them, it may be any rollup
        that lacks what came late."""
        if self.all_loaded:
            with self._lock:
                held = list(self._marks.values())
            self._insert_rows([(mark, mark.written_to_ms, 0) for mark in held])
            return
        lost = []
        for scope in Scope:
            oldest = self._rows.oldest_ms(samples_table(scope))
            if oldest is None or oldest >= self.progress.upto_ms:
                continue
            low = chunk_of(oldest)
            whole = (m for m in self.all() if m.scope is scope and m.entities is None)
            if not any(m.from_ms <= low and m.to_ms >= self.progress.upto_ms for m in whole):
                lost.append(self._mark(scope, low, self.progress.upto_ms, None))
        if lost:
            log.warning(
                "store: what came late may lack in the rollups: all from %s on are made again, the newest first; charts"
                " read samples meanwhile", iso(min(mark.from_ms for mark in lost)),
            )  # fmt: skip
        self._insert_marks(lost)

    def all(self) -> list[Mark]:
        with self._lock:
            return list(self._marks.values())

    def begin(self, chosen: Callable[[Mark], bool]) -> list[Mark]:
        """Marks to work on, which cover nothing any more that is stored from now on."""
        with self._lock:
            found = [mark for mark in self._marks.values() if chosen(mark)]
            for mark in found:
                mark.begun = True
        return found

    def within(self, scope: Scope, span: Span, ids: Ids | None = None) -> Iterator[Span]:
        """Spans of marks within `span`: of some entities, or of any."""
        for mark in self.all():
            if mark.scope is scope and mark.touches(span):
                if ids is not None and mark.entities is not None and not np.isin(ids, mark.entities).any():
                    continue
                yield max(mark.from_ms, span[0]), min(mark.to_ms, span[1])

    def lag(self, now_ms: int) -> tuple[int, int]:
        """(marks that wait, ms since the oldest of them was made)."""
        marks = self.all()
        return len(marks), max((now_ms - mark.at_ms for mark in marks), default=0)

    def mark_all(self, from_ms: int, to_ms: int) -> None:
        self._insert_marks([self._mark(scope, from_ms, to_ms, None) for scope in Scope])

    def _mark(self, scope: Scope, from_ms: int, to_ms: int, entities: Ids | None) -> Mark:
        return Mark(scope, from_ms, to_ms, secrets.randbits(63), entities, time.time_ns() // 1_000_000, to_ms)

    def shrink(self, mark: Mark) -> None:
        """Write a mark's new end: with a new row, and the old one done."""
        self._insert_rows([(mark, mark.to_ms, 0), (mark, mark.written_to_ms, 1)])
        mark.written_to_ms = mark.to_ms

    def done(self, marks: Iterable[Mark]) -> None:
        """Durable: these are rolled up."""
        listed = list(marks)
        self._insert_rows([(mark, mark.written_to_ms, 1) for mark in listed])
        with self._lock:
            for mark in listed:
                self._marks.pop(mark.id, None)

    def _insert_marks(self, marks: Sequence[Mark]) -> None:
        self._insert_rows([(mark, mark.to_ms, 0) for mark in marks])
        with self._lock:
            self._marks.update({mark.id: mark for mark in marks})

    def _insert_rows(self, rows: Sequence[tuple[Mark, int, int]]) -> None:
        if not rows:
            return
        named = [[] if done or mark.entities is None else mark.entities.tolist() for mark, _, done in rows]
        self._clients.insert(
            "rollup_marks",
            pa.table(
                {
                    "scope": pa.array([str(mark.scope) for mark, _, _ in rows]),
                    "from": millis([mark.from_ms for mark, _, _ in rows]),
                    "to": millis([to_ms for _, to_ms, _ in rows]),
                    "id": pa.array([mark.id for mark, _, _ in rows], pa.uint64()),
                    "entities": pa.array(named, pa.list_(pa.uint64())),
                    "at": millis([mark.at_ms for mark, _, _ in rows]),
                    "done": pa.array([done for _, _, done in rows], pa.uint8()),
                }
            ),
        )


def chunk_of(ts_ms: int) -> int:
    return ts_ms // CHUNK_MS * CHUNK_MS

"""Rollups: one value per entity, metric and 10 s or 5 min, kept far longer than the samples themselves.

The active collector writes the rollups of each bucket that it reads for the detectors, and stores how far it came.
Times that it left out, because it was down or behind, and samples that came late are stored as dirty ranges, which it
rolls up in the background. So rollups become complete even if the collector is killed, and a resend changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import FleetLoad, Ids, Totals
from drover_collector.store.rollups.dirty_ranges import (
    CHUNK_MS,
    DirtyRange,
    DirtyRanges,
    chunk_of,
)
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.fold import Folded, fold_raw, join
from drover_collector.store.samples.recent import Recent
from drover_collector.store.samples.rows import PIECE_ROWS, RAW_MS, SampleRows, id_ranges
from drover_collector.store.samples.spans import Span, merged
from drover_collector.store.schema.tables import rollup_table, samples_table
from drover_collector.store.sql import millis, sql_time_range, sql_timestamp
from drover_collector.store.table_writer import WriteFence
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope

SLICE_BITS = 4  # samples are counted by the highest bits of their entity's id, so that few are counted again
SHRINK_MS = 3_600_000  # a long dirty range is stored again when so much of it is done
HELD_S = 30.0
COUNTED_ROWS = 20_000_000  # that one query counts
FAR_MS = 1 << 42  # the year 2109


class Rollups:
    """One thread at a time reads closing buckets; any thread may use the other methods."""

    def __init__(
        self,
        clients: Clients,
        fence: WriteFence,
        registry: EntityRegistry,
        rows: SampleRows,
        recent: Recent,
        dirty_ranges: DirtyRanges,
    ) -> None:
        self._clients = clients
        self._fence = fence
        self._registry = registry
        self._rows = rows
        self._recent = recent
        self._dirty = dirty_ranges
        self._progress = dirty_ranges.progress
        self._rolling = threading.RLock()
        self._late = threading.Lock()
        self._work: Iterator[None] | None = None
        self._unrolled: tuple[int, int, dict[Scope, Folded]] | None = None
        self._held: dict[Scope, list[Span]] = {}
        self._held_ranges: set[int] = set()
        self._held_at = -HELD_S  # monotonic: when `_held` was read, and `_held_ranges` before it

    def load(self) -> None:
        """Read where the last active collector stopped, and the dirty ranges."""
        self._progress.load()
        self._dirty.load()

    @property
    def version(self) -> int:
        """The version of the newest rows."""
        return self._progress.version

    def closing_folds(self, start_ms: int) -> dict[Scope, Folded]:
        """Return the values of all scopes in a bucket that is over, for the detectors; `roll_up` stores them."""
        with self._rolling:
            self._progress.closing_ms = max(
                self._progress.closing_ms, start_ms + BUCKET_MS
            )  # first: rows from here on are late
            version = self._progress.next_version()
            span = (start_ms, start_ms + BUCKET_MS)
            folds = {scope: self._closing_fold(scope, span) for scope in Scope if self._registry.count(scope)}
            self._recent.read(span[1])
            self._unrolled = (start_ms, version, folds)
            return folds

    def _closing_fold(self, scope: Scope, span: Span) -> Folded:
        """Return the values of one scope: from memory if all rows of the bucket are there, else from the store."""
        tables = self._recent.rows(scope, span)
        if tables is None:
            return self._rows.fold(scope, [span], BUCKET_MS)
        return fold_raw(tables, [metric.name for metric in of_scope(scope)], BUCKET_MS, span) if tables else join([])

    def roll_up(self) -> None:
        """Store the rollups of the newest `closing_folds`, and mark the time between it and the one before.

        Raises:
            StoreError: not stored; the next call marks that time.
        """
        with self._rolling:
            if self._unrolled is None:
                return
            start_ms, version, folds = self._unrolled
            self._unrolled = None
            end_ms = start_ms + BUCKET_MS
            if start_ms < self._progress.upto_ms:  # the clock went back
                self._dirty.mark_all(start_ms, end_ms)
                return
            self._mark_gap(start_ms)
            for scope, folded in folds.items():
                self._write(scope, "10s", folded, version)
            open_samples = self._progress.open_samples + sum(int(folded.present.sum()) for folded in folds.values())
            upto_5m = self._progress.upto_5m
            if end_ms % CHUNK_MS == 0:
                for scope in folds:
                    self._close(scope, end_ms - CHUNK_MS)
                open_samples, upto_5m = 0, end_ms
            self._progress.write(end_ms, upto_5m, open_samples)

    def roll_up_late(self, budget_s: float) -> bool:
        """Work on dirty ranges for about `budget_s`. Return whether more is to be done.

        Raises:
            StoreError: what was not done stays dirty.
        """
        until = time.monotonic() + budget_s
        with self._late:
            self._work = self._work or self._roll_late()
            try:
                for _ in self._work:
                    if time.monotonic() >= until:
                        return True
            except BaseException:
                self._work = None
                raise
            self._work = None
            return False

    def rolled_up(self, scope: Scope, level: str, span: Span, ids: Ids | None = None) -> tuple[int, list[Span]]:
        """Return the end of what the rollups hold, and the dirty spans in it, of some entities or all."""
        if self._progress.is_old:
            self._progress.read()
            self._dirty.load()
        upto = self._progress.upto_5m if level == "5m" else self._progress.upto_ms
        # Where samples are deleted the rollups are all there is.
        oldest_ms = self._rows.oldest_ms(samples_table(scope))
        since = span[1] if oldest_ms is None else max(span[0], oldest_ms)
        holes = merged(self._dirty.within(scope, (since, span[1]), ids)) if since < span[1] else []
        return min(upto, span[1]), holes

    def level_of(self, scope: Scope, span: Span) -> str | None:
        """Return the level that holds whole buckets of 10 s: their rollup if it is complete, else None: the samples."""
        upto_ms, holes = self.rolled_up(scope, "10s", span)
        return "10s" if upto_ms >= span[1] and not holes else None

    def fleet_load(self, from_ms: int, to_ms: int) -> FleetLoad:
        """Return how much the GPUs that report had to do in a time, by the rollups of 5 minutes."""
        util, power = BY_NAME["gpu_util_ratio"], BY_NAME["power_w"]
        row = self._clients.rows(
            f"SELECT avg(`{util.name}`) AS util, sum(`{power.name}`) AS power, uniqExact(ts) AS buckets,"
            f" uniqExactIf(ts, isNotNull(`{power.name}`)) AS powered"
            f" FROM {rollup_table(Scope.GPU, '5m')} FINAL WHERE {sql_time_range(from_ms, to_ms)}"
        )[0]
        return FleetLoad(
            row["buckets"], None if row["util"] is None else util.decode(row["util"]),
            power.decode(row["power"] / row["powered"]) if row["powered"] else None,
        )  # fmt: skip

    def sample_count(self) -> int:
        """Return how many values are stored; an estimate for hours that are dirty as a whole."""
        self.rolled_up(Scope.GPU, "10s", (0, 1))  # reads what other collectors rolled up
        self._rows.forget_parts()
        ranges = [dirty for dirty in self._dirty.all() if dirty.entities is None]
        closed_ms = self._progress.upto_5m
        whole = all(dirty.to_ms <= closed_ms for dirty in ranges)  # no gap since then
        found = self._progress.open_samples if whole else 0
        for scope in Scope:
            name = samples_table(scope)
            oldest = self._rows.oldest_ms(name)
            if oldest is None:
                continue
            spans = ((m.from_ms, m.to_ms) for m in ranges if m.scope is scope and m.to_ms > oldest)
            holes = merged((chunk_of(low), min(closed_ms, chunk_of(high + CHUNK_MS - 1))) for low, high in spans)
            outside = "".join(f" AND NOT ({sql_time_range(*hole)})" for hole in holes)
            found += self._sum(
                f"SELECT sum(samples) AS n FROM rollup_counts FINAL WHERE scope = '{scope}'"
                f" AND ts >= {sql_timestamp(chunk_of(oldest))}{outside}"
            )
            for low, high in [*holes, (self._progress.upto_ms if whole else closed_ms, FAR_MS)]:
                found += self._raw_samples(scope, low, high)
        return found

    def totals(self) -> Totals:
        """Return what the samples tables hold; a resend counts once."""
        size = self._clients.rows(f"SELECT sum(bytes_on_disk) AS n FROM {self._clients.parts}")
        times = [
            self._clients.rows(
                "SELECT count() AS n, toUnixTimestamp64Milli(min(ts)) AS oldest,"
                f" toUnixTimestamp64Milli(max(ts)) AS newest FROM {samples_table(scope)}"
            )[0]
            for scope in Scope
        ]
        held = [row for row in times if row["n"]]
        return Totals(
            self.sample_count(),
            int(size[0]["n"]),
            min((row["oldest"] for row in held), default=0),
            max((row["newest"] for row in held), default=0),
        )

    def _raw_samples(self, scope: Scope, low: int, high: int) -> int:
        """Return how many values are not counted yet: exact up to COUNTED_ROWS, else an estimate."""
        rows, name = 0.0, samples_table(scope)
        for count, first, last in self._rows.parts_of(name):
            rows += count * max(0, min(high, last + 1) - max(low, first)) / (last + 1 - first)
        if rows <= COUNTED_ROWS:
            return self._sum(f"SELECT sum(present) AS n FROM {name} FINAL WHERE {sql_time_range(low, high)}")
        minute = sql_time_range(min(high, last) - 60_000, min(high, last))
        found = self._clients.rows(f"SELECT ifNotFinite(avg(present), 0) AS n FROM {name} WHERE {minute}")
        return int(rows * found[0]["n"])

    def _sum(self, sql: str) -> int:
        return int(self._clients.rows(sql)[0]["n"] or 0)

    def _roll_late(self) -> Iterator[None]:
        """Yield after each bounded piece of work, the newest first, because that is what people look at."""
        if not self._clients.embedded:
            self._dirty.load()
        while (picked := self._pick()) is not None:
            scope, chunk_ms, ranges = picked
            whole = any(dirty.entities is None for dirty in ranges)
            ids = None if whole else np.unique(np.concatenate([m.entities for m in ranges if m.entities is not None]))
            counts = np.zeros(1 << SLICE_BITS, np.uint64)
            counted = True
            for ids_piece, entities in self._late_pieces(scope, chunk_ms, ids):
                found = self._again(scope, chunk_ms, ids_piece, entities)
                if found is None:
                    counted = False
                else:
                    np.add.at(counts, _slice(found.ids), found.present.astype(np.uint64))
                yield
            with self._rolling:
                if chunk_ms + CHUNK_MS <= self._progress.upto_5m:
                    if ids is None and counted:
                        self._write_counts(scope, chunk_ms, {n: int(count) for n, count in enumerate(counts)})
                    else:
                        some = range(1 << SLICE_BITS) if ids is None else np.unique(_slice(ids)).tolist()
                        self._write_counts(scope, chunk_ms, self._count(scope, chunk_ms, some))
                elif ids is None:
                    self._count_open()
            self._finish(ranges, chunk_ms)
            yield

    def _pick(self) -> tuple[Scope, int, list[DirtyRange]] | None:
        """Return the newest dirty 5 minutes that hold samples, and their ranges. Ranges without samples are done."""
        if time.monotonic() - self._held_at >= HELD_S:
            self._held_ranges = {dirty.id for dirty in self._dirty.begin(lambda _: True)}
            self._held = self._find_held()
            self._held_at = time.monotonic()
        newest: tuple[int, str] | None = None
        empty: list[DirtyRange] = []
        now_ms = time.time_ns() // 1_000_000
        for dirty in self._dirty.all():
            if 0 <= now_ms - dirty.at_ms < self._dirty.settle_ms:  # one in the future: the clock went back
                continue
            last = min(dirty.to_ms, self._progress.closing_ms) - 1
            if last < dirty.from_ms:
                continue
            if dirty.entities is None and dirty.id in self._held_ranges:
                ends = [min(last, high) for low, high in self._held.get(dirty.scope, []) if low <= last]
                last = max(ends, default=-1)
                if last < dirty.from_ms:
                    empty.append(dirty)
                    continue
            newest = max(newest or (-1, ""), (chunk_of(last), str(dirty.scope)))
        self._dirty.done(empty)
        if newest is None:
            return None
        chunk_ms, scope = newest[0], Scope(newest[1])
        span = (chunk_ms, chunk_ms + CHUNK_MS)
        return scope, chunk_ms, self._dirty.begin(lambda dirty: dirty.scope is scope and dirty.touches(span))

    def _find_held(self) -> dict[Scope, list[Span]]:
        """Return the spans of time with samples, by the parts that hold them; both ends are included."""
        found: dict[Scope, list[Span]] = {}
        rows = self._clients.rows(
            "SELECT table, toInt64(toUnixTimestamp(min_time)) AS low, toInt64(toUnixTimestamp(max_time)) AS high"
            f" FROM {self._clients.parts} WHERE endsWith(table, '_samples') AND rows > 0"
        )
        names = {samples_table(scope): scope for scope in Scope}
        for row in rows:
            found.setdefault(names[row["table"]], []).append((row["low"] * 1000, row["high"] * 1000 + 999))
        return {scope: merged(spans) for scope, spans in found.items()}

    def _late_pieces(self, scope: Scope, chunk_ms: int, ids: Ids | None) -> Iterator[tuple[Ids | None, Span | None]]:
        """Yield entities that have about PIECE_ROWS rows in 5 minutes: these ids, or a range of all ids."""
        if ids is None:
            found = self._sum(
                f"SELECT count() AS n FROM {samples_table(scope)} WHERE {sql_time_range(chunk_ms, chunk_ms + CHUNK_MS)}"
            )
            for entities in id_ranges(self._registry.ids(scope), -(-found // PIECE_ROWS)):
                yield None, entities
            return
        each = max(1, PIECE_ROWS * RAW_MS // CHUNK_MS)
        for at in range(0, len(ids), each):
            yield ids[at : at + each], None

    def _again(self, scope: Scope, chunk_ms: int, ids: Ids | None, entities: Span | None) -> Folded | None:
        """Roll up both levels of 5 minutes again. Return the 5 min values, None while the 5 minutes are not over."""
        with self._rolling:
            version = self._progress.next_version()
            span = (chunk_ms, min(chunk_ms + CHUNK_MS, self._progress.closing_ms))
            self._write(scope, "10s", self._rows.fold(scope, [span], BUCKET_MS, ids=ids, entities=entities), version)
            if chunk_ms + CHUNK_MS > self._progress.upto_5m:
                return None
            # From the 10 s table: some samples of the 5 minutes may be deleted already.
            longer = self._rows.fold(scope, [span], CHUNK_MS, level="10s", ids=ids, entities=entities)
            self._write(scope, "5m", longer, version)
            return longer

    def _finish(self, ranges: list[DirtyRange], chunk_ms: int) -> None:
        self._dirty.done([dirty for dirty in ranges if dirty.from_ms >= chunk_ms])
        for dirty in ranges:
            if dirty.from_ms < chunk_ms:
                dirty.to_ms = chunk_ms
                if dirty.written_to_ms - chunk_ms >= SHRINK_MS:
                    self._dirty.shrink(dirty)

    def _close(self, scope: Scope, chunk_ms: int) -> None:
        folded = self._rows.fold(scope, [(chunk_ms, chunk_ms + CHUNK_MS)], CHUNK_MS, level="10s")
        self._write(scope, "5m", folded, self._progress.next_version())
        counts = np.zeros(1 << SLICE_BITS, np.uint64)
        np.add.at(counts, _slice(folded.ids), folded.present.astype(np.uint64))
        self._write_counts(scope, chunk_ms, {n: int(count) for n, count in enumerate(counts)})

    def _count(self, scope: Scope, chunk_ms: int, slices: range | list[int]) -> dict[int, int]:
        """Return how many samples are in 5 minutes, by slice, from the rollup."""
        shift = 64 - SLICE_BITS
        which = " OR ".join(f"entity_id BETWEEN {n << shift} AND {((n + 1) << shift) - 1}" for n in slices)
        found = self._clients.rows(
            f"SELECT toUInt8(bitShiftRight(entity_id, {shift})) AS slice, toUInt64(sum(present)) AS n"
            f" FROM {rollup_table(scope, '5m')} FINAL WHERE ts = fromUnixTimestamp64Milli({chunk_ms}, 'UTC')"
            f" AND ({which}) GROUP BY slice"
        )
        return dict.fromkeys(slices, 0) | {row["slice"]: row["n"] for row in found}

    def _count_open(self) -> None:
        """Count the samples in the 5 minutes that are not over, after left-out buckets were rolled up."""
        when = sql_time_range(self._progress.upto_5m, self._progress.upto_ms)
        tables = [rollup_table(scope, "10s") for scope in Scope]
        open_samples = sum(self._sum(f"SELECT sum(present) AS n FROM {name} FINAL WHERE {when}") for name in tables)
        self._progress.write(self._progress.upto_ms, self._progress.upto_5m, open_samples)

    def _mark_gap(self, start_ms: int) -> None:
        """DirtyRange the time between the last bucket that was rolled up and this one."""
        if not self._progress.upto_ms:
            oldest = [spans[0][0] for spans in self._find_held().values() if spans]
            low = min([chunk_of(ms) for ms in oldest if ms < start_ms], default=start_ms)
        else:
            low = (
                self._progress.upto_ms
                if self._progress.upto_5m >= chunk_of(start_ms)
                else min(self._progress.upto_ms, self._progress.upto_5m)
            )
        if low < start_ms:
            self._dirty.mark_all(low, start_ms)
            self._held_at = -HELD_S
        if low < start_ms or not self._progress.upto_ms:
            self._progress.write(
                start_ms, chunk_of(start_ms), self._progress.open_samples if low >= chunk_of(start_ms) else 0
            )

    def _write(self, scope: Scope, level: str, folded: Folded, version: int) -> None:
        if not len(folded.ids):
            return
        columns = {
            "entity_id": pa.array(folded.ids),
            "ts": millis(folded.start_ms),
            "version": pa.array(np.full(len(folded.ids), version, np.uint64)),
            "rows": pa.array(folded.rows.astype(np.uint32)),
            "present": pa.array(folded.present.astype(np.uint32)),
        }
        for name, (stored, mask) in folded.columns.items():
            columns[name] = pa.array(np.ascontiguousarray(stored), mask=None if mask.all() else ~mask)
        self._clients.insert(rollup_table(scope, level), pa.table(columns), self._fence())

    def _write_counts(self, scope: Scope, chunk_ms: int, counts: dict[int, int]) -> None:
        version = self._progress.next_version()
        self._clients.insert(
            "rollup_counts",
            pa.table(
                {
                    "scope": pa.array([str(scope)] * len(counts)),
                    "ts": millis([chunk_ms] * len(counts)),
                    "slice": pa.array(list(counts), pa.uint8()),
                    "samples": pa.array(list(counts.values()), pa.uint64()),
                    "version": pa.array([version] * len(counts), pa.uint64()),
                }
            ),
            self._fence(),
        )


def _slice(ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return (ids >> np.uint64(64 - SLICE_BITS)).astype(np.intp)

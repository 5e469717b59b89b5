"""Fold rows into one value per entity, metric and bucket, as `buckets.aggregate` does, column by column in numpy.

SQL would take three times the CPU: the engine keeps a state per group and column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from drover_collector.store.records import Ids, Mask, Millis, Stored, storage_dtype
from drover_collector.store.samples.packed import Packed
from drover_collector.store.sql import numbers
from drover_core.metrics.catalog import BY_NAME, Kind

Int64s = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Order = Places | list[slice] | None  # positions, or runs of rows one behind the other; None: unchanged

NETWORK_MAX = 32  # rows of a group up to which a sorting network is faster than numpy's sort
RUN_ROWS = 32  # rows of a run on average from which copying runs is faster than sorting rows


@dataclass(frozen=True, slots=True)
class Folded:
    """Buckets of entities, by entity and time, B of them.

    Attributes:
        ids: uint64 [B]; start_ms: int64 [B].
        rows: int64 [B], times with raw rows; present: int64 [B], values in them; both are not set for charts.
        columns: metric -> (stored values [B], present bool [B]); no key if no row has the metric.
    """

    ids: Ids
    start_ms: Millis
    rows: Int64s
    present: Int64s
    columns: Mapping[str, tuple[Stored, Mask]]

    def where(self, kept: Mask) -> Folded:
        """Return only these buckets."""
        columns = {name: (stored[kept], mask[kept]) for name, (stored, mask) in self.columns.items()}
        return Folded(self.ids[kept], self.start_ms[kept], self.rows[kept], self.present[kept], columns)

    def of(self, ids: Ids) -> Folded:
        """Return only the buckets of these entities."""
        firsts = np.flatnonzero(np.append(True, self.ids[1:] != self.ids[:-1])[: len(self.ids)])
        wanted = np.isin(self.ids[firsts], ids)
        if wanted.all():
            return self
        edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
        at = np.append(firsts, len(self.ids))[edges].tolist()  # where wanted ones begin and end, in turns
        runs = [slice(low, high) for low, high in zip(at[::2], at[1::2], strict=True)] or [slice(0)]
        columns = {name: (_in(runs, stored), _in(runs, mask)) for name, (stored, mask) in self.columns.items()}
        rows, present = _in(runs, self.rows), _in(runs, self.present)
        return Folded(_in(runs, self.ids), _in(runs, self.start_ms), rows, present, columns)


def fold_raw(
    tables: Sequence[pa.Table | Packed],
    metrics: Sequence[str],
    length_ms: int,
    span: tuple[int, int] | None = None,
    *,
    counts: bool = True,
) -> Folded:
    """Fold raw rows, of entity_id, ts_ms, present and metrics, in any order and with resends, into buckets.

    Rows of one entity and time count as one.

    Args:
        span: [from, to) in ms; rows outside do not count. None: all count.
        counts: False: without the numbers of rows and values.
    """
    parts = [_Part(_Table(table, metrics) if isinstance(table, pa.Table) else table, span) for table in tables]
    ids, ts = _joined([part.ids for part in parts]), _joined([part.ts for part in parts])
    order = _order(ids, ts)
    ids, ts = _in(order, ids), _in(order, ts)
    same = (ids[1:] == ids[:-1]) & (ts[1:] == ts[:-1]) if isinstance(order, np.ndarray) else None
    if same is None or not same.any():
        there = _in(order, _joined([part.present for part in parts])).astype(np.int64) if counts else None
        tally = None if there is None else (np.ones(len(ids), np.int64), there)
        return _fold(ids, _starts(ts, length_ms), tally, _Columns(parts, metrics), order)
    firsts = np.flatnonzero(np.append(True, ~same))
    whole = _Coalesced(parts, metrics, order, firsts)
    present = sum((mask.astype(np.int64) for _, mask in whole.held.values()), np.zeros(len(firsts), np.int64))
    ids, ts = ids[firsts], ts[firsts]
    tally = (np.ones(len(ids), np.int64), present) if counts else None
    return _fold(ids, _starts(ts, length_ms), tally, whole, None)


def fold_rollup(table: pa.Table, metrics: Sequence[str], length_ms: int, *, counts: bool = True) -> Folded:
    """Fold rows of a rollup, which have `rows` and `version` too, into buckets. The newest version counts."""
    ids, ts = numbers(table, "entity_id"), numbers(table, "ts_ms")
    order = _order(ids, ts)
    ids, ts = _in(order, ids), _in(order, ts)
    if isinstance(order, np.ndarray) and (same := (ids[1:] == ids[:-1]) & (ts[1:] == ts[:-1])).any():
        newest = np.append(~same, True)
        order, ids, ts = _by_version(table, order, same)[newest], ids[newest], ts[newest]
    tally = None
    if counts:
        rows, present = (_in(order, _count(table, name)).astype(np.int64) for name in ("rows", "present"))
        tally = rows, present
    return _fold(ids, _starts(ts, length_ms), tally, _Columns([_Part(_Table(table, metrics), None)], metrics), order)


def fold_again(parts: Sequence[Folded], length_ms: int, *, counts: bool = True) -> Folded:
    """Fold buckets into longer ones. Each is in one part only; the order does not matter.

    Args:
        counts: False: without the numbers of rows and values.
    """
    whole = join([part for part in parts if len(part.ids)])
    order = _order(whole.ids, whole.start_ms)
    ids, starts = _in(order, whole.ids), _starts(_in(order, whole.start_ms), length_ms)
    tally = (_in(order, whole.rows), _in(order, whole.present)) if counts else None
    return _fold(ids, starts, tally, _Held(whole), order)


def join(parts: Sequence[Folded]) -> Folded:
    """Join parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part.ids) for part in parts]
    columns: dict[str, tuple[Stored, Mask]] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        held = [
            part.columns.get(name) or (np.zeros(count, storage_dtype(name)), np.zeros(count, np.bool_))
            for part, count in zip(parts, counts, strict=True)
        ]
        columns[name] = np.concatenate([stored for stored, _ in held]), np.concatenate([mask for _, mask in held])
    return Folded(
        np.concatenate([part.ids for part in parts] or [np.zeros(0, np.uint64)]),
        np.concatenate([part.start_ms for part in parts] or [np.zeros(0, np.int64)]),
        np.concatenate([part.rows for part in parts] or [np.zeros(0, np.int64)]),
        np.concatenate([part.present for part in parts] or [np.zeros(0, np.int64)]),
        columns,
    )


def units(metric: str, stored: Stored, mask: Mask) -> npt.NDArray[np.float64]:
    """Return values in catalog units, NaN where absent."""
    step = BY_NAME[metric].step
    decoded = stored.astype(np.float64)
    if step not in (0, 1):
        decoded *= step
    decoded[~mask] = np.nan
    return decoded


class _Table:
    """Rows of a table of the engine, with the same methods as `Packed`."""

    def __init__(self, table: pa.Table, metrics: Sequence[str]) -> None:
        self._table = table
        self.entity_id, self.ts_ms = numbers(table, "entity_id"), numbers(table, "ts_ms")
        self.present = _count(table, "present")
        there = set(table.column_names).intersection(metrics)
        self.names = frozenset(name for name in there if table[name].null_count < table.num_rows)

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        return _decode(self._table, name)


class _Part:
    """The rows of a table within a span; None: all."""

    def __init__(self, table: _Table | Packed, span: tuple[int, int] | None) -> None:
        self.names, self._table, self._rows = table.names, table, None
        if span is not None:
            there = (table.ts_ms >= span[0]) & (table.ts_ms < span[1])
            self._rows = None if there.all() else np.flatnonzero(there)
        self.ids, self.ts = self._some(table.entity_id), self._some(table.ts_ms)
        self.present = self._some(table.present)

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        """Return (stored values, present or None: all are)."""
        if name not in self.names:
            return np.zeros(len(self.ids), storage_dtype(name)), np.zeros(len(self.ids), np.bool_)
        stored, mask = self._table.get(name)
        return self._some(stored), None if mask is None else self._some(mask)

    def _some(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column if self._rows is None else column[self._rows]


class _Columns:
    """The columns of all parts, each read when it is needed."""

    def __init__(self, parts: Sequence[_Part], metrics: Sequence[str]) -> None:
        self._parts = parts
        self.names = [name for name in metrics if any(name in part.names for part in parts)]

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        """Return (stored values, present or None: all are)."""
        held = [part.get(name) for part in self._parts]
        stored = _joined([stored for stored, _ in held])
        if all(mask is None for _, mask in held):
            return stored, None
        return stored, _joined([np.ones(len(stored), np.bool_) if mask is None else mask for stored, mask in held])


class _Held:
    """The columns of buckets that are to be folded again."""

    def __init__(self, folded: Folded) -> None:
        self._columns = folded.columns
        self.names = [name for name, (_, mask) in folded.columns.items() if mask.any()]

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        return self._columns[name]


class _Coalesced:
    """Columns with one row for each time: of several values the highest counts, so the order does not matter."""

    def __init__(self, parts: Sequence[_Part], metrics: Sequence[str], order: Order, firsts: Places) -> None:
        self.held: dict[str, tuple[Stored, Mask]] = {}
        every = _Columns(parts, metrics)
        for name in every.names:
            stored, mask = every.get(name)
            if mask is None:
                mask = np.ones(len(stored), np.bool_)
            stored, mask = _in(order, stored), _in(order, mask)
            filled = np.where(mask, stored, _lowest(stored.dtype))
            self.held[name] = np.maximum.reduceat(filled, firsts), np.logical_or.reduceat(mask, firsts)
        self.names = list(self.held)

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        return self.held[name]


def _fold(
    ids: Ids,
    starts: Millis,
    tally: tuple[Int64s, Int64s] | None,
    columns: _Columns | _Coalesced | _Held,
    order: Order,
) -> Folded:
    """Fold rows that are in order of entity and time, each time once.

    Args:
        tally: rows and present of each; None: not counted. order: positions of the rows in `columns`; None: the same.
    """
    if not len(ids):
        return Folded(ids, starts, *(tally or _uncounted(0)), {})
    firsts = np.flatnonzero(np.append(True, (ids[1:] != ids[:-1]) | (starts[1:] != starts[:-1])))
    found: dict[str, tuple[Stored, Mask]] = {}
    if len(firsts) == len(ids):  # each row is a bucket already, as in a rollup
        for name in columns.names:
            stored, mask = columns.get(name)
            there = np.ones(len(ids), np.bool_) if mask is None else _in(order, mask)
            if there.any():
                found[name] = _in(order, stored), there
        return Folded(ids, starts, *(tally or _uncounted(len(ids))), found)
    groups = _Groups(firsts, len(ids), order)
    for name in columns.names:
        stored, mask = columns.get(name)
        if mask is not None and mask.all():
            mask = None
        pick = groups.lower_median if BY_NAME[name].kind is Kind.GAUGE else groups.last
        picked, there = pick(stored, mask)
        if mask is None or there.any():
            found[name] = picked, there
    counted = _uncounted(len(firsts)) if tally is None else (_sums(tally[0], firsts), _sums(tally[1], firsts))
    return Folded(ids[firsts], starts[firsts], *counted, found)


def _uncounted(buckets: int) -> tuple[Int64s, Int64s]:
    return np.zeros(buckets, np.int64), np.zeros(buckets, np.int64)


def _sums(counts: Int64s, firsts: Places) -> Int64s:
    sums: Int64s = np.add.reduceat(counts, firsts)
    return sums


class _Groups:
    """Groups of rows, one for each bucket.

    Args:
        firsts: where each group begins in `order`; rows: how many there are.
    """

    def __init__(self, firsts: Places, rows: int, order: Order) -> None:
        self._firsts, self._order = firsts, order
        self._places = order if isinstance(order, np.ndarray) else None
        self.counts = np.diff(np.append(firsts, rows))
        self.most = int(self.counts.max())
        self._even = bool((self.counts == self.most).all())
        self._lasts = firsts + self.counts - 1
        self._everyone = np.arange(len(firsts))

    def last(self, stored: Stored, mask: Mask | None) -> tuple[Stored, Mask]:
        if mask is None:
            lasts, there = self._lasts, np.ones(len(self._lasts), np.bool_)
        else:
            held = _in(self._order, mask)  # fewer than `mask` has where a bucket was computed twice
            newest = np.maximum.accumulate(np.where(held, np.arange(len(held)), -1))[self._lasts]
            lasts, there = np.maximum(newest, 0), newest >= self._firsts
        return (_in(self._order, stored)[lasts] if self._places is None else stored[self._places[lasts]]), there

    def lower_median(self, stored: Stored, mask: Mask | None) -> tuple[Stored, Mask]:
        counts = self.counts
        if mask is not None:
            stored = np.where(mask, stored, highest(stored.dtype))
            counts = np.add.reduceat(_in(self._order, mask), self._firsts, dtype=np.intp)
        if self._places is not None:
            ranked = stored[self._at]
        elif self._even:
            ranked = _in(self._order, stored).reshape(-1, self.most).T.copy()
        else:
            ranked = _in(self._order, stored)[self._at]
        if not self._even:
            ranked[self._beyond] = highest(stored.dtype)
        _rank(ranked)
        if mask is None and self._even:
            return ranked[(self.most - 1) // 2], np.ones(len(counts), np.bool_)
        return ranked[np.maximum(counts - 1, 0) // 2, self._everyone], counts > 0

    @cached_property
    def _beyond(self) -> Mask:
        """[most, groups]: whether a group has no such row."""
        beyond: Mask = np.arange(self.most)[:, None] >= self.counts
        return beyond

    @cached_property
    def _at(self) -> Places:
        """[most, groups]: where the k-th row of each group is; short groups repeat their last row."""
        steps = np.arange(self.most)[:, None]
        at: Places = self._firsts + (steps if self._even else np.minimum(steps, self.counts - 1))
        return at if self._places is None else self._places[at]


def _rank(ranked: Stored) -> None:
    """Sort each column of [K, groups] in place."""
    if len(ranked) > NETWORK_MAX:
        ranked.sort(axis=0)
        return
    spare = np.empty_like(ranked[0])
    for low, high in _network(len(ranked)):
        np.minimum(ranked[low], ranked[high], out=spare)
        np.maximum(ranked[low], ranked[high], out=ranked[high])
        ranked[low] = spare


@cache
def _network(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs to compare, in order: Batcher's odd-even merge sort."""
    pairs: list[tuple[int, int]] = []
    p = 1
    while p < count:
        k = p
        while k:
            for j in range(k % p, count - k, 2 * k):
                for i in range(min(k, count - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(pairs)


def _in(order: Order, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in an order."""
    if order is None:
        return column
    if isinstance(order, np.ndarray):
        return column[order]
    return column[order[0]] if len(order) == 1 else np.concatenate([column[run] for run in order])


def _starts(ts: Millis, length_ms: int) -> Millis:
    """Return the start of the bucket of each time."""
    return ts // length_ms * length_ms  # numpy is slower at %


def _order(ids: Ids, ts: Millis) -> Order:
    """Return the order by entity and time. Without Places, each time of an entity is there once.

    Rows come in runs of one entity and rising times, one for each part of the table. Where those are long and do not
    overlap, they only need to be put one behind the other.
    """
    breaks = np.flatnonzero((ids[1:] != ids[:-1]) | (ts[1:] <= ts[:-1])) + 1
    begins = np.append(0, breaks) if len(ids) else breaks
    firsts, oldest = ids[begins], ts[begins]
    if (firsts[1:] > firsts[:-1]).all():
        return None
    if len(begins) <= len(ids) // RUN_ROWS:
        ends = np.append(breaks, len(ids))
        by = np.lexsort((oldest, firsts))
        newest = ts[ends - 1]
        if ((firsts[by][1:] != firsts[by][:-1]) | (oldest[by][1:] > newest[by][:-1])).all():
            return [slice(low, high) for low, high in zip(begins[by].tolist(), ends[by].tolist(), strict=True)]
    return np.arange(len(ids)) if _sorted(ids, ts) else _sort(ids, ts)


def _sort(ids: Ids, ts: Millis) -> Places:
    """Return the order by entity and time. One key is sorted if ids differ in their high bits, as they mostly do."""
    start = int(ts.min())
    bits = np.uint64(int(ts.max() - start).bit_length())
    key = (ids >> bits << bits) | (ts - start).astype(np.uint64)
    order: Places = np.argsort(
        key, kind="stable"
    )  # rows come in sorted runs, one of each part, which a stable sort merges
    high = key[order] >> bits
    sorted_ids = ids[order]
    if (sorted_ids[1:] != sorted_ids[:-1])[high[1:] == high[:-1]].any():  # two entities have equal high bits
        return np.lexsort((ts, ids))
    return order


def _by_version(table: pa.Table, order: Places, same: Mask) -> Places:
    """Return the order with rows of one bucket sorted by version. Only these few, of recomputed buckets, are sorted.

    Args:
        same: for each row but the first, whether it is of the same bucket as the row before it.
    """
    shared = np.flatnonzero(np.append(same, False) | np.append(False, same))
    bucket = np.cumsum(np.append(True, ~same))[shared]
    rows = order[shared]
    result = order.copy()
    result[shared] = rows[np.lexsort((numbers(table, "version")[rows], bucket))]
    return result


def _count(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column of counts; zeros if it was not read."""
    return numbers(table, name) if name in table.column_names else np.zeros(table.num_rows, np.int64)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _sorted(ids: Ids, ts: Millis) -> bool:
    return bool(((ids[1:] > ids[:-1]) | ((ids[1:] == ids[:-1]) & (ts[1:] >= ts[:-1]))).all())


def _decode(table: pa.Table, name: str) -> tuple[Stored, Mask | None]:
    column = table[name]
    joined = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):  # an empty one
        joined = pa.array([], joined.type) if not joined.num_chunks else pa.concat_arrays(joined.chunks)
    validity, data = joined.buffers()
    dtype = storage_dtype(name)
    stored = np.frombuffer(data, dtype, len(joined) + joined.offset)[joined.offset :]
    if not joined.null_count:
        return stored, None
    bits = np.frombuffer(validity, np.uint8)
    mask = np.unpackbits(bits, count=len(joined) + joined.offset, bitorder="little")[joined.offset :].view(np.bool_)
    return stored, mask


def highest(dtype: np.dtype[np.generic]) -> float | int:
    """Return what no value of a type exceeds."""
    return np.inf if dtype.kind == "f" else int(np.iinfo(dtype.str).max)


def _lowest(dtype: np.dtype[np.generic]) -> float | int:
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype.str).min)

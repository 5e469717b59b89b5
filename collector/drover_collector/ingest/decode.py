"""Decode the blocks of many agents into columns: checked and joined with numpy, without a loop over rows.

A batch with an invalid row (size, entity, time) is refused as a whole, with its reason. A single value outside the
catalog's range becomes absent, and is counted: one broken sensor must not cost the values of fifty others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drover_collector.ingest.schema_registry import (
    SCOPE_CODES,
    SCOPE_NAMES,
    Layout,
    Refusal,
    SchemaRegistry,
)
from drover_collector.store.records import EntityRow, Mask, Millis, SampleBatch, Stored
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.times import iso
from drover_proto import telemetry_pb2 as pb

FUTURE_MS = 24 * 3_600_000  # a clock so far ahead is wrong; its samples would hide all correct ones
MAX_BLOCKS = 4096  # of one batch
MAX_PER_S = 50  # rows of one entity within a second; an agent sends one, and a resend another
SLICE_BYTES = 512 << 10  # of bodies that are turned into columns together: fits the processor's cache


@dataclass(slots=True)
class Decoded:
    """The result for some batches.

    Attributes:
        samples: one batch of columns for each scope; present: values in them.
        refused: number of the batch -> why it was refused. left_out: the same, where it was a part of the batch.
        out_of_range: (node, metric) -> impossible values.
        entities: rows of entities without stored samples; call `mark_stored` after they are written.
    """

    samples: list[SampleBatch] = field(default_factory=list)
    present: int = 0
    refused: dict[int, Refusal] = field(default_factory=dict)
    left_out: dict[int, Refusal] = field(default_factory=dict)
    out_of_range: dict[tuple[str, str], int] = field(default_factory=dict)
    entities: list[EntityRow] = field(default_factory=list)
    fresh: list[tuple[SchemaRegistry, int]] = field(default_factory=list)

    def mark_stored(self) -> None:
        """Note in their registries that `entities` are stored."""
        for registry, index in self.fresh:
            registry.has_samples[index] = True
            registry.rows.pop(index, None)


@dataclass(slots=True)
class _Group:
    """Blocks of one layout, and their rows as arrays once joined."""

    layout: Layout
    registries: list[SchemaRegistry] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    presences: list[bytes] = field(default_factory=list)


def decode(batches: Sequence[tuple[SchemaRegistry, pb.Batch]], oldest_ms: int, now_ms: int) -> Decoded:
    """Check and join the blocks of many batches.

    Args:
        batches: each with the registry of its time.
        oldest_ms: samples older than this are refused: they would be deleted at once.
    """
    result = Decoded()
    groups: dict[int, _Group] = {}
    for number, (registry, batch) in enumerate(batches):
        refusal = _collect(groups, number, registry, batch)
        if refusal is not None:
            result.refused[number] = refusal
    joined = [_Rows(group, oldest_ms, now_ms + FUTURE_MS) for group in groups.values()]
    for rows in joined:
        for number, refusal in rows.refusals():
            result.refused.setdefault(number, refusal)
        result.left_out |= rows.left_out_of()
    bad = np.fromiter(result.refused, np.int64, len(result.refused))
    by_scope: dict[Scope, list[SampleBatch]] = {}
    for rows in joined:
        if (np.isin(rows.batch, bad) | rows.left_out).all():
            continue
        part = rows.take(bad, result)
        by_scope.setdefault(part.scope, []).append(part)
    result.samples = [SampleBatch.join(parts) for parts in by_scope.values()]
    return result


def _collect(groups: dict[int, _Group], number: int, registry: SchemaRegistry, batch: pb.Batch) -> Refusal | None:
    if len(batch.blocks) > MAX_BLOCKS:
        return Refusal("bad size", f"a batch of {len(batch.blocks)} blocks; at most {MAX_BLOCKS} are allowed")
    checked: list[tuple[Layout, int, bytes, bytes]] = []
    for block in batch.blocks:
        layout = registry.layouts.get(block.schema)
        if layout is None:
            return Refusal("unknown schema", f"schema {block.schema} is not in the Hello")
        if isinstance(layout, Refusal):
            return layout
        rows, body, presence = block.rows, block.body, block.presence  # once: each access makes a copy
        record, bits = layout.dtype.itemsize, layout.presence_bytes
        if rows * record != len(body) or rows * bits != len(presence):
            return Refusal(
                "bad size",
                f"{rows} rows of schema {block.schema} take {record} + {bits} bytes each, but the block has"
                f" {len(body)} + {len(presence)}",
            )
        checked.append((layout, rows, body, presence))
    for layout, rows, body, presence in checked:
        if rows:
            group = groups.get(id(layout))  # equal layouts are usually one object
            if group is None:
                group = groups[id(layout)] = _Group(layout)
            group.registries.append(registry)
            group.batches.append(number)
            group.counts.append(rows)
            group.bodies.append(body)
            group.presences.append(presence)
    return None


class _Rows:
    """The joined rows of one layout, in columns."""

    def __init__(self, group: _Group, oldest_ms: int, newest_ms: int) -> None:
        self.layout = group.layout
        self.presence = np.frombuffer(b"".join(group.presences), np.uint8).reshape(-1, group.layout.presence_bytes)
        rows = len(self.presence)
        # Bits that are set in some row, and in all rows: most columns are present in all rows or in none.
        some = np.unpackbits(np.bitwise_or.reduce(self.presence, axis=0), bitorder="little")
        self.all = np.unpackbits(np.bitwise_and.reduce(self.presence, axis=0), bitorder="little")
        self.ts: Millis = np.empty(rows, np.int64)
        self.entity = np.empty(rows, np.uint16)
        dtype = group.layout.dtype
        self.columns: dict[int, Stored] = {
            number: np.empty(rows, dtype[f"c{number}"])
            for number, name in enumerate(group.layout.columns)
            if name is not None and some[number]
        }
        self._fill(group, dtype)
        self.batch = np.repeat(np.array(group.batches, np.int64), group.counts)
        # All registries joined; `at` is each row's index there.
        self.registries = list({id(r): r for r in group.registries}.values())
        sizes = np.array([len(r.ids) for r in self.registries], np.int64)
        self.starts = np.cumsum(sizes) - sizes
        number = {id(r): n for n, r in enumerate(self.registries)}
        self.of_row = np.repeat(np.array([number[id(r)] for r in group.registries], np.int64), group.counts)
        self.at = self.starts[self.of_row] + np.minimum(self.entity, sizes[self.of_row] - 1)
        scopes = np.concatenate([r.scopes for r in self.registries])
        named = self.entity < sizes[self.of_row]
        self.left_out = named & self._left_out()
        self.bad_entity = ~(named & (scopes[self.at] == SCOPE_CODES[self.layout.scope])) & ~self.left_out
        self.bad_time = (self.ts < oldest_ms) | (self.ts > newest_ms)
        self.dense = self._dense(int(sizes.sum()))

    def _fill(self, group: _Group, dtype: np.dtype[np.void]) -> None:
        row = 0
        for bodies in _slices(group.bodies):
            raw = np.frombuffer(b"".join(bodies), dtype)
            until = row + len(raw)
            self.ts[row:until] = raw["ts"]
            self.entity[row:until] = raw["entity"]
            for number, column in self.columns.items():
                column[row:until] = raw[f"c{number}"]
            row = until

    def _left_out(self) -> Mask:
        """Return bool [R]: rows of refused entities whose batch is taken without them."""
        lenient = [
            (start, list(registry.refused))
            for start, registry in zip(self.starts.tolist(), self.registries, strict=True)
            if registry.is_lenient and registry.refused
        ]
        if not lenient:
            return np.zeros(len(self.ts), np.bool_)
        places = np.array([start + index for start, refused in lenient for index in refused], np.int64)
        left_out: Mask = np.isin(self.at, places)
        return left_out

    def left_out_of(self) -> dict[int, Refusal]:
        """Return batch -> why rows of it are left out; the first one gives the reason."""
        rows = np.flatnonzero(self.left_out)
        _, first = np.unique(self.batch[rows], return_index=True)
        return {int(self.batch[row]): self._refusal_of_entity(int(row)) for row in rows[first]}

    def _dense(self, places: int) -> Mask:
        """Return bool [R]: rows of an entity with more than MAX_PER_S rows in that second."""
        dense = np.zeros(len(self.ts), np.bool_)
        right = ~(self.bad_time | self.bad_entity | self.left_out)
        if not right.any():
            return dense
        second = self.ts[right] // 1000
        second -= second.min()
        span = int(second.max()) + 1
        key = self.at[right] * span + second
        if places * span <= 4 * len(key) + 1_000_000:
            dense[right] = np.bincount(key)[key] > MAX_PER_S
        else:
            _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
            dense[right] = counts[inverse] > MAX_PER_S
        return dense

    def refusals(self) -> list[tuple[int, Refusal]]:
        """Return (batch, why) of batches with an invalid row; the first one gives the reason."""
        rows = np.flatnonzero(self.bad_entity | self.bad_time | self.dense)
        _, first = np.unique(self.batch[rows], return_index=True)
        return [(int(self.batch[row]), self._refusal(int(row))) for row in rows[first]]

    def _refusal(self, row: int) -> Refusal:
        if self.bad_entity[row]:
            return self._refusal_of_entity(row)
        if self.dense[row]:
            return Refusal("too dense", f"more than {MAX_PER_S} samples of one {self.layout.scope} within a second")
        ts = int(self.ts[row])
        when = iso(ts) if 0 <= ts < 10**14 else f"{ts} ms"
        text = f"a sample of {when} is older than the retention, or in the future; check the node's clock"
        return Refusal("bad time", text)

    def _refusal_of_entity(self, row: int) -> Refusal:
        index = int(self.entity[row])
        registry = self.registries[int(self.of_row[row])]
        if why := registry.refused.get(index):
            return Refusal(why.code, f"entity {index}: {why.text}")
        known = SCOPE_NAMES.get(int(registry.scopes[index])) if index < len(registry.scopes) else None
        text = f"is a {known}, not a {self.layout.scope}" if known else "is not in the Hello"
        return Refusal("bad entity", f"entity {index} {text}")

    def take(self, bad: npt.NDArray[np.int64], result: Decoded) -> SampleBatch:
        """Return the rows of batches that are not in `bad`, without those that are left out."""
        keep: npt.NDArray[np.intp] | slice = slice(None)
        if len(bad) or self.left_out.any():
            keep = np.flatnonzero(~(np.isin(self.batch, bad) | self.left_out))
        presence, at, ts, of_row = self.presence[keep], self.at[keep], self.ts[keep], self.of_row[keep]
        ids = np.concatenate([r.store_ids for r in self.registries])[at]
        self._note_fresh(at, ts, result)
        everywhere = np.ones(len(ts), np.bool_)
        columns: dict[str, tuple[Stored, Mask]] = {}
        for number, held in self.columns.items():
            name, stored = self.layout.columns[number], held[keep]
            assert name is not None
            mask = everywhere
            if not self.all[number]:
                mask = (presence[:, number // 8] >> (number % 8) & 1).astype(np.bool_)
                if not mask.any():
                    continue
            if not _in_range(name, stored):
                mask = self._drop_out_of_range(name, stored, mask, of_row, result)
            result.present += len(ts) if mask is everywhere else int(np.count_nonzero(mask))
            columns[name] = (stored, mask)
        return SampleBatch(self.layout.scope, ids, ts, columns)

    def _drop_out_of_range(
        self, name: str, stored: Stored, mask: Mask, of_row: npt.NDArray[np.int64], result: Decoded
    ) -> Mask:
        low, high = _bounds(name)
        wrong: Mask = mask & ~((stored >= low) & (stored <= high))  # type: ignore[operator]  # numbers of any width
        for owner, count in zip(*np.unique(of_row[wrong], return_counts=True), strict=True):
            key = self.registries[int(owner)].node, name
            result.out_of_range[key] = result.out_of_range.get(key, 0) + int(count)
        return mask & ~wrong

    def _note_fresh(self, at: npt.NDArray[np.int64], ts: Millis, result: Decoded) -> None:
        has_samples = np.concatenate([r.has_samples for r in self.registries])
        fresh = np.flatnonzero(~has_samples[at])
        if not len(fresh):
            return
        fresh = fresh[np.argsort(at[fresh], kind="stable")]
        places, first = np.unique(at[fresh], return_index=True)
        earliest = np.minimum.reduceat(ts[fresh], first)
        latest = np.maximum.reduceat(ts[fresh], first)
        owners = np.searchsorted(self.starts, places, side="right") - 1
        for place, owner, low, high in zip(
            places.tolist(), owners.tolist(), earliest.tolist(), latest.tolist(), strict=True
        ):
            registry = self.registries[owner]
            index = place - int(self.starts[owner])
            row = registry.rows.get(index)
            if row is None:
                continue  # the event loop has just given it to an agent
            result.entities.append(row.during(max(low, row.first_ms), max(high, row.first_ms)))
            result.fresh.append((registry, index))


def _slices(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    start = size = 0
    for number, body in enumerate(bodies):
        size += len(body)
        if size >= SLICE_BYTES:
            yield bodies[start : number + 1]
            start, size = number + 1, 0
    if start < len(bodies):
        yield bodies[start:]


@lru_cache(1024)
def _bounds(name: str) -> tuple[float, float]:
    """Return the catalog's range in the stored form; NaN is outside."""
    metric = BY_NAME[name]
    if not metric.step:
        return metric.low, metric.high
    return round(metric.low / metric.step), round(metric.high / metric.step)


def _in_range(name: str, stored: Stored) -> bool:
    """Return whether all numbers are in the catalog's range, absent ones included: then none is checked by itself."""
    low, high = _bounds(name)
    return bool(stored.min() >= low and stored.max() <= high)

"""From the blocks of many agents to columns: checked and joined with numpy, without a loop over rows.

A batch with rows that cannot be right (size, entity, time) is rejected whole, with its reason. A single value outside
the catalog's range becomes absent, and is counted: one broken sensor must not cost the other fifty.
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
    Dictionary,
    Layout,
    Refusal,
)
from drover_collector.store.records import EntityRow, Mask, Millis, SampleBatch, Stored
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.times import iso
from drover_proto import telemetry_pb2 as pb

FUTURE_MS = 24 * 3_600_000  # a clock that far ahead is wrong; its samples would hide all true ones
MAX_BLOCKS = 4096  # of one batch
MAX_PER_S = 50  # rows of one entity within a second; agents make one, and a resend another
SLICE_BYTES = 512 << 10  # of bodies that are turned into columns at once: what the processor's cache holds


@dataclass(slots=True)
class Decoded:
    """What came out of some batches.

    Attributes:
        samples: one batch of columns per scope; present: values in them.
        refused: number of the batch -> why all of it was refused.
        out_of_range: values that cannot be true: (node, metric) -> how many.
        entities: places that the store is not known to know; `placed` of their dictionaries is to be set once it does.
    """

    samples: list[SampleBatch] = field(default_factory=list)
    present: int = 0
    refused: dict[int, Refusal] = field(default_factory=dict)
    out_of_range: dict[tuple[str, str], int] = field(default_factory=dict)
    entities: list[EntityRow] = field(default_factory=list)
    _fresh: list[tuple[Dictionary, int]] = field(default_factory=list)

    def mark_placed(self) -> None:
        """The store knows `entities` now."""
        for dictionary, index in self._fresh:
            dictionary.placed[index] = True
            dictionary.rows.pop(index, None)


@dataclass(slots=True)
class _Group:
    """Blocks of one layout, and their rows as arrays once joined."""

    layout: Layout
    dictionaries: list[Dictionary] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    presences: list[bytes] = field(default_factory=list)


def decode(batches: Sequence[tuple[Dictionary, pb.Batch]], oldest_ms: int, now_ms: int) -> Decoded:
    """Check and join the blocks of many batches.

    Args:
        batches: each with the dictionary that held when it came.
        oldest_ms: samples older than this are refused (they would be deleted at once).
    """
    result = Decoded()
    groups: dict[int, _Group] = {}
    for number, (dictionary, batch) in enumerate(batches):
        refusal = _collect(groups, number, dictionary, batch)
        if refusal is not None:
            result.refused[number] = refusal
    joined = [_Rows(group, oldest_ms, now_ms + FUTURE_MS) for group in groups.values()]
    for rows in joined:
        for number, refusal in rows.refusals():
            result.refused.setdefault(number, refusal)
    bad = np.fromiter(result.refused, np.int64, len(result.refused))
    by_scope: dict[Scope, list[SampleBatch]] = {}
    for rows in joined:
        if np.isin(rows.batch, bad).all():
            continue
        part = rows.take(bad, result)
        by_scope.setdefault(part.scope, []).append(part)
    result.samples = [SampleBatch.join(parts) for parts in by_scope.values()]
    return result


def _collect(groups: dict[int, _Group], number: int, dictionary: Dictionary, batch: pb.Batch) -> Refusal | None:
    if len(batch.blocks) > MAX_BLOCKS:
        return Refusal("bad size", f"a batch of {len(batch.blocks)} blocks; up to {MAX_BLOCKS} are right")
    checked: list[tuple[Layout, int, bytes, bytes]] = []
    for block in batch.blocks:
        layout = dictionary.layouts.get(block.schema)
        if layout is None:
            return Refusal("unknown schema", f"schema {block.schema} was not told in Hello")
        if isinstance(layout, Refusal):
            return layout
        rows, body, presence = block.rows, block.body, block.presence  # once: each look at a field makes it anew
        record, bits = layout.dtype.itemsize, layout.presence_bytes
        if rows * record != len(body) or rows * bits != len(presence):
            return Refusal(
                "bad size",
                f"{rows} rows of schema {block.schema} take {record} + {bits} bytes each, but"
                f" {len(body)} + {len(presence)} came",
            )
        checked.append((layout, rows, body, presence))
    for layout, rows, body, presence in checked:
        if rows:
            group = groups.get(id(layout))  # equal ones are one object, as a rule
            if group is None:
                group = groups[id(layout)] = _Group(layout)
            group.dictionaries.append(dictionary)
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
        # Bits that are set in some row, and in all rows: most columns are always there or never.
        self.some = np.unpackbits(np.bitwise_or.reduce(self.presence, axis=0), bitorder="little")
        self.all = np.unpackbits(np.bitwise_and.reduce(self.presence, axis=0), bitorder="little")
        self.ts: Millis = np.empty(rows, np.int64)
        self.entity = np.empty(rows, np.uint16)
        dtype = group.layout.dtype
        self.columns: dict[int, Stored] = {
            number: np.empty(rows, dtype[f"c{number}"])
            for number, name in enumerate(group.layout.columns)
            if name is not None and self.some[number]
        }
        self._fill(group, dtype)
        self.batch = np.repeat(np.array(group.batches, np.int64), group.counts)
        # All dictionaries one behind the other; `at` is each row's place in that.
        self.dictionaries = list({id(d): d for d in group.dictionaries}.values())
        sizes = np.array([len(d.ids) for d in self.dictionaries], np.int64)
        self.starts = np.cumsum(sizes) - sizes
        number = {id(d): n for n, d in enumerate(self.dictionaries)}
        self.of_row = np.repeat(np.array([number[id(d)] for d in group.dictionaries], np.int64), group.counts)
        self.at = self.starts[self.of_row] + np.minimum(self.entity, sizes[self.of_row] - 1)
        scopes = np.concatenate([d.scopes for d in self.dictionaries])
        self.bad_entity = (self.entity >= sizes[self.of_row]) | (scopes[self.at] != SCOPE_CODES[self.layout.scope])
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

    def _dense(self, places: int) -> Mask:
        """bool [R]: rows of an entity that has too many of them within their second."""
        dense = np.zeros(len(self.ts), np.bool_)
        right = ~(self.bad_time | self.bad_entity)
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
        """(batch, why) of batches with a row that cannot be right, by its first such row."""
        rows = np.flatnonzero(self.bad_entity | self.bad_time | self.dense)
        _, first = np.unique(self.batch[rows], return_index=True)
        return [(int(self.batch[row]), self._refusal(int(row))) for row in rows[first]]

    def _refusal(self, row: int) -> Refusal:
        if self.bad_entity[row]:
            index = int(self.entity[row])
            dictionary = self.dictionaries[int(self.of_row[row])]
            if index in dictionary.refused:
                why = dictionary.refused[index]
                return Refusal("another node" if "another node" in why else "bad entity", f"entity {index}: {why}")
            known = SCOPE_NAMES.get(int(dictionary.scopes[index])) if index < len(dictionary.scopes) else None
            told = f"is a {known}, not a {self.layout.scope}" if known else "was not told in Hello"
            return Refusal("bad entity", f"entity {index} {told}")
        if self.dense[row]:
            return Refusal("too dense", f"more than {MAX_PER_S} samples of one {self.layout.scope} within a second")
        ts = int(self.ts[row])
        when = iso(ts) if 0 <= ts < 10**14 else f"{ts} ms"
        return Refusal(
            "bad time", f"a sample of {when} is older than what is kept, or from the future; is the clock right?"
        )

    def take(self, bad: npt.NDArray[np.int64], result: Decoded) -> SampleBatch:
        """The rows of batches that are not in `bad`."""
        keep: npt.NDArray[np.intp] | slice = slice(None)
        if len(bad):
            keep = np.flatnonzero(~np.isin(self.batch, bad))
        presence, at, ts, of_row = self.presence[keep], self.at[keep], self.ts[keep], self.of_row[keep]
        ids = np.concatenate([d.ids for d in self.dictionaries])[at]
        self._note_places(at, ts, result)
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
            if not _possible(name, stored):
                mask = self._without_impossible(name, stored, mask, of_row, result)
            result.present += len(ts) if mask is everywhere else int(np.count_nonzero(mask))
            columns[name] = (stored, mask)
        return SampleBatch(self.layout.scope, ids, ts, columns)

    def _without_impossible(
        self, name: str, stored: Stored, mask: Mask, of_row: npt.NDArray[np.int64], result: Decoded
    ) -> Mask:
        low, high = _bounds(name)
        wrong: Mask = mask & ~((stored >= low) & (stored <= high))  # type: ignore[operator]  # numbers of any width
        for owner, count in zip(*np.unique(of_row[wrong], return_counts=True), strict=True):
            key = self.dictionaries[int(owner)].node, name
            result.out_of_range[key] = result.out_of_range.get(key, 0) + int(count)
        return mask & ~wrong

    def _note_places(self, at: npt.NDArray[np.int64], ts: Millis, result: Decoded) -> None:
        placed = np.concatenate([d.placed for d in self.dictionaries])
        fresh = np.flatnonzero(~placed[at])
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
            dictionary = self.dictionaries[owner]
            index = place - int(self.starts[owner])
            result.entities.append(dictionary.rows[index].during(low, high))
            result._fresh.append((dictionary, index))


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
    """The catalog's range in the stored form; NaN is outside."""
    metric = BY_NAME[name]
    if not metric.step:
        return metric.low, metric.high
    return round(metric.low / metric.step), round(metric.high / metric.step)


def _possible(name: str, stored: Stored) -> bool:
    """Whether all numbers are within the catalog's range, absent ones too: then none must be looked at by itself."""
    low, high = _bounds(name)
    return bool(stored.min() >= low and stored.max() <= high)

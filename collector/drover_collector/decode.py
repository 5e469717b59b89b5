"""From the blocks of many agents to columns: checked and joined with numpy, without a loop over rows.

A batch with rows that cannot be right (size, entity, time) is rejected whole, with its reason. A single value outside
the catalog's range becomes absent, and is counted: one broken sensor must not cost the other fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_collector.store.records import EntityRow, Ids, Mask, Millis, SampleBatch, Stored, entity_id
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import HEADER, record_struct
from drover_proto.catalog import BY_ID, BY_NAME, STORAGE, Metric, Scope
from drover_proto.times import iso

FUTURE_MS = 24 * 3_600_000  # a clock that far ahead is wrong; its samples would hide all true ones
MAX_COLUMNS = 4096
MAX_ENTITIES = 65_536  # indexes are uint16
MAX_SCHEMAS = 256
MAX_BLOCKS = 4096  # of one batch
MAX_KEY = 256

_SCOPES = {pb.GPU: Scope.GPU, pb.NODE: Scope.NODE, pb.LINK: Scope.LINK, pb.WORKLOAD: Scope.WORKLOAD}
_CODES = {scope: number for number, scope in enumerate(Scope, 1)}  # 0: not known


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was not taken. `code` is one of a few words, to count by; `text` is a sentence for the operator."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows of a schema lie. Equal layouts of different agents are read together."""

    scope: Scope
    columns: tuple[str | None, ...]  # catalog names; None: not known here, skipped
    types: str

    @property
    def dtype(self) -> np.dtype[np.void]:
        names = ["ts", "entity", *(f"c{i}" for i in range(len(self.types)))]
        return np.dtype([(name, f"<{code}") for name, code in zip(names, HEADER + self.types, strict=True)])

    @property
    def presence_bytes(self) -> int:
        return (len(self.types) + 7) // 8


@dataclass(slots=True)
class Dictionary:
    """What the numbers in an agent's batches mean, from its Hello.

    Attributes:
        layouts: schema id -> its layout, or why its batches are refused.
        ids, scopes, placed: by entity index: id (0: not known), scope code (0: not known), whether the store knows
            that it is here.
        rows: entity index -> what the store is to know of it; refused: index -> why.
        ignored: columns that this collector does not know.
    """

    node: str
    layouts: dict[int, Layout | Refusal]
    ids: Ids
    scopes: npt.NDArray[np.uint8]
    placed: Mask
    rows: dict[int, EntityRow]
    refused: dict[int, str]
    ignored: list[str]


def read_hello(hello: pb.Hello) -> Dictionary:
    """The dictionary of a Hello. Entities and schemas that cannot be are marked, and cost only their own batches."""
    size = 1 + max((e.index for e in hello.entities if e.index < MAX_ENTITIES), default=0)
    found = Dictionary(
        hello.node, {}, np.zeros(size, np.uint64), np.zeros(size, np.uint8), np.zeros(size, np.bool_), {}, {}, []
    )
    for entity in hello.entities[:MAX_ENTITIES]:
        _take_entity(found, entity)
    for schema in hello.schemas[:MAX_SCHEMAS]:
        found.layouts[schema.id] = _layout(schema, found.ignored)
    return found


def _take_entity(found: Dictionary, entity: pb.Entity) -> None:
    if entity.index >= MAX_ENTITIES:
        return  # no row can name it
    scope = _SCOPES.get(entity.scope)
    own = {Scope.NODE: entity.key == found.node, Scope.GPU: True, None: True}
    if not own.get(scope, entity.key.startswith(f"{found.node}/")):
        found.refused[entity.index] = f"{entity.key!r} belongs to another node than {found.node!r}"
    elif scope is None:
        found.refused[entity.index] = f"{entity.key!r} has a scope that this collector does not know"
    elif not 0 < len(entity.key) <= MAX_KEY:
        found.refused[entity.index] = f"its key has {len(entity.key)} characters; 1 to {MAX_KEY} are right"
    elif max(map(len, (entity.uuid, entity.serial, entity.pci, entity.model, entity.mig, entity.link))) > MAX_KEY:
        found.refused[entity.index] = f"a text of {entity.key!r} has more than {MAX_KEY} characters"
    elif scope is Scope.GPU and entity.gpu > 255:
        found.refused[entity.index] = f"GPU {entity.key!r} is in slot {entity.gpu}; 0 to 255 are right"
    else:
        key = f"{entity.key}/{entity.mig}" if entity.mig else entity.key
        found.ids[entity.index] = entity_id(scope, key)
        found.scopes[entity.index] = _CODES[scope]
        link = entity.link or (entity.key.partition("/")[2] if scope in (Scope.LINK, Scope.WORKLOAD) else "")
        found.rows[entity.index] = EntityRow(
            entity_id=int(found.ids[entity.index]),
            scope=scope,
            key=entity.key,
            node=found.node,
            gpu=entity.gpu if scope is Scope.GPU else None,
            uuid=entity.uuid,
            serial=entity.serial,
            pci=entity.pci,
            model=entity.model,
            link=link,
            mig=entity.mig,
        )


def _layout(schema: pb.Schema, ignored: list[str]) -> Layout | Refusal:
    where = f"schema {schema.id}"
    scope = _SCOPES.get(schema.scope)
    if scope is None:
        return Refusal("bad schema", f"{where} has a scope that this collector does not know")
    if not 0 < len(schema.columns) <= MAX_COLUMNS:
        return Refusal("bad schema", f"{where} has {len(schema.columns)} columns; 1 to {MAX_COLUMNS} are right")
    names: list[str | None] = []
    for column in schema.columns:
        if column.type not in STORAGE:
            return Refusal("bad schema", f"{where}: {column.name!r} has type {column.type!r}, which is none")
        metric = BY_ID.get(column.metric)
        if metric is None:
            ignored.append(column.name[:MAX_KEY] or f"metric {column.metric}")
            names.append(None)
            continue
        if metric.scope is not scope or metric.type != column.type:
            return Refusal(
                "wrong type",
                f"{where}: metric {metric.id} ({metric.name}) came as {scope} {column.type!r}, but is"
                f" {metric.scope} {metric.type!r} here; agent and collector have different catalogs: update the older",
            )
        if metric.name in names:
            return Refusal("bad schema", f"{where} has {metric.name} twice")
        names.append(metric.name)
    return Layout(scope, tuple(names), "".join(column.type for column in schema.columns))


@dataclass(slots=True)
class Decoded:
    """What came out of some batches.

    Attributes:
        samples: one batch of columns per scope.
        refused: number of the batch -> why all of it was refused.
        out_of_range: values that cannot be true: (node, metric) -> how many.
        entities: places that the store is not known to know; `placed` of their dictionaries is to be set once it does.
    """

    samples: list[SampleBatch] = field(default_factory=list)
    refused: dict[int, Refusal] = field(default_factory=dict)
    out_of_range: dict[tuple[str, str], int] = field(default_factory=dict)
    entities: list[EntityRow] = field(default_factory=list)
    _fresh: list[tuple[Dictionary, int]] = field(default_factory=list)

    def mark_placed(self) -> None:
        """The store knows `entities` now."""
        for dictionary, index in self._fresh:
            dictionary.placed[index] = True


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
    groups: dict[Layout, _Group] = {}
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
        part = rows.take(bad, result)
        if part.rows:
            by_scope.setdefault(part.scope, []).append(part)
    result.samples = [SampleBatch.join(parts) for parts in by_scope.values()]
    return result


def _collect(groups: dict[Layout, _Group], number: int, dictionary: Dictionary, batch: pb.Batch) -> Refusal | None:
    if len(batch.blocks) > MAX_BLOCKS:
        return Refusal("bad size", f"a batch of {len(batch.blocks)} blocks; up to {MAX_BLOCKS} are right")
    checked: list[tuple[Layout, pb.Block]] = []
    for block in batch.blocks:
        layout = dictionary.layouts.get(block.schema)
        if layout is None:
            return Refusal("unknown schema", f"schema {block.schema} was not told in Hello")
        if isinstance(layout, Refusal):
            return layout
        record, presence = record_struct(layout.types).size, layout.presence_bytes
        if block.rows * record != len(block.body) or block.rows * presence != len(block.presence):
            return Refusal(
                "bad size",
                f"{block.rows} rows of schema {block.schema} take {record} + {presence} bytes each, but"
                f" {len(block.body)} + {len(block.presence)} came",
            )
        checked.append((layout, block))
    for layout, block in checked:
        if block.rows:
            group = groups.setdefault(layout, _Group(layout))
            group.dictionaries.append(dictionary)
            group.batches.append(number)
            group.counts.append(block.rows)
            group.bodies.append(block.body)
            group.presences.append(block.presence)
    return None


class _Rows:
    """The joined rows of one layout."""

    def __init__(self, group: _Group, oldest_ms: int, newest_ms: int) -> None:
        self.layout = group.layout
        self.raw = np.frombuffer(b"".join(group.bodies), group.layout.dtype)
        self.presence = np.frombuffer(b"".join(group.presences), np.uint8).reshape(len(self.raw), -1)
        self.batch = np.repeat(np.array(group.batches, np.int64), group.counts)
        self.ts: Millis = np.ascontiguousarray(self.raw["ts"])
        # All dictionaries one behind the other; `at` is each row's place in that.
        self.dictionaries = list({id(d): d for d in group.dictionaries}.values())
        sizes = np.array([len(d.ids) for d in self.dictionaries], np.int64)
        self.starts = np.cumsum(sizes) - sizes
        number = {id(d): n for n, d in enumerate(self.dictionaries)}
        of_row = np.repeat(np.array([number[id(d)] for d in group.dictionaries], np.int64), group.counts)
        entity = self.raw["entity"].astype(np.int64)
        self.at = self.starts[of_row] + np.minimum(entity, sizes[of_row] - 1)
        scopes = np.concatenate([d.scopes for d in self.dictionaries])
        self.bad_entity = (entity >= sizes[of_row]) | (scopes[self.at] != _CODES[self.layout.scope])
        self.bad_time = (self.ts < oldest_ms) | (self.ts > newest_ms)
        self.of_row = of_row

    def refusals(self) -> list[tuple[int, Refusal]]:
        """(batch, why) of batches with a row that cannot be right, by its first such row."""
        rows = np.flatnonzero(self.bad_entity | self.bad_time)
        _, first = np.unique(self.batch[rows], return_index=True)
        return [(int(self.batch[row]), self._refusal(int(row))) for row in rows[first]]

    def _refusal(self, row: int) -> Refusal:
        if self.bad_entity[row]:
            index = int(self.raw["entity"][row])
            dictionary = self.dictionaries[int(self.of_row[row])]
            if index in dictionary.refused:
                why = dictionary.refused[index]
                return Refusal("another node" if "another node" in why else "bad entity", f"entity {index}: {why}")
            known = dictionary.rows.get(index)
            told = f"is a {known.scope}, not a {self.layout.scope}" if known else "was not told in Hello"
            return Refusal("bad entity", f"entity {index} {told}")
        ts = int(self.ts[row])
        when = iso(ts) if 0 <= ts < 10**14 else f"{ts} ms"
        return Refusal(
            "bad time", f"a sample of {when} is older than what is kept, or from the future; is the clock right?"
        )

    def take(self, bad: npt.NDArray[np.int64], result: Decoded) -> SampleBatch:
        """The rows of batches that are not in `bad`."""
        keep = np.flatnonzero(~np.isin(self.batch, bad))
        whole = len(keep) == len(self.raw)
        raw = self.raw if whole else self.raw[keep]
        presence = self.presence if whole else self.presence[keep]
        at, ts, of_row = self.at[keep], self.ts[keep], self.of_row[keep]
        ids = np.concatenate([d.ids for d in self.dictionaries])[at]
        self._note_places(at, ts, result)
        bits = np.unpackbits(presence, axis=1, count=len(self.layout.types), bitorder="little")
        present = np.ascontiguousarray(bits.T).view(np.bool_)
        columns: dict[str, tuple[Stored, Mask]] = {}
        for number, name in enumerate(self.layout.columns):
            if name is None or not present[number].any():
                continue
            stored = np.ascontiguousarray(raw[f"c{number}"])
            mask = present[number]
            wrong = mask & _impossible(BY_NAME[name], stored)
            if wrong.any():
                mask = mask & ~wrong
                for owner, count in zip(*np.unique(of_row[wrong], return_counts=True), strict=True):
                    key = self.dictionaries[int(owner)].node, name
                    result.out_of_range[key] = result.out_of_range.get(key, 0) + int(count)
            columns[name] = (stored, mask)
        return SampleBatch(self.layout.scope, ids, ts, columns)

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
            result.entities.append(replace(dictionary.rows[index], first_ms=low, last_ms=high))
            result._fresh.append((dictionary, index))


def _impossible(metric: Metric, stored: npt.NDArray[Any]) -> Mask:
    """bool [R]: outside the catalog's range, which is in units; NaN is outside."""
    step = metric.step or 1
    low, high = (round(b / step) if metric.step else b for b in (metric.low, metric.high))
    outside: Mask = ~((stored >= low) & (stored <= high))
    return outside

"""The schemas and entities of an agent's Hello, checked: they give the numbers in its batches a meaning."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drover_collector.store.records import EntityRow, Ids, Mask, entity_id
from drover_core.metrics.catalog import BY_ID, STORAGE, Scope
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import HEADER

MAX_COLUMNS = 4096
MAX_ENTITIES = 65_536  # indexes are uint16
MAX_SCHEMAS = 256
MAX_KEY = 256
PER_TURN = 256  # entities, or columns of schemas, read before others have their turn
CACHED_BYTES = 16_384  # of a schema that is cached; all columns of a GPU take 2,000

_SCOPES = {pb.GPU: Scope.GPU, pb.NODE: Scope.NODE, pb.LINK: Scope.LINK, pb.WORKLOAD: Scope.WORKLOAD}
SCOPE_CODES = {scope: number for number, scope in enumerate(Scope, 1)}  # 0: unknown
SCOPE_NAMES = {number: scope for scope, number in SCOPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why data is refused. `code` is one of a few words, to count by; `text` is for the operator."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a schema. Equal layouts of different agents are decoded together."""

    scope: Scope
    columns: tuple[str | None, ...]  # catalog names; None: unknown, skipped
    types: str

    @property
    def dtype(self) -> np.dtype[np.void]:
        return _row_dtype(self.types)

    @property
    def presence_bytes(self) -> int:
        return (len(self.types) + 7) // 8


@lru_cache(1024)
def _row_dtype(types: str) -> np.dtype[np.void]:
    names = ["ts", "entity", *(f"c{i}" for i in range(len(types)))]
    return np.dtype([(name, f"<{code}") for name, code in zip(names, HEADER + types, strict=True)])


@lru_cache(1024)
def _shared(layout: Layout) -> Layout:
    """Return the same object for equal layouts, whatever the numbers of their schemas."""
    return layout


@dataclass(slots=True)
class SchemaRegistry:
    """The schemas and entities of one Hello.

    Attributes:
        layouts: schema id -> its layout, or why its batches are refused.
        store_ids: [entity index] id in the store; 0: unknown.
        ids: [entity index] `entity_id` of the key, which may differ from the id in the store.
        scopes: [entity index] scope code; 0: unknown or refused.
        has_samples: [entity index] samples of it are stored, and so is its row.
        rows: entity index -> its row, until it is stored; its place begins no earlier than the row's `first_ms`.
        refused: entity index -> why.
        ignored: columns that are unknown to this collector.
        is_lenient: a row of a refused entity is left out, and the rest of its batch is taken.
    """

    node: str
    layouts: dict[int, Layout | Refusal]
    store_ids: Ids
    ids: Ids
    scopes: npt.NDArray[np.uint8]
    has_samples: Mask
    rows: dict[int, EntityRow]
    refused: dict[int, Refusal]
    ignored: list[str]
    is_lenient: bool = False

    @property
    def known(self) -> Ids:
        """`ids` of the entities whose samples are accepted."""
        known: Ids = self.ids[self.scopes != 0]
        return known

    def refuse(self, index: int, why: Refusal) -> None:
        """Refuse batches with rows of this entity, or these rows alone."""
        self.refused[index] = why
        self.scopes[index] = 0
        self.rows.pop(index, None)


def read_hello(hello: pb.Hello, gpu_id: Callable[[str], int] | None = None) -> SchemaRegistry:
    """Return the registry of a Hello. Invalid entities and schemas are marked, and only their batches are refused.

    Args:
        gpu_id: key of a GPU or MIG instance -> its id in the store; None: its `entity_id`.
    """
    reading = reading_hello(hello, gpu_id)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            found: SchemaRegistry = done.value
            return found


def reading_hello(hello: pb.Hello, gpu_id: Callable[[str], int] | None = None) -> Generator[None, None, SchemaRegistry]:
    """Do the same in portions: a Hello of thousands of entities takes a tenth of a second."""
    size = 1 + max((e.index for e in hello.entities if e.index < MAX_ENTITIES), default=0)
    found = SchemaRegistry(
        node=hello.node,
        layouts={},
        store_ids=np.zeros(size, np.uint64),
        ids=np.zeros(size, np.uint64),
        scopes=np.zeros(size, np.uint8),
        has_samples=np.zeros(size, np.bool_),
        rows={},
        refused={},
        ignored=[],
    )
    for number, entity in enumerate(hello.entities[:MAX_ENTITIES], 1):
        _add_entity(found, entity, gpu_id)
        if number % PER_TURN == 0:
            yield
    columns = 0
    for schema in hello.schemas[:MAX_SCHEMAS]:
        columns += len(schema.columns)
        if columns >= PER_TURN:
            columns = 0
            yield
        encoded = schema.SerializeToString(deterministic=True)
        read = _cached_layout if len(encoded) <= CACHED_BYTES else _read_layout
        found.layouts[schema.id], ignored = read(encoded)
        found.ignored += ignored
    return found


def _add_entity(found: SchemaRegistry, entity: pb.Entity, gpu_id: Callable[[str], int] | None) -> None:
    if entity.index >= MAX_ENTITIES:
        return  # no row can name it
    scope = _SCOPES.get(entity.scope)
    own = {Scope.NODE: entity.key == found.node, Scope.GPU: True, None: True}
    code, why = "bad entity", ""
    if not own.get(scope, entity.key.startswith(f"{found.node}/")):
        code, why = "another node", f"{entity.key!r} belongs to another node than {found.node!r}"
    elif scope is None:
        why = f"{entity.key!r} has a scope that is unknown to this collector"
    elif not 0 < len(entity.key) <= MAX_KEY:
        why = f"its key has {len(entity.key)} characters; 1 to {MAX_KEY} are allowed"
    elif max(map(len, (entity.uuid, entity.serial, entity.pci, entity.model, entity.mig, entity.link))) > MAX_KEY:
        why = f"a text of {entity.key!r} has more than {MAX_KEY} characters"
    elif scope is Scope.GPU and entity.gpu > 255:
        why = f"GPU {entity.key!r} is in slot {entity.gpu}; 0 to 255 are allowed"
    if why or scope is None:
        found.refused[entity.index] = Refusal(code, why)
    else:
        key = f"{entity.key}/{entity.mig}" if entity.mig else entity.key
        id_ = entity_id(scope, key)
        found.ids[entity.index] = id_
        found.store_ids[entity.index] = gpu_id(key) if gpu_id is not None and scope is Scope.GPU else id_
        found.scopes[entity.index] = SCOPE_CODES[scope]
        link = entity.link or (entity.key.partition("/")[2] if scope in (Scope.LINK, Scope.WORKLOAD) else "")
        found.rows[entity.index] = EntityRow(
            entity_id=int(found.store_ids[entity.index]),
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


def _read_layout(schema: bytes) -> tuple[Layout | Refusal, tuple[str, ...]]:
    """Return (layout, names of unknown columns)."""
    ignored: list[str] = []
    return _layout(pb.Schema.FromString(schema), ignored), tuple(ignored)


_cached_layout = lru_cache(1024)(_read_layout)  # thousands of agents send the same few schemas


def _layout(schema: pb.Schema, ignored: list[str]) -> Layout | Refusal:
    where = f"schema {schema.id}"
    scope = _SCOPES.get(schema.scope)
    if scope is None:
        return Refusal("bad schema", f"{where} has a scope that is unknown to this collector")
    if not 0 < len(schema.columns) <= MAX_COLUMNS:
        return Refusal("bad schema", f"{where} has {len(schema.columns)} columns; 1 to {MAX_COLUMNS} are allowed")
    names: list[str | None] = []
    for column in schema.columns:
        if column.type not in STORAGE:
            return Refusal("bad schema", f"{where}: {column.name!r} has the invalid type {column.type!r}")
        metric = BY_ID.get(column.metric)
        if metric is None:
            ignored.append(column.name[:MAX_KEY] or f"metric {column.metric}")
            names.append(None)
            continue
        if metric.scope is not scope or metric.type != column.type:
            return Refusal(
                "wrong type",
                f"{where}: metric {metric.id} ({metric.name}) is sent as {scope} {column.type!r}, but is"
                f" {metric.scope} {metric.type!r} here; agent and collector have different catalogs: update the older",
            )
        if metric.name in names:
            return Refusal("bad schema", f"{where} has {metric.name} twice")
        names.append(metric.name)
    return _shared(Layout(scope, tuple(names), "".join(column.type for column in schema.columns)))

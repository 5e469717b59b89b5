"""What the numbers in an agent's batches mean: its Hello, checked and brought into the forms of the store."""

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
IN_A_ROW = 256  # entities, or columns of schemas, that are read in one turn
KNOWN_BYTES = 16_384  # of a schema that is remembered; all columns of a GPU take 2,000

_SCOPES = {pb.GPU: Scope.GPU, pb.NODE: Scope.NODE, pb.LINK: Scope.LINK, pb.WORKLOAD: Scope.WORKLOAD}
SCOPE_CODES = {scope: number for number, scope in enumerate(Scope, 1)}  # 0: not known
SCOPE_NAMES = {number: scope for scope, number in SCOPE_CODES.items()}


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
    """The same object for equal layouts, which schemas with other numbers may have."""
    return layout


@dataclass(slots=True)
class Dictionary:
    """What the numbers in an agent's batches mean, from its Hello.

    Attributes:
        layouts: schema id -> its layout, or why its batches are refused.
        ids, names, scopes, placed: by entity index: id in the store (0: not known), `entity_id` of its key, which may
            be another, scope code (0: not known), whether the store knows that it is here.
        rows: entity index -> what the store is to know of it, until it does; refused: index -> why.
        ignored: columns that this collector does not know.
    """

    node: str
    layouts: dict[int, Layout | Refusal]
    ids: Ids
    names: Ids
    scopes: npt.NDArray[np.uint8]
    placed: Mask
    rows: dict[int, EntityRow]
    refused: dict[int, str]
    ignored: list[str]

    @property
    def known(self) -> Ids:
        """Names of all entities that may be told of."""
        known: Ids = self.names[self.scopes != 0]
        return known

    def refuse(self, index: int, why: str) -> None:
        """Rows of this entity are not taken."""
        self.refused[index] = why
        self.scopes[index] = 0
        self.rows.pop(index, None)


def read_hello(hello: pb.Hello, gpu_id: Callable[[str], int] | None = None) -> Dictionary:
    """The dictionary of a Hello. Entities and schemas that cannot be are marked, and cost only their own batches.

    Args:
        gpu_id: key of a GPU, or of a part of one -> its id in the store; None: its name.
    """
    reading = reading_hello(hello, gpu_id)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            found: Dictionary = done.value
            return found


def reading_hello(hello: pb.Hello, gpu_id: Callable[[str], int] | None = None) -> Generator[None, None, Dictionary]:
    """As `read_hello`, in turns: a Hello of thousands of entities takes a tenth of a second."""
    size = 1 + max((e.index for e in hello.entities if e.index < MAX_ENTITIES), default=0)
    found = Dictionary(
        hello.node, {}, np.zeros(size, np.uint64), np.zeros(size, np.uint64), np.zeros(size, np.uint8),
        np.zeros(size, np.bool_), {}, {}, [],
    )  # fmt: skip
    for number, entity in enumerate(hello.entities[:MAX_ENTITIES], 1):
        _take_entity(found, entity, gpu_id)
        if number % IN_A_ROW == 0:
            yield
    columns = 0
    for schema in hello.schemas[:MAX_SCHEMAS]:
        columns += len(schema.columns)
        if columns >= IN_A_ROW:
            columns = 0
            yield
        told = schema.SerializeToString(deterministic=True)
        read = _known_layout if len(told) <= KNOWN_BYTES else _read_layout
        found.layouts[schema.id], ignored = read(told)
        found.ignored += ignored
    return found


def _take_entity(found: Dictionary, entity: pb.Entity, gpu_id: Callable[[str], int] | None) -> None:
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
        name = entity_id(scope, key)
        found.names[entity.index] = name
        found.ids[entity.index] = gpu_id(key) if gpu_id is not None and scope is Scope.GPU else name
        found.scopes[entity.index] = SCOPE_CODES[scope]
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


def _read_layout(schema: bytes) -> tuple[Layout | Refusal, tuple[str, ...]]:
    """(layout, what of it is not known here)."""
    ignored: list[str] = []
    return _layout(pb.Schema.FromString(schema), ignored), tuple(ignored)


_known_layout = lru_cache(1024)(_read_layout)  # thousands of agents have the same few schemas


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
    return _shared(Layout(scope, tuple(names), "".join(column.type for column in schema.columns)))

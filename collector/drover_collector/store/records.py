"""What goes into the store and comes out of it, besides the values of `drover_core.model.events`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import intern

import numpy as np
import numpy.typing as npt

from drover_core.metrics.catalog import BY_NAME, STORAGE, Scope

Ids = npt.NDArray[np.uint64]
Millis = npt.NDArray[np.int64]
Stored = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]


def entity_id(scope: Scope, key: str) -> int:
    """The 64-bit name of an entity: blake2b-64 over its scope and key."""
    return int.from_bytes(hashlib.blake2b(f"{scope}\0{key}".encode(), digest_size=8).digest(), "little")


NEAR_BITS, NODE_BITS = 12, 8


def placed_id(name: int, near: str, node: str) -> int:
    """A 64-bit id that lies beside those of the same node, among those of the same neighbourhood.

    44 bits are of the name: with fewer, ids of a fleet would not all differ above the 14 that a bucket's milliseconds
    take, and sorting its rows would take twice as long (`fold._order`). Racks that share 12 bits lie among each other.

    Args:
        name: the entity's `entity_id`.
        near, node: of where it was seen first; the id stays when it moves.
    """
    high, low = entity_id(Scope.NODE, near) >> 64 - NEAR_BITS, entity_id(Scope.NODE, node) >> 64 - NODE_BITS
    rest = 64 - NEAR_BITS - NODE_BITS
    return (high << NODE_BITS | low) << rest | name >> 64 - rest


def storage_dtype(metric: str) -> np.dtype[np.generic]:
    """The numpy type of a metric's stored form."""
    return np.dtype("<" + BY_NAME[metric].type)


@dataclass(frozen=True, slots=True)
class EntityRow:
    """Where an entity is, from `first_ms` on. An entity that moves has several rows, one per place.

    `gpu` is the slot of a GPU, else None; `link` the port of a link (or the name of a workload), else "".
    """

    entity_id: int
    scope: Scope
    key: str
    node: str
    gpu: int | None
    uuid: str = ""
    serial: str = ""
    pci: str = ""
    model: str = ""
    link: str = ""
    mig: str = ""
    first_ms: int = 0
    last_ms: int = 0

    @property
    def name(self) -> int:
        """What `entity_id` says: alike wherever it is seen, and in every store."""
        return entity_id(self.scope, f"{self.key}/{self.mig}" if self.mig else self.key)

    def during(self, first_ms: int, last_ms: int) -> EntityRow:
        """The same at another time, its texts shared with other rows that say the same: a fleet has 100,000 of them,
        that stay. A quarter of what `dataclasses.replace` takes."""
        serial = self.key if self.serial == self.key else self.serial
        return EntityRow(
            self.entity_id, self.scope, self.key, intern(self.node), self.gpu, self.uuid, serial, intern(self.pci),
            intern(self.model), intern(self.link), intern(self.mig), first_ms, last_ms,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples of one scope, in columns of R rows, any order. A row that comes twice is stored once.

    Attributes:
        entity_id: uint64 [R]; ts_ms: int64 [R].
        columns: catalog name -> (stored fixed-point numbers [R], in the catalog's storage type; present bool [R]).
    """

    scope: Scope
    entity_id: Ids
    ts_ms: Millis
    columns: Mapping[str, tuple[Stored, Mask]]

    @property
    def rows(self) -> int:
        return len(self.ts_ms)

    @property
    def samples(self) -> int:
        """Values that are present."""
        return sum(int(np.count_nonzero(present)) for _, present in self.columns.values())

    @staticmethod
    def join(parts: Sequence[SampleBatch]) -> SampleBatch:
        """One batch of all rows of `parts`, which are of one scope; a column that a part lacks is absent there."""
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.columns)
        columns: dict[str, tuple[Stored, Mask]] = {}
        for name in names:
            held = [part.columns.get(name) or _nothing(name, part.rows) for part in parts]
            columns[name] = (np.concatenate([v for v, _ in held]), np.concatenate([p for _, p in held]))
        return SampleBatch(
            parts[0].scope,
            np.concatenate([part.entity_id for part in parts]),
            np.concatenate([part.ts_ms for part in parts]),
            columns,
        )

    @staticmethod
    def of_values(scope: Scope, ids: Ids, ts_ms: Millis, values: Mapping[str, npt.NDArray[np.float64]]) -> SampleBatch:
        """A batch out of values in catalog units, NaN where absent."""
        columns: dict[str, tuple[Stored, Mask]] = {}
        for name, column in values.items():
            present = ~np.isnan(column)
            step = BY_NAME[name].step
            filled = np.where(present, column, 0.0)
            stored = (np.rint(filled / step) if step else filled).astype(storage_dtype(name))
            columns[name] = (stored, present)
        return SampleBatch(scope, ids, ts_ms, columns)


def _nothing(metric: str, rows: int) -> tuple[Stored, Mask]:
    return np.zeros(rows, storage_dtype(metric)), np.zeros(rows, np.bool_)


@dataclass(frozen=True, slots=True)
class Totals:
    """`oldest_ms` and `newest_ms` are 0 when there are no samples."""

    samples: int  # values held
    bytes_on_disk: int
    oldest_ms: int
    newest_ms: int


def clickhouse_type(metric: str) -> str:
    """The column type of a metric, without Nullable."""
    return STORAGE[BY_NAME[metric].type][0]

"""What goes into the store and comes out of it, in addition to the values of `drover_core.model.events`."""

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


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Of the GPUs that reported in a time: in how many buckets, at work on average (0..1), watts of all together."""

    buckets: int
    util_ratio: float | None
    power_w: float | None


def entity_id(scope: Scope, key: str) -> int:
    """Return the 64-bit name of an entity: blake2b-64 over its scope and key."""
    return int.from_bytes(hashlib.blake2b(f"{scope}\0{key}".encode(), digest_size=8).digest(), "little")


NEAR_BITS, NODE_BITS = 12, 8


def placed_id(name: int, near: str, node: str) -> int:
    """Return a 64-bit id that sorts next to those of the same node, and these next to those of the same rack.

    44 bits are of the name: with fewer, ids of a fleet would not all differ above the 14 that a bucket's milliseconds
    take, and sorting its rows would take twice as long (`fold._order`). Racks that share 12 bits are mixed.

    Args:
        name: the entity's `entity_id`.
        near, node: rack and node where it was seen first; the id stays when it moves.
    """
    high, low = entity_id(Scope.NODE, near) >> 64 - NEAR_BITS, entity_id(Scope.NODE, node) >> 64 - NODE_BITS
    rest = 64 - NEAR_BITS - NODE_BITS
    return (high << NODE_BITS | low) << rest | name >> 64 - rest


def storage_dtype(metric: str) -> np.dtype[np.generic]:
    """Return the numpy type in which a metric is stored."""
    return np.dtype("<" + BY_NAME[metric].type)


@dataclass(frozen=True, slots=True)
class EntityRow:
    """An entity at a place, from `first_ms` on. An entity that moves has a row for each place.

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
        """The entity's `entity_id`, the same at every place and in every store."""
        return entity_id(self.scope, f"{self.key}/{self.mig}" if self.mig else self.key)

    def during(self, first_ms: int, last_ms: int) -> EntityRow:
        """Return the row with other times. Equal texts share memory, as a fleet has 100,000 rows that stay in memory.

        It takes a quarter of the time of `dataclasses.replace`.
        """
        serial = self.key if self.serial == self.key else self.serial
        return EntityRow(
            self.entity_id, self.scope, self.key, intern(self.node), self.gpu, self.uuid, serial, intern(self.pci),
            intern(self.model), intern(self.link), intern(self.mig), first_ms, last_ms,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples of one scope, in columns of R rows, in any order. A row that is written twice is stored once.

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
        """How many values are present."""
        return sum(int(np.count_nonzero(present)) for _, present in self.columns.values())

    @staticmethod
    def join(parts: Sequence[SampleBatch]) -> SampleBatch:
        """Return one batch of all rows of `parts`, which have one scope. Columns that a part lacks are absent there."""
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.columns)
        columns: dict[str, tuple[Stored, Mask]] = {}
        for name in names:
            held = [part.columns.get(name) or _absent(name, part.rows) for part in parts]
            columns[name] = (np.concatenate([v for v, _ in held]), np.concatenate([p for _, p in held]))
        return SampleBatch(
            parts[0].scope,
            np.concatenate([part.entity_id for part in parts]),
            np.concatenate([part.ts_ms for part in parts]),
            columns,
        )

    @staticmethod
    def of_values(scope: Scope, ids: Ids, ts_ms: Millis, values: Mapping[str, npt.NDArray[np.float64]]) -> SampleBatch:
        """Return a batch made of values in catalog units, NaN where absent."""
        columns: dict[str, tuple[Stored, Mask]] = {}
        for name, column in values.items():
            present = ~np.isnan(column)
            step = BY_NAME[name].step
            filled = np.where(present, column, 0.0)
            stored = (np.rint(filled / step) if step else filled).astype(storage_dtype(name))
            columns[name] = (stored, present)
        return SampleBatch(scope, ids, ts_ms, columns)


def _absent(metric: str, rows: int) -> tuple[Stored, Mask]:
    return np.zeros(rows, storage_dtype(metric)), np.zeros(rows, np.bool_)


@dataclass(frozen=True, slots=True)
class Totals:
    """What the samples tables hold. `oldest_ms` and `newest_ms` are 0 without samples."""

    samples: int  # values held
    bytes_on_disk: int
    oldest_ms: int
    newest_ms: int


def clickhouse_type(metric: str) -> str:
    """Return the column type of a metric, without Nullable."""
    return STORAGE[BY_NAME[metric].type][0]

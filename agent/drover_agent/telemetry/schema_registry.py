"""What the numbers in spooled batches mean: entity indexes and schema ids, stored next to the spool.

Batches outlive the run that wrote them, so their numbers must mean the same in the next run. An entry is removed when
every batch on disk is younger than its last use; only then may its number be used again.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drover_agent.sources.base import Entity
from drover_core.metrics.catalog import BY_NAME, Metric, Scope
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

Column = tuple[int, str, str]  # catalog id, storage type, name

_SCOPES = {Scope.GPU: pb.GPU, Scope.NODE: pb.NODE, Scope.LINK: pb.LINK, Scope.WORKLOAD: pb.WORKLOAD}
MAX_INDEX = 2**16 - 1  # entity indexes are uint16 on the wire
MAX_ENTITIES = 8_192  # at one time: a collector refuses a Hello with more
SAVE_MS = 600_000  # the file lags behind the last use of an entry by about this at most


@dataclass(slots=True)
class _Schema:
    scope: Scope
    columns: tuple[Column, ...]
    used_ms: int


@dataclass(slots=True)
class SchemaRegistry:
    """Numbers of entities and schemas. `changed`: file and Hello lack an entry."""

    path: Path
    entities: dict[Entity, int] = field(default_factory=dict)
    used_ms: dict[Entity, int] = field(default_factory=dict)
    schemas: dict[int, _Schema] = field(default_factory=dict)
    next_index: int = 0
    next_schema: int = 1
    changed: bool = False
    _now_ms: int = 0  # of the newest use
    _saved_ms: int = 0  # of the newest use that the file knows
    _full_logged: bool = False

    @property
    def due(self) -> bool:
        """Whether to write the file: it lacks an entry, or lags behind their last use."""
        return self.changed or abs(self._now_ms - self._saved_ms) >= SAVE_MS

    @classmethod
    def load(cls, path: Path, oldest_batch_ms: int | None) -> SchemaRegistry:
        """Read the file. `oldest_batch_ms`: time of the oldest batch on disk, None if there is none."""
        if oldest_batch_ms is None:
            return cls(path)
        found = cls(path)
        try:
            found._fill(json.loads(path.read_bytes()), oldest_batch_ms)
        except (OSError, ValueError, TypeError, KeyError) as error:
            # The collector refuses batches of schemas that no Hello names, so they are counted as lost, not misread.
            log.error("%s: %s. The collector will refuse the batches that wait in the spool.", path, error)
            return cls(path, next_schema=random.randrange(2**16, 2**31))
        return found

    def _fill(self, data: dict[str, object], oldest_ms: int) -> None:
        entities, schemas = data["entities"], data["schemas"]
        oldest_ms -= 2 * SAVE_MS
        if not isinstance(entities, list) or not isinstance(schemas, list):
            raise ValueError("holds no entities and schemas of a spool")
        for row in entities:
            self.next_index = max(self.next_index, row["index"] + 1)
            if row["used_ms"] >= oldest_ms:
                entity = Entity(**{**row["entity"], "scope": Scope(row["entity"]["scope"])})
                self.entities[entity], self.used_ms[entity] = row["index"], row["used_ms"]
        for row in schemas:
            self.next_schema = max(self.next_schema, row["id"] + 1)
            if row["used_ms"] >= oldest_ms:
                columns = tuple((int(i), str(t), str(n)) for i, t, n in row["columns"])
                self.schemas[row["id"]] = _Schema(Scope(row["scope"]), columns, row["used_ms"])

    def dump(self) -> bytes:
        """Return the content of the file, and take it as written."""
        data = {
            "entities": [
                {"index": index, "used_ms": self.used_ms[entity], "entity": asdict(entity)}
                for entity, index in self.entities.items()
            ],
            "schemas": [
                {"id": number, "scope": s.scope, "columns": s.columns, "used_ms": s.used_ms}
                for number, s in self.schemas.items()
            ],
        }
        self.changed, self._saved_ms = False, self._now_ms
        return json.dumps(data).encode()

    def forget(self, oldest_ms: int) -> list[Entity]:
        """Remove what was last used well before `oldest_ms`, the time of the oldest batch that may still be sent."""
        before_ms = oldest_ms - 2 * SAVE_MS
        gone = [entity for entity, used_ms in self.used_ms.items() if used_ms < before_ms]
        for entity in gone:
            del self.entities[entity], self.used_ms[entity]
        old = [number for number, schema in self.schemas.items() if schema.used_ms < before_ms]
        for number in old:
            del self.schemas[number]
        if gone or old:
            self.changed = True
            self._full_logged = False
        return gone

    def index_of(self, entity: Entity, now_ms: int) -> int | None:
        """Return the number of an entity, a new one if it has none. None: MAX_ENTITIES are in use."""
        index = self.entities.get(entity)
        if index is None:
            index = self._new_index()
            if index is None:
                return None
            self.entities[entity] = index
            self.changed = True
        self.used_ms[entity] = max(now_ms, self.used_ms.get(entity, 0))
        self._now_ms = now_ms
        return index

    def _new_index(self) -> int | None:
        if len(self.entities) >= MAX_ENTITIES:
            if not self._full_logged:
                self._full_logged = True
                log.error("This node reports %d entities, which is the limit. New ones are dropped.", MAX_ENTITIES)
            return None
        if self.next_index > MAX_INDEX:  # all were used once: take those that are free again, in turn
            used = set(self.entities.values())
            while self.next_index % (MAX_INDEX + 1) in used:
                self.next_index += 1
        self.next_index += 1
        return (self.next_index - 1) % (MAX_INDEX + 1)

    def use_schema(self, number: int, now_ms: int) -> bool:
        """Note that a schema is used now. Return False if it was removed."""
        schema = self.schemas.get(number)
        if schema is not None:
            schema.used_ms = max(now_ms, schema.used_ms)
        return schema is not None

    def schema_of(self, scope: Scope, names: Iterable[str], now_ms: int) -> tuple[int, tuple[Metric, ...]]:
        """Return the id of the schema with exactly these columns, and its metrics in column order."""
        metrics = tuple(sorted((BY_NAME[name] for name in names), key=lambda m: m.id))
        columns = tuple((m.id, m.type, m.name) for m in metrics)
        for number, schema in self.schemas.items():
            if schema.scope is scope and schema.columns == columns:
                schema.used_ms = max(now_ms, schema.used_ms)
                return number, metrics
        number = self.next_schema
        self.next_schema += 1
        self.schemas[number] = _Schema(scope, columns, now_ms)
        self.changed = True
        return number, metrics

    def add_to(self, hello: pb.Hello) -> None:
        """Add the entities and schemas to a Hello."""
        for entity, index in self.entities.items():
            hello.entities.add(
                index=index,
                scope=_SCOPES[entity.scope],
                key=entity.key,
                gpu=entity.gpu or 0,  # read for GPUs only
                uuid=entity.uuid,
                serial=entity.serial,
                pci=entity.pci,
                model=entity.model,
                mig=entity.mig,
                link=entity.link,
            )
        for number, schema in self.schemas.items():
            columns = [pb.Column(metric=i, type=t, name=n) for i, t, n in schema.columns]
            hello.schemas.append(pb.Schema(id=number, scope=_SCOPES[schema.scope], columns=columns))

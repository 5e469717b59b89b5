"""Turn the rows of many sources into the blocks of one batch, and values that could not be read into absences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from drover_agent.sources.base import Entity, Reading
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.schema_registry import SchemaRegistry
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder

log = logging.getLogger(__name__)

MAX_UNKNOWN = 1_000  # names remembered as logged
SHIFTS = 100  # ms; no two ticks meet at intervals of 0.1 s and more
LEAP_MS = 60_000  # without rows: the clock was set, or the machine slept
MAX_SPANS = 16  # of times already sent; of more, the two oldest are joined

_Values = dict[str, float]
Watch = Callable[[int, Reading], None]


class Batcher:
    """The rows of the next batch. Readings of several sources for the same time and entity merge into one row.

    The store keeps one row for each entity and time. So a row for a time that was packed already is dropped. After the
    clock was set back, times that were sent before are shifted by one more millisecond each time. Only these: if a
    clock was an hour ahead for ten seconds, ten seconds are shifted and not an hour.
    """

    def __init__(
        self, registry: SchemaRegistry, absences: Absences, late_ms: float, watch: Watch | None = None
    ) -> None:
        """
        Args:
            late_ms: a row this much older than the newest of its entity is from a clock that was set back.
            watch: called with each reading too, at once.
        """
        self._registry, self._absences, self._late_ms, self._watch = registry, absences, late_ms, watch
        self._rows: dict[int, dict[Entity, _Values]] = {}
        self._missing: dict[int, list[tuple[Entity, str, Absent | None]]] = {}  # None: not absent any longer
        self._columns: dict[Scope, set[str]] = {}
        self._builders: dict[Scope, BlockBuilder] = {}
        self._last_ms: dict[Entity, int] = {}
        self._sent: list[tuple[int, int]] = []  # first and last time of each span since the clock was set back
        self._sent_before: list[tuple[int, int]] = []  # and of the spans before that
        self._shift = 0
        self.rows = 0  # waiting
        self.late_rows = 0  # rows dropped because a newer one of their entity was packed already
        self.unknown_metrics: set[str] = set()

    def add(self, ts_ms: int, reading: Reading) -> None:
        """Add what a source read at `ts_ms`."""
        if self._watch is not None:
            self._watch(ts_ms, reading)
        if self._sent_before and any(first_ms <= ts_ms <= last_ms for first_ms, last_ms in self._sent_before):
            ts_ms += self._shift
        if reading.rows:
            tick = self._rows.setdefault(ts_ms, {})
            for entity, values in reading.rows:
                row = tick.get(entity)
                if row is None:
                    tick[entity] = dict(values)
                    self.rows += 1
                else:
                    row.update(values)
        if reading.absent:
            self._missing.setdefault(ts_ms, []).extend(reading.absent)
        if reading.quiet:
            self._missing.setdefault(ts_ms, []).extend((entity, name, None) for entity, name in reading.quiet)

    def add_to_newest(self, scope: Scope, values: Mapping[str, float]) -> None:
        """Add these values to the newest waiting row of a scope."""
        for ts_ms in sorted(self._rows, reverse=True):
            for entity, row in self._rows[ts_ms].items():
                if entity.scope is scope:
                    row.update(values)
                    return

    def clock_set_back(self) -> None:
        """Expect times that were sent before. Call `take` first."""
        self._shift = self._shift % (SHIFTS - 1) + 1
        self._last_ms.clear()
        self._sent_before, self._sent = _limited([*self._sent_before, *self._sent]), []

    def forget(self, gone: Sequence[Entity]) -> None:
        """Drop what is remembered of entities that are gone."""
        for entity in gone:
            self._last_ms.pop(entity, None)

    def take(self, now_ms: int) -> tuple[list[pb.Block], int]:
        """Return the blocks of all waiting rows and the time of the newest; pass absences to `Absences`."""
        rows, self._rows = self._rows, {}
        missing, self._missing = self._missing, {}
        self.rows = 0
        ticks = sorted(rows.keys() | missing.keys())
        chosen: dict[Scope, list[tuple[int, Entity, int, _Values]]] = {}
        numbers: dict[Entity, int | None] = {}
        for ts_ms in ticks:
            for entity, values in rows.get(ts_ms, {}).items():
                if entity not in numbers:
                    numbers[entity] = self._registry.index_of(entity, now_ms)
                index = numbers[entity]
                if index is not None and self._is_new(ts_ms, entity):
                    chosen.setdefault(entity.scope, []).append((ts_ms, entity, index, values))
        refused: dict[tuple[int, Entity], list[str]] = {}
        blocks = [block for scope, found in chosen.items() if (block := self._pack(scope, found, refused, now_ms))]
        for ts_ms in ticks:
            self._update_absences(ts_ms, rows.get(ts_ms, {}), missing.get(ts_ms, ()), refused)
        for ts_ms in sorted(rows):
            self._remember_time(ts_ms)
        return blocks, max(rows, default=0)

    def _remember_time(self, ts_ms: int) -> None:
        """Extend the newest span of sent times, or begin one after a jump of the clock."""
        first_ms, last_ms = self._sent[-1] if self._sent else (ts_ms, ts_ms)
        if self._sent and first_ms <= ts_ms <= last_ms + LEAP_MS:
            self._sent[-1] = (first_ms, max(last_ms, ts_ms))
        else:
            self._sent = _limited([*self._sent, (ts_ms, ts_ms)])

    def _is_new(self, ts_ms: int, entity: Entity) -> bool:
        last_ms = self._last_ms.get(entity, -1)
        if last_ms - self._late_ms <= ts_ms <= last_ms:
            self.late_rows += 1
            return False
        self._last_ms[entity] = ts_ms
        return True

    def _pack(
        self,
        scope: Scope,
        rows: Sequence[tuple[int, Entity, int, _Values]],
        refused: dict[tuple[int, Entity], list[str]],
        now_ms: int,
    ) -> pb.Block | None:
        columns = self._columns.setdefault(scope, set())
        builder = self._builder(scope, columns, now_ms)
        for ts_ms, entity, index, values in rows:
            wrong, known = builder.add(ts_ms, index, values)
            if not known and self._learn(scope, columns, values):
                return self._pack(scope, rows, refused, now_ms)  # again from the first row, with the new columns
            if wrong:
                refused[ts_ms, entity] = wrong
        return builder.take()

    def _builder(self, scope: Scope, columns: set[str], now_ms: int) -> BlockBuilder:
        found = self._builders.get(scope)
        if (
            found is None
            or len(found.metrics) != len(columns)
            or not self._registry.use_schema(found.schema_id, now_ms)
        ):
            self._builders[scope] = found = BlockBuilder(*self._registry.schema_of(scope, columns, now_ms))
        return found

    def _learn(self, scope: Scope, columns: set[str], values: Mapping[str, float]) -> bool:
        """Add the columns of `values` that are new, and return whether there were any. Log unknown names once."""
        fresh = values.keys() - columns
        known = {name for name in fresh if name in BY_NAME and BY_NAME[name].scope is scope}
        columns |= known
        for name in fresh - known - self.unknown_metrics:
            if len(self.unknown_metrics) < MAX_UNKNOWN:
                self.unknown_metrics.add(name)
                log.error("A source gave %s for a %s. The catalog has no such metric, so it is dropped.", name, scope)
        return bool(known)

    def _update_absences(
        self,
        ts_ms: int,
        rows: Mapping[Entity, _Values],
        missing: Sequence[tuple[Entity, str, Absent | None]],
        refused: Mapping[tuple[int, Entity], Sequence[str]],
    ) -> None:
        """Begin and end absences. A value that one source has and another lacks is not absent."""
        for entity, values in rows.items():
            if refused:
                for name in refused.get((ts_ms, entity), ()):
                    del values[name]
                    self._absences.add_missing(entity, name, Absent.OUT_OF_RANGE, ts_ms)
            self._absences.add_present(entity, values, ts_ms)
        for entity, name, reason in missing:
            if reason is None:
                self._absences.add_present(entity, (name,), ts_ms)
            elif name not in rows.get(entity, ()):
                self._absences.add_missing(entity, name, reason, ts_ms)


def _limited(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join the oldest spans until MAX_SPANS are left."""
    while len(spans) > MAX_SPANS:
        (first_ms, last_ms), following = spans[:2]
        spans[:2] = [(min(first_ms, following[0]), max(last_ms, following[1]))]
    return spans

"""Rows of many sources become the blocks of one batch; what could not be read becomes intervals of absence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from drover_agent.sources.base import Entity, Reading
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.schema_registry import Dictionary
from drover_core.metrics.catalog import BY_NAME, Absent, Scope
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder

log = logging.getLogger(__name__)

MAX_UNKNOWN = 1_000  # names remembered as told
SHIFTS = 100  # at intervals of 0.1 s and more no two ticks meet
LEAP_MS = 60_000  # without rows: the clock leapt, or the machine slept
MAX_SPANS = 16  # of times that were told; of more, the two oldest become one

_Values = dict[str, float]


class Batcher:
    """What one batch will hold. Readings of several sources for the same moment and entity merge into one row.

    The store keeps one row for each entity and moment. So a row that comes for a second that was packed already is
    dropped, and after the clock was set back times that were told before get a millisecond more each time round. Only
    these: of a clock that was an hour ahead for ten seconds, ten seconds come again, and an hour does not.
    """

    def __init__(self, dictionary: Dictionary, absences: Absences, late_ms: float) -> None:
        """`late_ms`: a row so much older than the newest of its entity is of a clock that was set back."""
        self._dictionary, self._absences, self._late_ms = dictionary, absences, late_ms
        self._rows: dict[int, dict[Entity, _Values]] = {}
        self._missing: dict[int, list[tuple[Entity, str, Absent | None]]] = {}  # None: no longer
        self._columns: dict[Scope, set[str]] = {}
        self._builders: dict[Scope, BlockBuilder] = {}
        self._last_ms: dict[Entity, int] = {}
        self._told: list[tuple[int, int]] = []  # first and last moment of each span since the clock was set back
        self._before: list[tuple[int, int]] = []  # and of those before
        self._shift = 0
        self.rows = 0  # that wait
        self.late_rows = 0  # rows that came after a newer one of the same thing had been packed
        self.unknown_metrics: set[str] = set()

    def add(self, ts_ms: int, reading: Reading) -> None:
        if self._before and any(first_ms <= ts_ms <= last_ms for first_ms, last_ms in self._before):
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
        """Give the newest row of a scope that waits these values too."""
        for ts_ms in sorted(self._rows, reverse=True):
            for entity, row in self._rows[ts_ms].items():
                if entity.scope is scope:
                    row.update(values)
                    return

    def clock_set_back(self) -> None:
        """Times that were told will come again. `take` what waits before."""
        self._shift = self._shift % (SHIFTS - 1) + 1
        self._last_ms.clear()
        self._before, self._told = _fewer([*self._before, *self._told]), []

    def forget(self, gone: Sequence[Entity]) -> None:
        for entity in gone:
            self._last_ms.pop(entity, None)

    def take(self, now_ms: int) -> tuple[list[pb.Block], int]:
        """(blocks of all that waits, time of its newest row), the absences told to `Absences`."""
        rows, self._rows = self._rows, {}
        missing, self._missing = self._missing, {}
        self.rows = 0
        ticks = sorted(rows.keys() | missing.keys())
        chosen: dict[Scope, list[tuple[int, Entity, int, _Values]]] = {}
        numbers: dict[Entity, int | None] = {}
        for ts_ms in ticks:
            for entity, values in rows.get(ts_ms, {}).items():
                if entity not in numbers:
                    numbers[entity] = self._dictionary.index_of(entity, now_ms)
                index = numbers[entity]
                if index is not None and self._fresh(ts_ms, entity):
                    chosen.setdefault(entity.scope, []).append((ts_ms, entity, index, values))
        refused: dict[tuple[int, Entity], list[str]] = {}
        blocks = [block for scope, found in chosen.items() if (block := self._pack(scope, found, refused, now_ms))]
        for ts_ms in ticks:
            self._follow(ts_ms, rows.get(ts_ms, {}), missing.get(ts_ms, ()), refused)
        for ts_ms in sorted(rows):
            self._note(ts_ms)
        return blocks, max(rows, default=0)

    def _note(self, ts_ms: int) -> None:
        """That this moment was told: it goes on with the newest span, or begins one after a leap of the clock."""
        first_ms, last_ms = self._told[-1] if self._told else (ts_ms, ts_ms)
        if self._told and first_ms <= ts_ms <= last_ms + LEAP_MS:
            self._told[-1] = (first_ms, max(last_ms, ts_ms))
        else:
            self._told = _fewer([*self._told, (ts_ms, ts_ms)])

    def _fresh(self, ts_ms: int, entity: Entity) -> bool:
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
                return self._pack(scope, rows, refused, now_ms)  # from the beginning, with the new columns
            if wrong:
                refused[ts_ms, entity] = wrong
        return builder.take()

    def _builder(self, scope: Scope, columns: set[str], now_ms: int) -> BlockBuilder:
        found = self._builders.get(scope)
        if (
            found is None
            or len(found.metrics) != len(columns)
            or not self._dictionary.use_schema(found.schema_id, now_ms)
        ):
            self._builders[scope] = found = BlockBuilder(*self._dictionary.schema_of(scope, columns, now_ms))
        return found

    def _learn(self, scope: Scope, columns: set[str], values: Mapping[str, float]) -> bool:
        """Whether there are columns in `values` that were not there before; names of no metric are told once."""
        fresh = values.keys() - columns
        known = {name for name in fresh if name in BY_NAME and BY_NAME[name].scope is scope}
        columns |= known
        for name in fresh - known - self.unknown_metrics:
            if len(self.unknown_metrics) < MAX_UNKNOWN:
                self.unknown_metrics.add(name)
                log.error("a source gave %s for a %s, which the catalog does not have; it is dropped", name, scope)
        return bool(known)

    def _follow(
        self,
        ts_ms: int,
        rows: Mapping[Entity, _Values],
        missing: Sequence[tuple[Entity, str, Absent | None]],
        refused: Mapping[tuple[int, Entity], Sequence[str]],
    ) -> None:
        """Begin and end absences. A value that one source has and another lacks is there."""
        for entity, values in rows.items():
            if refused:
                for name in refused.get((ts_ms, entity), ()):
                    del values[name]
                    self._absences.missing(entity, name, Absent.OUT_OF_RANGE, ts_ms)
            self._absences.present(entity, values, ts_ms)
        for entity, name, reason in missing:
            if reason is None:
                self._absences.present(entity, (name,), ts_ms)
            elif name not in rows.get(entity, ()):
                self._absences.missing(entity, name, reason, ts_ms)


def _fewer(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    while len(spans) > MAX_SPANS:
        (first_ms, last_ms), following = spans[:2]
        spans[:2] = [(min(first_ms, following[0]), max(last_ms, following[1]))]
    return spans

"""Pack rows into the blocks of `telemetry.proto`, with the standard library only (agents have no numpy).

Row layout: ts_ms int64, entity uint16, then the columns of the schema, little-endian and unpadded. Absent columns are
0 in the body and 0 in the presence bitmap. The collector reads many joined bodies with numpy at once (ingest).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter, le, truediv
from typing import Any

from drover_core.metrics.catalog import Metric
from drover_proto import telemetry_pb2 as pb

HEADER = "qH"  # ts_ms, entity index
MAX_SHAPES = 200  # kept by a builder


def record_struct(types: Iterable[str]) -> struct.Struct:
    """Return the struct of one row whose columns have these type codes."""
    return struct.Struct("<" + HEADER + "".join(types))


class _Shape:
    """What all rows with values for the same columns share.

    Nearly all rows have one of a few shapes. Loops in C read, check, scale and pack their values, for a quarter of what
    a loop in Python costs.
    """

    __slots__ = ("_values", "floats", "highs", "lows", "names", "pack", "presence", "steps", "whole")

    def __init__(self, given: Sequence[str], metrics: Sequence[Metric]) -> None:
        """`given`: the names of the row's values."""
        present = [metric for metric in metrics if metric.name in given]
        self.names = tuple(metric.name for metric in present)
        self.whole = len(present) == len(given)
        self._values: Callable[[Mapping[str, float]], Any] | None = itemgetter(*self.names) if present else None
        self.lows = tuple(metric.low for metric in present)
        self.highs = tuple(metric.high for metric in present)
        self.steps = tuple(metric.step or 1.0 for metric in present)
        self.floats = tuple(place for place, metric in enumerate(present) if not metric.step)
        # Bytes of absent columns are skipped, which makes them 0.
        columns = (m.type if m in present else f"{struct.calcsize('<' + m.type)}x" for m in metrics)
        self.pack = record_struct(columns).pack
        bits = sum(1 << i for i, metric in enumerate(metrics) if metric in present)
        self.presence = bits.to_bytes((len(metrics) + 7) // 8, "little")

    def take(self, values: Mapping[str, float]) -> Sequence[float]:
        """Return a row's values in the order of the columns."""
        if self._values is None:
            return ()
        found: Any = self._values(values)
        return found if len(self.names) > 1 else (found,)  # itemgetter returns a single value without a tuple


class BlockBuilder:
    """Collects rows of one schema until `take`, again and again. Not thread-safe."""

    def __init__(self, schema_id: int, metrics: Sequence[Metric]) -> None:
        self.schema_id = schema_id
        self.metrics = tuple(metrics)
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._body = bytearray()
        self._presence = bytearray()
        self.rows = 0

    def add(self, ts_ms: int, entity: int, values: Mapping[str, float]) -> tuple[list[str], bool]:
        """Append one row; `values` are in catalog units, by the metric's name.

        Returns:
            The names whose value is outside the catalog's range, which are absent in the row; and whether every name in
            `values` is a column here.
        """
        given = tuple(values)
        shape = self._shapes.get(given)
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[given] = _Shape(given, self.metrics)
        found = shape.take(values)
        if not (all(map(le, shape.lows, found)) and all(map(le, found, shape.highs))):  # NaN fails both comparisons
            bounds = zip(shape.names, shape.lows, found, shape.highs, strict=True)
            wrong = [name for name, low, value, high in bounds if not low <= value <= high]
            self.add(ts_ms, entity, {name: value for name, value in values.items() if name not in wrong})
            return wrong, shape.whole
        stored: list[float] = list(map(round, map(truediv, found, shape.steps)))  # as in Metric.encode
        for place in shape.floats:
            stored[place] = float(found[place])
        self._body += shape.pack(ts_ms, entity, *stored)
        self._presence += shape.presence
        self.rows += 1
        return [], shape.whole

    def take(self) -> pb.Block | None:
        """Return the block of all rows so far, None if there are none. The builder is empty again."""
        if not self.rows:
            return None
        block = pb.Block(schema=self.schema_id, rows=self.rows, presence=bytes(self._presence), body=bytes(self._body))
        self._body.clear()
        self._presence.clear()
        self.rows = 0
        return block


def schema_message(schema_id: int, scope: pb.Scope.ValueType, metrics: Sequence[Metric]) -> pb.Schema:
    """Return the Schema of a Hello for blocks of these columns."""
    columns = [pb.Column(metric=m.id, type=m.type, name=m.name) for m in metrics]
    return pb.Schema(id=schema_id, scope=scope, columns=columns)

"""Packing rows into the blocks of `telemetry.proto`, with the standard library only (agents have no numpy).

Row layout: ts_ms int64, entity uint16, then the columns of the schema, little-endian and unpadded. Absent columns are
0 in the body and 0 in the presence bitmap. The collector reads many joined bodies with numpy at once (ingest).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import ne

from drover_proto import telemetry_pb2 as pb
from drover_proto.catalog import Metric

HEADER = "qH"  # ts_ms, entity index
MAX_KNOWN = 2_000  # entities whose newest row a builder keeps


def record_struct(types: Iterable[str]) -> struct.Struct:
    """The struct of one row whose columns have these type codes."""
    return struct.Struct("<" + HEADER + "".join(types))


class _Known:
    """The newest row of one entity: what did not change since is not encoded again."""

    __slots__ = ("bits", "refused", "stored", "values")

    def __init__(self, columns: int) -> None:
        self.values: list[float | None] = [None] * columns
        self.stored: list[int | float] = [0] * columns
        self.bits = 0  # columns that are present
        self.refused = 0  # columns whose value cannot be true


class BlockBuilder:
    """Collects rows of one schema until `take`, again and again. Not thread-safe."""

    def __init__(self, schema_id: int, metrics: Sequence[Metric]) -> None:
        self.schema_id = schema_id
        self.metrics = tuple(metrics)
        self._names = tuple(m.name for m in self.metrics)
        self._columns = tuple((m.low, m.high, m.step, 1 << i) for i, m in enumerate(self.metrics))
        self._numbers = range(len(self.metrics))
        self._struct = record_struct(m.type for m in self.metrics)
        self._presence_bytes = (len(self.metrics) + 7) // 8
        self._body = bytearray()
        self._presence = bytearray()
        self._known: dict[int, _Known] = {}
        self.rows = 0

    def add(self, ts_ms: int, entity: int, values: Mapping[str, float]) -> tuple[list[str], bool]:
        """Append one row; `values` are in catalog units, by the metric's name.

        Returns:
            Names whose value could not be true (outside the catalog's range): left out of the row as absent; and
            whether every name in `values` is a column here.
        """
        known = self._known.get(entity)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[entity] = _Known(len(self.metrics))
        found = list(map(values.get, self._names))
        if found != known.values:
            self._encode(found, known)
        self._body += self._struct.pack(ts_ms, entity, *known.stored)
        self._presence += known.bits.to_bytes(self._presence_bytes, "little")
        self.rows += 1
        refused = [name for i, name in enumerate(self._names) if known.refused >> i & 1] if known.refused else []
        return refused, known.bits.bit_count() + len(refused) == len(values)

    def _encode(self, found: list[float | None], known: _Known) -> None:
        """What changed, as Metric.encode does it: without a call for each value, this is most of an agent's packing."""
        stored, columns = known.stored, self._columns
        bits, refused = known.bits, known.refused
        for i in compress(self._numbers, map(ne, found, known.values)):
            value = found[i]
            low, high, step, bit = columns[i]
            bits &= ~bit
            refused &= ~bit
            stored[i] = 0
            if value is not None:
                if low <= value <= high:  # NaN fails both comparisons
                    stored[i] = round(value / step) if step else float(value)
                    bits |= bit
                else:
                    refused |= bit
        known.values, known.bits, known.refused = found, bits, refused

    def take(self) -> pb.Block | None:
        """The block of all rows so far, or None when there are none; the builder is empty again."""
        if not self.rows:
            return None
        block = pb.Block(schema=self.schema_id, rows=self.rows, presence=bytes(self._presence), body=bytes(self._body))
        self._body.clear()
        self._presence.clear()
        self.rows = 0
        return block


def schema_message(schema_id: int, scope: pb.Scope.ValueType, metrics: Sequence[Metric]) -> pb.Schema:
    """The Schema that Hello tells for blocks of these columns."""
    columns = [pb.Column(metric=m.id, type=m.type, name=m.name) for m in metrics]
    return pb.Schema(id=schema_id, scope=scope, columns=columns)

"""Packing rows into the blocks of `telemetry.proto`, with the standard library only (agents have no numpy).

Row layout: ts_ms int64, entity uint16, then the columns of the schema, little-endian and unpadded. Absent columns are
0 in the body and 0 in the presence bitmap. The collector reads many joined bodies with numpy at once (ingest).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from drover_proto import telemetry_pb2 as pb
from drover_proto.catalog import Metric

HEADER = "qH"  # ts_ms, entity index


def record_struct(types: Iterable[str]) -> struct.Struct:
    """The struct of one row whose columns have these type codes."""
    return struct.Struct("<" + HEADER + "".join(types))


class BlockBuilder:
    """Collects rows of one schema until `take`. Not thread-safe."""

    def __init__(self, schema_id: int, metrics: Sequence[Metric]) -> None:
        self.schema_id = schema_id
        self.metrics = tuple(metrics)
        self._columns = tuple((m.name, m.low, m.high, m.step, 1 << i) for i, m in enumerate(self.metrics))
        self._struct = record_struct(m.type for m in self.metrics)
        self._presence_bytes = (len(self.metrics) + 7) // 8
        self._body = bytearray()
        self._presence = bytearray()
        self.rows = 0

    def add(self, ts_ms: int, entity: int, values: Mapping[str, float]) -> tuple[list[str], bool]:
        """Append one row; `values` are in catalog units, by the metric's name.

        Returns:
            Names whose value could not be true (outside the catalog's range): left out of the row as absent; and
            whether every name in `values` is a column here.
        """
        stored: list[int | float] = []
        bits, refused = 0, []
        get, append = values.get, stored.append
        for name, low, high, step, bit in self._columns:  # Metric.encode without the call: most of an agent's packing
            value = get(name)
            if value is None:
                append(0)
            elif low <= value <= high:  # NaN fails both comparisons
                append(round(value / step) if step else float(value))
                bits |= bit
            else:
                append(0)
                refused.append(name)
        self._body += self._struct.pack(ts_ms, entity, *stored)
        self._presence += bits.to_bytes(self._presence_bytes, "little")
        self.rows += 1
        return refused, bits.bit_count() + len(refused) == len(values)

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

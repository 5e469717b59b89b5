"""Keep the rows of an insert in memory in few bytes.

A column whose values are all the same is kept as one value. A column of 64-bit integers that lie close together is kept
as 32-bit differences from the lowest: most counters stand still, and the others grow little in a second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.store.records import Mask, SampleBatch, Stored

NARROW = np.uint32


class Packed:
    """Rows of one insert.

    Args:
        batch: the rows.
        present: how many values each row has.

    Attributes:
        names: metrics that at least one row has.
        nbytes: of the ids, times, counts and columns.
    """

    def __init__(self, batch: SampleBatch, present: npt.NDArray[np.uint16]) -> None:
        self.entity_id, self.ts_ms, self.present = batch.entity_id, batch.ts_ms, present
        self._columns: dict[str, tuple[Stored, Mask | None]] = {}
        self._lowest: dict[str, np.generic] = {}  # lowest value of each column that is kept as differences
        self.nbytes = batch.entity_id.nbytes + batch.ts_ms.nbytes + present.nbytes
        for name, (stored, mask) in batch.columns.items():
            if mask.all():
                self._keep(name, np.ascontiguousarray(stored), None)
            elif mask.any():
                self._keep(name, np.ascontiguousarray(stored), mask)
        self.names = frozenset(self._columns)

    def __len__(self) -> int:
        return len(self.ts_ms)

    def get(self, name: str) -> tuple[Stored, Mask | None]:
        """Return a column's stored values, and a mask of the rows that have one (None: all rows).

        Raises:
            KeyError: no row has the metric.
        """
        stored, mask = self._columns[name]
        lowest = self._lowest.get(name)
        if lowest is not None:
            stored = stored.astype(lowest.dtype) + lowest
        return stored, mask

    def _keep(self, name: str, stored: Stored, mask: Mask | None) -> None:
        present = stored if mask is None else stored[mask]
        low, high = present.min(), present.max()
        if mask is not None:
            stored = np.where(mask, stored, low)  # what absent rows hold must not widen the range
        if low == high:
            stored = np.broadcast_to(stored[:1].copy(), stored.shape)
            self.nbytes += stored.itemsize
        elif stored.dtype.kind in "iu" and stored.itemsize > NARROW(0).itemsize and int(high) - int(low) < 1 << 32:
            stored, self._lowest[name] = (stored - low).astype(NARROW), low
            self.nbytes += stored.nbytes
        else:
            self.nbytes += stored.nbytes
        self.nbytes += 0 if mask is None else mask.nbytes
        self._columns[name] = stored, mask

"""Rows as they were inserted, in few bytes: most counters stand still, and hardly any runs far in a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.store.records import Mask, SampleBatch, Stored

WORD = np.uint32


class Packed:
    """
    Args:
        present: how many values each row has.
    Attributes:
        names: metrics that some row tells of. nbytes: what all of it takes.
    """

    def __init__(self, batch: SampleBatch, present: npt.NDArray[np.uint16]) -> None:
        self.entity_id, self.ts_ms, self.present = batch.entity_id, batch.ts_ms, present
        self._columns: dict[str, tuple[Stored, Mask | None]] = {}
        self._lowest: dict[str, np.generic] = {}  # of those that are kept as what they are above it
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
        """(stored form, present); None: all are.

        Raises:
            KeyError: no row tells of it.
        """
        stored, mask = self._columns[name]
        lowest = self._lowest.get(name)
        if lowest is not None:
            stored = stored.astype(lowest.dtype) + lowest
        return stored, mask

    def _keep(self, name: str, stored: Stored, mask: Mask | None) -> None:
        low, high = stored.min(), stored.max()
        if low == high:
            stored = np.broadcast_to(stored[:1].copy(), stored.shape)
            self.nbytes += stored.itemsize
        elif stored.dtype.kind in "iu" and stored.itemsize > WORD(0).itemsize and int(high) - int(low) < 1 << 32:
            stored, self._lowest[name] = (stored - low).astype(WORD), low
            self.nbytes += stored.nbytes
        else:
            self.nbytes += stored.nbytes
        self.nbytes += 0 if mask is None else mask.nbytes
        self._columns[name] = stored, mask

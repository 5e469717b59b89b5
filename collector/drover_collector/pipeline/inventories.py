"""What nodes told of themselves, from the store to the engine: one way for one collector and for several.

Raises StoreError where the store cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from drover_collector.detectors._lib.inventory import InventoryReport
from drover_collector.store import Store

BEFORE_MS = 72 * 3_600_000  # a start must know what changed within a rollout (detectors/drift.py)
OVERLAP_MS = 600_000  # an inventory may wait for a store that fails, and is stored with the time it came
SLICE_NODES = 1_000  # of some 10 kB each, read at once at a start


class Inventories:
    """Used in one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mark = -1
        self._upto_ms = 0

    def restore(self, now_ms: int, nodes: int) -> Sequence[Callable[[], Sequence[InventoryReport]]]:
        """For each node what it was before a rollout could have begun, then its newest; in this order. As questions,
        each of a part of the nodes."""
        slices = max(1, -(-nodes // SLICE_NODES))
        self._upto_ms = now_ms
        return [
            partial(self._store.inventories.newest_between, 0, to_ms, number, slices)
            for number in range(slices)
            for to_ms in (now_ms - BEFORE_MS, now_ms + OVERLAP_MS)
        ]

    def news(self, now_ms: int) -> Sequence[InventoryReport]:
        """The newest of each node that told lately; all of it again is no news to the engine."""
        mark = self._store.table_fingerprint("inventory")
        if mark == self._mark:
            return []
        found = self._store.inventories.newest_between(self._upto_ms - OVERLAP_MS, now_ms + OVERLAP_MS)
        self._mark, self._upto_ms = mark, now_ms
        return found

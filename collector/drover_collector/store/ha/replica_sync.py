"""What one collector learns of what others wrote into the same server: who is where, who reports, what waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drover_collector.fleet.buckets import Bucket, Ints
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.base import Base, numbers, sql_time_range
from drover_collector.store.records import EntityRow
from drover_collector.store.samples.read import size_of
from drover_collector.store.samples.rows import Span, merged, without
from drover_collector.store.schema.tables import samples_table
from drover_core.metrics.catalog import Scope


class Following(Base):
    _entity_blocks: Sequence[Span] = ()  # numbers of inserts into `entities` whose rows are in the placements

    @property
    def shared(self) -> bool:
        """Whether other collectors may write here too."""
        return not self._clients.embedded

    def mark(self, table: str) -> int:
        """A number that is another one after each insert into the table, whoever made it; after merges too.

        Not the highest block: of two inserts at once the later one may be there first, on a replica by seconds.
        """
        found = self._clients.rows(
            "SELECT reinterpretAsInt64(groupBitXor(sipHash64(name))) AS n"
            f" FROM {self._clients.parts} WHERE table = '{table}'"
        )
        return int(found[0]["n"])

    def refresh_entities(self) -> int:
        """Take in where others have seen entities; gives how many were news."""
        parts = self._clients.rows(
            "SELECT toInt64(min_block_number) AS low, toInt64(max_block_number) + 1 AS high"
            f" FROM {self._clients.parts} WHERE table = 'entities'"
        )
        spans = [(row["low"], row["high"]) for row in parts]
        new = merged(span for span in spans if without(span, self._entity_blocks))
        if not new:
            return 0
        # By blocks, not by names: a part may be merged before it is read.
        low, high = (f"toInt64OrZero(splitByChar('_', _part)[{n}])" for n in (2, 3))
        found = self._clients.rows(
            "SELECT entity_id, scope, key, node, nullIf(gpu, -1) AS gpu, uuid, serial, pci, model, link, mig,"
            " toUnixTimestamp64Milli(first) AS first_ms, toUnixTimestamp64Milli(last) AS last_ms FROM entities"
            f" WHERE {' OR '.join(f'({high} >= {first} AND {low} < {last})' for first, last in new)}"
        )
        rows = [EntityRow(**(row | {"scope": Scope(row["scope"])})) for row in found]
        news = self._placements.news(rows)
        self._placements.add(news)
        self._entity_blocks = merged([*self._entity_blocks, *new])
        return len(news)

    def heard(self, index: FleetIndex, start_ms: int, length_ms: int) -> Bucket:
        """A bucket without values: how many rows of each GPU and node are there, and who holds what."""
        gpu_rows = self._heard(index, Scope.GPU, start_ms, length_ms)
        node_rows = self._heard(index, Scope.NODE, start_ms, length_ms)
        self._heard(index, Scope.LINK, start_ms, length_ms)
        jobs = np.full(index.gpu_count, -1, np.int32)
        return Bucket(start_ms, length_ms, {}, {}, gpu_rows, node_rows, jobs, (), {})

    def _heard(self, index: FleetIndex, scope: Scope, start_ms: int, length_ms: int) -> Ints:
        table = self._clients.arrow(
            "SELECT entity_id, count() AS n, toUnixTimestamp64Milli(max(ts)) AS newest"
            f" FROM {samples_table(scope)} WHERE {sql_time_range(start_ms, start_ms + length_ms)} GROUP BY entity_id"
        )
        ids = numbers(table, "entity_id")
        self._placements.note_seen(ids, numbers(table, "newest"))
        rows, target = self._placements.map(index, scope, start_ms + length_ms).find(ids)
        counts = np.zeros(size_of(index, scope), np.int32)
        counts[target] = numbers(table, "n")[rows]
        return counts

"""Rows of samples and rollups, read in pieces that bound the memory, and folded into buckets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import Ids
from drover_collector.store.samples import fold
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.fold import Folded
from drover_collector.store.samples.spans import Span
from drover_collector.store.schema.tables import rollup_table, samples_table
from drover_collector.store.sql import sql_time_range
from drover_core.metrics.catalog import Scope, of_scope

LEVELS_MS = {"10s": 10_000, "5m": 300_000}
RAW_MS = 1000  # the usual interval of an agent
PIECE_ROWS = 100_000  # of one query: about 30 MB with all columns of a GPU
WIDTH = len(of_scope(Scope.GPU)) + 5
IDS_MAX = 20_000  # entities that a query names; above, it reads a range of ids and leaves out the others
PARTS_S = 10.0
# One thread, large blocks and no compression within one process: half the CPU.
LEAN = (
    " SETTINGS max_threads = 1, max_block_size = 131072, preferred_block_size_bytes = 67108864,"
    " output_format_arrow_compression_method = 'none'"
)


class SampleRows:
    """Reads samples and rollups as buckets. Thread-safe."""

    def __init__(self, clients: Clients, registry: EntityRegistry) -> None:
        self._clients = clients
        self._registry = registry
        self._parts: Sequence[tuple[str, int, int, int]] = ()
        self._parts_at = -PARTS_S  # monotonic
        self._parts_changes = 0

    def parts_of(self, table: str) -> list[tuple[int, int, int]]:
        """Return (rows, from, to ms) of a table's parts, at most PARTS_S old."""
        found = [(rows, low, high) for name, rows, low, high in self._parts if name == table]
        asked = time.monotonic()
        if asked - self._parts_at >= (PARTS_S if found else PARTS_S / 10):
            changes = self._parts_changes
            rows = self._clients.rows(
                "SELECT table, toInt64(rows) AS n, toInt64(toUnixTimestamp(min_time)) * 1000 AS low,"
                f" toInt64(toUnixTimestamp(max_time)) * 1000 + 999 AS high FROM {self._clients.parts}"
                " WHERE rows > 0 AND toUnixTimestamp(max_time) > 0"
            )
            self._parts = [(row["table"], row["n"], row["low"], row["high"]) for row in rows]
            if changes == self._parts_changes:
                self._parts_at = asked
            found = [(rows, low, high) for name, rows, low, high in self._parts if name == table]
        return found

    def note_stored(self, table: str, ts_ms: int) -> None:
        """Note that rows from `ts_ms` on were stored. If they are older than all known rows, read the parts again.

        Otherwise a chart would take their time for one where only rollups are left.
        """
        if ts_ms < min((low for name, _, low, _ in self._parts if name == table), default=ts_ms + 1):
            self._parts_changes += 1
            self._parts_at = -PARTS_S

    def forget_parts(self) -> None:
        """Read the parts again when they are asked for next."""
        self._parts_at = -PARTS_S

    def oldest_ms(self, table: str) -> int | None:
        """Return about how old the oldest rows of a table are; None: it has none."""
        return min((low for _, low, _ in self.parts_of(table)), default=None)

    def fold(
        self,
        scope: Scope,
        spans: Sequence[Span],
        length_ms: int,
        *,
        level: str | None = None,
        metrics: Sequence[str] | None = None,
        ids: Ids | None = None,
        entities: Span | None = None,
        counts: bool = True,
    ) -> Folded:
        """Return buckets of `length_ms` made of the rows within `spans`.

        Args:
            level: of the rollup; None: the samples themselves.
            metrics: None: all. ids: None: all entities. entities: a range of ids, [low, high), read in one query.
            counts: False: without the numbers of rows and values.
        """
        return fold.join(
            list(
                self.folds(
                    scope, spans, length_ms, level=level, metrics=metrics, ids=ids, entities=entities, counts=counts
                )
            )
        )

    def folds(
        self,
        scope: Scope,
        spans: Sequence[Span],
        length_ms: int,
        *,
        level: str | None = None,
        metrics: Sequence[str] | None = None,
        ids: Ids | None = None,
        entities: Span | None = None,
        counts: bool = True,
    ) -> Iterator[Folded]:
        """Yield the same in the pieces in which it is read; each entity is in one of them."""
        names = [metric.name for metric in of_scope(scope)] if metrics is None else list(metrics)
        if not spans:
            return
        if level is None:
            extra, name, every_ms = ["present"], samples_table(scope), RAW_MS
        else:
            extra, name, every_ms = ["rows", "present"], rollup_table(scope, level), LEVELS_MS[level]
        extra = [*(extra if counts else []), *(["version"] if level else []), *names]
        columns = ", ".join(["entity_id", "toUnixTimestamp64Milli(ts) AS ts_ms", *(f"`{column}`" for column in extra)])
        when = " OR ".join(sql_time_range(low, high) for low, high in spans)
        # In rows with all columns of a GPU: the measure of a piece.
        rows_each = max(1, sum(high - low for low, high in spans) // every_ms * (len(names) + 5) // WIDTH)
        named = ids is not None and entities is None and len(ids) <= IDS_MAX
        for which in self._pieces(scope, rows_each, ids, entities):
            table = self._clients.arrow(f"SELECT {columns} FROM {name} PREWHERE {which} AND ({when}){LEAN}")
            if table.num_rows:
                if level is None:
                    piece = fold.fold_raw([table], names, length_ms, counts=counts)
                else:
                    piece = fold.fold_rollup(table, names, length_ms, counts=counts)
                yield piece if ids is None or named else piece.of(ids)

    def _pieces(self, scope: Scope, rows_each: int, ids: Ids | None, entities: Span | None) -> Iterator[str]:
        """Yield conditions on entity ids, each for about PIECE_ROWS rows."""
        if entities is not None:
            yield f"entity_id BETWEEN {entities[0]} AND {entities[1] - 1}"
            return
        if ids is not None and len(ids) <= IDS_MAX:
            step = max(1, PIECE_ROWS // rows_each)
            for at in range(0, len(ids), step):
                yield f"entity_id IN ({comma(ids[at : at + step].tolist())})"
            return
        ids = self._registry.ids(scope)
        for first, last in id_ranges(ids, -(-len(ids) * rows_each // PIECE_ROWS)):
            yield f"entity_id BETWEEN {first} AND {last - 1}" if last - first < 1 << 64 else "1"


def id_ranges(ids: Ids, count: int) -> list[Span]:
    """Split all possible ids, [0, 2**64), into `count` ranges, at least one, with equally many known ids in each.

    Args:
        ids: the known ids, ascending. If they are fewer than `count`, the ranges have equal widths.
    """
    count = max(1, count)
    cuts = [int(ids[len(ids) * n // count]) if len(ids) >= count else (n << 64) // count for n in range(1, count)]
    return list(pairwise([0, *cuts, 1 << 64]))


def comma(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))

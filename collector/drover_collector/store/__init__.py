"""The store: the only place that knows ClickHouse. `Store.open(url)`; docs/decisions tell why it is as it is."""

from __future__ import annotations

from drover_collector.store import engine, migrations, schema
from drover_collector.store.errors import StoreError
from drover_collector.store.export import Export
from drover_collector.store.history import History
from drover_collector.store.placements import Placements
from drover_collector.store.reads import Reads
from drover_collector.store.records import EntityRow, OutboxRow, SampleBatch, Totals, entity_id
from drover_collector.store.series import Series
from drover_collector.store.writes import Writes
from drover_proto.catalog import Scope

__all__ = ["EntityRow", "OutboxRow", "SampleBatch", "Store", "StoreError", "Totals", "entity_id"]


class Store(Writes, Reads, Series, Export, History):
    """An open store. Thread-safe; each call blocks, so the event loop calls it in a thread."""

    @classmethod
    def open(cls, url: str, *, wait_s: float = 0, retention_days: int = 30) -> Store:
        """Open, and make or extend the tables.

        Args:
            url: `chdb:///PATH` (embedded) or `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE`; `chdb:///PATH?database=NAME`
                holds several in one folder.
            wait_s: how long to wait for another process to let go of an embedded store.
            retention_days: samples older than this are deleted.

        Raises:
            StoreError: one line, what is wrong and what to do.
        """
        clients = engine.connect(url, wait_s)
        try:
            migrations.ensure(clients, schema.tables(retention_days))
            found = clients.rows(
                "SELECT entity_id, scope, key, node, nullIf(gpu, -1) AS gpu, uuid, serial, pci, model, link, mig,"
                " toUnixTimestamp64Milli(first) AS first_ms, toUnixTimestamp64Milli(last) AS last_ms"
                " FROM entities FINAL"
            )
            for row in found:
                row["scope"] = Scope(row["scope"])
            store = cls(clients, Placements(EntityRow(**row) for row in found), retention_days)
            store.load_seen()
        except BaseException:
            clients.close()
            raise
        return store

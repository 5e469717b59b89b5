"""The store: the only place that knows ClickHouse. `Store.open(url)`; docs/decisions tell why it is as it is."""

from __future__ import annotations

import time

from drover_collector.store.clickhouse import client as engine
from drover_collector.store.clickhouse import embedded
from drover_collector.store.clickhouse.client import KEEP_FREE_BYTES
from drover_collector.store.clickhouse.embedded import StoreFolderState
from drover_collector.store.clickhouse.server import redacted as shown
from drover_collector.store.durability.backup import Backup, restore
from drover_collector.store.durability.expiry import Expiry
from drover_collector.store.durability.integrity import Integrity
from drover_collector.store.durability.retention import Dropped, keep_free, kept_days
from drover_collector.store.durability.sizes import (
    FOREVER_DAYS,
    Part,
    TableSize,
    days_left,
    sizes_of,
)
from drover_collector.store.errors import StoreError
from drover_collector.store.ha.cluster import KEY
from drover_collector.store.ha.lease import (
    FileLease,
    KeeperEpochs,
    Lease,
    TableEpochs,
)
from drover_collector.store.ha.replica_sync import Following
from drover_collector.store.records import EntityRow, OutboxRow, SampleBatch, Totals, entity_id
from drover_collector.store.repositories.audit import Audits
from drover_collector.store.repositories.history import History
from drover_collector.store.repositories.jobs import Jobs, JobSpan, WorkloadRow
from drover_collector.store.repositories.probes import OpenOrder, ProbeRow, Probes
from drover_collector.store.repositories.silences import SilencesStored
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.export import Export
from drover_collector.store.samples.series import Series
from drover_collector.store.samples.warmup import PastBuckets
from drover_collector.store.samples.write import Writes
from drover_collector.store.schema import ddl_copies as definitions
from drover_collector.store.schema import migrations
from drover_collector.store.schema import tables as schema
from drover_core.metrics.catalog import Scope

__all__ = [
    "FOREVER_DAYS",
    "KEEP_FREE_BYTES",
    "Dropped",
    "EntityRow",
    "FileLease",
    "JobSpan",
    "Lease",
    "OpenOrder",
    "OutboxRow",
    "Part",
    "ProbeRow",
    "SampleBatch",
    "Store",
    "StoreError",
    "StoreFolderState",
    "TableSize",
    "Totals",
    "WorkloadRow",
    "days_left",
    "entity_id",
    "keep_free",
    "look",
    "restore",
    "shown",
    "sizes_of",
]


def look(url: str, cluster: str = "") -> StoreFolderState | None:
    """What opening it would meet, as far as that shows without opening; None: a server, which is not asked.

    Raises:
        StoreError: a url that is none or does not go with a cluster, a folder that cannot be a store. One line.
    """
    at = engine.address(url, cluster=cluster)
    return embedded.look(at[0]) if isinstance(at, tuple) else None


class Store(
    Backup, SilencesStored, Audits, Probes, Writes, PastBuckets, Series, Export, Following, History, Jobs, Expiry
):
    """An open store. Thread-safe; each call blocks, so the event loop calls it in a thread."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        wait_s: float = 0,
        retention_days: int = 30,
        retention_10s_days: int = 90,
        retention_5min_days: int = 1100,
        password: str | None = None,
        cluster: str = "",
        visitor: bool = False,
    ) -> Store:
        """Open, and make or extend the tables.

        Args:
            url: `chdb:///PATH` (embedded) or `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE`; `chdb:///PATH?database=NAME`
                holds several in one folder.
            wait_s: how long to wait for another process to let go of an embedded store.
            retention_days: samples older than this are deleted: on a server by its TTL, else by passes (see `expiry`).
            retention_10s_days, retention_5min_days: likewise their rollups.
            password: of the server's user; goes before that of the url.
            cluster: name of the server's cluster, for the form that spreads over it; empty: one server.
            visitor: a command beside the collector. What agents are asked for again is left to that; on a server, where
                it runs meanwhile, the retention of tables that are there, too.

        Raises:
            StoreError: one line, what is wrong and what to do.
        """
        tables = schema.tables(retention_days, retention_10s_days, retention_5min_days)
        sharded = frozenset(t.name for t in tables if t.partition and t.columns[0].name == KEY)
        clients = engine.connect(url, wait_s, password=password, cluster=cluster, sharded=sharded)
        integrity = None if clients.home is None else Integrity(clients, *clients.home)
        try:
            if integrity is not None:
                clients.mended = integrity.set_aside
            migrations.ensure(clients, tables, keep_ttl=visitor and clients.home is None)
            if clients.home is not None:
                definitions.keep(*clients.home)
            found = clients.rows(
                "SELECT entity_id, scope, key, node, nullIf(gpu, -1) AS gpu, uuid, serial, pci, model, link, mig,"
                " toUnixTimestamp64Milli(first) AS first_ms, toUnixTimestamp64Milli(last) AS last_ms"
                " FROM entities FINAL ORDER BY first, entity_id"  # of two ids of one name the first counts, always
            )
            for row in found:
                row["scope"] = Scope(row["scope"])
            store = cls(clients, EntityRegistry(EntityRow(**row) for row in found), retention_days)
            store.kept_days = kept_days(tables)
            store.expires = {} if clients.home is None else {t.name: t.ttl for t in tables if t.ttl and not t.partition}
            store.load_newest()
            store.load_seen()
            store.load_rollups()
            if integrity is not None:
                store.integrity = integrity
                integrity.told = lambda damage: store.mark_damaged(damage.table, damage.from_ms, damage.to_ms)
                integrity.look()
                store.marks_known = True
                if not visitor:
                    store.resend = integrity.lost(time.time_ns() // 1_000_000)
                    if store.resend:
                        clients.command("TRUNCATE TABLE lane_seqs")
                    integrity.note_boot()
                integrity.start()
        except BaseException:
            if integrity is not None:
                integrity.close()
            clients.close()
            raise
        return store

    def lease(self, holder: str, ttl_s: float) -> Lease | FileLease:
        """The lease of this store's active collector. `holder` names this process, as no other is named.

        Raises:
            StoreError: the store does not answer.
        """
        if self._clients.embedded:
            return FileLease()
        apart = self._clients.apart()
        form = self._clients.cluster
        epochs = (
            TableEpochs(apart) if form is None else KeeperEpochs(apart, form.database, f" ON CLUSTER `{form.name}`")
        )
        return Lease(epochs, holder, ttl_s)

    def catch_up(self) -> None:
        """Returns when this server has what the others of its cluster have taken; for one that takes over."""
        form = self._clients.cluster
        if form is not None:
            whole = {table.name for table in schema.tables(self.retention_days)} - form.sharded
            for table in sorted(whole - {"drops", "schema_versions"}):  # of which nothing is decided
                self._clients.command(f"SYSTEM SYNC REPLICA `{form.database}`.{table}")

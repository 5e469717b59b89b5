"""An open store: a part for each subject, made of one set of ClickHouse clients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from drover_collector.store.clickhouse import client as engine
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability.backup import Backups
from drover_collector.store.durability.integrity import Integrity
from drover_collector.store.durability.retention import Retention, kept_days
from drover_collector.store.durability.sizes import StoreSizes
from drover_collector.store.ha.cluster import KEY
from drover_collector.store.ha.lease import FileLease, KeeperEpochs, Lease, TableEpochs
from drover_collector.store.repositories.absences import AbsenceTable
from drover_collector.store.repositories.actions import ActionTable, OutageTable
from drover_collector.store.repositories.audit import AuditTable
from drover_collector.store.repositories.collectors import CollectorTable
from drover_collector.store.repositories.decisions import DecisionTable
from drover_collector.store.repositories.events import EventTable
from drover_collector.store.repositories.health import HealthTable
from drover_collector.store.repositories.incidents import FindingTable, IncidentTable
from drover_collector.store.repositories.inventory import InventoryTable
from drover_collector.store.repositories.jobs import JobTable
from drover_collector.store.repositories.offsets import OffsetTable
from drover_collector.store.repositories.outbox import OutboxTable
from drover_collector.store.repositories.probes import ProbeTables
from drover_collector.store.repositories.silences import SilenceTable
from drover_collector.store.rollups.dirty_ranges import DirtyRanges
from drover_collector.store.rollups.progress import RollupProgress
from drover_collector.store.rollups.rollups import Rollups
from drover_collector.store.samples.buckets import BucketReader
from drover_collector.store.samples.entities import EntityTable, read_entities
from drover_collector.store.samples.export import SampleExport
from drover_collector.store.samples.recent import Recent
from drover_collector.store.samples.rows import SampleRows
from drover_collector.store.samples.series import SeriesReader
from drover_collector.store.samples.table import LastQuery, SampleTable
from drover_collector.store.schema import ddl_copies, migrations
from drover_collector.store.schema.tables import Table, tables
from drover_collector.store.table_writer import TableWriter, WriteFence


class Store:
    """An open store. Thread-safe; each call blocks, so the event loop calls it in a thread.

    Attributes:
        clients: runs SQL; for tests and benchmarks.
        fence: allows or refuses writes of the active collector.
        integrity: watches an embedded store's files; None: a server, which does this itself.
        retention_days: how long samples are kept.
    """

    def __init__(
        self, clients: Clients, schema: Sequence[Table], retention_days: int, integrity: Integrity | None
    ) -> None:
        self.clients = clients
        self.retention_days = retention_days
        self.integrity = integrity
        self.fence = WriteFence()
        writer = TableWriter(clients, self.fence)
        registry = read_entities(clients)
        recent = Recent()

        self.entities = EntityTable(clients, registry, writer)
        self.rows = SampleRows(clients, registry)
        self.dirty_ranges = DirtyRanges(clients, self.rows, RollupProgress(clients, self.fence))
        self.rollups = Rollups(clients, self.fence, registry, self.rows, recent, self.dirty_ranges)
        self.absences = AbsenceTable(clients, writer)
        self.jobs = JobTable(clients, writer)
        self.buckets = BucketReader(clients, registry, self.rows, self.rollups, self.jobs)
        self.last_query = LastQuery()
        self.samples = SampleTable(clients, registry, self.rows, recent, self.absences, self.last_query)
        self.series = SeriesReader(registry, self.rows, self.rollups, self.last_query)
        self.export = SampleExport(clients, registry)

        self.events = EventTable(clients, writer)
        self.offsets = OffsetTable(clients, writer)
        self.inventories = InventoryTable(clients, writer)
        self.findings = FindingTable(clients, writer)
        self.incidents = IncidentTable(clients, writer)
        self.health = HealthTable(clients, writer)
        self.decisions = DecisionTable(clients, writer)
        self.actions = ActionTable(clients, writer)
        self.outages = OutageTable(clients, writer)
        self.probes = ProbeTables(clients, writer)
        self.outbox = OutboxTable(clients, writer)
        self.silences = SilenceTable(clients, writer)
        self.audit = AuditTable(clients, writer)
        self.collectors = CollectorTable(clients, writer)

        self.sizes = StoreSizes(clients)
        self.backups = Backups(clients)
        expires = {t.name: t.ttl for t in schema if t.ttl and not t.partition} if clients.embedded else {}
        self.retention = Retention(clients, self.fence, self.sizes, self.backups, kept_days(schema), expires)

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
        """Open a store, and make or extend its tables.

        Args:
            url: `chdb:///PATH` (embedded) or `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE`;
                `chdb:///PATH?database=NAME` holds several in one folder.
            wait_s: how long to wait for another process to release an embedded store.
            retention_days: samples older than this are deleted: on a server by its TTL, else by `Retention`.
            retention_10s_days, retention_5min_days: the same for their rollups.
            password: of the server's user; takes precedence over the url's.
            cluster: name of the server's cluster, over which the tables are spread; empty: one server.
            visitor: for a command that runs next to the collector. It leaves two decisions to the collector: what
                agents are asked for again, and, on a server, the retention of existing tables.

        Raises:
            StoreError: one line, what is wrong and what to do.
        """
        schema = tables(retention_days, retention_10s_days, retention_5min_days)
        sharded = frozenset(t.name for t in schema if t.partition and t.columns[0].name == KEY)
        clients = engine.connect(url, wait_s, password=password, cluster=cluster, sharded=sharded)
        integrity = None if clients.home is None else Integrity(clients, *clients.home)
        try:
            if integrity is not None:
                clients.mended = integrity.set_aside
            migrations.ensure(clients, schema, keep_ttl=visitor and clients.home is None)
            if clients.home is not None:
                ddl_copies.keep(*clients.home)
            store = cls(clients, schema, retention_days, integrity)
            store._load(visitor)
        except BaseException:
            if integrity is not None:
                integrity.close()
            clients.close()
            raise
        return store

    def _load(self, visitor: bool) -> None:
        self.absences.load_newest()
        self.jobs.load_newest()
        self.samples.load()
        self.rollups.load()
        if self.integrity is None:
            return
        dirty = self.dirty_ranges
        self.integrity.report_to(lambda damage: dirty.mark_damaged(damage.table, damage.from_ms, damage.to_ms))
        dirty.all_loaded = True
        if not visitor:
            if self.integrity.lost(time.time_ns() // 1_000_000):
                self.offsets.forget()
            self.integrity.note_boot()
        self.integrity.start()

    @property
    def shared(self) -> bool:
        """Whether other collectors may write to this store too."""
        return not self.clients.embedded

    def close(self) -> None:
        """Wait for running statements and close. What was written is durable anyway."""
        if self.integrity is not None:
            self.integrity.close()
        self.clients.close()

    def limited(self, seconds: float) -> AbstractContextManager[None]:
        """Return a context in which queries of this thread end after `seconds`."""
        return self.clients.limited(seconds)

    def lease(self, holder: str, ttl_s: float) -> Lease | FileLease:
        """Return the lease of this store's active collector. `holder` names this process and no other.

        Raises:
            StoreError: the store does not answer.
        """
        if self.clients.embedded:
            return FileLease()
        apart = self.clients.apart()
        form = self.clients.cluster
        epochs = (
            TableEpochs(apart) if form is None else KeeperEpochs(apart, form.database, f" ON CLUSTER `{form.name}`")
        )
        return Lease(epochs, holder, ttl_s)

    def catch_up(self) -> None:
        """Wait until this server of a cluster has what the others have taken, before this collector takes over."""
        form = self.clients.cluster
        if form is None:
            return
        replicated = {table.name for table in tables(self.retention_days)} - form.sharded
        for table in sorted(replicated - {"collectors", "drops", "schema_versions"}):  # no decision depends on these
            self.clients.command(f"SYSTEM SYNC REPLICA `{form.database}`.{table}")

    def table_fingerprint(self, table: str) -> int:
        """Return a number that changes with each insert into the table, by any collector, and with merges.

        Not the highest block: of two inserts at once the later one may be there first, on a replica by seconds.
        """
        found = self.clients.rows(
            "SELECT reinterpretAsInt64(groupBitXor(sipHash64(name))) AS n"
            f" FROM {self.clients.parts} WHERE table = '{table}'"
        )
        return int(found[0]["n"])

    def release_memory(self) -> None:
        """Return memory that the embedded engine has freed to the system."""
        if self.clients.embedded:
            self.clients.command("SYSTEM JEMALLOC PURGE")

"""The store: the only package that knows ClickHouse. Open it with `Store.open(url)`; its parts are attributes."""

from __future__ import annotations

from drover_collector.store.clickhouse.client import KEEP_FREE_BYTES, folder_state
from drover_collector.store.clickhouse.embedded import StoreFolderState
from drover_collector.store.clickhouse.server import redacted
from drover_collector.store.durability.backup import restore
from drover_collector.store.durability.retention import Dropped
from drover_collector.store.durability.sizes import FOREVER_DAYS, Part, TableSize, days_left, keep_free, sizes_of
from drover_collector.store.errors import StoreError
from drover_collector.store.ha.lease import FileLease, Lease
from drover_collector.store.records import EntityRow, SampleBatch, Totals, entity_id
from drover_collector.store.repositories.jobs import JobSpan
from drover_collector.store.repositories.outbox import OutboxRow
from drover_collector.store.repositories.probes import OpenOrder, ProbeRow
from drover_collector.store.samples.table import WorkloadRow
from drover_collector.store.store import Store

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
    "folder_state",
    "keep_free",
    "redacted",
    "restore",
    "sizes_of",
]

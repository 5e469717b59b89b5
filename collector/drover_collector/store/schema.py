"""Tables of the store: samples tables out of the catalog, and the others listed here. Columns are added, never dropped.

In key columns, where NULL cannot stand, gpu -1 means "not a GPU: the node, or its link", as the empty string does for
link. Values are never coded so.
"""

from __future__ import annotations

from dataclasses import dataclass

from drover_collector.store.engine import Clients
from drover_collector.store.errors import StoreError
from drover_collector.store.records import clickhouse_type
from drover_proto.catalog import Kind, Metric, Scope, of_scope

UNJUDGED_DAYS = 7  # an event older than this alarms nobody any more
EVENT_DAYS = 400  # a year and a bit: what risk and repair histories look back on


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    extra: str = ""  # CODEC, COMMENT

    @property
    def ddl(self) -> str:
        return f"`{self.name}` {self.type} {self.extra}".rstrip()


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    engine: str
    order: str
    partition: str = ""
    ttl: str = ""


TIME = "DateTime64(3, 'UTC')"
WORD = "LowCardinality(String)"
JSON = Column("json", "String", "CODEC(ZSTD(3))")


def samples_table(scope: Scope) -> str:
    return f"{scope}_samples"


def metric_column(metric: Metric) -> Column:
    """Fixed-point integers: T64 crops the unused bits, Delta suits what only grows; floats get Gorilla."""
    codec = "Gorilla" if metric.type == "d" else "Delta" if metric.kind is Kind.COUNTER else "T64"
    comment = f"COMMENT 'metric {metric.id}, step {metric.step:g} {metric.unit}' CODEC({codec}, ZSTD(1))"
    return Column(metric.name, f"Nullable({clickhouse_type(metric.name)})", comment)


def _samples(scope: Scope, retention_days: int) -> Table:
    key = (
        Column("entity_id", "UInt64", "CODEC(ZSTD(1))"),
        Column("ts", TIME, "CODEC(DoubleDelta, ZSTD(1))"),
        Column("present", "UInt16", "COMMENT 'values in this row' CODEC(T64, ZSTD(1))"),
    )
    # Coalescing, not Replacing: a second row of the same entity and moment fills columns, and takes none away.
    return Table(
        samples_table(scope),
        key + tuple(metric_column(metric) for metric in of_scope(scope)),
        "CoalescingMergeTree",
        "(entity_id, ts)",
        "toDate(ts)",
        f"toDateTime(ts) + toIntervalDay({retention_days})",
    )


def tables(retention_days: int) -> tuple[Table, ...]:
    gpu, link, node = Column("gpu", "Int16"), Column("link", "String"), Column("node", WORD)
    event_ttl = f"toDateTime(received) + toIntervalDay({EVENT_DAYS})"
    return (
        *(_samples(scope, retention_days) for scope in Scope),
        Table(
            "entities",
            (
                Column("entity_id", "UInt64"), Column("scope", WORD), Column("key", "String"), node, gpu, link,
                Column("mig", "String"), Column("uuid", "String"), Column("serial", "String"), Column("pci", "String"),
                Column("model", WORD), Column("first", TIME), Column("last", TIME),
            ),
            "ReplacingMergeTree(last)",
            "(entity_id, node, gpu, link, mig)",
        ),
        Table(
            "events",  # by receipt for its TTL: the node's clock may be wrong by decades
            (
                Column("id", "String"), Column("ts", TIME), node, Column("gpu", "Nullable(Int16)"),
                Column("kind", WORD), Column("code", WORD), Column("message", "String", "CODEC(ZSTD(3))"),
                Column("source", WORD), Column("backlog", "Bool"), Column("count", "UInt32"),
                Column("received", TIME), Column("clock_suspect", "Bool"), Column("forgeable", "Bool"),
            ),
            "ReplacingMergeTree", "(ts, id)", "", event_ttl,
        ),
        Table(
            "judged_events",  # those whose outcome is stored; after a crash the others are judged again
            (Column("id", "String"), Column("received", TIME)),
            "ReplacingMergeTree", "id", "", f"toDateTime(received) + toIntervalDay({UNJUDGED_DAYS + 1})",
        ),
        Table(
            "absences",  # `closed` is the version: the end of an interval wins over a resend of its beginning
            (
                node, gpu, link, Column("metric", WORD), Column("reason", WORD), Column("from", TIME),
                Column("to", f"Nullable({TIME})"), Column("closed", "UInt8"),
            ),
            "ReplacingMergeTree(closed)", "(node, gpu, link, metric, from)",
        ),
        Table(
            "holdings",  # job '' frees the GPU
            (node, gpu, Column("from", TIME), Column("job", "String")),
            "ReplacingMergeTree", "(node, gpu, from)",
        ),
        Table("inventory", (node, Column("ts", TIME), JSON), "ReplacingMergeTree", "(node, ts)"),
        Table(
            "findings",
            (Column("ts", TIME), Column("detector", WORD), Column("kind", WORD), node, JSON),
            "MergeTree", "ts", "", f"toDateTime(ts) + toIntervalDay({EVENT_DAYS})",
        ),
        Table(
            "incidents",
            (
                Column("id", "String"), Column("version", "UInt32"), Column("opened", TIME),
                Column("closed", f"Nullable({TIME})"), Column("updated", TIME), JSON,
            ),
            "ReplacingMergeTree", "(id, version, updated)",
        ),
        Table(
            "decisions",
            (Column("id", "String"), Column("incident_id", "String"), Column("ts", TIME), JSON),
            "ReplacingMergeTree", "(incident_id, ts, id)",
        ),
        Table(
            "health",
            (
                node, gpu, Column("ts", TIME), Column("health", WORD), Column("reason", "String"),
                Column("incident_id", "String"),
            ),
            "ReplacingMergeTree", "(node, gpu, ts)",
        ),
        Table(
            "outbox",
            (
                Column("id", "String"), Column("incident_id", "String"), Column("notifier", WORD),
                Column("payload_json", "String", "CODEC(ZSTD(3))"), Column("created", TIME), Column("state", WORD),
                Column("attempts", "UInt32"), Column("next", TIME), Column("detail", "String"),
                Column("written_ns", "UInt64"),
            ),
            "ReplacingMergeTree", "(id, written_ns)",
        ),
        Table(
            "lane_seqs",
            (node, Column("spool", "String"), Column("lane", "UInt8"), Column("seq", "UInt64")),
            "ReplacingMergeTree(seq)", "(node, spool, lane)",
        ),
    )  # fmt: skip


def ensure(clients: Clients, retention_days: int) -> None:
    """Make what is missing: tables, and columns of metrics that are new in the catalog.

    Raises:
        StoreError: a column rests in another type or resolution than the catalog now has.
    """
    # Not from system.columns: with many databases it takes a second to find that one is empty.
    held = {
        row["name"]: row["ddl"]
        for row in clients.rows(
            "SELECT name, create_table_query AS ddl FROM system.tables WHERE database = currentDatabase()"
        )
    }
    for table in tables(retention_days):
        if table.name in held:
            _extend(clients, table)
            if table.ttl and f"TTL {table.ttl}" not in held[table.name]:
                ttl = f"MODIFY TTL {table.ttl} SETTINGS materialize_ttl_after_modify = 0"
                clients.command(f"ALTER TABLE {table.name} {ttl}")
        else:
            clients.command(_create(table))


def _extend(clients: Clients, table: Table) -> None:
    held = {row["name"]: (row["type"], row["comment"]) for row in clients.rows(f"DESCRIBE TABLE {table.name}")}
    missing = []
    for column in table.columns:
        if column.name in held:
            _same(table.name, column, *held[column.name])
        else:
            missing.append(f"ADD COLUMN IF NOT EXISTS {column.ddl}")
    if missing:
        clients.command(f"ALTER TABLE {table.name} {', '.join(missing)}")


def _create(table: Table) -> str:
    columns = ",\n  ".join(column.ddl for column in table.columns)
    lines = [f"CREATE TABLE IF NOT EXISTS {table.name} (\n  {columns}\n)", f"ENGINE = {table.engine}"]
    if table.partition:
        lines.append(f"PARTITION BY {table.partition}")
    lines.append(f"ORDER BY {table.order}")
    if table.ttl:
        lines.append(f"TTL {table.ttl}")
    if table.partition:
        lines.append("SETTINGS ttl_only_drop_parts = 1")
    return "\n".join(lines)


def _same(table: str, column: Column, held_type: str, held_comment: str) -> None:
    wanted = column.extra.split("'")[1] if column.extra.startswith("COMMENT") else ""
    if held_type != column.type or held_comment != wanted:
        raise StoreError(
            f"column {column.name} of {table} rests as {held_type} ({held_comment or 'no comment'}), but this version"
            f" wants {column.type} ({wanted or 'no comment'}); a metric keeps its storage for ever: give it a new row"
            " with a new id and name, or start with an empty store"
        )

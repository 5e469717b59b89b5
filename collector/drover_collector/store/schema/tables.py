"""Define the tables of the store: samples and rollups from the catalog, and others. Columns are added, never dropped.

Key columns cannot be NULL: there gpu -1 means "not a GPU but the node or its link", and link "" means "not a link".
Values are never coded like that. Comments of columns are stored, and compared at each start: never change them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from drover_collector.store.records import clickhouse_type
from drover_collector.store.schema import codecs
from drover_core.metrics.catalog import Metric, Scope, of_scope

# Raise it with every change of the tables, except an added column; see `migrations`.
VERSION = 8
SAMPLES_SETTINGS = (
    ("ttl_only_drop_parts", 1),
    (
        "max_bytes_to_merge_at_max_space_in_pool",
        4 << 30,
    ),  # a merge needs as much room on the disk as the parts that it merges
    ("min_compress_block_size", 1 << 18),  # most columns are constant, and each block has overhead
)
# A chart reads a few rows each of many entities: with larger blocks it would unpack four times as much.
ROLLUP_SETTINGS = (*SAMPLES_SETTINGS[:2], ("min_compress_block_size", 1 << 16))
# Synced to the disk before an insert returns, while the kernel may wait half a minute: what people decided, and what
# is done to nodes and receivers, survives a power cut. Agents send samples and events again. A merge is not
# synced: its source parts stay for eight minutes.
SYNCED = (("fsync_after_insert", 1), ("fsync_part_directory", 1))
# What is dropped at once when the disk is nearly full: a day of 100,000 GPUs would be half of many disks.
PARTITION = "toStartOfInterval(ts, toIntervalHour(4))"
UNJUDGED_DAYS = 7  # events that a crash left unjudged for longer are not judged
EVENT_DAYS = 400  # over a year: as far back as risk and repair histories look


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its DDL."""

    name: str
    type: str
    extra: str = ""  # COMMENT '...' CODEC(...)
    block: int = 0  # bytes that are compressed together; 0: as the table says

    @property
    def ddl(self) -> str:
        return " ".join(filter(None, (f"`{self.name}`", self.type, self.extra, self.settings)))

    @property
    def settings(self) -> str:
        """The settings as the engine shows them; empty: none."""
        return f"SETTINGS (min_compress_block_size = {self.block})" if self.block else ""

    @property
    def codec(self) -> str:
        """The content of CODEC(...); empty: the engine's default."""
        return self.extra.partition("CODEC(")[2].removesuffix(")")

    @property
    def comment(self) -> str:
        return self.extra.split("'")[1] if self.extra.startswith("COMMENT") else ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `partition` and `ttl` are written as the engine shows them, to be compared with existing tables.

    An embedded table is made without its TTL (see `retention`).
    """

    name: str
    columns: tuple[Column, ...]
    engine: str
    order: str
    partition: str = ""
    ttl: str = ""
    primary: str = ""  # a prefix of `order`; empty: all of it
    settings: tuple[tuple[str, int], ...] = ()


TIME = "DateTime64(3, 'UTC')"
WORD = "LowCardinality(String)"
JSON = Column("json", "String", "CODEC(ZSTD(3))")
# Which columns of a row are present, as a sum of hashes. Two rows of one entity and time from two sources have
# different columns and both stay; a resend has the same columns and collapses with the first.
SHAPE = Column("shape", "UInt32", "COMMENT 'which columns this row has' CODEC(ZSTD(1))")


def samples_table(scope: Scope) -> str:
    return f"{scope}_samples"


def metric_column(metric: Metric) -> Column:
    comment = f"COMMENT 'metric {metric.id}, step {metric.step:g} {metric.unit}' CODEC({codecs.of_metric(metric)})"
    return Column(metric.name, f"Nullable({clickhouse_type(metric.name)})", comment, codecs.block_of(metric))


def shape_code(column: str) -> int:
    """Return what a present column adds to `shape`, modulo 2**32. Never change it."""
    return zlib.crc32(column.encode())


def _samples(scope: Scope, retention_days: int) -> Table:
    key = (
        Column("entity_id", "UInt64", "CODEC(ZSTD(1))", codecs.SMALL_BLOCK),
        Column("ts", TIME, "CODEC(Delta(8), ZSTD(1))", codecs.SMALL_BLOCK),
        SHAPE,
        Column("present", "UInt16", "COMMENT 'values in this row' CODEC(T64, ZSTD(1))"),
    )
    # Replacing, not Coalescing, although rows of one time may complete each other: that engine merges row by row, which
    # costs ten times the CPU. Reads combine such rows.
    return Table(
        samples_table(scope),
        key + tuple(metric_column(metric) for metric in of_scope(scope)),
        "ReplacingMergeTree",
        "(entity_id, ts, shape)",
        PARTITION,
        f"toDateTime(ts) + toIntervalDay({retention_days})",
        "(entity_id, ts)",
        SAMPLES_SETTINGS,
    )


def rollup_table(scope: Scope, level: str) -> str:
    """Return the name of a rollup table. `level`: 10s or 5m."""
    return f"{scope}_{level}"


def _rollup(scope: Scope, level: str, partition: str, days: int) -> Table:
    """Return the table of a rollup: a row per entity and bucket. A recomputed bucket has a higher version."""
    key = (
        Column("entity_id", "UInt64", "CODEC(ZSTD(1))", codecs.SMALL_BLOCK),
        Column("ts", TIME, "COMMENT 'begin of the bucket' CODEC(Delta(8), ZSTD(1))", codecs.SMALL_BLOCK),
        Column("version", "UInt64", "CODEC(Delta(8), ZSTD(1))", codecs.SMALL_BLOCK),
        Column("rows", "UInt32", "COMMENT 'moments that were told of' CODEC(T64, ZSTD(1))"),
        Column("present", "UInt32", "COMMENT 'values in them' CODEC(T64, ZSTD(1))"),
    )
    return Table(
        rollup_table(scope, level),
        key + tuple(metric_column(metric) for metric in of_scope(scope)),
        "ReplacingMergeTree(version)", "(entity_id, ts)", partition, f"toDateTime(ts) + toIntervalDay({days})",
        settings=ROLLUP_SETTINGS,
    )  # fmt: skip


def _rollups(retention_days: int, retention_10s_days: int, retention_5min_days: int) -> tuple[Table, ...]:
    scope, entities = Column("scope", WORD), Column("entities", "Array(UInt64)", "CODEC(ZSTD(1))")
    return (
        *(_rollup(scope, "10s", "toDate(ts)", retention_10s_days) for scope in Scope),
        *(_rollup(scope, "5m", "toMonday(ts)", retention_5min_days) for scope in Scope),
        Table(
            "rollup_state",  # up to when each level is rolled up or dirty; samples: in the 5 min that are not over
            (
                Column("level", WORD), Column("upto", TIME), Column("samples", "UInt64"), Column("version", "UInt64"),
            ),
            "ReplacingMergeTree(version)", "level",
        ),
        Table(
            "rollup_marks",  # dirty ranges: what to roll up again, of these entities, or of all if none is named
            (
                scope, Column("from", TIME), Column("to", TIME), Column("id", "UInt64"), entities,
                Column("at", TIME), Column("done", "UInt8"),
            ),
            "ReplacingMergeTree(done)", "(scope, `from`, to, id)", "",
            f"toDateTime(at) + toIntervalDay({retention_days + 7})",
        ),
        Table(
            "rollup_counts",  # samples in 5 min and a slice of the entities
            (
                scope, Column("ts", TIME), Column("slice", "UInt8"), Column("samples", "UInt64"),
                Column("version", "UInt64"),
            ),
            "ReplacingMergeTree(version)", "(scope, ts, slice)", "",
            f"toDateTime(ts) + toIntervalDay({retention_days + 7})",
        ),
    )  # fmt: skip


def tables(retention_days: int, retention_10s_days: int = 90, retention_5min_days: int = 1100) -> tuple[Table, ...]:
    gpu, link, node = Column("gpu", "Int16"), Column("link", "String"), Column("node", WORD)
    event_ttl = f"toDateTime(received) + toIntervalDay({EVENT_DAYS})"
    return (
        *(_samples(scope, retention_days) for scope in Scope),
        *_rollups(retention_days, retention_10s_days, retention_5min_days),
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
                Column("boot", "String", "CODEC(ZSTD(1))"),
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
        Table(
            "holders",  # the newest of `holdings`
            (node, gpu, Column("from", TIME), Column("job", "String")),
            "ReplacingMergeTree(`from`)", "(node, gpu)",
        ),
        Table(
            "absent",  # the newest of `absences`; version: its begin, doubled, and one more when it has ended
            (
                node, gpu, link, Column("metric", WORD), Column("reason", WORD), Column("from", TIME),
                Column("to", f"Nullable({TIME})"), Column("closed", "UInt8"), Column("version", "UInt64"),
            ),
            "ReplacingMergeTree(version)", "(metric, node, gpu, link)",
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
            "ReplacingMergeTree", "(id, version, updated)", settings=SYNCED,
        ),
        Table(
            "decisions",
            (Column("id", "String"), Column("incident_id", "String"), Column("ts", TIME), JSON),
            "ReplacingMergeTree", "(incident_id, ts, id)", settings=SYNCED,
        ),
        Table(
            "approvals",
            (Column("decision_id", "String"), Column("ts", TIME), JSON),
            "ReplacingMergeTree", "(decision_id, ts)", settings=SYNCED,
        ),
        Table(
            "audit",
            (Column("id", "String"), Column("ts", TIME), Column("what", WORD), Column("subject", "String"), JSON),
            "ReplacingMergeTree", "(ts, id)", settings=SYNCED,
        ),
        Table(
            "silences",
            (Column("id", "String"), Column("until", TIME), Column("written_ns", "UInt64"), JSON),
            "ReplacingMergeTree", "(id, written_ns)", settings=SYNCED,
        ),
        Table(
            "actions",
            (
                Column("id", "String"), Column("ts", TIME), node, Column("decision_id", "String"),
                Column("incident_id", "String"), Column("state", WORD), Column("written_ns", "UInt64"), JSON,
            ),
            "ReplacingMergeTree", "(id, written_ns)", settings=SYNCED,
        ),
        Table(
            "duties",
            (node, Column("ts", TIME), Column("written_ns", "UInt64"), JSON),
            "ReplacingMergeTree", "(node, written_ns)", settings=SYNCED,
        ),
        Table(
            "gpu_outages",
            (Column("uuid", "String"), node, Column("ts", TIME), Column("written_ns", "UInt64"), JSON),
            "ReplacingMergeTree", "(uuid, written_ns)", settings=SYNCED,
        ),
        Table(
            "probes",  # results; `key`: the configuration that a figure depends on, when it was measured
            (
                Column("id", "String"), Column("ts", TIME), Column("received", TIME), node, gpu,
                Column("peer", "Int16"), Column("probe", WORD), Column("request", "String"), Column("end", WORD),
                Column("device", WORD),
                Column("serial", "String"), Column("uuid", "String"), Column("value", "Nullable(Float64)"),
                Column("sku", WORD), Column("driver", WORD), Column("key", "String", "CODEC(ZSTD(3))"), JSON,
            ),
            "ReplacingMergeTree", "(node, gpu, probe, ts, id)", "", event_ttl,
        ),
        Table(
            "probe_orders",
            (
                Column("id", "String"), Column("ts", TIME), node, Column("state", WORD),
                Column("written_ns", "UInt64"), JSON,
            ),
            "ReplacingMergeTree", "(id, written_ns)", "", f"toDateTime(ts) + toIntervalDay({EVENT_DAYS})",
            settings=SYNCED,
        ),
        Table(
            "probe_verdicts",
            (Column("request", "String"), node, gpu, Column("ts", TIME), JSON),
            "ReplacingMergeTree", "(node, gpu, request, ts)", "", f"toDateTime(ts) + toIntervalDay({EVENT_DAYS})",
            settings=SYNCED,
        ),
        Table(
            "health",
            (
                node, gpu, Column("ts", TIME), Column("health", WORD), Column("reason", "String"),
                Column("incident_id", "String"),
            ),
            "ReplacingMergeTree", "(node, gpu, ts)", settings=SYNCED,
        ),
        Table(
            "outbox",
            (
                Column("id", "String"), Column("incident_id", "String"), Column("notifier", WORD),
                Column("payload_json", "String", "CODEC(ZSTD(3))"), Column("created", TIME), Column("state", WORD),
                Column("attempts", "UInt32"), Column("next", TIME), Column("detail", "String"),
                Column("written_ns", "UInt64"),
            ),
            "ReplacingMergeTree", "(id, written_ns)", settings=SYNCED,
        ),
        Table(
            "lane_seqs",
            (node, Column("spool", "String"), Column("lane", "UInt8"), Column("seq", "UInt64"), Column("at", TIME)),
            "ReplacingMergeTree(seq)", "(node, spool, lane)",
        ),
        Table("collectors", (Column("name", "String"), Column("ts", TIME), JSON), "ReplacingMergeTree(ts)", "(name)"),
        Table(
            "drops",  # what was dropped because the disk was nearly full
            (
                Column("at", TIME), Column("table", WORD), Column("from", TIME), Column("to", TIME),
                Column("bytes", "UInt64"),
            ),
            "MergeTree", "at", "", f"toDateTime(at) + toIntervalDay({EVENT_DAYS})",
        ),
        Table(
            "schema_versions",  # which collector changed these tables, and how
            (
                Column("at", TIME), Column("version", "UInt32"), Column("collector", "String"),
                Column("change", "String"),
            ),
            "MergeTree", "(at, version)",
        ),
    )  # fmt: skip


def create(table: Table, name: str = "") -> str:
    """Return the statement that creates a table, under `name` if given."""
    columns = ",\n  ".join(column.ddl for column in table.columns)
    lines = [f"CREATE TABLE IF NOT EXISTS {name or table.name} (\n  {columns}\n)", f"ENGINE = {table.engine}"]
    if table.partition:
        lines.append(f"PARTITION BY {table.partition}")
    if table.primary:
        lines.append(f"PRIMARY KEY {table.primary}")
    lines.append(f"ORDER BY {table.order}")
    if table.ttl:
        lines.append(f"TTL {table.ttl}")
    if table.settings:
        lines.append("SETTINGS " + ", ".join(f"{key} = {value}" for key, value in table.settings))
    return "\n".join(lines)

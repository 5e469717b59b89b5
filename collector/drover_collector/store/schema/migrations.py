"""Create the tables of `tables`, and change older ones to that form. Tables of a newer collector are left unchanged.

Columns, codecs, TTL and settings are changed by ALTER. Another engine, order or partition needs a copy, partition by
partition, which can be interrupted at any point. Several collectors may do this at once on a server: each step is done
if it is missing. Copies are made in an embedded store only, which one process has open.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability import damaged_parts as sources
from drover_collector.store.durability.verify_insert import whole
from drover_collector.store.errors import StoreError
from drover_collector.store.schema import tables as schema
from drover_collector.store.schema.tables import Column, Table

log = logging.getLogger(__name__)

TRIES = 5  # of two collectors that alter one replicated table at once, one fails and must repeat
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Held:
    """An existing table."""

    ddl: str
    engine: str
    partition: str
    order: str


Columns = Mapping[str, Mapping[str, Any]]  # of one table, by name


def ensure(clients: Clients, tables: Iterable[Table], *, keep_ttl: bool = False) -> list[str]:
    """Create missing tables, and change older ones to the present form.

    Args:
        keep_ttl: do not change the TTL of existing tables. Embedded tables have none, and lose the one they had.
    Returns:
        What was changed, a line each.
    Raises:
        StoreError: a column is stored in another type or resolution than the catalog has, or a table of a server has
            another form than in this version.
    """
    wanted = tuple(tables)
    held = _held(clients)
    newest = _version(clients) if "schema_versions" in held else 1 if held else schema.VERSION
    columns = _held_columns(clients) if held else {}
    changes: list[str] = []
    if "schema_versions" in held and newest < schema.VERSION:
        # Before the first change: an older collector that starts after a stop in between must not undo what is done.
        _note(clients, [f"begun, from version {newest}"])
    for table in wanted:
        if clients.embedded or (keep_ttl and table.name in held):
            table = replace(table, ttl="")
        changes += _ensure(clients, table, held, columns.get(table.name, {}), newest <= schema.VERSION)
    if changes or (held and newest < schema.VERSION):
        _note(clients, changes or ["nothing to change"])
    return changes


def _ensure(clients: Clients, table: Table, held: dict[str, Held], columns: Columns, forward: bool) -> list[str]:
    copy = f"{table.name}_copy"
    if table.name not in held:
        if copy in held:  # a copy was interrupted before its last step
            clients.command(f"RENAME TABLE {copy} TO {table.name}")
            return [f"{table.name}: copied"]
        clients.command(schema.create(table))
        return [f"{table.name}: made"]
    found = held[table.name]
    changes = []
    if forward and _form(table) != (found.engine, found.partition, found.order):
        _copy(clients, table, found)
        return [f"{table.name}: copied, from {found.engine} by {found.partition or 'nothing'} in order {found.order}"]
    changes += _columns(clients, table, found.ddl, columns, forward)
    if forward and table.ttl and f"TTL {table.ttl}" not in found.ddl:
        _alter(clients, table.name, f"MODIFY TTL {table.ttl} SETTINGS materialize_ttl_after_modify = 0")
        changes.append(f"{table.name}: TTL {table.ttl}")
    if forward and clients.embedded and " TTL " in found.ddl.rpartition(" ORDER BY ")[2]:
        _alter(clients, table.name, "REMOVE TTL")
        changes.append(f"{table.name}: no TTL")
    settings = [f"{key} = {value}" for key, value in table.settings]
    other = [setting for setting in settings if not re.search(rf"\b{setting}\b", found.ddl)]
    if forward and other:
        _alter(clients, table.name, f"MODIFY SETTING {', '.join(other)}")
        changes.append(f"{table.name}: {', '.join(other)}")
    return changes


def _columns(clients: Clients, table: Table, ddl: str, held: Columns, forward: bool) -> list[str]:
    alters, changes = [], []
    for column in table.columns:
        row = held.get(column.name)
        if row is None:
            alters.append(f"ADD COLUMN IF NOT EXISTS {column.ddl}")
            changes.append(f"{table.name}: column {column.name}")
            continue
        _same(table.name, column, row["type"], row["comment"])
        other = []
        if column.codec and row["compression_codec"] != f"CODEC({column.codec})":
            other.append(f"as {column.codec}")
        if column.block and not re.search(rf"`{column.name}` [^`]*{re.escape(column.settings)}", ddl):
            other.append(f"in blocks of {column.block} bytes")
        if forward and other:  # stored parts keep their form until they are merged
            alters.append(f"MODIFY COLUMN {column.ddl}")
            changes.append(f"{table.name}: {column.name} {', '.join(other)}")
    if alters:
        _alter(clients, table.name, ", ".join(alters))
    return changes


def _same(table: str, column: Column, held_type: str, held_comment: str) -> None:
    if held_type != column.type or held_comment != column.comment:
        raise StoreError(
            f"column {column.name} of {table} rests as {held_type} ({held_comment or 'no comment'}), but this version"
            f" wants {column.type} ({column.comment or 'no comment'}); a metric keeps its storage for ever: give it a"
            " new row with a new id and name, or start with an empty store"
        )


def _alter(clients: Clients, table: str, change: str) -> None:
    for tries in range(TRIES):
        try:
            clients.command(f"ALTER TABLE {table} {change}")
        except StoreError as error:
            if tries + 1 == TRIES or "CANNOT_ASSIGN_ALTER" not in str(error):
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _copy(clients: Clients, table: Table, found: Held) -> None:
    """Copy a table partition by partition. A copied partition is dropped, so that a second run continues.

    Rows that were copied and not dropped yet collapse when they are copied again. In a table without versions they do
    not: it is copied again from its beginning, and dropped as a whole.
    """
    if not clients.embedded:
        raise StoreError(
            f"{table.name} rests as {found.engine}, partitioned by {found.partition or 'nothing'}, in order"
            f" {found.order}; this version wants {table.engine}, {table.partition or 'nothing'}, {table.order}: let"
            " it write to a new database, and bring the old data over with `drover export` and an import"
        )
    copy = f"{table.name}_copy"
    clients.command(schema.create(table, copy))
    there = [row["name"] for row in clients.rows(f"DESCRIBE TABLE {table.name}")]
    into = [column.name for column in table.columns if column.name in there]
    values = [f"`{name}`" for name in into]
    if schema.SHAPE in table.columns and schema.SHAPE.name not in there:
        into.append(schema.SHAPE.name)
        values.append(_shape_sql(there))
    parts = clients.rows(
        "SELECT DISTINCT partition_id AS id FROM system.parts WHERE active AND database = currentDatabase()"
        f" AND table = '{table.name}' ORDER BY id"
    )
    final = "" if found.engine.startswith("MergeTree") else "FINAL"
    collapses = not table.engine.startswith("MergeTree")
    if parts and not collapses:
        clients.command(f"TRUNCATE TABLE {copy}")
    for number, part in enumerate(parts, 1):
        log.info("store: copying %s into its new form, partition %d of %d", table.name, number, len(parts))
        clients.command(
            f"INSERT INTO {copy} ({', '.join(f'`{name}`' for name in into)}) SELECT {', '.join(values)}"
            f" FROM {table.name} {final} WHERE _partition_id = '{part['id']}'"
        )
        _written(clients, copy)
        if collapses:
            clients.command(
                f"ALTER TABLE {table.name} DROP PARTITION ID '{part['id']}' SETTINGS max_partition_size_to_drop = 0"
            )
    clients.command(f"DROP TABLE {table.name} SYNC SETTINGS max_table_size_to_drop = 0")
    clients.command(f"RENAME TABLE {copy} TO {table.name}")


def _written(clients: Clients, copy: str) -> None:
    """Check that a copy is complete on the disk, which the engine does not (see `verify_insert`).

    Raises:
        StoreError: it is not; the source is still there.
    """
    parts = clients.rows(f"SELECT name, path, level FROM {clients.parts} WHERE table = '{copy}'")
    broken = [row for row in parts if not whole(Path(row["path"]))]
    if broken:
        sources.clear(clients, copy, unacknowledged={row["name"] for row in broken if not row["level"]})
        raise StoreError(f"{copy}: what was copied is not on the disk; make room on it, and start again")
    os.sync()  # nor does it wait for the disk, and a power cut must find one of the two there


def _shape_sql(columns: Iterable[str]) -> str:
    metrics = [name for name in columns if name not in ("entity_id", "ts", "present")]
    terms = [f"if(isNull(`{name}`), 0, {schema.shape_code(name)})" for name in metrics]
    return f"toUInt32(({' + '.join(terms) or '0'}) % 4294967296)"


def _held(clients: Clients) -> dict[str, Held]:
    # Not from system.columns: with many databases it takes a second to find that one is empty.
    rows = clients.rows(
        f"SELECT name, create_table_query AS ddl, engine_full, partition_key, sorting_key FROM {clients.tables}"
    )
    return {
        row["name"]: Held(row["ddl"], _engine(row["engine_full"]), row["partition_key"], _bare(row["sorting_key"]))
        for row in rows
    }


def _held_columns(clients: Clients) -> Mapping[str, Columns]:
    """table -> column -> its form. One question for all: asked table by table it was half of a start."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in clients.rows(f"SELECT table, name, type, comment, compression_codec FROM {clients.columns}"):
        found.setdefault(row["table"], {})[row["name"]] = row
    return found


def _engine(full: str) -> str:
    """`ReplacingMergeTree(last)` of what the engine shows; a replicated one without its path and replica."""
    engine = re.split(r" (?:PARTITION BY|PRIMARY KEY|ORDER BY|TTL|SETTINGS) ", full)[0]
    return re.sub(r"^Replicated(\w+)\('[^']*', '[^']*'(?:, )?(.*)\)$", r"\1(\2)", engine).removesuffix("()")


def _form(table: Table) -> tuple[str, str, str]:
    return table.engine, table.partition, _bare(table.order)


def _bare(order: str) -> str:
    return order.removeprefix("(").removesuffix(")").replace("`", "")


def _version(clients: Clients) -> int:
    return int(clients.rows("SELECT max(version) AS v FROM schema_versions")[0]["v"]) or 1


def _note(clients: Clients, changes: list[str]) -> None:
    count, collector = len(changes), importlib.metadata.version("drover")
    clients.insert(
        "schema_versions",
        pa.table(
            {
                "at": pa.array([time.time_ns() // 1_000_000] * count, pa.timestamp("ms", "UTC")),
                "version": pa.array([schema.VERSION] * count, pa.uint32()),
                "collector": pa.array([collector] * count),
                "change": pa.array(changes),
            }
        ),
    )

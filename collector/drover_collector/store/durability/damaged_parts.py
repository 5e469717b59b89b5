"""Take damaged parts out of a table, and attach the parts that they were merged from in their place.

The engine keeps merged parts for eight minutes. At its start it uses them instead of a damaged part. While it runs it
does not, and DROP or DETACH of any part of a table removes them all at once: so copies of them are made before.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from drover_collector.store.durability.verify_insert import whole
from drover_collector.store.errors import StoreError

log = logging.getLogger(__name__)

_KEPT = "tmp-"  # before the name of a copy until it is attached; such a folder is not damage
_one_at_a_time = threading.Lock()


class Statements(Protocol):
    """What runs SQL on the store's database; `Clients` does."""

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a query."""

    def command(self, sql: str) -> None:
        """Run a statement without a result."""


def waiting(table_folder: Path) -> list[Path]:
    """Return the copies that are still to be attached: the disk was full when they should have been."""
    return sorted((table_folder / "detached").glob(f"{_KEPT}*"), key=lambda path: int(path.name.split("_")[1]))


def clear(clients: Statements, table: str, damaged: str = "", unacknowledged: Collection[str] = ()) -> None:
    """Detach the damaged parts of a table, and attach what they were merged from.

    Args:
        damaged: a part that is damaged although its file sizes are right.
        unacknowledged: parts of inserts that failed: they are dropped, not detached.
    Raises:
        StoreError
    """
    with _one_at_a_time:
        _clear(clients, table, damaged, unacknowledged)


def _clear(clients: Statements, table: str, damaged: str, unacknowledged: Collection[str]) -> None:
    parts = clients.rows(
        "SELECT name, path, partition_id, level, active, rows, toInt64(min_block_number) AS low,"
        " toInt64(max_block_number) AS high FROM system.parts WHERE database = currentDatabase()"
        " AND table = {table:String}",
        {"table": table},
    )
    bad = [row for row in parts if row["active"] and (row["name"] == damaged or not whole(Path(row["path"])))]
    for row in bad:
        _keep(row, parts)
    for name in [row["name"] for row in bad]:
        try:
            clients.command(f"ALTER TABLE `{table}` {'DROP' if name in unacknowledged else 'DETACH'} PART '{name}'")
        except StoreError as error:
            if "NO_SUCH_DATA_PART" not in str(error):  # unless another thread, which met it too, was faster
                raise
    for folder in sorted({Path(row["path"]).parent for row in parts}):
        for copy in waiting(folder):
            part = copy.rename(copy.with_name(copy.name.removeprefix(_KEPT)))
            try:
                clients.command(f"ALTER TABLE `{table}` ATTACH PART '{part.name}'")
            except StoreError:
                part.rename(copy)  # tried again with the next check
                raise
            log.warning(
                "store: table %s: attached part %s again, because the part that it was merged into is damaged",
                table,
                part.name,
            )


def _keep(bad: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Copy, by links, the parts that a part was merged from: the largest undamaged ones that do not overlap."""
    inside = [
        row for row in parts
        if not row["active"] and row["rows"] and bad["level"] and row["partition_id"] == bad["partition_id"]
        and bad["low"] <= row["low"] and row["high"] <= bad["high"]
    ]  # fmt: skip
    chosen: list[dict[str, Any]] = []
    for row in sorted(inside, key=lambda row: (row["low"] - row["high"], -row["level"])):
        if all(row["high"] < one["low"] or row["low"] > one["high"] for one in chosen) and whole(Path(row["path"])):
            chosen.append(row)
    for row in chosen:
        folder = Path(row["path"])
        copy = folder.parent / "detached" / f"{_KEPT}{folder.name}"
        try:
            if copy.exists() and not whole(copy):  # an earlier attempt was interrupted
                shutil.rmtree(copy)
            if not copy.exists():
                shutil.copytree(folder, copy, copy_function=os.link)
        except OSError as error:  # so nothing is dropped
            raise StoreError(
                f"{copy}: {error.strerror or error}; the parts that it was merged from cannot be copied"
            ) from error

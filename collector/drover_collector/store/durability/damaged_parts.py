"""Parts that are not whole taken out of a table, and what they were merged from put back in their place.

The engine keeps for eight minutes what it merged. When it starts it takes that instead of a damaged part; while it runs
it does not, and DROP or DETACH of any part of a table removes all of it at once: so it is kept before.
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

_KEPT = "tmp-"  # before a part's name, until it is put back: what begins so is no damage
_one_at_a_time = threading.Lock()


class Statements(Protocol):
    """What runs SQL on the store's database; `Clients` does."""

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a query."""

    def command(self, sql: str) -> None:
        """Run a statement without a result."""


def waiting(table_folder: Path) -> list[Path]:
    """What is still to be put back: the disk took nothing when it should have been."""
    return sorted((table_folder / "detached").glob(f"{_KEPT}*"), key=lambda path: int(path.name.split("_")[1]))


def clear(clients: Statements, table: str, damaged: str = "", untold: Collection[str] = ()) -> None:
    """
    Args:
        damaged: a part that is not whole although its sizes are.
        untold: parts of inserts that failed, which hold nothing that anybody was told is stored: dropped, while the
            others are set aside.
    Raises:
        StoreError
    """
    with _one_at_a_time:
        _clear(clients, table, damaged, untold)


def _clear(clients: Statements, table: str, damaged: str, untold: Collection[str]) -> None:
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
            clients.command(f"ALTER TABLE `{table}` {'DROP' if name in untold else 'DETACH'} PART '{name}'")
        except StoreError as error:
            if "NO_SUCH_DATA_PART" not in str(error):  # else another thread's, which met it too, was before us
                raise
    for folder in sorted({Path(row["path"]).parent for row in parts}):
        for copy in waiting(folder):
            part = copy.rename(copy.with_name(copy.name.removeprefix(_KEPT)))
            try:
                clients.command(f"ALTER TABLE `{table}` ATTACH PART '{part.name}'")
            except StoreError:
                part.rename(copy)  # again with the next look
                raise
            log.warning("store: table %s: part %s is back, of which a damaged one was merged", table, part.name)


def _keep(bad: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Copies, by links, of what a part was merged from: the largest that are whole, then what these leave open."""
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
            if copy.exists() and not whole(copy):  # of a try that was broken off
                shutil.rmtree(copy)
            if not copy.exists():
                shutil.copytree(folder, copy, copy_function=os.link)
        except OSError as error:  # nothing is dropped then
            raise StoreError(f"{copy}: {error.strerror or error}; what was merged cannot be kept") from error

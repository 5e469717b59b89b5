"""Back up a running embedded store, and restore it. A server makes its own backups.

All tables are copied as of one time, between two inserts: offsets of agents' lanes are never ahead of the rows. Where
offsets are behind, agents send again what they still have, which collapses with what is there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from drover_collector.store.clickhouse import client as engine
from drover_collector.store.clickhouse import embedded, server
from drover_collector.store.durability import integrity
from drover_collector.store.durability import salvage as parts_of_backup
from drover_collector.store.durability.sizes import keep_free
from drover_collector.store.errors import StoreError

log = logging.getLogger(__name__)

MANIFEST = "drover-backup.json"
SNAPSHOT_S = 5.0  # how long inserts wait at most while the engine lists the parts
POLL_S = 0.02
BYTES_PER_S = 200 << 20  # leaves some of the disk for inserts
CANCEL_S = 10.0  # the engine ends a copy at its next block
PARTIAL = ".partial"  # suffix of a backup that is not complete
SPARE = 1.02  # times the size: room for folders and the list of files
_making = threading.Lock()  # one at a time in this process, which holds the store alone


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied."""

    bytes: int
    rows: dict[str, int]  # by table, including those that a merge will collapse
    lost: tuple[str, ...] = ()  # parts that a restore left out, a sentence each


class Backups:
    """Copies a running embedded store. Thread-safe; one backup at a time."""

    def __init__(self, clients: engine.Clients) -> None:
        self._clients = clients
        self._stopping = threading.Event()  # set: no backup goes on
        # Set: the backup that is being made on the store's own disk ends. None: there is none.
        self._room_needed: threading.Event | None = None

    def stop(self) -> None:
        """End a backup that is under way soon, without a result, and begin no other."""
        self._stopping.set()

    def end_for_room(self) -> bool:
        """Ask a backup on the store's own disk to end: a copy must not cost what it copies.

        Returns:
            Whether there was one that had not been asked before.
        """
        asked = self._room_needed
        if asked is None or asked.is_set():
            return False
        asked.set()
        log.warning("the disk runs full while a backup is made on it: the backup ends, no samples are dropped")
        return True

    def make(self, folder: Path, now_ms: int, keep_free_bytes: int = 0) -> Copied:
        """Copy the store to a new folder. Takes as long as the disk needs; inserts go on.

        Args:
            keep_free_bytes: what `Retention.make_room` keeps free on the store's disk; 0: by the size of the disk.
        Raises:
            StoreError: not an embedded store, the folder exists, no room, another backup is being made, or an error of
                the engine. Nothing is left of the backup.
        """
        home = self._clients.home
        if home is None:
            raise StoreError("this store is on a server; back it up there with the BACKUP statement of ClickHouse")
        if not _making.acquire(blocking=False):
            raise StoreError("another backup is being made; try again when it is done")
        try:
            return self._make(folder, home, now_ms, keep_free_bytes)
        finally:
            self._room_needed = None
            _making.release()

    def _make(self, folder: Path, home: tuple[Path, str], now_ms: int, keep_free_bytes: int) -> Copied:
        database = home[1]
        if folder.exists():
            raise StoreError(f"{folder} exists already; give the backup another name")
        partial = folder.with_name(folder.name + PARTIAL)
        clients = self._clients.apart()
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            if partial.exists():  # a killed collector left it
                shutil.rmtree(partial)
            size = clients.rows(f"SELECT toUInt64(sum(bytes_on_disk)) AS n FROM {clients.parts}")[0]["n"]
            shared = _same_disk(folder.parent, home[0])
            _check_room(folder.parent, size, keep_free_bytes if shared else None)
            self._room_needed = threading.Event() if shared else None
            one_time = self._copy(clients, database, partial)
            copied = Copied(_size(partial), _rows(partial))
            manifest = {
                "made_ms": now_ms,
                "collector": importlib.metadata.version("drover"),
                "database": database,
                "one_moment": one_time,
                "rows": copied.rows,
                "bytes": copied.bytes,
            }
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
            os.sync()
            partial.rename(folder)
        except OSError as error:
            _remove(partial)
            raise StoreError(f"{error.filename or folder}: {error.strerror or error}; the backup was removed") from None
        except BaseException:
            _remove(partial)
            raise
        finally:
            clients.close()
        return copied

    def _copy(self, clients: engine.Clients, database: str, folder: Path) -> bool:
        """Copy the store. Return whether all tables are as of one time."""
        deadline = time.monotonic() + SNAPSHOT_S
        with self._clients.hold_inserts():
            begun = clients.rows(
                f"BACKUP DATABASE `{database}` TO File('{engine.quoted(folder)}')"
                f" SETTINGS deduplicate_files = 0, max_backup_bandwidth = {BYTES_PER_S} ASYNC"
            )[0]["id"]
            while _status(clients, begun) == "listing":
                if time.monotonic() > deadline:
                    log.warning(
                        "backup: the parts were not listed within %g s; inserts go on, so tables may differ in time",
                        SNAPSHOT_S,
                    )
                    break
                time.sleep(POLL_S)
        late = time.monotonic() > deadline
        while _status(clients, begun) != "done":
            if self._stopping.wait(10 * POLL_S):
                _cancel(clients, begun)
                raise StoreError("the collector is stopping; make the backup again after its start")
            if self._room_needed is not None and self._room_needed.is_set():
                _cancel(clients, begun)
                raise StoreError(
                    "the store's disk ran full during the backup, which was ended so that no samples are deleted; put"
                    " store.backup_folder on another disk, or make room"
                )
        return not late


def remove_partial(folder: Path) -> list[Path]:
    """Remove the incomplete backups in `folder` that a killed collector left; return what was removed."""
    found = [path for path in folder.glob(f"*{PARTIAL}") if path.is_dir() and not (path / MANIFEST).exists()]
    for path in found:
        _remove(path)
    return [path for path in found if not path.exists()]


def _cancel(clients: engine.Clients, number: str) -> None:
    """End a running copy and wait for its end: it would go on writing into a folder that is removed."""
    query = clients.rows(f"SELECT query_id FROM system.backups WHERE id = '{number}'")[0]["query_id"]
    clients.command(f"KILL QUERY WHERE query_id = '{query}' ASYNC")
    deadline = time.monotonic() + CANCEL_S
    while time.monotonic() < deadline:
        row = clients.rows(f"SELECT toString(status) AS status FROM system.backups WHERE id = '{number}'")[0]
        if row["status"] not in ("CREATING_BACKUP", "BACKUP_CREATED"):
            return
        time.sleep(POLL_S)
    log.warning("the engine did not end a backup within %g s; remove by hand what it still writes", CANCEL_S)


def _status(clients: engine.Clients, number: str) -> str:
    row = clients.rows(
        f"SELECT toString(status) AS status, num_files, error FROM system.backups WHERE id = '{number}'"
    )[0]
    if row["status"] in ("BACKUP_CREATED", "RESTORED"):
        return "done"
    if row["status"] in ("CREATING_BACKUP", "RESTORING"):
        return "copying" if row["num_files"] else "listing"
    raise StoreError(f"the engine failed: {' '.join(str(row['error']).split())[:300]}")


def restore(
    url: str,
    backup: Path,
    *,
    force: bool = False,
    salvage: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Copied:
    """Restore the store of `url` from a backup, while no collector has it open.

    Args:
        force: move an existing store aside, next to its folder. Nothing is ever deleted.
        salvage: restore the undamaged parts of a damaged backup.
        say: called with a line about where the store was moved, and about each part that is not restored.
    Raises:
        StoreError: one line. The store is unchanged.
    """
    path, database = _address(url)
    manifest = _manifest(backup)
    there = path.is_dir() and any(path.iterdir())
    if there and not force:
        raise StoreError(f"{path} is not empty; use --force to move it aside, or give another url")
    _check_room(path.parent, manifest["bytes"], None)
    backup = backup.resolve()
    damaged = parts_of_backup.damaged(backup)
    lost = _check_loss(parts_of_backup.lost(backup, damaged), salvage)
    new = embedded.restoring(path)
    _remove(new)
    with contextlib.ExitStack() as stack:
        if there:
            stack.enter_context(embedded.lock_file(path, 0))
        clients = engine.connect(f"chdb://{quote(str(new))}?database={database}", 0)
        try:
            whole = parts_of_backup.without(backup, damaged, new / "whole") if damaged else backup
            source = f"RESTORE DATABASE `{manifest['database']}` AS `{database}` FROM File('{engine.quoted(whole)}')"
            copied = _fill(clients, source, manifest, lost, salvage)
            _remove(new / "whole")
        except BaseException:
            clients.close()
            _remove(new)
            raise
        clients.close()
        for each in copied.lost:
            say(f"not restored, because it is damaged in the backup: {each}")
        _put_in_place(new, path, there, say)
    return copied


def _address(url: str) -> tuple[Path, str]:
    parts = urlsplit(url)
    if parts.scheme != "chdb":
        raise StoreError(
            f"{server.redacted(url)}: only an embedded store, chdb:///PATH, can be restored here;"
            " on a server use RESTORE of ClickHouse"
        )
    return Path(unquote(parts.path)), parse_qs(parts.query).get("database", [engine.DATABASE])[0]


def _fill(
    clients: engine.Clients, source: str, manifest: dict[str, Any], lost: list[parts_of_backup.Lost], salvage: bool
) -> Copied:
    """Restore into an empty store. `source`: the RESTORE statement; `lost`: parts that it leaves out."""
    rows: dict[str, int] = manifest["rows"]
    clients.command(f"{source} SETTINGS structure_only = 1")
    clients.command("SYSTEM STOP MERGES")  # else rows that are too old would be deleted before they are counted
    clients.command(f"{source} SETTINGS restore_broken_parts_as_detached = {int(salvage)}")
    lost = lost + _check_loss(_broken(clients, rows), salvage)
    copied = _verified(clients, rows, lost)
    if lost or not manifest["one_moment"]:
        clients.command("TRUNCATE TABLE lane_seqs")  # it may be ahead of the restored rows
    return copied


def _put_in_place(new: Path, path: Path, there: bool, say: Callable[[str], None]) -> None:
    """Move the restored folder to `path`, after what is there is moved aside."""
    try:  # stopped here, `path` is missing, and no collector makes an empty store there: see embedded.make
        if there:
            embedded.give(new, path)
            aside = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
            path.rename(aside)
            say(f"the previous store was moved to {aside}")
        elif path.exists():
            path.rmdir()
        new.rename(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; the restored store is in {new}") from None


def _check_loss(lost: list[parts_of_backup.Lost], salvage: bool) -> list[parts_of_backup.Lost]:
    if lost and not salvage:
        raise StoreError(
            f"the backup is damaged: {parts_of_backup.listed(lost)}; the store is unchanged;"
            " --salvage restores everything else"
        )
    return lost


def _broken(clients: engine.Clients, rows: dict[str, int]) -> list[parts_of_backup.Lost]:
    """Set aside the parts with a wrong checksum, as a running store does. Return them and those that did not load."""
    counts: dict[tuple[str, str], int] = {}
    there = {row["name"] for row in clients.rows(f"SELECT name FROM {clients.tables}")}
    for table in sorted(there & rows.keys()):
        checks = clients.rows(f"CHECK TABLE `{table}` SETTINGS check_query_single_value_result = 0")
        for part in [check["part_path"] for check in checks if not check["is_passed"]]:
            found = clients.rows(f"SELECT rows FROM {clients.parts} WHERE table = '{table}' AND name = '{part}'")
            counts[table, part] = found[0]["rows"]
            clients.command(f"ALTER TABLE `{table}` DETACH PART '{part}'")
    aside = clients.rows("SELECT table, name, path FROM system.detached_parts WHERE database = currentDatabase()")
    return [
        parts_of_backup.Lost(
            row["table"],
            row["name"],
            *integrity.span_of(Path(row["path"]), row["name"]),
            counts.get((row["table"], row["name"])),
        )
        for row in aside
    ]


def _verified(clients: engine.Clients, rows: dict[str, int], lost: list[parts_of_backup.Lost]) -> Copied:
    """Check that every table has as many rows as the backup notes, less those that are known to be lost."""
    found: Counter[str] = Counter()
    size = 0
    for part in clients.rows(f"SELECT table, rows, bytes_on_disk AS bytes FROM {clients.parts} ORDER BY table"):
        found[part["table"]] += part["rows"]
        size += part["bytes"]
    tables = {row["name"] for row in clients.rows(f"SELECT name FROM {clients.tables}")}
    for table, count in rows.items():
        if table not in tables:
            raise StoreError(f"the backup is damaged: table {table} was not restored; the store is unchanged")
        gone = [each.rows for each in lost if each.table == table]
        least = count - sum(each or 0 for each in gone)
        if found[table] != least if None not in gone else found[table] > least:
            raise StoreError(
                f"the backup is damaged: table {table} has {found[table]} of {least} rows; the store is unchanged"
            )
    return Copied(size, dict(found), tuple(each.sentence for each in lost))


def _manifest(backup: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((backup / MANIFEST).read_text("utf-8"))
        return {
            "rows": dict(manifest["rows"]),
            "bytes": int(manifest["bytes"]),
            "database": str(manifest["database"]),
            "one_moment": bool(manifest["one_moment"]),
        }
    except OSError as error:
        raise StoreError(f"{backup}: not a backup of a store ({MANIFEST}: {error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{backup / MANIFEST}: cannot be read; use a complete backup") from None


def _rows(backup: Path) -> dict[str, int]:
    """Return the rows of each table, as counted in the copied parts."""
    rows = {file.stem: 0 for file in backup.glob("metadata/*/*.sql")}
    for file in backup.glob("data/*/*/*/count.txt"):
        rows[file.parents[1].name] += int(file.read_text("ascii"))
    return rows


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _same_disk(folder: Path, store: Path) -> bool:
    return _existing(folder).stat().st_dev == store.stat().st_dev


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _check_room(folder: Path, size: int, keep_free_bytes: int | None) -> None:
    """Check that the disk of `folder` has room.

    Args:
        size: bytes to be written. keep_free_bytes: the store's reserve on this disk, below which its oldest samples
            are deleted; None: the store is on another disk.
    Raises:
        StoreError: there is no room.
    """
    folder = _existing(folder)
    disk = shutil.disk_usage(folder)
    least = engine.KEEP_FREE_BYTES if keep_free_bytes is None else keep_free(disk.total, keep_free_bytes)
    needed = int(size * SPARE) + least
    if disk.free < needed:
        on_it = "" if keep_free_bytes is None else ", else the store would delete its oldest samples to make room"
        raise StoreError(
            f"{folder}: {disk.free >> 20} MB are free on its disk, {needed >> 20} MB are needed{on_it};"
            " make room, or choose another disk"
        )


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)

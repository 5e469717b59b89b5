"""The folder of an embedded store: its lock, its owner, and the engine's config."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.sax.saxutils import escape

from drover_collector.store.errors import StoreError

LOCK = "drover.lock"
_WRITABLE = "set store.url to a folder that this user may write"


class _Lock:
    """The lock of this process on one embedded path, and the databases that are open."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.databases: set[str] = set()


_held: dict[Path, _Lock] = {}
_held_guard = threading.Lock()


def runs(path: Path) -> bool:
    """Return whether this process has another database of the folder open, so that the engine runs."""
    with _held_guard:
        return len(_held[path].databases) > 1


def acquire(path: Path, database: str, wait_s: float) -> None:
    """Lock the folder, and note a database as open.

    Raises:
        StoreError: another process has it, or this one has this database or another folder open.
    """
    with _held_guard:
        mine = _held.get(path)
        if mine is not None and database in mine.databases:
            raise StoreError(f"{path}: this process has the store open already; use that Store")
        if mine is None and _held:
            other = next(iter(_held))
            raise StoreError(f"{path}: this process has {other} open, and can hold one embedded store at a time")
        if mine is None:
            mine = _held[path] = _Lock(lock_file(path, wait_s))
        mine.databases.add(database)


def release(path: Path, database: str) -> None:
    """Note a database as closed, and unlock the folder after the last one."""
    with _held_guard:
        mine = _held[path]
        mine.databases.discard(database)
        if not mine.databases:
            give(path, path)
            mine.file.close()  # gives the lock back
            del _held[path]


@dataclass(frozen=True, slots=True)
class StoreFolderState:
    """What is known about a store without opening it.

    Attributes:
        holder: the process that has it open, or "".
        disk: free and total bytes of its disk.
        written_s: when it was written last, Unix time; None: never.
    """

    holder: str
    disk: tuple[int, int]
    written_s: float | None = None


def folder_state(path: Path) -> StoreFolderState:
    """Return the state of a folder, without creating or locking anything.

    Raises:
        StoreError: this user cannot open the folder as a store.
    """
    _half_restored(path)
    there = next(each for each in (path, *path.parents) if each.exists())
    lock = path / LOCK
    if not there.is_dir():
        raise StoreError(f"{path}: {there} is not a folder; {_WRITABLE}")
    if not os.access(there, os.W_OK | os.X_OK) or (lock.exists() and not os.access(lock, os.R_OK | os.W_OK)):
        raise StoreError(f"{path}: this user may not write in {there}; {_WRITABLE}")
    usage = shutil.disk_usage(there)
    written = [folder.stat().st_mtime for folder in (path / "inserts").glob("*")]  # each insert makes a file there
    return StoreFolderState(_holder(lock), (usage.free, usage.total), max(written, default=None))


def _holder(lock: Path) -> str:
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for an instant; a starting process waits longer
            except OSError:
                return file.read().strip() or "unknown"
    except FileNotFoundError:
        pass
    return ""


def _half_restored(path: Path) -> None:
    half = restoring(path)
    if half.exists() and not (path.exists() and any(path.iterdir())):
        raise StoreError(
            f"{path}: a restore of it is under way or was stopped; let it end or run it again, or remove {half}"
        )


def make(path: Path) -> None:
    """Create the folder. If root does, it gets the owner of the folder above, as which the collector may run.

    Raises:
        OSError
        StoreError: the store is being restored.
    """
    _half_restored(path)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        _own(each, each.parent.stat())


def restoring(path: Path) -> Path:
    """Return the folder in which the store at `path` is restored from a backup."""
    return path.with_name(path.name + ".restoring")


def give(folder: Path, like: Path) -> None:
    """Give all files of the folder to the owner of `like`: root may run `drover restore`, but not the collector.

    Raises:
        StoreError: the disk does not allow it.
    """
    try:
        owner = like.stat()
        if os.geteuid() != 0 or owner.st_uid == 0:
            return
        for at, folders, files in os.walk(folder):
            for name in (".", *folders, *files):
                with contextlib.suppress(FileNotFoundError):  # the engine may remove files in between
                    _own(Path(at, name), owner)
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}; chown -R {folder} to the collector's user") from None


def _own(path: Path, owner: os.stat_result) -> None:
    if os.geteuid() == 0 and path.lstat().st_uid != owner.st_uid:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def lock_file(path: Path, wait_s: float) -> IO[str]:
    """Lock the folder of a store for this process, and return the lock file.

    Raises:
        StoreError: another process holds it for longer than `wait_s`.
    """
    name = path / LOCK
    try:
        file = name.open("a+")
    except OSError as error:
        raise StoreError(f"{name}: {error.strerror}; {_WRITABLE}") from None
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() >= deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise StoreError(
                    f"{path}: the store is open in process {holder}; stop that collector,"
                    " or ask it through its Fleet API"
                ) from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def pinned_config(path: Path, settings: Mapping[str, int], keep_free_bytes: int) -> Path:
    """Write the engine's config, so that it uses no `config.xml` of the working directory. Return its path."""
    config = path / "drover-engine.xml"
    temporary = path / "tmp"
    temporary.mkdir(exist_ok=True)
    text = (
        f"<clickhouse><path>{escape(str(path))}/</path><tmp_path>{escape(str(temporary))}/</tmp_path>"
        + "".join(f"<{key}>{value}</{key}>" for key, value in settings.items())
        + "<storage_configuration><disks><default>"
        f"<keep_free_space_bytes>{keep_free_bytes}</keep_free_space_bytes>"
        "</default></disks></storage_configuration>"
        # However much is damaged, the rest must be readable; folders of no table are left alone.
        "<merge_tree><max_suspicious_broken_parts>1000000000</max_suspicious_broken_parts>"
        "<max_suspicious_broken_parts_bytes>1000000000000000000</max_suspicious_broken_parts_bytes>"
        # One thread removes merged parts: else the engine starts a pool of 128 threads, which stay.
        "<concurrent_part_removal_threshold>1000000000</concurrent_part_removal_threshold>"
        # Tables of older versions have a TTL until they are migrated: no merge may apply it (see `retention`).
        "<max_number_of_merges_with_ttl_in_pool>0</max_number_of_merges_with_ttl_in_pool>"
        # Else each merge counts the distinct values of all columns for joins, a fifth of its CPU; we have no joins.
        "<auto_statistics_types></auto_statistics_types></merge_tree>"
        "<database_catalog_unused_dir_hide_timeout_sec>1000000000</database_catalog_unused_dir_hide_timeout_sec>"
        "<database_catalog_unused_dir_rm_timeout_sec>0</database_catalog_unused_dir_rm_timeout_sec>"
        # Only the collector runs statements, and it decides where backups go.
        "<backups><allowed_path>/</allowed_path></backups></clickhouse>\n"
    )
    if not config.exists() or config.read_text("utf-8") != text:
        config.write_text(text, "utf-8")
    return config


def clear(folder: Path) -> None:
    """Create the folder for inserts, and remove what a killed process left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("insert-*.arrow"):
        left.unlink()


@contextmanager
def no_stray_config(path: Path) -> Iterator[None]:
    """Leave a working directory with a `config.xml` while the engine starts: it reads it despite its own config."""
    here = Path.cwd()
    stray = any((here / f"config.{kind}").exists() for kind in ("xml", "yaml", "yml"))
    if stray:
        os.chdir(path)
    try:
        yield
    finally:
        if stray:
            os.chdir(here)

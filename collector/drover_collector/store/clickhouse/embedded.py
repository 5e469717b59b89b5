"""The folder of an embedded store: who holds it, and what the engine is told about it."""

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
_WRITABLE = "give a folder that this user may write, in store.url"


class _Lock:
    """What this process holds of one embedded path: the lock file, and the databases that are open."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.databases: set[str] = set()


_held: dict[Path, _Lock] = {}
_held_guard = threading.Lock()


def runs(path: Path) -> bool:
    """Whether this process has another database of the folder open, and so the engine running."""
    with _held_guard:
        return len(_held[path].databases) > 1


def acquire(path: Path, database: str, wait_s: float) -> None:
    with _held_guard:
        mine = _held.get(path)
        if mine is not None and database in mine.databases:
            raise StoreError(f"{path}: this process has the store open already; use that one")
        if mine is None and _held:
            other = next(iter(_held))
            raise StoreError(f"{path}: this process has {other} open, and can hold one embedded store at a time")
        if mine is None:
            mine = _held[path] = _Lock(lock_file(path, wait_s))
        mine.databases.add(database)


def release(path: Path, database: str) -> None:
    with _held_guard:
        mine = _held[path]
        mine.databases.discard(database)
        if not mine.databases:
            give(path, path)
            mine.file.close()  # gives the lock back
            del _held[path]


@dataclass(frozen=True, slots=True)
class StoreFolderState:
    """What opening a store would meet: the process that has it open, or "", free and total bytes of its disk, and when
    something was last written to it, Unix time, None: never."""

    holder: str
    disk: tuple[int, int]
    written_s: float | None = None


def look(path: Path) -> StoreFolderState:
    """Makes nothing, and holds nothing.

    Raises:
        StoreError: a folder that this user cannot open as a store, as `make` and `lock_file` say it.
    """
    _half_restored(path)
    there = next(each for each in (path, *path.parents) if each.exists())
    lock = path / LOCK
    if not there.is_dir():
        raise StoreError(f"{path}: {there} is no folder; {_WRITABLE}")
    if not os.access(there, os.W_OK | os.X_OK) or (lock.exists() and not os.access(lock, os.R_OK | os.W_OK)):
        raise StoreError(f"{path}: this user may not write in {there}; {_WRITABLE}")
    usage = shutil.disk_usage(there)
    written = [folder.stat().st_mtime for folder in (path / "inserts").glob("*")]  # each insert makes a file there
    return StoreFolderState(_holder(lock), (usage.free, usage.total), max(written, default=None))


def _holder(lock: Path) -> str:
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for a moment: who starts waits longer
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
    """The folder; of one that root makes the owner is that of the folder above, as which the collector may run.

    Raises:
        OSError
        StoreError: what should be there is being restored.
    """
    _half_restored(path)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        _own(each, each.parent.stat())


def restoring(path: Path) -> Path:
    """Where what is to be the store at `path` is made out of a backup."""
    return path.with_name(path.name + ".restoring")


def give(folder: Path, like: Path) -> None:
    """All in the folder to the owner of `like`: `drover restore` and `import` may be root's, the collector is not.

    Raises:
        StoreError: not possible on this disk.
    """
    try:
        owner = like.stat()
        if os.geteuid() != 0 or owner.st_uid == 0:
            return
        for at, folders, files in os.walk(folder):
            for name in (".", *folders, *files):
                with contextlib.suppress(FileNotFoundError):  # what the engine removes meanwhile
                    _own(Path(at, name), owner)
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}; chown -R {folder} to the collector's user") from None


def _own(path: Path, owner: os.stat_result) -> None:
    if os.geteuid() == 0 and path.lstat().st_uid != owner.st_uid:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def lock_file(path: Path, wait_s: float) -> IO[str]:
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
    """Our own engine config, so that no `config.xml` of the working directory is taken."""
    config = path / "drover-engine.xml"
    temporary = path / "tmp"
    temporary.mkdir(exist_ok=True)
    text = (
        f"<clickhouse><path>{escape(str(path))}/</path><tmp_path>{escape(str(temporary))}/</tmp_path>"
        + "".join(f"<{key}>{value}</{key}>" for key, value in settings.items())
        + "<storage_configuration><disks><default>"
        f"<keep_free_space_bytes>{keep_free_bytes}</keep_free_space_bytes>"
        "</default></disks></storage_configuration>"
        # However much is damaged, the rest is to answer; and folders that no table knows are left alone.
        "<merge_tree><max_suspicious_broken_parts>1000000000</max_suspicious_broken_parts>"
        "<max_suspicious_broken_parts_bytes>1000000000000000000</max_suspicious_broken_parts_bytes>"
        # One thread removes what was merged: of the pool for it the engine starts 128, which stay.
        "<concurrent_part_removal_threshold>1000000000</concurrent_part_removal_threshold>"
        # Tables of a version before have a TTL until they are migrated: none is begun for it (see `expiry`).
        "<max_number_of_merges_with_ttl_in_pool>0</max_number_of_merges_with_ttl_in_pool>"
        # Else each merge counts the distinct values of all columns, for joins that nobody asks for: a fifth of its CPU.
        "<auto_statistics_types></auto_statistics_types></merge_tree>"
        "<database_catalog_unused_dir_hide_timeout_sec>1000000000</database_catalog_unused_dir_hide_timeout_sec>"
        "<database_catalog_unused_dir_rm_timeout_sec>0</database_catalog_unused_dir_rm_timeout_sec>"
        # Only the collector makes statements, and it says where backups go.
        "<backups><allowed_path>/</allowed_path></backups></clickhouse>\n"
    )
    if not config.exists() or config.read_text("utf-8") != text:
        config.write_text(text, "utf-8")
    return config


def clear(folder: Path) -> None:
    """The folder for inserts, without what a killed process left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("insert-*.arrow"):
        left.unlink()


@contextmanager
def no_stray_config(path: Path) -> Iterator[None]:
    """Out of a working directory with a `config.xml` while the engine starts: it looks there even when told another."""
    here = Path.cwd()
    stray = any((here / f"config.{kind}").exists() for kind in ("xml", "yaml", "yml"))
    if stray:
        os.chdir(path)
    try:
        yield
    finally:
        if stray:
            os.chdir(here)

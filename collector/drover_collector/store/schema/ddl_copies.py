"""Keep copies of the files in which the embedded engine defines its tables, and restore damaged ones.

The engine does not start if a single file cannot be read, and a table whose file is missing looks new and empty. So the
store keeps copies, and restores missing or damaged files before the engine starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from pathlib import Path

log = logging.getLogger(__name__)

COPIES = "definitions"  # folder in the store's folder
ASIDE = "damaged"  # folder for files that were replaced
_UUID = re.compile(r"UUID '([0-9a-f]{3})([0-9a-f-]{33})'")


def mend(path: Path, *, doubtful: bool = False) -> list[str]:
    """Replace definitions that are missing or damaged by their copies; with `doubtful`, all that differ.

    Replaced files are moved to the store's folder `damaged`. A damaged one without a copy is moved there too: its table
    starts empty, and its data stays on the disk.

    Returns:
        What was done, a line each. The lines are logged.
    """
    names = {f.stem for f in (path / "metadata").glob("*.sql")} | {f.name for f in (path / COPIES).glob("*")}
    done = [line for name in sorted(names) for line in _mend_database(path, name, doubtful)]
    for line in done:
        log.error("store: %s", line)
    return done


def _mend_database(path: Path, database: str, doubtful: bool) -> list[str]:
    done: list[str] = []
    copies = path / COPIES / database
    own = path / "metadata" / f"{database}.sql"
    copy = _copy_of(copies / "database.sql")
    if own.exists() or copy is not None:
        done += _mend(path, own, copy, doubtful)
    folder = _folder(path, own)
    if folder is None:
        return done
    names = {file.name for file in folder.glob("*.sql")} | {file.name for file in copies.glob("tables/*.sql")}
    for name in sorted(names):
        done += _mend(path, folder / name, _copy_of(copies / "tables" / name), doubtful)
    return done


def keep(path: Path, database: str) -> None:
    """Copy the present definitions. On a full disk the old copies stay."""
    own = path / "metadata" / f"{database}.sql"
    folder = _folder(path, own)
    if folder is None:
        return
    copies = path / COPIES / database
    try:
        (copies / "tables").mkdir(parents=True, exist_ok=True)
        wanted = {copies / "database.sql": own} | {copies / "tables" / f.name: f for f in folder.glob("*.sql")}
        for copy, file in wanted.items():
            data = file.read_bytes()
            if not _broken(data) and _copy_of(copy) != data:
                write_whole(copy, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        for old in set((copies / "tables").glob("*.sql")) - set(wanted):
            old.unlink()
    except OSError as error:
        log.warning("store: the tables' definitions were not copied, the old copies stay: %s", error)


def replaced(path: Path) -> list[Path]:
    """Return the files that were moved aside."""
    return sorted((path / ASIDE).glob("*.sql"))


def _mend(path: Path, file: Path, copy: bytes | None, doubtful: bool) -> list[str]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        data = None
    except OSError:
        data = b""  # it cannot be read: treat it as empty
    sound = data is not None and not _broken(data)
    if data is None and copy is None:
        return []
    if sound and (not doubtful or copy is None or data == copy):
        return []
    words = "was missing"
    if data is not None:
        aside = path / ASIDE / f"{file.stem}.{time.time_ns() // 1_000_000}.sql"
        aside.parent.mkdir(exist_ok=True)
        file.rename(aside)
        words = f"was damaged and was moved to {aside}"
    if copy is None:
        return [f"the definition {file.name} {words}; it has no copy, so its table starts empty"]
    write_whole(file, copy)
    return [f"the definition {file.name} {words}; it was restored from its copy"]


def _folder(path: Path, own: Path) -> Path | None:
    """Return the folder of the definitions of a database's tables."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = _UUID.search(own.read_text("utf-8"))
        if found is not None:
            folder = path / "store" / found[1] / (found[1] + found[2])
            return folder if folder.is_dir() else None
    return None


def _broken(data: bytes) -> bool:
    """Return whether this is clearly not a definition. Other errors are left to the engine."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    whole = text.startswith("ATTACH ") and _UUID.search(text) is not None and "\nENGINE = " in text
    return not whole or "\0" in text or text.count("(") != text.count(")")


def _copy_of(file: Path) -> bytes | None:
    """Return the content of a copy if its checksum is right."""
    try:
        digest, _, data = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest().encode() == digest else None


def write_whole(file: Path, data: bytes) -> None:
    """Replace a file: after a crash it has the old or the new content."""
    temporary = file.with_name(file.name + ".new")
    with temporary.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
    shutil.move(temporary, file)

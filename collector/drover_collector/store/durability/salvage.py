"""Find the damaged parts of a backup, and make one without them: the engine restores all of a backup or nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from drover_collector.store.durability import integrity
from drover_collector.store.errors import StoreError
from drover_core.times import iso

LIST = ".backup"  # the engine's list of files, their sizes and checksums
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Lost:
    """A part that is not restored, by its name in the backup or engine. Times are those of its rows, if known."""

    table: str
    part: str
    from_ms: int | None
    to_ms: int | None
    rows: int | None  # None: not known

    @property
    def sentence(self) -> str:
        if self.from_ms is None or self.to_ms is None:
            return f"table {self.table}, part {self.part}, rows of unknown time"
        return f"table {self.table}, rows from {iso(self.from_ms)} to {iso(self.to_ms)} (part {self.part})"


def lost(backup: Path, parts: Iterable[tuple[str, str]]) -> list[Lost]:
    """Return what is known about these (table, part) of a backup."""
    found = []
    for table, part in sorted(parts):
        folder = next(backup.glob(f"data/*/{table}/{part}"), backup)
        rows = None
        with contextlib.suppress(OSError, ValueError):
            rows = int((folder / "count.txt").read_text("ascii"))
        found.append(Lost(table, part, *integrity.span_of(folder, part), rows))
    return found


def listed(losses: Sequence[Lost]) -> str:
    """Return one line about them."""
    more = f"; and {len(losses) - SHOWN} more parts" if len(losses) > SHOWN else ""
    return "; ".join(each.sentence for each in losses[:SHOWN]) + more


def damaged(backup: Path) -> set[tuple[str, str]]:
    """Return (table, part) with files that are missing or have another size than the list has.

    Raises:
        StoreError: the list cannot be read, so nothing can be restored.
    """
    found = set()
    for name, size in _listed(backup):
        match name.split("/"):
            case ["data", _, table, part, *_]:
                file = backup / name
                if not file.is_file() or file.stat().st_size != size:
                    found.add((table, part))
    return found


def without(backup: Path, parts: set[tuple[str, str]], folder: Path) -> Path:
    """Make a folder with links to the backup without these parts, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "metadata").symlink_to(backup / "metadata")
    for each in backup.glob("data/*/*/*"):
        link = folder / each.relative_to(backup)
        link.parent.mkdir(parents=True, exist_ok=True)
        if (each.parent.name, each.name) not in parts:
            link.symlink_to(each)
    tree = ElementTree.parse(backup / LIST)  # noqa: S314  # our own file; it was read before
    contents = tree.getroot().find("contents")
    assert contents is not None
    for file in list(contents):
        match (file.findtext("name") or "").split("/"):
            case ["data", _, table, part, *_] if (table, part) in parts:
                contents.remove(file)
    tree.write(folder / LIST)
    return folder


def _listed(backup: Path) -> list[tuple[str, int]]:
    try:
        files = ElementTree.parse(backup / LIST).getroot().findall("contents/file")  # noqa: S314  # our own file
        return [(file.findtext("name") or "", int(file.findtext("size") or 0)) for file in files]
    except OSError as error:
        raise StoreError(f"{backup / LIST}: {error.strerror}; nothing of this backup can be restored") from None
    except (ElementTree.ParseError, ValueError) as error:
        raise StoreError(f"{backup / LIST}: damaged ({error}); nothing of this backup can be restored") from None

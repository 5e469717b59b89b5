"""Detect that the console's files were replaced while it runs: modules stay as loaded, pages are read again."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
TEXT = (
    "Drover's files were replaced while this console ran: restart it (systemctl restart drover-dashboard). Until then"
    " it runs the old version, and parts of pages may be missing."
)


def stamps(folder: Path) -> frozenset[tuple[str, int, int]]:
    """(name, inode, ns of the last change) of each module and page; a hundred microseconds."""
    found = []
    for path in folder.rglob("*.py"):
        try:
            facts = path.stat()
        except FileNotFoundError:  # just being replaced
            continue
        found.append((str(path.relative_to(folder)), facts.st_ino, facts.st_mtime_ns))
    return frozenset(found)


_STARTED = stamps(PACKAGE)


def replaced() -> bool:
    """Whether any of them is another one than when this process began, is new or is gone."""
    return stamps(PACKAGE) != _STARTED

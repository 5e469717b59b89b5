"""A part of an evidence page that a script writes: the lines between two comments. What is around it stays."""

from __future__ import annotations

import subprocess
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs/evidence"
WIDTH = 100


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the lines of the block `name`.

    Raises:
        ValueError: the page has no such block.
    """
    begin, end = f"<!-- {name}: written by a script -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} has no lines {begin} and {end}")
    text = "\n".join(wrapped(lines)).strip("\n")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", "utf-8")


def wrapped(lines: Sequence[str]) -> list[str]:
    """Return the lines with paragraphs and items of lists filled to WIDTH. Tables and headings stay."""
    found: list[str] = []
    text: list[str] = []

    def fill() -> None:
        if text:
            indent = "  " if text[0].startswith("- ") else ""
            whole = " ".join(line.strip() for line in text)
            found.extend(textwrap.wrap(
                whole, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ))  # fmt: skip
            text.clear()

    for line in lines:
        if not line.strip() or line.startswith(("|", "#", "<!--", "- ")):
            fill()
        if line.startswith("- ") or (line.strip() and not line.startswith(("|", "#", "<!--"))):
            text.append(line)
        else:
            found.append(line)
    fill()
    return found


def _commit() -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    return f" at commit {found.stdout.strip()}" if found.returncode == 0 else ""


AT_COMMIT = _commit()  # when the run began: what it measures was loaded then


def when() -> str:
    """Return today and the commit, for a sentence that begins with "Run on"."""
    return time.strftime("%d %B %Y", time.gmtime()).lstrip("0") + AT_COMMIT

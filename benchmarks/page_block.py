"""A part of an evidence page that a script writes: the lines between two comments. What is around it stays."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs/evidence"


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
    text = "\n".join(lines).strip("\n")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", "utf-8")


def when() -> str:
    """Return today and the commit, for a sentence that begins with "Run on"."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    at = f" at commit {commit.stdout.strip()}" if commit.returncode == 0 else ""
    return time.strftime("%d %B %Y", time.gmtime()).lstrip("0") + at

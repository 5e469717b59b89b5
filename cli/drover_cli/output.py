"""What commands print: tables for people, JSON for scripts, progress on stderr while long work runs."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from drover_proto.times import iso


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


ELLIPSIS = "…"
LEAST_BESIDE = 60  # columns; a sentence that would get fewer stands below its line


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: frozenset[int] = frozenset()) -> None:
    """A plain table on stdout; columns in `right` are right-aligned. Control characters are made harmless.

    On a terminal it keeps to the width: a last column that does not fit is cut, or stands below its line where hardly
    anything of it would be left. Elsewhere (a pipe, a file) every line is whole.
    """
    if sys.stdout.isatty():
        print("\n".join(table_lines(headers, rows, right, shutil.get_terminal_size().columns)))
    else:
        print("\n".join(table_lines(headers, rows, right)))


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: frozenset[int] = frozenset(),
    columns: int | None = None,
) -> list[str]:
    """The lines of a table, cut to `columns` where that is given."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(parts).rstrip()

    def drawn() -> list[str]:
        return [line(list(headers)), "  ".join("-" * w for w in widths), *(line(row) for row in cells)]

    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if columns is None or before + widths[-1] <= columns:
        return drawn()
    if columns - before >= LEAST_BESIDE:
        widths[-1] = columns - before
        for row in cells:
            row[-1] = cut(row[-1], widths[-1])
        return drawn()
    told = [row.pop() for row in cells]
    headers = headers[:-1]
    widths.pop()
    lines = [cut(text, columns) for text in drawn()]
    below = [[f"  {cut(text, columns - 2)}"] if text not in ("", "-") else [] for text in told]
    return lines[:2] + [text for at, first in enumerate(lines[2:]) for text in (first, *below[at])]


def cut(text: str, columns: int) -> str:
    """`text`, or as much of it as fits with an ellipsis."""
    return text if len(text) <= columns else text[: max(0, columns - 1)].rstrip() + ELLIPSIS


def plain(text: str) -> str:
    """Text from the fleet with control characters replaced: a kernel line must not steer the operator's terminal.

    Degrees are `°C` where the output can show that, else `C`.
    """
    told = "".join(c if c.isprintable() else " " for c in text)
    return told.replace("degC", "°C") if _shows_degrees(sys.stdout.encoding) else re.sub("degC|°C", "C", told)


@functools.lru_cache(2)
def _shows_degrees(encoding: str | None) -> bool:
    try:
        return bool("°".encode(encoding or "utf-8"))
    except UnicodeEncodeError:
        return False


def when(ts_ms: int) -> str:
    """A time for people: ISO 8601 UTC to the second, `never` for 0."""
    return iso(ts_ms)[:19] + "Z" if ts_ms else "never"


def ago(ts_ms: int, now_ms: int) -> str:
    """`12 s ago`, `3 min ago`, `2.5 h ago`; `never` for 0."""
    if not ts_ms:
        return "never"
    return f"{duration((now_ms - ts_ms) / 1000)} ago"


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2.5 h`, `4.0 d`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def size_text(size: int) -> str:
    """`812 B`, `12.4 MB`, `3.1 GB`."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size} B"


class Progress:
    """Share done of long work, on stderr: a line that rewrites itself on a terminal, else one line every 10 s."""

    def __init__(self, what: str, total: float) -> None:
        self._what, self._total = what, total
        self._tty = sys.stderr.isatty()
        self._started = self._last = time.monotonic()

    def update(self, done: float, note: str = "") -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._tty else 10):
            return
        self._last = now
        share = min(1.0, done / self._total) if self._total else 1.0
        left = (now - self._started) * (1 - share) / share if share > 0.02 else None
        text = f"{self._what}: {share:4.0%}" + (f", {duration(left)} left" if left is not None else "")
        text += f"  {note}" if note else ""
        print(f"\r\x1b[2K{text}" if self._tty else text, end="" if self._tty else "\n", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._tty:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

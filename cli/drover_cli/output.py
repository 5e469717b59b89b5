"""What commands print: tables for people, JSON for scripts, progress on stderr while long work runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from drover_proto.times import iso


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: frozenset[int] = frozenset()) -> None:
    """A plain table on stdout; columns in `right` are right-aligned. Control characters are made harmless."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(parts).rstrip()

    print(line(list(headers)))
    print("  ".join("-" * w for w in widths))
    for row in cells:
        print(line(row))


def plain(text: str) -> str:
    """Text from the fleet with control characters replaced: a kernel line must not steer the operator's terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


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

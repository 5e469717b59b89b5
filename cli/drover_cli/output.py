"""What commands print: tables for people, JSON for scripts, progress on stderr while long work runs."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from drover_cli import forms
from drover_core.model.events import Incident
from drover_core.model.reports import incident_report, job_label
from drover_core.times import iso


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout: numbers without noise, degrees as people write them."""
    print(json.dumps(_neat(value), allow_nan=False), flush=True)


def _neat(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _neat(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_neat(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.10g}")  # 25.650000000000002 is noise of adding up
    return value.replace("degC", "°C") if isinstance(value, str) else value


def message_json(message: Message, **more: Any) -> dict[str, Any]:
    """Return a message as a JSON object with every field: what is not known is null, times are numbers (ms)."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for field in message.DESCRIPTOR.fields:
        if field.name not in found:
            found[field.name] = None
        elif field.cpp_type in INT64 and not isinstance(found[field.name], list):  # protobuf's JSON: a string
            found[field.name] = getattr(message, field.name)
    return {**more, **found}


def incident_json(incident: Incident) -> dict[str, Any]:
    """Return the report of an incident with its times as numbers (ms) too, as all other commands have them."""
    times = {"opened_ms": incident.opened_ms, "since_ms": incident.since_ms, "closed_ms": incident.closed_ms}
    return {**incident_report(incident), **times}


ELLIPSIS = "…"
INT64 = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_FRACTION = re.compile(r"\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d+Z")
LEAST_COLUMNS = 60  # columns; a sentence that would get fewer goes below its line


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: frozenset[int] = frozenset()) -> None:
    """A plain table on stdout; columns in `right` are right-aligned. Control characters are made harmless.

    On a terminal it keeps to the width: a last column that does not fit is wrapped, or goes below its line where
    hardly anything of it would be left, after other columns that have no room. Elsewhere (a pipe, a file) a row is a
    line.
    """
    out = forms.csv_out()
    if out is not None:
        forms.write_csv(headers, rows, out)
        return
    columns = None if forms.wide() else _columns()
    print("\n".join(table_lines(headers, rows, right, columns, colour=forms.colours())))


def _columns() -> int | None:
    """Of the terminal; None: stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str, hang: int = 0) -> None:
    """A line, control characters made harmless; on a terminal wrapped between words, `hang` columns in."""
    columns = _columns()
    print("\n".join([plain(text)] if columns is None else _wrapped(plain(text), columns, hang)))


def _wrapped(text: str, columns: int, hang: int = 0) -> list[str]:
    inner = text.lstrip(" ")
    first = " " * (len(text) - len(inner))
    return textwrap.wrap(
        inner, columns, initial_indent=first, subsequent_indent=" " * hang, break_on_hyphens=False
    ) or [""]  # fmt: skip


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: frozenset[int] = frozenset(),
    columns: int | None = None,
    *,
    colour: bool = False,
) -> list[str]:
    """The lines of a table, none longer than `columns` where that is given. `colour`: of cells that say how it is."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]

    def line(row: Sequence[str], colour: bool = colour) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        if colour:
            parts = [forms.painted(c, part) for c, part in zip(row, parts, strict=False)]
        return "  ".join(parts).rstrip()

    def until(column: int) -> int:
        """Columns that those before it take, and the gap."""
        return sum(widths[:column]) + 2 * column

    last = len(headers) - 1
    if columns is None or until(last) + widths[last] <= columns:
        return [line(headers), line(["-" * w for w in widths]), *map(line, cells)]
    left = columns - until(last)
    if left >= LEAST_COLUMNS:
        widths[last] = left
        lines = [line(headers), line(["-" * w for w in widths])]
        for row in cells:
            first, *more = _wrapped(row[last], left)
            lines += [line([*row[:last], first]), *(" " * until(last) + text for text in more)]
        return lines
    kept = next(n for n in range(last, 0, -1) if n == 1 or until(n) - 2 <= columns)
    lines = [cut(line(headers[:kept]), columns), cut(line(["-" * w for w in widths[:kept]]), columns)]
    for row in cells:
        whole = line(row[:kept], colour=False)
        lines.append(line(row[:kept]) if len(whole) <= columns else cut(whole, columns))
        named = [*(f"{h.lower()} " for h in headers[kept:last]), ""]
        named_cells = [name + text for name, text in zip(named, row[kept:], strict=True) if text not in ("", "-")]
        lines += _wrapped("  " + "; ".join(named_cells), columns, 2) if named_cells else []
    return lines


def cut(text: str, columns: int) -> str:
    """`text`, or as much of it as fits with an ellipsis."""
    return text if len(text) <= columns else text[: max(0, columns - 1)].rstrip() + ELLIPSIS


def plain(text: str) -> str:
    """Text from the fleet with control characters replaced: a kernel line must not steer the operator's terminal.

    Degrees are `°C` where the output can show that, else `C`; times have no fractions of a second.
    """
    printable = _FRACTION.sub(r"\1Z", "".join(c if c.isprintable() else " " for c in text))
    return printable.replace("degC", "°C") if _shows_degrees(sys.stdout.encoding) else re.sub("degC|°C", "C", printable)


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


def where(incident: Incident) -> str:
    """`r01n03 GPU 5`, `r01n03`, `rack, 8 nodes`, `job 812`."""
    if incident.scope == "job" and incident.job:
        return job_label(incident.job)
    if incident.scope in ("rack", "leaf", "job", "fleet"):
        return f"{incident.scope}, {len({node for node, _ in incident.members})} nodes"
    return f"{incident.node} GPU {incident.gpu}" if incident.gpu is not None else f"{incident.node}"

"""Find the line of a key in TOML text, for error messages: tomllib keeps no lines. Pure."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-\"' ]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-\"']+(?:\s*\.\s*[A-Za-z0-9_\-\"']+)*)\s*=")


def line_of(text: str, key: str) -> int | None:
    """Return the line (from 1) of a dotted key such as `rules[2].action`, or of its table if the key is missing.

    None if neither is found, such as for a key inside an inline table. Text inside multi-line strings is read as keys.
    """
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            name = _plain(header[2])
            if header[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
                table = f"{_within(name, counts)}[{counts[name]}]"
            else:
                table = _within(name, counts)
            found.setdefault(table, number)
        elif pair := _KEY.match(line):
            found.setdefault(f"{table}.{_plain(pair[1])}".lstrip("."), number)
    while key:
        if key in found:
            return found[key]
        key = key[: key.rindex("[")] if key.endswith("]") else key.rpartition(".")[0]
    return None


def _within(name: str, counts: dict[str, int]) -> str:
    """Return a table's name with the numbers of its lists of tables: `rules.more` is `rules[1].more`."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        outer = ".".join(parts[:depth])
        if outer in counts:
            return f"{_within(outer, counts)}[{counts[outer]}].{'.'.join(parts[depth:])}"
    return name


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))

"""A fleet file as people write it: a table for nodes that are alike, with their names as a host list."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from drover_cli.fleet.sources import Found

_NUMBERED = re.compile(r"(.*[^0-9]|)([0-9]+)([^0-9]*)")
_KEYS = ("rack", "leaf", "pool", "sku")


def compress(names: Iterable[str]) -> list[str]:
    """Return host lists that `expand` turns into these names again: r01n01, r01n02 give `r01n[01-02]`.

    Only the last number of a name becomes a range, and only with the width that it has.
    """
    groups: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    single = []
    for name in dict.fromkeys(names):
        parts = _NUMBERED.fullmatch(name)
        if parts is None:
            single.append(name)
        else:
            groups[parts[1], len(parts[2]), parts[3]].append(int(parts[2]))
    found = single
    for (before, width, after), numbers in groups.items():
        spans = _spans(sorted(numbers))
        texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in spans]
        alone = len(numbers) == 1
        found.append(f"{before}{texts[0]}{after}" if alone else f"{before}[{','.join(texts)}]{after}")
    return sorted(found)


def _spans(numbers: list[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return spans


def _quoted(text: str) -> str:
    """Return a basic string of TOML 1.0, in ASCII. JSON's differ: surrogate pairs, and DEL unescaped."""
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else _escaped(ord(c)) for c in text) + '"'


def _escaped(code: int) -> str:
    code = 0xFFFD if 0xD800 <= code <= 0xDFFF else code  # half a pair is no character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def tables(nodes: Mapping[str, Found]) -> str:
    """Return the `[[nodes]]` tables of these nodes. GPUs that no source knows are written as a comment."""
    alike: dict[Found, list[str]] = defaultdict(list)
    for name, found in sorted(nodes.items()):
        alike[found].append(name)
    lines = []
    for found, names in alike.items():
        for hosts in compress(names):
            lines += ["[[nodes]]", f"names = {_quoted(hosts)}"]
            lines += [f"{key} = {_quoted(getattr(found, key))}" for key in _KEYS if getattr(found, key)]
            lines += [f"gpus = {found.gpus}" if found.gpus is not None else "# gpus = ?  no source says; 8 if left out"]
            lines.append("")
    return "\n".join(lines)

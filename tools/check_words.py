"""Refuse words that Drover's code, messages and docs do not use. The list, with what to write instead, is words.toml.

Reads every tracked text file: names, docstrings, comments and messages of Python; comments of .proto files; Markdown,
YAML and the rest whole. Literals of one word (keys, names of columns) are formats and not read.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("words.toml")
SUFFIXES = {".py", ".md", ".proto", ".yml", ".yaml", ".toml", ".sh", ".js", ".css", ".html", ".service", ".conf"}
NAMES = {"Makefile", "Containerfile"}

GAP = r"""(?:\s|[#"'*>]|//|\bf(?=["']))+"""  # what may stand between two words of a phrase, over line breaks too
MASK = "\u00b7"  # stands where a text is not read: no part of a word and no gap
ONE_WORD = re.compile(r"""(["'])[\w.:/%-]*\1""")
CODE_OF_PROTO = re.compile(r"^(?:(?!//).)+", re.MULTILINE)
QUOTATION = re.compile(r"^>.*|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”", re.MULTILINE)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    instead: str
    bad: tuple[str, ...]
    good: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """One refused text. `rule` is the rule's pattern."""

    path: str
    line: int
    text: str
    rule: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: write {self.instead}"


@dataclass(frozen=True)
class WordList:
    rules: tuple[Rule, ...]
    skip: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path = LIST) -> WordList:
        """Raises: ValueError: an allowed text has no reason."""
        table = tomllib.loads(path.read_text("utf-8"))
        allowed = table.get("allowed", [])
        for entry in allowed:
            if not entry.get("reason"):
                raise ValueError(f"{path}: allowed text {entry['text']!r} has no reason. Write why it stays.")
        rules = (Rule(r["pattern"], r["instead"], tuple(r["bad"]), tuple(r["good"])) for r in table["rule"])
        return cls(tuple(rules), tuple(table["skip"]), tuple(entry["text"] for entry in allowed))

    @functools.cached_property
    def _any(self) -> re.Pattern[str]:
        """All rules as one expression; group n is rule n - 1."""
        each = "|".join(f"({rule.pattern.replace(' ', GAP)})" for rule in self.rules)
        return re.compile(rf"\b(?:{each})\b", re.IGNORECASE)

    def skips(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, glob) for glob in self.skip)

    def hits(self, path: str, text: str) -> Iterator[Hit]:
        """Yield what the rules refuse in a file's text, in order."""
        for allowed in self.allowed:
            text = text.replace(allowed, MASK)
        words = HUMP.sub(" ", _without_formats(path, text).replace("_", " "))
        for match in self._any.finditer(words):
            assert match.lastindex is not None
            rule = self.rules[match.lastindex - 1]
            line = words.count("\n", 0, match.start()) + 1
            yield Hit(path, line, " ".join(match.group().split()), rule.pattern, rule.instead)


def _without_formats(path: str, text: str) -> str:
    """Mask keys in Python, definitions in .proto files, and quotations in the changelog."""
    if path.endswith(".py"):
        return ONE_WORD.sub(MASK, text)
    if path.endswith(".proto"):
        return CODE_OF_PROTO.sub(MASK, text)
    if Path(path).name.upper().startswith("CHANGELOG"):
        return QUOTATION.sub(MASK, text)
    return text


def tracked_files(root: Path) -> list[str]:
    """Return the text files that git tracks or would add, relative to `root`."""
    ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(ask, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    read = {name for name in listed if Path(name).suffix in SUFFIXES or Path(name).name in NAMES}
    return sorted(name for name in read if (root / name).is_file())


def check(root: Path, files: Iterable[str], words: WordList) -> dict[str, list[Hit]]:
    """Return the hits of each file that has any."""
    read = {name: list(words.hits(name, (root / name).read_text("utf-8"))) for name in files if not words.skips(name)}
    return {name: hits for name, hits in read.items() if hits}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Refuse the words of tools/words.toml.")
    parser.add_argument("files", nargs="*", help="read only these files and folders")
    chosen = parser.parse_args(arguments)
    files = tracked_files(ROOT)
    if chosen.files:
        paths = [Path(name).resolve() for name in chosen.files]
        files = [name for name in files if any((ROOT / name).is_relative_to(path) for path in paths)]
    lines = [str(hit) for hits in check(ROOT, files, WordList.read()).values() for hit in hits]
    for line in lines:
        print(line)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

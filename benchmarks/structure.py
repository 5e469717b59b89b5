"""Print the structure of this checkout, or of another commit and this checkout next to each other.

    benchmarks/structure.py                    tables, then one JSON line
    benchmarks/structure.py --rev v0.1.0       each cell: there -> here
    benchmarks/structure.py --write-details FILE    what is behind the figures: which classes, functions, imports

tools/code_structure.py says what is measured. Takes seconds; `make bench` does not run it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from check_words import WordList
from code_structure import (
    MAX_ATTRIBUTES,
    MAX_CONSTRUCTOR_PARAMETERS,
    MAX_FUNCTION_LINES,
    MAX_PUBLIC_METHODS,
    Codebase,
    Rooms,
)

Figures = dict[str, Any]


def measure(root: Path) -> tuple[Figures, Figures]:
    """Return a checkout's figures, and the names behind them."""
    code = Codebase(root)
    rooms = {package: code.rooms(package) for package in code.folders}
    classes, functions = code.class_sizes(), code.function_sizes()
    circles, slivers, words = code.module_circles(), code.slivers(), refused_words(code)
    figures = {
        "packages": {package: _package(code, package, found) for package, found in rooms.items()},
        "totals": {
            "files": len(code.modules),
            "lines": sum(module.lines for module in code.modules.values()),
            "circles of modules": len(circles),
            "classes": len(classes),
            "classes with > 15 attributes": sum(each.attributes > MAX_ATTRIBUTES for each in classes),
            "classes with > 20 public methods": sum(each.public_methods > MAX_PUBLIC_METHODS for each in classes),
            "classes with > 6 constructor parameters": sum(
                each.constructor_parameters > MAX_CONSTRUCTOR_PARAMETERS for each in classes
            ),
            "functions": len(functions),
            "functions > 50 lines": sum(each.lines > MAX_FUNCTION_LINES for each in functions),
            "functions with >= 6 parameters": sum(each.parameters >= 6 for each in functions),
            "functions with >= 8 parameters": sum(each.parameters >= 8 for each in functions),
            "modules < 100 lines with one importer": len(slivers),
            "refused words": sum(words.values()),
        },
        "words": words,
    }
    details = {
        "rooms": {package: asdict(found) for package, found in rooms.items()},
        "circles of modules": circles,
        "classes past a limit": [asdict(each) for each in classes if each.past_a_limit],
        "functions > 50 lines": [asdict(each) for each in functions if each.lines > MAX_FUNCTION_LINES],
        "functions with >= 6 parameters": [asdict(each) for each in functions if each.parameters >= 6],
        "modules < 100 lines with one importer": slivers,
    }
    return figures, details


def _package(code: Codebase, package: str, found: Rooms) -> Figures:
    return {
        "folder": code.folders[package],
        "files": len(code.of(package)),
        "lines": sum(module.lines for module in code.of(package)),
        "flat modules": len(found.flat_modules),
        "sub-packages": len(found.sub_packages),
        "rooms": len(found.flat_modules) + len(found.sub_packages),
        "floors": len(found.floors),
        "circles of rooms": len(found.circles),
        "rooms in circles": sum(map(len, found.circles)),
        "imports back up": len(found.back_imports),
    }


def refused_words(code: Codebase) -> dict[str, int]:
    """Count what `make lint` refuses in product code, by word, most frequent first. The list is today's."""
    listed = WordList.read()
    count: Counter[str] = Counter()
    for module in code.modules.values():
        for hit in listed.hits(module.path, module.text):
            count[" ".join(re.findall(r"\w+", hit.text.lower()))] += 1
    return dict(sorted(count.items(), key=lambda item: (-item[1], item[0])))


def measure_commit(rev: str, root: Path) -> tuple[Figures, Figures]:
    """Measure a commit in a temporary folder.

    Raises:
        SystemExit: git does not know the commit.
    """
    archive = subprocess.run(["git", "archive", rev], cwd=root, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"git archive {rev} failed: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on; Debian 12 has 3.11.2
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
        return measure(Path(folder))


def tables(measured: list[Figures]) -> str:
    """Return Markdown tables. With two sets of figures, a cell is `first -> second`, or one value if they are equal."""
    packages = _table("package", [figures["packages"] for figures in measured])
    rest = [
        _table(title, [{row: {"count": count} for row, count in figures[part].items()} for figures in measured])
        for title, part in (("all packages", "totals"), ("word", "words"))
    ]
    return "\n\n".join([packages, *rest])


def _table(title: str, measured: list[dict[str, Figures]]) -> str:
    rows = list(dict.fromkeys(row for table in measured for row in table))
    columns = list(dict.fromkeys(column for table in measured for cells in table.values() for column in cells))
    lines = [[title, *columns], ["---"] * (len(columns) + 1)]
    for row in rows:
        cells = ([str(table.get(row, {}).get(column, "none")) for table in measured] for column in columns)
        lines.append([row, *(" -> ".join(dict.fromkeys(values)) for values in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the structure of a checkout.")
    parser.add_argument("--rev", help="a commit to compare with")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--write-details", type=Path, metavar="FILE", help="write the names behind the figures as JSON")
    chosen = parser.parse_args(arguments)
    measured = {chosen.rev: measure_commit(chosen.rev, chosen.root)} if chosen.rev else {}
    measured["here"] = measure(chosen.root)
    print(tables([figures for figures, _ in measured.values()]))
    print()
    print(json.dumps({name: figures for name, (figures, _) in measured.items()}))
    if chosen.write_details:
        named = {name: details for name, (_, details) in measured.items()}
        chosen.write_details.write_text(json.dumps(named, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The structure of a small made-up checkout, and the report of benchmarks/structure.py on it."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import code_structure
from code_structure import Codebase

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import structure  # noqa: E402  # it lies in benchmarks/


def write(root: Path, files: dict[str, str]) -> Codebase:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        for folder in (root / name).relative_to(root).parents:
            if "drover_" in folder.as_posix() and name.endswith(".py"):
                (root / folder / "__init__.py").touch()
    return Codebase(root)


def test_packages_are_found_by_themselves_and_generated_code_is_left_out(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        {
            "core/drover_core/times.py": "x = 1\ny = 2\n",
            "core/drover_core/wire_pb2.py": "x = 1\n",
            "core/drover_core/wire_pb2_grpc.py": "x = 1\n",
            "core/generate.py": "x = 1\n",
            "new/drover_new/a.py": "",
            ".venv/drover_old/a.py": "",
            "tests/helper.py": "",
            "data/drover_data/rows.csv": "",
        },
    )
    assert code.folders == {"drover_core": "core/drover_core", "drover_new": "new/drover_new"}
    assert [(module.name, module.path, module.lines) for module in code.of("drover_core")] == [
        ("drover_core", "core/drover_core/__init__.py", 0),
        ("drover_core.times", "core/drover_core/times.py", 2),
    ]


def test_imports_are_followed_in_every_form_and_place(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        {
            "a/drover_a/b.py": (
                "from typing import TYPE_CHECKING\n"
                "import os, drover_a.c\n"
                "from drover_a import d as dd, missing\n"
                "from drover_a.e import name\n"
                "from . import f\n"
                "from .g import name\n"
                "if TYPE_CHECKING:\n    from drover_a.h import H\n"
                "else:\n    from drover_a.i import H\n"
                "def run():\n"
                "    try:\n        import drover_a.j\n"
                "    except ImportError:\n        import drover_a.k\n"
            ),
            **{f"a/drover_a/{name}.py": "" for name in "cdefghijk"},
            "a/drover_a/p/q.py": "from ..c import x\nfrom . import r\nfrom drover_a.p import y\n",
            "a/drover_a/p/r.py": "import drover_a.p.r\n",
        },
    )
    assert code.imports["drover_a.b"] == {"drover_a"} | {f"drover_a.{name}" for name in "cdefghijk"}
    assert code.imports["drover_a.p.q"] == {"drover_a.c", "drover_a.p.r", "drover_a.p"}
    assert code.imports["drover_a.p.r"] == set(), "itself"


@pytest.fixture
def house(tmp_path: Path) -> Codebase:
    """top -> mid <-> side -> low; side reaches back up to mid once, under TYPE_CHECKING."""
    return write(
        tmp_path,
        {
            "a/drover_a/top.py": "import drover_a.mid.one\nimport drover_b.x",
            "a/drover_a/mid/one.py": "import drover_a.side\nimport drover_a.mid.two",
            "a/drover_a/mid/two.py": "import drover_a.side\nimport drover_a.low",
            "a/drover_a/side.py": "import drover_a.low\nif TYPE_CHECKING:\n    import drover_a.mid.two",
            "a/drover_a/low.py": "x = 1",
            "b/drover_b/x.py": "import drover_b.y\n",
            "b/drover_b/y.py": "",
        },
    )


def test_rooms_floors_circles_and_imports_that_run_back_up(house: Codebase) -> None:
    rooms = house.rooms("drover_a")
    assert rooms.flat_modules == ("low", "side", "top")
    assert rooms.sub_packages == ("mid",)
    assert rooms.floors == (("low",), ("mid", "side"), ("top",))
    assert rooms.circles == (("mid", "side"),)
    assert rooms.back_imports == (("drover_a.side", "drover_a.mid.two"),)
    assert house.rooms("drover_b").floors == (("y",), ("x",))
    assert house.rooms("drover_b").circles == house.rooms("drover_b").back_imports == ()


def test_an_empty_package_has_no_floors(tmp_path: Path) -> None:
    (tmp_path / "a/drover_a").mkdir(parents=True)
    (tmp_path / "a/drover_a/__init__.py").touch()
    assert Codebase(tmp_path).rooms("drover_a").floors == ()


def test_circles_of_modules(house: Codebase) -> None:
    assert house.module_circles() == [("drover_a.mid.two", "drover_a.side")]


def test_components_of_a_long_chain_and_of_two_circles() -> None:
    chain = {str(n): [str(n + 1)] for n in range(5000)} | {"5000": []}
    assert len(code_structure.components(chain)) == 5001
    two = {"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["c"], "e": ["e"]}
    assert code_structure.components(two)[0] == ("c", "d"), "what is imported comes first"
    assert sorted(code_structure.components(two)) == [("a", "b"), ("c", "d"), ("e",)]


def cost(order: tuple[str, ...] | list[str], weights: dict[tuple[str, str], int]) -> int:
    return sum(weights[pair] for pair in code_structure.backward(order, weights))


def test_the_order_with_the_fewest_imports_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(4)
    for _ in range(20):
        pairs = dice.sample(list(itertools.permutations("abcdef", 2)), 14)
        weights = {pair: dice.randint(1, 9) for pair in pairs}
        best = min(cost(order, weights) for order in itertools.permutations("abcdef"))
        assert cost(code_structure.best_order("abcdef", weights), weights) == best
        monkeypatch.setattr(code_structure, "EXACT_ROOMS", 1)
        near = code_structure.best_order("abcdef", weights)
        monkeypatch.undo()
        assert sorted(near) == list("abcdef")
        assert best <= cost(near, weights) <= 2 * best + 2


CLASSES = """
from dataclasses import InitVar, dataclass
from typing import ClassVar, NamedTuple
import drover_b.base as base
from drover_b import Shown

class Plain(base.Base[int]):
    kind = "x"
    default: int = 3
    declared: int
    def __init__(self, one, two=2, *rest, three, **more):
        self.one, (self.two, *self.rest) = one, more
        self.one += 1
        other.three = self.shown = three
        def later():
            self.late = 1
    @property
    def shown(self): return 1
    @shown.setter
    def shown(self, value): self._shown = value
    @classmethod
    def made(cls): cls.count = 1
    @staticmethod
    def helped(thing): thing.x = 1
    def _private(self): ...
    class Inner:
        def __init__(this, a):
            for this.a in a: pass

@dataclass(slots=True)
class Record(Shown):
    a: int
    b: int = 3
    c: ClassVar[int] = 4
    d: InitVar[int] = 5

class Row(NamedTuple):
    a: int
    b: int = 1

class Slotted:
    __slots__ = ("x", "y")
"""
BASE = """
class Base(Root): ...
class Root:
    def __init__(self, a): self.inherited = a
    def run(self): ...
    def _shown(self): ...
"""


def test_sizes_of_classes_count_what_is_inherited_in_the_code_base(tmp_path: Path) -> None:
    files = {"a/drover_a/x.py": CLASSES, "b/drover_b/base.py": BASE}
    write(tmp_path, files)
    (tmp_path / "b/drover_b/__init__.py").write_text("from drover_b.base import Root as Shown\n")
    sizes = {
        each.name: (each.attributes, each.public_methods, each.constructor_parameters)
        for each in Codebase(tmp_path).class_sizes()
    }
    assert sizes == {
        # declared, one, two, rest, late, _shown, inherited; shown, made, helped, run
        "Plain": (7, 4, 3),
        "Plain.Inner": (1, 0, 1),
        "Record": (3, 1, 0),
        "Row": (2, 0, 0),
        "Slotted": (2, 0, 0),
        "Base": (1, 1, 0),
        "Root": (1, 1, 1),
    }


def test_a_class_is_past_a_limit_from_the_next_one_on(tmp_path: Path) -> None:
    def names(count: int) -> list[str]:
        return [f"x{n}" for n in range(count)]

    def source(name: str, attributes: int, methods: int, parameters: int) -> str:
        sets = "; ".join(f"self.{each} = 1" for each in names(attributes))
        more = "".join(f"    def {each}(self): ...\n" for each in names(methods))
        return f"class {name}:\n    def __init__(self, {', '.join(names(parameters))}): {sets}\n{more}"

    sizes = {"Within": (15, 20, 6), "Attributes": (16, 20, 6), "Methods": (15, 21, 6), "Parameters": (15, 20, 7)}
    code = write(tmp_path, {"a/drover_a/x.py": "".join(source(name, *size) for name, size in sizes.items())})
    assert [each.name for each in code.class_sizes() if each.past_a_limit] == ["Attributes", "Methods", "Parameters"]


def test_classes_that_name_each_other_as_bases_end(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        {
            "a/drover_a/x.py": "from drover_a.y import B\nclass A(B): ...\n",
            "a/drover_a/y.py": "from drover_a.x import A\nclass B(A): ...\n",
            "a/drover_a/z.py": "from drover_a.z import C\nclass D(C): ...\n",
        },
    )
    assert [each.name for each in code.class_sizes()] == ["A", "B", "D"]


def test_sizes_of_functions(tmp_path: Path) -> None:
    text = (
        "@decorated\n"
        "def outer(a, /, b, *args, c=1, **more):\n"
        "    async def inner(self):\n"
        "        pass\n"
        "class A:\n"
        "    if True:\n"
        "        def run(self, a): ...\n"
        "    @staticmethod\n"
        "    def make(a, b):\n"
        "        return lambda x: x\n"
    )
    code = write(tmp_path, {"a/drover_a/x.py": text})
    assert [(each.name, each.lines, each.parameters) for each in code.function_sizes()] == [
        ("outer", 3, 3),
        ("outer.inner", 2, 1),
        ("A.run", 1, 1),
        ("A.make", 2, 2),
    ]


def test_slivers_have_one_importer_and_under_100_lines(tmp_path: Path) -> None:
    code = write(
        tmp_path,
        {
            "a/drover_a/main.py": "from drover_a import short, long, twice, other\n",
            "a/drover_a/other.py": "import drover_a.twice\nimport drover_a.p\n",
            "a/drover_a/short.py": "\n" * 99,
            "a/drover_a/long.py": "\n" * 100,
            "a/drover_a/twice.py": "",
            "a/drover_a/p/q.py": "",
        },
    )
    assert code.slivers() == [
        ("drover_a.other", "drover_a.main", 2),
        ("drover_a.short", "drover_a.main", 99),
    ]


def test_the_report_counts_and_names_what_is_measured(house: Codebase, tmp_path: Path) -> None:
    (tmp_path / "a/drover_a/low.py").write_text("\n".join(["told", "likewise", "told"]))
    figures, details = structure.measure(tmp_path)
    assert figures["packages"]["drover_a"] == {
        "folder": "a/drover_a",
        "files": 7,
        "lines": 12,
        "flat modules": 3,
        "sub-packages": 1,
        "rooms": 4,
        "floors": 3,
        "circles of rooms": 1,
        "rooms in circles": 2,
        "imports back up": 1,
    }
    assert figures["totals"]["circles of modules"] == 1
    assert figures["totals"]["files"] == 10
    assert figures["words"] == {"told": 2, "likewise": 1}
    assert details["rooms"]["drover_a"]["back_imports"] == (("drover_a.side", "drover_a.mid.two"),)


def test_a_commit_is_measured_next_to_the_checkout(
    house: Codebase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "before"], check=True)
    (tmp_path / "a/drover_a/low.py").unlink()
    (tmp_path / "core/drover_core").mkdir(parents=True)
    (tmp_path / "core/drover_core/__init__.py").touch()
    details = tmp_path / "details.json"
    arguments = ["--root", str(tmp_path), "--rev", "HEAD", "--write-details", str(details)]
    assert structure.main(arguments) == 0
    printed = capsys.readouterr().out
    assert structure.main(arguments) == 0
    assert capsys.readouterr().out == printed, "the same each time"
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in printed.splitlines() if "|" in line}
    assert rows["drover_a"][:3] == ["a/drover_a", "7 -> 6", "10 -> 9"]
    assert rows["drover_core"][:2] == ["none -> core/drover_core", "none -> 1"]
    assert rows["files"] == ["10 |"]
    measured = json.loads(printed.splitlines()[-1])
    assert [measured[rev]["packages"]["drover_a"]["files"] for rev in ("HEAD", "here")] == [7, 6]
    assert set(json.loads(details.read_text())) == {"HEAD", "here"}
    with pytest.raises(SystemExit, match="git archive nowhere failed"):
        structure.main(["--root", str(tmp_path), "--rev", "nowhere"])

"""The tree follows tools/structure.toml: what may import what, limits of classes and functions. A node needs little."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import code_structure
from code_structure import Codebase

ROOT = Path(__file__).resolve().parents[1]
RULES = tomllib.loads((ROOT / "tools/structure.toml").read_text("utf-8"))
PACKAGES: dict[str, list[str]] = RULES["packages"]
RUFF_LIMITS = {"C901", "PLR0913"}  # too many branches, too many parameters


@pytest.fixture(scope="module")
def code() -> Codebase:
    return Codebase(ROOT)


@functools.cache
def generated(file: Path) -> tuple[code_structure.Statement, ...]:
    """Return the statements of a module that `Codebase` leaves out."""
    return tuple(code_structure.statements(ast.parse(file.read_text("utf-8"))))


def imports(code: Codebase, file: Path) -> Iterator[str]:
    """Yield the names of all modules that a file imports, at any depth."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")
    statements = generated(file) if "_pb2" in file.name else code.modules[name].statements
    for node in (each.node for each in statements):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            yield node.module or ""


# Packages and rooms


def test_every_package_stands_in_the_table(code: Codebase) -> None:
    assert set(code.folders) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_what_the_table_allows(code: Codebase, package: str) -> None:
    files = list((ROOT / code.folders[package]).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(code, file):
            top = name.partition(".")[0]
            assert not top.startswith("drover_") or top in {package, *PACKAGES[package]}, f"{file} imports {name}"


def test_the_table_of_packages_has_no_circle() -> None:
    assert all(len(group) == 1 for group in code_structure.components(PACKAGES))


@pytest.mark.parametrize(
    "package, others",
    [("drover_core", {"drover_core"}), ("drover_proto", {"drover_core", "drover_proto", "google", "grpc"})],
)
def test_lowest_floors_need_little(code: Codebase, package: str, others: set[str]) -> None:
    for file in (ROOT / code.folders[package]).rglob("*.py"):
        for name in imports(code, file):
            assert name.partition(".")[0] in sys.stdlib_module_names | others, f"{file} imports {name}"


def order_problems(code: Codebase, package: str, order: list[str]) -> list[str]:
    """Return what contradicts a package's order: rooms missing from it or gone, imports that run back up."""
    rooms = code.rooms(package)
    there = {*rooms.flat_modules, *rooms.sub_packages}
    found = [f"{package}.{room} has no place in [order] of tools/structure.toml: add it" for room in there - {*order}]
    found += [f"{package}.{room} of [order] is not there: delete it" for room in {*order} - there]
    found += [f"{package}.{room} stands in [order] twice" for room in {*order} if order.count(room) > 1]
    for (room, other), pairs in code.room_imports(package).items():
        if room in order and other in order and order.index(room) > order.index(other):
            found += [f"{importer} imports {imported}, but {other} stands above {room}" for importer, imported in pairs]
    return sorted(found)


@pytest.mark.parametrize("package", RULES["order"])
def test_rooms_import_those_below_them(code: Codebase, package: str) -> None:
    assert not order_problems(code, package, RULES["order"][package])


@pytest.mark.parametrize("package", ["drover_collector", "drover_agent"])
def test_the_order_is_written(package: str) -> None:
    assert RULES["order"][package]


def circle_problems(found: Iterable[tuple[str, ...]], listed: Iterable[list[str]]) -> list[str]:
    """Return the circles that are not part of a listed one, and the listed ones that are no longer there."""
    circles, known = [set(each) for each in found], [set(each) for each in listed]
    problems = [f"these import each other: {sorted(each)}" for each in circles if not any(each <= k for k in known)]
    gone = [each for each in known if not any(circle <= each for circle in circles)]
    return problems + [f"no longer a circle, delete it from tools/structure.toml: {sorted(each)}" for each in gone]


def test_modules_do_not_import_each_other(code: Codebase) -> None:
    assert all(circle["reason"] for circle in RULES.get("circles", []))
    assert not circle_problems(code.module_circles(), [circle["modules"] for circle in RULES.get("circles", [])])


# Limits


def limit_problems(sizes: Iterable[tuple[str, int]], limit: int, groups: Iterable[dict[str, object]]) -> list[str]:
    """Compare what is past a limit with the groups of tools/structure.toml. `sizes` are of all, past it or not."""
    past: dict[str, int] = {}
    problems: list[str] = []
    for name, size in sizes:
        if size > limit:
            problems += [f"{name}: two of this name are past {limit}; rename one"] if name in past else []
            past[name] = size
    listed: dict[str, int] = {}
    for group in groups:
        assert group["reason"], "a group needs its reason"
        assert isinstance(group["past"], list)
        listed |= dict(group["past"])
    for name in sorted({*past, *listed}):
        if name not in past:
            problems.append(f"{name}: is within {limit} or has another name; delete it from tools/structure.toml")
        elif name not in listed:
            problems.append(f"{name}: {past[name]}, at most {limit} allowed. Split it.")
        elif past[name] > listed[name]:
            problems.append(f"{name}: grew from {listed[name]} to {past[name]}, at most {limit} allowed. Split it.")
    return problems


@pytest.mark.parametrize(
    "what, limit",
    [
        ("attributes", code_structure.MAX_ATTRIBUTES),
        ("public_methods", code_structure.MAX_PUBLIC_METHODS),
        ("constructor_parameters", code_structure.MAX_CONSTRUCTOR_PARAMETERS),
    ],
)
def test_classes_keep_within_their_limits(code: Codebase, what: str, limit: int) -> None:
    sizes = [(f"{each.package}:{each.name}", getattr(each, what)) for each in code.class_sizes()]
    assert not limit_problems(sizes, limit, RULES[what])


def test_functions_keep_within_their_limit(code: Codebase) -> None:
    sizes = [
        (f"{each.package}:{each.module.rpartition('.')[2]}.{each.name}", each.lines) for each in code.function_sizes()
    ]
    assert not limit_problems(sizes, code_structure.MAX_FUNCTION_LINES, RULES["function_lines"])


def test_files_that_ruff_lets_past_a_limit_still_need_it() -> None:
    """`# noqa` that is not needed fails in ruff itself (RUF100), an entry of per-file-ignores does not."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert set(lint["select"]) >= RUFF_LIMITS
    assert lint["pylint"]["max-args"] == code_structure.MAX_CONSTRUCTOR_PARAMETERS
    ignored = {
        (path, rule)
        for path, rules in lint["per-file-ignores"].items()
        for rule in rules
        if rule in RUFF_LIMITS and "*" not in path
    }
    limits = [
        f"lint.mccabe.max-complexity={lint['mccabe']['max-complexity']}",
        f"lint.pylint.max-args={lint['pylint']['max-args']}",
    ]
    arguments = ["--isolated", "--no-cache", "--output-format", "json", "--select", ",".join(sorted(RUFF_LIMITS))]
    arguments += [part for limit in limits for part in ("--config", limit)]
    ruff = [sys.executable, "-m", "ruff", "check", *arguments, *sorted({path for path, _ in ignored})]
    printed = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True).stdout if ignored else "[]"
    needed = {(Path(each["filename"]).relative_to(ROOT).as_posix(), each["code"]) for each in json.loads(printed)}
    assert sorted(ignored - needed) == [], "delete these from per-file-ignores in pyproject.toml"


# What a node and the command line load


def test_running_agent_needs_only_base_dependencies() -> None:
    """Neither numpy nor anything of the other extras may come in with a real agent."""
    code = (
        "import sys, drover_agent.main, drover_agent.runtime.agent, drover_agent.sampling.scheduler; "
        "import drover_agent.sources.nvml.source; "
        "print(' '.join(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {"numpy", "pyarrow", "pandas", "streamlit", "torch", "chdb", "clickhouse_connect", "rich", "urllib3"}
    assert not loaded & heavy


def test_help_of_the_command_line_is_light() -> None:
    code = (
        "import sys\nfrom drover_cli.main import build_parser\nbuild_parser()\n"
        "print(' '.join(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {"numpy", "pyarrow", "streamlit", "chdb", "drover_agent", "drover_collector", "drover_dashboard"}
    assert not loaded & heavy


def test_a_node_needs_no_more_than_four_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {d.partition(">=")[0] for d in project["dependencies"]}
    assert names == {"grpcio", "protobuf", "psutil", "nvidia-ml-py"}
    every = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert all(">=" in d or d.startswith("drover[") for d in every), "ranges here; locks/ has exact versions"


# These checks themselves


@pytest.fixture
def small(tmp_path: Path) -> Codebase:
    files = {
        "top.py": "import drover_a.mid.one",
        "mid/one.py": "import drover_a.low",
        "low.py": "",
        "mid/__init__.py": "",
    }
    (tmp_path / "a/drover_a/mid").mkdir(parents=True)
    for name, text in {**files, "__init__.py": ""}.items():
        (tmp_path / "a/drover_a" / name).write_text(text)
    return Codebase(tmp_path)


def test_an_order_names_every_room_once_and_imports_follow_it(small: Codebase) -> None:
    assert order_problems(small, "drover_a", ["top", "mid", "low"]) == []
    assert order_problems(small, "drover_a", ["mid", "top", "low"]) == [
        "drover_a.top imports drover_a.mid.one, but mid stands above top"
    ]
    assert order_problems(small, "drover_a", ["top", "low", "old", "low"]) == [
        "drover_a.low stands in [order] twice",
        "drover_a.mid has no place in [order] of tools/structure.toml: add it",
        "drover_a.old of [order] is not there: delete it",
    ]


def test_circles_may_only_become_fewer_and_smaller() -> None:
    assert circle_problems([("a", "b")], [["a", "b", "c"]]) == []
    assert circle_problems([("a", "d")], []) == ["these import each other: ['a', 'd']"]
    assert circle_problems([], [["a", "b"]])[0].startswith("no longer a circle")


def test_what_is_past_a_limit_may_only_become_less() -> None:
    group: dict[str, object] = {"reason": "old", "past": [["a", 9]]}
    assert limit_problems([("a", 9), ("b", 5)], 5, [group]) == limit_problems([("a", 6)], 5, [group]) == []
    assert "grew from 9 to 10" in limit_problems([("a", 10)], 5, [group])[0]
    assert "delete it" in limit_problems([("a", 5)], 5, [group])[0]
    assert "at most 5 allowed" in limit_problems([("a", 9), ("b", 6)], 5, [group])[0]
    assert "two of this name" in limit_problems([("a", 9), ("a", 6)], 5, [group])[0]
    with pytest.raises(AssertionError, match="reason"):
        limit_problems([], 5, [{"reason": "", "past": []}])

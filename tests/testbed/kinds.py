"""The kinds of tests, as markers, and the check that no `unit` test starts a process.

    e2e       all in a folder of WHOLE: whole programs together, often with a browser or a scheduler
    process   starts a process, itself or by a fixture: what `tests/processes.txt` lists, or what has this marker
    unit      all others: they run in the test's own process, with its threads and its embedded store

The list is measured, and holds names of tests without a path, so that a file can be moved. A fixture is listed with its
module, `test_probe_hold.job`: many have the same name. A test that starts a process and is not listed fails. To bring
the list up to date, write down what is missing, and add it: `pytest --list-processes FILE`.

Tests that take seconds have the marker `long` in addition: `tests/long.txt` lists them.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Callable, Generator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

UNIT, PROCESS, E2E, LONG = "unit", "process", "e2e", "long"
WHOLE = {"e2e", "rollout", "console"}
LIST, LONG_LIST = "tests/processes.txt", "tests/long.txt"  # under pytest's root
# Forms of the store (conftest.py) that a process serves, whatever the test.
SERVED_FORMS = {"server", "cluster"}
# Fixtures that run a compiler: it has ended when the test begins.
COMPILERS = frozenset({"conftest.nvml_library"})
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

LISTED = pytest.StashKey[Set[str]]()
UNUSED = pytest.StashKey[list[str]]()
_started: list[str] = []  # what was started since it was looked at last
_missing: dict[str, str] = {}  # name, and what it started, in the present test


def read_list(path: Path) -> set[str]:
    """Return the names in the list; `#` begins a comment. Raises OSError."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def name_of(item: pytest.Item) -> str:
    """Return the name of a test's function, without parameters."""
    return str(getattr(item, "originalname", item.name))


def fixture_name(fixture: pytest.FixtureDef[Any]) -> str:
    """Return the name under which a fixture is listed."""
    return f"{fixture.func.__module__.rpartition('.')[2]}.{fixture.argname}"


def names_of(item: pytest.Item) -> set[str]:
    """Return the names of a test and of the fixtures that it uses."""
    if not isinstance(item, pytest.Function):
        return {name_of(item)}
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return {name_of(item), *(fixture_name(definition) for chain in fixtures for definition in chain)}


def kind(item: pytest.Item, listed: Set[str]) -> str:
    """Return the kind of a test."""
    if item.path.parent.name in WHOLE:
        return E2E
    form = getattr(getattr(item, "callspec", None), "params", {}).get("store_form")
    if item.get_closest_marker(PROCESS) or form in SERVED_FORMS or not names_of(item).isdisjoint(listed):
        return PROCESS
    return UNIT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--list-processes", metavar="FILE", help="append each test and fixture that starts a process and is not listed"
    )


@pytest.hookimpl(tryfirst=True)  # before -m takes its choice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.rootpath / LIST
    listed: Set[str] = read_list(path)
    long: Set[str] = read_list(config.rootpath / LONG_LIST)
    config.stash[LISTED] = listed
    for item in items:
        item.add_marker(kind(item, listed))
        if name_of(item) in long:
            item.add_marker(LONG)
    whole = [Path(argument).resolve() for argument in config.args] == [path.parent]
    config.stash[UNUSED] = sorted((listed | long).difference(*map(names_of, items))) if whole else []


# ---- the check


def pytest_configure() -> None:
    sys.addaudithook(note)
    multiprocessing.util.spawnv_passfds = noted(multiprocessing.util.spawnv_passfds)


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Remember that a process is started: a hook of `sys.addaudithook`."""
    if event in STARTS:
        _started.append(f"{event}: {arguments!r:.200}")


def noted(start: Callable[..., int]) -> Callable[..., int]:
    """Return `start`, by which multiprocessing starts a process and which causes no audit event, with a note of it."""

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        _started.append(f"multiprocessing: {args!r:.200}")
        return start(path, args, passfds)

    return spawn


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    _started.clear()
    _missing.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    before = len(_started)
    try:
        return (yield)
    finally:
        made, _started[before:] = _started[before:], []
        name = fixture_name(fixturedef)
        if made and name not in COMPILERS and name not in request.config.stash[LISTED]:
            _missing[name] = made[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _started and item.get_closest_marker(UNIT):
        _missing[name_of(item)] = _started[0]
    _started.clear()
    missing = {} if item.get_closest_marker(E2E) else dict(_missing)
    _missing.clear()
    if file := item.config.getoption("--list-processes"):
        with Path(file).open("a") as out:
            out.writelines(f"{name}\n" for name in missing)
    elif missing and report.passed:
        name, what = next(iter(missing.items()))
        report.outcome = "failed"
        report.longrepr = f"{name} starts a process and is not listed. Add it to {LIST}, or do without. Started: {what}"
    return report

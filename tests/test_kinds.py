"""The kinds of tests: which kind a test has, and that what starts a process is listed as such."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.kinds import LIST, UNUSED

STARTING = """
import multiprocessing, os, subprocess

def test_popen():
    subprocess.run(["true"], check=True)

def test_fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)

def test_posix_spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

def test_system():
    os.system("true")

def test_multiprocessing():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()

def test_none():
    pass
"""
STARTED = {"test_popen", "test_fork", "test_posix_spawn", "test_system", "test_multiprocessing"}
SHARED = """
import subprocess
import pytest

@pytest.fixture(scope="module")
def server():
    return subprocess.run(["true"], check=True)

def test_first(server):
    pass

def test_second(server):
    pass

@pytest.mark.process
def test_marked():
    subprocess.run(["true"], check=True)

def test_without():
    pass
"""
INI = """[pytest]
addopts = --import-mode=importlib --strict-markers
markers =
    unit
    process
    e2e
    long
"""


class Suite:
    """A small suite in a folder of its own, with the plugin under test."""

    def __init__(self, root: Path) -> None:
        self.root, self.env = root, {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        (root / "pytest.ini").write_text(INI)
        (root / "tests/e2e").mkdir(parents=True)
        self.write("processes.txt", "")
        self.write("long.txt", "")

    def write(self, name: str, text: str) -> None:
        (self.root / "tests" / name).write_text(text)

    def run(self, *words: str) -> tuple[dict[str, str], str]:
        """Run pytest. Returns: the outcome of each test, and all that pytest wrote."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "testbed.kinds", "-p", "no:cacheprovider", "-rA", "tests", *words],
            cwd=self.root, env={**self.env, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1, 5), done.stdout + done.stderr
        found = {}
        for line in done.stdout.partition("short test summary")[2].splitlines():
            outcome, _, rest = line.partition(" ")
            if name := rest.partition("::")[2].partition(" ")[0]:
                found[name] = outcome
        return found, done.stdout


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_unit_test_that_starts_a_process_fails(suite: Suite) -> None:
    suite.write("test_starting.py", STARTING)
    found, text = suite.run()
    assert found == dict.fromkeys(STARTED, "FAILED") | {"test_none": "PASSED"}
    assert f"test_popen starts a process and is not listed. Add it to {LIST}" in text


def test_what_is_listed_is_of_the_kind_process_and_may_start_one(suite: Suite) -> None:
    suite.write("test_starting.py", STARTING)
    suite.write("processes.txt", "\n".join(["# measured", *STARTED]))
    found, _ = suite.run()
    assert set(found.values()) == {"PASSED"}
    assert set(suite.run("-m", "process")[0]) == STARTED
    assert set(suite.run("-m", "unit")[0]) == {"test_none"}


def test_a_fixture_that_starts_a_process_makes_its_tests_process(suite: Suite) -> None:
    suite.write("test_shared.py", SHARED)
    found, text = suite.run()
    assert found == {"test_first": "ERROR", "test_second": "PASSED", "test_marked": "PASSED", "test_without": "PASSED"}
    assert "test_shared.server starts a process and is not listed" in text
    suite.write("processes.txt", "test_shared.server  # a server")
    assert set(suite.run("-m", "process")[0].items()) == {
        ("test_first", "PASSED"), ("test_second", "PASSED"), ("test_marked", "PASSED"),
    }  # fmt: skip
    assert set(suite.run("-m", "unit")[0]) == {"test_without"}


@pytest.mark.parametrize("folder", ["e2e", "rollout", "console"])
def test_all_in_these_folders_is_e2e_and_may_start_processes(suite: Suite, folder: str) -> None:
    (suite.root / "tests" / folder).mkdir(exist_ok=True)
    suite.write(f"{folder}/test_starting.py", STARTING)
    found, _ = suite.run("-m", "e2e")
    assert found == dict.fromkeys({*STARTED, "test_none"}, "PASSED")
    assert suite.run("-m", "unit or process")[0] == {}


def test_what_is_listed_as_long_is_so_in_addition_to_its_kind(suite: Suite) -> None:
    suite.write("test_starting.py", STARTING)
    suite.write("processes.txt", "\n".join(STARTED))
    suite.write("long.txt", "test_none\ntest_fork  # measured")
    assert set(suite.run("-m", "long")[0]) == {"test_none", "test_fork"}
    assert set(suite.run("-m", "process and not long")[0]) == STARTED - {"test_fork"}
    assert suite.run("-m", "unit and not long")[0] == {}


def test_what_is_missing_in_the_list_is_written_down(suite: Suite, tmp_path: Path) -> None:
    suite.write("test_starting.py", STARTING)
    suite.write("test_shared.py", SHARED)
    suite.write("e2e/test_more.py", STARTING)
    found, _ = suite.run("--list-processes", str(tmp_path / "missing.txt"))
    assert set(found.values()) == {"PASSED"}
    assert sorted((tmp_path / "missing.txt").read_text().split()) == sorted({*STARTED, "test_shared.server"})


def test_the_list_names_nothing_that_is_gone(pytestconfig: pytest.Config) -> None:
    """Looked at where the whole suite is collected."""
    assert pytestconfig.stash[UNUSED] == []


@pytest.mark.parametrize("end_at", ["inf", "0"])
def test_a_run_that_has_to_end_says_what_it_did_not_run(suite: Suite, end_at: str) -> None:
    """All other skips are failures there."""
    suite.env["DROVER_SYSTEM"] = "1"
    # The skip below is one of the small suite, to see that it fails there.
    suite.write(
        "test_one.py", "import pytest\ndef test_one(): pass\ndef test_skips(): pytest.skip('for its own reason')\n"
    )
    suite.write("e2e/test_whole.py", "def test_whole(): pass\n")
    found, text = suite.run("-p", "testbed.system", "-p", "testbed.ending", "--end-at", end_at)
    assert "NOT RUN on this slow machine: whole programs together" in text
    if end_at == "inf":
        assert found == {"test_one": "PASSED", "test_skips": "FAILED"}, text
        assert "1 failed, 1 passed, 1 skipped" in text
    else:
        assert found == {}, text
        assert "3 skipped" in text
        assert "NOT RUN on this slow machine: the time is over" in text
    found, text = suite.run("-p", "testbed.system", "-p", "testbed.ending")
    assert found == {"test_one": "PASSED", "test_skips": "FAILED", "test_whole": "PASSED"}

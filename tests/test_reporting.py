"""pytest cannot make a report of a failure: it is still a failure, it says what was raised, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest

class Unreadable(pytest.Function):
    def repr_failure(self, excinfo):
        {raising}

def pytest_pycollect_makeitem(collector, name, obj):
    if name.startswith("test_"):
        return Unreadable.from_parent(collector, name=name)
"""
TESTS = """
def test_fails():
    assert 1 == 2, "the reason"

def test_passes():
    pass
"""


@pytest.mark.parametrize("raising", ['raise SystemError("recursion depth")', 'pytest.fail("Timeout (>1500.0s)")'])
def test_a_failure_without_a_report_does_not_end_the_run(tmp_path: Path, raising: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(raising=raising))
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "testbed.reporting", "-p", "no:cacheprovider", "-v", "test_some.py"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                           "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "AssertionError: the reason" in done.stdout
    assert ("recursion depth" in done.stdout) == ("SystemError" in raising)

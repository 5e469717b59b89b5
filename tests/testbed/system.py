"""Tests marked `system` need root and system packages; with DROVER_SYSTEM=1 they run, and nothing may be skipped.

But for what a run that has to end does not run (testbed/ending.py).
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from testbed.ending import NOT_RUN

SYSTEM = bool(os.environ.get("DROVER_SYSTEM"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SYSTEM:
        return
    skip = pytest.mark.skip(reason="needs root and system packages: make test SYSTEM=1")
    for item in items:
        if item.get_closest_marker("system"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # What a slow machine has no time for is no missing part of the system.
    if SYSTEM and report.skipped and not hasattr(report, "wasxfail") and not item.stash.get(NOT_RUN, False):
        report.outcome = "failed"
        report.longrepr = f"skipped in a run that must skip nothing: {report.longrepr}"
    return report

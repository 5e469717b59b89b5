"""A run of tests that has to end, on a machine many times slower than usual: `pytest --end-at SECONDS` (since 1970).

`.ci/run` asks for it where it measures such a machine: a host that throttles its cores was seen at a fifth of the usual
speed, where all tests take two hours and CI has 90 minutes. Cheap tests come first then. What has not begun at that
time is not run. Nor is what has whole programs together (`e2e`): there a page of the console takes longer to draw than
its tests wait. Each such test is reported as skipped, with this as its reason.

How the run ended is kept in pytest's cache, `drover/ended`: tests that failed while others ran, and only such, are run
once more by themselves.
"""

from __future__ import annotations

import time

import pytest

from testbed.kinds import E2E

NOT_RUN = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--end-at", type=float, default=None, metavar="SECONDS", help="begin no test after this time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end_s: float | None = item.config.getoption("end_at")
    if end_s is None:
        return
    whole = item.get_closest_marker(E2E) is not None
    if whole or time.time() > end_s:
        item.stash[NOT_RUN] = True
        # The run must end before the limit of CI, which refuses all of it. The summary counts what is left out.
        pytest.skip("NOT RUN on this slow machine: " + ("whole programs together" if whole else "the time is over"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    cache: pytest.Cache | None = getattr(session.config, "cache", None)
    if (
        cache is not None
        and session.config.getoption("end_at") is not None
        and not hasattr(session.config, "workerinput")
    ):
        cache.set("drover/ended", int(exitstatus))

"""Where no report of a failure can be made, the test has failed all the same, and the tests after it run.

pytest ends the whole run where making a report raises. Two such were seen: the limit of time of a test that comes while
its failure is being written, and "AST constructor recursion depth mismatch" while pytest reads the source of a test
that drives a browser, whose driver switches stacks (greenlet).
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    try:
        return (yield)
    except (SystemError, pytest.fail.Exception) as error:
        raised = call.excinfo.exconly() if call.excinfo else "nothing was raised"
        why = f"{raised}\n(its report could not be made: {type(error).__name__}: {error})"
        return pytest.TestReport(
            item.nodeid, item.location, {}, "failed", why, call.when, (), call.duration, call.start, call.stop
        )

"""Writes docs/evidence/rollout.md after a run of all that has passed; of any run test-artifacts/rollout.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import rollout_log

ROOT = Path(__file__).resolve().parents[2]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    step = rollout_log.step_of(report.nodeid)
    step.seconds += report.duration
    if report.outcome != "passed":
        step.outcome = report.outcome.upper()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not rollout_log.STEPS:
        return
    text = rollout_log.page()
    (ROOT / "test-artifacts").mkdir(exist_ok=True)
    (ROOT / "test-artifacts/rollout.md").write_text(text)
    there = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    whole = there == {item.path.name for item in session.items}
    passed = all(step.outcome == "passed" for step in rollout_log.STEPS.values())
    if whole and passed and not session.config.option.keyword and len(rollout_log.STEPS) == len(session.items):
        (ROOT / "docs/evidence/rollout.md").write_text(text)

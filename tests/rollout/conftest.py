"""Writes docs/evidence/rollout.md and packages.md after a run of all that has passed; of any run test-artifacts/."""

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
    (ROOT / "test-artifacts").mkdir(exist_ok=True)
    for name in {step.page for step in rollout_log.STEPS.values()}:
        text = rollout_log.page(name)
        (ROOT / f"test-artifacts/{name}.md").write_text(text)
        there = {path.name for path in Path(__file__).parent.glob("test_*.py") if _page(path.name) == name}
        items = [item for item in session.items if _page(item.path.name) == name]
        steps = [step for step in rollout_log.STEPS.values() if step.page == name]
        whole = there == {item.path.name for item in items} and len(steps) == len(items)
        if whole and not session.config.option.keyword and all(step.outcome == "passed" for step in steps):
            (ROOT / f"docs/evidence/{name}.md").write_text(text)


def _page(file: str) -> str:
    return "packages" if file == "test_packages.py" else "rollout"

"""Writes docs/evidence/rollout.md, packages.md, pods.md after a whole run that passed; of any run test-artifacts/."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import rollout_log, rollout_packages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rollout_packages.packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def images(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return rollout_packages.images(packages, tmp_path_factory.mktemp("images"))


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
        files = Path(__file__).parent.glob("test_*.py")
        there = {path.name for path in files if rollout_log.page_of(path.name) == name}
        items = [item for item in session.items if rollout_log.page_of(item.path.name) == name]
        steps = [step for step in rollout_log.STEPS.values() if step.page == name]
        whole = there == {item.path.name for item in items} and len(steps) == len(items)
        if whole and not session.config.option.keyword and all(step.outcome == "passed" for step in steps):
            (ROOT / f"docs/evidence/{name}.md").write_text(text)

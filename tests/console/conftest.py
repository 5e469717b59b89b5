"""Writes docs/evidence/console.md after a run of all that has passed."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import pytest

from testbed.rollout_log import STEPS, step_of

ROOT = Path(__file__).resolve().parents[2]
BEGAN_S, LOAD = time.monotonic(), os.getloadavg()[0]
PARTS = ("agent", "collector", "dashboard", "proto", "tests/console")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    step = step_of(report.nodeid)
    if report.when == "call":
        step.seconds = report.duration
    if report.outcome != "passed":
        step.outcome = report.outcome.upper()


def pytest_sessionfinish(session: pytest.Session) -> None:
    there = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    whole = there == {item.path.name for item in session.items} and not session.config.option.keyword
    if whole and len(STEPS) == len(session.items) and all(step.outcome == "passed" for step in STEPS.values()):
        (ROOT / "docs/evidence/console.md").write_text(page())


def page() -> str:
    version = subprocess.run(["chromium", "--version"], capture_output=True, text=True, check=True).stdout
    chromium = " ".join(version.split()[:2])
    lines = [
        "# The console on 256 nodes: the log of one run",
        "",
        "<!-- written by `make test-console`; its pictures: test-artifacts/console/ -->",
        "",
        f"{time.strftime('%d %B %Y', time.gmtime())}, commit {_commit()}: {len(STEPS)} of {len(STEPS)} tests passed in"
        f" {time.monotonic() - BEGAN_S:.0f} s, load {LOAD:.1f} before. {os.cpu_count()} cores, {chromium}, Python"
        f" {platform.python_version()}. Seconds are those of the test, waits for a fault to be found included.",
        "",
        "| what | s |",
        "| --- | --- |",
    ]
    lines += [f"| {_sentence(name)} | {step.seconds:.0f} |" for name, step in STEPS.items()]
    return "\n".join(lines) + "\n"


def _sentence(name: str) -> str:
    words, _, page = name.removeprefix("test_").partition("[")
    return words.replace("_", " ") + (f": {page.rstrip(']')}" if page else "")


def _commit() -> str:
    """Of what ran."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *PARTS)
    return _git("rev-parse", "--short", "HEAD") + (" with changes that are not committed" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()

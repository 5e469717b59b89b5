"""The log of `make test-rollout` as a page: what each step was, how it ended, and what it saw."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGAN_S = time.monotonic()


@dataclass
class Step:
    outcome: str = "passed"
    seconds: float = 0.0
    seen: list[str] = field(default_factory=list)


STEPS: dict[str, Step] = {}  # by the test's name, in the order of the run


def saw(text: str) -> None:
    """Said by the test that runs now."""
    name = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    step_of(name).seen.append(text)


def step_of(nodeid: str) -> Step:
    return STEPS.setdefault(nodeid.rpartition("::")[2], Step())


def page() -> str:
    passed = sum(step.outcome == "passed" for step in STEPS.values())
    minutes = (time.monotonic() - BEGAN_S) / 60
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    builds = "with bundles of a run before" if os.environ.get("DROVER_ROLLOUT_DIST") else "builds included"
    lines = [
        "# Rollout: the log of one run",
        "",
        "<!-- written by `make test-rollout`; what plays print: test-artifacts/rollout.log -->",
        "",
        f"{time.strftime('%d %B %Y', time.gmtime())}, commit {_commit()}: {passed} of {len(STEPS)} steps passed in"
        f" {minutes:.0f} minutes, {builds}. {machine}, ansible-core {version('ansible-core')}.",
        "",
        "| step | ended | s | seen |",
        "| --- | --- | --- | --- |",
    ]
    for name, step in STEPS.items():
        title = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {title} | {step.outcome} | {step.seconds:.0f} | {'<br>'.join(step.seen).replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    """Of what was installed."""
    parts = ["ansible", "agent", "collector", "dashboard", "cli", "proto"]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *parts)
    return _git("rev-parse", "--short", "HEAD") + (" with changes that are not committed" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()

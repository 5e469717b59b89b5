"""The log of `make test-rollout` as a page: what each step was, how it ended, and what it saw."""

from __future__ import annotations

import os
import platform
import subprocess
import textwrap
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGAN_S = time.monotonic()


@dataclass
class Step:
    page: str  # of docs/evidence
    outcome: str = "passed"
    seconds: float = 0.0
    seen: list[str] = field(default_factory=list)


STEPS: dict[str, Step] = {}  # by the test's node id, in the order of the run


def saw(text: str) -> None:
    """Said by the test that runs now."""
    name = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    step_of(name).seen.append(text)


def step_of(nodeid: str) -> Step:
    return STEPS.setdefault(nodeid, Step(page_of(Path(nodeid.partition("::")[0]).name)))


def page_of(file: str) -> str:
    """Return the page of docs/evidence that a file of tests writes."""
    own = {"test_packages.py": "packages", "test_pods.py": "pods"}
    return own.get(file, "rollout")


def page(name: str) -> str:
    """Return the text of docs/evidence/NAME.md: the steps of the files whose page it is."""
    steps = {step: found for step, found in STEPS.items() if found.page == name}
    passed = sum(step.outcome == "passed" for step in steps.values())
    minutes = (time.monotonic() - BEGAN_S) / 60
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    built = {"rollout": "DROVER_ROLLOUT_DIST", "packages": "DROVER_PACKAGES", "pods": "DROVER_IMAGES"}[name]
    builds = "with builds of a run before" if os.environ.get(built) else "builds included"
    lines = [
        f"# {name.capitalize()}: the log of one run",
        "",
        "<!-- written by `make test-rollout`; what plays print: test-artifacts/rollout.log -->",
        "",
        textwrap.fill(
            f"{time.strftime('%d %B %Y', time.gmtime())}, commit {_commit()}: {passed} of {len(steps)} steps passed in"
            f" {minutes:.0f} minutes, {builds}. {machine}{_ansible() if name == 'rollout' else ''}.",
            100,
        ),
        "",
        "| step | ended | s | seen |",
        "| --- | --- | --- | --- |",
    ]
    for test, step in steps.items():
        title = test.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        lines.append(f"| {title} | {step.outcome} | {step.seconds:.0f} | {'<br>'.join(step.seen).replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def _ansible() -> str:
    return f", ansible-core {version('ansible-core')}"


def _commit() -> str:
    """Of what was installed."""
    parts = ["ansible", "packages", "agent", "collector", "dashboard", "cli", "proto"]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *parts)
    return _git("rev-parse", "--short", "HEAD") + (" with changes that are not committed" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()

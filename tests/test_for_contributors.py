"""What greets contributors is in step with the repository: CI, hooks, forms for issues, changelog."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGETS = frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
SET_UP = frozenset({"apt-get", "git"})
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # of Keep a Changelog 1.1.0


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


def _github() -> dict[str, list[str]]:
    jobs = _yaml(".github/workflows/ci.yml")["jobs"]
    return {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}


def _gitlab() -> dict[str, list[str]]:
    settings = _yaml(".gitlab-ci.yml")
    before = settings["default"]["before_script"]
    return {name: [*before, *job["script"]] for name, job in settings.items() if "script" in job}


def _commands(lines: list[str]) -> list[list[str]]:
    """Return the words of each command, without what sets a machine up."""
    commands = [shlex.split(part) for line in lines for part in line.split("&&")]
    return [words for words in commands if words[0] not in SET_UP]


@pytest.mark.parametrize("jobs", [_github(), _gitlab()], ids=["github", "gitlab"])
def test_ci_calls_only_what_a_contributor_can_call(jobs: dict[str, list[str]]) -> None:
    assert jobs
    for name, lines in jobs.items():
        for words in _commands(lines):
            if words[0] == "make":
                assert words[1] in TARGETS, f"{name}: {' '.join(words)}"
            else:
                assert words == [".ci/run"], f"{name}: {' '.join(words)}"


def test_both_forges_run_the_same() -> None:
    github = {name: _commands(lines) for name, lines in _github().items()}
    assert github == {name: _commands(lines) for name, lines in _gitlab().items()}
    assert any([".ci/run"] in commands for commands in github.values()), "what must pass before a change lands"


def test_ci_run_calls_make_targets() -> None:
    called = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)
    assert called
    assert TARGETS.issuperset(called)


def test_hooks_call_tools_of_the_development_environment() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["dev"]
    tools = {re.split(r"[^a-z-]", line)[0] for line in extra} | {"python"}
    for repository in _yaml(".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local", "a hook from elsewhere has versions of its own"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            program, *words = shlex.split(hook["entry"])
            assert program.startswith(".venv/bin/"), hook["id"]
            assert program.removeprefix(".venv/bin/") in tools, hook["id"]
            for word in words:
                assert "/" not in word or (ROOT / word).exists(), f"{hook['id']}: {word}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_forges_take(path: Path) -> None:
    """By GitHub's "Syntax for issue forms": name, description, and a body with at least one question."""
    form = _yaml(str(path.relative_to(ROOT)))
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert questions
    assert len({part["id"] for part in questions}) == len(questions)
    for part in questions:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"]["label"]
        assert (part["type"] == "dropdown") == ("options" in part["attributes"])


def test_the_changelog_has_the_version_of_pyproject_and_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings[1:]]
    assert all(released), headings
    order = [(tuple(map(int, found.groups()[:3])), found[4]) for found in released if found]
    assert order == sorted(order, reverse=True), "newest first"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"## [{version}]" in text or f"This becomes {version}." in text
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= set(SECTIONS)

"""Container files: what must hold whoever builds them (hadolint, in `make lint`, looks at the rest)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("containers/*/Containerfile"))


def test_there_is_one_for_each_service() -> None:
    assert [path.parent.name for path in FILES] == ["collector", "dashboard"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_it_is_not_root_and_brings_nothing_unpinned_or_secret(path: Path) -> None:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE} AS build", "FROM ${BASE}"]
    assert "ARG BASE" in lines  # no default: a build names the digest that somebody has looked at
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])  # by number: an orchestrator can check it
    copied = [line.split()[-2] for line in lines if line.startswith(("COPY", "ADD"))]
    assert copied == ["ansible/locks/", "dist/drover-*.whl", "/opt/drover"]
    assert any("--require-hashes" in line for line in lines)
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert not re.search(r"(?i)(password|secret|token|\.key|BEGIN)", text)


def test_a_build_sees_nothing_but_wheels_and_locks() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules == ["*", "!dist/drover-*.whl", "!ansible/locks"]

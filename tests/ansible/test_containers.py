"""The container file: what must hold for each build (hadolint, in `make lint`, looks at the rest)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stages() -> dict[str, list[str]]:
    """Name -> its instructions, each in one line; "" is what stands before the first."""
    text = (ROOT / "containers/Containerfile").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("FROM"):
            base, name = re.fullmatch(r"FROM (\S+) AS (\w+)", line).groups()  # type: ignore[union-attr]  # else it fails
            assert base == "${BASE}"
            found[name] = []
        else:
            found[name].append(line)
    return found


def copied(lines: list[str]) -> list[str]:
    return [line.split()[-2] for line in lines if line.startswith(("COPY", "ADD"))]


def test_its_packages_are_pinned_and_it_brings_nothing_else() -> None:
    found = stages()
    assert list(found) == ["", "build", "build_agent", "agent", "dashboard", "collector"]
    assert found[""] == ["ARG BASE"]  # no default: a build names the digest that somebody has looked at
    for build in ("build", "build_agent"):
        assert copied(found[build]) == ["ansible/locks/", "dist/drover-*.whl"]
        (installs,) = [line for line in found[build] if line.startswith("RUN")]
        for install in re.findall(r"pip install ([^&]*)", installs):
            assert "--require-hashes" in install or "--no-deps --no-index" in install


def test_the_agents_image_holds_the_agent_alone() -> None:
    lines = stages()["agent"]
    assert copied(lines) == ["/opt/drover"]
    assert "COPY --from=build_agent /opt/drover /opt/drover" in lines
    assert 'ENTRYPOINT ["/opt/drover/bin/drover-agent"]' in lines


@pytest.mark.parametrize("name", ["collector", "dashboard"])
def test_a_service_is_not_root_and_holds_no_secret(name: str) -> None:
    lines = stages()[name]
    assert copied(lines) == ["/opt/drover"]
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])  # by number: an orchestrator can check it
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert f'ENTRYPOINT ["/opt/drover/bin/drover-{name}"]' in lines
    assert not re.search(r"(?i)(password|secret|token|\.key|BEGIN)", "\n".join(lines))


def test_a_build_sees_nothing_but_wheels_and_locks() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules == ["*", "!dist/drover-*.whl", "!ansible/locks"]

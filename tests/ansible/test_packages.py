"""The two packages: everything, and what a node installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
AGENT = tomllib.loads((ROOT / "agent/pyproject.toml").read_text("utf-8"))


def test_the_agent_s_package_asks_for_what_the_whole_one_does() -> None:
    assert AGENT["project"]["dependencies"] == WHOLE["project"]["dependencies"]
    extras = WHOLE["project"]["optional-dependencies"]
    assert all(extras[name] == ranges for name, ranges in AGENT["project"]["optional-dependencies"].items())
    assert AGENT["build-system"] == WHOLE["build-system"]


def test_the_agent_s_package_has_no_simulator() -> None:
    wheel = AGENT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted([*wheel["packages"], *wheel["force-include"].values()]) == [
        "drover_agent",
        "drover_core",
        "drover_proto",
    ]
    assert "entry-points" not in AGENT["project"]
    assert set(AGENT["project"]["scripts"].items()) <= set(WHOLE["project"]["scripts"].items())


def test_the_lock_of_development_is_within_the_ranges() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "locks/dev.txt").read_text("utf-8").splitlines()
    locked = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    extras = WHOLE["project"]["optional-dependencies"].values()
    for line in [*WHOLE["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        wanted = Requirement(line)
        if wanted.name != "drover":
            assert wanted.specifier.contains(locked[wanted.name.lower()]), line
    assert locked["torch"] == "2.13.0"

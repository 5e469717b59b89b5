"""Every variable of a role stands in its argument specs, which document it and refuse what is of another type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).resolve().parents[2] / "ansible/roles"
NAMES = sorted(path.name for path in ROLES.iterdir())
INSIDE = {"drover_agent_link", "drover_on_server"}  # follow from the inventory's groups; nobody sets them


def options(role: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    specs = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text())["argument_specs"]
    for spec in specs.values():
        found |= spec["options"]
    return found


@pytest.mark.parametrize("role", NAMES)
def test_what_a_role_has_a_default_for_is_documented(role: str) -> None:
    path = ROLES / role / "defaults/main.yml"
    defaults = set(yaml.safe_load(path.read_text())) if path.exists() else set()
    assert defaults - INSIDE <= set(options(role))
    assert all(option["description"] for option in options(role).values())


def test_what_anybody_may_set_for_all_is_all_that_is_there() -> None:
    defaults = set(yaml.safe_load((ROLES / "defaults/defaults/main.yml").read_text()))
    assert defaults - INSIDE == set(options("defaults"))


def test_the_example_sets_nothing_that_nobody_reads() -> None:
    text = (ROLES.parent / "inventory.example.yml").read_text()
    groups = {"drover_collectors", "drover_dashboards", "drover_agents"}
    known = groups | {name for role in NAMES for name in options(role)}
    assert set(re.findall(r"\b(drover_\w+):", text)) <= known

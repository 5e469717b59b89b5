"""Find the runbook of an incident: one page of docs/runbooks for each kind."""

from __future__ import annotations

from pathlib import Path

from drover_core.model.events import IncidentKind

# In a wheel the pages lie in the package (pyproject.toml), in a checkout where people read them.
PLACES = (Path(__file__).parents[1] / "runbooks", Path(__file__).parents[3] / "docs" / "runbooks")


def runbook_path(kind: IncidentKind | str) -> str:
    """Return the page's path, relative to the checkout."""
    return f"docs/runbooks/{kind}.md"

"""Find the runbook of an incident: one page of docs/runbooks for each kind."""

from __future__ import annotations

from drover_core.model.events import IncidentKind


def runbook_path(kind: IncidentKind | str) -> str:
    """Return the page's path, relative to the checkout."""
    return f"docs/runbooks/{kind}.md"

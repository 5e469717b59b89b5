"""Where a person reads what to do: one page for each kind of incident (docs/runbooks), relative to the checkout."""

from __future__ import annotations

from drover_core.model.events import IncidentKind


def runbook_path(kind: IncidentKind | str) -> str:
    return f"docs/runbooks/{kind}.md"

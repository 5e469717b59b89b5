"""What the inventory of a node without an agent says: where its values come from, and which detectors are blind."""

from __future__ import annotations

from collections.abc import Mapping

EXPORTERS = "scrape.exporters"  # names of the exporters whose pages are read
SPOOL = "scrape"  # the name under which sequences of scraped nodes are kept; in the ids of their events
BLIND = "scrape.blind."  # so begin the keys of what a detector cannot judge


def blind_of(inventory: Mapping[str, str]) -> dict[str, str]:
    """Return detector -> what it cannot judge on this node, and why; empty for a node with an agent."""
    return {key.removeprefix(BLIND): text for key, text in sorted(inventory.items()) if key.startswith(BLIND)}


def origin_of(inventory: Mapping[str, str], agent_version: str) -> str:
    """Return a sentence about a node whose values come from exporters' pages; "": its agent sends them."""
    exporters = inventory.get(EXPORTERS, "")
    if not exporters or "(scraped)" not in agent_version:
        return ""
    return f"No agent: its values come from {exporters}."

"""What people noted on incidents: who has acknowledged them, to whom they are assigned. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from drover_core.model.events import Audit, Incident
from drover_core.model.incident_notes import NOBODY, Handling, noted


class IncidentNotes:
    """How each incident is handled. What is read is replaced as a whole.

    Attributes:
        writing: to be held from a note's time to its `take`: of two at once the older must not come second.
    """

    def __init__(self) -> None:
        self.writing = threading.Lock()
        self._lock = threading.Lock()  # of `take`
        self._known: Mapping[str, Handling] = {}

    def load(self, lines: Iterable[Audit]) -> None:
        """Replace all by what these lines of the audit say."""
        self._known = by_incident(lines)

    def take(self, line: Audit) -> None:
        """Add a note."""
        with self._lock:
            self._known = {**self._known, line.subject: noted(self.of(line.subject), line)}

    def of(self, incident: str) -> Handling:
        return self._known.get(incident, NOBODY)

    def all(self) -> Mapping[str, Handling]:
        return self._known

    def acknowledged(self, incident: Incident) -> bool:
        """Return True if somebody has acknowledged it, and it has neither come back nor got worse since."""
        return self.of(incident.id).holds(incident)


def by_incident(lines: Iterable[Audit]) -> dict[str, Handling]:
    """Return how each incident is handled, from lines of the audit in any order."""
    found: dict[str, Handling] = {}
    for line in sorted(lines, key=lambda line: line.ts_ms):
        found[line.subject] = noted(found.get(line.subject, NOBODY), line)
    return found

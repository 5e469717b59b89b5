"""Order the pending messages of one receiver."""

from __future__ import annotations

import heapq

from drover_collector.notify.state import facts_of
from drover_collector.store import OutboxRow
from drover_core.model.events import SEVERITY_ORDER

MAX_PENDING = 10_000  # messages per receiver, in memory


class MessageQueue:
    """Pending messages: those of one incident in their order, otherwise the worst first. The caller holds the lock.

    Attributes:
        rows: id -> message, oldest first.
        once: ids of repeats that are not stored and get one attempt.
        late_ends: ids of ends that failed as often as other messages are tried, and are still tried.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self.rows: dict[str, OutboxRow] = {}
        self.once: set[str] = set()
        self.late_ends: dict[str, None] = {}
        self._by_incident: dict[str, dict[str, None]] = {}  # incident -> ids in their order
        self._later: list[tuple[int, int, str]] = []  # heap of (next_ms, created_ms, id)
        self._due: list[tuple[bool, int, int, int, str]] = []  # heap of what is due, the most urgent first

    def add(self, row: OutboxRow) -> None:
        """Append a message, or replace the one with its id."""
        self.rows[row.id] = row
        if row.attempts >= self._max_attempts:
            self.late_ends[row.id] = None
        self._by_incident.setdefault(row.incident_id, {})[row.id] = None
        self._schedule(row.incident_id)

    def remove(self, id_: str) -> None:
        row = self.rows.pop(id_, None)
        self.late_ends.pop(id_, None)
        if row is not None:
            ids = self._by_incident[row.incident_id]
            del ids[id_]
            if ids:
                self._schedule(row.incident_id)
            else:
                del self._by_incident[row.incident_id]

    def remove_repeats(self) -> None:
        for id_ in self.once:
            self.remove(id_)
        self.once.clear()

    def of_incident(self, incident: str) -> list[OutboxRow]:
        return [self.rows[id_] for id_ in self._by_incident.get(incident, ())]

    def first(self, now_ms: int) -> OutboxRow | None:
        """Return the next message: of those due news before repeats and the worst first; else the first to be due."""
        while self._later and self._later[0][0] <= now_ms:
            next_ms, created_ms, id_ = heapq.heappop(self._later)
            if (row := self._valid(id_, next_ms)) is not None:
                urgency = -SEVERITY_ORDER.index(facts_of(row).severity)
                heapq.heappush(self._due, (id_ in self.once, urgency, next_ms, created_ms, id_))
        while self._due:
            if (row := self._valid(self._due[0][4], self._due[0][2])) is not None:
                return row
            heapq.heappop(self._due)
        while self._later:
            if (row := self._valid(self._later[0][2], self._later[0][0])) is not None:
                return row
            heapq.heappop(self._later)
        return None

    def _schedule(self, incident: str) -> None:
        """Push the incident's first message. `_valid` skips entries that this makes obsolete."""
        row = self.rows[next(iter(self._by_incident[incident]))]
        heapq.heappush(self._later, (row.next_ms, row.created_ms, row.id))

    def _valid(self, id_: str, next_ms: int) -> OutboxRow | None:
        """Return the message if it still waits until then and is its incident's first."""
        row = self.rows.get(id_)
        valid = row is not None and row.next_ms == next_ms and next(iter(self._by_incident[row.incident_id])) == id_
        return row if valid else None

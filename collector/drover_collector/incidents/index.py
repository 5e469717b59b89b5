"""Where to look for an incident: by what it is about, by node, by job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from drover_collector.incidents.incident import Record
from drover_core.model.events import Incident

K = TypeVar("K")
Subject = tuple[str, str, int | None]


class IncidentIndex:
    """Finds records that may fit a finding, in the order in which they came. The caller checks each of them.

    Without it, comparing each finding with a thousand open incidents would cost half a second a tick.

    Args:
        subject: what an incident is about.
    """

    def __init__(self, subject: Callable[[Incident], Subject]) -> None:
        self._subject = subject
        self._came: dict[str, int] = {}  # id -> its place in order
        self._next = 0
        self._records: dict[str, Record] = {}
        self._subjects: dict[Subject, dict[str, Record]] = {}
        self._nodes: dict[str, dict[str, Record]] = {}  # "": incidents without a member
        self._jobs: dict[str | None, dict[str, Record]] = {}
        self._known: dict[str, tuple[Subject, str | None, int]] = {}  # id -> as it is filed: subject, job, members

    def put(self, record: Record) -> None:
        """Add a record, or one that has changed: members are only added, a job is set once, a subject may change."""
        incident = record.incident
        id_, members, subject = incident.id, incident.members, self._subject(incident)
        if id_ not in self._came:
            self._came[id_] = self._next
            self._next += 1
        elif self._records[id_] is not record:  # in the place of the one before it
            place = self._came[id_]
            self.drop(self._records[id_])
            self._came[id_] = place
        self._records[id_] = record
        old_subject, old_job, known = self._known.get(id_, (None, None, 0))
        if old_subject is not None and old_subject != subject:
            _drop(self._subjects, old_subject, id_)
        if old_job is not None and old_job != incident.job:
            _drop(self._jobs, old_job, id_)
        self._subjects.setdefault(subject, {})[id_] = record
        if incident.job is not None:
            self._jobs.setdefault(incident.job, {})[id_] = record
        for node, _ in members[known:] if members else [("", None)]:
            self._nodes.setdefault(node, {})[id_] = record
        self._known[id_] = subject, incident.job, len(members)

    def drop(self, record: Record) -> None:
        """It is forgotten."""
        incident = record.incident
        subject, job, _ = self._known.pop(incident.id)
        _drop(self._subjects, subject, incident.id)
        _drop(self._jobs, job, incident.id)
        for node, _ in incident.members or [("", None)]:
            _drop(self._nodes, node, incident.id)
        del self._came[incident.id], self._records[incident.id]

    def of_subject(self, subject: Subject) -> list[Record]:
        return self._ordered([self._subjects.get(subject, {})])

    def of_nodes(self, nodes: Iterable[str]) -> list[Record]:
        """Those with a member there, and those without any."""
        return self._ordered([self._nodes.get(node, {}) for node in ("", *nodes)])

    def of_job(self, job: str) -> list[Record]:
        return self._ordered([self._jobs.get(job, {})])

    def _ordered(self, found: Iterable[dict[str, Record]]) -> list[Record]:
        together: dict[str, Record] = {}
        for some in found:
            together |= some
        return sorted(together.values(), key=lambda record: self._came[record.incident.id])


def _drop(held: dict[K, dict[str, Record]], key: K, id_: str) -> None:
    some = held.get(key)
    if some is not None:
        some.pop(id_, None)
        if not some:
            del held[key]

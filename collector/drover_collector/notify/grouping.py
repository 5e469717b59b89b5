"""Send one page for many faults: an open mass event's message replaces those of its incidents. Pure.

It replaces the messages of all incidents of its kind and cause, whatever action they ask for. No further grouping by
topology or cause is needed: the engine joins findings that share a GPU, node, job, rack or leaf switch into one
incident, and the circuit breaker joins faults that would take many nodes out. The faults that are left are independent.
"""

from __future__ import annotations

from collections.abc import Iterable

from drover_collector.incidents.health import UNHEARD_CAUSES
from drover_collector.notify.state import DEFERRED, GROUPED
from drover_collector.policy.circuit_breaker import GAP, about, of_guard
from drover_core.model.events import Incident, NoteKind

MAX_CLOSED = 100  # closed events in memory


class Grouping:
    """The known mass events, in their newest version."""

    def __init__(self) -> None:
        self._events: dict[str, Incident] = {}

    def add(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            known = self._events.get(incident.id)
            if of_guard(incident) and (known is None or known.version <= incident.version):
                self._events[incident.id] = incident
        closed = [id_ for id_, event in self._events.items() if event.closed_ms is not None]
        for id_ in closed[:-MAX_CLOSED]:
            del self._events[id_]

    def event_of(self, incident: Incident) -> Incident | None:
        """Return the open mass event that contains `incident`; None: there is none."""
        if of_guard(incident):
            return None
        return next((e for e in self._events.values() if e.closed_ms is None and _contains(e, incident)), None)

    def released(self, incident: Incident) -> frozenset[str]:
        """Return the states of unsent messages to send now.

        After a gap in telemetry these are the deferred ones. After a mass event that ended without an answer, as in
        maintenance, also the grouped ones; after an answer a person knows of them.
        """
        event = self.event_of(incident)
        if event is not None:
            return frozenset() if event.cause == GAP else frozenset({DEFERRED})
        last = next(
            (e for e in reversed(self._events.values()) if _contains(e, incident) and not of_guard(incident)), None
        )
        unanswered = last is not None and bool(last.timeline) and last.timeline[-1].kind is NoteKind.NO_LONGER_WANTED
        return frozenset({DEFERRED, GROUPED}) if unanswered else frozenset({DEFERRED})


def _contains(event: Incident, incident: Incident) -> bool:
    if event.cause == GAP:
        return incident.cause in UNHEARD_CAUSES
    return incident.kind is event.kind and incident.cause == about(event)


def instead_of(event: Incident) -> tuple[str, str]:
    """Return state and detail of a message that the message of `event` replaces."""
    if event.cause == GAP:
        return DEFERRED, f"not sent while the gap in telemetry {event.id} lasts; its own message was sent instead"
    return GROUPED, f"not sent: the message of mass event {event.id} was sent instead"

"""One page for many faults: while a mass event of the guard's is open, its own message stands for those of all
incidents of its kind and cause, whatever they want. Pure.

There is no second grouping by topology or cause here: the engine joins what shares a GPU, node, job, rack or leaf
switch, or what too many boards show at once, into one incident; the breaker what would take many nodes out. What is
left are single faults that happen to come together, of which each is news. A route's `group_wait_s` gives all that
its time.
"""

from __future__ import annotations

from collections.abc import Iterable

from drover_collector.incidents.health import UNHEARD_CAUSES
from drover_collector.notify.state import DEFERRED, GROUPED
from drover_collector.policy.circuit_breaker import GAP, about, of_guard
from drover_core.model.events import Incident, NoteKind

KEPT = 100  # events that are over
NOTHING: frozenset[str] = frozenset()


class Grouping:
    """The mass events that are known, in their newest version."""

    def __init__(self) -> None:
        self._events: dict[str, Incident] = {}

    def take(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            known = self._events.get(incident.id)
            if of_guard(incident) and (known is None or known.version <= incident.version):
                self._events[incident.id] = incident
        over = [id_ for id_, event in self._events.items() if event.closed_ms is not None]
        for id_ in over[:-KEPT]:
            del self._events[id_]

    def of(self, incident: Incident) -> Incident | None:
        """The open event that stands for `incident`; None: it stands for itself."""
        if of_guard(incident):
            return None
        return next((e for e in self._events.values() if e.closed_ms is None and _holds(e, incident)), None)

    def owed(self, incident: Incident) -> frozenset[str]:
        """What was not sent of it and is told now, by its state: what a gap stood for once that is over; what a mass
        event stood for once that is over by itself, as in maintenance. What a person has answered is known."""
        event = self.of(incident)
        if event is not None:
            return NOTHING if event.cause == GAP else frozenset({DEFERRED})
        last = next(
            (e for e in reversed(self._events.values()) if _holds(e, incident) and not of_guard(incident)), None
        )
        alone = last is not None and bool(last.timeline) and last.timeline[-1].kind is NoteKind.NO_LONGER_WANTED
        return frozenset({DEFERRED, GROUPED}) if alone else frozenset({DEFERRED})


def _holds(event: Incident, incident: Incident) -> bool:
    if event.cause == GAP:
        return incident.cause in UNHEARD_CAUSES
    return incident.kind is event.kind and incident.cause == about(event)


def instead_of(event: Incident) -> tuple[str, str]:
    """State and detail of a message for which that of `event` stands."""
    if event.cause == GAP:
        return DEFERRED, f"not sent while the gap in telemetry {event.id} lasts, which was told instead"
    return GROUPED, f"not sent: mass event {event.id} was told instead"

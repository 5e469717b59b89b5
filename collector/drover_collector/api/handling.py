"""How people handle incidents, for answers about them."""

from __future__ import annotations

from collections.abc import Mapping

from drover_collector.api.snapshot import SHORT_S, ApiSnapshot
from drover_collector.notify.incident_notes import by_incident
from drover_core.model.events import Incident
from drover_core.model.incident_notes import Handling
from drover_proto import fleet_pb2 as pb


def handlings(facts: ApiSnapshot) -> Mapping[str, Handling]:
    """Return how incidents are handled, by id. A standby reads what the active collector has stored."""
    if facts.is_past:  # by what had been noted then
        upto_ms = facts.now_ms()

        def noted() -> Mapping[str, Handling]:
            return by_incident(line for line in facts.store.audit.notes() if line.ts_ms <= upto_ms)

        return facts.once("notes", SHORT_S, noted)
    if facts.pipeline.leading:
        return facts.pipeline.outbox.notes.all()
    return facts.once("notes", SHORT_S, lambda: by_incident(facts.store.audit.notes()))


def handling_message(handling: Handling, incident: Incident) -> pb.IncidentHandling:
    known = handling.holds(incident)
    return pb.IncidentHandling(
        acknowledged_by=handling.acknowledged_by if known else "",
        acknowledged_ms=handling.acknowledged_ms if known else 0, assignee=handling.assignee,
        tickets=handling.tickets, outcome=handling.outcome, outcome_by=handling.outcome_by,
    )  # fmt: skip

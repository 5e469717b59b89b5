"""What people are told of an incident while it is open, beside that it opened, got worse and is over. Pure.

    incident.asks            a decision waits for a person: once for each time that it is asked
    incident.unanswered      nobody answered in time, and nothing was done
    incident.action_failed   what was to be done to a node could not be
    incident.repair          its node has failed its validation, and goes to repair

Told to whom its opening was told and who would be told of it now, each piece once: the ids of its messages say so, also
after a restart. What a mass event asks stands in its own opening.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drover_collector.notify.state import (
    ACTION_FAILED,
    ASKS,
    NOBODY,
    REPAIR,
)
from drover_core.model.events import (
    Action,
    ActionState,
    Decision,
    DecisionCause,
    Health,
    NodeOutage,
)

OLD_MS = 86_400_000  # at a start nothing older is told any more


@dataclass(frozen=True, slots=True)
class News:
    """`key`: the same of the same piece of news. `ts_ms`: when it came to be."""

    kind: str
    incident_id: str
    key: str
    ts_ms: int
    text: str


def of_decisions(decisions: Iterable[Decision]) -> list[News]:
    """Of new decisions, or of how others stand."""
    found = []
    for d in decisions:
        what = f"{d.wanted} {d.node}"
        if not d.node:
            continue
        if d.outcome == "pending_approval":
            text = f"Drover {d.reason}. To answer: drover approve {d.id} --why TEXT, or drover reject {d.id} --why TEXT"
            found.append(News(ASKS, d.incident_id, d.id, d.ts_ms, text))
        elif d.cause is DecisionCause.UNANSWERED:
            text = f"Drover did not {what}: {d.reason}. It is asked again while the incident is open"
            found.append(News(NOBODY, d.incident_id, d.id, d.ts_ms, text))
    return found


def of_actions(actions: Iterable[Action]) -> list[News]:
    return [
        News(ACTION_FAILED, a.incident_id, a.id, a.ts_ms, f"{a.action} {a.node} failed: {a.detail}")
        for a in actions
        if a.state is ActionState.FAILED and a.incident_id
    ]


def of_duties(duties: Iterable[NodeOutage]) -> list[News]:
    return [
        News(
            REPAIR, d.incident_id, f"{d.node}-{d.ts_ms}", d.ts_ms,
            f"{d.node} failed its validation and stays out, for repair: {d.reason}."
            f" When it is mended: drover resume {d.node} --why TEXT has it probed, and put back if it passes",
        )
        for d in duties
        if d.stage is Health.REPAIR and d.incident_id
    ]  # fmt: skip

"""Make updates of open incidents out of decisions, actions and outages. Pure.

    incident.asks            a decision waits for a person's approval; once each time Drover asks
    incident.unanswered      nobody answered in time, and nothing was done
    incident.action_failed   an action on a node failed
    incident.repair          a node failed its validation and needs repair

An update goes to the receivers that got the opening and that routes still name. Each goes out once, also after a
restart, because its message's id is made from its key. A mass event's question is part of its opening.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drover_collector.notify.state import (
    ACTION_FAILED,
    ASKS,
    REPAIR,
    UNANSWERED,
)
from drover_core.model.events import (
    Action,
    ActionState,
    Decision,
    DecisionCause,
    Health,
    NodeOutage,
)

OLD_MS = 86_400_000  # a start sends no older updates


@dataclass(frozen=True, slots=True)
class IncidentUpdate:
    """One update. `key` identifies it within the incident. `ts_ms`: when it happened."""

    kind: str
    incident_id: str
    key: str
    ts_ms: int
    text: str


def of_decisions(decisions: Iterable[Decision]) -> list[IncidentUpdate]:
    """Return the updates of new or changed decisions."""
    found = []
    for d in decisions:
        what = d.what
        if not d.node:
            continue
        if d.outcome == "pending_approval":
            text = f"Drover {d.reason}. Answer with drover approve {d.id} --why TEXT or drover reject {d.id} --why TEXT"
            found.append(IncidentUpdate(ASKS, d.incident_id, d.id, d.ts_ms, text))
        elif d.cause is DecisionCause.UNANSWERED:
            text = f"Drover did not {what}: {d.reason}. It asks again while the incident is open"
            found.append(IncidentUpdate(UNANSWERED, d.incident_id, d.id, d.ts_ms, text))
    return found


def of_actions(actions: Iterable[Action]) -> list[IncidentUpdate]:
    """Return the updates of failed actions."""
    return [
        IncidentUpdate(ACTION_FAILED, a.incident_id, a.id, a.ts_ms, f"{_done(a)} failed: {a.detail}")
        for a in actions
        if a.state is ActionState.FAILED and a.incident_id
    ]


def of_outages(outages: Iterable[NodeOutage]) -> list[IncidentUpdate]:
    """Return the updates of nodes that need repair."""
    return [
        IncidentUpdate(
            REPAIR, d.incident_id, f"{d.node}-{d.ts_ms}", d.ts_ms,
            f"{_name(d)} failed its validation and stays out of service for repair: {d.reason}."
            f" After the repair run: {resume_command(d)}. It is probed, and returns if it passes",
        )
        for d in outages
        if d.stage is Health.REPAIR and d.incident_id
    ]  # fmt: skip


def _name(outage: NodeOutage) -> str:
    return outage.node if outage.gpu is None else f"GPU {outage.gpu.slot} of {outage.node}"


def resume_command(outage: NodeOutage) -> str:
    """Return the command that puts a node, or a GPU of it, back."""
    gpu = "" if outage.gpu is None else f" --gpu {outage.gpu.slot}"
    return f"drover resume {outage.node}{gpu} --why TEXT"


def _done(action: Action) -> str:
    if action.gpu is None:
        return f"{action.action} {action.node}"
    return f"{str(action.action).removesuffix('_gpu')} GPU {action.gpu.slot} of {action.node}"

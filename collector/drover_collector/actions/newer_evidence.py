"""What came to be known of a node after its validation was asked for: a pass speaks only for what was before. Pure.

Counted is what speaks against an incident's node as strongly as a drain: an incident that opened since, an XID that
came since (a burst is one finding, its later lines are none), and what a detector has told again since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drover_collector.detectors.xid import detector as xid
from drover_collector.detectors.xid.verdicts import judge
from drover_collector.incidents.incident import was_cleared
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    Incident,
    RecommendedAction,
    Severity,
)

CLOSES = frozenset({RecommendedAction.DRAIN, RecommendedAction.ISOLATE})
NAMED = 3  # incidents


@dataclass(frozen=True, slots=True)
class Newer:
    """What has come since, as a part of a sentence; the ids of the incidents that it is about."""

    text: str
    incidents: tuple[str, ...]


def newer(
    node: str, since_ms: int, incidents: Iterable[Incident], events: Iterable[Event], findings: Iterable[Finding]
) -> Newer | None:
    """What has come since; None: nothing.

    Args:
        incidents: open ones, and those that have just closed. events, findings: of the node, since then.
    """
    lines, told = list(events), list(findings)
    found: dict[str, str] = {}
    for incident in sorted(incidents, key=lambda i: (i.opened_ms, i.id)):
        if incident.node != node or incident.action not in CLOSES or was_cleared(incident):
            continue
        if incident.opened_ms > since_ms:
            found[incident.id] = f"{what(incident)} was found"
        elif incident.closed_ms is None and (
            any(_came_again(event, incident, since_ms) for event in lines)
            or any(f.ts_ms > since_ms and _told_again(f, incident) for f in told)
        ):
            found[incident.id] = f"{what(incident)} was told again"
    if not found:
        return None
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return Newer("; ".join(list(found.values())[:NAMED]) + more, tuple(found))


def what(incident: Incident) -> str:
    """An incident in a sentence."""
    gpu = "" if incident.gpu is None else f" of GPU {incident.gpu}"
    return f"{incident.kind}/{incident.cause}{gpu} (incident {incident.id})"


def _came_again(event: Event, incident: Incident, since_ms: int) -> bool:
    """A line with the wrong clock counts by its receipt."""
    if event.kind not in (EventKind.XID, EventKind.SXID) or event.backlog or event.forgeable:
        return False
    at_ms = event.received_ms if event.clock_suspect and event.received_ms is not None else event.ts_ms
    if at_ms <= since_ms or xid.NAME not in incident.detectors or incident.gpu not in (None, event.gpu):
        return False
    verdict = judge(event)
    return verdict is not None and not verdict.recovered and verdict.severity is Severity.CRITICAL


def _told_again(finding: Finding, incident: Incident) -> bool:
    """Of a condition that is told with each bucket, and lasts, as of what comes now and then."""
    if finding.cleared or finding.severity is Severity.INFO or finding.detector not in incident.detectors:
        return False
    if (finding.scope, finding.node, finding.gpu) != (incident.scope, incident.node, incident.gpu):
        return False
    return finding.action in CLOSES or (finding.kind, finding.cause) == (incident.kind, incident.cause)

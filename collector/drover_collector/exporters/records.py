"""What happens to the fleet and to Drover, as one kind of record for logs of other systems.

Kinds: event (of a node), incident, decision, action (on a node, by Drover or a person), audit (who changed what),
security (peers that were refused).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from drover_core.model.events import Action, ActionState, Audit, Decision, Event, Incident, Severity

REPEAT_S = 60.0  # a peer that is refused again within this adds to the next line's count
MOST_KEYS = 1_000  # peers and reasons that are counted apart; an intruder must not fill the memory
MOST_KNOWN = 10_000  # things that are known to be handed out


@dataclass(frozen=True, slots=True)
class Record:
    """One line.

    Attributes:
        name: what happened, one word. severity: info, warning or critical. subject: node, incident or decision.
        attributes: facts as texts and numbers; none is empty.
    """

    ts_ms: int
    kind: str
    name: str
    text: str
    severity: Severity = Severity.INFO
    subject: str = ""
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return 400 + 2 * len(self.text) + sum(80 + len(str(value)) for value in self.attributes.values())

    @property
    def count(self) -> int:
        return 1


def _known(**facts: str | int | float | None) -> dict[str, str | int | float]:
    return {name: value for name, value in facts.items() if value is not None and value != ""}


def of_audit(line: Audit) -> Record:
    """The policy's text, which `state` may hold, stays in the store."""
    text = f"{line.by}: {line.what} {line.subject}".rstrip()
    text += "".join(f"; {part}" for part in (line.why, line.detail) if part)
    facts = _known(id=line.id, by=line.by, what=line.what, subject=line.subject, why=line.why, detail=line.detail)
    return Record(line.ts_ms, "audit", line.what, text, Severity.INFO, line.subject, facts)


def of_event(event: Event) -> Record:
    facts = _known(
        id=event.id, node=event.node, gpu=event.gpu, kind=str(event.kind), code=event.code, source=event.source,
        count=event.count,
    )  # fmt: skip
    return Record(event.ts_ms, "event", str(event.kind), event.message, Severity.INFO, event.node, facts)


def of_incident(incident: Incident) -> Record:
    state = "closed" if incident.closed_ms is not None else "opened" if incident.version == 1 else "updated"
    facts = _known(
        id=incident.id, kind=str(incident.kind), cause=incident.cause, node=incident.node, gpu=incident.gpu,
        job=incident.job, action=str(incident.action), confidence=incident.confidence, version=incident.version,
        members=len(incident.members),
    )  # fmt: skip
    ts_ms = incident.closed_ms or incident.updated_ms or incident.opened_ms
    return Record(ts_ms, "incident", state, incident.summary, incident.severity, incident.id, facts)


def of_decision(decision: Decision) -> Record:
    facts = _known(
        id=decision.id, incident=decision.incident_id, node=decision.node, wanted=str(decision.wanted),
        mode=decision.mode, outcome=decision.outcome, rule=decision.rule, cause=str(decision.cause),
    )  # fmt: skip
    text = f"{decision.wanted} {decision.node}: {decision.outcome}, {decision.reason}"
    return Record(decision.ts_ms, "decision", decision.outcome, text, Severity.INFO, decision.incident_id, facts)


def of_action(action: Action) -> Record:
    facts = _known(
        id=action.id, node=action.node, gpu=None if action.gpu is None else action.gpu.slot,
        action=str(action.action), state=str(action.state), actuator=action.actuator, by=action.by, why=action.why,
        detail=action.detail, incident=action.incident_id, decision=action.decision_id, attempts=action.attempts,
    )  # fmt: skip
    where = action.node if action.gpu is None else f"GPU {action.gpu.slot} of {action.node}"
    text = f"{action.action} {where}: {action.state}" + (f", {action.detail}" if action.detail else "")
    severity = Severity.WARNING if action.state is ActionState.FAILED else Severity.INFO
    return Record(action.ts_ms, "action", str(action.state), text, severity, action.node, facts)


class Refusals:
    """Makes records of refused peers. One that knocks a thousand times a second is one line a minute, with a count."""

    def __init__(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()  # when said, refused since

    def of(self, identity: str, reason: str, text: str) -> Record | None:
        """Return the record of a refusal; None: a later one counts it."""
        now_ms = self._now_ms()
        with self._lock:
            key = identity, reason
            if key not in self._seen and len(self._seen) >= MOST_KEYS:
                self._seen.popitem(last=False)
            said_ms, since = self._seen.pop(key, (None, 0))
            if said_ms is not None and 0 <= now_ms - said_ms < REPEAT_S * 1000:
                self._seen[key] = said_ms, since + 1
                return None
            self._seen[key] = now_ms, 0
        facts = _known(peer=identity, reason=reason, count=since + 1)
        return Record(now_ms, "security", "refused", text, Severity.WARNING, identity, facts)


class Once:
    """Says which things are new: what a store refused in between is handed out again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], None] = OrderedDict()

    def first(self, *key: object) -> bool:
        """Return True the first time."""
        with self._lock:
            if key in self._known:
                return False
            self._known[key] = None
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            return True

"""The guard's breaker: when many nodes fail at once with one cause, nothing more goes out and a person is asked.

It opens when `mass_nodes` nodes (or `mass_ratio` of a large fleet) are to leave service with one cause within
`mass_window_s`, or when `gap_ratio` of the fleet falls silent in that time, which is the collector's own fault or a
network's. Its memory is an incident, so it is stored, shown and sent once, like any other, and rebuilt from it
after a restart: detector "guard", cause "mass_event", members the nodes that are held.

For other nodes it closes when none has joined for `quiet_s`. The nodes of the event stay held until their incidents
are over, or until a person answers: approved, they are judged like others; rejected, they are left alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.incident import closing
from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.guard_clock import ClockSteps
from drover_core.model.events import (
    Evidence,
    Incident,
    IncidentKind,
    Note,
    NoteKind,
    RecommendedAction,
    Severity,
)

GUARD = "guard"  # the detector's name
MASS = "mass_event"
GAP = "gap_in_telemetry"
JOINED_MS = 10_000  # nodes that join are stored no more often than this
MAX_NOTES = 60
KEPT_MS = 3_600_000  # a closed event is remembered this long, as closed incidents are

Key = tuple[str, str]  # (incident id, node)


def of_guard(incident: Incident) -> bool:
    """Whether this incident is the guard's own record of a mass event."""
    return incident.detectors == (GUARD,)


class Breaker:
    """
    Attributes:
        events: mass events by id, open ones and those closed in the last hour.
    """

    def __init__(self, index: FleetIndex, steps: ClockSteps | None = None) -> None:
        self.index, self._steps = index, steps or ClockSteps()
        self.events: dict[str, Incident] = {}
        self._leaving: dict[tuple[IncidentKind, str], deque[tuple[int, str]]] = {}  # cause -> when, node
        self._seen: set[Key] = set()
        self._silenced: deque[tuple[int, str]] = deque()
        self._joined_ms: dict[str, int] = {}
        self._nodes: dict[str, set[str]] = {}  # of each event, with those that are not in the stored incident yet

    def went_back(self, now_ms: int) -> None:
        """The clock was set back: what lies ahead of it counts as of now, or it would stay."""
        for key, leaving in self._leaving.items():
            self._leaving[key] = deque((min(at_ms, now_ms), node) for at_ms, node in leaving)
        self._silenced = deque((min(at_ms, now_ms), node) for at_ms, node in self._silenced)
        self._joined_ms = {id_: min(at_ms, now_ms) for id_, at_ms in self._joined_ms.items()}

    def restore(self, incidents: Iterable[Incident]) -> None:
        """Take over what a former run left."""
        for incident in incidents:
            if of_guard(incident):
                self.events[incident.id] = incident
                self._nodes[incident.id] = {node for node, _ in incident.members}
                self._joined_ms[incident.id] = incident.timeline[-1].ts_ms if incident.timeline else incident.opened_ms

    def remember(self, incident: Incident, node: str, at_ms: int) -> None:
        """A wish of a former run; the first time counts."""
        if (incident.id, node) not in self._seen:
            self._seen.add((incident.id, node))
            self._leaving.setdefault((incident.kind, incident.cause), deque()).append((at_ms, node))

    def open_for_all(self, now_ms: int, limits: GuardLimits) -> Incident | None:
        """The event for which nothing goes out now; None when the breaker is closed."""
        for incident in self.events.values():
            if incident.closed_ms is None and not self._quiet(incident, now_ms, limits):
                return incident
        return None

    def _quiet(self, incident: Incident, now_ms: int, limits: GuardLimits) -> bool:
        # A gap ends with the silence: its nodes report again, or have incidents of their own.
        after_s = limits.mass_window_s if incident.cause == GAP else limits.quiet_s
        joined_ms = self._joined_ms.get(incident.id, incident.opened_ms)
        return after_s > 0 and self._steps.age_ms(now_ms, joined_ms) >= after_s * 1000

    def hold(self, node: str, now_ms: int, limits: GuardLimits) -> str | None:
        """Why `node` must not be taken out, as a sentence; None when the breaker is closed for it."""
        mine = next((i for i in self.events.values() if i.closed_ms is None and self._has(i, node)), None)
        incident = mine or self.open_for_all(now_ms, limits)
        if incident is None:
            return None
        what = "part of" if mine else "the breaker is open for"
        return f"{what} mass event {incident.id} ({_words(incident)}): a person must answer it first"

    def _has(self, incident: Incident, node: str) -> bool:
        if incident.cause == GAP:
            return False  # silent nodes are held while it lasts; afterwards their silence is their own
        return node in self._nodes[incident.id]

    def note(self, wishes: Sequence[Incident], now_ms: int, limits: GuardLimits) -> list[Incident]:
        """Take in the open incidents whose nodes are to leave service; returns mass events that are new or changed."""
        seen = {(i.id, i.node or "") for i in wishes}
        self._seen &= seen
        causes: dict[tuple[IncidentKind, str], Incident] = {}
        for incident in wishes:
            wish = (incident.id, incident.node or "")
            if wish in self._seen or incident.node is None:
                continue
            self._seen.add(wish)
            key = (incident.kind, incident.cause)
            self._leaving.setdefault(key, deque()).append((now_ms, incident.node))
            causes[key] = incident
        changed = []
        for key in causes:
            recent = self._leaving[key]
            while recent and self._steps.age_ms(now_ms, recent[0][0]) > limits.mass_window_s * 1000:
                recent.popleft()
            nodes = dict.fromkeys(node for _, node in recent)
            event = self._event(key[1], key[0])
            if event is not None or (limits.mass_nodes and len(nodes) >= self._many(limits)):
                changed += self._join(event, key[0], MASS, key[1], nodes, now_ms)
        for key in [k for k, recent in self._leaving.items() if not recent]:
            del self._leaving[key]
        return changed + self._flush(now_ms)

    def note_silence(self, nodes: Iterable[str], now_ms: int, limits: GuardLimits) -> list[Incident]:
        """Take in nodes that no longer report; return mass events that are new or changed."""
        fresh = [(now_ms, node) for node in nodes]
        self._silenced.extend(fresh)
        while self._silenced and self._steps.age_ms(now_ms, self._silenced[0][0]) > limits.mass_window_s * 1000:
            self._silenced.popleft()
        silent = dict.fromkeys(node for _, node in self._silenced)
        least = max(limits.mass_nodes, math.ceil(limits.gap_ratio * self.index.node_count), 2)
        if not fresh or not limits.gap_ratio or len(silent) < least:
            return []
        event = next((i for i in self.events.values() if i.closed_ms is None and i.cause == GAP), None)
        return self._join(event, IncidentKind.LIVENESS, GAP, GAP, silent, now_ms)

    def end(self, standing: Set[str], now_ms: int) -> list[Incident]:
        """Close events that no longer hold a node. `standing`: nodes that are to leave service."""
        changed = []
        for incident in list(self.events.values()):
            over = now_ms - self._joined_ms.get(incident.id, 0) >= JOINED_MS and not any(
                node in standing for node in self._nodes[incident.id]
            )
            if incident.closed_ms is None and over and incident.cause != GAP:
                why = "none of its nodes is to leave service"
                note = Note(now_ms, f"closed: {why}", NoteKind.NO_LONGER_WANTED, why=why)
                changed.append(self._changed(incident, note, closes=True))
            elif incident.closed_ms is not None and now_ms - incident.closed_ms > KEPT_MS:
                del self.events[incident.id], self._nodes[incident.id]
        return changed

    def end_gaps(self, now_ms: int, limits: GuardLimits) -> list[Incident]:
        """Closes gaps that are over."""
        return [
            self._changed(incident, closing(now_ms, "no further node has fallen silent"), closes=True)
            for incident in list(self.events.values())
            if incident.closed_ms is None and incident.cause == GAP and self._quiet(incident, now_ms, limits)
        ]

    def answer(self, event: str, now_ms: int, text: str) -> Incident:
        """A person has answered: the event is over."""
        self._leaving.clear()  # what was many at once has been answered; only what comes now counts
        return self._changed(self.events[event], closing(now_ms, text), closes=True)

    def _many(self, limits: GuardLimits) -> int:
        return max(limits.mass_nodes, math.ceil(limits.mass_ratio * self.index.node_count))

    def _event(self, cause: str, kind: IncidentKind) -> Incident | None:
        found = (i for i in self.events.values() if i.closed_ms is None and i.kind is kind and about(i) == cause)
        return next(found, None)

    def _join(
        self, event: Incident | None, kind: IncidentKind, cause: str, about: str, nodes: Iterable[str], now_ms: int
    ) -> list[Incident]:
        if event is None:
            return [self._opened(kind, cause, about, list(nodes), now_ms)]
        if new := set(nodes) - self._nodes[event.id]:
            self._nodes[event.id] |= new
            self._joined_ms[event.id] = now_ms
        return []

    def _opened(self, kind: IncidentKind, cause: str, about: str, nodes: list[str], now_ms: int) -> Incident:
        id_ = hashlib.blake2b(f"mass {kind} {cause} {about} {now_ms}".encode(), digest_size=8).hexdigest()
        members = tuple((node, None) for node in nodes)
        summary = self._summary(cause, about, len(nodes))
        advice = (
            "One cause is likelier than many faults: look for a job, a switch, a rollout or this collector's network."
            f" Then: drover approve {id_} --why ... to go on, or drover reject {id_} --why ... to leave them alone."
        )
        incident = Incident(
            id_,
            kind,
            cause,
            "fleet",
            None,
            None,
            members,
            now_ms,
            now_ms,
            None,
            Severity.CRITICAL,
            1.0,
            RecommendedAction.NONE,
            summary,
            advice,
            (Evidence(about),),
            (Note(now_ms, f"opened: {summary}", NoteKind.OPENED),),
            (GUARD,),
            updated_ms=now_ms,
            snapshots={GUARD: {"about": about}},
        )
        self.events[id_] = incident
        self._nodes[id_] = set(nodes)
        self._joined_ms[id_] = now_ms
        return incident

    def _summary(self, cause: str, about: str, count: int) -> str:
        what = "fell silent" if cause == GAP else f"are to leave service for {about}"
        return f"{count} of {self.index.node_count} nodes {what}, all at once: Drover takes no further node out."

    def _flush(self, now_ms: int) -> list[Incident]:
        changed = []
        for id_, incident in list(self.events.items()):
            new = len(self._nodes[id_]) - len(incident.members)
            if incident.closed_ms is not None or not new or now_ms - incident.updated_ms < JOINED_MS:
                continue
            known = {node for node, _ in incident.members}
            members = (*incident.members, *((node, None) for node in sorted(self._nodes[id_] - known)))
            text = f"{new} more nodes: {len(members)} now"
            summary = self._summary(incident.cause, about(incident), len(members))
            changed.append(self._changed(replace(incident, members=members, summary=summary), Note(now_ms, text)))
        return changed

    def _changed(self, incident: Incident, note: Note, closes: bool = False) -> Incident:
        notes = (*incident.timeline, note)
        notes = notes if len(notes) <= MAX_NOTES else (*notes[:10], *notes[-(MAX_NOTES - 10) :])
        changed = replace(
            incident, timeline=notes, version=incident.version + 1, updated_ms=note.ts_ms,
            closed_ms=note.ts_ms if closes else incident.closed_ms,
        )  # fmt: skip
        self.events[incident.id] = changed
        return changed


def about(incident: Incident) -> str:
    """The cause that a mass event's nodes have in common."""
    return str(incident.snapshot_of(GUARD).get("about", ""))


def _words(incident: Incident) -> str:
    return f"{len(incident.members)} nodes, {about(incident)}"

"""Decide which incidents are silenced, by a person or by a maintenance window. Pure.

A silenced incident is found, stored, shown and decided as usual, but nobody is notified. Only maintenance holds actions
back too. Every silence has an end: nobody notices a fault that is silenced for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from drover_collector.notify.maintenance_events import MaintenanceEventsConfig, admit
from drover_collector.notify.maintenance_windows import MaintenanceConfig
from drover_core.model.events import Incident, Member, Silence
from drover_core.model.fleet import NodeSpec
from drover_core.model.silences import describe_author

PLACES = ("rack", "leaf", "pool")
KEPT_MS = 4 * 86_400_000  # after its end: a window lasts at most 3 days, and one that a person ended stays ended


class Silences:
    """The known silences. `of` and `held` from any thread: what they read is replaced as a whole.

    Args:
        nodes: the fleet's by name. windows: those of the settings.
        events: how much of the fleet planned work that others report may cover.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeSpec] | None = None,
        windows: Sequence[MaintenanceConfig] = (),
        events: MaintenanceEventsConfig | None = None,
    ) -> None:
        self._nodes = nodes or {}
        self._windows = tuple(windows)
        self._most = (events or MaintenanceEventsConfig()).most(len(self._nodes))
        self._in_file: Mapping[str, Silence] = {}  # by id
        self._lock = threading.Lock()  # of `take`
        self._known: Mapping[str, Silence] = {}
        self._held: tuple[list[Silence], dict[str, str], dict[str, int]] = ([], {}, {})  # newest answers of `held`
        self._active: tuple[int, object, list[Silence]] = (0, None, [])  # newest answer of `active`

    def load(self, silences: Iterable[Silence]) -> None:
        """Replace all known silences."""
        self._known = {silence.id: silence for silence in silences}

    def take(self, silence: Silence) -> None:
        """Add a silence, or a new version of one."""
        with self._lock:
            at_ms = min(silence.made_ms, silence.until_ms)  # about now: a file's window is made at its begin
            kept = {id_: s for id_, s in self._known.items() if s.until_ms > at_ms - KEPT_MS}
            self._known = {**kept, silence.id: silence}

    def set_file(self, silences: Iterable[Silence]) -> None:
        """Replace the windows of the file of planned work. One that a person has ended stays ended."""
        self._in_file = {silence.id: silence for silence in silences}

    @property
    def most(self) -> int:
        """How many nodes planned work that others report may cover at once."""
        return self._most

    def remembered(self, event: str) -> list[Silence]:
        """Return planned work whose `event` begins so, also what is over, while it is kept."""
        return [silence for silence in self._known.values() if silence.event.startswith(event)]

    def refused(self, now_ms: int) -> list[Silence]:
        """Return planned work that others report and that does not count now: it would cover too much of the fleet."""
        return admit(self._in_force(now_ms), self._most)[1]

    def known(self, now_ms: int) -> list[Silence]:
        """Return current and future silences and open windows, the first to end first."""
        open_now = [window.open_at(now_ms) for window in self._windows]
        windows = {silence.id: silence for silence in open_now if silence is not None}
        known = windows | dict(self._in_file) | dict(self._known)
        left = [silence for silence in known.values() if silence.until_ms > now_ms]
        return sorted(left, key=lambda silence: (silence.until_ms, silence.id))

    def active(self, now_ms: int) -> list[Silence]:
        """Return the silences that are in force."""
        at_ms, known, found = self._active
        current = self._known, self._in_file
        if at_ms != now_ms or known != current:  # asked for thousands of incidents at one time
            found = admit(self._in_force(now_ms), self._most)[0]
            self._active = now_ms, current, found
        return found

    def _in_force(self, now_ms: int) -> list[Silence]:
        return [silence for silence in self.known(now_ms) if silence.from_ms <= now_ms]

    def of(self, incident: Incident, now_ms: int) -> Silence | None:
        """Return the silence that covers an incident longest; None: none does.

        Planned work that others report covers no incident of before it.
        """
        if not self._known and not self._windows and not self._in_file:
            return None
        found = [
            silence
            for silence in self.active(now_ms)
            if covers(silence, incident, self._nodes) and not (silence.event and incident.opened_ms < silence.from_ms)
        ]
        return found[-1] if found else None

    def held(self, now_ms: int) -> Mapping[str, str]:
        """Return the nodes in maintenance, each with a sentence that says why."""
        return self._hold(now_ms)[1]

    def held_since(self, now_ms: int) -> Mapping[str, int]:
        """Return the nodes in maintenance, each with the begin of its window."""
        return self._hold(now_ms)[2]

    def _hold(self, now_ms: int) -> tuple[list[Silence], dict[str, str], dict[str, int]]:
        holding = [silence for silence in self.active(now_ms) if silence.maintenance]
        if holding != self._held[0]:  # asked at each tick, for a large fleet
            found: dict[str, str] = {}
            since: dict[str, int] = {}
            for silence in holding:
                text = f"maintenance window: {describe_author(silence)}"
                for name in [name for name in self._nodes if _has((name, None), silence, self._nodes)]:
                    found[name] = text
                    since[name] = min(since.get(name, silence.from_ms), silence.from_ms)
            self._held = holding, found, since
        return self._held


def covers(silence: Silence, incident: Incident, nodes: Mapping[str, NodeSpec]) -> bool:
    """Whether the silence covers all members of the incident."""
    if silence.incident and incident.id not in silence.incident:
        return False
    if silence.kind and incident.kind not in silence.kind:
        return False
    if not (silence.node or silence.gpu or silence.rack or silence.leaf or silence.pool):
        return bool(silence.incident or silence.kind)
    members = incident.members or (((incident.node, incident.gpu),) if incident.node is not None else ())
    return bool(members) and all(_has(member, silence, nodes) for member in members)


def _has(member: Member, silence: Silence, nodes: Mapping[str, NodeSpec]) -> bool:
    name, gpu = member
    if (silence.node and name not in silence.node) or (silence.gpu and gpu not in silence.gpu):
        return False
    place = nodes.get(name)
    wanted = [(getattr(silence, key), key) for key in PLACES if getattr(silence, key)]
    return not wanted or (place is not None and all(getattr(place, key) in values for values, key in wanted))

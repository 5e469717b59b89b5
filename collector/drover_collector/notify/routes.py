"""Decide which receivers get an incident, by the routes of the settings in their order. Pure.

The first route that matches decides; with `continue = true` later ones are tried too, as in Alertmanager. An incident
that no route matches goes to every receiver from its `min_severity` on, so a gap between routes hides nothing. A route
without receivers drops what it matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from drover_collector.notify.incident_notes import IncidentNotes
from drover_collector.notify.silences import Silences
from drover_core.model.events import (
    SEVERITY_ORDER,
    Incident,
    IncidentKind,
    Severity,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.settings import (
    SettingsError,
    between,
    required,
    setting,
)

SCOPES = ("gpu", "node", "rack", "leaf", "job", "fleet")
KEYS = ("severity", "kind", "scope", "pool", "sku")
WHERE = "notify.route"


class Receiver(Protocol):
    """The part of a receiver that routes read."""

    @property
    def name(self) -> str: ...

    @property
    def min_severity(self) -> Severity: ...


def _each_of(*choices: str) -> Callable[[Any], str | None]:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = [value for value in values if value not in choices]
        return f"{wrong[0]!r} is not one of {', '.join(choices)}" if wrong else None

    return check


@dataclass(frozen=True)
class RouteConfig:
    """One route. A key that is left out matches everything."""

    receivers: tuple[str, ...] = required("names of the receivers that are notified; []: nobody")
    severity: tuple[str, ...] = setting(
        (), "incidents of these severities; left out: from each receiver's min_severity on", _each_of(*Severity)
    )
    kind: tuple[str, ...] = setting((), "of these kinds", _each_of(*IncidentKind))
    scope: tuple[str, ...] = setting((), "of these scopes", _each_of(*SCOPES))
    pool: tuple[str, ...] = setting((), "that touch a node of these pools of the fleet file")
    sku: tuple[str, ...] = setting((), "that touch a node of these SKUs of the fleet file")
    continue_: bool = setting(False, "go on to the routes after this one")
    repeat_h: float = setting(
        0.0, "an incident that is still open is sent again after this many hours; 0: it is not", between(0, 720)
    )
    group: bool = setting(True, "while a mass event is open, its message replaces those of its incidents")
    group_wait_s: float = setting(
        0.0,
        "an opening waits this long unless it gets worse; it is not sent if the incident ends in that time, or becomes"
        " part of a wider incident or a mass event",
        between(0, 600),
    )

    def matches(self, incident: Incident, places: Sequence[NodeSpec]) -> bool:
        return (
            (not self.severity or incident.severity in self.severity)
            and (not self.kind or incident.kind in self.kind)
            and (not self.scope or incident.scope in self.scope)
            and (not self.pool or any(place.pool in self.pool for place in places))
            and (not self.sku or any(place.sku in self.sku for place in places))
        )

    def covers(self, other: RouteConfig) -> bool:
        """Whether this route matches everything that `other` matches."""
        return all(
            not getattr(self, key) or (getattr(other, key) and set(getattr(other, key)) <= set(getattr(self, key)))
            for key in KEYS
        )


@dataclass(frozen=True, slots=True)
class Target:
    """How routes notify one receiver.

    Attributes:
        repeat_ms: after which an open incident is sent again; None: never.
        group: mass events replace the messages of their incidents.
        wait_ms: how long an opening is held back.
    """

    repeat_ms: int | None = None
    group: bool = True
    wait_ms: int = 0


class Routes:
    """All routes.

    Args:
        routes: in order; none: each receiver gets incidents from its `min_severity` on.
        places: the fleet's nodes by name, for pools and SKUs.
    """

    def __init__(
        self,
        receivers: Iterable[Receiver],
        routes: Sequence[RouteConfig] = (),
        places: Mapping[str, NodeSpec] | None = None,
    ) -> None:
        self._least = {r.name: SEVERITY_ORDER.index(r.min_severity) for r in receivers}
        self._routes = tuple(routes)
        self._places = places or {}
        self._placed = any(route.pool or route.sku for route in routes)

    @property
    def least_repeat_ms(self) -> int | None:
        """The shortest time after which a route repeats; None: none does."""
        repeats = [route.repeat_h for route in self._routes if route.repeat_h]
        return round(min(repeats) * 3_600_000) if repeats else None

    def receivers(self, incident: Incident) -> tuple[str, ...]:
        """Return the names of the receivers to notify, in the order of the routes."""
        return tuple(self.targets(incident))

    def targets(self, incident: Incident) -> dict[str, Target]:
        """Return the receivers to notify, each with how; the first of several routes that name one decides."""
        places = self._places_of(incident) if self._placed else ()
        rank = SEVERITY_ORDER.index(incident.severity)
        found: dict[str, Target] = {}
        matched = False
        for route in self._routes:
            if not route.matches(incident, places):
                continue
            matched = True
            repeat_ms = round(route.repeat_h * 3_600_000) or None
            target = Target(repeat_ms, route.group, round(route.group_wait_s * 1000))
            for name in route.receivers:
                if route.severity or rank >= self._least.get(name, 0):
                    found.setdefault(name, target)
            if not route.continue_:
                break
        if not matched:
            return {name: Target() for name, least in self._least.items() if rank >= least}
        return found

    def _places_of(self, incident: Incident) -> list[NodeSpec]:
        names = dict.fromkeys(node for node, _ in incident.members)
        if incident.node is not None:
            names[incident.node] = None
        return [self._places[name] for name in names if name in self._places]


@dataclass(frozen=True, slots=True)
class Recipients:
    """Routes, silences and people's notes, which decide together who is notified now."""

    routes: Routes
    silences: Silences
    notes: IncidentNotes = field(default_factory=IncidentNotes)

    def silenced(self, incident: Incident, now_ms: int) -> bool:
        """Whether the incident is open and a silence covers it."""
        return incident.closed_ms is None and self.silences.of(incident, now_ms) is not None

    def targets(self, incident: Incident) -> dict[str, Target]:
        """Return the receivers to notify. What somebody has acknowledged is not sent again."""
        found = self.routes.targets(incident)
        if self.notes.acknowledged(incident):
            return {name: replace(target, repeat_ms=None) for name, target in found.items()}
        return found


def validate_routes(routes: Sequence[RouteConfig], receivers: Sequence[str]) -> None:
    """Check routes against the configured receivers.

    Raises:
        SettingsError: an unknown receiver, a route that no incident reaches, or a receiver that no route reaches.
    """
    for number, route in enumerate(routes):
        for name in route.receivers:
            if name not in receivers:
                known = f"there are {', '.join(receivers)}" if receivers else "none is configured"
                raise SettingsError(f"{WHERE}[{number}].receivers: {name!r} is not a configured receiver; {known}")
        for earlier, before in enumerate(routes[:number]):
            if before.covers(route) and not before.continue_:
                raise SettingsError(
                    f"{WHERE}[{number}]: nothing reaches it: {WHERE}[{earlier}] matches the same and comes first;"
                    f" move it up, or set continue = true in {WHERE}[{earlier}]"
                )
    last = next((n for n, route in enumerate(routes) if route.covers(RouteConfig(())) and not route.continue_), None)
    named = {name for route in routes for name in route.receivers}
    for name in receivers:
        if last is not None and name not in named:
            raise SettingsError(
                f"{WHERE}[{last}]: matches everything, and no route names {name!r}, which is never notified"
            )


def validate_places(routes: Sequence[RouteConfig], spec: FleetSpec) -> None:
    """Check routes against the fleet file.

    Raises:
        SettingsError: a pool or SKU that no node has, so that nothing reaches the route.
    """
    for key in ("pool", "sku"):
        known = {getattr(node, key) for node in spec.nodes} - {""}
        for number, route in enumerate(routes):
            for value in getattr(route, key):
                if value not in known:
                    there = f"it has {', '.join(sorted(known))}" if known else f"no node there has a {key}"
                    raise SettingsError(f"{WHERE}[{number}].{key}: {value!r} is not in the fleet file; {there}")

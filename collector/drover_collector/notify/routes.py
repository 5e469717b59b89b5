"""Who is told of an incident: the routes of the settings, in their order. Pure.

The first route that matches decides; `continue = true` goes on to those after it, as Alertmanager has it. What no route
matches goes to every receiver from its `min_severity` on, so that a gap between routes hides nothing; a route without
receivers keeps to itself what it matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """What is asked of a receiver here."""

    @property
    def name(self) -> str: ...

    @property
    def min_severity(self) -> Severity: ...


def _each_of(*choices: str) -> Callable[[Any], str | None]:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = [value for value in values if value not in choices]
        return f"{wrong[0]!r} is none of {', '.join(choices)}" if wrong else None

    return check


@dataclass(frozen=True)
class RouteConfig:
    """One route; a key to match that is left out matches everything."""

    receivers: tuple[str, ...] = required("names of those that are told; [] tells nobody")
    severity: tuple[str, ...] = setting(
        (), "incidents of these severities; left out: from each receiver's min_severity on", _each_of(*Severity)
    )
    kind: tuple[str, ...] = setting((), "of these kinds", _each_of(*IncidentKind))
    scope: tuple[str, ...] = setting((), "of these scopes", _each_of(*SCOPES))
    pool: tuple[str, ...] = setting((), "that touch a node of these pools of the fleet file")
    sku: tuple[str, ...] = setting((), "likewise of these SKUs")
    continue_: bool = setting(False, "go on to the routes after this one")
    repeat_h: float = setting(
        0.0, "an incident that is still open is told again after so many hours; 0: it is not", between(0, 720)
    )
    group: bool = setting(True, "while a mass event is open its own message stands for those of its incidents")
    group_wait_s: float = setting(
        0.0,
        "an opening waits so long, unless it gets worse: what meanwhile ends, or becomes part of a wider incident or of"
        " a mass event, is told with that alone",
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
        """Whether whatever `other` matches, this matches too."""
        return all(
            not getattr(self, key) or (getattr(other, key) and set(getattr(other, key)) <= set(getattr(self, key)))
            for key in KEYS
        )


@dataclass(frozen=True, slots=True)
class Target:
    """How one receiver is told: again after `repeat_ms` (None: not), whether mass events stand for others, and how long
    an opening waits for what explains it."""

    repeat_ms: int | None = None
    group: bool = True
    wait_ms: int = 0


class Routes:
    """
    Args:
        receivers: all that there are.
        routes: in order; none: each receiver is told from its `min_severity` on.
        places: the nodes of the fleet by name, for pools and SKUs.
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
        """The shortest time after which a route tells again; None: none does."""
        repeats = [route.repeat_h for route in self._routes if route.repeat_h]
        return round(min(repeats) * 3_600_000) if repeats else None

    def receivers(self, incident: Incident) -> tuple[str, ...]:
        """Names of those that are to be told, in the order of the routes."""
        return tuple(self.targets(incident))

    def targets(self, incident: Incident) -> dict[str, Target]:
        """Those that are to be told; where two routes name one, the first says how."""
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


def validate_routes(routes: Sequence[RouteConfig], receivers: Sequence[str]) -> None:
    """
    Raises:
        SettingsError: a receiver that there is none of, a route that nothing reaches, or a receiver that no route
            reaches. One line, with the route's key.
    """
    for number, route in enumerate(routes):
        for name in route.receivers:
            if name not in receivers:
                known = f"there are {', '.join(receivers)}" if receivers else "none is configured"
                raise SettingsError(f"{WHERE}[{number}].receivers: {name!r} is no receiver; {known}")
        for earlier, before in enumerate(routes[:number]):
            if before.covers(route) and not before.continue_:
                raise SettingsError(
                    f"{WHERE}[{number}]: nothing reaches it: {WHERE}[{earlier}] matches all that it does and comes"
                    f" first; move it up, or set continue = true in {WHERE}[{earlier}]"
                )
    last = next((n for n, route in enumerate(routes) if route.covers(RouteConfig(())) and not route.continue_), None)
    named = {name for route in routes for name in route.receivers}
    for name in receivers:
        if last is not None and name not in named:
            raise SettingsError(f"{WHERE}[{last}]: matches everything, and no route names {name!r}: it is never told")


def validate_places(routes: Sequence[RouteConfig], spec: FleetSpec) -> None:
    """
    Raises:
        SettingsError: a pool or SKU that no node of the fleet file has: nothing would reach that route.
    """
    for key in ("pool", "sku"):
        known = {getattr(node, key) for node in spec.nodes} - {""}
        for number, route in enumerate(routes):
            for value in getattr(route, key):
                if value not in known:
                    there = f"it has {', '.join(sorted(known))}" if known else f"no node there has a {key}"
                    raise SettingsError(f"{WHERE}[{number}].{key}: {value!r} is not in the fleet file; {there}")

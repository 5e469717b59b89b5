"""Read the conditions that others write on Kubernetes nodes, and store what changes as events, which are judged.

Only the collector that detects asks. Nothing more than "list nodes" is needed. A reading lists all nodes whole, 10 kB
each, so a large cluster is read less often: at most NODES_PER_S on average. When the API server does not answer, what
was read last stays, and its age is a trouble of Drover's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drover_collector.actions.base import ActError
from drover_collector.actions.kubernetes.actuator import CONDITION
from drover_collector.detectors.conditions import detector
from drover_collector.detectors.conditions.rules import RULES
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.store import StoreError
from drover_core.model.conditions import (
    MAX_MESSAGE,
    MAX_REASON,
    MAX_TYPE,
    ConditionError,
    NodeCondition,
    Place,
    Standing,
    cut,
    from_message,
    to_message,
)
from drover_core.model.events import Event, EventKind
from drover_core.times import from_iso

log = logging.getLogger(__name__)

ROUND_S = 60.0
NODES_PER_S = 50
EVENTS = 5_000  # of one reading; the rest come with the next one
NEW_MS = 600_000  # a node that was created so lately is being set up: its plugins and drivers come up
OLD_MS = 86_400_000  # what has stood for longer when it is first read is no news
MOST_TYPES = 64  # of one node
SOURCE = "kubernetes"
TROUBLE = "node conditions"
OWN = "Drover"  # begins the types that Drover writes itself: DroverHealthy
assert CONDITION.startswith(OWN)

Node = Mapping[str, Any]
Mark = tuple[str, str, str, str]  # standing, status, place, reason: what makes an event when it changes


@dataclass(frozen=True, slots=True)
class ConditionSettings:
    """Which types count. `bad`: type -> the status that is a fault. `ignored`: types that are not read."""

    bad: Mapping[str, str]
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, warn: Sequence[str] = (), ignore: Sequence[str] = ()) -> ConditionSettings:
        named = {type_: status or "True" for type_, _, status in (text.partition("=") for text in warn)}
        return cls({**{type_: rule.bad for type_, rule in RULES.items()}, **named}, frozenset(ignore))

    def standing(self, type_: str, status: str) -> Standing:
        if type_ not in self.bad:
            return Standing.SHOWN
        if status not in ("True", "False"):
            return Standing.UNKNOWN
        return Standing.FAULT if status == self.bad[type_] else Standing.WELL


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read last. `nodes`: node -> its conditions but those that are well, and how many of those there are."""

    at_ms: int = 0
    nodes: Mapping[str, tuple[tuple[NodeCondition, ...], int]] = field(default_factory=dict)


class NodeConditions:
    """All calls but `run` may block.

    Args:
        list_nodes: yields every node as the API server sends it; may raise ActError.
        take: judges and exports events that are stored.
    """

    def __init__(
        self,
        settings: ConditionSettings,
        pipeline: Pipeline,
        list_nodes: Callable[[], Iterable[Node]],
        take: Callable[[Sequence[Event]], None],
    ) -> None:
        self._settings, self._pipeline, self._list, self._take = settings, pipeline, list_nodes, take
        self._engine: object = None  # that judges what was stored; of another one all is new
        self._marks: dict[str, dict[str, Mark]] = {}
        self._shared: dict[Mark, Mark] = {}  # most nodes have the same
        self.reading = Reading()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                if self._pipeline.leading:
                    await asyncio.to_thread(self.ask)
            except Exception as error:  # noqa: BLE001  # a defect must neither end this task nor go unseen
                self._pipeline.ticks.failed(error, self._pipeline.now_ms())
            await asyncio.sleep(self.every_s)

    @property
    def every_s(self) -> float:
        """How often all nodes are read."""
        return max(ROUND_S, len(self.reading.nodes) / NODES_PER_S)

    def ask(self) -> None:
        """Read all nodes, and store what has changed."""
        try:
            for _ in self.through(self._list()):
                pass
        except ActError as error:
            log.info("conditions of nodes: %s", error)  # the trouble says it to people

    def through(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Yield nodes as they come and take in their conditions; one listing serves all that look at nodes.

        Raises:
            ActError: as the listing does.
        """
        now_ms, known = self._pipeline.now_ms(), self._pipeline.index.node_number
        found: dict[str, list[NodeCondition]] = {}
        try:
            for node in nodes:
                name = str((node.get("metadata") or {}).get("name") or "")
                if name in known:
                    found[name] = list(self._conditions(node, now_ms))
                yield node
        except ActError as error:
            self._note(now_ms, str(error))
            raise
        if known and not found:  # its database was lost, or its nodes have other names: that ends nothing
            self._note(now_ms, "the API server lists none of the fleet's nodes; are they named as in the fleet file?")
            return
        try:
            self._settle(found, now_ms)
        except StoreError as error:  # the same changes are found again
            self._note(now_ms, f"what has changed cannot be stored: {error}")
        else:
            self._note(now_ms, "")

    def _note(self, now_ms: int, error: str) -> None:
        troubles, read_ms = self._pipeline.ticks.troubles, self.reading.at_ms
        if not error:
            troubles.pop(TROUBLE, None)
            return
        age = f"last read {(now_ms - read_ms) // 60_000} minutes ago" if read_ms else "not read yet"
        troubles[TROUBLE] = f"The conditions of Kubernetes' nodes are {age}: {error}."

    def _conditions(self, node: Node, now_ms: int) -> Iterator[NodeCondition]:
        place, every_s = _place(node, now_ms), round(self.every_s)
        listed = (node.get("status") or {}).get("conditions") or ()
        for each in [one for one in listed if isinstance(one, dict)][:MOST_TYPES]:
            type_, status = cut(each.get("type"), MAX_TYPE), cut(each.get("status"), 16)
            if not type_ or type_.startswith(OWN) or type_ in self._settings.ignored:
                continue
            yield NodeCondition(
                type_, status, cut(each.get("reason"), MAX_REASON), cut(each.get("message"), MAX_MESSAGE),
                _since(each.get("lastTransitionTime"), now_ms), self._settings.standing(type_, status), place,
                every_s=every_s,
            )  # fmt: skip

    def _settle(self, found: Mapping[str, Sequence[NodeCondition]], now_ms: int) -> None:
        """Store what has changed since the last reading, and remember it."""
        self._shared.clear()  # a writer may give a new reason each time
        first = self._engine is not self._pipeline.engine
        marks = self._left_open() if first else self._marks
        changed: list[tuple[str, NodeCondition]] = []
        for name in sorted({*found, *marks}):
            before, now = marks.get(name, {}), {each.type: each for each in found.get(name, ())}
            for each in now.values():
                if self._is_news(each, before.get(each.type), first):
                    changed.append((name, _aged(each, now_ms) if first or each.type not in before else each))
            well = Standing.WELL.value
            changed += [(name, _gone(type_)) for type_, mark in before.items() if type_ not in now and mark[0] != well]
        last = {Standing.FAULT: 0, Standing.SHOWN: 2}  # what is only shown must not keep the end of a fault waiting
        changed.sort(key=lambda one: last.get(one[1].standing, 1))  # stable
        left = {name for name, _ in changed[EVENTS:]}
        events = [_event(name, each, now_ms) for name, each in changed[:EVENTS]]
        if events:
            self._pipeline.store.events.write(events)
            self._take(events)
        read = {name: {each.type: self._mark(each) for each in every} for name, every in found.items()}
        self._marks = {name: each for name, each in read.items() if name not in left}
        self._marks |= {name: marks[name] for name in left if name in marks}
        self._engine = self._pipeline.engine
        self.reading = Reading(now_ms, {name: _briefly(each_of) for name, each_of in found.items()})

    def _is_news(self, found: NodeCondition, before: Mark | None, first: bool) -> bool:
        if before is None:  # of a node or type that was not there at the last reading, or at the first one
            return found.standing is Standing.FAULT or (not first and found.standing is Standing.SHOWN)
        standing, status, place, reason = self._mark(found)
        fault = found.standing is Standing.FAULT
        return before[:2] != (standing, status) or (fault and before[2:] != (place, reason))

    def _left_open(self) -> dict[str, dict[str, Mark]]:
        """Return the conditions of open incidents, so that those that have ended meanwhile are found."""
        marks: dict[str, dict[str, Mark]] = {}
        for incident in self._pipeline.store.incidents.newest("open"):
            for text in incident.snapshot_of(detector.NAME).values():
                try:
                    found = from_message(str(text))
                except ConditionError:
                    continue
                for node, _ in incident.members:
                    marks.setdefault(node, {})[found.type] = ("", "", "", "")  # whatever it is now is news
        return marks

    def _mark(self, found: NodeCondition) -> Mark:
        mark = (found.standing.value, found.status, found.place.value, found.reason)
        return self._shared.setdefault(mark, mark) if found.standing is not Standing.FAULT else mark


def _event(node: str, found: NodeCondition, now_ms: int) -> Event:
    return Event(
        f"{node}/{SOURCE}/{found.type}/{now_ms}", now_ms, node, None, EventKind.CONDITION, found.type,
        to_message(found), SOURCE, received_ms=now_ms,
    )  # fmt: skip


def _aged(found: NodeCondition, now_ms: int) -> NodeCondition:
    """Return a condition that is seen for the first time."""
    stood = found.standing is Standing.FAULT and found.since_ms and now_ms - found.since_ms > OLD_MS
    return replace(found, old=True) if stood else found


def _gone(type_: str) -> NodeCondition:
    return NodeCondition(type_, "", standing=Standing.GONE)


def _briefly(found: Sequence[NodeCondition]) -> tuple[tuple[NodeCondition, ...], int]:
    shown = tuple(each for each in found if each.standing is not Standing.WELL)
    return shown, len(found) - len(shown)


def _place(node: Node, now_ms: int) -> Place:
    meta, spec = node.get("metadata") or {}, node.get("spec") or {}
    created_ms = _since(meta.get("creationTimestamp"), now_ms)
    if meta.get("deletionTimestamp") or (created_ms and now_ms - created_ms < NEW_MS):
        return Place.NEW
    return Place.CLOSED if spec.get("unschedulable") is True else Place.SERVICE


def _since(value: object, now_ms: int) -> int:
    """Return a time of the API server, never after now: its clock may be ahead. 0: there is none."""
    try:
        return min(now_ms, max(0, from_iso(value))) if isinstance(value, str) else 0
    except (ValueError, OverflowError):
        return 0

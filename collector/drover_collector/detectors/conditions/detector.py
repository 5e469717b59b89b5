"""Judge conditions that others write on Kubernetes nodes: the kubelet, node-problem-detector, NVSentinel, EKS, AKS.

Anyone who may change a node's status can write them. So a finding is a warning at most, and asks for no more than
watching. It stays apart from what Drover measures itself (incidents/correlation.py), and no node goes for it.

There is no warning of one that lasts less than its rule's `hold_s`; of a node that was created a moment ago; of one
that is cordoned or in maintenance (a note at most); of one that stood for a day before it was first seen (a note); of
the same on many nodes at once (one note). "Unknown" says nothing: what was reported before stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from drover_collector.detectors._lib.examples import START_MS, Example, play, small_fleet
from drover_collector.detectors._lib.texts import duration, listing
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.conditions.rules import TRUE, Rule, rule_of
from drover_collector.fleet.index import FleetIndex
from drover_core.model.conditions import (
    ConditionError,
    NodeCondition,
    Place,
    Standing,
    cause_of,
    from_message,
    sentence,
    to_message,
)
from drover_core.model.events import (
    Event,
    EventKind,
    Evidence,
    Finding,
    Incident,
    RecommendedAction,
    Severity,
)

NAME = "conditions"
VERSION = 1
AGAIN_MS = 300_000  # between two findings about a condition that lasts
QUIET_MS = 2 * AGAIN_MS + 60_000  # a condition that comes and goes within it is one incident
TOGETHER_SHARE, TOGETHER_LEAST = 0.1, 3  # of all nodes, and nodes at least; as for kernel lines
CONFIDENCE = 0.5  # somebody else says so: our own
LOOKS = 1.5  # readings for which a condition must last at least
Key = tuple[str, str]  # node, type


@dataclass(slots=True)
class Held:
    """A condition that is a fault.

    Attributes:
        first_ms: when it was first seen as such.
        after_ms: when it had ended before; its writer may leave the time of a transition unchanged. 0: never.
        reported_ms: 0: not yet.
    """

    found: NodeCondition
    first_ms: int
    after_ms: int = 0
    reported_ms: int = 0
    severity: Severity = Severity.INFO


@dataclass(slots=True)
class ConditionState:
    held: dict[Key, Held] = field(default_factory=dict)
    ended_ms: dict[Key, int] = field(default_factory=dict)  # of those that were faults before
    common_ms: dict[str, int] = field(default_factory=dict)  # type -> when many nodes had it, last reported


def detect(window: Window, state: ConditionState | None, now_ms: int) -> tuple[list[Finding], ConditionState]:
    s = state if state is not None else ConditionState()
    for event in window.events:
        if event.kind is EventKind.CONDITION and not event.backlog and event.node in window.index.node_number:
            _take(s, event, now_ms)
    return (list(_due(window, s, now_ms)) if window.fresh else []), s


def could_not_judge(_window: Window) -> list[str]:
    """Return nothing: conditions are events, and the absence of events is not visible."""
    return []


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> ConditionState:
    """Return state that goes on with what is open. The next reading of all nodes says what of it has ended."""
    state = ConditionState()
    for incident in incidents:
        if NAME not in incident.detectors or incident.closed_ms is not None:
            continue
        for text in incident.snapshot_of(NAME).values():
            try:
                found = from_message(str(text))
            except ConditionError:
                continue
            for node, _ in incident.members:
                state.held[node, found.type] = Held(found, incident.opened_ms - rule_of(found.type).hold_s * 1000)
    return state


def _take(s: ConditionState, event: Event, now_ms: int) -> None:
    try:
        found = from_message(event.message)
    except ConditionError:
        return
    key = (event.node, found.type)
    known = s.held.get(key)
    if found.standing is Standing.FAULT:
        if known is None:
            s.held[key] = Held(found, now_ms, s.ended_ms.get(key, 0))
        else:
            known.found = replace(found, old=known.found.old)
    elif found.standing is Standing.UNKNOWN:
        if known is not None and not known.reported_ms and now_ms - s.common_ms.get(found.type, 0) >= AGAIN_MS:
            del s.held[key]  # it was not bad for long enough, and nobody knows whether it still is
    elif s.held.pop(key, None) is not None:
        s.ended_ms[key] = now_ms


def _due(window: Window, s: ConditionState, now_ms: int) -> Iterator[Finding]:
    lasting: dict[str, list[str]] = {}
    for (node, type_), held in s.held.items():
        hold_ms = max(rule_of(type_).hold_s * 1000, round(LOOKS * 1000 * held.found.every_s))
        is_work = rule_of(type_).work and _is_closed(window, held, node)
        if now_ms - held.first_ms >= hold_ms and held.found.place is not Place.NEW and not is_work:
            lasting.setdefault(type_, []).append(node)
    for type_, nodes in sorted(lasting.items()):
        rule = rule_of(type_)
        if len(nodes) >= max(TOGETHER_LEAST, TOGETHER_SHARE * window.index.node_count):
            if now_ms - s.common_ms.get(type_, 0) >= AGAIN_MS:
                s.common_ms[type_] = now_ms
                yield _of_many(s, rule, sorted(nodes), now_ms)
            continue
        for node in sorted(nodes):
            held = s.held[node, type_]
            closed = _is_closed(window, held, node)
            note = closed or held.found.old
            severity = Severity.INFO if note else rule.severity
            if now_ms - held.reported_ms < AGAIN_MS and severity is held.severity:
                continue
            held.reported_ms, held.severity = now_ms, severity
            yield _of_node(rule, held, node, now_ms, closed)


def _is_closed(window: Window, held: Held, node: str) -> bool:
    return held.found.place is Place.CLOSED or node in window.maintained


def _of_node(rule: Rule, held: Held, node: str, now_ms: int, closed: bool) -> Finding:
    found = held.found
    since_ms = min(max(found.since_ms, held.after_ms) or held.first_ms, held.first_ms)
    why = ""
    if closed:
        why = " while it is out of service or worked on"
    elif found.old:
        why = f", and was {duration(held.first_ms - since_ms)} before Drover first read it"
    return Finding(
        NAME, rule.kind, cause_of(rule.type), "node", node, None, ((node, None),), now_ms, since_ms, held.severity,
        CONFIDENCE, RecommendedAction.NONE if held.severity is Severity.INFO else RecommendedAction.WATCH,
        f"Node {node}: {rule.what} (condition {found.type}={found.status}){why}.", rule.advice,
        (Evidence(f"Kubernetes: {sentence(found)}", from_ms=since_ms, key=found.type),),
        snapshot={found.type: to_message(found)},
    )  # fmt: skip


def _of_many(s: ConditionState, rule: Rule, nodes: Sequence[str], now_ms: int) -> Finding:
    """Return one note for what many nodes show: what writes the condition, or what they share, and no single node."""
    first = s.held[nodes[0], rule.type]
    since_ms = min(s.held[node, rule.type].first_ms for node in nodes)
    return Finding(
        NAME, rule.kind, f"{cause_of(rule.type)}_common", "rack", None, None, tuple((node, None) for node in nodes),
        now_ms, since_ms, Severity.INFO, CONFIDENCE, RecommendedAction.NONE,
        f"{len(nodes)} nodes have the condition {rule.type}={first.found.status} at once: {listing(nodes)}.",
        "Check what writes this condition, and what these nodes share. No single node is at fault.",
        (Evidence(f"Kubernetes, of {nodes[0]}: {sentence(first.found)}", from_ms=since_ms, key=rule.type),),
        snapshot={rule.type: to_message(first.found)},
    )  # fmt: skip


def example_event(second: int, node: str, found: NodeCondition) -> Event:
    """Return the event of a condition, `second` seconds after the start of an example."""
    ts_ms = START_MS + second * 1000
    text = to_message(found)
    return Event(
        f"{node}/{found.type}/{second}", ts_ms, node, None, EventKind.CONDITION, found.type, text, "kubernetes"
    )


_BAD = NodeCondition("KernelDeadlock", TRUE, "DockerHung", "task docker:7 blocked", START_MS, Standing.FAULT)
_WELL = replace(_BAD, status="False", reason="KernelHasNoDeadlock", message="", standing=Standing.WELL)
EXAMPLES = (
    Example(
        "a condition that comes and goes within a minute",
        lambda: play(small_fleet(), 30, events={
            2: [example_event(27, "n02", _BAD)], 8: [example_event(87, "n02", _WELL)],
        }),
        frozenset(),
    ),
    Example(
        "the same on all nodes at once: one note",
        lambda: play(small_fleet(), 30, events={2: [example_event(27, f"n{n:02d}", _BAD) for n in range(8)]}),
        frozenset({("liveness", "condition_kernel_deadlock_common", "rack", "info")}),
    ),
    Example(
        "a condition that has stood for weeks when it is first read",
        lambda: play(small_fleet(), 30, events={2: [example_event(27, "n02", replace(_BAD, old=True))]}),
        frozenset({("liveness", "condition_kernel_deadlock", "node", "info")}),
    ),
    Example(
        "a kernel that is deadlocked",
        lambda: play(small_fleet(), 30, events={2: [example_event(27, "n02", _BAD)]}),
        frozenset({("liveness", "condition_kernel_deadlock", "node", "warning")}),
    ),
)  # fmt: skip

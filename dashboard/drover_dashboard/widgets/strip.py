"""What happened in the time of a page's charts: incidents, actions and events, in lanes above the charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from drover_core.model.events import Event, Incident
from drover_dashboard import client
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.components import component
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

MOST = 60  # parts of a lane: more would be a wall; the newest stay
ROWS = 4  # of a lane
MOST_NODES = 1000  # that one question names
TEXT = 300  # characters of a tooltip


@dataclass(frozen=True, slots=True)
class Part:
    """A bar, or a moment where both ends are the same.

    Attributes:
        word: stands next to it where there is room.
        text: its tooltip.
        look: critical, warning, info, action, event, change or maintenance.
        id: of the incident that a click opens; "": none.
    """

    low_ms: int
    high_ms: int
    word: str
    text: str
    look: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """`known`: False where the collector did not say what belongs here, which is not that nothing does."""

    label: str
    parts: Sequence[Part]
    known: bool = True


def incidents(found: Iterable[Incident] | None, who: view.Viewer) -> Lane:
    """Each from its onset to its end, or until now. None: not known, here and below."""
    parts = [
        Part(
            incident.since_ms, incident.closed_ms or who.now_ms, fmt.cause(incident.cause),
            f"{who.clock(incident.since_ms)} {incident.severity}: {who.localize(incident.summary)}",
            incident.severity.value, incident.id,
        )
        for incident in found or ()
    ]  # fmt: skip
    return Lane("Incidents", parts, found is not None)


def actions(found: Iterable[pb.ActionLine] | None, who: view.Viewer) -> Lane:
    parts = []
    for line in found or ():
        did = f"{line.act}{'' if line.state == 'done' else f': {line.state}'}"
        by = "" if line.by == "drover" else f" by {line.by}"
        parts.append(Part(line.ts_ms, line.ts_ms, did, f"{who.clock(line.ts_ms)} {did}{by}: {line.why}", "action"))
    return Lane("Actions", parts, found is not None)


def events(found: Iterable[Event] | None, who: view.Viewer) -> Lane:
    """The same kind of event at the same GPU within one minute is one part."""
    parts: dict[tuple[str, int], Part] = {}
    for event in sorted(found or (), key=lambda one: one.ts_ms):
        at = "" if event.gpu is None else f" GPU {event.gpu}"
        word = f"{fmt.event(event.kind, event.code)}{at}"
        text = f"{who.clock(event.ts_ms)} {word}: {event.message}"
        parts.setdefault((word, event.ts_ms // 60_000), Part(event.ts_ms, event.ts_ms, word, text, "event"))
    return Lane("Events", list(parts.values()), found is not None)


OF_CHANGES = {"collector": "collector", "agent": "agents", "maintenance": "maintenance", "policy": "policy"}


def changes(found: Iterable[pb.Change] | None, who: view.Viewer) -> Lane:
    """Starts and upgrades of agents and collectors, changes of the policy, maintenance windows. None: not known."""
    parts = []
    for one in found or ():
        word = OF_CHANGES.get(one.kind, one.kind)
        word = f"{word} started" if one.kind in ("collector", "agent") else word
        text = f"{who.clock(one.from_ms)} {who.localize(one.text)}"
        to_ms = one.to_ms if one.kind == "maintenance" else one.from_ms
        parts.append(Part(one.from_ms, to_ms, word, text, "maintenance" if one.kind == "maintenance" else "change"))
    return Lane("Changes", parts, found is not None)


def ask_changes(key: str, nodes: Iterable[str], from_ms: int, to_ms: int, who: view.Viewer) -> Lane:
    """The lane of what changed on these nodes (none: on all) and on the collector. `key`: of the page and its time."""
    request = pb.ChangesRequest(from_ms=from_ms, to_ms=to_ms, nodes=sorted(set(nodes))[:MOST_NODES])
    answer = client.fleet().ask(methods.LIST_CHANGES, request, key)
    return changes(answer.value.changes if answer.value is not None else None, who)


def moments(lanes: Iterable[Lane], from_ms: int, to_ms: int) -> list[int]:
    """When something began, for the faint lines in the charts."""
    return sorted({part.low_ms for lane in lanes for part in within(lane, from_ms, to_ms) if part.low_ms >= from_ms})


def within(lane: Lane, from_ms: int, to_ms: int) -> list[Part]:
    """The newest parts of this time, in the order of their beginning."""
    found = sorted((p for p in lane.parts if p.low_ms <= to_ms and p.high_ms >= from_ms), key=lambda p: p.low_ms)
    return found[-MOST:]


def rows(parts: Sequence[Part]) -> list[list[Part]]:
    """Bars that overlap lie in rows below each other, at most `ROWS`; moments stay in the first. Pure."""
    found: list[list[Part]] = []
    for part in parts:
        free = (row for row in found if part.low_ms == part.high_ms or row[-1].high_ms <= part.low_ms)
        row = next(free, None)
        if row is None and len(found) < ROWS:
            found.append([part])
        else:
            (found[-1] if row is None else row).append(part)
    return found


def show(key: str, lanes: Sequence[Lane], from_ms: int, to_ms: int, who: view.Viewer) -> str | None:
    """Draw the lanes that have something; return the id of the incident just clicked. `key`: unique on the page."""
    drawn = []
    for lane in lanes:
        parts = within(lane, from_ms, to_ms)
        empty = "" if lane.known else "not known: the collector did not say"
        for number, row in enumerate(rows(parts) or ([] if lane.known else [[]])):
            label = "" if number else lane.label
            drawn.append({"label": label, "parts": [_sent(part) for part in row], "empty": empty})
    data = {
        "from_s": from_ms / 1000, "to_s": to_ms / 1000,
        "from": who.clock(from_ms), "to": who.clock(to_ms),
        "lanes": drawn, "empty": "No incident, action, change or event in this time.",
    }  # fmt: skip
    shown = component("strip")(key=key, data=data, on_open_change=lambda: None, height="content")
    opened: str | None = shown.open
    return opened


def _sent(part: Part) -> dict[str, object]:
    sent = asdict(part) | {"low_s": part.low_ms / 1000, "high_s": part.high_ms / 1000, "text": part.text[:TEXT]}
    del sent["low_ms"], sent["high_ms"]
    return sent

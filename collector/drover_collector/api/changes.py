"""What changed on Drover itself and what was planned: starts and upgrades, the policy, maintenance windows."""

from __future__ import annotations

from collections.abc import Collection

from drover_collector.api.moment import MOST_DAYS
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, bad_argument
from drover_collector.pipeline.start_line import START
from drover_core.model.events import Event, EventKind, Silence
from drover_core.model.silences import describe_scope
from drover_proto import fleet_pb2 as pb

CHANGES, CHANGES_MAX = 200, 1000
READ = 10_000  # starts of agents, silences: what one answer reads of each
TOGETHER_MS = 300_000  # agents that start with one version within so long are one change
NAMED = 3
COVERS_CHARS = 200


def list_changes(facts: ApiSnapshot, request: pb.ChangesRequest) -> pb.ChangeList:
    to_ms = request.to_ms or facts.now_ms()
    from_ms = request.from_ms or to_ms - DAY_MS
    if not 0 <= from_ms < to_ms or from_ms < facts.now_ms() - MOST_DAYS * DAY_MS:
        raise bad_argument(f"from_ms {from_ms} to to_ms {to_ms}: give a time of the last {MOST_DAYS} days")
    nodes = frozenset(request.nodes)
    found = [*_collectors(facts, from_ms, to_ms), *_agents(facts, from_ms, to_ms, nodes),
             *_windows(facts, from_ms, to_ms, nodes)]  # fmt: skip
    found.sort(key=lambda change: (change.from_ms, change.kind, change.text))
    limit = min(request.limit or CHANGES, CHANGES_MAX)
    return pb.ChangeList(changes=found[-limit:], total=len(found))


def _collectors(facts: ApiSnapshot, from_ms: int, to_ms: int) -> list[pb.Change]:
    """Starts of collectors that judge, and changes of the policy."""
    found = []
    for what, kind in ((START, "collector"), ("policy", "policy")):
        for line in facts.store.audit.read(from_ms, what=what, limit=CHANGES_MAX):
            if line.ts_ms < to_ms:
                text = line.detail if kind == "collector" else f"policy {line.subject} by {line.by}: {line.why}"
                found.append(pb.Change(from_ms=line.ts_ms, to_ms=line.ts_ms, kind=kind, text=text))
    return found


def _agents(facts: ApiSnapshot, from_ms: int, to_ms: int, nodes: Collection[str]) -> list[pb.Change]:
    """Starts of agents, those of one version within minutes together."""
    started = facts.store.events.of_code(EventKind.LIFECYCLE, "agent_started", from_ms, limit=READ)
    groups: dict[str, list[list[Event]]] = {}
    for event in sorted(started, key=lambda e: e.ts_ms):
        if not from_ms <= event.ts_ms < to_ms or (nodes and event.node not in nodes):
            continue
        of_version = groups.setdefault(event.message, [])
        if of_version and event.ts_ms - of_version[-1][-1].ts_ms <= TOGETHER_MS:
            of_version[-1].append(event)
        else:
            of_version.append([event])
    return [_started(group) for of_version in groups.values() for group in of_version]


def _started(events: list[Event]) -> pb.Change:
    names = list(dict.fromkeys(event.node for event in events))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    text = f"{events[0].message} on {', '.join(names[:NAMED])}{more}"
    return pb.Change(from_ms=events[0].ts_ms, to_ms=events[-1].ts_ms, kind="agent", text=text, nodes=len(names))


def _windows(facts: ApiSnapshot, from_ms: int, to_ms: int, nodes: Collection[str]) -> list[pb.Change]:
    """Maintenance windows that lie in the time, of these nodes or not by name."""
    found = []
    for silence in facts.store.silences.newest(from_ms, READ):
        if not silence.maintenance or silence.from_ms >= to_ms or silence.until_ms <= from_ms:
            continue
        if nodes and not _touches(facts, silence, nodes):
            continue
        text = f"maintenance of {describe_scope(silence)[:COVERS_CHARS]} by {silence.by}: {silence.why}"
        found.append(
            pb.Change(
                from_ms=silence.from_ms, to_ms=silence.until_ms, kind="maintenance", text=text,
                nodes=len(silence.node),
            )
        )  # fmt: skip
    return found


def _touches(facts: ApiSnapshot, silence: Silence, nodes: Collection[str]) -> bool:
    places = facts.index.spec.by_name
    for name in nodes:
        place = places.get(name)
        if place is not None and all(
            not listed or held in listed
            for listed, held in (
                (silence.node, name), (silence.rack, place.rack), (silence.leaf, place.leaf), (silence.pool, place.pool)
            )
        ):  # fmt: skip
            return True
    return False

"""A store in memory with what judging and acting ask of one, for histories that are too long for a real one.

Versions are kept as in the real one: all of them, in the order in which they were written. It outlives collectors; each
opens it as `Lease`, and only the newest of these may act. test_kept_store.py holds its answers against a real one's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from drover_collector.fleet.buckets import BUCKET_MS, Bucket, Ints
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Audit,
    Decision,
    Event,
    Finding,
    Incident,
    NodeOutage,
    ProbeOrder,
    RecommendedAction,
)
from drover_core.model.kinds import BOOT_ID


class KeptStore:
    shared = False

    def __init__(self) -> None:
        self.lock = threading.RLock()  # each node's actions have a thread
        self.holder: object = None  # the collector that has the lease
        self.kept_events: dict[str, Event] = {}
        self.judged: set[str] = set()
        self.kept_incidents: dict[str, list[Incident]] = {}
        self.kept_decisions: dict[tuple[str, int, str], Decision] = {}
        self.kept_actions: dict[str, list[Action]] = {}
        self.kept_duties: list[NodeOutage] = []
        self.kept_gpu_outages: list[NodeOutage] = []
        self.kept_approvals: list[Approval] = []
        self.lines: dict[str, Audit] = {}
        self.kept_findings: list[Finding] = []
        self.orders: dict[str, ProbeOrder] = {}
        self.inventory_reports: list[tuple[int, str, Mapping[str, str]]] = []  # inventories
        self.buckets: dict[int, Bucket] = {}
        self.on_decisions: Callable[[Sequence[Decision]], None] = lambda _: None

    # ---- writes

    def write_events(self, events: Iterable[Event]) -> None:
        self.kept_events |= {e.id: e for e in events}

    def write_judged(self, events: Iterable[Event]) -> None:
        self.judged |= {e.id for e in events}

    def write_incidents(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            self.kept_incidents.setdefault(incident.id, []).append(incident)

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        new = [d for d in decisions if (d.id, d.ts_ms, d.outcome) not in self.kept_decisions]
        self.kept_decisions |= {(d.id, d.ts_ms, d.outcome): d for d in new}
        self.on_decisions(new)

    def write_actions(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.kept_actions.setdefault(action.id, []).append(action)

    def write_duties(self, duties: Iterable[NodeOutage]) -> None:
        self.kept_duties += duties

    def write_gpu_outages(self, outages: Iterable[NodeOutage]) -> None:
        self.kept_gpu_outages += outages

    def write_approvals(self, approvals: Iterable[Approval]) -> None:
        self.kept_approvals += approvals

    def write_audit(self, lines: Iterable[Audit]) -> None:
        self.lines |= {line.id: line for line in lines}

    def write_findings(self, findings: Iterable[Finding]) -> None:
        self.kept_findings += findings

    def write_health(self, changes: object) -> None:
        pass

    def write_orders(self, orders: Iterable[ProbeOrder]) -> None:
        for order in orders:
            self.orders.setdefault(order.id, order)  # all that is asked for is the first version

    def write_inventory(self, node: str, ts_ms: int, facts: Mapping[str, str]) -> None:
        self.inventory_reports.append((ts_ms, node, facts))

    # ---- reads

    def fence(self) -> str:
        return ""

    def mark(self, table: str) -> int:  # all that is kept changes by inventories alone
        return len(self.inventory_reports)

    def notes(self) -> list[Audit]:  # nobody notes anything here
        return []

    def silences(self, since_ms: int) -> list[Any]:  # nobody silences anything here
        return []

    def troubles(self, since_ms: int) -> list[Incident]:  # risk acts on nothing
        return []

    def events(self, from_ms: int, to_ms: int, node: str | None = None, limit: int = 500) -> list[Event]:
        found = [e for e in self.kept_events.values() if from_ms <= e.ts_ms < to_ms and node in (None, e.node)]
        return sorted(found, key=lambda e: (e.ts_ms, e.id), reverse=True)[:limit]

    def events_of_code(self, kind: str, code: str, since_ms: int, containing: str = "") -> list[Event]:
        found = [e for e in self.kept_events.values() if (e.kind, e.code) == (kind, code) and containing in e.message]
        return sorted((e for e in found if (e.received_ms or 0) >= since_ms), key=lambda e: (e.received_ms or 0, e.id))

    def events_received(self, node: str, since_ms: int) -> list[Event]:
        found = [e for e in self.kept_events.values() if e.node == node and (e.received_ms or 0) >= since_ms]
        return sorted(found, key=lambda e: (e.received_ms or 0, e.id))

    def unjudged_events(self, now_ms: int, limit: int) -> list[Event]:
        found = [e for e in self.kept_events.values() if e.id not in self.judged]
        return sorted(found, key=lambda e: (e.received_ms or 0, e.id))[:limit]

    def incidents(self, state: str, since_ms: int = 0) -> list[Incident]:
        newest = [max(versions, key=lambda i: (i.version, i.updated_ms)) for versions in self.kept_incidents.values()]
        if state == "open":
            return [i for i in newest if i.closed_ms is None]
        return [i for i in newest if i.closed_ms is not None and i.closed_ms >= since_ms]

    def incident_history(self, incident: str) -> list[Incident]:
        return sorted(self.kept_incidents.get(incident, []), key=lambda i: (i.version, i.updated_ms))

    def findings(self, from_ms: int, to_ms: int, node: str | None = None) -> list[Finding]:
        return [f for f in self.kept_findings if from_ms <= f.ts_ms < to_ms and node in (None, f.node)]

    def decisions(self, incident: str) -> list[Decision]:
        found = [d for d in self.kept_decisions.values() if d.incident_id == incident]
        return sorted(found, key=lambda d: (d.ts_ms, d.id))

    def decisions_of(self, incidents: Iterable[str], since_ms: int) -> list[Decision]:
        these = set(incidents)
        found = [d for d in self.kept_decisions.values() if d.ts_ms >= since_ms or d.incident_id in these]
        return sorted(found, key=lambda d: (d.ts_ms, d.id))

    def unbegun_decisions(self, since_ms: int) -> list[Decision]:
        begun = {a[-1].decision_id for a in self.kept_actions.values()}
        found = [d for d in self.kept_decisions.values() if d.ts_ms >= since_ms and d.id not in begun]
        found = [d for d in found if d.outcome == "act" and d.wanted is not RecommendedAction.PROBE]
        return sorted(found, key=lambda d: (d.ts_ms, d.id))

    def approvals(self, since_ms: int) -> list[Approval]:
        return [a for a in self.kept_approvals if a.ts_ms >= since_ms]

    def audit(self, since_ms: int = 0, subject: str = "", limit: int = 1000, what: str = "") -> list[Audit]:
        found = [line for line in self.lines.values() if what in ("", line.what) and line.ts_ms >= since_ms]
        if subject:
            found = [a for a in found if a.subject == subject or a.subject.startswith(f"{subject} GPU ")]
        return sorted(found, key=lambda line: (-line.ts_ms, line.id))[:limit]

    def actions(
        self, *, node: str = "", incident: str = "", acts: Sequence[Act] = (), since_ms: int = 0, limit: int = 10_000
    ) -> list[Action]:
        kept = [[a for a in versions if a.ts_ms >= since_ms] for versions in self.kept_actions.values()]
        kept = sorted((v for v in kept if v), key=lambda v: min(a.ts_ms for a in v))
        newest = [v[-1] for v in kept]
        return [
            a
            for a in newest
            if node in ("", a.node) and incident in ("", a.incident_id) and (not acts or a.action in acts)
        ][-limit:]

    def intended_actions(self) -> list[Action]:
        return [a for a in self.actions() if a.state is ActionState.INTENDED]

    def action_history(self, action: str) -> list[Action]:
        return self.kept_actions.get(action, [])

    def gpu_outages(self) -> dict[str, NodeOutage]:
        return {outage.gpu.uuid: outage for outage in self.kept_gpu_outages if outage.gpu is not None}

    def gpu_outage_history(self, uuid: str) -> list[NodeOutage]:
        return [outage for outage in self.kept_gpu_outages if outage.gpu is not None and outage.gpu.uuid == uuid]

    def duties(self) -> dict[str, NodeOutage]:
        return {d.node: d for d in self.kept_duties}

    def duty_history(self, node: str, since_ms: int = 0) -> list[NodeOutage]:
        return [d for d in self.kept_duties if d.node == node and d.ts_ms >= since_ms]

    def verdicts(self, **_: object) -> list[Any]:  # nobody stores one here
        return []

    def probe_order(self, id_: str) -> list[ProbeOrder]:
        return [self.orders[id_]] if id_ in self.orders else []

    def inventories(
        self, from_ms: int, to_ms: int, number: int = 0, slices: int = 1
    ) -> list[tuple[int, str, Mapping[str, str]]]:
        assert (number, slices) == (0, 1)
        found = {node: (at, node, facts) for at, node, facts in self.inventory_reports if from_ms <= at < to_ms}
        return list(found.values())

    def boots(self, node: str, since_ms: int) -> list[tuple[int, str]]:
        mine = sorted((at, facts.get(BOOT_ID, "")) for at, name, facts in self.inventory_reports if name == node)
        before = [entry for entry in mine if entry[0] < since_ms][-1:]
        return before + [entry for entry in mine if entry[0] >= since_ms]

    def past_buckets(self, index: FleetIndex, start_ms: int, count: int, *, values: bool = True) -> list[Bucket]:
        del values
        starts = range(start_ms, start_ms + count * BUCKET_MS, BUCKET_MS)
        return [self.buckets.get(at) or empty(index, at) for at in starts]

    def past_holders(self, index: FleetIndex, start_ms: int, count: int) -> list[Bucket]:
        return [empty(index, start_ms + n * BUCKET_MS) for n in range(count)]

    def holders(self, index: FleetIndex, ts_ms: int) -> tuple[Ints, tuple[str, ...]]:  # nobody's job is known
        del ts_ms
        return np.full(index.gpu_count, -1, np.int32), ()


def empty(index: FleetIndex, start_ms: int) -> Bucket:
    gpus, nodes = np.zeros(index.gpu_count, np.int32), np.zeros(index.node_count, np.int32)
    return Bucket(start_ms, BUCKET_MS, {}, {}, gpus, nodes, gpus - 1)


# Part of a store -> its methods, and which of KeptStore's answer for them.
PARTS: Mapping[str, Mapping[str, str]] = {
    "events": {
        "write": "write_events", "write_judged": "write_judged", "read": "events", "received": "events_received",
        "unjudged": "unjudged_events", "of_code": "events_of_code",
    },
    "incidents": {
        "write": "write_incidents", "newest": "incidents", "history": "incident_history", "for_risk": "troubles",
    },
    "findings": {"write": "write_findings", "between": "findings"},
    "decisions": {
        "write": "write_decisions", "of_incident": "decisions", "of_incidents": "decisions_of",
        "without_action": "unbegun_decisions", "write_approvals": "write_approvals", "approvals": "approvals",
    },
    "actions": {
        "write": "write_actions", "newest": "actions", "intended": "intended_actions", "history": "action_history",
    },
    "outages": {"write": "write_duties", "current": "duties", "history": "duty_history"},
    "audit": {"write": "write_audit", "read": "audit", "notes": "notes"},
    "health": {"write": "write_health"},
    "silences": {"newest": "silences"},
    "inventories": {"newest_between": "inventories", "boots": "boots", "write_one": "write_inventory"},
    "jobs": {"at": "holders"},
    "buckets": {"read_past": "past_buckets", "past_jobs": "past_holders"},
}  # fmt: skip


class Part:
    def __init__(self, store: Lease, methods: Mapping[str, str]) -> None:
        self._store = store
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._store.method(self._methods[name])


class Lease:
    """The store as one collector has it: what it writes or does without the lease is refused."""

    def __init__(self, kept: KeptStore) -> None:
        self.kept = kept
        kept.holder = self
        self.dirty_ranges = SimpleNamespace(lag_ms=0, settle_ms=0)
        self.rollups = SimpleNamespace(rolled_up=lambda *_: (0, 0))
        self.probes = SimpleNamespace(
            orders=Part(self, {"versions": "probe_order", "write": "write_orders"}),
            verdicts=Part(self, {"read": "verdicts"}),
        )
        for name, methods in PARTS.items():
            setattr(self, name, Part(self, methods))
        gpus = {"write": "write_gpu_outages", "current": "gpu_outages", "history": "gpu_outage_history"}
        self.outages.gpus = Part(self, gpus)

    def __getattr__(self, name: str) -> Any:
        return self.method({"table_fingerprint": "mark"}.get(name, name))

    def method(self, name: str) -> Any:
        call = getattr(self.kept, name)
        if not callable(call):
            return call
        fenced = name.startswith("write_") or name == "fence"

        def guarded(*args: Any, **more: Any) -> Any:
            with self.kept.lock:
                if fenced and self.kept.holder is not self:
                    raise StoreError("this collector is not the active one any more")
                return call(*args, **more)

        return guarded


def in_memory() -> Store:
    """An empty one for a test of one collector after another, which all have the lease."""
    opened: Any = Lease(KeptStore())
    store: Store = opened
    return store

"""The store in memory that the desk's tests have answers as a real one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Decision,
    Event,
    EventKind,
    GpuRef,
    Health,
    NodeOutage,
    ProbeOrder,
    ProbeReason,
    RecommendedAction,
)
from drover_core.model.kinds import BOOT_ID
from testbed.desks import T0, incident

DRAIN, ISOLATE, PROBE = RecommendedAction.DRAIN, RecommendedAction.ISOLATE, RecommendedAction.PROBE
WHOLE = GpuRef(3, "GPU-a")
ORDER = ProbeOrder("p1", "n1", (), "standard", (), ProbeReason.VALIDATE, "asked", T0)


def decision(id_: str, at_ms: int, outcome: str = "act", wanted: RecommendedAction = DRAIN, of: str = "i1") -> Decision:
    return Decision(id_, of, at_ms, "n1", wanted, "enforce", outcome, "a rule", "why", gpu=WHOLE)


def action(id_: str, at_ms: int, act: Act = Act.DRAIN, **more: Any) -> Action:
    return replace(Action(id_, f"d{id_}", "i1", "n1", act, "slurm", ActionState.INTENDED, at_ms), **more)


def event(id_: str, at_ms: int, received_ms: int, **more: Any) -> Event:
    made = Event(id_, at_ms, "n1", 3, EventKind.XID, "79", "off the bus", "kmsg", received_ms=received_ms)
    return replace(made, **more)


def fill(store: Store) -> None:
    """Versions out of order of time, at one millisecond, of several nodes; some written twice."""
    first, second = action("a", T0 + 5, by="ann", why="fan"), action("b", T0 + 1, Act.ISOLATE, node="n2", gpu=WHOLE)
    store.actions.write([first, second])
    store.actions.write([replace(first, state=ActionState.DONE, detail="no new jobs", ts_ms=T0 + 7)])
    store.actions.write([replace(second, detail="waits"), action("c", T0 + 1, incident_id="i2", decision_id="d3")])
    store.decisions.write([decision("d2", T0 + 2), decision("d1", T0 + 2), decision("d3", T0 + 3)])
    store.decisions.write(
        [decision("d4", T0 + 4, "held"), decision("d5", T0 + 5, wanted=PROBE), decision("d1", T0 + 2)]
    )
    store.decisions.write([decision("d6", T0 - 9, wanted=ISOLATE, of="i2"), decision("d4", T0 + 6)])
    out = NodeOutage("n1", Health.DRAINING, T0, "i1", "xid 79")
    store.outages.write([out, NodeOutage("n2", Health.REPAIR, T0 + 1, "i2", "fell off", returns=2)])
    store.outages.write([replace(out, stage=Health.HEALTHY, ts_ms=T0 - 1, by="ann")])
    gone = NodeOutage("n1", Health.DRAINING, T0, "i1", "a fan", gpu=WHOLE)
    store.outages.gpus.write([gone, replace(gone, stage=Health.DRAINED, ts_ms=T0 + 1)])
    store.events.write(
        [event("e2", T0 + 1, T0 + 5), event("e1", T0 + 2, T0 + 5), event("e3", T0 + 3, T0 + 4, node="n2")]
    )
    store.events.write([event("e4", T0, T0 + 9, code="48", gpu=None), event("e1", T0 + 2, T0 + 5)])
    store.events.write_judged([event("e4", T0, T0 + 9)])
    store.incidents.write([incident("i1"), replace(incident("i1"), version=2, summary="worse")])
    store.incidents.write([incident("i2", closed_ms=T0 + 1)])
    line = Audit("x", T0, "ann", "drain", "n1", "fan", "")
    store.audit.write([line, replace(line, id="w"), replace(line, id="y", ts_ms=T0 + 1, subject="n1 GPU 3"), line])
    store.audit.write([replace(line, id="z", subject="n10", what="resume")])
    for at_ms, boot in ((T0, "A"), (T0 + 9, ""), (T0 + 4, "B")):
        store.inventories.write_one("n1", at_ms, {"driver": "550", **({BOOT_ID: boot} if boot else {})})
    store.probes.orders.write([ORDER])


# What the desk and its tests ask for.
ASKED: dict[str, Callable[[Store], object]] = {
    "actions": lambda s: s.actions.newest(),
    "of a node": lambda s: s.actions.newest(node="n1"),
    "of an incident": lambda s: s.actions.newest(incident="i2"),
    "of an act": lambda s: s.actions.newest(acts=(Act.ISOLATE, Act.ADVISE)),
    "since": lambda s: s.actions.newest(since_ms=T0 + 5),
    "the last one": lambda s: s.actions.newest(limit=1),
    "intended": lambda s: s.actions.intended(),
    "versions": lambda s: [s.actions.history(id_) for id_ in ("a", "b", "none")],
    "without action": lambda s: [s.decisions.without_action(at_ms) for at_ms in (0, T0 + 3)],
    "of incidents": lambda s: [s.decisions.of_incident("i1"), s.decisions.of_incidents(["i2"], T0 + 5)],
    "outages": lambda s: s.outages.current(),
    "of one node": lambda s: [s.outages.history("n1"), s.outages.history("n1", T0)],
    "of GPUs": lambda s: [s.outages.gpus.current(), s.outages.gpus.history("GPU-a")],
    "events": lambda s: [s.events.read(T0, T0 + 3), s.events.read(0, T0 + 9, node="n2")],
    "the newest events": lambda s: s.events.read(0, T0 + 9, limit=2),
    "received": lambda s: [s.events.received("n1", T0), s.events.received("n1", T0 + 6)],
    "of a code": lambda s: [s.events.of_code(EventKind.XID, "79", T0 + at, text) for at in (0, 5) for text in "ox"],
    "unjudged": lambda s: s.events.unjudged(T0 + 10, 100),
    "open incidents": lambda s: s.incidents.newest("open"),
    "of one": lambda s: s.incidents.history("i1"),
    "audit": lambda s: [s.audit.read(), s.audit.read(subject="n1"), s.audit.read(what="resume"), s.audit.read(T0 + 1)],
    "boots": lambda s: [s.inventories.boots("n1", at_ms) for at_ms in (0, T0 + 5, T0 + 20)],
    "orders": lambda s: s.probes.orders.versions("p1")[:1],
}  # fmt: skip


def test_it_answers_as_a_real_store_does(store: Store, kept: Store) -> None:
    for each in (store, kept):
        fill(each)
    differ = {what: (ask(store), ask(kept)) for what, ask in ASKED.items() if ask(store) != ask(kept)}
    assert differ == {}
    assert all(ask(kept) for ask in ASKED.values()), "each asks for something that is there"

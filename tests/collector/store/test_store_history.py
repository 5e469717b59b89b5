"""Events, incidents and the rest: what is written is read, the newest version counts, a resend changes nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from drover_collector.api import export as api_export
from drover_collector.detectors.risk.model import Troubles
from drover_collector.store import OutboxRow, Store
from drover_core.model.events import (
    Absence,
    Decision,
    Event,
    EventKind,
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    Note,
    RecommendedAction,
    Severity,
)
from testbed.fleets import T0, gpu_row


def event(number: int, **fields) -> Event:
    base = Event(
        f"n0/s/{number}", T0 + number, "n0", None, EventKind.XID, "79", "it's \\ gone\n\0é", "kmsg", received_ms=T0
    )
    return replace(base, **fields)


def incident(**fields) -> Incident:
    base = Incident(
        "i1",
        IncidentKind.STRAGGLER,
        "power_cap",
        "gpu",
        "n0",
        3,
        (("n0", 3), ("n1", None)),
        T0,
        T0 - 5000,
        None,
        Severity.WARNING,
        0.5,
        RecommendedAction.PROBE,
        "slow",
        "look",
        (Evidence("x", "power_w", 1.5),),
        (Note(T0, "opened"),),
        ("straggler",),
        updated_ms=T0,
    )
    return replace(base, **fields)


def test_events_come_back_newest_first_and_once(store: Store) -> None:
    events = [event(1), event(2, gpu=3, backlog=True, count=7, clock_suspect=True, forgeable=True), event(3, node="n1")]
    store.events.write(events)
    store.events.write([event(1, received_ms=T0 + 99)])  # a resend
    assert [e.id for e in store.events.read(0, T0 + 10)] == ["n0/s/3", "n0/s/2", "n0/s/1"]
    assert store.events.read(0, T0 + 10)[1] == events[1]
    assert [e.id for e in store.events.read(0, T0 + 10, limit=1)] == ["n0/s/3"]
    assert [e.id for e in store.events.read(0, T0 + 10, "n0", 3)] == ["n0/s/2"]
    assert [e.id for e in store.events.read(T0 + 2, T0 + 3)] == ["n0/s/2"]
    assert store.events.read(0, T0 + 10, "n0' OR 1") == []


def test_events_of_one_moment_are_all_exported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a page of them, each once and in order, a resend among them."""
    monkeypatch.setattr(api_export, "EVENTS_PAGE", 3)
    store.events.write([event(n, ts_ms=T0) for n in range(8)] + [event(8), event(9, node="stranger")])
    store.events.write([event(2, ts_ms=T0, received_ms=T0 + 99)])
    facts = SimpleNamespace(store=store, index=SimpleNamespace(node_number={"n0": 0}))
    found = api_export._events(facts, T0, T0 + 100)  # type: ignore[arg-type]  # it uses nothing else
    assert [e.id for e in found] == [f"n0/s/{n}" for n in range(9)]


def test_an_event_of_a_wrong_clock_is_kept(store: Store) -> None:
    """Its age is counted from its receipt: the clock of a node may say 1970."""
    store.events.write([event(1, ts_ms=5, received_ms=T0)])
    store.clients.command("OPTIMIZE TABLE events FINAL")
    assert [e.ts_ms for e in store.events.read(0, 10)] == [5]


def test_lane_positions_are_never_behind_the_events(store: Store) -> None:
    store.offsets.write({("n0", "s"): {1: 4, 2: 10}, ("n0", "t"): {2: 3}})
    store.offsets.write({("n0", "s"): {1: 5, 2: 9}})  # late: a position does not go back
    store.events.write([event(8), event(6), Event("case-1", T0, "n0", None, EventKind.XID, "1", "")])
    assert store.offsets.read() == {("n0", "s"): {1: 8, 2: 10}, ("n0", "t"): {2: 3}}
    assert store.offsets.read("n0", "t") == {("n0", "t"): {2: 3}}


def test_noted_positions_of_some(store: Store) -> None:
    store.offsets.write({("n0", "s"): {1: 4, 2: 10}, ("n'0\\", "s"): {2: 3}, ("n1", "s"): {2: 1}})
    store.offsets.write({("n0", "s"): {2: 9}})
    asked = [("n0", "s"), ("n'0\\", "s"), ("n2", "s")]
    assert store.offsets.noted(asked) == {("n0", "s"): {1: 4, 2: 10}, ("n'0\\", "s"): {2: 3}}
    assert store.offsets.noted([]) == {}


def test_absences_open_and_closed(store: Store) -> None:
    open_ = Absence("n0", None, "inlet_temp_c", "unsupported", T0)
    gone = Absence("n0", 3, "power_w", "lost", T0, T0 + 500)
    link = Absence("n0", None, "link_up", "error", T0 + 9000, None, "mlx5_0")
    store.absences.write([open_, gone, link])
    store.absences.write([replace(gone, to_ms=None)])  # its beginning, sent again
    assert store.absences.current("n0") == [open_, link] or store.absences.current("n0") == [link, open_]
    assert store.absences.current("n1") == []
    assert set(store.absences.between(T0, T0 + 400)) == {open_, gone}
    assert set(store.absences.between(T0 + 600, T0 + 10_000)) == {open_, link}


def test_incidents_are_versions_and_the_newest_counts(store: Store) -> None:
    first = incident()
    closed = incident(version=2, closed_ms=T0 + 60_000, updated_ms=T0 + 60_000)
    other = incident(id="i2", opened_ms=T0 + 1000)
    store.incidents.write([first, other])
    assert store.incidents.newest("open") == [other, first]
    store.incidents.write([closed])
    assert store.incidents.newest("open") == [other]
    assert store.incidents.newest("closed") == [closed]
    assert store.incidents.newest() == [other, closed]
    assert store.incidents.newest(since_ms=T0 + 60_001) == [other]
    assert store.incidents.history("i1") == [first, closed]
    with pytest.raises(ValueError, match="open, closed or all"):
        store.incidents.newest("shut")


def test_old_versions_of_incidents_go_and_the_newest_of_each_stays(store: Store) -> None:
    """An open incident is stored again every 5 minutes: 60 open ones made 1.56 million rows in 90 days."""
    day = 86_400_000
    lasting = [incident(version=v, updated_ms=T0 + v * 6 * 3_600_000) for v in range(1, 13)]  # three days
    old = [incident(id="i2", version=v, updated_ms=T0 + v, closed_ms=T0 + v if v == 2 else None) for v in (1, 2)]
    store.incidents.write([*lasting, *old])
    store.retention.expire_histories(T0 + 3 * day)
    assert [i.version for i in store.incidents.history("i1")] == [8, 9, 10, 11, 12]  # of the last day
    assert store.incidents.history("i2") == [old[1]]
    assert {i.id: i.version for i in store.incidents.newest()} == {"i1": 12, "i2": 2}
    store.retention.expire_histories(T0 + 30 * day)
    assert store.incidents.newest() == [lasting[-1], old[1]]


def test_decisions_findings_health_inventory(store: Store) -> None:
    decisions = [
        Decision(f"d{n}", "i1", T0 + n, "n0", RecommendedAction.DRAIN, "observe", "would_act", "rule", "why")
        for n in (1, 2)
    ]
    store.decisions.write(decisions[::-1])
    store.decisions.write(decisions)
    assert store.decisions.of_incident("i1") == decisions
    finding = Finding(
        "xid",
        IncidentKind.XID,
        "xid_79",
        "gpu",
        None,
        None,
        (),
        T0,
        T0,
        Severity.INFO,
        1.0,
        RecommendedAction.WATCH,
        "s",
        "a",
    )
    store.findings.write([finding])
    assert store.findings.between(T0, T0 + 1) == [finding]
    changes = [
        {"ts_ms": T0, "node": "n0", "gpu": None, "health": "healthy", "reason": "", "incident_id": None},
        {"ts_ms": T0, "node": "n0", "gpu": 2, "health": "suspect", "reason": "hot", "incident_id": "i1"},
    ]
    store.health.write(changes)
    assert store.health.history("n0", None, T0, T0 + 1) == changes[:1]
    assert store.health.history("n0", 2, T0, T0 + 1) == changes[1:]
    assert store.inventories.newest("n0") == {}
    store.inventories.write_one("n0", T0, {"driver": "1", "no_gpu_reason": "none"})
    store.inventories.write_one("n0", T0 + 1, {"driver": "2"})
    assert store.inventories.newest("n0") == {"driver": "2"}


def test_the_newest_row_of_a_notification_is_its_state(store: Store) -> None:
    row = OutboxRow("m1", "i1", "webhook:ops", '{"a":"é"}', T0)
    store.outbox.write([row, OutboxRow("m2", "i2", "webhook:ops", "{}", T0 + 1)])
    tried = replace(row, attempts=1, next_ms=T0 + 5000, detail="503")
    store.outbox.write(tried)
    assert store.outbox.pending()[0] == tried
    store.outbox.write(replace(tried, state="delivered", attempts=2))
    assert [r.id for r in store.outbox.pending()] == ["m2"]
    assert store.outbox.of_incidents("i1") == [replace(tried, state="delivered", attempts=2)]


def test_troubles_are_what_risk_remembers_of_incidents(store: Store) -> None:
    incidents = [
        incident(),
        incident(version=2, updated_ms=T0 + 5, members=(("n2", 0),)),
        incident(id="i2", opened_ms=T0 + 10, closed_ms=T0 + 20, severity=Severity.CRITICAL),
        incident(id="i3", severity=Severity.INFO),
        incident(id="i4", closed_ms=T0 - 99),
    ]
    store.incidents.write(incidents)
    whole, brief = Troubles(), Troubles()
    whole.take(store.incidents.newest("all", T0), T0 + 30)
    found = store.incidents.for_risk(T0)
    brief.take(found, T0 + 30)
    assert [i.id for i in found] == ["i2", "i1"]
    assert brief == whole
    assert set(brief) == {"n0", "n1", "n2"}
    assert [i.id for i in store.incidents.for_risk(T0, most=1)] == ["i2"]


def test_an_insert_that_is_seen_after_a_later_one_is_taken_in_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a replica, to which other collectors' inserts come in any order."""
    store.entities.refresh()
    for node in (0, 1):  # as another collector writes: this one has not seen them
        with monkeypatch.context() as patch:
            patch.setattr(store.entities.registry, "add", list)
            store.entities.write([gpu_row(node, 0)])
    first = "(SELECT min(min_block_number) FROM system.parts WHERE table = 'entities' AND database = currentDatabase())"
    both = type(store.clients).parts.fget(store.clients)
    with monkeypatch.context() as patch:
        hidden = f"(SELECT * FROM {both} WHERE NOT (table = 'entities' AND min_block_number = {first}))"
        patch.setattr(type(store.clients), "parts", hidden)
        seen = store.entities.refresh(), store.table_fingerprint("entities")
    assert seen[0] == 1
    assert store.table_fingerprint("entities") != seen[1]
    assert store.entities.refresh() == 1
    assert store.entities.refresh() == 0
    assert {row.node for row in store.entities.of_node("n0") + store.entities.of_node("n1")} == {"n0", "n1"}

"""Actions and outages: append-only histories in which the newest version counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from drover_collector.store import OutboxRow, Store, StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Decision,
    Finding,
    Health,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
    Severity,
)

T0 = 1_800_000_000_000


def action(number: int, **changes: object) -> Action:
    made = Action(f"a{number}", f"d{number}", "i1", "n1", Act.DRAIN, "slurm", ActionState.INTENDED, T0 + number)
    return replace(made, **changes)  # type: ignore[arg-type]  # of fields by name


def test_the_newest_version_of_an_action_counts(store: Store) -> None:
    first, second = action(1), action(2, node="n2", incident_id="i2")
    store.actions.write([first, second])
    done = replace(first, state=ActionState.DONE, detail="no new jobs")  # at the same millisecond
    store.actions.write([done])
    assert store.actions.newest() == [done, second]
    assert store.actions.newest(node="n2") == store.actions.newest(incident="i2") == [second]
    assert store.actions.newest(since_ms=T0 + 2) == [second]
    assert store.actions.intended() == [second]
    assert store.actions.history("a1") == [first, done]


def test_decisions_to_act_that_have_no_action(store: Store) -> None:
    made = [
        Decision(f"d{n}", "i1", T0 + n, "n1", RecommendedAction.DRAIN, "enforce", outcome, "rule", "why")
        for n, outcome in enumerate(("act", "act", "held", "would_act"))
    ]
    store.decisions.write(made)
    store.actions.write([action(1)])
    assert store.decisions.without_action(T0) == [made[0]]
    assert store.decisions.without_action(T0 + 1) == []


def test_the_newest_duty_of_a_node_counts(store: Store) -> None:
    out = NodeOutage("n1", Health.DRAINING, T0, "i1", "xid 79")
    back = replace(out, stage=Health.HEALTHY, by="ann")
    other = NodeOutage("n2", Health.REPAIR, T0 + 1, "i2", "fell off", returns=2)
    store.outages.write([out, other])
    store.outages.write([back])
    assert store.outages.current() == {"n1": back, "n2": other}
    assert store.outages.history("n1") == [out, back]
    assert store.outages.history("n3") == []


def test_only_the_active_collector_writes_them(store: Store) -> None:
    def fence() -> str:
        raise StoreError("this collector is not the active one any more")

    store.fence.use(fence)
    with pytest.raises(StoreError, match="not the active one"):
        store.actions.write([action(1)])
    with pytest.raises(StoreError, match="not the active one"):
        store.outages.write([NodeOutage("n1", Health.DRAINING, T0, "i1", "x")])
    store.fence.use(str)
    assert store.actions.newest() == []
    assert store.outages.current() == {}


def synced(store: Store) -> int:
    """How often this process has waited for the disk."""
    found = store.clients.rows("SELECT toInt64(sum(value)) AS n FROM system.events WHERE event LIKE '%Sync'")
    return int(found[0]["n"])


def test_what_is_written_before_an_effect_is_on_the_disk_when_the_call_returns(store: Store) -> None:
    """A drain whose intent a power cut took would be nobody's. Findings are found again, and wait for no disk."""
    decided = Decision("d1", "i1", T0, "n1", RecommendedAction.DRAIN, "enforce", "act", "rule", "why")
    found = Finding(
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
    waits = {}
    writes: dict[str, Callable[[], None]] = {
        "actions": lambda: store.actions.write([action(1)]),
        "duties": lambda: store.outages.write([NodeOutage("n1", Health.DRAINING, T0, "i1", "xid 79")]),
        "decisions": lambda: store.decisions.write([decided]),
        "approvals": lambda: store.decisions.write_approvals([Approval("d1", T0, "jo", True, "spare")]),
        "outbox": lambda: store.outbox.write(OutboxRow("m1", "i1", "chat", "{}", T0)),
        "findings": lambda: store.findings.write([found]),
    }
    for name, write in writes.items():
        before = synced(store)
        write()
        waits[name] = synced(store) > before
    assert waits == dict.fromkeys(waits, True) | {"findings": False}

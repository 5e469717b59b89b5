"""What is found, on its way into the store: in order, once, and to those who act only when it is stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from drover_collector.engine.engine import Outcome
from drover_collector.pipeline import outcome_writer as pipeline_saving
from drover_collector.pipeline.outcome_writer import OutcomeWriter
from drover_collector.pipeline.stats import Ticks
from drover_collector.store import StoreError
from drover_core.model.events import (
    Audit,
    Decision,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from testbed.waiting import wait_until

T0 = 1_800_000_000_000
FOUND = Outcome(
    decisions=(Decision("d1", "inc1", T0, "n1", RecommendedAction.DRAIN, "enforce", "act", "xid", "the rule"),)
)
LINE = Audit("policy 1", T0, "the policy's file", "policy", "ours", "the file has changed")


class Noting:
    """Stands for store and outbox: notes what is written, in order; hangs or fails where it is asked to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.findings_written: list[Finding] = []
        self.fails: set[str] = set()
        self.hangs = ""
        self.hanging, self.free = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return Called(self, name)

    def call(self, name: str, rows: Sequence[object]) -> None:
        if name == self.hangs:
            self.hanging.set()
            self.free.wait(120)
        if name in self.fails:
            raise StoreError("no space left")
        if rows:
            self.done.append(name)
        if name == "findings.write":
            self.findings_written += rows  # type: ignore[arg-type]  # findings.write takes no others


class Called:
    """A method of the outbox, or a part of the store whose methods are called."""

    def __init__(self, noting: Noting, name: str) -> None:
        self._noting, self._name = noting, name

    def __getattr__(self, method: str) -> Any:
        return Called(self._noting, f"{self._name}.{method}")

    def __call__(self, rows: Sequence[object], *_more: object, **_how: object) -> None:
        self._noting.call(self._name, rows)


@pytest.fixture
def store() -> Noting:
    return Noting()


@pytest.fixture
def saving(store: Noting, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutcomeWriter]:
    monkeypatch.setattr(pipeline_saving, "RETRY_S", 0.01)
    outbox: Any = store
    made = OutcomeWriter(outbox, outbox, Ticks(), lambda: T0)
    yield made
    store.free.set()
    made.stop()


def test_who_acts_gets_what_is_stored_and_nothing_else(store: Noting, saving: OutcomeWriter) -> None:
    saving.takers.append(lambda outcome: store.done.append(f"taken {len(outcome.decisions)}"))
    store.fails.add("decisions.write")
    saving.put(FOUND, ())
    assert store.done == []
    store.fails.clear()
    wait_until(lambda: len(saving) == 0, "stored")
    assert store.done == ["decisions.write", "taken 1"]


def test_each_tick_looks_at_what_time_alone_makes_due_when_all_is_stored(store: Noting, saving: OutcomeWriter) -> None:
    incident: Any = object()
    saving.known = lambda: {"i1": incident}
    store.fails.add("decisions.write")
    saving.put(FOUND, ())
    saving.put(Outcome(), ())
    assert store.done == []
    store.fails.clear()
    wait_until(lambda: store.done == ["decisions.write", "sweep"], "looked at, once all is stored")


@pytest.mark.parametrize("way", ["fails", "hangs"])
def test_receivers_that_forget_are_reminded_of_what_is_open_while_nothing_can_be_stored(
    store: Noting, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_saving, "RETRY_S", 0.01)
    monkeypatch.setattr(pipeline_saving, "PATIENCE_S", 0.05)
    clock_ms, one = [T0], object()
    made = OutcomeWriter(store, store, Ticks(), lambda: clock_ms[0])  # type: ignore[arg-type]  # it stands for both
    made.known = lambda: {"i1": one}  # type: ignore[dict-item]  # nothing is asked of it
    store.fails, store.hangs = ({"decisions.write"}, "") if way == "fails" else (set(), "decisions.write")
    try:
        for _ in range(13):  # two minutes of ticks
            made.put(FOUND, ())
            clock_ms[0] += 10_000
        assert store.done == ["repeat"] * 4, "else Alertmanager says that all is over"
    finally:
        store.fails.clear()
        store.free.set()
        made.stop()


def test_one_who_acts_and_cannot_store_its_intent_is_called_again(store: Noting, saving: OutcomeWriter) -> None:
    taken: list[Outcome] = []

    def take(outcome: Outcome) -> None:
        taken.append(outcome)
        if len(taken) < 3:
            raise StoreError("no space left")

    saving.takers.append(take)
    saving.put(FOUND, ())
    wait_until(lambda: len(saving) == 0, "taken")
    assert taken == [FOUND] * 3


def test_a_defect_of_one_who_acts_keeps_it_from_no_other(store: Noting, saving: OutcomeWriter) -> None:
    taken: list[Outcome] = []

    def wrong(_: Outcome) -> None:
        raise KeyError("a bug")

    saving.takers += [wrong, taken.append]
    saving.put(FOUND, ())
    wait_until(lambda: len(saving) == 0, "stored")
    assert taken == [FOUND]
    assert (saving._ticks.failures, saving._ticks.lost_outcomes) == (1, 0)


def test_what_was_forgotten_while_the_store_hung_is_not_acted_on(
    store: Noting, saving: OutcomeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was lost meanwhile, and may be back: the one that judges since then does not know these decisions."""
    monkeypatch.setattr(pipeline_saving, "PATIENCE_S", 0.01)
    taken: list[Outcome] = []
    saving.takers.append(taken.append)
    store.hangs = "incidents.write"
    saving.put(FOUND, ())
    assert store.hanging.wait(120)
    saving.forget()
    store.free.set()
    later = Outcome(decisions=(*FOUND.decisions, *FOUND.decisions))
    saving.put(later, ())
    wait_until(lambda: len(saving) == 0, "the next is stored")
    assert store.done == ["decisions.write"]
    assert taken == [later]


def test_a_line_for_people_waits_for_the_store_and_keeps_nobody_waiting(
    store: Noting, saving: OutcomeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_saving, "PATIENCE_S", 0.01)
    store.hangs = "audit.write"
    saving.put(Outcome(), (), [LINE])
    assert store.hanging.wait(120)
    assert store.done == []
    store.free.set()
    wait_until(lambda: len(saving) == 0, "stored")
    assert store.done == ["audit.write"]


def silent(at_ms: int, **more: Any) -> Finding:
    said: dict[str, Any] = {
        "members": (("n1", None),), "severity": Severity.CRITICAL, "confidence": 0.9, "action": RecommendedAction.DRAIN,
        "summary": f"Node n1 has been silent for {at_ms - T0} ms.", "advice": "look at it",
    }  # fmt: skip
    return Finding(
        "liveness", IncidentKind.LIVENESS, "silent", "node", "n1", None, ts_ms=at_ms, since_ms=T0, **said | more
    )


def stored(store: Noting, saving: OutcomeWriter, *findings: Finding) -> list[Finding]:
    store.findings_written.clear()
    saving.put(Outcome(findings=findings), ())
    wait_until(lambda: len(saving) == 0, "stored")
    return list(store.findings_written)


def test_a_condition_that_lasts_is_stored_when_it_changes_and_every_5_minutes(
    store: Noting, saving: OutcomeWriter
) -> None:
    """One row for each bucket would be 173 million rows in 400 days, of 50 conditions that last."""
    times = [T0 + 10_000 * n for n in range(1, 61)]
    assert [f.ts_ms for t in times for f in stored(store, saving, silent(t))] == [T0 + 10_000, T0 + 310_000]
    worse = silent(T0 + 610_000, severity=Severity.WARNING)
    assert stored(store, saving, worse) == [worse]
    other = silent(T0 + 611_000, members=(("n1", None), ("n2", None)))
    assert stored(store, saving, other, worse) == [other]
    over = silent(T0 + 612_000, cleared=True, severity=Severity.WARNING)
    assert stored(store, saving, over) == [over]
    assert stored(store, saving, worse) == [worse], "it began again"
    back = silent(T0, severity=Severity.WARNING)
    assert stored(store, saving, back) == [back], "a clock that was set back is no repetition"


def test_of_a_node_that_is_validated_every_finding_is_stored(store: Noting, saving: OutcomeWriter) -> None:
    saving.watched = lambda: {"n1"}
    times = [T0 + 10_000 * n for n in range(1, 4)]
    assert [f.ts_ms for t in times for f in stored(store, saving, silent(t))] == times


def test_a_finding_that_the_store_refused_is_stored_when_it_takes_it(store: Noting, saving: OutcomeWriter) -> None:
    store.fails.add("health.write")  # after the findings
    found = silent(T0)
    saving.put(Outcome(findings=(found,)), ())
    assert store.findings_written
    store.fails = {"findings.write"}
    later = silent(T0 + 1, severity=Severity.WARNING)
    store.findings_written.clear()
    saving.put(Outcome(findings=(later,)), ())
    assert store.findings_written == []
    store.fails.clear()
    wait_until(lambda: len(saving) == 0, "stored")
    assert store.findings_written == [later]

"""Silences through API, pipeline and store: who, why, until when, and the same after a restart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.api import (
    actions as api_actions,
)
from drover_collector.api import (
    decisions as api_decisions,
)
from drover_collector.api import (
    incidents as api_incidents,
)
from drover_collector.api import (
    silences as api_silences,
)
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox, OutboxOptions
from drover_collector.notify.maintenance_windows import MaintenanceConfig
from drover_collector.notify.silences import Silences
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.store import Store
from drover_core.model.events import (
    Decision,
    Event,
    EventKind,
    Silence,
    from_json,
)
from drover_proto import fleet_pb2 as pb
from testbed.deciding import fleet, policy
from testbed.outboxes import HOUR_MS, T0, Listener
from testbed.waiting import wait_until

INDEX = fleet(8)  # racks r0 and r1, one leaf and pool
NIGHTLY = MaintenanceConfig(
    "nightly", "patches", ("friday", "saturday"), "08:00", 2.0, node=("n007",)
)  # T0 is a Friday, 08:00  # fmt: skip


class Fleet:
    """A pipeline in enforce mode over a store, with one receiver."""

    def __init__(self, store: Store, windows: tuple[MaintenanceConfig, ...] = ()) -> None:
        self.now_ms, self.store, self.listener = T0, store, Listener()
        outbox = Outbox(
            store, [self.listener], "http://console",
            OutboxOptions(silences=Silences(INDEX.spec.by_name, windows)), now_ms=lambda: self.now_ms,
        )  # fmt: skip
        self.pipeline = Pipeline(
            INDEX,
            store,
            policy("enforce"),
            outbox,
            PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce"),
        )
        self.facts = ApiSnapshot(self.pipeline, IngestStats(), CollectorConfig())

    def start(self) -> Fleet:
        self.pipeline._restore()
        self.pipeline.leading = True
        return self

    def stop(self) -> None:
        self.pipeline.saving.stop()
        self.pipeline.outbox.stop()

    def fault(self, node: str, number: int = 1) -> str:
        """An XID 79; the id of its incident."""
        self.now_ms += 1000
        event = Event(f"{node}/{number}", self.now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=self.now_ms)
        self.store.events.write([event])
        self.pipeline.take_events([event])
        self.pipeline.judge_events()
        return next(i.id for i in self.facts.open_incidents() if i.node == node)

    def ask(self, by: str = "anna", **more: Any) -> Silence:
        request = pb.SilenceAsk(**({"hours": 2, "why": " new  firmware "} | more))
        return from_json(Silence, api_silences.create_silence(self.facts, request, by).silence_json)

    def listed(self, since_ms: int = 0) -> list[Silence]:
        reply = api_silences.list_silences(self.facts, pb.SilencesRequest(since_ms=since_ms), True)
        return [from_json(Silence, text) for text in reply.silences_json]

    def decisions(self, incident: str) -> list[tuple[str, str]]:
        return [(d.outcome, d.reason) for d in self.store.decisions.of_incident(incident)]


@pytest.fixture(scope="module")
def opened(store_root: Path) -> Iterator[Store]:
    store = Store.open(f"chdb://{store_root}?database=silences")
    yield store
    store.close()


@pytest.fixture
def subject(opened: Store) -> Iterator[Fleet]:
    for table in ("events", "judged_events", "incidents", "decisions", "audit", "silences", "outbox", "health"):
        opened.clients.command(f"TRUNCATE TABLE {table}")
    made = Fleet(opened).start()
    yield made
    made.stop()


def test_a_silenced_incident_is_found_decided_and_shown_and_nobody_is_notified(subject: Fleet) -> None:
    made = subject.ask(rack=["r0"])
    silenced, other = subject.fault("n001"), subject.fault("n005")
    wait_until(lambda: subject.listener.received(other) == ["opened"], "the other is sent")
    assert subject.listener.received(silenced) == []
    assert [outcome for outcome, _ in subject.decisions(silenced)] == ["act"], "only messages are muted"
    text = "silenced by anna until 2027-01-15T10:00:00Z: new firmware"
    assert api_incidents.get_incident(subject.facts, pb.IncidentRequest(id=silenced)).silenced == text
    listed = api_incidents.list_incidents(subject.facts, pb.ListIncidentsRequest())
    assert dict(listed.silenced) == {silenced: text}
    note = pb.SilenceNote(id=made.id, by="anna", until_ms=T0 + 2 * HOUR_MS, why="new firmware", covers="rack r0")
    assert dict(listed.silences) == {silenced: note}
    assert api_incidents.get_incident(subject.facts, pb.IncidentRequest(id=silenced)).silence == note
    assert not api_incidents.get_incident(subject.facts, pb.IncidentRequest(id=other)).HasField("silence")
    (line,) = subject.store.audit.read(what="silence")
    assert (line.by, line.what, line.subject, line.why) == ("anna", "silence", made.id, "new firmware")
    assert line.detail.startswith("rack r0 from 2027-01-15T08:00:00Z until 2027-01-15T10:00:00Z")


def test_when_it_is_over_what_is_left_is_sent_also_after_a_restart(subject: Fleet, opened: Store) -> None:
    subject.ask(node=["n001"])
    id_ = subject.fault("n001")
    subject.stop()
    again = Fleet(opened)
    again.now_ms = subject.now_ms
    again.start()
    try:
        assert [s.node for s in again.listed()] == [("n001",)]
        again.pipeline.saving._sweep()
        again.fault("n005")
        wait_until(lambda: len(again.listener.got) == 1, "another is notified")
        again.now_ms += 3 * HOUR_MS
        again.pipeline.saving._sweep()
        wait_until(lambda: again.listener.received(id_) == ["opened"], "sent when the silence is over")
    finally:
        again.stop()


def test_one_is_ended_with_a_reason(subject: Fleet) -> None:
    id_ = subject.fault("n001", 1)
    made = subject.ask(incident=[id_[:6]])
    assert made.incident == (id_,)
    subject.now_ms += 1000
    reply = api_silences.end_silence(subject.facts, pb.SilenceEnd(id=made.id[:5], why="done"), "bo")
    ended = from_json(Silence, reply.silence_json)
    assert (ended.ended_by, ended.until_ms, reply.covers) == ("bo", subject.now_ms, 1)
    assert subject.listed() == []
    assert subject.listed(since_ms=T0) == [ended]
    assert [(a.what, a.by, a.why, a.subject) for a in subject.store.audit.read(subject=id_)] == [
        ("unsilence", "bo", "done", id_), ("silence", "anna", "new firmware", id_),
    ]  # fmt: skip
    with pytest.raises(RefusalError, match="no silence"):
        api_silences.end_silence(subject.facts, pb.SilenceEnd(id=made.id, why="again"), "bo")


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        ({}, "INVALID_ARGUMENT", "say what is to be silent"),
        ({"node": ["n001"], "hours": 0}, "INVALID_ARGUMENT", r"to 168 hours \(notify.max_silence_h\), not 0"),
        ({"node": ["n001"], "hours": 169}, "INVALID_ARGUMENT", "to 168 hours"),
        ({"node": ["n001"], "hours": float("nan")}, "INVALID_ARGUMENT", "to 168 hours"),
        ({"node": ["n001"], "hours": float("inf")}, "INVALID_ARGUMENT", "to 168 hours"),
        ({"node": ["n001"], "why": "  "}, "INVALID_ARGUMENT", "why is empty"),
        ({"node": ["n001"], "why": "w" * 501}, "INVALID_ARGUMENT", "at most 500"),
        ({"node": ["n001"], "from_ms": T0 - HOUR_MS}, "INVALID_ARGUMENT", "it cannot begin at 2027-01-15T07"),
        ({"node": ["n001"], "from_ms": T0 + 91 * 24 * HOUR_MS}, "INVALID_ARGUMENT", "at most 90 days ahead"),
        ({"node": ["n999"]}, "NOT_FOUND", "no node 'n999' in the fleet file"),
        ({"rack": ["r0", "r9"]}, "NOT_FOUND", "no rack 'r9'"),
        ({"kind": ["heat"]}, "INVALID_ARGUMENT", "kind 'heat': give one of"),
        ({"incident": ["0abc"]}, "NOT_FOUND", "no incident '0abc'"),
        ({"kind": ["xid"], "node": ["n001"], "maintenance": True}, "INVALID_ARGUMENT", "is of whole nodes"),
    ],
)
def test_what_cannot_be_silenced_says_why(subject: Fleet, request_: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(RefusalError, match=says) as caught:
        subject.ask(**request_)
    assert caught.value.code is getattr(grpc.StatusCode, code)
    assert subject.listed() == []


def test_one_that_stands_by_silences_nothing_but_shows_what_is_silenced(subject: Fleet) -> None:
    made = subject.ask(node=["n001"])
    subject.pipeline.leading = False
    subject.pipeline.outbox.silences.load([])
    assert subject.listed() == [made]
    with pytest.raises(RefusalError, match="active one"):
        subject.ask(node=["n002"])
    with pytest.raises(RefusalError, match="active one"):
        api_silences.end_silence(subject.facts, pb.SilenceEnd(id=made.id, why="w"), "bo")


def test_maintenance_holds_actions_back_and_says_so_until_it_is_over(subject: Fleet) -> None:
    subject.pipeline.engine._from_before = False  # as after its first bucket: until then an event decides its own only
    made = subject.ask(rack=["r0"], maintenance=True)
    held, other = subject.fault("n001"), subject.fault("n005")
    why = "maintenance window: by anna until 2027-01-15T10:00:00Z: new firmware"
    assert subject.decisions(held) == [("held", why)]
    assert [outcome for outcome, _ in subject.decisions(other)] == ["act"]
    assert [line.what for line in subject.store.audit.read(subject=made.id)] == ["maintenance"]
    looks = {
        node: api_actions.preview_act(subject.facts, pb.ActRequest(node=node, act="drain"), True)
        for node in ("n001", "n005")
    }
    assert {node: look.maintenance for node, look in looks.items()} == {"n001": why, "n005": ""}
    assert not any(look.no_force for look in looks.values())
    assert api_actions.preview_act(subject.facts, pb.ActRequest(node="n005", act="drain"), True, False).no_force
    assert [from_json(Decision, text).reason for text in api_decisions.get_policy(subject.facts, True).held_json] == [
        why
    ]
    subject.now_ms += 1000
    api_silences.end_silence(subject.facts, pb.SilenceEnd(id=made.id, why="done"), "bo")
    subject.fault("n006", 2)
    assert [outcome for outcome, _ in subject.decisions(held)] == ["held", "act"]


def test_a_window_of_the_settings_holds_from_the_start_and_can_be_ended(opened: Store, subject: Fleet) -> None:
    subject.stop()
    windowed = Fleet(opened, (NIGHTLY,)).start()
    try:
        (window,) = windowed.listed()
        assert (window.id, window.by, window.maintenance) == (
            "nightly-2027-01-15T08:00", "maintenance nightly", True,
        )  # fmt: skip
        id_ = windowed.fault("n007")
        assert [outcome for outcome, _ in windowed.decisions(id_)] == ["held"]
        windowed.now_ms += 1000
        api_silences.end_silence(windowed.facts, pb.SilenceEnd(id=window.id, why="all is up"), "bo")
        assert windowed.listed() == []
        again = Fleet(opened, (NIGHTLY,))
        again.now_ms = windowed.now_ms + 1000
        again.pipeline._follow()
        assert again.pipeline.outbox.silences.known(again.now_ms) == [], "also after a restart"
    finally:
        windowed.stop()


@pytest.mark.parametrize(
    ("why", "forces", "says"),
    [
        ("broken fan", True, "this collector only observes; set act.mode"),
        (" ", True, "say why"),
        ("broken fan", False, "by force acts whose certificate has a name drover://admin/NAME"),
    ],
)
def test_what_a_person_asked_for_and_was_refused_is_in_the_audit(
    subject: Fleet, why: str, forces: bool, says: str
) -> None:
    request = pb.ActRequest(node="n001", act="drain", why=why, force=True)
    with pytest.raises(RefusalError, match=says):
        api_actions.act_on_node(subject.facts, request, "anna", forces)
    (line,) = subject.store.audit.read(subject="n001")
    assert (line.by, line.what, line.why) == ("anna", "drain (refused)", why.strip())
    assert line.detail.startswith(f"forced: {says}")


def test_stored_silences_come_back_in_their_newest_version(opened: Store, subject: Fleet) -> None:
    one = Silence("s1", T0, T0, T0 + HOUR_MS, "anna", "w", node=("n001",), gpu=(3,), kind=("xid",))
    opened.silences.write([one, replace(one, id="s2", until_ms=T0 + 9 * HOUR_MS)])
    opened.silences.write([replace(one, until_ms=T0 + 1, ended_by="bo")])
    assert {s.id: (s.until_ms - T0, s.ended_by) for s in opened.silences.newest(T0)} == {
        "s1": (1, "bo"), "s2": (9 * HOUR_MS, ""),
    }  # fmt: skip
    assert [s.id for s in opened.silences.newest(T0 + 2 * HOUR_MS)] == ["s2"]
    assert opened.silences.newest(T0)[-1].gpu == (3,)


def report(subject: Fleet, *nodes: str, **more: Any) -> Silence:
    hours = more.pop("hours", 2)
    asked: dict[str, Any] = {
        "until_ms": subject.now_ms + round(hours * HOUR_MS),
        "why": "host",
        "source": "aws",
        "id": "i-1",
    }
    request = pb.MaintenanceReport(node=nodes, **(asked | more))
    return from_json(Silence, api_silences.report_maintenance(subject.facts, request, "hook").silence_json)


def test_reported_work_holds_its_node_is_changed_and_ended_by_its_source_and_survives_a_restart(
    subject: Fleet, opened: Store
) -> None:
    before = subject.fault("n002")
    made = report(subject, "n001", "n001")
    assert (made.node, made.event, made.by, made.maintenance) == (("n001",), "aws:i-1", "hook (aws)", True)
    fault = subject.fault("n001")
    assert [(o, "hook (aws)" in why) for o, why in subject.decisions(fault)] == [("held", True)]
    assert [outcome for outcome, _ in subject.decisions(before)] != ["held"]
    again = report(subject, "n001", hours=3)
    assert (again.id, again.from_ms, again.until_ms - again.from_ms > 2.5 * HOUR_MS) == (made.id, made.from_ms, True)
    subject.stop()
    other = Fleet(opened).start()
    other.now_ms = subject.now_ms
    assert sorted(other.pipeline.outbox.silences.held(other.now_ms)) == ["n001"]
    other.now_ms += 1000
    over = report(other, over=True)
    assert (over.ended_by, dict(other.pipeline.outbox.silences.held(other.now_ms))) == ("hook", {})
    assert [line.what for line in opened.audit.read(limit=1)] == ["maintenance over"]
    other.stop()
    subject.start()


@pytest.mark.parametrize(
    ("nodes", "more", "said"),
    [
        (["n001", "n002"], {}, "refused: with it 2 nodes would be in planned work at a time; at most 1 of 8 may"),
        ([f"n{n:03d}" for n in range(8)], {}, "refused: with it 8 nodes"),
        (["n099"], {}, "no node 'n099' in the fleet file"),
        ([], {}, "it names 0 nodes"),
        (["n001"], {"hours": 100}, "it lasts 100 hours"),
        (["n001"], {"hours": -1}, "it must end after now"),
        (["n001"], {"why": " "}, "why is empty"),
        (["n001"], {"source": "kubernetes"}, "source 'kubernetes'"),
        (["n001"], {"source": "a b"}, "source 'a b'"),
        (["n001"], {"id": ""}, "id has 0 characters"),
        (["n001"], {"id": "i\x1b[2J"}, "cannot be printed"),
        ([], {"over": True, "id": "other"}, "no work 'other' of aws"),
    ],
)
def test_reported_work_that_is_wrong_or_covers_too_much_is_refused(
    subject: Fleet, nodes: list[str], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusalError, match=re.escape(said)):
        report(subject, *nodes, **more)
    assert subject.listed() == []


def test_several_reports_together_cover_no_more_than_one(subject: Fleet) -> None:
    report(subject, "n001")
    with pytest.raises(RefusalError, match="with it 2 nodes"):
        report(subject, "n002", id="i-2")
    report(subject, "n002", id="i-2", from_ms=subject.now_ms + 2 * HOUR_MS, until_ms=subject.now_ms + 3 * HOUR_MS)


def test_a_report_that_comes_late_hides_nothing_of_before(subject: Fleet) -> None:
    made = report(subject, "n001", from_ms=subject.now_ms - 10 * HOUR_MS)
    assert made.from_ms == subject.now_ms


def test_work_under_way_takes_in_no_node_that_was_sick_before(subject: Fleet) -> None:
    report(subject, "n001")
    subject.now_ms += HOUR_MS
    with pytest.raises(RefusalError, match="under way without 'n002'"):
        report(subject, "n002")
    assert sorted(subject.pipeline.outbox.silences.held(subject.now_ms)) == ["n001"]


def test_reports_are_counted(subject: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_silences, "MOST_ACTIVE", 2)
    report(subject, "n001", id="a")
    report(subject, "n001", id="b")
    with pytest.raises(RefusalError, match="2 silences are in force"):
        report(subject, "n001", id="c")
    report(subject, "n001", id="b", hours=1)

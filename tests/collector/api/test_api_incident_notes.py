"""What people note on an incident through API and store: shown, audited, kept over a restart, and no page again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.api import incident_notes, incidents
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.config import CollectorConfig
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox, OutboxOptions
from drover_collector.notify.routes import RouteConfig, Routes
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.store import Store
from drover_core.model.events import Event, EventKind, Note, NoteKind, Severity
from drover_core.model.incident_notes import NOBODY, Handling
from drover_proto import fleet_pb2 as pb
from testbed.deciding import fleet, policy
from testbed.outboxes import HOUR_MS, T0, Listener

INDEX = fleet(4)


class Fleet:
    """A pipeline over a store, with a receiver that a route pages again each hour."""

    def __init__(self, store: Store) -> None:
        self.now_ms, self.store, self.listener = T0, store, Listener()
        routes = Routes([self.listener], (RouteConfig((self.listener.name,), repeat_h=1),))
        outbox = Outbox(
            store, [self.listener], "http://console", OutboxOptions(routes=routes), now_ms=lambda: self.now_ms
        )
        options = PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms)
        self.pipeline = Pipeline(INDEX, store, policy("observe"), outbox, options)
        self.facts = ApiSnapshot(self.pipeline, IngestStats(), CollectorConfig())
        self.pipeline._restore()
        self.pipeline.leading = True

    def fault(self, node: str, number: int = 1) -> str:
        """An XID 79; the id of its incident."""
        self.now_ms += 1000
        event = Event(f"{node}/{number}", self.now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=self.now_ms)
        self.store.events.write([event])
        self.pipeline.take_events([event])
        self.pipeline.judge_events()
        return next(i.id for i in self.facts.open_incidents() if i.node == node)

    def note(self, id_: str, act: str, by: str = "alex", **more: Any) -> pb.IncidentHandling:
        request = pb.IncidentNoteAsk(id=id_, act=act, **more)
        return incident_notes.note_incident(self.facts, request, by).handling

    def listed(self, **more: Any) -> pb.IncidentList:
        return incidents.list_incidents(self.facts, pb.ListIncidentsRequest(**more))

    def sweep(self) -> int:
        return self.pipeline.outbox.sweep(self.pipeline.incidents)

    def stop(self) -> None:
        self.pipeline.saving.stop()
        self.pipeline.outbox.stop()


@pytest.fixture(scope="module")
def opened(store_root: Path) -> Iterator[Store]:
    store = Store.open(f"chdb://{store_root}?database=notes")
    yield store
    store.close()


@pytest.fixture
def subject(opened: Store) -> Iterator[Fleet]:
    for table in ("events", "judged_events", "incidents", "decisions", "audit", "outbox", "health"):
        opened.clients.command(f"TRUNCATE TABLE {table}")
    made = Fleet(opened)
    yield made
    made.stop()


def test_notes_are_shown_in_list_and_detail_audited_and_there_after_a_restart(subject: Fleet) -> None:
    first, second = subject.fault("n001"), subject.fault("n002")
    subject.note(first, "acknowledge", text="on it")
    subject.note(first, "assign", value="bo")
    subject.note(first, "ticket", value="https://tickets/OPS-4711")
    subject.note(first, "comment", text="**board** ordered\nsecond line")
    said = subject.note(first, "outcome", value="fault")
    assert said == pb.IncidentHandling(
        acknowledged_by="alex", acknowledged_ms=said.acknowledged_ms, assignee="bo",
        tickets=["https://tickets/OPS-4711"], outcome="fault", outcome_by="alex",
    )  # fmt: skip
    subject.stop()
    again = Fleet(subject.store)
    assert dict(again.listed().handling) == {first: said}
    assert incidents.get_incident(again.facts, pb.IncidentRequest(id=first)).handling == said
    lines = subject.store.audit.read(subject=first)
    assert [(a.what, a.by) for a in reversed(lines)] == [
        (act, "alex") for act in ("acknowledge", "assign", "ticket", "comment", "outcome")
    ]
    assert lines[1].why == "**board** ordered\nsecond line"
    assert not incidents.get_incident(again.facts, pb.IncidentRequest(id=second)).HasField("handling")
    again.stop()


def test_of_two_notes_at_once_both_hold(subject: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    id_, write, others = subject.fault("n001"), subject.store.audit.write, list[threading.Thread]()

    def slow(lines: Any) -> None:
        if not others:  # the first: another person's note comes while it is written
            others.append(threading.Thread(target=subject.note, args=(id_, "comment"), kwargs={"text": "me too"}))
            others[0].start()
            others[0].join(0.5)
        write(lines)

    monkeypatch.setattr(subject.store.audit, "write", slow)
    subject.note(id_, "assign", value="bo")
    others[0].join(10)
    assert subject.listed().handling[id_].assignee == "bo"
    assert [line.what for line in subject.store.audit.read(subject=id_)] == ["comment", "assign"]


def test_what_somebody_acknowledged_is_not_paged_again(subject: Fleet) -> None:
    known, unknown = subject.fault("n001"), subject.fault("n002")
    subject.note(known, "acknowledge")
    subject.now_ms += HOUR_MS
    assert subject.sweep() == 1
    subject.note(known, "unacknowledge")
    subject.now_ms += HOUR_MS
    assert subject.sweep() == 2
    kinds = [
        (row.incident_id, row.payload_json.count('"incident.repeated"'))
        for row in subject.store.outbox.of_incidents(known, unknown)
    ]
    assert sorted(kinds) == sorted([(known, 0), (known, 1), (unknown, 0), (unknown, 1), (unknown, 1)])


def test_an_acknowledgement_ends_when_it_comes_back_or_gets_worse(subject: Fleet) -> None:
    id_ = subject.fault("n001")
    incident = subject.pipeline.incidents[id_]
    handling = Handling("alex", subject.now_ms, Severity.WARNING)
    assert not NOBODY.holds(incident)
    assert not handling.holds(incident), "it was a warning"
    assert handling.holds(replace(incident, severity=Severity.WARNING))
    back = Note(subject.now_ms + 1, "came back", NoteKind.CAME_BACK)
    warning = replace(incident, severity=Severity.WARNING, timeline=(*incident.timeline, back))
    assert not handling.holds(warning)


def test_the_list_is_filtered_and_sorted(subject: Fleet) -> None:
    first, second = subject.fault("n001"), subject.fault("n002")
    subject.note(first, "acknowledge")
    subject.note(second, "assign", value="zoe")

    def ids(**more: Any) -> list[str]:
        return [
            id_ for id_ in (first, second) if any(f'"{id_}"' in text for text in subject.listed(**more).incidents_json)
        ]

    assert ids(acknowledged="only") == [first]
    assert ids(acknowledged="no") == [second]
    assert ids(assignee="zoe") == ids(text="ZOE") == ids(text="n002") == [second]
    assert ids(kind="xid", rack=INDEX.spec.by_name["n001"].rack) == [first, second]
    assert ids(kind="thermal") == ids(job="812") == ids(rack="elsewhere") == []
    assert first in subject.listed(sort="oldest").incidents_json[0]
    assert second in subject.listed(sort="newest").incidents_json[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"act": "close"}, "give one of acknowledge"), ({"act": "comment", "text": "  "}, "the comment is empty"),
        ({"act": "ticket"}, "give the ticket"), ({"act": "outcome", "value": "maybe"}, "give fault or false_alarm"),
        ({"act": "assign", "value": "x" * 301}, "at most 300"),
        ({"act": "comment", "text": "x" * 2001}, "at most 2000"),
    ],
)  # fmt: skip
def test_what_cannot_be_noted_is_refused_and_changes_nothing(subject: Fleet, more: dict[str, str], said: str) -> None:
    id_ = subject.fault("n001")
    with pytest.raises(RefusalError, match=said):
        subject.note(id_, **more)
    assert subject.store.audit.read(subject=id_) == []


def test_a_standby_takes_no_note_and_shows_those_of_the_active_one(subject: Fleet) -> None:
    id_ = subject.fault("n001")
    subject.note(id_, "assign", value="bo")
    subject.pipeline.leading = False
    subject.pipeline.outbox.notes.load([])
    assert subject.listed().handling[id_].assignee == "bo"
    with pytest.raises(RefusalError, match="stands by") as refused:
        subject.note(id_, "acknowledge")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_similar_ones_say_what_was_done_and_whether_it_came_back(subject: Fleet) -> None:
    past = subject.fault("n001")
    elsewhere = subject.fault("n002")
    subject.note(past, "outcome", value="false_alarm")
    closed = [replace(i, closed_ms=subject.now_ms + HOUR_MS, version=9) for i in subject.facts.open_incidents()]
    now = replace(closed[0], id="e0", opened_ms=subject.now_ms + 2 * HOUR_MS, closed_ms=None)
    subject.store.incidents.write([*closed, now])
    subject.pipeline.incidents = {}
    found = incident_notes.list_similar(subject.facts, pb.SimilarRequest(id="e0"))
    here, there = found.incidents
    assert (here.id, here.same, here.outcome, here.again_ms) == (past, "gpu", "false_alarm", now.opened_ms)
    assert (there.id, there.same, there.outcome, there.again_ms) == (elsewhere, "cause", "", 0)
    assert found.total == 2

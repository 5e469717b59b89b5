"""Answers of people through API, pipeline and store: who, why, once, and the same after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.api import (
    decisions as api_decisions,
)
from drover_collector.api import (
    incidents as api_incidents,
)
from drover_collector.api import (
    nodes as api_nodes,
)
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.auth.identity import Identity, Role
from drover_collector.config import CollectorConfig
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox
from drover_collector.pipeline import outcome_writer as pipeline_saving
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Rule
from drover_collector.policy.reload import PolicyWatch
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Approval,
    Audit,
    Decision,
    Event,
    EventKind,
    Health,
    NodeOutage,
    Withheld,
    from_json,
)
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb
from testbed.deciding import fleet, policy

T0 = 1_800_000_000_000
ANNA = Identity(Role.OPERATOR, "anna")


class Fleet:
    """A pipeline in approve mode over a store, at T0 and later."""

    def __init__(self, store: Store, watch: PolicyWatch | None = None) -> None:
        self.now_ms, self.store = T0, store
        outbox = Outbox(store, [], "http://console", now_ms=lambda: self.now_ms)
        self.pipeline = Pipeline(
            fleet(8), store, policy("approve"), outbox,
            PipelineOptions(lag_ms=7000, now_ms=lambda: self.now_ms, ceiling="enforce",
            watch=watch),
        )  # fmt: skip
        self.pipeline.leading = True
        self.facts = ApiSnapshot(self.pipeline, IngestStats(), CollectorConfig())

    def fault(self, node: str, number: int) -> Decision:
        """An XID 79 that is asked about."""
        self.now_ms += 1000
        event = Event(f"{node}/{number}", self.now_ms, node, 0, EventKind.XID, "79", "gone", received_ms=self.now_ms)
        self.store.events.write([event])
        self.pipeline.take_events([event])
        self.pipeline.judge_events()
        (asked,) = [d for d in api_decisions.pending(self.facts) if d.node == node]
        return asked

    def answer(self, decision: str, why: str, yes: bool = True, who: str = "") -> list[Decision]:
        by = api_decisions.named(ANNA, who)
        reply = api_decisions.answer(self.facts, pb.Answer(decision=decision, why=why), yes, by)
        return [from_json(Decision, text) for text in reply.decisions_json]

    def listed(self, outcome: str = "") -> list[Decision]:
        reply = api_decisions.list_decisions(self.facts, pb.DecisionsRequest(outcome=outcome, since_ms=1), True)
        return [from_json(Decision, text) for text in reply.decisions_json]


@pytest.fixture(scope="module")
def opened(store_root: Path) -> Iterator[Store]:
    store = Store.open(f"chdb://{store_root}?database=decisions")
    yield store
    store.close()


@pytest.fixture
def subject(opened: Store) -> Fleet:
    for table in ("events", "judged_events", "incidents", "decisions", "approvals", "audit", "duties", "actions"):
        opened.clients.command(f"TRUNCATE TABLE {table}")
    return Fleet(opened)


def test_a_person_approves_and_all_of_it_is_stored_with_name_and_reason(subject: Fleet) -> None:
    asked, other = subject.fault("n001", 1), subject.fault("n005", 2)
    made = subject.answer(asked.id[:8], " seen  the log ", who="Bo")
    assert [d.outcome for d in made] == ["approved", "act"]
    assert all("Bo (anna): seen the log" in d.reason for d in made)
    assert [d.outcome for d in subject.listed()] == ["pending_approval", "act", "approved"]
    assert [d.id for d in subject.listed("pending_approval")] == [other.id]
    (approval,) = subject.store.decisions.approvals()
    assert (approval.decision_id, approval.approved, approval.by) == (asked.id, True, "Bo (anna)")
    detail = api_incidents.get_incident(subject.facts, pb.IncidentRequest(id=asked.incident_id), True)
    (line,) = [from_json(Audit, text) for text in detail.audit_json]
    assert (line.what, line.why, line.by) == ("approve", "seen the log", "Bo (anna)")
    assert len(detail.decisions_json) == 3


@pytest.mark.parametrize(
    ("decision", "why", "code", "says"),
    [
        ("?", "w", grpc.StatusCode.INVALID_ARGUMENT, "no decision id"),
        ("", "w", grpc.StatusCode.INVALID_ARGUMENT, "no decision id"),
        ("abcdef0123456789", "w", grpc.StatusCode.NOT_FOUND, "drover decisions"),
        ("asked", "  ", grpc.StatusCode.INVALID_ARGUMENT, "why is empty"),
        ("asked", "w" * 501, grpc.StatusCode.INVALID_ARGUMENT, "at most 500"),
        ("answered", "w", grpc.StatusCode.FAILED_PRECONDITION, "it is rejected: rejected by anna: no"),
    ],
)
def test_what_cannot_be_answered_says_why(subject: Fleet, decision: str, why: str, code: object, says: str) -> None:
    named = {"asked": subject.fault("n001", 1).id, "answered": subject.fault("n005", 2).id}
    subject.answer(named["answered"], "no", yes=False)
    with pytest.raises(RefusalError, match=says.replace("?", r"\?")) as caught:
        subject.answer(named.get(decision, decision), why)
    assert caught.value.code is code


def test_a_question_that_was_asked_again_is_not_said_to_wait(subject: Fleet) -> None:
    asked = subject.fault("n001", 1)
    subject.store.decisions.write([replace(asked, id="ab12", ts_ms=asked.ts_ms - 1, outcome="pending_approval")])
    with pytest.raises(RefusalError, match="decision ab12 has been replaced by a newer one"):
        subject.answer("ab12", "yes")


def test_one_that_stands_by_answers_nothing(subject: Fleet) -> None:
    asked = subject.fault("n001", 1)
    subject.pipeline.leading = False
    with pytest.raises(RefusalError, match="active one"):
        subject.answer(asked.id, "yes")


def test_who_may_answer() -> None:
    callers = [None, ANNA, Identity(Role.VIEWER, "tv")]
    assert [api_decisions.may_answer(caller) for caller in callers] == [True, True, False]
    assert [api_decisions.named(c, "") for c in callers] == ["a local user", "anna", "tv"]
    assert api_decisions.named(callers[1], "eve (bob)\n\x1b[8m\u202e") == "eve (bob) [8m (anna)", "bare, and last"
    assert api_decisions.named(Identity(Role.OPERATOR, "drover"), "") != "drover", (
        "the name under which Drover itself is shown"
    )


def test_the_audit_shows_what_drover_decided_and_did_next_to_what_people_did(subject: Fleet) -> None:
    asked = subject.fault("n001", 1)
    subject.answer(asked.id, "seen")
    done = Action("a1", asked.id, asked.incident_id, "n001", Act.DRAIN, "slurm", ActionState.DONE, T0 + 5000, "closed",
                  why="xid/xid_79: gone")  # fmt: skip
    by_hand = Action("a2", "", "", "n005", Act.DRAIN, "slurm", ActionState.DONE, T0 + 6000, by="anna", why="a fan")
    gave_up = replace(by_hand, id="a3", state=ActionState.FAILED, detail="given up after 9 tries", ts_ms=T0 + 7000)
    subject.store.actions.write([done, by_hand, gave_up])

    def lines(**about: Any) -> list[tuple[str, str, str]]:
        reply = api_decisions.list_audit(subject.facts, pb.AuditRequest(since_ms=1, **about))
        lines = [from_json(Audit, text) for text in reply.audit_json]
        assert [line.ts_ms for line in lines] == sorted((line.ts_ms for line in lines), reverse=True)
        assert all(line.why and line.by for line in lines)
        return [(line.by, line.what, line.why) for line in lines]

    answer = ("anna", "approve", "seen")
    until = iso(asked.ts_ms + 3_600_000)
    asks = ("drover", "pending approval: drain n001", f"asks to drain n001 for xid/xid_79; expires at {until}")
    acts = ("drover", "act: drain n001", "approved by anna: seen: drain n001 for xid/xid_79")
    drains = ("drover", "drain n001: done", "xid/xid_79: gone")
    failed = ("anna", "drain n005: failed", "a fan")
    assert lines() == [answer], "as before: what people did"
    whole = lines(whole=True)
    assert whole[:2] == [failed, drains]
    assert sorted(whole[2:]) == sorted([answer, asks, acts])
    assert lines(whole=True, limit=1) == [failed]
    assert lines(whole=True, subject="n005") == [failed]
    assert set(lines(whole=True, subject=asked.incident_id)) == {answer, asks, acts, drains}
    assert set(lines(whole=True, subject="n001")) == {asks, acts, drains}


def test_a_nodes_changes_of_health_are_reported_with_their_reasons(subject: Fleet) -> None:
    subject.store.clients.command("TRUNCATE TABLE health")
    asked = subject.fault("n001", 1)
    changes = api_nodes.get_node(subject.facts, pb.NodeRequest(node="n001", health_from_ms=1)).health
    seen = [(c.ts_ms, c.gpu if c.HasField("gpu") else None, c.health, c.incident_id) for c in changes]
    at_ms = subject.now_ms
    assert seen == [(at_ms, None, "confirmed", asked.incident_id), (at_ms, 0, "confirmed", asked.incident_id)]
    assert all("GPU 0 of node n001" in c.reason for c in changes)
    assert not api_nodes.get_node(subject.facts, pb.NodeRequest(node="n001")).health
    assert not api_nodes.get_node(subject.facts, pb.NodeRequest(node="n001", health_from_ms=at_ms + 1)).health


def test_who_answers_too_late_reads_so_and_so_does_the_audit(subject: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people answer at the same moment: the second passed the first look, as the first had."""
    asked = subject.fault("n001", 1)
    monkeypatch.setattr(api_decisions, "pending", lambda _: [asked])
    subject.answer(asked.id, "gone for good")
    subject.now_ms += 1
    with pytest.raises(RefusalError, match="no longer waits; nothing was done"):
        subject.answer(asked.id, "leave it", yes=False)
    assert [(line.what, line.why) for line in subject.store.audit.read()] == [
        ("reject (too late)", "leave it"), ("approve", "gone for good"),
    ]  # fmt: skip


def test_a_restart_keeps_questions_answers_and_duties(subject: Fleet, opened: Store) -> None:
    first, second, third = subject.fault("n001", 1), subject.fault("n005", 2), subject.fault("n007", 3)
    subject.answer(first.id, "go")
    subject.pipeline.take_outages(
        {"n001": NodeOutage("n001", Health.DRAINED, subject.now_ms, first.incident_id, "drained")}
    )
    subject.pipeline._judge.submit(lambda: None).result(10)
    assert subject.pipeline.engine.health_of("n001") == (Health.DRAINED, "drained")
    opened.outages.write([NodeOutage("n001", Health.DRAINED, subject.now_ms, first.incident_id, "drained")])
    why = "resume withheld: it passed; but since its probes were asked for xid was found"
    opened.outages.write(
        [
            NodeOutage(
                "n003",
                Health.DRAINED,
                subject.now_ms,
                "inc3",
                "resume withheld: it passed, but",
                withheld=Withheld.QUIET,
            ),
            NodeOutage("n005", Health.DRAINED, subject.now_ms, "inc5", why, incidents=(second.incident_id,)),
            NodeOutage("n005", Health.HEALTHY, subject.now_ms, "inc5", "put back by a person"),
        ]
    )
    opened.decisions.write_approvals([Approval(third.id, subject.now_ms, "anna", False, "stopped in between")])
    again = Fleet(opened)
    again.now_ms = subject.now_ms + 1000

    async def start() -> None:
        await again.pipeline.start()
        await again.pipeline.stop()

    again.pipeline.started_ms = again.now_ms
    asyncio.run(start())
    assert [d.id for d in api_decisions.pending(again.facts)] == [second.id]
    assert [d.outcome for d in again.listed() if d.id == third.id] == ["rejected"]
    assert again.pipeline.engine.health_of("n001") == (Health.DRAINED, "drained")
    state = api_decisions.get_policy(again.facts, True)
    assert (list(state.out), state.taken_in_hour) == (["n001", "n003"], 1)
    assert (state.mode, state.ceiling) == ("approve", "enforce")
    (held,) = [from_json(Decision, text) for text in state.held_json]
    assert (held.node, held.rule, held.incident_id) == ("n003", "return to service", "inc3")
    assert held.reason == "resume withheld: it passed, but"
    detail = api_incidents.get_incident(again.facts, pb.IncidentRequest(id=second.incident_id))
    assert [from_json(NodeOutage, text).reason for text in detail.duties_json] == [why], "shown where it is looked for"


def test_a_start_with_another_policy_than_before_is_in_the_audit(subject: Fleet, opened: Store) -> None:
    def start(**changes: object) -> list[tuple[str, str]]:
        again = Fleet(opened)
        again.now_ms = subject.now_ms = subject.now_ms + 1000
        again.pipeline.started_ms = again.now_ms
        again.pipeline.in_force.policy = replace(again.pipeline.policy, **changes)  # type: ignore[arg-type]  # any field

        async def run() -> None:
            await again.pipeline.start()
            await again.pipeline.stop()

        asyncio.run(run())
        return [(line.by, line.detail) for line in opened.audit.read(what="policy")]

    (first,) = start()
    assert first == ("the collector's start", "mode approve, act.mode enforce, 0 rules; the one before is not known")
    assert start() == [first], "the same one"
    rules = (Rule("drain", kind=("xid",), xid=(79,)),)
    assert start(mode="enforce", rules=rules)[0][1].startswith("mode: approve -> enforce; rules[0]: ")
    assert len(start(mode="enforce", rules=rules)) == 2


def poll(pipeline: Pipeline) -> None:
    """Two looks: what is being written is not read."""
    pipeline._poll_policy()
    pipeline._poll_policy()


def test_a_changed_policy_holds_from_the_second_look_on_and_a_bad_one_changes_nothing(
    opened: Store, tmp_path: Path
) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('mode = "observe"\n')
    watched = Fleet(opened, PolicyWatch(path)).pipeline
    watched._poll_policy()
    assert watched.policy.name == "test"
    path.write_text('mode = "enforced"\n')
    poll(watched)
    assert watched.policy.name == "test"
    assert "ours.toml:1: mode: must be one of" in watched.ticks.troubles["policy"]
    path.write_text('mode = "enforce"\n')
    poll(watched)
    assert (watched.policy.name, watched.engine.policy.mode) == ("ours", "enforce")
    assert "policy" not in watched.ticks.troubles
    (line,) = [line for line in opened.audit.read(what="policy") if line.by == "the policy's file"]
    assert line.subject == "ours"
    assert "mode: approve -> enforce" in line.detail


def test_a_policy_that_is_being_written_is_not_read_by_half(tmp_path: Path) -> None:
    path, whole = tmp_path / "ours.toml", 'mode = "enforce"\n[guard]\nfleet_nodes = 3\n'
    path.write_text('mode = "observe"\n')
    watch = PolicyWatch(path)
    for part in (whole[:17], whole[:25], whole):  # the first is a good policy, without its limit
        path.write_text(part)
        assert (watch.poll(), watch.trouble) == (None, "")
    found = watch.poll()
    assert found is not None
    assert (found.mode, found.guard.fleet_nodes) == ("enforce", 3)
    path.write_text("")  # as a full disk leaves it: no policy, and not one without rules
    assert (watch.poll(), watch.poll()) == (None, None)
    assert "is empty" in watch.trouble
    path.unlink()
    assert (watch.poll(), watch.poll()) == (None, None)
    assert "No such file" in watch.trouble


def test_a_changed_policy_holds_though_the_store_hangs(
    opened: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('mode = "enforce"\n')
    pipeline = Fleet(opened, PolicyWatch(path)).pipeline
    monkeypatch.setattr(pipeline_saving, "PATIENCE_S", 0.01)
    free, writers = threading.Event(), []
    write_audit = opened.audit.write

    def hanging(lines: list[Audit]) -> None:
        writers.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():  # who judges must never be here
            free.wait(120)
        write_audit(lines)

    monkeypatch.setattr(opened.audit, "write", hanging)
    path.write_text('mode = "observe"  # something is wrong here, at 3 a.m.\n')
    poll(pipeline)
    assert pipeline.engine.policy.mode == "observe"
    free.set()
    pipeline.saving.stop()
    assert threading.main_thread() not in writers
    assert pipeline.waiting_outcomes == 0


def test_a_defect_in_reading_the_policy_costs_no_bucket(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Fleet(opened).pipeline

    def wrong() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(pipeline.in_force._watch, "poll", wrong)
    pipeline.judge_bucket(opened.buckets.read(pipeline.index, T0))
    assert (pipeline.ticks.done, pipeline.ticks.failures) == (1, 1)

"""Conditions of Kubernetes nodes as evidence: what warns, what does not, and that no node goes for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.actions.kubernetes.actuator import CONDITION
from drover_collector.detectors._lib.examples import LAG_MS, START_MS, play, small_fleet
from drover_collector.detectors.conditions import detector
from drover_collector.detectors.conditions.rules import OWN, ROWS, RULES, rule_of
from drover_collector.engine.engine import Engine
from drover_collector.ingest.parse_records import RecordSource, parse_record
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.policy.policy import FOREIGN_MOST, Policy
from drover_core.model.conditions import (
    ConditionError,
    NodeCondition,
    Place,
    Standing,
    cause_of,
    from_message,
    is_foreign,
    sentence,
    to_message,
)
from drover_core.model.events import (
    Event,
    EventKind,
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.reports import event_text
from drover_proto import telemetry_pb2

BAD = NodeCondition("KernelDeadlock", "True", "DockerHung", "task docker:7 blocked", START_MS, Standing.FAULT)
WELL = replace(BAD, status="False", standing=Standing.WELL)
Changes = Mapping[int, Sequence[tuple[str, NodeCondition]]]


def found(changes: Changes, buckets: int = 30, maintained: Sequence[str] = ()) -> list[Finding]:
    """Play changes right after their buckets of 10 s, on 8 nodes."""
    events = {
        at: [detector.example_event(at * 10 + 7, node, each) for node, each in those] for at, those in changes.items()
    }
    state, findings = None, []
    for window, now_ms in play(small_fleet(), buckets, events=events):
        some, state = detector.detect(replace(window, maintained=dict.fromkeys(maintained, 1)), state, now_ms)
        findings += some
    return findings


def test_a_condition_that_lasts_is_a_warning_that_asks_for_watching() -> None:
    [first] = found({2: [("n02", BAD)]}, buckets=20)
    assert (first.cause, first.severity, first.action) == (
        "condition_kernel_deadlock", Severity.WARNING, RecommendedAction.WATCH,
    )  # fmt: skip
    assert first.summary == "Node n02: its kernel is reported to be deadlocked (condition KernelDeadlock=True)."
    assert "DockerHung: task docker:7 blocked" in first.evidence[0].text
    assert first.ts_ms - (START_MS + 30_000 + LAG_MS) >= 120_000
    assert len(found({2: [("n02", BAD)]}, buckets=60)) == 2  # again after five minutes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({2: [("n02", BAD)], 10: [("n02", WELL)]}, "it ended before two readings agreed"),
        ({t: [("n02", WELL if t % 8 else BAD)] for t in range(0, 40, 4)}, "it flaps"),
        ({2: [("n02", replace(BAD, place=Place.NEW))]}, "the node is being set up"),
        ({2: [("n02", replace(BAD, status="Unknown", standing=Standing.UNKNOWN))]}, "its writer does not know"),
        ({2: [("n02", replace(BAD, type="Lunch", standing=Standing.SHOWN))]}, "its type is not known"),
        ({2: [("n02", replace(BAD, type="Ready", status="False"))]}, "it must last ten minutes"),
        ({2: [("n02", replace(BAD, type="GPUMissing", place=Place.CLOSED))]}, "work on the node causes it too"),
        ({2: [("n02", replace(BAD, every_s=600))]}, "a large cluster is read each ten minutes, and once is not twice"),
        ({2: [("elsewhere", BAD)]}, "the node is not in the fleet"),
    ],
)
def test_nothing_is_found(changes: Changes, why: str) -> None:
    assert found(changes, buckets=40) == [], why


@pytest.mark.parametrize(
    ("changes", "maintained"),
    [
        ({2: [("n02", replace(BAD, place=Place.CLOSED))]}, ()),
        ({2: [("n02", BAD)]}, ("n02",)),
        ({2: [("n02", replace(BAD, old=True))]}, ()),
        ({2: [("n02", replace(BAD, type="MemoryPressure"))]}, ()),
    ],
)
def test_it_is_a_note(changes: Changes, maintained: Sequence[str]) -> None:
    [note] = found(changes, buckets=30, maintained=maintained)
    assert (note.severity, note.action) == (Severity.INFO, RecommendedAction.NONE)


def test_a_cordoned_node_that_comes_back_with_its_condition_is_a_warning() -> None:
    shut = replace(BAD, place=Place.CLOSED)
    assert [f.severity for f in found({2: [("n02", shut)], 20: [("n02", BAD)]})] == [Severity.INFO, Severity.WARNING]


def test_one_that_comes_back_is_a_new_one_also_where_its_writer_leaves_the_time_unchanged() -> None:
    """The incident's id is made of its begin: with the old one the new incident would be taken for the closed one."""
    gone = replace(BAD, status="", standing=Standing.GONE)
    first, again = found({2: [("n02", BAD)], 20: [("n02", gone)], 22: [("n02", BAD)]}, buckets=40)
    assert first.since_ms == START_MS < START_MS + 200_000 <= again.since_ms


def test_unknown_ends_nothing_that_was_reported() -> None:
    unknown = replace(BAD, status="Unknown", standing=Standing.UNKNOWN)
    assert len(found({2: [("n02", BAD)], 20: [("n02", unknown)]}, buckets=60)) == 2


@pytest.mark.parametrize("type_", ["KernelDeadlock", "Ready"])
def test_unknown_opens_nothing_also_where_it_was_bad_before(type_: str) -> None:
    """A node that is shut down is not ready for a moment, and then unknown: nobody knows that it is bad."""
    bad = replace(BAD, type=type_, status=rule_of(type_).bad)
    unknown = replace(bad, status="Unknown", standing=Standing.UNKNOWN)
    assert found({2: [("n02", bad)], 8: [("n02", unknown)]}, buckets=90) == []
    assert len(found({2: [("n02", bad)], 8: [("n02", unknown)], 14: [("n02", bad)]}, buckets=90)) >= 1


def test_work_on_cordoned_nodes_makes_no_note_and_hides_no_other() -> None:
    bad = replace(BAD, type="KubeletUnhealthy")
    shut = [(f"n0{n}", replace(bad, place=Place.CLOSED)) for n in range(3)]
    assert found({2: shut}) == []
    [first] = found({2: [*shut, ("n05", bad)]})
    assert (first.node, first.severity) == ("n05", Severity.WARNING)


@pytest.mark.parametrize(("nodes", "scope"), [(2, "node"), (3, "rack")])
def test_the_same_on_many_nodes_is_one_note(nodes: int, scope: str) -> None:
    findings = found({2: [(f"n0{n}", BAD) for n in range(nodes)]}, buckets=30)
    assert {f.scope for f in findings} == {scope}
    if scope == "rack":
        [note] = findings
        assert note.severity is Severity.INFO and len(note.members) == 3


def finding_of(node: str, kind: IncidentKind, cause: str, now_ms: int, severity: Severity, action: str) -> Finding:
    return Finding(
        "xid", kind, cause, "node", node, None, ((node, None),), now_ms, now_ms, severity, 0.95,
        RecommendedAction(action), "Own.", "Drain it.", (Evidence("own"),),
    )  # fmt: skip


def test_it_stands_apart_from_what_drover_finds_itself_and_goes_on_after_a_restart() -> None:
    index = small_fleet()
    engine = Engine(index, Policy.load(None, "nvidia"), START_MS)
    events = {2: [detector.example_event(27, "n02", BAD)]}
    now_ms = START_MS
    for window, at_ms in play(index, 20, events=events):
        now_ms = at_ms
        if window.fresh:
            engine.on_bucket(window.newest, at_ms)
        else:
            engine.on_events(window.events, at_ms)
    [incident] = engine.incidents.values()
    assert (incident.detectors, incident.kind, incident.asked) == (
        ("conditions",), IncidentKind.LIVENESS, RecommendedAction.WATCH,
    )  # fmt: skip
    book = engine._book
    for kind in (IncidentKind.LIVENESS, IncidentKind.MEMORY):  # the very kind, and one that explains it
        own = finding_of("n02", kind, "own", now_ms, Severity.CRITICAL, "drain")
        book.apply([own], now_ms, closing=False)
    assert engine.incidents[incident.id].severity is Severity.WARNING
    assert engine.incidents[incident.id].detectors == ("conditions",)
    others = [i for i in engine.incidents.values() if i.id != incident.id]
    assert all(not is_foreign(i.cause) and "conditions" not in i.detectors for i in others) and others
    state = detector.restored([engine.incidents[incident.id]])
    assert state.held["n02", "KernelDeadlock"].found == BAD
    quiet = detector.restored([replace(engine.incidents[incident.id], closed_ms=now_ms)])
    assert quiet.held == {}


@pytest.mark.parametrize("asked", list(RecommendedAction))
def test_no_rule_takes_a_node_out_for_it(asked: RecommendedAction, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text('mode = "enforce"\n[[rules]]\nname = "all"\naction = "drain"\n', "utf-8")
    policy = Policy.load(path)
    [first] = found({2: [("n02", BAD)]}, buckets=20)
    index = small_fleet()
    engine = Engine(index, policy, START_MS)
    engine._book.apply([first], first.ts_ms, closing=False)
    [incident] = engine.incidents.values()
    verdict = policy.judge(replace(incident, severity=Severity.CRITICAL, confidence=1.0), asked)
    assert verdict.wanted is FOREIGN_MOST and "what others wrote" in verdict.rule
    assert policy.judge(replace(incident, cause="silent"), asked).wanted is RecommendedAction.DRAIN


def test_the_table_has_each_type_once_and_not_drovers_own() -> None:
    assert len(RULES) == len(ROWS)
    assert OWN == CONDITION and OWN not in RULES
    assert {rule.bad for rule in ROWS} == {"True", "False"}
    assert all(rule.severity is not Severity.CRITICAL and rule.advice.endswith(".") for rule in ROWS)
    assert len({cause_of(rule.type) for rule in ROWS}) == len(ROWS)
    assert rule_of("MyCheck").severity is Severity.WARNING


@pytest.mark.parametrize(
    ("type_", "cause"),
    [
        ("KernelDeadlock", "condition_kernel_deadlock"),
        ("GPUMissing", "condition_gpu_missing"),
        ("example.com/GpuOK", "condition_example_com_gpu_ok"),
    ],
)
def test_a_type_makes_a_cause(type_: str, cause: str) -> None:
    assert cause_of(type_) == cause


@pytest.mark.parametrize("found_", [BAD, WELL, replace(BAD, old=True, place=Place.CLOSED, every_s=250)])
def test_a_message_holds_all_of_a_condition(found_: NodeCondition) -> None:
    assert from_message(to_message(found_)) == found_
    assert event_text("condition", to_message(found_)) == sentence(found_)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"v":2}', '{"v":1,"type":""}', '{"v":1,"type":"A","standing":"new"}', "x" * 5000,
        '{"v":1,"type":"A","standing":"fault","since_ms":true}',
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_and_shown_unchanged(text: str) -> None:
    with pytest.raises(ConditionError):
        from_message(text)
    assert event_text("condition", text) == text
    event = Event("e", START_MS, "n02", None, EventKind.CONDITION, "A", text)
    state = None
    for window, now_ms in play(small_fleet(), 20, events={2: [event]}):
        findings, state = detector.detect(window, state, now_ms)
        assert findings == []


def test_the_how_to_says_how_many_types_are_judged() -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/conditions.md").read_text("utf-8")
    assert f"{len(RULES)} types are judged" in text


def test_no_agent_may_send_one() -> None:
    """A node's key would else write conditions of any kind about its node, past Kubernetes' own rights."""
    event = telemetry_pb2.Event(kind="condition", code="KernelDeadlock", message=to_message(BAD), ts_ms=START_MS)
    source = RecordSource(node="n02", spool="s", received_ms=START_MS, hello_ms=START_MS, clock_offset_ms=0)
    refused = parse_record(telemetry_pb2.Record(seq=1, event=event), source)
    assert isinstance(refused, Refusal) and "'condition'" in refused.text

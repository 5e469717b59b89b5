"""The engine over the simulated fleet: one incident per fault, none on what is healthy, decisions, restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drover_collector.actions.return_conditions import telemetry_lack
from drover_collector.detectors import DETECTORS
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors.liveness.peers import PeersOfSilent, Progress
from drover_collector.engine.detector_runner import DetectorRunner
from drover_collector.engine.engine import LAG_MS, Engine, Outcome
from drover_collector.engine.late_events import dealt_with
from drover_collector.engine.node_state import FRESH_MS, NodeNow
from drover_collector.engine.replay import replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Event,
    EventKind,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    RecommendedAction,
    Severity,
)
from drover_core.times import from_iso
from drover_simulator.faults import Fault, demo_faults
from testbed.deciding import OPEN
from testbed.deciding import policy as policy_of
from testbed.simulated_buckets import Recording, newest, record

POLICY = Policy.load()
INDEX = small_fleet(12)


def xid(code: int, node: str = "n01", gpu: int = 2, at_ms: int = 0) -> Event:
    return Event(f"{node}{gpu}{code}{at_ms}", START_MS + at_ms, node, gpu, EventKind.XID, str(code), f"Xid {code}")


def engine(**more: Any) -> Engine:
    return Engine(INDEX, POLICY, START_MS, **more)


def feed(to: Engine, numbers: Sequence[int], silent: Sequence[int] = ()) -> list[Outcome]:
    buckets = [training_bucket(INDEX, number, silent=silent) for number in numbers]
    return [to.on_bucket(bucket, bucket.end_ms + LAG_MS) for bucket in buckets]


def ran(recording: Recording, policy: Policy = POLICY) -> list[Incident]:
    return [
        i for outcome in replay(recording.index, recording.buckets, recording.events, policy) for i in outcome.incidents
    ]


def test_a_fatal_xid_is_an_incident_a_decision_and_a_health_change_in_one_call() -> None:
    subject = engine()
    feed(subject, range(3))
    outcome = subject.on_events([xid(79, at_ms=40_000)], START_MS + 40_010)
    (incident,) = outcome.incidents
    assert (incident.node, incident.gpu, incident.action) == ("n01", 2, RecommendedAction.DRAIN)
    assert incident.opened_ms == START_MS + 40_010
    (decision,) = outcome.decisions
    assert (decision.outcome, decision.wanted, decision.mode) == ("would_act", RecommendedAction.DRAIN, "observe")
    assert {(c.node, c.gpu, c.health) for c in outcome.health} == {
        ("n01", None, Health.CONFIRMED), ("n01", 2, Health.CONFIRMED),
    }  # fmt: skip
    assert subject.health_of("n01", 2)[0] is Health.CONFIRMED
    assert "XID 79" in subject.health_of("n01")[1]
    assert subject.health_of("n01", 3) == (Health.HEALTHY, "")
    assert subject.health_of("n99")[0] is Health.UNKNOWN
    assert subject.health_of("n01", 99)[0] is Health.UNKNOWN


def test_before_the_first_report_all_is_unknown_and_silence_becomes_unknown_again() -> None:
    subject = engine()
    assert subject.health_of("n03")[0] is Health.UNKNOWN
    feed(subject, range(3))
    assert subject.health_of("n03", 1)[0] is Health.HEALTHY
    feed(subject, range(3, 8), silent=[3])
    health, reason = subject.health_of("n03", 1)
    assert (health, reason) == (Health.UNKNOWN, "no report")
    feed(subject, range(8, 30), silent=[3])
    health, reason = subject.health_of("n03", 1)
    assert health is Health.UNKNOWN
    assert "silent" in reason


def test_decisions_are_made_once_and_the_guard_holds_the_rest() -> None:
    subject = engine()
    feed(subject, range(3))
    decisions = []
    for n in (0, 4, 8):
        decisions += subject.on_events([xid(79, f"n{n:02d}", at_ms=40_000 + n)], START_MS + 40_000 + n).decisions
    assert [d.outcome for d in decisions] == ["would_act", "held", "held"]
    assert "of the fleet" in decisions[1].reason
    assert [d for outcome in feed(subject, range(4, 9)) for d in outcome.decisions] == []


def test_a_detector_that_raises_is_contained_and_counted() -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("bug")

    bad = dataclasses.replace(DETECTORS[0], name="broken", detect=broken)
    subject = engine(detectors=(bad, *DETECTORS))
    feed(subject, range(2))
    outcome = subject.on_events([xid(79)], START_MS + 30_000)
    assert len(outcome.incidents) == 1
    assert (subject.errors["broken"].count, subject.errors["broken"].latest) == (3, "RuntimeError: bug")


def test_no_events_and_no_news_bring_nothing() -> None:
    subject = engine()
    assert subject.on_events([], START_MS) == Outcome()
    feed(subject, range(3))
    assert feed(subject, [3]) == [Outcome()]


def test_versions_count_up_and_the_newest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeersOfSilent, "progress", lambda *_: Progress.STOPPED)
    subject = engine()
    outcomes = feed(subject, range(4)) + feed(subject, range(4, 45), silent=[2])
    versions = [i for outcome in outcomes for i in outcome.incidents]
    assert {i.node for i in versions} == {"n02"}
    assert [i.version for i in versions] == list(range(1, len(versions) + 1))
    assert [i.severity for i in versions][:1] == [Severity.WARNING]
    assert versions[-1].severity is Severity.CRITICAL
    assert versions[-1].action is RecommendedAction.DRAIN
    assert subject.incidents[versions[-1].id].version == versions[-1].version


def test_after_a_restart_no_second_alarm_and_the_old_one_can_end() -> None:
    first = engine()
    outcomes = feed(first, range(4)) + feed(first, range(4, 30), silent=[2])
    outcomes.append(first.on_events([xid(79, at_ms=301_000)], START_MS + 301_000))
    before = newest([i for outcome in outcomes for i in outcome.incidents])
    assert len(before) == 2

    second = engine()
    replayed = [training_bucket(INDEX, n, silent=[2] if n >= 4 else []) for n in range(6, 30)]
    second.restore(list(before.values()), replayed, [xid(79, at_ms=301_000)])
    assert second.health_of("n01", 2)[0] is Health.CONFIRMED
    again = feed(second, range(30, 34), silent=[2])
    assert {i.id for outcome in again for i in outcome.incidents} <= set(before)
    feed(second, range(34, 36))
    assert [i.cause for i in second.incidents.values() if i.closed_ms is None] == ["xid_79"]
    back = Event("b", START_MS + 380_000, "n01", 2, EventKind.LIFECYCLE, "gpu_back", "")
    second.on_events([back], START_MS + 380_000)
    feed(second, range(36, 110))
    assert [i for i in second.incidents.values() if i.closed_ms is None] == []


def test_the_demo_faults_each_give_one_incident_and_no_other() -> None:
    recording = record(1400, 4.0, lambda spec: demo_faults(spec, 1400), nodes=32)
    found = [i for i in newest(ran(recording)).values() if i.severity is not Severity.INFO]
    assert {(i.node, i.gpu) for i in found} == {(label.node, label.gpu) for label in recording.labels}
    assert len(found) == len(recording.labels) == 5
    kinds = {label.node: label.kind for label in recording.labels}
    assert {i.node: i.kind for i in found} == kinds
    for incident in found:
        label = next(label for label in recording.labels if label.node == incident.node)
        assert incident.evidence
        assert incident.action is not RecommendedAction.NONE
        assert abs(incident.since_ms - from_iso(label.start)) <= 45_000


def test_a_healthy_fleet_raises_nothing() -> None:
    assert ran(record(1401, 20, nodes=24, step_s=5.0)) == []


def test_hard_negatives_drain_nothing() -> None:
    def faults(spec: object) -> list[Fault]:
        return [
            Fault("xid", "application", "r01n01", None, 60.0, 180.0),
            Fault("hang", "data_stall", "r03n01", None, 120.0, 360.0, 0.8),
            Fault("straggler", "workload", "r01n05", None, 500.0, None, 0.3),
            Fault("straggler", "planned_power_cap", "r03n03", None, 500.0, None, 0.35),
        ]

    recording = record(1403, 15, faults, nodes=32, step_s=5.0)
    found = newest(ran(recording)).values()
    assert len(recording.labels) >= 3
    assert [(i.kind, i.cause, i.node, i.gpu) for i in found if i.severity is not Severity.INFO] == []
    assert {i.scope for i in found} <= {"job", "gpu"}


def test_a_peers_hang_after_a_gpu_died_is_not_blamed_on_the_peers() -> None:
    recording = record(1404, 6, lambda spec: [Fault("xid", "fallen_off_bus", "r01n02", 4, 60.0, None)], nodes=16)
    found = [i for i in newest(ran(recording)).values() if i.severity is not Severity.INFO]
    assert [(i.kind, i.node, i.gpu) for i in found] == [(IncidentKind.XID, "r01n02", 4)]
    assert "liveness" in found[0].detectors


def test_costs_of_a_straggler_are_counted_while_it_lasts() -> None:
    recording = record(1405, 6, lambda spec: [Fault("straggler", "power_cap", "r01n02", 4, 60.0, None, 0.25)], nodes=16)
    run = replay(recording.index, recording.buckets, recording.events, POLICY)
    assert len(list(run)) >= len(recording.buckets)
    assert run.engine is not None
    (incident,) = run.engine.incidents.values()
    job_gpus, slower, minutes = 64, 0.15, 5
    assert incident.gpu_hours_waited is not None
    assert 0.5 < incident.gpu_hours_waited / (job_gpus * slower * minutes / 60) < 2


def test_health_codes_have_one_entry_per_node_and_gpu() -> None:
    nodes, gpus = engine().health_codes
    assert (nodes.shape, gpus.shape) == ((12,), (96,))
    assert nodes.dtype == np.int8


def test_two_faults_on_one_node_are_two_incidents_and_a_silence_swallows_neither() -> None:
    def hot(number: int, gpu: dict[str, Any], _node: dict[str, Any]) -> None:
        if number >= 3:
            gpu["gpu_temp_c"][8 + 5] = 26 + 0.09 * gpu["power_w"][8 + 5]

    subject, reported = engine(), []
    for number in range(84):
        bucket = training_bucket(INDEX, number, hot, silent=[1] if 30 <= number < 60 else [])
        if number >= 15:
            bucket.gpu_rows[8 + 3] = 0
        reported += subject.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents
        if number == 14:
            reported += subject.on_events([xid(79, gpu=3, at_ms=150_000)], START_MS + 157_500).incidents
    found = newest(reported).values()
    assert {(i.gpu, i.cause, i.closed_ms is None) for i in found} == {
        (5, "cooling", True), (3, "xid_79", True), (None, "silent", False),
    }  # fmt: skip


def test_a_node_goes_out_and_comes_back_and_its_incident_ends_with_that() -> None:
    enforcing = dataclasses.replace(POLICY, mode="enforce")
    subject = Engine(INDEX, enforcing, START_MS, ceiling="enforce")
    feed(subject, range(3))
    outcome = subject.on_events([xid(79, at_ms=40_000)], START_MS + 40_010)
    (decision,), (incident,) = outcome.decisions, outcome.incidents
    assert decision.outcome == "act"

    def duty(stage: Health, at_ms: int) -> dict[str, NodeOutage]:
        return {"n01": NodeOutage("n01", stage, START_MS + at_ms, incident.id, f"now {stage}")}

    moved = subject.on_duties(duty(Health.DRAINED, 50_000), START_MS + 50_000).health
    assert (moved[0].node, moved[0].gpu, moved[0].health, moved[0].reason) == (
        "n01",
        None,
        Health.DRAINED,
        "now drained",
    )
    assert subject.on_duties(duty(Health.DRAINED, 50_000), START_MS + 51_000) == Outcome()

    back = subject.on_duties(duty(Health.HEALTHY, 60_000), START_MS + 60_000)
    assert [(i.id, i.closed_ms) for i in back.incidents] == [(incident.id, START_MS + 60_000)]
    assert subject.health_of("n01")[0] is Health.HEALTHY
    again = subject.on_events([xid(79, at_ms=70_000)], START_MS + 70_000)
    assert [d.outcome for d in again.decisions] == ["held"]  # it came back just now
    assert "came back" in again.decisions[0].reason

    stopped = Engine(INDEX, enforcing, START_MS, ceiling="enforce")  # before the end of the incident was stored
    stopped.restore([incident], [training_bucket(INDEX, 3)], [], [decision], duty(Health.HEALTHY, 60_000))
    late = stopped.on_duties(duty(Health.HEALTHY, 60_000), START_MS + 65_000)
    assert [i.closed_ms for i in late.incidents] == [START_MS + 65_000]


@pytest.mark.parametrize("restarted", ["", "before the first one's end was stored", "after it"])
def test_a_fault_that_opened_after_its_probes_were_asked_for_outlives_the_return(restarted: str) -> None:
    """They passed for what was known then. It is decided again: in service again, the node is not out for it."""
    enforcing = dataclasses.replace(POLICY, mode="enforce")
    subject = Engine(INDEX, enforcing, START_MS, ceiling="enforce")
    feed(subject, range(3))
    first = subject.on_events([xid(79, at_ms=40_000)], START_MS + 40_010)
    out = NodeOutage("n01", Health.VALIDATING, START_MS + 50_000, first.incidents[0].id, "", asked_ms=START_MS + 50_000)
    subject.on_duties({"n01": out}, START_MS + 50_000)
    second = subject.on_events([xid(79, gpu=5, at_ms=55_000)], START_MS + 55_010)
    assert [d.outcome for d in second.decisions] == ["act"], "the node is out already"
    back = {"n01": dataclasses.replace(out, stage=Health.HEALTHY, ts_ms=START_MS + 60_000)}
    if restarted:
        subject = Engine(INDEX, enforcing, START_MS, ceiling="enforce")
        closed_ms = START_MS + 60_000 if restarted == "after it" else None
        known = [dataclasses.replace(first.incidents[0], closed_ms=closed_ms), *second.incidents]
        decided = [*first.decisions, *second.decisions]
        subject.restore(known, [training_bucket(INDEX, 3)], [], decided, back)
    ended = subject.on_duties(back, START_MS + 60_000)
    assert [i.id for i in ended.incidents] == ([] if restarted == "after it" else [first.incidents[0].id])
    (held,) = [d for outcome in feed(subject, [6]) for d in outcome.decisions]
    assert (held.incident_id, held.outcome) == (second.incidents[0].id, "held")
    assert "n01 answers again since" in held.reason, "off the bus, it cannot give values before a reset"


def test_an_error_that_is_reported_late_was_mended_only_if_it_was_before_the_probes_were_asked_for() -> None:
    duty = NodeOutage("n01", Health.HEALTHY, START_MS + 600_000, "gone", "validated", asked_ms=START_MS + 300_000)
    for at_ms, mended in ((299_999, True), (300_000, False), (599_999, False)):
        event = dataclasses.replace(xid(79, at_ms=at_ms), received_ms=START_MS + 900_000)
        assert dealt_with(event, START_MS + 900_000, {"n01": duty}).backlog is mended


@pytest.mark.parametrize("restarted", [False, True], ids=["same engine", "engine restarted"])
@pytest.mark.parametrize(
    ("at_s", "late_s", "judged"),
    [(40, 3000, False), (80, 3000, True), (59, 30, True)],
    ids=["before its return", "since its return", "on time, just before its return"],
)
def test_a_node_that_came_back_is_not_taken_out_for_an_error_of_before(
    restarted: bool, at_s: int, late_s: int, judged: bool
) -> None:
    """Its agent was down, or no collector was there: reported late, though the node was mended since."""
    subject = Engine(INDEX, dataclasses.replace(POLICY, mode="enforce"), START_MS, ceiling="enforce")
    duties = {"n01": NodeOutage("n01", Health.HEALTHY, START_MS + 60_000, "gone", "validated")}
    if restarted:
        subject.restore([], [training_bucket(INDEX, 3)], [], [], duties)
    else:
        feed(subject, range(3))
        subject.on_duties(duties, START_MS + 60_000)
    now_ms = START_MS + (at_s + late_s) * 1000
    (incident,) = subject.on_events(
        [dataclasses.replace(xid(79, at_ms=at_s * 1000), received_ms=now_ms)], now_ms
    ).incidents
    assert incident.since_ms == START_MS + at_s * 1000
    assert (incident.severity, incident.action) == (
        (Severity.CRITICAL, RecommendedAction.DRAIN) if judged else (Severity.INFO, RecommendedAction.NONE)
    )


@pytest.mark.parametrize("returned", [True, False], ids=["came back since", "was never out"])
def test_what_was_dealt_with_stays_so_for_a_collector_that_starts_again(returned: bool) -> None:
    """A kernel line waits 10 s; a stop in that time must not make a fault of what was noted only."""
    subject = Engine(INDEX, POLICY, START_MS)
    duties = {"n01": NodeOutage("n01", Health.HEALTHY, START_MS + 3_000_000, "gone", "validated")} if returned else {}
    bucket = training_bucket(INDEX, 400)
    line = "pcieport 0000:3a:02.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0"
    late = Event(
        "e", START_MS + 600_000, "n01", 2, EventKind.KERNEL, "aer", line, "kmsg", received_ms=bucket.end_ms + LAG_MS
    )
    subject.restore([], [training_bucket(INDEX, 399), bucket], [late], [], duties)
    found = [incident for outcome in feed(subject, range(401, 404)) for incident in outcome.incidents]
    assert [(i.cause, i.severity) for i in found] == ([] if returned else [("pcie_fatal", Severity.WARNING)])


def test_events_that_came_together_are_taken_up_together_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of a job's crash, each compared with all others, took minutes."""
    subject, calls = engine(), []
    look = DetectorRunner.detect
    monkeypatch.setattr(
        DetectorRunner,
        "detect",
        lambda self, window, now_ms: calls.append(len(window.events)) or look(self, window, now_ms),
    )
    crash = [
        Event(f"e{n}", START_MS + 21_000 + n, f"n{n % 8:02d}", n % 8, EventKind.XID, "31", "") for n in range(1000)
    ]
    subject.restore([], [training_bucket(INDEX, number) for number in range(4)], [*crash, xid(79, at_ms=39_000)])
    assert calls == [0, 1000, 0, 0, 1, 0]


def test_the_cap_of_a_job_holds_for_every_node_that_works_for_it_whatever_the_fault_is() -> None:
    """An XID names no job; who holds the node's GPUs says it."""
    index = small_fleet(8)
    limits = dataclasses.replace(OPEN, job_ratio=0.25)
    subject = Engine(index, policy_of("enforce", limits), START_MS, ceiling="enforce")
    bucket = training_bucket(index, 0)
    jobs = bucket.jobs.copy()
    jobs[int(index.first_gpu[6]) :] = -1  # two nodes are free
    subject.on_bucket(dataclasses.replace(bucket, jobs=jobs), bucket.end_ms + LAG_MS)
    events = [
        Event(f"{n}", bucket.end_ms, f"n0{n}", 0, EventKind.XID, "79", "it fell", received_ms=bucket.end_ms)
        for n in (0, 1, 6, 7)
    ]
    made = {d.node: d for event in events for d in subject.on_events([event], bucket.end_ms + LAG_MS + 1).decisions}
    assert {node: d.outcome for node, d in made.items()} == {"n00": "act", "n01": "held", "n06": "act", "n07": "act"}
    assert "2 of 6 nodes of job 812 would be out (at most 1 may be" in made["n01"].reason


def test_what_is_known_of_a_node_now_has_each_gpu_of_the_fleet_file() -> None:
    """A GPU that gives nothing, a node that is silent, what is said of both, and a reset that telemetry proves."""
    subject = engine()
    at_once = subject.now_of("n01")
    assert at_once is not None
    assert (at_once.values_ms, at_once.gpus_ms) == (0, (0,) * 8), "nothing is known at the start"
    assert subject.now_of("strange") is None

    def lost(_: int, gpu: dict[str, Any], __: dict[str, Any]) -> None:
        for column in gpu.values():
            column[8 + 2] = np.nan

    first, second = (training_bucket(INDEX, n, lost if n else None) for n in (0, 1))
    subject.on_bucket(first, first.end_ms + LAG_MS)
    subject.on_events([xid(79, at_ms=10_000)], first.end_ms + LAG_MS)
    subject.on_bucket(second, second.end_ms + LAG_MS)
    now = subject.now_of("n01")
    assert now is not None
    assert now.values_ms == second.end_ms
    assert now.gpus_ms == tuple(first.end_ms if gpu == 2 else second.end_ms for gpu in range(8))
    (said,) = now.said.values()
    assert said.keys() == {"xid"}
    assert now.reset_ms == {}
    for n in (2, 3):
        bucket = training_bucket(INDEX, n)
        subject.on_bucket(bucket, bucket.end_ms + LAG_MS)
    back = subject.now_of("n01")
    assert back is not None
    assert back.reset_ms.keys() == {2}, "it was off the bus, and answers"


def test_a_node_that_is_read_every_5_min_is_not_late_between_two_readings() -> None:
    """A return demands values of it: those of 4 min ago are its newest."""
    subject = engine()
    for n in range(0, 151):
        bucket = training_bucket(INDEX, n)
        if n % 30:
            rows = bucket.gpu_rows.copy()
            rows[8:16] = 0
            node_rows = bucket.node_rows.copy()
            node_rows[1] = 0
            gpu = {name: column.copy() for name, column in bucket.gpu.items()}
            for column in gpu.values():
                column[8:16] = np.nan
            bucket = dataclasses.replace(bucket, gpu_rows=rows, node_rows=node_rows, gpu=gpu)
        subject._runner.add_bucket(bucket)  # what detectors say of it is not asked here
    seldom, often = subject.now_of("n01"), subject.now_of("n02")
    assert seldom is not None
    assert often is not None
    assert seldom.late_ms >= 2 * 300_000, "two readings may be lost"
    assert often.late_ms <= FRESH_MS
    read = NodeNow(START_MS, (START_MS,) * 8, late_ms=seldom.late_ms)
    assert telemetry_lack(read, START_MS + 240_000) is None
    assert telemetry_lack(dataclasses.replace(read, late_ms=often.late_ms), START_MS + 240_000) is not None


def test_what_a_driver_asks_for_is_known_by_its_newest_value() -> None:
    subject = engine()
    for n, number in enumerate((2, 1, None)):  # None: that bucket has no value of it

        def asks(_: int, gpu: dict[str, Any], __: dict[str, Any], number: int | None = number) -> None:
            column = np.zeros(INDEX.gpu_count)
            column[8 + 3] = np.nan if number is None else number
            gpu["recovery_action"] = column

        subject._runner.add_bucket(training_bucket(INDEX, n, asks))
    now, other = subject.now_of("n01"), subject.now_of("n02")
    assert now is not None
    assert other is not None
    assert (now.asked, other.asked) == ({3: 1}, {})


def test_what_a_driver_still_asks_for_after_a_return_is_found_again() -> None:
    """A person has put the node back at once: it was asked for a reset for ever, and nobody was notified."""
    subject = engine()

    def asks(_: int, gpu: dict[str, Any], __: dict[str, Any]) -> None:
        gpu["recovery_action"] = np.zeros(INDEX.gpu_count)
        gpu["recovery_action"][8 + 2] = 1

    def tick(n: int) -> Sequence[Incident]:
        bucket = training_bucket(INDEX, n, asks)
        return subject.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents

    (found,) = [i for n in range(3) for i in tick(n)]
    assert (found.node, found.gpu, found.cause) == ("n01", 2, "recovery_action")
    now_ms = found.opened_ms + 25_000
    for stage, at_ms in ((Health.DRAINED, now_ms), (Health.HEALTHY, now_ms + 1)):
        (closed,) = subject.on_duties(
            {"n01": NodeOutage("n01", stage, at_ms, found.id, "", "ann")}, at_ms
        ).incidents or (None,)
    assert closed is not None
    assert closed.closed_ms == now_ms + 1
    again = [i for n in range(3, 6) for i in tick(n)]
    assert [(i.node, i.gpu, i.cause, i.closed_ms) for i in again] == [("n01", 2, "recovery_action", None)]

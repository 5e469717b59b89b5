"""XIDs: bursts, repeats, causes and consequences, crashes of jobs, endings."""

from __future__ import annotations

import dataclasses

import numpy as np

from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.xid import detector as xid
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)

INDEX = small_fleet()
MINUTE = 60_000
HOUR = 60 * MINUTE


class Feed:
    """The detector with a clock of its own."""

    def __init__(self, job: str | None = "812") -> None:
        self.state: xid.State | None = None
        self.number = 0
        self.job = job

    def events(self, *events: Event, now_ms: int | None = None) -> list[Finding]:
        bucket = training_bucket(INDEX, 0)
        if self.job is None:
            bucket = dataclasses.replace(bucket, jobs=np.full(INDEX.gpu_count, -1, np.int32), job_names=())
        window = Window(INDEX, (bucket,), False, events, START_MS)
        found, self.state = xid.detect(window, self.state, now_ms or max(e.ts_ms for e in events))
        return found

    def tick(self, now_ms: int, silent: tuple[int, ...] = ()) -> list[Finding]:
        bucket = training_bucket(INDEX, (now_ms - START_MS) // 10_000, silent=silent)
        found, self.state = xid.detect(Window(INDEX, (bucket,), True, (), START_MS), self.state, now_ms)
        return found


def line(number: int, at_ms: int = 0, node: str = "n01", gpu: int | None = 2, **more: object) -> Event:
    event = Event(
        f"{node}-{gpu}-{number}-{at_ms}", START_MS + at_ms, node, gpu, EventKind.XID, str(number), f"Xid {number}"
    )
    return dataclasses.replace(event, **more)  # type: ignore[arg-type]  # whatever field the test says


def lifecycle(code: str, at_ms: int, node: str = "n01", gpu: int | None = 2) -> Event:
    return Event(f"l{at_ms}", START_MS + at_ms, node, gpu, EventKind.LIFECYCLE, code, "")


def test_a_fatal_xid_is_reported_at_once() -> None:
    (found,) = Feed().events(line(79))
    assert (found.node, found.gpu, found.cause) == ("n01", 2, "xid_79")
    assert (found.severity, found.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)
    assert found.job == "812"


def test_a_burst_is_one_finding_and_a_storm_keeps_the_state_small() -> None:
    feed = Feed()
    findings = [f for n in range(2000) for f in feed.events(line(95, n * 50))]
    assert len(findings) == 1
    assert feed.state is not None
    assert sum(len(b) for b in feed.state.bursts.values()) == 1


def test_the_same_code_after_the_gap_is_a_new_burst_and_five_of_them_ask_for_repair() -> None:
    feed = Feed()
    findings = [f for n in range(5) for f in feed.events(line(119, n * 10 * MINUTE))]
    assert len(findings) == 5
    assert "repair" not in findings[3].advice
    assert "repair" in findings[4].advice


def test_a_worse_line_within_a_burst_is_reported() -> None:
    feed = Feed()
    mild = "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 08 (0x00000004 0x00000100 0x0 0x0)"
    fatal = "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Fatal XC0 i0 Link 08 (0x00000084 0x00000040 0x0 0x0)"
    first = feed.events(line(145, message=mild))
    second = feed.events(line(145, 1000, message=fatal))
    assert [f.severity for f in first] != [Severity.CRITICAL]
    assert [f.severity for f in second] == [Severity.CRITICAL]
    assert second[0].kind is IncidentKind.LINK


def test_backlog_and_forgeable_lines_are_only_noted() -> None:
    for why in ({"backlog": True}, {"forgeable": True}):
        (found,) = Feed().events(line(79, **why))
        assert (found.severity, found.action) == (Severity.INFO, RecommendedAction.NONE)


def test_application_faults_without_a_job_are_information() -> None:
    for code in (13, 31, 43, 45):
        (found,) = Feed(job=None).events(line(code))
        assert (found.severity, found.action) == (Severity.INFO, RecommendedAction.NONE)


def test_an_application_fault_that_comes_back_on_one_gpu_asks_for_a_probe() -> None:
    feed = Feed(job=None)
    feed.events(line(31))
    (again,) = feed.events(line(31, 5 * HOUR))
    assert (again.severity, again.action, again.cause) == (Severity.WARNING, RecommendedAction.PROBE, "xid_31_repeated")
    (next_day,) = feed.events(line(31, 40 * HOUR))
    assert next_day.severity is Severity.INFO


def test_a_crash_on_many_nodes_is_one_note_for_the_job_and_counts_against_no_gpu() -> None:
    feed = Feed()
    for again in range(3):  # the program is started again and fails again
        at = again * HOUR
        found = feed.events(*(line(31, at + n, f"n0{n}", 1) for n in range(8)))
        assert [(f.scope, f.cause, f.severity) for f in found] == [("job", "job_crash", Severity.INFO)]
        assert len(found[0].members) == 8
        later = feed.tick(START_MS + at + 30_000)
        assert [f for f in later if not f.cleared] == []


def test_one_rank_that_fails_alone_is_reported_after_the_hold() -> None:
    feed = Feed()
    assert feed.events(line(31)) == []
    (found,) = feed.tick(START_MS + 20_000)
    assert (found.scope, found.severity) == ("gpu", Severity.INFO)


def test_xid_45_next_to_a_cause_joins_it() -> None:
    feed = Feed()
    feed.events(line(79))
    found = feed.events(*(line(45, 400, f"n0{n}", 0) for n in range(8)))
    assert {(f.node, f.gpu, f.cause, f.severity) for f in found} == {("n01", 2, "xid_79", Severity.INFO)}
    assert [f for f in feed.tick(START_MS + 30_000) if not f.cleared] == []


def test_a_storm_of_what_follows_is_attributed_to_its_cause_once_a_second_and_no_longer_than_it_lasts() -> None:
    feed = Feed()
    feed.events(line(79))
    storm = feed.events(*(line(74, at_ms, gpu=3) for at_ms in range(100, 2_100, 10)))
    assert [(f.cause, f.gpu, f.severity) for f in storm] == [("xid_79", 2, Severity.INFO)] * 2
    late = feed.events(*(line(74, at_ms, gpu=3) for at_ms in range(50_000, 121_000, 500)))  # one burst all the time
    assert [f.cause for f in late if f.severity is Severity.CRITICAL] == ["xid_74"]


def test_xid_45_before_its_cause_is_not_reported_alone() -> None:
    feed = Feed()
    assert feed.events(line(45, 0, "n05", 0)) == []
    (found,) = feed.events(line(79, 2000))
    assert any("XID 45" in e.text for e in found.evidence)
    assert [f for f in feed.tick(START_MS + 30_000) if not f.cleared] == []


def test_154_is_judged_by_its_text() -> None:
    text = "Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to {}"
    (reset,) = Feed().events(line(154, message=text.format("0x1 (GPU Reset Required)")))
    (p2p,) = Feed().events(line(154, message=text.format("0x3 (Drain P2P)")))
    assert (reset.severity, reset.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)
    assert p2p.severity is Severity.WARNING
    assert Feed().events(line(154, message=text.format("0x0 (None)"))) == []


def test_an_unknown_code_is_a_warning_to_watch() -> None:
    (found,) = Feed().events(line(999))
    assert (found.severity, found.action) == (Severity.WARNING, RecommendedAction.WATCH)


def test_a_code_that_is_no_number_is_ignored() -> None:
    assert Feed().events(line(79, code="?")) == []


def test_sxid_is_fatal_by_its_text() -> None:
    text = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22013, {}, Link 46 ..."
    fatal = line(0, gpu=None, kind=EventKind.SXID, code="22013", message=text.format("Fatal"))
    mild = line(0, gpu=None, kind=EventKind.SXID, code="22013", message=text.format("Non-fatal"))
    (found,) = Feed().events(fatal)
    assert (found.kind, found.scope, found.severity) == (IncidentKind.LINK, "node", Severity.CRITICAL)
    (found,) = Feed().events(mild)
    assert found.severity is Severity.INFO


def test_the_drivers_own_request_is_reported_without_a_line() -> None:
    feed = Feed()
    bucket = training_bucket(INDEX, 0)
    asked = np.zeros(INDEX.gpu_count)
    asked[10] = 1
    bucket = dataclasses.replace(bucket, gpu={**bucket.gpu, "recovery_action": asked})
    found, feed.state = xid.detect(Window(INDEX, (bucket,), True, (), START_MS), feed.state, bucket.end_ms)
    assert [(f.node, f.gpu, f.cause, f.action) for f in found] == [
        ("n01", 2, "recovery_action", RecommendedAction.DRAIN)
    ]


def test_a_fatal_one_is_over_only_when_the_gpu_is_back_and_quiet() -> None:
    feed = Feed()
    feed.events(line(79))
    assert feed.tick(START_MS + 5 * HOUR) == []  # silence alone mends nothing
    feed.events(lifecycle("gpu_back", 6 * HOUR), now_ms=START_MS + 6 * HOUR)
    assert feed.tick(START_MS + 6 * HOUR + 5 * MINUTE) == []
    assert feed.tick(START_MS + 6 * HOUR + 11 * MINUTE, silent=(1,)) == []  # back, but without telemetry
    (over,) = feed.tick(START_MS + 6 * HOUR + 12 * MINUTE)
    assert over.cleared
    assert (over.node, over.gpu) == ("n01", 2)


def test_a_hung_call_of_another_gpu_that_returned_mends_nothing() -> None:
    feed = Feed()
    feed.events(line(79))
    other = dataclasses.replace(lifecycle("driver_back", 6 * HOUR), gpu=3)
    feed.events(other, now_ms=START_MS + 6 * HOUR)
    assert feed.tick(START_MS + 6 * HOUR + 12 * MINUTE) == []
    whole = dataclasses.replace(lifecycle("driver_back", 7 * HOUR), gpu=None)  # the driver was loaded again
    feed.events(whole, now_ms=START_MS + 7 * HOUR)
    (over,) = feed.tick(START_MS + 7 * HOUR + 12 * MINUTE)
    assert over.cleared


def test_a_repeat_after_the_return_starts_the_wait_again() -> None:
    feed = Feed()
    feed.events(line(79))
    feed.events(lifecycle("gpu_back", HOUR), now_ms=START_MS + HOUR)
    feed.events(line(79, HOUR + 5 * MINUTE))
    assert feed.tick(START_MS + 2 * HOUR) == []


def test_old_bursts_are_forgotten() -> None:
    feed = Feed()
    feed.events(line(119))
    feed.tick(START_MS + 30 * HOUR)
    assert feed.state is not None
    assert feed.state.bursts == {}


def ticks(feed: Feed, start_ms: int, minutes: int, **columns: float) -> list[Finding]:
    """Buckets of `minutes`, in which GPU 2 of n01 has these values."""
    findings = []
    for n in range(minutes * 6):
        now_ms = START_MS + start_ms + n * 10_000
        bucket = training_bucket(INDEX, 0, start_ms=now_ms)
        for name, value in columns.items():
            bucket.gpu[name] = np.zeros(INDEX.gpu_count)  # type: ignore[index]  # a bucket of our own
            bucket.gpu[name][10] = value
        found, feed.state = xid.detect(Window(INDEX, (bucket,), True, (), START_MS), feed.state, now_ms + 10_000)
        findings += found
    return findings


def test_an_agent_that_starts_again_does_not_prove_that_the_gpu_was_reset() -> None:
    feed = Feed()
    feed.events(line(95))
    feed.events(lifecycle("agent_started", MINUTE, gpu=None))
    assert ticks(feed, 2 * MINUTE, 30) == []


def test_a_driver_loaded_again_is_proof_of_a_reset() -> None:
    feed = Feed()
    feed.events(line(95))
    assert ticks(feed, MINUTE, 15, energy_j=5e8) == []
    assert [f.cleared for f in ticks(feed, 16 * MINUTE, 12, energy_j=1e3)] == [True]


def test_a_gpu_that_was_away_while_its_node_spoke_is_back_when_it_answers() -> None:
    feed = Feed()
    feed.events(line(95))
    away = training_bucket(INDEX, 1)
    away.gpu_rows[10] = 0
    _, feed.state = xid.detect(Window(INDEX, (away,), True, (), START_MS), feed.state, START_MS + 20_000)
    assert [f.cleared for f in ticks(feed, MINUTE, 12)] == [True]


def test_a_driver_that_asks_for_nothing_any_more_ends_what_it_asked_for() -> None:
    feed = Feed()
    assert {f.action for f in ticks(feed, 0, 2, recovery_action=1)} == {RecommendedAction.DRAIN}
    assert [f.cleared for f in ticks(feed, 2 * MINUTE, 12, recovery_action=0)] == [True]


def test_what_the_driver_asks_for_is_rated_as_its_xid_154_is_and_unknown_numbers_drain_nothing() -> None:
    for number in (3, 200):  # drain P2P, and one of a newer driver
        found = ticks(Feed(), 0, 1, recovery_action=number)
        assert {(f.severity, f.action) for f in found} == {(Severity.WARNING, RecommendedAction.WATCH)}


def test_advice_says_first_what_the_verdict_asks_for() -> None:
    for code in range(1, 200):
        (found, *_) = Feed(job=None).events(line(code)) or [None]
        if found is None:
            continue
        drains = found.advice.startswith("Drain the node")
        assert drains == (found.action is RecommendedAction.DRAIN), (code, found.advice)
        if found.severity is Severity.WARNING:
            assert "Nothing to do" not in found.advice.split(".")[0], code

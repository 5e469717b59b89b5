"""Ranks' own reports name the rank that stopped a job: recorded dumps, with and without telemetry that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import KEPT, LAG_MS, START_MS, small_fleet, training_bucket
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.hang import detector as hang
from drover_collector.detectors.hang.ranks import KEPT_MS, MAX_PENDING, SETTLE_MS, RankReports
from drover_collector.detectors.risk.model import Trouble
from drover_collector.engine.engine import Engine
from drover_collector.engine.replay import replay
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.jobs.rank_report import RankReport
from drover_core.model.events import Event, EventKind, Finding, IncidentKind, RecommendedAction, Severity
from testbed.rank_events import rank_event, rank_events, report

Columns = dict[str, np.ndarray]
SENT = 8  # the bucket after which the ranks' reports come
SENT_MS = START_MS + (SENT + 1) * BUCKET_MS + LAG_MS
STOPS = 5  # 36 s before that, as in the recording
Change = Callable[[int, Columns, Columns], None]


def waits(number: int, gpu: Columns, _node: Columns) -> None:
    """All GPUs spin from bucket STOPS on; that of rank 2 too, so that telemetry names none."""
    if number >= STOPS:
        gpu["tensor_active_ratio"][:], gpu["dram_active_ratio"][:] = 0.0, 0.01
        gpu["power_w"][:], gpu["gpu_util_ratio"][:] = 210.0, 1.0


def works(_number: int, _gpu: Columns, _node: Columns) -> None:
    pass


def run(
    events: Sequence[Event], change: Change = waits, count: int = 12, index: FleetIndex | None = None,
    ends: int = 1 << 30, troubles: dict[str, dict[str, Trouble]] | None = None,
) -> list[tuple[int, Finding]]:  # fmt: skip
    """Play buckets and, after bucket SENT, the events in one call; return (time, finding) of all calls."""
    index = index or small_fleet(1, 4)
    held, state, found = Buckets(KEPT), None, []
    for number in range(count):
        bucket = training_bucket(index, number, change, job="4711")
        held.append(bucket if number < ends else replace(bucket, jobs=np.full(index.gpu_count, -1, np.int32)))
        for fresh, new in ((True, ()), (False, tuple(events) if number == SENT else ())):
            if fresh or new:
                now_ms = START_MS + (number + 1) * BUCKET_MS + LAG_MS
                findings, state = hang.detect(
                    Window(index, held.all(), fresh, new, START_MS, None, troubles), state, now_ms
                )
                found += [(now_ms, finding) for finding in findings]
    return found


def test_the_rank_is_named_in_the_call_that_brings_the_last_report() -> None:
    at_ms, found = run(rank_events("skip", SENT_MS, "n00"))[0]
    assert at_ms == SENT_MS
    assert (found.kind, found.cause, found.scope, found.node, found.gpu) == (
        IncidentKind.HANG, "rank_missing", "gpu", "n00", 2
    )  # fmt: skip
    assert found.summary == (
        "Rank 2 (GPU 2 of node n00) never came to all_reduce 13; 3 others wait there."
        " Job 4711 has made no progress for 36 s."
    )
    assert (found.severity, found.action, found.job) == (Severity.CRITICAL, RecommendedAction.WATCH, "4711")
    assert (found.lost_gpus, found.waiting_gpus) == (1.0, 3.0)
    assert "as its agent reports it" in found.evidence[1].text


def test_a_rank_that_came_with_another_size_is_the_programs_error() -> None:
    found = run(rank_events("size", SENT_MS, "n00"))[0][1]
    assert (found.cause, found.gpu) == ("collective_mismatch", 1)
    assert "came with size [96] where the others came with size [64] in all_reduce 13" in found.summary
    assert found.advice.startswith("It is the program")


def test_a_rank_that_left_nothing_is_named_within_seconds_of_the_last_report() -> None:
    """Its GPU is the one that no other rank has."""
    first_ms, found = run(rank_events("skip", SENT_MS, "n00", skip=(2,)))[0]
    assert SETTLE_MS <= first_ms - SENT_MS <= 10_000
    assert (found.node, found.gpu) == ("n00", 2)
    assert found.summary.startswith("Rank 2 (GPU 2 of node n00) left no dump; 3 others wait in all_reduce 13")


def test_without_the_gpus_of_processes_the_usual_order_of_ranks_counts_and_is_said() -> None:
    index = small_fleet(2, 2)
    events = [rank_event(report("skip", rank, SENT_MS), f"n0{1 - rank // 2}", None, SENT_MS) for rank in range(4)]
    found = run(events, index=index)[0][1]
    assert (found.node, found.gpu) == ("n00", 0), "rank 2 is the first of its node"
    assert "by the usual order of ranks" in found.evidence[1].text


def test_reports_that_fit_no_order_name_the_rank_and_no_gpu() -> None:
    index = small_fleet(2, 2)
    events = [rank_event(report("skip", rank, SENT_MS), f"n0{rank % 2}", None, SENT_MS) for rank in range(4)]
    found = run(events, index=index)[0][1]
    assert (found.scope, found.node, found.gpu, found.cause) == ("job", None, None, "rank_missing")
    assert found.summary.startswith("Rank 2 never came to all_reduce 13")
    assert "not known" in found.evidence[1].text


def test_what_telemetry_has_reported_goes_on_as_one_incident_with_the_ranks_name() -> None:
    """The standstill is reported as one of the job, before any dump: its incident gets the name."""
    index, policy, late_ms = small_fleet(1, 4), Policy.load(), SENT_MS + 100_000
    buckets = [training_bucket(index, number, waits, job="4711") for number in range(SENT + 20)]
    outcomes = replay(index, buckets, rank_events("skip", late_ms, "n00"), policy)
    versions = [incident for outcome in outcomes for incident in outcome.incidents if incident.kind == "hang"]
    assert len({incident.id for incident in versions}) == 1
    assert [versions[0].cause, versions[-1].cause] == ["standstill", "rank_missing"]
    assert versions[0].severity is Severity.WARNING and versions[-1].severity is Severity.CRITICAL
    assert versions[-1].updated_ms == late_ms
    assert "Rank 2 (GPU 2 of node n00) never came to all_reduce 13" in versions[-1].summary


def test_a_job_whose_gpus_work_on_hangs_nowhere() -> None:
    assert run(rank_events("skip", SENT_MS, "n00"), works, SENT + 20) == []


def test_a_mismatch_is_reported_at_once_and_withdrawn_when_the_job_works_on() -> None:
    times = [at_ms - SENT_MS for at_ms, _ in run(rank_events("size", SENT_MS, "n00"), works, SENT + 20)]
    assert times[0] <= 10_000, "rank 0 left no dump"
    assert times[-1] <= 30_000


def test_ranks_that_wait_for_a_moment_accuse_nobody() -> None:
    """A dump on demand, while one rank saves: the others came seconds ago."""

    def shortly(each: RankReport) -> RankReport:
        group = each.groups[0]
        later = [replace(o, created_ns=o.created_ns + 25_000 * 1_000_000) for o in group.operations]
        return replace(each, groups=(replace(group, operations=tuple(later)),))

    reports = [report("skip", rank, SENT_MS) for rank in range(4)]
    assert run([rank_event(shortly(each), "n00", each.rank, SENT_MS) for each in reports]) == []


def test_an_older_dump_of_another_run_is_not_compared() -> None:
    events = [
        rank_event(report("skip", rank, SENT_MS - (600_000 if rank == 2 else 0)), "n00", rank, SENT_MS)
        for rank in range(4)
    ]
    found = run(events)
    assert all("left no dump" in finding.summary for _, finding in found)
    assert found, "the others still wait for it"


def test_a_job_that_has_ended_is_not_reported_for_long() -> None:
    found = run(rank_events("skip", SENT_MS, "n00"), count=SENT + 20, ends=SENT)
    assert found[0][1].job == "4711"
    assert found[-1][0] - SENT_MS <= hang.QUIET_MS


def test_it_is_over_when_the_job_works_again() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number < SENT + 3:
            waits(number, gpu, node)

    found = run(rank_events("skip", SENT_MS, "n00"), change, SENT + 20)
    assert found[-1][0] <= SENT_MS + 40_000


def test_a_later_hang_of_the_job_is_not_that_of_the_old_dumps() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        if number < SENT + 3 or number >= SENT + 12:
            waits(number, gpu, node)

    found = run(rank_events("skip", SENT_MS, "n00"), change, SENT + 40)
    later = [finding for at_ms, finding in found if at_ms > SENT_MS + 100_000]
    assert later and {finding.cause for finding in later} == {"standstill"}


def test_a_job_that_stays_is_reported_for_half_an_hour_without_a_word_of_telemetry() -> None:
    def blind(_number: int, gpu: Columns, _node: Columns) -> None:
        gpu.clear()

    count = SENT + KEPT_MS // BUCKET_MS + 20
    found = run(rank_events("skip", SENT_MS, "n00"), blind, count)
    assert KEPT_MS - 20_000 <= found[-1][0] - SENT_MS <= KEPT_MS + 20_000


def test_hardware_that_is_accused_already_is_said_and_so_is_that_none_is() -> None:
    trouble = Trouble("abc1", SENT_MS - 60_000, None, "xid/xid_79")
    found = run(rank_events("skip", SENT_MS, "n00"), troubles={"n00": {"abc1": trouble}})[0][1]
    assert any("incident abc1, xid/xid_79, open" in each.text for each in found.evidence)
    assert "hardware" in found.advice
    none = run(rank_events("skip", SENT_MS, "n00"), troubles={})[0][1]
    assert any("no incident accuses the hardware of n00" in each.text for each in none.evidence)


def test_the_job_of_a_report_is_one_of_its_own_node() -> None:
    """A user cannot name another's job: its node holds none of its GPUs."""
    index, held = small_fleet(2, 4), Buckets(KEPT)
    jobs = np.where(np.arange(8) < 4, 0, -1).astype(np.int32)
    held.append(replace(training_bucket(index, 0, works, job="4711"), jobs=jobs))
    _, state = hang.detect(Window(index, held.all(), True, (), START_MS), None, START_MS + 17_000)
    for node, findings in (("n01", 0), ("n00", 1)):
        events = tuple(
            rank_event(report("size", rank, START_MS + 18_000, "4711"), node, None, START_MS + 18_000)
            for rank in (1, 2, 3)
        )
        found, state = hang.detect(Window(index, held.all(), False, events, START_MS), state, START_MS + 24_000)
        found, state = hang.detect(Window(index, held.all(), True, (), START_MS), state, START_MS + 34_000)
        assert len(found) == findings, node


def test_what_is_no_report_changes_nothing() -> None:
    broken = Event("x", SENT_MS, "n00", 0, EventKind.RANK, "collective", "{", "rank_dumps", received_ms=SENT_MS)
    assert run([broken]) == []


def test_a_replay_gives_the_live_runs_incident_and_no_node_is_taken_out() -> None:
    index, policy = small_fleet(1, 4), Policy.load()
    events = rank_events("skip", SENT_MS, "n00", skip=(2,))
    buckets = [training_bucket(index, number, waits, job="4711") for number in range(14)]
    live = Engine(index, policy, START_MS)
    outcomes = []
    for number, bucket in enumerate(buckets):
        outcomes.append(live.on_bucket(bucket, bucket.end_ms + LAG_MS))
        if number == SENT:
            outcomes += [live.on_events([event], SENT_MS) for event in events]
    replayed = list(replay(index, buckets, reversed(events), policy))
    for found in (outcomes, replayed):
        (incident,) = {i.id: i for outcome in found for i in outcome.incidents}.values()
        assert (incident.cause, incident.node, incident.gpu) == ("rank_missing", "n00", 2)
        assert all(decision.outcome != "act" for outcome in found for decision in outcome.decisions)
    assert {i.id for o in outcomes for i in o.incidents} == {i.id for o in replayed for i in o.incidents}


def test_reports_whose_job_is_not_known_cost_little_where_there_are_thousands_of_jobs() -> None:
    """Found by an attack: 256 of them took 13 s of each tick, as each was compared with each of 10,000 jobs."""
    index = small_fleet(2000, 1)
    held = {f"j{number}": np.array([number // 2]) for number in range(4000)}  # two jobs on each GPU: none is the one
    sent = report("skip", 0, SENT_MS)
    events = tuple(rank_event(sent, f"n{number:02d}", None, SENT_MS) for number in range(300))
    reports, began_s = RankReports(), time.process_time()
    reports.take(Window(index, (), False, events, START_MS), held, SENT_MS)
    assert len(reports.pending) == MAX_PENDING
    assert time.process_time() - began_s < 10


def test_a_hang_that_its_ranks_have_reported_first_stays_one_incident_when_telemetry_shows_it() -> None:
    """The dumps of a mismatch come in seconds. The standstill comes in minutes and names no GPU: no second incident."""
    index = small_fleet(1, 4)
    buckets = [training_bucket(index, number, waits, job="4711") for number in range(SENT + 40)]
    outcomes = replay(index, buckets, rank_events("size", SENT_MS, "n00"), Policy.load())
    versions = [incident for outcome in outcomes for incident in outcome.incidents if incident.kind == "hang"]
    assert {(incident.scope, incident.node, incident.gpu) for incident in versions} == {("gpu", "n00", 1)}
    assert len({incident.id for incident in versions}) == 1
    assert versions[-1].closed_ms is None
    (lost, waited) = (versions[-1].gpu_hours_lost or 0.0, versions[-1].gpu_hours_waited or 0.0)
    assert waited == pytest.approx(3 * lost), "one GPU stopped, three wait: each hour counts once"

"""Silence: of a GPU, a node, a rack, and of the collector itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import START_MS, play, small_fleet, training_bucket
from drover_collector.detectors._lib.report_interval import ReportInterval
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.detectors.liveness.peers import PeersOfSilent, Progress
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Event,
    EventKind,
    Finding,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import FleetSpec, NodeSpec


@pytest.fixture(autouse=True)
def _no_wait_for_a_single_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a single node is waited for has tests of its own: test_single_silent_node.py."""
    monkeypatch.setattr(PeersOfSilent, "progress", lambda *_: Progress.STOPPED)


def run(
    count: int,
    silent: Callable[[int], Sequence[int]] = lambda number: (),
    events: dict[int, list[Event]] | None = None,
    nodes: int = 8,
    change: Callable[[int, dict[str, np.ndarray], dict[str, np.ndarray]], None] | None = None,
    gone_gpus: Callable[[int], Iterable[int]] = lambda number: (),
) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(nodes), count, change, silent, events):
        bucket = window.buckets[-1]
        number = (bucket.start_ms - START_MS) // 10_000
        if window.fresh:
            bucket.gpu_rows[list(gone_gpus(number))] = 0
        findings, state = liveness.detect(window, state, now_ms)
        reported += findings
    return reported


def lifecycle(code: str, node: str = "n02", gpu: int | None = None, at_ms: int = 39_000) -> Event:
    return Event(f"{code}-{node}-{gpu}", START_MS + at_ms, node, gpu, EventKind.LIFECYCLE, code, "")


def test_two_missed_buckets_are_no_silence() -> None:
    assert run(12, lambda number: [2] if number in (4, 5) else []) == []


def test_a_silent_node_is_a_warning_first_and_asks_for_a_drain_after_five_minutes() -> None:
    reported = run(40, lambda number: [2] if number >= 4 else [])
    assert {f.node for f in reported} == {"n02"}
    assert (reported[0].severity, reported[0].action) == (Severity.WARNING, RecommendedAction.ADVISE)
    assert reported[0].ts_ms - reported[0].since_ms == 30_000 + 7_000
    strong = next(f for f in reported if f.severity is Severity.CRITICAL)
    assert strong.action is RecommendedAction.DRAIN
    assert strong.ts_ms - strong.since_ms == liveness.DRAIN_AFTER_MS + 7_000
    assert reported[0].lost_gpus == 8


def test_a_node_that_comes_back_is_over() -> None:
    reported = run(14, lambda number: [2] if 4 <= number < 10 else [])
    assert reported[-1].cleared
    assert not any(f.cleared for f in reported[:-1])


def test_no_single_node_is_blamed_while_no_node_reports_or_right_after() -> None:
    reported = run(20, lambda number: range(8) if 4 <= number < 12 else [1, 2] if number == 12 else [])
    assert {f.cause for f in reported} == {"no_telemetry"}
    assert {f.action for f in reported} == {RecommendedAction.NONE}


@pytest.mark.parametrize("gap", [1, 2])
def test_buckets_that_nobody_was_in_time_for_neither_end_a_silence_nor_call_the_fleet_silent(gap: int) -> None:
    """Rows that come late, a collector that stalled: the node that was silent before it is so after."""
    reported = run(40, lambda number: range(8) if 12 <= number < 12 + gap else [2] if number >= 4 else [])
    assert {(f.scope, f.node, f.cause) for f in reported} == {("node", "n02", "silent")}
    assert not any(f.cleared for f in reported)
    assert run(20, lambda number: range(8) if 12 <= number < 12 + gap else []) == []


def test_a_node_whose_rows_come_late_is_reported_as_late_and_never_drained() -> None:
    def run_late(late: Callable[[int], Sequence[int]], count: int, away: Sequence[int]) -> list[Finding]:
        index, state, reported, held = small_fleet(12), None, [], Buckets(6)
        for window, now_ms in play(index, count, None, lambda number: away if number >= 4 else []):
            number = (window.newest.start_ms - START_MS) // 10_000
            names = frozenset(index.nodes[n].name for n in late(number))
            held.append(dataclasses.replace(window.newest, late=names))
            findings, state = liveness.detect(dataclasses.replace(window, buckets=held.all()), state, now_ms)
            reported += findings
        return reported

    reported = run_late(lambda number: [2] if number >= 4 else [], 60, [2])
    assert {(f.node, f.cause, f.severity, f.action) for f in reported} == {
        ("n02", "late", Severity.WARNING, RecommendedAction.ADVISE)
    }
    assert reported[0].ts_ms == START_MS + 40_000 + liveness.DRAIN_AFTER_MS + 7_000
    rack = [4, 5, 6, 7]
    assert run_late(lambda number: rack if number >= 4 else [], 20, rack) == [], "no rack is silent"
    dies = run_late(lambda number: [2] if 4 <= number < 30 else [], 70, [2])
    first = {f.severity: f.ts_ms - START_MS - 7_000 for f in reversed(dies) if f.cause == "silent"}
    assert first == {Severity.WARNING: 330_000, Severity.CRITICAL: 600_000}, "counted from its last word"


def test_who_waits_for_its_turn_to_come_back_is_not_silent_and_who_does_not_come_is() -> None:
    """After the collector was away all agents connect at once, and are let in one after the other."""

    def away(number: int) -> Sequence[int]:
        if number < 4:
            return ()
        return range(100) if number < 6 else range(min(60 + 8 * (number - 6), 99), 100)

    reported = run(18, away, nodes=100)
    assert {(f.node, f.cause) for f in reported} == {("n99", "silent")}
    assert reported[0].ts_ms == START_MS + 140_000 + 7_000  # 30 s after the last of the others


def test_a_trickle_of_returns_hides_nobody_for_longer_than_five_minutes() -> None:
    def away(number: int) -> Sequence[int]:
        if number < 4:
            return ()
        return range(100) if number < 6 else range(min(24 + 2 * (number - 6), 99), 100)

    reported = run(45, away, nodes=100)
    first = min(f.ts_ms for f in reported if f.cause == "silent")
    assert first == START_MS + 60_000 + liveness.COMING_MS + 30_000 + 7_000


def test_most_of_the_fleet_at_once_is_one_finding() -> None:
    reported = run(10, lambda number: range(6) if number >= 4 else [], nodes=8)
    assert {(f.cause, len(f.members)) for f in reported} == {("no_telemetry", 6)}


def test_a_rack_is_one_finding_and_its_return_is_its_end() -> None:
    reported = run(14, lambda number: [4, 5, 6, 7] if 4 <= number < 10 else [], nodes=16)
    assert {(f.scope, f.cause) for f in reported} == {("rack", "silent")}
    assert {node for node, _ in reported[0].members} == {"n04", "n05", "n06", "n07"}
    assert reported[-1].cleared


def test_an_expected_node_that_never_came() -> None:
    reported = run(10, lambda number: [5])
    assert {(f.node, f.cause, f.severity) for f in reported} == {("n05", "never_came", Severity.WARNING)}
    assert reported[0].ts_ms >= START_MS + liveness.NEVER_CAME_MS


def test_a_stopped_agent_is_planned_until_its_node_speaks_again() -> None:
    silent = lambda number: [2] if 4 <= number < 9 or number >= 12 else []  # noqa: E731  # shorter than a def here
    reported = run(20, silent, {3: [lifecycle("agent_stopped")]})
    assert reported[0].cause == "agent_stopped"
    assert {f.severity for f in reported if f.cause == "agent_stopped"} == {Severity.INFO}
    assert any(f.cause == "silent" for f in reported)  # the second silence was announced by nobody


def test_rows_that_come_after_the_stop_do_not_end_it() -> None:
    """An agent sends what it has read before it ends; a planned reboot is no silence."""
    reported = run(60, lambda number: [2] if number >= 6 else [], {3: [lifecycle("agent_stopped")]})
    assert {(f.cause, f.severity) for f in reported} == {("agent_stopped", Severity.INFO)}


def test_an_agent_that_starts_after_a_planned_stop_has_time_for_its_first_rows() -> None:
    """A planned reboot of ten minutes must not end in a drain because the first row comes a bucket after the start."""
    away = lambda number: [2] if 4 <= number < 66 else []  # noqa: E731  # shorter than a def here
    started = lifecycle("agent_started", at_ms=644_000)
    reported = run(80, away, {3: [lifecycle("agent_stopped")], 64: [started]})
    assert {(f.cause, f.severity) for f in reported} == {("agent_stopped", Severity.INFO)}


def test_an_agent_that_starts_and_sends_no_row_is_silent_from_then_on() -> None:
    started = lifecycle("agent_started", at_ms=644_000)
    reported = run(120, lambda number: [2] if number >= 4 else [], {3: [lifecycle("agent_stopped")], 64: [started]})
    first = min(f.ts_ms for f in reported if f.cause == "silent")
    assert START_MS + 670_000 <= first <= START_MS + 700_000
    assert any(f.cause == "silent" and f.action is RecommendedAction.DRAIN for f in reported)


def test_a_gpu_that_the_agent_lost_is_reported_at_once_and_until_it_is_back() -> None:
    reported = run(9, events={3: [lifecycle("gpu_lost", gpu=4)], 6: [lifecycle("gpu_back", gpu=4, at_ms=70_000)]})
    assert {(f.scope, f.node, f.gpu, f.cause) for f in reported} == {("gpu", "n02", 4, "gpu_lost")}
    assert reported[0].severity is Severity.CRITICAL
    assert reported[-1].cleared


def test_a_gpu_whose_rows_stop_is_lost() -> None:
    reported = run(9, gone_gpus=lambda number: [20] if number >= 3 else [])
    assert {(f.node, f.gpu, f.cause) for f in reported} == {("n02", 4, "gpu_lost")}


def test_a_gpu_whose_values_stop_is_lost_although_its_rows_come() -> None:
    def fade(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= 3:
            for name in liveness.CORE:
                gpu[name][20] = np.nan

    assert {(f.node, f.gpu, f.cause) for f in run(9, change=fade)} == {("n02", 4, "gpu_lost")}


def test_a_gpu_that_never_came_is_missing() -> None:
    reported = run(10, gone_gpus=lambda number: [20])
    assert {(f.gpu, f.cause, f.severity) for f in reported} == {(4, "gpu_missing", Severity.WARNING)}


def test_all_gpus_of_a_node_together_are_its_drivers_fault() -> None:
    reported = run(9, gone_gpus=lambda number: range(16, 24) if number >= 3 else [])
    assert {(f.scope, f.node, f.cause) for f in reported} == {("node", "n02", "driver_lost")}


def test_a_hung_driver_is_one_finding_not_eight() -> None:
    reported = run(
        9,
        events={3: [lifecycle("driver_hung")], 7: [lifecycle("driver_back", at_ms=80_000)]},
        gone_gpus=lambda number: range(16, 24) if 3 <= number < 8 else [],
    )
    assert {(f.scope, f.cause) for f in reported} == {("node", "driver_hung")}
    assert reported[-1].cleared


def test_a_call_that_returned_for_one_gpu_ends_neither_the_hang_of_another_nor_a_missing_driver() -> None:
    hung = {3: [lifecycle("driver_hung", gpu=4), lifecycle("driver_hung", gpu=5)]}
    one_back = {6: [lifecycle("driver_back", gpu=4, at_ms=69_000)]}
    assert not any(f.cleared for f in run(9, events=hung | one_back))
    both_back = {6: [lifecycle("driver_back", gpu=gpu, at_ms=69_000) for gpu in (4, 5)]}
    assert run(9, events=hung | both_back)[-1].cleared
    missing = {3: [lifecycle("driver_hung", gpu=4), lifecycle("driver_missing")]}
    reported = run(9, events=missing | one_back, gone_gpus=lambda number: range(16, 24) if number >= 3 else [])
    assert {f.cause for f in reported if not f.cleared and f.ts_ms > START_MS + 80_000} == {"driver_missing"}


def test_a_driver_that_an_operator_had_released_is_no_fault_until_it_is_missing() -> None:
    silent = {"gone_gpus": lambda number: range(16, 24) if number >= 3 else []}
    assert run(9, events={3: [lifecycle("driver_released")]}, **silent) == []
    missing = {3: [lifecycle("driver_released")], 7: [lifecycle("driver_missing", at_ms=79_000)]}
    assert {(f.scope, f.cause) for f in run(9, events=missing, **silent)} == {("node", "driver_missing")}
    back = {3: [lifecycle("driver_released")], 6: [lifecycle("driver_back", at_ms=69_000)]}
    assert {(f.scope, f.cause) for f in run(9, events=back, **silent)} == {("node", "driver_lost")}


@pytest.mark.parametrize("how", ["event", "metric"])
def test_a_wrong_clock_is_a_warning_that_drains_nothing(how: str) -> None:
    def shift(number: int, _gpu: dict[str, np.ndarray], node: dict[str, np.ndarray]) -> None:
        node["clock_offset_s"] = np.zeros(8)
        node["clock_offset_s"][2] = 40.0 if how == "metric" else 0.0

    reported = run(4, change=shift, events={2: [lifecycle("clock_wrong")]} if how == "event" else None)
    assert {(f.node, f.cause, f.action) for f in reported} == {("n02", "clock_wrong", RecommendedAction.NONE)}


def test_missing_buckets_are_not_held_against_the_nodes() -> None:
    state, reported = None, []
    for window, now_ms in play(small_fleet(), 30, silent=lambda number: [2] if number in (20, 21) else []):
        number = (window.newest.start_ms - START_MS) // 10_000
        if 5 <= number < 20:
            continue  # the collector was away
        findings, state = liveness.detect(window, state, now_ms)
        reported += findings
    assert reported == []


def test_long_buckets_need_three_of_them() -> None:
    state, reported = None, []
    for window, _now_ms in play(small_fleet(), 9, silent=lambda number: [2] if number >= 4 else []):
        longer = dataclasses.replace(
            window.newest, start_ms=START_MS + (window.newest.start_ms - START_MS) * 30, length_ms=300_000
        )
        window = dataclasses.replace(window, buckets=(longer,))
        findings, state = liveness.detect(window, state, longer.end_ms + 7000)
        reported.append((longer.start_ms, len(findings)))
    assert [count for _, count in reported] == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_gpus_of_a_node_that_comes_back_get_the_time_in_which_its_driver_starts() -> None:
    slots = range(16, 24)
    reported = run(
        40, lambda number: [2] if 4 <= number < 24 else [], gone_gpus=lambda number: slots if 4 <= number < 26 else []
    )
    assert {f.cause for f in reported} == {"silent"}
    stays_away = run(
        40, lambda number: [2] if 4 <= number < 24 else [], gone_gpus=lambda number: [19] if number >= 4 else []
    )
    assert next((f.gpu, f.action) for f in stays_away if f.cause == "gpu_lost") == (3, RecommendedAction.ADVISE)


def test_a_lost_gpu_is_not_over_because_its_node_says_nothing() -> None:
    reported = run(
        14, lambda number: [2] if number in (9, 10) else [], gone_gpus=lambda number: [19] if number >= 3 else []
    )
    assert {(f.cause, f.cleared) for f in reported} == {("gpu_lost", False)}
    back = run(14, lambda number: [2] if number in (9, 10) else [], gone_gpus=lambda n: [19] if 3 <= n < 11 else [])
    assert [f.cleared for f in back if f.cause == "gpu_lost"][-1]


def test_a_node_whose_clock_is_wrong_is_not_drained_for_samples_that_come_too_late() -> None:
    wrong = {1: [lifecycle("clock_wrong", at_ms=20_000)]}
    reported = run(100, lambda number: [2] if number >= 2 else [], wrong)
    assert {(f.cause, f.action) for f in reported} == {
        ("clock_wrong", RecommendedAction.NONE),
        ("silent", RecommendedAction.ADVISE),
    }
    assert all("clock" in f.summary for f in reported)


def test_nodes_without_gpus_are_not_missed_where_only_gpus_were_recorded() -> None:
    index = FleetIndex(FleetSpec((*small_fleet(4).nodes, NodeSpec("login", gpus=0))))
    state, reported = None, []
    for window, now_ms in play(index, 12, silent=lambda number: [4]):
        bare = dataclasses.replace(window, buckets=tuple(dataclasses.replace(b, node={}) for b in window.buckets))
        findings, state = liveness.detect(bare, state, now_ms)
        reported += findings
    assert reported == []


def test_nodes_that_are_still_away_when_the_collectors_trouble_ends_are_judged_from_then_on() -> None:
    reported = run(50, lambda number: range(5) if 4 <= number < 45 else [0] if number >= 45 else [])
    assert {f.cause for f in reported} == {"no_telemetry", "silent"}
    assert {f.action for f in reported} == {RecommendedAction.NONE, RecommendedAction.ADVISE}


def coming_back(number: int) -> list[int]:
    """Return who of a rack is silent: its nodes come back one after the other, and the last one does not."""
    away = {4: [4, 5, 6, 7], 10: [5, 6, 7], 11: [6, 7], 12: [7]}
    return away[max(n for n in away if n <= number)] if number >= 4 else []


def test_a_silent_rack_that_comes_back_node_by_node_stays_one_finding_for_ten_minutes() -> None:
    reported = run(12 + 59, coming_back, nodes=12)
    assert {f.scope for f in reported if not f.cleared} == {"rack"}


def test_a_node_that_does_not_come_back_with_its_rack_is_reported_alone_after_ten_minutes() -> None:
    reported = run(12 + 62, coming_back, nodes=12)
    assert {f.node for f in reported if f.scope == "node"} == {"n07"}


def test_a_node_that_dies_in_a_rack_that_comes_back_is_reported_alone_though_half_of_the_rack_is_silent_then() -> None:
    reported = run(12 + 66, lambda number: [*coming_back(number), *([5] if number >= 30 else [])], nodes=12)
    assert {f.node for f in reported if f.scope == "node"} == {"n05", "n07"}
    assert next(f for f in reported if f.scope == "rack" and f.cleared).ts_ms <= START_MS + 760_000


def test_a_rack_that_loses_its_power_again_is_waited_for_again() -> None:
    def away(number: int) -> list[int]:
        return coming_back(number) if number < 40 else coming_back(number - 36)

    assert {f.scope for f in run(36 + 12 + 34, away, nodes=12) if not f.cleared} == {"rack"}


def test_gpus_that_are_lost_at_once_are_no_lost_rows_of_their_node() -> None:
    """Five of eight, behind one switch: the other three answer each time."""
    reported = run(30, gone_gpus=lambda number: range(16, 21) if number >= 4 else ())
    strong = [f for f in reported if f.action is RecommendedAction.DRAIN]
    assert {(f.node, f.gpu) for f in strong} == {("n02", gpu) for gpu in range(5)}
    assert strong[0].ts_ms - strong[0].since_ms == liveness.GPU_DRAIN_MS + 7_000


def test_values_of_a_gpu_that_an_agent_called_lost_end_it_when_no_word_of_its_return_came() -> None:
    reported = run(12, events={1: [lifecycle("gpu_lost", gpu=3, at_ms=20_000)]})
    assert reported[0].cause == "gpu_lost"
    assert reported[-1].cleared


def test_after_a_pause_of_the_collector_a_silence_is_said_from_the_nodes_last_report_and_judged_from_the_pause() -> (
    None
):
    """ "Silent for 1 min" was shown next to "last report 38 min ago"."""
    index, state, held, reported = small_fleet(), None, Buckets(6), list[tuple[int, Finding]]()
    for window, now_ms in play(index, 30, None, lambda number: [2] if number >= 6 else []):
        number = (window.newest.start_ms - START_MS) // 10_000
        if 10 <= number < 15:
            continue  # five buckets are missing: the collector stood still
        held.append(window.newest)
        found, state = liveness.detect(dataclasses.replace(window, buckets=held.all()), state, now_ms)
        reported += [(number, f) for f in found]
    assert [number for number, f in reported if f.action is not RecommendedAction.NONE][:2] == [8, 9], (
        "before the pause"
    )
    first = next((number, f) for number, f in reported if number >= 17 and "silent for" in f.summary)
    assert first[1].since_ms == START_MS + 60_000, "its last report"
    assert "for 2 min" in first[1].summary
    assert not any(f.cleared for _, f in reported)


def test_a_silence_begins_with_the_last_sample_and_not_with_the_end_of_its_bucket() -> None:
    state, reported = None, list[Finding]()
    for window, now_ms in play(small_fleet(), 12, None, lambda number: [2] if number >= 6 else []):
        if window.newest.start_ms == START_MS + 50_000:
            window.newest.node_rows[2] = window.newest.gpu_rows[16:24] = 2  # of ten: the node died 2 s into the bucket
            assert window.report_interval is not None
            window.report_interval.add_bucket(window.newest)
        found, state = liveness.detect(window, state, now_ms)
        reported += found
    assert {f.since_ms for f in reported} == {START_MS + 52_000}


def test_a_gpu_without_values_is_a_warning_first_and_a_row_past_a_buckets_edge_is_no_missed_one() -> None:
    """Two rows of one GPU are lost around a bucket that has no row of its node's others, as their clock drifts."""

    def fade(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        for metric in liveness.CORE:
            gpu[metric][20] = np.nan if number >= 4 else gpu[metric][20]

    found = [f for f in run(20, change=fade) if f.cause == "gpu_lost"]
    assert [f.action for f in found[:3]] == [RecommendedAction.ADVISE] * 3
    assert found[-1].action is RecommendedAction.DRAIN
    assert next(f.ts_ms - f.since_ms for f in found if f.action is RecommendedAction.DRAIN) >= liveness.GPU_DRAIN_MS

    index, state, edge = small_fleet(), None, []
    held, interval = Buckets(6), ReportInterval(index)
    for number in range(12):
        bucket = training_bucket(index, number, silent=[2] if number == 6 else [])
        if number in (4, 5):
            bucket.gpu_rows[20] = 0
            for metric in liveness.CORE:
                bucket.gpu[metric][20] = np.nan
        held.append(bucket)
        interval.add_bucket(bucket)
        window = Window(index, held.all(), True, (), START_MS, report_interval=interval)
        findings, state = liveness.detect(window, state, bucket.end_ms + 7000)
        edge += [f.cause for f in findings]
    assert "gpu_lost" not in edge

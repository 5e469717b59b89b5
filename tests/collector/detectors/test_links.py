"""Network ports and leaf switches: what is reported, for which node, and when it is not."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import (
    KEPT,
    LAG_MS,
    START_MS,
    play,
    small_fleet,
    training_bucket,
)
from drover_collector.detectors._lib.robust import Grouping
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.links import detector as links
from drover_collector.detectors.links import port_state, texts
from drover_collector.detectors.links.port_state import PortState
from drover_collector.detectors.links.ports import Port
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import RecommendedAction, Severity
from drover_core.model.fleet import LinkSpec
from drover_simulator.faults import Fault
from testbed.detecting import only
from testbed.link_findings import PORT, Columns, run
from testbed.simulated_buckets import record


def test_a_port_that_is_down_is_reported_after_20_s_and_drains_after_four_minutes() -> None:
    def change(number: int, link: Columns) -> None:
        if number >= 3:
            link["link_up"][PORT] = 0.0

    reported = run(change, count=32)
    first, grave = reported[0], next(f for f in reported if f.severity is Severity.CRITICAL)
    assert (first.node, first.cause, first.severity, first.action) == (
        "n02",
        "port_down",
        Severity.WARNING,
        RecommendedAction.ADVISE,
    )
    assert first.ts_ms - LAG_MS - first.since_ms == port_state.DOWN_MS
    assert grave.ts_ms - LAG_MS - grave.since_ms == port_state.DOWN_CRITICAL_MS
    assert grave.action is RecommendedAction.DRAIN
    assert first.job == "812"


@pytest.mark.parametrize("names", [("stor0", "mlx5_0"), ("mlx5_0", "stor0")])
def test_the_port_that_a_gpu_needs_decides_whatever_the_order_of_ports(names: tuple[str, str]) -> None:
    """A listed storage port and a GPU's port of n07 go down together, while those of other nodes work."""
    state, reported = None, []

    def change(number: int, link: Columns) -> None:
        link["link_up"] = np.array([1.0] * 14 + [0.0 if number else 1.0] * 2)

    spec = small_fleet(8).spec
    ports = tuple(LinkSpec(name, gpu=0 if name == "mlx5_0" else -1, leaf="leaf0") for name in names)
    nodes = tuple(dataclasses.replace(node, links=ports) for node in spec.nodes)
    for window, now_ms in play(FleetIndex(dataclasses.replace(spec, nodes=nodes)), 30, links=change):
        findings, state = links.detect(window, state, now_ms)
        reported += findings
    assert (reported[-1].node, reported[-1].severity) == ("n07", Severity.CRITICAL)
    assert reported[-1].action is RecommendedAction.DRAIN
    assert reported[-1].summary.startswith("Port mlx5_0 has been down")


def test_flaps_are_timed_from_the_first_of_the_last_three_hours() -> None:
    """An older one is remembered, and no longer counted."""
    minute, window = 60_000, next(window for window, _ in play(small_fleet(8, ports=8), 1))
    end_ms = window.newest.end_ms
    flapped = PortState(
        flaps={0: deque(end_ms - minutes * minute for minutes in (240, 10, 5, 1))}, errs=np.zeros(1, np.int64)
    )
    (found,) = texts._of_port(Port(0, "mlx5_0", "leaf0", 0), 0, flapped, False, {}, window)
    assert found.text == "mlx5_0 went down 3 times in 10 min"
    assert found.since_ms == end_ms - 10 * minute


def test_a_port_that_serves_no_gpu_drains_nothing() -> None:
    state, reported = None, []

    def change(number: int, link: Columns) -> None:
        link["link_up"] = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0 if number else 1.0])

    spec = small_fleet(8).spec
    nodes = tuple(dataclasses.replace(node, links=(LinkSpec("eth0"),)) for node in spec.nodes)
    for window, now_ms in play(FleetIndex(dataclasses.replace(spec, nodes=nodes)), 30, links=change):
        findings, state = links.detect(window, state, now_ms)
        reported += findings
    assert reported[-1].severity is Severity.CRITICAL
    assert {f.action for f in reported} == {RecommendedAction.ADVISE}


def test_a_flap_that_no_reading_saw_shows_in_the_counter() -> None:
    def change(number: int, link: Columns) -> None:
        link["link_downed"][PORT] += sum(number >= at for at in (2, 5, 8))

    reported = run(change, count=12)
    assert [f.cause for f in reported][:1] == ["port_flaps"]
    assert reported[0].summary == "Port mlx5_4 went down 2 times in 40 s (node n02)."
    assert reported[-1].severity is Severity.CRITICAL


def test_a_flap_is_counted_once_although_the_counter_comes_a_bucket_later() -> None:
    def change(number: int, link: Columns) -> None:
        link["link_up"][PORT] = 0.0 if number in (3, 4) else 1.0
        link["link_downed"][PORT] += number >= 4

    assert {f.cause for f in run(change, count=12)} == {"port_down"}


def test_ports_that_never_were_up_and_counters_that_begin_again_are_nothing() -> None:
    def change(number: int, link: Columns) -> None:
        link["link_up"][PORT] = 0.0
        link["symbol_errors"] += 0.0 if number >= 5 else 1e6
        link["link_downed"] -= 3.0 * (number >= 5)

    assert run(change) == []


def test_an_absent_value_is_no_link_that_is_down() -> None:
    def change(number: int, link: Columns) -> None:
        if number >= 3:
            link["link_up"][PORT] = np.nan
            link["link_downed"][PORT] = np.nan

    assert run(change) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_port_that_was_down_when_its_node_fell_silent_gets_no_worse_and_one_that_vanished_does(silent: bool) -> None:
    def change(number: int, link: Columns) -> None:
        if number >= 3:
            link["link_up"][PORT] = 0.0 if number < 6 else np.nan

    state, reported = None, []
    quiet = [PORT // 8] if silent else []
    for window, now_ms in play(
        small_fleet(ports=8), 40, None, lambda number: quiet if number >= 6 else [], links=change
    ):
        findings, state = links.detect(window, state, now_ms)
        reported += findings
    assert len(reported) == (2 if silent else 36)
    assert reported[-1].severity is (Severity.WARNING if silent else Severity.CRITICAL)


def test_ports_of_a_node_that_boots_again_and_again_do_not_flap() -> None:
    def change(number: int, link: Columns) -> None:
        at = number % 8
        if number > 8 and at < 5:  # away for four buckets, then up after one more
            link["link_up"][16:24] = np.nan if at < 4 else 0.0
            link["link_downed"][16:24] = np.nan if at < 4 else 0.0
        elif number > 8:
            link["link_downed"][16:24] = 1.0  # it counts from nothing, and training counts

    assert {f.cause for f in run(change, count=60)} <= {"port_down"}


@pytest.mark.parametrize(("length_s", "reported_after", "grave_after"), [(60, 2, 5), (600, 2, 2)])
def test_a_bucket_of_minutes_shows_how_it_ended_not_how_long(
    length_s: int, reported_after: int, grave_after: int
) -> None:
    index, state, kept, reported = small_fleet(ports=8), None, Buckets(KEPT), {}
    for number in range(10):
        bucket = training_bucket(index, number)
        bucket.link["link_up"][PORT] = 0.0 if number >= 3 else 1.0  # type: ignore[index]  # a dict, here
        start_ms = START_MS + number * length_s * 1000
        kept.append(dataclasses.replace(bucket, start_ms=start_ms, length_ms=length_s * 1000))
        found, state = links.detect(Window(index, kept.all(), True, (), START_MS), state, 0)
        for finding in found:
            reported.setdefault(finding.severity, number - 2)
    assert min(reported.values()) == reported_after
    assert reported[Severity.CRITICAL] == grave_after


@pytest.mark.parametrize(
    ("down", "words"), [([PORT], "Port mlx5_4 has been down for"), (list(range(32)), "ports at leaf l00 are down")]
)
def test_what_is_down_for_longer_than_a_restart_reads_stays_an_incident(down: list[int], words: str) -> None:
    index = small_fleet(ports=8)

    def buckets(numbers: range) -> list[Bucket]:
        found = []
        for number in numbers:
            found.append(training_bucket(index, number))
            found[-1].link["link_up"][down] = float(number < 3)
            found[-1].link["link_up"][23] = 0.0  # never plugged in
        return found

    detectors = only("links", "liveness")  # test_restart.py has cases of both with more of them
    first, second = (Engine(index, Policy.load(), START_MS, detectors) for _ in range(2))
    for bucket in buckets(range(80)):
        first.on_bucket(bucket, bucket.end_ms + LAG_MS)
    (before,) = first.incidents.values()
    second.restore([before], buckets(range(20, 80)), [])
    for bucket in buckets(range(80, 80 + 2 * links.QUIET_MS // 10_000)):
        second.on_bucket(bucket, bucket.end_ms + LAG_MS)
    (after,) = second.incidents.values()
    assert (after.id, after.closed_ms, after.severity) == (before.id, None, Severity.CRITICAL)
    assert words in after.summary
    assert "mlx5_7" not in str(after.evidence)


def test_a_switch_of_two_nodes_is_reported_as_such_and_one_of_a_single_node_drains_nothing() -> None:
    """What only one node is seen by may be dead as well as the node: no drain without a sign that the switch lives."""

    def fleet(nodes: int) -> FleetIndex:
        spec = small_fleet(8, ports=8).spec
        leaf = {n: "l90" if n < nodes else "l91" for n in range(8)}
        return FleetIndex(
            dataclasses.replace(
                spec, nodes=tuple(dataclasses.replace(node, leaf=leaf[n]) for n, node in enumerate(spec.nodes))
            )
        )

    def reported(nodes: int, up: int = 0) -> set[tuple[str, Severity, RecommendedAction]]:
        def change(number: int, link: Columns) -> None:
            if number >= 3:
                link["link_up"][up : 8 * nodes] = 0.0

        state, found = None, []
        for window, now_ms in play(fleet(nodes), 32, links=change):
            findings, state = links.detect(window, state, now_ms)
            found += findings
        return {(f.scope, f.severity, f.action) for f in found}

    assert reported(2) == {("leaf", Severity.CRITICAL, RecommendedAction.ADVISE)}
    assert reported(1) == {("node", Severity.WARNING, RecommendedAction.ADVISE)}
    assert ("node", Severity.CRITICAL, RecommendedAction.DRAIN) in reported(
        1, up=1
    )  # a port that is up: the switch is well


def test_a_port_that_flaps_at_a_switch_that_lives_drains_although_another_is_at_a_dark_one() -> None:
    spec = small_fleet(8, ports=8).spec
    nodes = list(spec.nodes)
    nodes[2] = dataclasses.replace(
        nodes[2],
        links=tuple(dataclasses.replace(link, leaf="l90") if i == 0 else link for i, link in enumerate(nodes[2].links)),
    )

    def change(number: int, link: Columns) -> None:
        if number >= 3:
            link["link_up"][16] = 0.0  # the only port of its leaf
        link["link_up"][PORT] = 0.0 if number in (5, 9, 13) else 1.0

    state, found = None, []
    for window, now_ms in play(FleetIndex(dataclasses.replace(spec, nodes=tuple(nodes))), 16, links=change):
        findings, state = links.detect(window, state, now_ms)
        found += findings
    first = next(f for f in found if f.cause == "port_down")
    assert (first.severity, first.action) == (Severity.WARNING, RecommendedAction.ADVISE)
    assert ("port_flaps", Severity.CRITICAL, RecommendedAction.DRAIN) in {
        (f.cause, f.severity, f.action) for f in found
    }


def test_ports_that_dip_together_with_most_of_their_switch_drain_no_node() -> None:
    """A switch that resets itself three times within hours, for seconds each, costs no node its service."""

    def change(number: int, link: Columns) -> None:
        link["link_up"][:32] = 0.0 if number in (4, 8, 12) else 1.0
        link["link_up"][PORT] = 0.0 if number in (4, 6, 10, 14) else 1.0

    engine = Engine(small_fleet(ports=8), Policy.load(), START_MS, only("links"))
    again = Engine(small_fleet(ports=8), Policy.load(), START_MS, only("links"))
    for number in range(24):
        bucket = training_bucket(engine.index, number, links=change)
        (engine if number < 18 else again).on_bucket(bucket, bucket.end_ms + LAG_MS)
        if number == 17:
            again.restore(list(engine.incidents.values()), [], [])
    for one in (engine, again):
        assert {i.node for i in one.incidents.values() if i.action is RecommendedAction.DRAIN} == {"n02"}
    reported = run(change, count=18)
    assert {f.node for f in reported if f.cause == "port_flaps"} == {"n02"}  # the one that goes down by itself, too
    assert {f.node for f in reported if f.action is RecommendedAction.DRAIN} == {"n02"}
    for one in (engine, again):
        (switch,) = [i for i in one.incidents.values() if i.scope == "leaf"]
        assert (switch.cause, switch.severity) == ("switch", Severity.WARNING)
        assert {node for node, _ in switch.members} == {"n00", "n01", "n02", "n03"}
        assert "3 times" in switch.evidence[0].text


def test_a_port_that_goes_with_its_switch_does_not_flap_and_what_is_reported_later_has_an_id_of_its_own() -> None:
    subject = Engine(small_fleet(ports=8), Policy.load(), START_MS, only("links"))
    reported = {}
    for number in range(720):
        bucket = training_bucket(subject.index, number)
        link = bucket.link["link_up"]
        link[PORT] = 0.0 if 3 <= number < 8 or 700 <= number < 705 else 1.0
        link[:32] = link[:32] * (not 500 <= number < 510)
        reported |= {i.id: i for i in subject.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents}
    found = sorted((i.opened_ms - START_MS, i.scope, i.cause) for i in reported.values())
    assert [(scope, cause) for _, scope, cause in found] == [
        ("node", "port_down"), ("leaf", "switch"), ("node", "port_flaps"),
    ]  # fmt: skip


def test_flaps_are_remembered_over_a_restart_and_none_is_counted_twice() -> None:
    index = small_fleet(ports=8)

    def buckets(numbers: range) -> list[Bucket]:
        found = []
        for number in numbers:
            found.append(training_bucket(index, number))
            found[-1].link["link_downed"][PORT] += sum(number >= at for at in (5, 10, 75))
        return found

    detectors = only("links", "liveness")  # test_restart.py has cases of both with more of them
    first, second = (Engine(index, Policy.load(), START_MS, detectors) for _ in range(2))
    for bucket in buckets(range(80)):
        first.on_bucket(bucket, bucket.end_ms + LAG_MS)
    (before,) = first.incidents.values()
    assert before.severity is Severity.CRITICAL
    second.restore([before], buckets(range(20, 80)), [])
    for bucket in buckets(range(80, 80 + 2 * links.QUIET_MS // 10_000)):
        second.on_bucket(bucket, bucket.end_ms + LAG_MS)
    (after,) = second.incidents.values()
    assert (after.id, after.closed_ms, after.cause) == (before.id, None, "port_flaps")
    assert "went down 3 times" in after.summary


def test_errors_of_one_port_are_reported_with_their_rate_and_those_of_all_are_not() -> None:
    def one(number: int, link: Columns) -> None:
        link["symbol_errors"][PORT] += 150.0 * number

    def everywhere(number: int, link: Columns) -> None:
        link["symbol_errors"] += 150.0 * number

    reported = run(one)
    assert {(f.node, f.cause, f.severity, f.action) for f in reported} == {
        ("n02", "port_errors", Severity.WARNING, RecommendedAction.ADVISE)
    }
    assert reported[0].evidence[0].value == pytest.approx(15.0)
    assert run(everywhere) == []


def test_few_errors_that_come_again_and_again_are_reported_and_stray_ones_are_not() -> None:
    def slow(number: int, link: Columns) -> None:
        link["rx_errors"] = np.zeros(len(link["link_up"]))
        link["rx_errors"][PORT] = 2.0 * number  # 12 a minute: a fiftieth of the limit
        link["rx_errors"][PORT + 1] = number // 6  # one a minute
        link["rx_errors"][PORT + 2] = 100.0 * (number >= 20)  # once

    reported = run(slow, count=90)
    assert {(f.node, f.cause, f.severity, f.action) for f in reported} == {
        ("n02", "port_errors", Severity.WARNING, RecommendedAction.ADVISE)
    }
    assert "receive errors in half an hour" in reported[-1].summary

    def one_node(number: int, link: Columns) -> None:
        link["rx_errors"] = np.zeros(len(link["link_up"]))
        link["rx_errors"][8:16] = 2.0 * number

    assert {(f.node, f.cause) for f in run(one_node, count=90)} == {("n01", "port_errors")}

    def everywhere(number: int, link: Columns) -> None:
        link["rx_errors"] = np.full(len(link["link_up"]), 2.0 * number)

    assert run(everywhere, count=90) == []


def test_a_leaf_that_goes_is_one_finding_until_it_is_back() -> None:
    def change(number: int, link: Columns) -> None:
        if 3 <= number < 8:
            link["link_up"][:32] = 0.0

    reported = run(change, count=12)
    assert {(f.scope, f.cause, len(f.members)) for f in reported} == {("leaf", "switch", 4)}
    assert {f.action for f in reported} == {RecommendedAction.ADVISE}


def test_two_nodes_of_a_leaf_are_no_switch() -> None:
    def change(number: int, link: Columns) -> None:
        if number >= 3:
            link["link_up"][:16] = 0.0

    assert {(f.scope, f.node) for f in run(change)} == {("node", "n00"), ("node", "n01")}


def test_columns_are_worked_through_once_however_many_gpus_are_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 GPUs each time takes 20 ms, and thousands may be hit."""
    medians, calls = Grouping.medians, []
    monkeypatch.setattr(Grouping, "medians", lambda *given: calls.append(1) or medians(*given))

    def hit(gpus: int) -> int:
        calls.clear()

        def change(number: int, gpu: Columns, node: Columns) -> None:
            gpu["pcie_width"][16 : 16 + gpus] = 8.0

        assert len(run(gpu=change)) == gpus * 8
        return len(calls)

    assert hit(4) == hit(1) > 0


def test_a_simulated_port_that_flaps_is_reported_its_node_alone() -> None:
    recording = record(1330, 8, lambda spec: [Fault("link", "ib_flap", "r01n02", None, 100.0, 400.0)])
    state, reported, kept = None, [], Buckets(KEPT)
    for bucket in recording.buckets:
        kept.append(bucket)
        window = Window(recording.index, kept.all(), True, (), recording.buckets[0].start_ms)
        findings, state = links.detect(window, state, bucket.end_ms + LAG_MS)
        reported += findings
    assert {(f.scope, f.node) for f in reported} == {("node", "r01n02")}
    assert Severity.CRITICAL in {f.severity for f in reported}

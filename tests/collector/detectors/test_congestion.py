"""Congestion: a bad port and a hot switch are reported; what a job does to its own ports is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import (
    KEPT,
    LAG_MS,
    START_MS,
    small_fleet,
    training_bucket,
)
from drover_collector.detectors._lib.window import Buckets, Window
from drover_collector.detectors.links import detector as links
from drover_collector.detectors.links.congestion import METRICS, Spells
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Finding, RecommendedAction, Severity

NODES, PORTS = 16, 4  # in leafs of four nodes
PER_S = {"tx_wait": 2e6}  # ticks of a healthy port that waits; else 200 events
Rates = np.ndarray
Change = Callable[[int, Rates], None]  # changes a port's events a second, [L], at a minute


def run(
    change: Change,
    minutes: int = 30,
    job_of_node: Sequence[int] = (0,) * NODES,
    metric: str = "tx_wait",
    rests: Callable[[int, int], bool] = lambda _node, _minute: False,
    reads: Callable[[int, int], bool] = lambda _node, _bucket: True,
    per_s: float | None = None,
    sent: Change | None = None,
    ports: int = PORTS,
) -> list[Finding]:
    """Return what is reported of congestion, with noise of 20 % on each port's rate.

    Args:
        rests: (node, minute) -> whether its GPUs do nothing. reads: (node, bucket) -> whether its ports are read then.
        per_s: a healthy port's events. sent: changes the bytes that each port sends a second; None: they are not read.
        ports: of a node.
    """
    index: FleetIndex = small_fleet(NODES, ports=ports)
    rng, total = np.random.default_rng(5), np.zeros(NODES * ports)
    usual = (per_s or PER_S.get(metric, 200.0)) * rng.lognormal(0, 1, NODES * ports)
    bytes_ = np.zeros(NODES * ports)
    held, state, found = Buckets(KEPT), None, []
    jobs = np.repeat(np.array(job_of_node, np.int32), 8)
    for number in range(minutes * 6):
        rate = usual * rng.lognormal(0, 0.2, NODES * ports)
        change(number // 6, rate)
        total = total + 10 * rate
        traffic = np.full(NODES * ports, 1e9)
        if sent is not None:
            sent(number // 6, traffic)
        bytes_ = bytes_ + 10 * traffic

        def count(_number: int, link: dict[str, Rates], now: Rates = total, of_bytes: Rates = bytes_) -> None:
            link[metric] = now.copy()
            if sent is not None:
                link["tx_bytes"] = of_bytes.copy()

        bucket = training_bucket(index, number, links=count)
        for node in range(NODES):
            if rests(node, number // 6):
                bucket.gpu["gpu_util_ratio"][8 * node : 8 * node + 8] = 0.0
            if not reads(node, number):
                bucket.link[metric][ports * node : ports * node + ports] = np.nan
        held.append(replace(bucket, jobs=jobs, job_names=("a", "b", "c")))
        findings, state = links.detect(Window(index, held.all(), True, (), START_MS), state, bucket.end_ms + LAG_MS)
        found += findings
    return found


@pytest.mark.parametrize("metric", ["tx_wait", "out_of_sequence", "cnp_handled"])
def test_a_port_that_waits_alone_is_reported_for_its_node(metric: str) -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[21] *= 10

    found = run(change, metric=metric)
    assert {(f.cause, f.node, f.severity) for f in found} == {("congested_port", "n05", Severity.WARNING)}
    assert {f.action for f in found} == {RecommendedAction.ADVISE}
    assert found[0].evidence[0].port == "mlx5_1" and found[0].evidence[0].metric == metric
    assert START_MS + 14 * 60_000 <= found[0].since_ms <= found[0].ts_ms <= START_MS + 21 * 60_000
    assert len({f.since_ms for f in found}) == 1


def test_a_fleet_without_jobs_is_judged_as_a_whole() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[21] *= 10

    assert {f.node for f in run(change, job_of_node=(-1,) * NODES)} == {"n05"}


def test_a_leaf_whose_ports_all_wait_is_reported_once_for_the_switch() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:32] *= 8

    found = run(change)
    assert {(f.cause, f.scope, f.node) for f in found} == {("hot_switch", "leaf", None)}
    assert {name for name, _ in found[0].members} == {"n04", "n05", "n06", "n07"}


# Of a port a minute, so few are no congestion: of all ports of a leaf at once they are.
FEW = [("tx_wait", 1e4), ("out_of_sequence", 0.05), ("cnp_handled", 2.0)]


def _more(minute: int, rate: Rates) -> None:
    if minute >= 15:
        rate[16:32] *= 12


@pytest.mark.parametrize(("metric", "per_s"), FEW)
def test_few_events_on_all_ports_of_a_leaf_are_its_switch(metric: str, per_s: float) -> None:
    found = run(_more, metric=metric, per_s=per_s, sent=lambda _minute, _bytes: None)
    assert {(f.cause, f.scope) for f in found} == {("hot_switch", "leaf")}
    assert {name for name, _ in found[0].members} == {"n04", "n05", "n06", "n07"}


def test_few_events_of_a_leaf_that_carries_as_much_more_are_no_fault() -> None:
    assert run(_more, per_s=1e4, sent=_more) == []


def test_few_events_of_one_port_or_of_a_job_are_no_fault() -> None:
    def one(minute: int, rate: Rates) -> None:
        rate[21] *= 12 if minute >= 15 else 1

    assert run(one, per_s=1e4) == []
    assert run(_more, per_s=1e4, job_of_node=(0,) * 4 + (1,) * 4 + (0,) * 8) == [], "its own traffic"


def test_a_job_is_not_its_leaf_while_the_leafs_other_job_pauses() -> None:
    def half(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:24] *= 12

    def pauses(node: int, minute: int) -> bool:
        return node in (6, 7) and 20 <= minute < 28

    def three_nodes(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:28] *= 12

    jobs = (-1,) * NODES
    assert run(half, minutes=45, per_s=1e4, job_of_node=jobs, rests=pauses) == []
    assert run(three_nodes, minutes=45, per_s=1e4, job_of_node=jobs) != [], "of three in use it is"


@pytest.mark.parametrize("job", [1, -1])
def test_a_job_that_waits_on_another_leaf_too_is_no_hot_switch(job: int) -> None:
    def more(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:32] *= 12
            rate[32:36] *= 12  # its last node

    jobs = (-1,) * NODES if job < 0 else (0,) * 4 + (1,) * 5 + (0,) * 7
    assert "hot_switch" not in {f.cause for f in run(more, minutes=40, job_of_node=jobs)}


def test_two_jobs_of_one_leaf_that_both_wait_are_the_switch() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:32] *= 8

    found = run(change, job_of_node=(0,) * 4 + (1, 1, 2, 2) + (0,) * 8)
    assert {f.cause for f in found} == {"hot_switch"}


def test_ports_that_wait_together_without_a_known_leaf_share_a_switch() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[[1, 21, 41, 61]] *= 10  # a rail: one port of each of four nodes

    found = run(change)
    assert {(f.cause, f.scope) for f in found} == {("hot_switch", "leaf")}
    assert {name for name, _ in found[0].members} == {"n00", "n05", "n10", "n15"}
    assert "probably share" in found[0].summary


def test_a_leaf_with_one_job_is_reported_when_it_lasts() -> None:
    def long(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[16:32] *= 8

    found = run(long, minutes=45, job_of_node=(0,) * 4 + (1,) * 4 + (0,) * 8)
    assert {f.cause for f in found} == {"hot_switch"}
    assert found[0].ts_ms >= START_MS + 34 * 60_000


@pytest.mark.parametrize(
    ("what", "ports", "jobs"),
    [
        ("the job's own traffic, on a leaf that it has for itself", slice(16, 32), (0,) * 4 + (1,) * 4 + (0,) * 8),
        ("the job's own traffic, over two leafs", slice(16, 48), (0,) * 4 + (1,) * 8 + (0,) * 4),
        ("the whole fleet", slice(0, 64), (0,) * 16),
        ("two leafs at once, where nobody names the jobs", slice(16, 48), (-1,) * 16),
        ("one node's own traffic", slice(20, 24), (0,) * 5 + (1,) + (0,) * 10),
    ],
)
def test_traffic_of_its_own_is_no_fault(what: str, ports: slice, jobs: tuple[int, ...]) -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[ports] *= 10

    assert run(change, job_of_node=jobs) == [], what


def test_a_minute_of_waiting_and_a_few_events_are_no_fault() -> None:
    def burst(minute: int, rate: Rates) -> None:
        rate[21] *= 30 if minute in (15, 18, 22) else 1

    def few(minute: int, rate: Rates) -> None:
        rate[:] = 0
        rate[21] = 5e5 if minute >= 15 else 0.0  # 0.2 % of the time

    assert run(burst) == run(few) == []


def _times(by: float, of: slice, during: Callable[[int], bool]) -> Change:
    def change(minute: int, values: Rates) -> None:
        values[of] *= by if during(minute) else 1

    return change


@pytest.mark.parametrize(
    ("what", "ports", "during", "jobs"),
    [
        ("a rank that writes checkpoints", slice(21, 22), lambda minute: minute % 20 >= 13, (0,) * NODES),
        ("a hot expert", slice(21, 22), lambda minute: minute >= 15, (0,) * NODES),
        ("a storage gateway", slice(21, 22), lambda minute: minute >= 15, (-1,) * NODES),
        ("an oversubscribed leaf", slice(16, 32), lambda minute: minute >= 15, (0,) * 4 + (1, 1, 2, 2) + (0,) * 8),
    ],
)
def test_what_waits_more_because_it_carries_more_is_no_fault(
    what: str, ports: slice, during: Callable[[int], bool], jobs: tuple[int, ...]
) -> None:
    more = _times(10, ports, during)
    assert run(more, minutes=45, job_of_node=jobs, sent=_times(4, ports, during)) == [], what
    assert run(more, minutes=45, job_of_node=jobs, sent=_times(1, ports, during)), "at the same traffic it is one"


def test_a_bad_port_is_found_though_its_whole_job_carries_more_than_before() -> None:
    """A job loads its data for some minutes, then it trains: all ports carry ten times as much, and one is bad."""
    trains = _times(10, slice(None), lambda minute: minute >= 12)

    def change(minute: int, rate: Rates) -> None:
        trains(minute, rate)
        rate[21] *= 10 if minute >= 15 else 1

    assert run(trains, minutes=45, per_s=2e5, sent=trains) == []
    assert {f.node for f in run(change, minutes=45, per_s=2e5, sent=trains)} == {"n05"}


def test_a_port_without_mates_waits_for_longer_than_steps_of_a_program_last() -> None:
    """The only port of its node, in a job on one node: nothing says whether the port waits or the job sends."""
    jobs = (0,) * 5 + (1,) + (0,) * 10

    def waits(minutes: int) -> list[Finding]:
        during = _times(10, slice(5, 6), lambda minute: 15 <= minute < 15 + minutes)
        return run(during, minutes=45, job_of_node=jobs, ports=1)

    assert waits(12) == []
    assert {f.node for f in waits(28)} == {"n05"}


def test_rises_that_come_and_go_on_several_nodes_are_how_the_fleet_works() -> None:
    def rises(minutes: int) -> list[Finding]:
        def change(minute: int, rate: Rates) -> None:
            for port, first, lasts in ((3, 15, 4), (30, 22, 4), (50, 29, 4), (21, 36, minutes)):
                rate[port] *= 10 if first <= minute < first + lasts else 1

        return run(change, minutes=58)

    assert rises(7) == []
    found = rises(20)
    assert {f.node for f in found} == {"n05"}
    assert START_MS + 35 * 60_000 <= found[0].since_ms <= START_MS + 37 * 60_000


@pytest.mark.parametrize(
    ("what", "first", "lasts", "nodes", "needed"),
    [
        ("three nodes, one after the other", (0, 10, 20), 4, 16, 8),
        ("the longest that counts", (0, 20, 40), 10, 16, 20),
        ("two nodes", (0, 10), 4, 16, 5),
        ("three of a thousand nodes", (0, 10, 20), 4, 1000, 5),
        ("too short to be reported", (0, 10, 20), 2, 16, 5),
        ("as long as a fault that was repaired", (0, 20, 40), 11, 16, 5),
        ("at once, as of a switch", (0, 0, 0), 4, 16, 5),
        ("two days ago", (-3000, -2990, -2980), 4, 16, 5),
    ],
)
def test_only_short_rises_of_several_nodes_within_a_day_make_others_wait(
    what: str, first: tuple[int, ...], lasts: int, nodes: int, needed: int
) -> None:
    spells, node = Spells(3), np.arange(3)
    for minute in (*range(-3000, -2960), *range(60)):
        over = np.zeros((len(METRICS), 3), bool)
        over[0, : len(first)] = [start <= minute < start + lasts for start in first]
        spells.add_minute(over, np.ones(3, bool), node, START_MS + minute * 60_000)
    assert spells.needed(START_MS + 60 * 60_000, nodes, 7) == needed, what


def test_a_ports_own_rises_do_not_make_it_wait_for_longer() -> None:
    """A bad port comes and goes for ten minutes each, two other nodes had a short rise."""
    spells, node = Spells(3), np.arange(3)
    for minute in range(60):
        over = np.zeros((len(METRICS), 3), bool)
        over[0] = minute % 20 < 10, 5 <= minute < 9, 25 <= minute < 29
        spells.add_minute(over, np.ones(3, bool), node, START_MS + minute * 60_000)
    assert [spells.needed(START_MS + 60 * 60_000, 16, n) for n in range(3)] == [8, 20, 20]


@pytest.mark.parametrize(("on", "of", "found"), [(4, 5, True), (4, 8, False)], ids=["mostly bad", "half of the time"])
def test_a_port_that_is_bad_in_most_minutes_of_an_hour_is_found_though_it_pauses(on: int, of: int, found: bool) -> None:
    change = _times(10, slice(21, 22), lambda minute: minute >= 40 and minute % of < on)
    assert {f.node for f in run(change, minutes=100)} == ({"n05"} if found else set())


def test_it_ends_with_the_congestion() -> None:
    def change(minute: int, rate: Rates) -> None:
        if 15 <= minute < 22:
            rate[21] *= 10

    assert max(f.ts_ms for f in run(change, minutes=40)) <= START_MS + 23.5 * 60_000


def test_a_leaf_whose_nodes_were_idle_and_get_jobs_is_not_hot() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute < 20:
            rate[16:32] = 0

    def rests(node: int, minute: int) -> bool:
        return 4 <= node < 8 and minute < 20

    for jobs in ((0,) * 4 + (1, 1, 2, 2) + (0,) * 8, (-1,) * NODES):
        assert run(change, minutes=70, job_of_node=jobs, rests=rests) == []


def test_a_port_whose_node_falls_silent_is_no_longer_reported() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[21] *= 10

    found = run(change, minutes=40, reads=lambda node, number: node != 5 or number < 130)
    assert found and max(f.ts_ms for f in found) <= START_MS + 130 * 10_000 + 120_000
    assert all(np.isfinite(f.evidence[0].value or 0.0) for f in found)


def test_ports_that_are_read_each_30_s_are_judged_and_a_gap_is_no_burst() -> None:
    def change(minute: int, rate: Rates) -> None:
        if minute >= 15:
            rate[21] *= 10

    assert {f.node for f in run(change, reads=lambda node, number: number % 3 == node % 3)} == {"n05"}
    assert run(lambda _minute, _rate: None, reads=lambda node, number: node != 5 or not 100 <= number < 140) == []


@pytest.mark.parametrize(("more", "ports"), [(1.0, ["mlx5_1"]), (2.0, []), (0.01, [])])
def test_a_port_that_is_bad_from_its_jobs_first_minute_is_held_against_its_nodes_others(
    more: float, ports: list[str]
) -> None:
    """`more`: times the bytes of the others. One that carries more has more to retry; one for storage carries less."""
    index: FleetIndex = small_fleet(NODES, ports=PORTS)
    rng, total, sent = np.random.default_rng(5), np.zeros(NODES * PORTS), np.zeros(NODES * PORTS)
    held, state, found = Buckets(KEPT), None, []
    for number in range(8 * 6):
        rate, carried = rng.lognormal(0, 0.2, NODES * PORTS), np.full(NODES * PORTS, 3e9)
        rate[21], carried[21] = 100.0, 3e9 * more
        total, sent = total + 10 * rate, sent + 10 * carried

        def count(_number: int, link: dict[str, Rates], now: Rates = total, bytes_: Rates = sent) -> None:
            link["out_of_sequence"], link["tx_bytes"], link["rx_bytes"] = now.copy(), bytes_.copy(), bytes_.copy()
            link["rate_gbps"] = np.full(NODES * PORTS, 400.0)

        held.append(training_bucket(index, number, links=count))
        bucket = held.all()[-1]
        findings, state = links.detect(Window(index, held.all(), True, (), START_MS), state, bucket.end_ms + LAG_MS)
        found += [f for f in findings if f.cause == "congested_port"]
    assert sorted({e.port for f in found for e in f.evidence}) == ports

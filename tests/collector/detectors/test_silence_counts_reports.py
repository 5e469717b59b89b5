"""A silence counts reports: of nodes that are read seldom or send in groups, live, after a restart, in a replay.

The engine has the detector of silence alone, but in the last test: no other one changes what is said of a silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from drover_collector.detectors import DETECTORS, Detector
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.detectors.liveness.peers import PeersOfSilent, Progress
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import Event, EventKind, Incident
from testbed.detecting import only

NODES = 8
Lost = Callable[[int, int], bool]  # (node, number of its sample) -> whether it never arrives


@pytest.fixture(autouse=True)
def _no_wait_for_a_single_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a single node is waited for has tests of its own: test_single_silent_node.py."""
    monkeypatch.setattr(PeersOfSilent, "progress", lambda *_: Progress.STOPPED)


def sampled(interval_s: float, count: int, lost: Lost, aligned: bool = True, nodes: int = NODES) -> Iterator[Bucket]:
    """Buckets of a fleet whose nodes are read every `interval_s`; not aligned: each at a moment of its own."""
    index = small_fleet(nodes)
    rows = np.zeros((count, nodes), np.int32)
    for n in range(nodes):
        at_s, number = 0.0 if aligned else n * interval_s / nodes, 0
        while at_s < count * BUCKET_MS / 1000:
            rows[int(at_s * 1000) // BUCKET_MS, n] += not lost(n, number)
            at_s, number = at_s + interval_s, number + 1
    for number in range(count):
        yield with_rows(index, number, rows[number])


def grouped(count: int, phase_s: int, lost: Lost) -> Iterator[Bucket]:
    """Buckets as a collector sees them, 7 s after their end, of agents that send 30 s of samples at once."""
    index = small_fleet()
    for number in range(count):
        start_s, read_s = number * 10, number * 10 + 17
        rows = [
            sum(
                not lost(n, (second + phase_s) // 30) and (second + phase_s) // 30 * 30 + 30 - phase_s <= read_s
                for second in range(start_s, start_s + 10)
            )
            for n in range(NODES)
        ]
        yield with_rows(index, number, np.array(rows, np.int32))


def with_rows(index: FleetIndex, number: int, rows: np.ndarray) -> Bucket:
    bucket = training_bucket(index, number, silent=np.flatnonzero(rows == 0).tolist())
    bucket.node_rows[:] = rows
    bucket.gpu_rows[:] = rows[index.gpu_node]
    return bucket


def silences(buckets: Iterator[Bucket], engine: Engine | None = None) -> dict[str, tuple[str, int]]:
    """Incident -> its node and when it was opened, s, of those about silence."""
    engine = engine or fresh()
    found: dict[str, Incident] = {}
    for bucket in buckets:
        found |= {i.id: i for i in engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents}
    assert not engine.errors
    about = [i for i in found.values() if i.kind.value == "liveness"]
    return {i.id: (i.node or i.scope, (i.opened_ms - START_MS - LAG_MS) // 1000) for i in about}


def fresh(detectors: Sequence[Detector] = only("liveness")) -> Engine:
    return Engine(small_fleet(), Policy.named("nvidia"), START_MS, detectors)


def two_in_a_row(node: int, number: int) -> bool:
    return node == 2 and number % 40 in (21, 22)


@pytest.mark.parametrize(("interval_s", "aligned"), [(12, True), (12, False), (30, True), (60, False)])
def test_two_lost_samples_in_a_row_are_no_silent_node(interval_s: float, aligned: bool) -> None:
    assert silences(sampled(interval_s, int(40 * interval_s) // 10 + 60, two_in_a_row, aligned)) == {}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("interval_s", [1, 10, 15, 60])
def test_a_node_that_is_gone_is_silent_after_three_reports_and_thirty_seconds(interval_s: float, aligned: bool) -> None:
    """Where all are read at one moment whole buckets are empty too: the collector is not deaf then."""
    gone_s = 40 * interval_s
    number = -(-40 * 10 // 10)
    found = silences(sampled(interval_s, int(gone_s // 10 + 60), lambda n, i: n == 2 and i >= number, aligned))
    ((node, opened_s),) = found.values()
    assert node == "n02"
    last_s = gone_s - interval_s + (0 if aligned else 2 * interval_s / NODES)
    assert max(30, 3 * interval_s) - 10 <= opened_s - last_s <= max(40, 3 * interval_s + 20) + 10


@pytest.mark.parametrize("phase_s", (0, 12, 28))
def test_two_lost_groups_of_an_agent_that_sends_every_30_s_are_no_silent_node(phase_s: int) -> None:
    assert silences(grouped(120, phase_s, two_in_a_row)) == {}
    ((node, opened_s),) = silences(grouped(120, phase_s, lambda n, i: n == 2 and i >= 21)).values()
    assert node == "n02"
    assert 90 <= opened_s - (21 * 30 - phase_s) <= 130


def test_health_of_a_node_that_is_read_every_15_s_does_not_come_and_go() -> None:
    engine, moved = fresh(), []
    for number, bucket in enumerate(sampled(15, 120, two_in_a_row)):
        moved += [c for c in engine.on_bucket(bucket, bucket.end_ms + LAG_MS).health if number > 0]
    assert moved == []


def test_after_a_restart_the_spacing_is_known_from_the_buckets_before_it() -> None:
    past = list(sampled(15, 130, lambda n, i: n == 2 and i in (45, 46, 82, 83)))
    engine = fresh()
    engine.restore([], past[:60], [])
    assert silences(iter(past[60:]), engine) == {}
    # As the warm-up reads them: buckets without any reporting node are left out.
    engine = fresh()
    engine.restore([], [b for b in past[:60] if b.node_rows.any()], [])
    assert silences(iter(past[60:]), engine) == {}


def test_a_gpu_that_is_gone_is_found_where_nodes_are_read_every_15_s() -> None:
    engine, found = fresh(), dict[str, Incident]()
    for number, bucket in enumerate(sampled(15, 60, lambda n, i: False)):
        if number >= 20:
            bucket.gpu_rows[21] = 0
        found |= {i.id: i for i in engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents}
    ((cause, node, gpu),) = [(i.cause, i.node, i.gpu) for i in found.values() if i.kind.value == "liveness"]
    assert (cause, node, gpu) == ("gpu_lost", "n02", 5)


def test_an_agent_that_starts_again_with_another_interval_is_learnt_again() -> None:
    index, engine, found = small_fleet(), fresh(), dict[str, Incident]()
    for number in range(160):
        rows = np.full(NODES, 10, np.int32)
        if number >= 60:
            rows[2] = number % 6 == 0
        if number == 60:
            started = Event("s", START_MS + 600_000, "n02", None, EventKind.LIFECYCLE, "agent_started", "")
            engine.on_events([started], START_MS + 600_500)
        outcome = engine.on_bucket(with_rows(index, number, rows), START_MS + number * 10_000 + 17_000)
        found |= {i.id: i for i in outcome.incidents}
    assert found == {}


def test_a_few_outages_do_not_make_a_node_slow() -> None:
    """Three outages of minutes among reports each second: the next silence is found as soon as the first."""

    def away(number: int) -> Sequence[int]:
        return [2] if number % 30 in range(10, 20) else []

    index, engine, opened = small_fleet(), fresh(), dict[int, int]()
    for number in range(120):
        bucket = training_bucket(index, number, silent=away(number))
        for i in engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents:
            if i.closed_ms is None:
                opened.setdefault((bucket.start_ms - START_MS) // 300_000, bucket.end_ms - START_MS)
    assert list(opened.values()) == [130_000, 430_000, 730_000, 1_030_000]


def gaps_of(gaps: Sequence[tuple[int, int, int]], count: int) -> Iterator[Bucket]:
    """Buckets of nodes that are read every 10 s. `gaps`: (node, first bucket without it, length in buckets)."""
    return sampled(10, count, lambda n, number: any(n == node and first <= number < first + length
                                                    for node, first, length in gaps))  # fmt: skip


def test_where_telemetry_has_gaps_of_a_minute_by_the_way_a_silence_must_be_longer_than_these() -> None:
    two = [(1, 20, 7), (2, 40, 8)]
    assert [node for node, _ in silences(gaps_of([*two, (4, 90, 14)], 120)).values()] == ["n01", "n02"]
    assert [node for node, _ in silences(gaps_of([(1, 20, 7), (4, 90, 14)], 120)).values()] == ["n01", "n04"]
    found = list(silences(gaps_of([*two, (5, 90, 60)], 160)).values())
    assert found[-1][0] == "n05" and 900 + 160 <= found[-1][1] <= 900 + 200, "a longer one is reported"


def test_where_nodes_are_read_each_minute_gaps_of_four_reports_can_be_usual() -> None:
    """Found on a healthy day of a stranger's fleet: each gap of four minutes was reported, 17 times."""

    def lost(node: int, number: int) -> bool:
        return any(node == n and first <= number < first + 4 for n, first in ((1, 20), (2, 30), (4, 40), (5, 50)))

    def gone(node: int, number: int) -> bool:
        return lost(node, number) or (node == 6 and number >= 60)

    assert [node for node, _ in silences(sampled(60, 360, lost)).values()] == ["n01", "n02"]
    node, opened_s = list(silences(sampled(60, 420, gone)).values())[-1]
    assert node == "n06" and 59 * 60 + 300 <= opened_s <= 59 * 60 + 340, "a longer one is reported"


def test_gaps_of_many_nodes_at_once_are_no_habit_of_single_nodes() -> None:
    many = [(n, 20, 7) for n in range(4)]
    assert "n05" in {node for node, _ in silences(gaps_of([*many, (5, 60, 7)], 100)).values()}


AWAY = [(1, 14, 31), (2, 47, 32), (3, 81, 31)]  # three nodes, 5 min and more each


def drained_of(gaps: Sequence[tuple[int, int, int]], count: int, started: Sequence[tuple[int, int]] = ()) -> list[str]:
    """Nodes that a drain is asked for. `started`: (node, bucket) in which its agent starts."""
    engine, found = fresh(), set[str]()
    for number, bucket in enumerate(gaps_of(gaps, count)):
        at_ms, names = bucket.start_ms, [f"n{n:02d}" for n, at in started if at == number]
        events = [Event(f"s{n}", at_ms, n, None, EventKind.LIFECYCLE, "agent_started", "") for n in names]
        engine.on_events(events, at_ms)
        for i in engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents:
            found |= {i.node or ""} if i.action.value == "drain" else set()
    return sorted(found)


def test_where_nodes_come_back_alive_after_minutes_a_drain_waits_for_longer_than_these() -> None:
    assert drained_of([*AWAY, (4, 114, 60)], 174) == ["n01", "n02", "n03"]
    assert drained_of([*AWAY, (4, 114, 67)], 181) == ["n01", "n02", "n03", "n04"], "twice the longest is enough"
    assert drained_of([*AWAY[:2], (4, 81, 60)], 141) == ["n01", "n02", "n04"], "two are no habit"


def test_a_node_that_was_down_for_minutes_is_no_reason_to_wait() -> None:
    starts = [(node, first + length) for node, first, length in AWAY]
    assert drained_of([*AWAY, (4, 114, 60)], 174, starts) == ["n01", "n02", "n03", "n04"]


def test_nodes_that_were_away_together_and_came_back_alive_are_a_reason_to_wait_unless_they_are_many() -> None:
    """Found on a healthy day of a stranger's fleet: of gaps that began within two minutes none was remembered."""
    pair = [(1, 14, 31), (2, 14, 32), (3, 61, 31)]
    assert "n04" not in drained_of([*pair, (4, 114, 60)], 174)
    many = [(n, 14, 30 + 2 * n) for n in (1, 2, 3, 5)]
    assert "n04" in drained_of([*many, (4, 114, 60)], 174), "they had one reason, though they came back one by one"


AT_ONCE = [(1, 14, 45), (2, 20, 45), (5, 26, 45)]  # three nodes that are away for 7.5 minutes, not all at one moment


def test_several_nodes_that_fall_silent_by_themselves_within_minutes_are_no_reason_to_drain_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found on a healthy day of a stranger's fleet: four nodes at once, and no habit was known yet."""
    assert drained_of(AT_ONCE, 80) == ["n01", "n02", "n05"], "their jobs stopped: they are dead"
    monkeypatch.setattr(PeersOfSilent, "progress", lambda *_: Progress.UNKNOWN)
    assert drained_of(AT_ONCE, 80) == []
    assert drained_of(AT_ONCE[:2], 80) == ["n01", "n02"], "two can be a coincidence"
    dead = [(node, first, 999) for node, first, _ in AT_ONCE]
    assert drained_of(dead, 14 + 179) == []
    assert drained_of(dead, 26 + 182) == ["n01", "n02", "n05"], "half an hour is enough"
    assert drained_of([*dead[:2], (5, 14 + 190, 999)], 14 + 190 + 40) == ["n01", "n02", "n05"], "they count no longer"


def test_a_node_at_such_a_site_is_drained_as_soon_as_elsewhere() -> None:
    engine = fresh(DETECTORS)
    silences(gaps_of([(1, 20, 7), (2, 40, 8), (3, 60, 6), (5, 90, 60)], 160), engine)
    (incident,) = [i for i in engine.incidents.values() if i.node == "n05"]
    assert incident.action.value == "drain"

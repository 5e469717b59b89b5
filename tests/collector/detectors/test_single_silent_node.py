"""How long a single silent node is waited for: its job's other nodes say whether it can be dead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import START_MS, play, small_fleet, training_bucket
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.detectors.liveness.peers import PeersOfSilent
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.policy.policy import Policy
from drover_core.model.events import Finding, Incident, RecommendedAction, Severity

INDEX = small_fleet()
GONE = 30  # bucket in which node 2 falls silent
Change = Callable[[int, dict[str, np.ndarray], dict[str, np.ndarray]], None]


def found(
    change: Change | None = None, jobs: Sequence[int] | None = None, until: int = 70
) -> list[tuple[int, Finding]]:
    """Return (seconds of silence, finding) of node 2. `jobs`: the job of each node, instead of one job of all."""
    state, result = None, []

    def silent(number: int) -> Sequence[int]:
        return [2] if number >= GONE else []

    for window, now_ms in play(small_fleet(), until, change, silent):
        if jobs is not None:
            newest = window.newest
            of = np.repeat(np.array(jobs, np.int32), 8)
            names = tuple(f"job {n}" for n in range(8))
            window = replace(window, buckets=(*window.buckets[:-1], replace(newest, jobs=of, job_names=names)))
        findings, state = liveness.detect(window, state, now_ms)
        quiet_s = (window.newest.end_ms - START_MS) // 1000 - GONE * 10
        result += [(quiet_s, f) for f in findings if f.cause == "silent"]
    return result


def peers_draw(share: float) -> Change:
    def change(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= GONE:
            gpu["power_w"] *= share

    return change


def test_a_node_whose_job_stopped_with_it_is_reported_as_soon_as_it_counts_as_silent() -> None:
    assert found(peers_draw(0.4))[0][0] == 30


def test_a_node_whose_job_goes_on_is_waited_for_and_no_drain_is_asked_for() -> None:
    findings = found(until=120)
    assert findings[0][0] == 240
    assert {(f.severity, f.action) for _, f in findings} == {(Severity.WARNING, RecommendedAction.ADVISE)}
    assert "its job goes on" in findings[0][1].summary


def test_a_node_whose_job_stops_later_asks_for_a_drain() -> None:
    def change(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= GONE + 50:
            gpu["power_w"] *= 0.4

    findings = found(change, until=100)
    assert findings[0][1].action is RecommendedAction.ADVISE
    assert next(quiet for quiet, f in findings if f.action is RecommendedAction.DRAIN) == 510


@pytest.mark.parametrize(
    ("change", "jobs"),
    [
        (None, [0, 0, 1, 0, 0, 0, 0, 0]),  # its job has no other node
        (None, [-1] * 8),  # nobody has a job
        (peers_draw(0.78), None),  # neither as before nor much less
    ],
)  # fmt: skip
def test_where_the_job_says_nothing_it_is_ninety_seconds(change: Change | None, jobs: list[int] | None) -> None:
    assert found(change, jobs)[0][0] == 150


def test_a_job_that_rests_does_not_show_that_it_goes_on() -> None:
    def idle(_number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        gpu["power_w"][:] = 70.0

    assert found(idle)[0][0] == 150


def test_without_power_nothing_is_known_of_the_job() -> None:
    def blind(_number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        del gpu["power_w"]

    assert found(blind)[0][0] == 150


def test_one_job_of_many_that_stops_does_not_speak_for_the_others() -> None:
    def change(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= GONE:
            gpu["power_w"][24:] *= 0.4  # nodes 3 to 7, another job

    assert found(change, [0, 0, 0, 1, 1, 1, 1, 1])[0][0] == 240


def test_after_a_restart_of_the_collector_the_job_is_known_from_the_incident() -> None:
    """A node whose job goes on is not drained because the collector forgot which job that was."""
    engine = Engine(INDEX, Policy.load(), START_MS)
    reported: list[Incident] = []
    after: list[Incident] = []
    for number in range(60):
        bucket = training_bucket(INDEX, number, silent=[2] if number >= GONE else [])
        reported += engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents
    assert {i.cause for i in reported} == {"silent"}
    second = Engine(INDEX, Policy.load(), START_MS + 600_000)
    second.restore([reported[-1]], [], [])
    for number in range(60, 120):
        bucket = training_bucket(INDEX, number, silent=[2])
        after += second.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents
    assert {i.action for i in (*reported, *after)} == {RecommendedAction.ADVISE}
    assert [i.id for i in second.incidents.values() if i.closed_ms is None] == [reported[-1].id]


def test_names_of_jobs_that_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from drover_collector.detectors.liveness import peers

    monkeypatch.setattr(peers, "NAMES_KEPT", 4)
    known = peers.PeersOfSilent.of(64)
    for number, (window, _now_ms) in enumerate(play(small_fleet(), 20)):
        known.add_bucket(
            replace(window.newest, jobs=np.zeros(64, np.int32), job_names=(f"job {number}",)), np.zeros(64, bool)
        )
    assert len(known.numbers) <= 5
    assert (known.job == known.numbers["job 19"]).all()


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_node_is_not_called_alive_because_its_peers_have_waited_for_it_for_minutes(share: float) -> None:
    """Found by an attack: what they drew while they waited became what they usually draw, and ended the drain."""
    findings = found(peers_draw(share), until=100)
    assert not [f for _, f in findings if "goes on" in f.summary]
    assert {f.action for quiet, f in findings if quiet >= 300} == {RecommendedAction.DRAIN}


def test_a_job_that_was_started_again_without_the_dead_node_does_not_call_it_alive() -> None:
    """Found by an attack: Slurm starts a job again under its number, 300 s after the node died."""
    state, result = None, []
    for number, (window, now_ms) in enumerate(
        play(small_fleet(), 120, None, lambda number: [2] if number >= GONE else [])
    ):
        if GONE + 5 <= number < GONE + 40:  # nobody has a job
            newest = replace(window.newest, jobs=np.full(64, -1, np.int32))
            window = replace(window, buckets=(*window.buckets[:-1], newest))
        findings, state = liveness.detect(window, state, now_ms)
        result += [f for f in findings if f.cause == "silent"]
    assert result[-1].action is RecommendedAction.DRAIN
    assert not [f for f in result if "goes on" in f.summary]


def test_after_a_restart_peers_that_wait_for_a_dead_node_do_not_call_it_alive() -> None:
    def waits(number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        if number >= GONE:
            gpu["power_w"] *= 0.6

    engine, second = (Engine(INDEX, Policy.load(), START_MS + after) for after in (0, 420_000))
    before: list[Incident] = []
    for number in range(42):
        bucket = training_bucket(INDEX, number, waits, silent=[2] if number >= GONE else [])
        before += engine.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents
    second.restore([before[-1]], [], [])
    for number in range(42, 90):
        bucket = training_bucket(INDEX, number, waits, silent=[2])
        second.on_bucket(bucket, bucket.end_ms + LAG_MS)
    (incident,) = second.incidents.values()
    assert "goes on" not in incident.summary
    assert incident.action is RecommendedAction.DRAIN


def test_what_jobs_draw_is_computed_once_a_bucket_however_many_nodes_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each of 4,000 silent nodes, it cost seconds of each tick."""
    asked: list[int] = []
    shares = PeersOfSilent.shares

    def counted(self: PeersOfSilent, window: Window) -> np.ndarray:
        asked.append(window.newest.end_ms)
        return shares(self, window)

    monkeypatch.setattr(PeersOfSilent, "shares", counted)
    state = None
    for window, now_ms in play(small_fleet(), GONE + 12, silent=lambda number: [1, 3, 5] if number >= GONE else []):
        _, state = liveness.detect(window, state, now_ms)
    assert asked
    assert len(asked) == len(set(asked))

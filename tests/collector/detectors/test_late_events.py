"""Errors that arrive long after they happened: they are kept and shown, and close no node that works today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_bucket
from drover_collector.engine.engine import LAG_MS, Engine, Outcome
from drover_collector.engine.replay import replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Event,
    EventKind,
    Incident,
    RecommendedAction,
    Severity,
)
from testbed.detecting import only

INDEX = small_fleet(12)
HOUR_MS = 3_600_000
CLOSING = {RecommendedAction.DRAIN, RecommendedAction.ISOLATE}
NOW_MS = START_MS + 62_000
ERRORS = {
    "xid": (EventKind.XID, "79", 2),
    "sxid": (EventKind.SXID, "12028", None),
    "kernel": (EventKind.KERNEL, "panic", None),
    "gpu lost": (EventKind.LIFECYCLE, "gpu_lost", 2),
    "driver hung": (EventKind.LIFECYCLE, "driver_hung", None),
}
MESSAGES = {"12028": "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress", "panic": "Kernel panic"}


def error(kind: str, age_ms: int, node: str = "n01", **more: object) -> Event:
    what, code, gpu = ERRORS[kind]
    ts_ms = NOW_MS - age_ms
    made = Event(f"{node}/{code}", ts_ms, node, gpu, what, code, MESSAGES.get(code, f"Xid {code}"), received_ms=NOW_MS)
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def enforced(policy: str) -> Engine:
    of_errors = only("kernel", "liveness", "xid")  # test_a_replay_judges_the_same has all detectors
    return Engine(INDEX, replace(Policy.named(policy), mode="enforce"), START_MS, of_errors, "enforce")


def feed(engine: Engine, numbers: Sequence[int]) -> list[Outcome]:
    buckets = [training_bucket(INDEX, n) for n in numbers]
    return [engine.on_bucket(bucket, bucket.end_ms + LAG_MS) for bucket in buckets]


def closings(outcomes: Sequence[Outcome]) -> set[tuple[str, str]]:
    return {(d.node, d.outcome) for o in outcomes for d in o.decisions if d.wanted in CLOSING}


def worst(incidents: Sequence[Incident]) -> set[Severity]:
    return {i.severity for i in incidents}


@pytest.mark.parametrize("policy", ["nvidia", "strict", "cautious"])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_night_closes_no_node_that_works_today(kind: str, policy: str) -> None:
    engine = enforced(policy)
    outcomes = feed(engine, range(6))
    outcomes.append(engine.on_events([error(kind, 9 * HOUR_MS)], NOW_MS))
    outcomes += feed(engine, range(6, 30))
    assert closings(outcomes) == set()
    assert worst([i for o in outcomes for i in o.incidents]) <= {Severity.INFO}


@pytest.mark.parametrize("kind", ["xid", "sxid", "gpu lost", "driver hung"])
def test_one_of_some_minutes_ago_is_acted_on(kind: str) -> None:
    """As after a short stop of the collector or of the network: nobody has mended it."""
    engine = enforced("nvidia")
    outcomes = feed(engine, range(3))
    event = error(kind, 0, received_ms=NOW_MS + 600_000)
    outcomes.append(engine.on_events([event], NOW_MS + 600_000))
    assert closings(outcomes) == {("n01", "act")}


def test_the_hour_counts_to_the_moment_of_judging_for_what_a_crash_left() -> None:
    received = error("xid", 1_000)
    for waited_ms, expected in ((180_000, {("n01", "act")}), (2 * HOUR_MS, set())):
        engine = enforced("nvidia")
        assert closings([engine.on_events([received], NOW_MS + waited_ms)]) == expected


def test_a_wrong_clock_of_the_node_makes_no_history_of_a_fresh_fault() -> None:
    engine = enforced("nvidia")
    event = error("xid", 9 * HOUR_MS, clock_suspect=True)
    assert closings([engine.on_events([event], NOW_MS)]) == {("n01", "act")}
    later = enforced("nvidia")  # left by a crash: what it is sure of is when it was received
    assert closings([later.on_events([event], NOW_MS + 2 * HOUR_MS)]) == set()


def test_a_replay_judges_the_same() -> None:
    buckets = [training_bucket(INDEX, n) for n in range(30)]
    outcomes = list(replay(INDEX, buckets, [error("xid", 9 * HOUR_MS)], Policy.named("nvidia")))
    assert closings(outcomes) == set()
    assert worst([i for o in outcomes for i in o.incidents]) == {Severity.INFO}


def test_after_a_restart_it_is_still_history() -> None:
    """A start reads again the events of the last hour by the node's clock: of a late one nothing may be held back."""
    engine = enforced("nvidia")
    engine.restore([], [training_bucket(INDEX, n) for n in range(6)], [error("xid", 2 * HOUR_MS)])
    assert closings(feed(engine, range(6, 30))) == set()


@pytest.mark.parametrize("kind", ["gpu lost", "driver hung"])
def test_a_fault_that_lasts_is_found_though_its_word_is_old(kind: str) -> None:
    """The GPU gives nothing now: what agents report of a state holds until a value says otherwise."""
    engine = enforced("nvidia")

    def away(_number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        for values in gpu.values():
            values[10 if kind == "gpu lost" else slice(8, 16)] = np.nan  # GPU 2 of n01, or all of its GPUs

    def bucket(number: int) -> Outcome:
        made = training_bucket(INDEX, number, away)
        return engine.on_bucket(made, made.end_ms + LAG_MS)

    outcomes = [bucket(n) for n in range(6)]
    outcomes.append(engine.on_events([error(kind, 2 * HOUR_MS)], NOW_MS))
    assert closings(outcomes) == set()
    outcomes += [bucket(n) for n in range(6, 9)]
    assert closings(outcomes) == {("n01", "act")}


@pytest.mark.parametrize("kind", ["xid", "gpu lost", "driver hung"])
@pytest.mark.parametrize("gone", [False, True], ids=["answers now", "gone now"])
def test_a_gpu_that_answers_now_proves_that_an_error_of_minutes_ago_is_over(kind: str, gone: bool) -> None:
    """Its node was rebooted, or the GPU reset, within the hour that a fault may be late."""
    engine = enforced("nvidia")

    def away(_number: int, gpu: dict[str, np.ndarray], _node: dict[str, np.ndarray]) -> None:
        for values in gpu.values():
            if gone:
                values[10 if kind != "driver hung" else slice(8, 16)] = np.nan

    outcomes = []
    for n in range(120, 124):
        made = training_bucket(INDEX, n, away)
        outcomes.append(engine.on_bucket(made, made.end_ms + LAG_MS))
    now_ms = made.end_ms + LAG_MS + 500
    outcomes.append(engine.on_events([error(kind, 0, received_ms=now_ms)], now_ms))
    assert closings(outcomes) == ({("n01", "act")} if gone else set())


def test_a_value_of_before_the_error_or_of_the_same_minute_proves_nothing() -> None:
    engine = enforced("nvidia")
    feed(engine, range(6))
    now_ms = NOW_MS + 120_000
    assert closings([engine.on_events([error("xid", 30_000, received_ms=now_ms)], now_ms)]) == {("n01", "act")}


def booted(boot: str, at_ms: int, node: str = "n01") -> Event:
    return Event(
        f"{node}/{boot}", at_ms, node, None, EventKind.LIFECYCLE, "agent_started", "", received_ms=at_ms, boot=boot
    )


@pytest.mark.parametrize("kind", ["xid", "sxid", "kernel", "gpu lost", "driver hung"])
@pytest.mark.parametrize("rebooted", [False, True])
def test_what_a_crash_left_over_is_history_once_its_node_has_booted(kind: str, rebooted: bool) -> None:
    engine = enforced("nvidia")
    before = booted("A", NOW_MS - 30_000)
    engine.restore([], [training_bucket(INDEX, n) for n in range(3)], [before])
    now_ms = NOW_MS + 600_000
    outcomes = [engine.on_events([booted("B" if rebooted else "A", now_ms)], now_ms)]
    outcomes.append(engine.on_events([error(kind, 1_000, boot="A")], now_ms))
    outcomes += feed(engine, range(66, 70))
    expected = set() if rebooted or kind == "kernel" else {("n01", "act")}
    assert closings(outcomes) == expected
    found = worst([i for o in outcomes for i in o.incidents])
    assert (found <= {Severity.INFO}) is rebooted


def test_a_second_start_makes_no_fault_of_what_the_first_one_judged_as_history() -> None:
    """The stored event looks fresh; that its node booted since is known by the events after it."""
    left = error("sxid", 1_000, boot="A")  # values of a GPU prove nothing about it
    events = [booted("A", NOW_MS - 30_000), left, booted("B", NOW_MS + 600_000)]
    engine = enforced("nvidia")
    engine.restore([], [training_bucket(INDEX, n) for n in range(66, 70)], events)
    assert closings(feed(engine, range(70, 74))) == set()
    other = enforced("nvidia")  # the same without a boot: the run that stopped held it back
    other.restore([], [training_bucket(INDEX, n) for n in range(66, 70)], events[:2])
    assert closings(feed(other, range(70, 74))) == {("n01", "act")}


def test_an_error_of_the_boot_that_goes_on_is_no_history() -> None:
    engine = enforced("nvidia")
    feed(engine, range(3))
    engine.on_events([booted("A", NOW_MS - 5_000)], NOW_MS - 5_000)
    engine.on_events([booted("B", NOW_MS - 2_000)], NOW_MS - 2_000)
    assert closings([engine.on_events([error("xid", 0, boot="B")], NOW_MS)]) == {("n01", "act")}

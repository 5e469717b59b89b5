"""A replay gives what the live run gave, copes with poor data, and says what it could not judge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from drover_collector.detectors._lib.robust import Bools
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.engine.replay import replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import Event, Severity
from drover_simulator.faults import Fault, demo_faults
from testbed.simulated_buckets import Recording, newest, record

POLICY = Policy.load()
FAULTS = [
    Fault("straggler", "power_cap", "r01n02", 4, 60.0, None, 0.25),
    Fault("xid", "fallen_off_bus", "r02n03", 1, 90.0, None),
    Fault("memory", "row_remap_failure", "r02n05", 0, 100.0, None),
]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(1500, 5, lambda spec: FAULTS, nodes=16)


@pytest.fixture(scope="module")
def demo() -> Recording:
    return record(1502, 7, lambda spec: demo_faults(spec, 1502), nodes=16)


def incidents(recording: Recording) -> dict[str, tuple[str, str, str | None, int | None, int]]:
    found = newest(
        [i for o in replay(recording.index, recording.buckets, recording.events, POLICY) for i in o.incidents]
    )
    return {i.id: (i.kind, i.cause, i.node, i.gpu, i.opened_ms) for i in found.values() if i.severity != Severity.INFO}


def test_a_replay_gives_the_live_runs_incidents(recording: Recording) -> None:
    live = Engine(recording.index, POLICY, recording.buckets[0].start_ms)
    reported = []
    events: list[Event] = list(recording.events)
    for bucket in recording.buckets:  # live, events come one after the other, some milliseconds late
        while events and events[0].ts_ms <= bucket.end_ms + LAG_MS:
            event = events.pop(0)
            reported += live.on_events([event], event.ts_ms + 30).incidents
        reported += live.on_bucket(bucket, bucket.end_ms + LAG_MS).incidents
    wanted = {
        (i.id, i.kind, i.cause, i.node, i.gpu) for i in newest(reported).values() if i.severity is not Severity.INFO
    }
    assert {(id_, *rest[:4]) for id_, rest in incidents(recording).items()} == wanted
    assert len(wanted) == 3


def test_a_replay_is_the_same_twice_and_the_order_of_events_in_the_file_does_not_matter(recording: Recording) -> None:
    shuffled = dataclasses.replace(recording, events=list(reversed(recording.events)))
    assert incidents(recording) == incidents(recording) == incidents(shuffled)


def test_gaps_do_not_raise_anything() -> None:
    quiet = record(1501, 6, nodes=8)
    gappy = dataclasses.replace(quiet, buckets=[b for n, b in enumerate(quiet.buckets) if n not in range(9, 20)])
    assert incidents(gappy) == {}


def blanked(recording: Recording, late: Bools) -> Recording:
    """The buckets as a collector has them that gets rows of some nodes too late: `late` [T, N]."""
    index, buckets = recording.index, []
    link_node = np.repeat(np.arange(index.node_count), [len(node.links) for node in index.nodes])
    for bucket, nodes in zip(recording.buckets, late, strict=True):
        nodes = nodes & (bucket.node_rows > 0)
        kept = {
            what: {name: np.where(nodes[of], np.nan, values) for name, values in getattr(bucket, what).items()}
            for what, of in (("gpu", index.gpu_node), ("node", np.arange(index.node_count)), ("link", link_node))
        }
        rows = {"gpu_rows": bucket.gpu_rows * ~nodes[index.gpu_node], "node_rows": bucket.node_rows * ~nodes}
        names = frozenset(index.nodes[n].name for n in np.flatnonzero(nodes).tolist())
        buckets.append(dataclasses.replace(bucket, late=names, **kept, **rows))
    return dataclasses.replace(recording, buckets=buckets)


OF_DROVER = {"no_telemetry", "gap_in_telemetry"}  # that it received too little itself: blames nobody, drains nobody


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_come_late_give_no_other_cause_and_no_second_incident(demo: Recording, seed: int) -> None:
    rng = np.random.default_rng([1502, seed])
    late = np.zeros((len(demo.buckets), demo.index.node_count), bool)
    for n in range(demo.index.node_count):  # each node for 1 to 8 buckets at a time, and none for a moment
        for start in rng.integers(0, len(late), 2).tolist():
            late[start : start + int(rng.integers(1, 9)), n] = True
    late[20] = True
    found, punctual = (
        sorted(entry[:4] for entry in incidents(recorded).values() if entry[1] not in OF_DROVER)
        for recorded in (blanked(demo, late), demo)
    )
    assert set(found) <= set(punctual)
    assert len(found) == len(set(found))
    assert len(punctual) == 5


def test_half_of_the_columns_still_find_what_they_can_and_the_rest_is_named(recording: Recording) -> None:
    keep = ("sm_clock_mhz", "power_w", "power_limit_w", "clock_event_reasons")
    poor = [
        dataclasses.replace(b, gpu={k: v for k, v in b.gpu.items() if k in keep}, node={}, link={})
        for b in recording.buckets
    ]
    run = replay(recording.index, poor, recording.events, POLICY)
    found = newest([i for outcome in run for i in outcome.incidents])
    causes = {i.cause for i in found.values()}
    assert {"power_cap", "xid_79", "xid_64"} <= causes
    missing = "\n".join(run.could_not_judge())
    for word in ("row_remap_failed", "sm_active_ratio", "inlet_temp_c", "rate_gbps"):
        assert word in missing


def test_events_alone_are_judged_too(recording: Recording) -> None:
    run = replay(recording.index, [], recording.events, POLICY)
    causes = {i.cause for outcome in run for i in outcome.incidents}
    assert {"xid_79", "xid_64"} <= causes
    assert run.could_not_judge() == ["anything: the case has no telemetry"]

"""XID patterns that made other tools drain healthy nodes (NVSentinel issues 1710, 1629, 1120), in the whole engine:
application faults alone and with their cause, a job's crash on 77 nodes, a storm of 800,000 lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest

from drover_agent.sources.base import NodeEvent
from drover_agent.telemetry.event_dedup import WINDOW_MS, EventMerger
from drover_collector.detectors._lib.examples import START_MS, small_fleet, training_columns
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Decision,
    Event,
    EventKind,
    Finding,
    Incident,
    RecommendedAction,
    Severity,
)

HOUR = 3_600_000
STEP = 60  # buckets from one that is played to the next, where no event comes: ten minutes
LEAVES_SERVICE = (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)


class Fleet:
    """An engine over a fleet in training, in jobs of 32 nodes or without jobs, and all its results."""

    def __init__(self, nodes: int, gpus: int = 8, jobs: str = "32") -> None:
        self.index: FleetIndex = small_fleet(nodes, gpus, 8)
        self.engine = Engine(self.index, Policy.named("nvidia"), START_MS)
        of_node = {"32": self.index.gpu_node // 32, "one": 0 * self.index.gpu_node, "none": 0 * self.index.gpu_node - 1}
        self.jobs = of_node[jobs].astype(np.int32)
        self.job_names = tuple(f"job{n}" for n in range(int(self.jobs.max()) + 1))
        self.decisions: list[Decision] = []
        self.findings: list[Finding] = []
        self.bucket(0)

    def bucket(self, number: int) -> None:
        gpu, node = training_columns(self.index, number)
        rows = np.full(self.index.node_count, 10, np.int32)
        bucket = Bucket(
            START_MS + number * BUCKET_MS, BUCKET_MS, gpu, node, rows[self.index.gpu_node], rows, self.jobs,
            self.job_names,
        )  # fmt: skip
        self._take(self.engine.on_bucket(bucket, bucket.end_ms + LAG_MS))

    def play(self, events: Sequence[Event]) -> None:
        """Events at their time, buckets between them now and then, and two after."""
        number = 1
        for at_ms, together in groupby(sorted(events, key=lambda e: e.ts_ms), lambda e: e.ts_ms):
            while START_MS + (number + 1) * BUCKET_MS + LAG_MS < at_ms:
                self.bucket(number)
                number += STEP
            self._take(self.engine.on_events(list(together), at_ms))
        self.bucket(number + 1)
        self.bucket(number + 7)

    def _take(self, outcome: object) -> None:
        self.decisions += outcome.decisions  # type: ignore[attr-defined]  # an Outcome of the engine
        self.findings += outcome.findings  # type: ignore[attr-defined]  # as above

    @property
    def incidents(self) -> list[Incident]:
        return list(self.engine.incidents.values())

    def drained(self) -> set[str]:
        """Nodes that a decision or an incident would take out of service."""
        wanted = {d.node for d in self.decisions if d.wanted in LEAVES_SERVICE}
        return wanted | {i.node or "" for i in self.incidents if i.action in LEAVES_SERVICE}

    def loud(self) -> list[Finding]:
        return [f for f in self.findings if f.severity is not Severity.INFO and not f.cleared]


def xid(code: int, node: str, gpu: int, at_ms: int, count: int = 1, text: str = "") -> Event:
    text = text or f"NVRM: Xid (PCI:0000:{0x10 + gpu:02x}:00): {code}, pid=1"
    return Event(
        f"{node}/{gpu}/{code}/{at_ms}", START_MS + at_ms, node, gpu, EventKind.XID, str(code), text, count=count
    )


@pytest.mark.parametrize("jobs", ["32", "none"])
def test_672_lines_of_xid_45_alone_on_288_nodes_in_three_hours_alarm_nobody(jobs: str) -> None:
    fleet = Fleet(288, 1, jobs)
    rng = np.random.default_rng(1000)
    at = np.sort(rng.integers(1, 3 * 360, 672) * 10_000 + 30_000).tolist()
    fleet.play([xid(45, f"n{rng.integers(288):02d}", 0, at_ms) for at_ms in at])
    assert fleet.drained() == set()
    assert fleet.loud() == []
    assert fleet.findings  # they were seen, and noted


def test_xid_45_next_to_its_cause_drains_the_node_of_the_cause_and_no_other() -> None:
    fleet = Fleet(16)
    others = [(node.name, gpu) for node in fleet.index.nodes for gpu in range(8) if (node.name, gpu) != ("n07", 3)]
    fleet.play(
        [xid(79, "n07", 3, 40_000)] + [xid(45, node, gpu, 40_000 + 50 * n) for n, (node, gpu) in enumerate(others)]
    )
    assert fleet.drained() == {"n07"}
    assert {f.node for f in fleet.loud()} == {"n07"}


@pytest.mark.parametrize("codes", [(45,), (31, 43, 45)], ids=str)
@pytest.mark.parametrize("spread_ms", [2_000, 90_000], ids=["at once", "over 90 s"])
def test_a_job_that_crashes_on_77_nodes_is_a_note_and_flags_no_node(codes: tuple[int, ...], spread_ms: int) -> None:
    fleet = Fleet(80, 2, "one")
    rng = np.random.default_rng(1001)
    for again in range(2):  # it is started once more and crashes alike
        lines = [
            xid(code, f"n{node:02d}", gpu, 40_000 + again * HOUR + int(rng.integers(spread_ms // 500)) * 500)
            for node in range(77) for gpu in range(2) for code in codes
        ]  # fmt: skip
        fleet.play(lines)
    assert fleet.drained() == set()
    assert fleet.loud() == []
    assert any(i.cause == "job_crash" for i in fleet.incidents)


def test_a_storm_of_800_000_lines_is_one_node_that_is_drained_and_nothing_else() -> None:
    """29 distinct lines of XID 95, within 10 minutes, as the agent sums them up."""
    lines, span_ms, distinct = 800_000, 600_000, 29
    base = [
        NodeEvent(0, n % 8, EventKind.XID, "95", f"NVRM: Xid (PCI:0000:{0x10 + n % 8:02x}:00): 95, ch={n:08x}", "kmsg")
        for n in range(distinct)
    ]
    merger = EventMerger(expect_kernel_log=True)
    reported: list[NodeEvent] = []
    for second in range(span_ms // 1000):
        now_ms = START_MS + 40_000 + second * 1000
        of_now = [dataclasses.replace(event, ts_ms=now_ms) for event in base]
        for n in range(lines // (span_ms // 1000) + (lines % (span_ms // 1000) > second)):
            reported += merger.offer(of_now[n % distinct])
        reported += merger.due(now_ms + 999)
    reported += merger.flush()
    assert sum(event.count for event in reported) == lines
    assert len(reported) <= 8 * (span_ms // WINDOW_MS + 2)  # an event for each GPU and window: all that leaves the node

    fleet = Fleet(16)
    fleet.play(
        [
            Event(
                f"storm/{n}", event.ts_ms, "n05", event.gpu, event.kind, event.code, event.message, event.source,
                count=event.count,
            )
            for n, event in enumerate(reported)
        ]
    )  # fmt: skip
    assert fleet.drained() == {"n05"}  # XID 95 is an uncontained memory error: this one is rightly drained
    assert {f.node for f in fleet.loud()} == {"n05"}
    assert len([i for i in fleet.incidents if i.severity is not Severity.INFO]) <= 8
    assert len([d for d in fleet.decisions if d.wanted in LEAVES_SERVICE]) <= 2 * 8

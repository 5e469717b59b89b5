"""The book looks only where an incident may be: the same incidents as if it looked at each, with as many looks each."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from drover_collector.detectors._lib.examples import START_MS, small_fleet
from drover_collector.incidents.book import IncidentBook
from drover_collector.incidents.incident import Record
from drover_collector.incidents.index import IncidentIndex, Subject
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

INDEX = small_fleet(12)
NODES = [node.name for node in INDEX.nodes]
QUIET = {"straggler": 60_000, "thermal": 120_000, "memory": 300_000, "xid": None, "liveness": None, "hang": None}
CAUSES = {
    "straggler": ("power_cap", "nic", "host"), "thermal": ("cooling", "rack_hot"), "memory": ("remap_failed",),
    "xid": ("xid_79",), "link": ("xid_74",), "liveness": ("silent", "gpu_lost", "no_telemetry"), "hang": ("nccl",),
    "drift": ("driver",),
}  # fmt: skip


class Everywhere(IncidentIndex):
    """Looks at everything, each time."""

    def of_subject(self, subject: Subject) -> list[Record]:
        return self._all()

    def of_nodes(self, nodes: Iterable[str]) -> list[Record]:
        return self._all()

    def of_job(self, job: str) -> list[Record]:
        return self._all()

    def _all(self) -> list[Record]:
        return self._ordered([self._records])


class Counted(IncidentIndex):
    looked = 0

    def _ordered(self, found: Iterable[dict[str, Record]]) -> list[Record]:
        given = super()._ordered(found)
        self.looked += len(given)
        return given


def book(near: type[IncidentIndex]) -> IncidentBook:
    made = IncidentBook(INDEX, QUIET, lambda _incident, asked: asked)
    made._near = near(made.subject_of)
    return made


def some(chance: random.Random, at_ms: int) -> Finding:
    kind = chance.choice(list(CAUSES))
    scope = chance.choices(("gpu", "node", "job", "leaf", "rack"), (8, 4, 2, 1, 1))[0]
    nodes = chance.sample(NODES, 1 if scope in ("gpu", "node") else chance.randint(1, 6))
    slot = chance.randint(0, 3) if scope == "gpu" else None
    node = nodes[0] if scope in ("gpu", "node") else None
    cause = chance.choice(CAUSES[kind])
    return Finding(
        {"link": "xid"}.get(kind, kind),
        IncidentKind(kind),
        cause,
        scope,
        node,
        slot,
        tuple((n, slot) for n in nodes),
        at_ms,
        at_ms - chance.choice((0, 30_000, 200_000)),
        chance.choice(list(Severity)),
        round(chance.random(), 2),
        chance.choice(list(RecommendedAction)),
        f"{kind} {nodes}",
        "Look.",
        (Evidence(f"{cause} seen"),),
        job=chance.choice((None, "j1", "j2")) if scope != "job" else "j1",
        cleared=chance.random() < 0.2,
        lost_gpus=chance.choice((None, 1.0)),
    )


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_the_same_incidents_as_when_it_looks_everywhere(seed: int) -> None:
    chance = random.Random(seed)
    near, everywhere = book(IncidentIndex), book(Everywhere)
    incidents: list[Incident] = []
    for tick in range(120):
        now_ms = START_MS + tick * chance.choice((10_000, 10_000, 40_000))
        findings = [some(chance, now_ms) for _ in range(chance.choice((0, 1, 3, 8)))]
        changed = [b.apply(findings, now_ms, closing=tick % 2 == 0) for b in (near, everywhere)]
        assert changed[0] == changed[1]
        assert [r.incident for r in near.records.values()] == [r.incident for r in everywhere.records.values()]
        assert [r.holds for r in near.records.values()] == [r.holds for r in everywhere.records.values()]
        incidents = [r.incident for r in near.records.values()] or incidents
        if tick == 60:  # a restart
            for b in (near, everywhere):
                b.restore(incidents)
    assert len(incidents) > 10


def test_what_is_looked_at_grows_with_the_incidents_and_not_with_their_square() -> None:
    looks = []
    for nodes in (100, 400):
        index = small_fleet(nodes)
        made = IncidentBook(index, QUIET, lambda _incident, asked: asked)
        counted = made._near = Counted(made.subject_of)
        for tick in range(3):
            now_ms = START_MS + tick * 10_000
            found = [
                Finding(
                    "straggler", IncidentKind.STRAGGLER, "nic", "gpu", node.name, 0, ((node.name, 0),), now_ms, now_ms,
                    Severity.WARNING, 0.9, RecommendedAction.PROBE, "slow", "Look.", (Evidence("slow"),),
                )
                for node in index.nodes
            ]  # fmt: skip
            made.apply(found, now_ms, closing=True)
        assert len(made.open()) == nodes
        looks.append(counted.looked)
    assert 0 < looks[1] <= 4 * looks[0]


def test_what_is_forgotten_is_no_longer_looked_for() -> None:
    made = book(IncidentIndex)
    chance = random.Random(1000)
    for tick in range(50):
        made.apply([some(chance, START_MS + tick * 10_000)], START_MS + tick * 10_000, closing=True)
    for id_ in list(made.records):
        made._near.drop(made.records[id_])
    near = made._near
    assert not any((near._came, near._records, near._subjects, near._nodes, near._jobs, near._known))
